"""Do we give the tokens that an independent implementation gives? In float32, on the real model.

    python benchmarks/parity.py [--quick] [--model FILE_OR_DIRECTORY]

Greedy tokens of transformers, computed one prompt at a time without any paging, are compared with
ours: alone, in batches of mixed lengths, with several prefill chunk and block sizes, and with every
prompt preempted once and its KV loaded back from host memory. Log-probabilities are compared too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ebbtide.core.request import Drain
from ebbtide.core.scheduler import Scheduler
from ebbtide.engine.config import DEFAULT_MODEL, MIB
from ebbtide.engine.llm import LLM, Completion
from ebbtide.models.load import load_checkpoint
from ebbtide.params import SamplingParams
from reference import transformers_model

OUTPUT_TOKENS = 64
LOGPROBS = 5
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 64, 65, 100, 127, 200, 256, 333, 400, 512, 700, 1000, 1500)
Reference = list[tuple[list[int], list[dict[int, float]]]]


def prompts(tokenizer: object) -> list[list[int]]:
    """One prompt per length, out of this repository's own prose and code."""
    root = Path(__file__).resolve().parents[1]
    files = sorted((root / "src").rglob("*.py"))
    text = "\n".join(path.read_text() for path in files)
    ids = tokenizer.encode(text[:60_000])  # type: ignore[attr-defined]
    step = (len(ids) - max(LENGTHS)) // len(LENGTHS)
    return [ids[i * step : i * step + length] for i, length in enumerate(LENGTHS)]


def reference(
    model_name: str, all_prompts: Sequence[Sequence[int]], progress: Progress
) -> Reference:
    """Greedy tokens and the log-probabilities of all tokens' best few, by transformers."""
    model = transformers_model(load_checkpoint(model_name, torch.float32), torch.float32)
    results: Reference = []
    for prompt in progress.track(all_prompts, description="transformers"):
        tokens: list[int] = []
        logprobs: list[dict[int, float]] = []
        fed = torch.tensor([list(prompt)])
        cache = None
        with torch.inference_mode():
            while len(tokens) < OUTPUT_TOKENS:
                out = model(fed, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                scores = torch.log_softmax(out.logits[0, -1].float(), -1)
                top = scores.topk(LOGPROBS)
                tokens.append(int(top.indices[0]))
                logprobs.append(dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
                fed = torch.tensor([[tokens[-1]]])
        results.append((tokens, logprobs))
    return results


@contextmanager
def engine(**settings: object) -> Iterator[LLM]:
    options: dict[str, object] = {
        "dtype": "float32",
        "kv_bytes": 512 * MIB,
        "host_bytes": 512 * MIB,
        "max_length": 2048,
    }
    with LLM(**{**options, **settings}) as llm:  # type: ignore[arg-type]
        yield llm


def run(llm: LLM, all_prompts: Sequence[Sequence[int]], batch: int) -> list[Completion]:
    params = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=LOGPROBS
    )
    done: list[Completion] = []
    for at in range(0, len(all_prompts), batch):
        done += llm.generate(list(all_prompts[at : at + batch]), params)
    return done


def preempt_each_once(scheduler: Scheduler) -> None:
    """Have every request preempted once, half-way through its output, with its device KV forgotten."""
    apply = scheduler.apply
    preempted: set[str] = set()

    def applying(plan, outcome):  # type: ignore[no-untyped-def]
        outputs = apply(plan, outcome)
        for request in list(scheduler.requests.values()):
            half = request.prompt_length + OUTPUT_TOKENS // 2
            if request.id not in preempted and len(request.tokens) >= half and request.tables:
                preempted.add(request.id)
                scheduler._preempt(request)
                assert request.drain in (Drain.NO, Drain.PREEMPTED)
                scheduler.kv.pool.unpublish_all()
        return outputs

    scheduler.apply = applying  # type: ignore[method-assign]


def compare(completions: Sequence[Completion], expected: Reference) -> tuple[int, float]:
    """How many prompts have the same tokens, and the largest difference of a log-probability."""
    same, worst = 0, 0.0
    for completion, (tokens, logprobs) in zip(completions, expected, strict=True):
        if completion.token_ids != tokens:
            continue
        same += 1
        for ours, theirs in zip(completion.logprobs, logprobs, strict=True):
            for token, value in ours.top:
                if token in theirs:
                    worst = max(worst, abs(value - theirs[token]))
    return same, worst


def cases(quick: bool) -> list[tuple[str, dict[str, object], int, bool]]:
    """Name, settings, batch size, preempt each once."""
    rows: list[tuple[str, dict[str, object], int, bool]] = [
        ("alone", {}, 1, False),
        ("batch of 8, chunks of 512, blocks of 16", {}, 8, False),
        ("batch of 8, two plans in flight", {"overlap": 2}, 8, False),
        ("batch of 8, each preempted once, back from host", {}, 8, True),
    ]
    if not quick:
        for chunk in (7, 64, 512):
            for block in (16, 32):
                name = f"batch of 8, chunks of {chunk}, blocks of {block}"
                rows.append((name, {"max_step_tokens": chunk, "block_size": block}, 8, False))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer combinations")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a Llama or a Gemma 3")
    arguments = parser.parse_args()
    model, quick = arguments.model, arguments.quick
    console = Console()
    table = Table("case", "same tokens", "largest logprob difference", "host tokens loaded")
    failed = False
    with Progress(console=console, transient=True) as progress:
        with engine(model=model) as llm:
            all_prompts = prompts(llm.tokenizer)
        expected = reference(model, all_prompts, progress)
        for name, settings, batch, preempted in progress.track(cases(quick), description="ours"):
            with engine(model=model, **settings) as llm:
                if preempted:
                    llm._engine._loop.inspect(preempt_each_once)
                completions = run(llm, all_prompts, batch)
                loaded = llm.stats().transfer_bytes["load"]
            same, worst = compare(completions, expected)
            failed = failed or same < len(all_prompts) or worst > 1e-3
            table.add_row(
                name, f"{same}/{len(all_prompts)}", f"{worst:.1e}", f"{loaded / MIB:.0f} MiB"
            )
    console.print(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
