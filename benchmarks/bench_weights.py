"""What each form of the weights costs in memory and gives in speed, with compiled kernels and without:
``--weights`` and ``--kernels`` of the engine.

Each form has a process of its own; one round of each is measured after the other, several times. Memory is
all that the process has after the model was built; the KV blocks, the same in all, are not yet in use.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from bench_model import BLOCK_SIZE, PROMPT_TOKENS, STEPS, Remote, random_prompts
from ebbtide.models.checkpoint import Form
from ebbtide.models.load import DEFAULT_MODEL

FORMS = {"auto": Form.BOTH, "packed": Form.PACKED, "bfloat16": Form.WIDE}
KERNELS = ("native", "torch")
BATCHES = (1, 2, 4, 8, 16, 32)
PREFILL_TOKENS = 512
VOCAB = 30_000  # that prompts are drawn from


def measure(ours: Remote) -> dict[str, float]:
    """ms per step"""
    prompt = random_prompts(VOCAB, 1, PREFILL_TOKENS)
    ours("prefill", prompt)
    found = {f"prefill {PREFILL_TOKENS}": ours("prefill", prompt) * 1e3}
    for batch in BATCHES:
        ours("prefill", random_prompts(VOCAB, batch, PROMPT_TOKENS))
        ours("decode", 2)
        found[f"decode {batch}"] = ours("decode", STEPS) / STEPS * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    args = parser.parse_args()
    blocks = max(BATCHES) * ((PROMPT_TOKENS + 2 * STEPS) // BLOCK_SIZE + 1)
    engines = {
        f"{name}, {kernels}": Remote(form, args.model, args.threads, blocks, kernels)
        for kernels in args.kernels
        for name, form in FORMS.items()
    }
    memory = {name: engine("resident_mib") for name, engine in engines.items()}
    rounds = [{name: measure(e) for name, e in engines.items()} for _ in range(args.rounds)]
    for engine in engines.values():
        engine.close()
    cases = list(next(iter(rounds[0].values())))
    table = Table(title=f"ms per step, medians of {args.rounds} rounds, {args.threads} threads")
    for column in ("weights, kernels", "MiB", *cases):
        table.add_column(column, justify="left" if column == "weights, kernels" else "right")
    for name in engines:
        medians = [statistics.median(found[name][case] for found in rounds) for case in cases]
        table.add_row(name, f"{memory[name]:.0f}", *(f"{value:.1f}" for value in medians))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
