"""What each form of the weights costs in memory and gives in speed: ``--weights`` of the engine.

Each form has a process of its own, and one round of each is measured after the other, several times. Memory
is what the process has grown by from before the file was read to the model being ready.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench_model import BLOCK_SIZE, PROMPT_TOKENS, Ours, random_prompts
from ebbtide.models.checkpoint import Form
from ebbtide.models.load import DEFAULT_MODEL, load_checkpoint

FORMS = {"auto": Form.BOTH, "packed": Form.PACKED, "bfloat16": Form.WIDE}
BATCHES = (1, 2, 4, 8, 16, 32)
PREFILL_TOKENS = 512
STEPS = 12
ROUNDS = 3


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(connection: Connection, form: Form, model: str, threads: int) -> None:
    """Load the model; then answer each message with a round's numbers, until None comes."""
    torch.set_num_threads(threads)
    positions = PROMPT_TOKENS + STEPS * (ROUNDS + 2)
    blocks = max(BATCHES) * (positions // BLOCK_SIZE + 1)
    before = resident()
    ours = Ours(load_checkpoint(model, torch.bfloat16, form=form), blocks)
    memory = resident() - before
    vocab = ours.model.config.vocab_size
    connection.send(memory)
    while connection.recv() is not None:
        prompt = random_prompts(vocab, 1, PREFILL_TOKENS)
        ours.prefill(prompt)
        numbers = {"prefill": ours.prefill(prompt)}
        for batch in BATCHES:
            ours.prefill(random_prompts(vocab, batch, PROMPT_TOKENS))
            ours.decode(2)
            numbers[f"decode {batch}"] = ours.decode(STEPS) / STEPS
        connection.send(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    memory: dict[str, int] = {}
    for name, form in FORMS.items():
        ends[name], child = context.Pipe()
        arguments = (child, form, args.model, args.threads)
        context.Process(target=serve, args=arguments, daemon=True).start()
        memory[name] = ends[name].recv()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in FORMS}
    for _ in range(ROUNDS):
        for name, end in ends.items():
            end.send("round")
            rounds[name].append(end.recv())
    table = Table(title=f"ms per step, medians of {ROUNDS} rounds, {args.threads} threads")
    table.add_column("weights")
    table.add_column("MiB", justify="right")
    cases = list(rounds["auto"][0])
    for case in cases:
        table.add_column(case, justify="right")
    for name, numbers in rounds.items():
        medians = [statistics.median(n[case] for n in numbers) * 1e3 for case in cases]
        table.add_row(name, f"{memory[name] / 2**20:.0f}", *(f"{value:.1f}" for value in medians))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
