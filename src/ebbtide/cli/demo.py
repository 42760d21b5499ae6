"""``ebbtide demo``: what a host tier does for conversations that do not fit the device, in two minutes.

Four long conversations take turns on a pool that holds little more than one of them. With the host
tier, a conversation's KV flows back when its turn comes; without, its prompt is computed again. Both
runs are greedy and in float32, so that their answers must be the same to the letter.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import DEFAULT_MODEL, MIB, EngineConfig
from ebbtide.engine.output import Usage
from ebbtide.params import SamplingParams

ANSWER_TOKENS = 20
POOL_TOKENS = 1600
BLOCK_SIZE = 16
WIDTH_FOR_ANSWERS = 115  # columns of a terminal that has room for a table with the answers in it
NAMES = ("harbour", "kitchen", "observatory", "orchard")
TURNS = (
    "What happened on day 3? Answer in one short sentence.",
    "And who was on duty on day 5?",
    "Which day was the busiest, and why?",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. ``ttft_s``: time to first token, in seconds."""

    conversation: str
    number: int
    ttft_s: float
    answer: str
    usage: Usage


def document(name: str) -> str:
    """A log of a place, some 900 tokens long; the same every time."""
    people = ("Ada", "Bruno", "Chidi", "Dalia", "Emre", "Fenna", "Goro")
    events = {
        "harbour": ("a tug brought in a barge of timber", "fog closed the eastern channel"),
        "kitchen": ("the bread oven was lit before dawn", "a crate of lemons came from the coast"),
        "observatory": ("the great mirror was washed", "clouds hid the comet all night"),
        "orchard": ("the first pears were picked", "wasps were found in the cider press"),
    }[name]
    lines = [f"This is the log of the {name}, kept by its staff."]
    for day in range(1, 19):
        who, helper = people[day % 7], people[(day * 3 + 1) % 7]
        count = (day * 37 + len(name)) % 90 + 10
        lines.append(
            f"Day {day}: {who} was on duty, and {helper} helped. In the morning {events[day % 2]}; "
            f"{count} visitors came, {count // 3} of them before noon, and "
            f"{people[(day + 2) % 7]} wrote down all their names."
        )
    return "\n".join(lines)


def _config(model: str, host_bytes: int, kv_bytes: int) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_bytes=kv_bytes,
        host_bytes=host_bytes,
    )


def run_demo(model: str = DEFAULT_MODEL, console: Console | None = None) -> bool:
    """Run the demo; whether both runs gave the same answers. Raises InputError."""
    console = console or Console()
    console.print(
        f"[bold]Ebbtide[/bold]: {len(NAMES)} conversations take {len(TURNS)} turns each. "
        f"Each is about {POOL_TOKENS * 2 // 3:,} tokens long; "
        f"the KV pool on the device holds {POOL_TOKENS:,}.\n"
        "Greedy, float32, one request at a time.\n"
    )
    with_tier = asyncio.run(_play(console, model, True))
    without = asyncio.run(_play(console, model, False))
    return _compare(console, with_tier, without)


async def _play(console: Console, model: str, host_tier: bool) -> list[Turn]:
    title = "[green]with[/green] a host tier" if host_tier else "[red]without[/red] a host tier"
    engine = await _start(console, model, host_tier)
    table = _turn_table(f"KV {title}", console.width >= WIDTH_FOR_ANSWERS)
    total = len(NAMES) * len(TURNS)
    turns = []
    try:
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("conversations take turns", total=total)
            histories: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
            for number, question in enumerate(TURNS):
                for name in NAMES:
                    text = f"{document(name)}\n\n{question}" if number == 0 else question
                    histories[name].append({"role": "user", "content": text})
                    turn = await _take_turn(engine, name, number, histories[name])
                    histories[name].append({"role": "assistant", "content": turn.answer})
                    turns.append(turn)
                    _add_row(table, turn)
                    progress.advance(bar)
    finally:
        await engine.close()
    console.print(table)
    return turns


async def _start(console: Console, model: str, host_tier: bool) -> AsyncEngine:
    with console.status("loading the model"):
        # The pool is sized in tokens here: one block tells what a token takes.
        probe = _config(model, 0, 64 * MIB)
        engine = await asyncio.to_thread(AsyncEngine.start, probe)
        blocks = engine.stats().kv_blocks
        await engine.close()
        kv_bytes = probe.kv_bytes // blocks * (POOL_TOKENS // BLOCK_SIZE)
        host_bytes = 512 * MIB if host_tier else 0
        return await asyncio.to_thread(AsyncEngine.start, _config(model, host_bytes, kv_bytes))


async def _take_turn(
    engine: AsyncEngine, name: str, number: int, history: list[dict[str, str]]
) -> Turn:
    tokens = engine.tokenizer.encode_chat(history)
    start = time.perf_counter()
    ttft_s = 0.0
    answer = ""
    usage = None
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    async for delta in engine.generate(tokens, params):
        if not ttft_s:
            ttft_s = time.perf_counter() - start
        answer += delta.text
        usage = delta.usage or usage
    assert usage is not None
    return Turn(name, number + 1, ttft_s, answer, usage)


def _turn_table(title: str, answers: bool) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("conversation", no_wrap=True)
    table.add_column("turn", justify="right")
    table.add_column("first token", justify="right")
    for source in ("prompt", "device", "host", "computed"):
        table.add_column(source, justify="right")
    if answers:
        table.add_column("answer", max_width=38, no_wrap=True, overflow="ellipsis")
    return table


def _add_row(table: Table, turn: Turn) -> None:
    usage = turn.usage
    counts = (usage.prompt_tokens, usage.device, usage.host, usage.computed)
    answer = [" ".join(turn.answer.split())] if table.columns[-1].header == "answer" else []
    table.add_row(
        turn.conversation,
        str(turn.number),
        f"{turn.ttft_s * 1000:,.0f} ms",
        *(f"{count:,}" if count else "-" for count in counts),
        *answer,
        end_section=turn.conversation == NAMES[-1],
    )


def _compare(console: Console, with_tier: list[Turn], without: list[Turn]) -> bool:
    def ttft_ms(turns: list[Turn], later: bool) -> float:
        return 1000 * statistics.median(t.ttft_s for t in turns if (t.number > 1) == later)

    def computed(turns: list[Turn]) -> int:
        return sum(turn.usage.computed for turn in turns)

    same = [t.answer for t in with_tier] == [t.answer for t in without]
    table = Table(title="The difference", title_justify="left", box=SIMPLE)
    for column in ("", "with", "without", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    rows = (
        ("first token, first turns (median)", ttft_ms(with_tier, False), ttft_ms(without, False)),
        ("first token, later turns (median)", ttft_ms(with_tier, True), ttft_ms(without, True)),
        ("prompt tokens computed", computed(with_tier), computed(without)),
    )
    for label, ours, theirs in rows:
        unit = "" if label.startswith("prompt") else " ms"
        table.add_row(label, f"{ours:,.0f}{unit}", f"{theirs:,.0f}{unit}", f"{theirs / ours:.1f}x")
    console.print(table)
    if same:
        console.print("[green]The answers of both runs are identical.[/green]")
    else:
        console.print("[red]The answers differ: that is a bug. Please report it.[/red]")
    return same
