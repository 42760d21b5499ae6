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

from ebbtide.cli.demo_restart import lives
from ebbtide.engine.async_engine import AsyncEngine
from ebbtide.engine.config import DEFAULT_MODEL, MIB, EngineConfig
from ebbtide.engine.output import Usage
from ebbtide.params import SamplingParams

ANSWER_TOKENS = 20
POOL_TOKENS = 1600
HOST_BYTES = 512 * MIB
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
    kv_bytes = asyncio.run(_pool_bytes(console, model))
    with_tier = asyncio.run(_play(console, model, kv_bytes, True))
    without = asyncio.run(_play(console, model, kv_bytes, False))
    same = _compare(console, with_tier, without)
    return _restart(console, model, kv_bytes, without) and same


def _restart(console: Console, model: str, kv_bytes: int, without: list[Turn]) -> bool:
    """A server with a disk tier is killed after the first turns, and started again for the second."""
    console.print(
        "\nNow a server that keeps its KV on disk, too. After the first turns it is killed."
    )
    config = _config(model, HOST_BYTES, kv_bytes)
    arguments = ["--model", model, "--dtype", config.dtype, "--disk-size", "2GiB"]
    arguments += ["--kv-memory", str(kv_bytes), "--host-memory", str(HOST_BYTES)]
    arguments += ["--block-size", str(BLOCK_SIZE)]
    histories: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
    turns = []
    with lives(arguments) as servers, console.status("first turns") as status:
        for number in range(2):
            server = next(servers)
            for name in NAMES:
                question = TURNS[number]
                text = f"{document(name)}\n\n{question}" if number == 0 else question
                histories[name].append({"role": "user", "content": text})
                ttft_s, answer, usage = server.ask(histories[name], ANSWER_TOKENS)
                histories[name].append({"role": "assistant", "content": answer})
                turns.append(Turn(name, number + 1, ttft_s, answer, usage))
            server.settle()
            status.update("killed; starting again")
    table = _turn_table("After the restart: KV from disk", False, "file")
    for turn in turns[len(NAMES) :]:
        _add_row(table, turn)
    console.print(table)
    computed = [turn for turn in without if turn.number == 2]
    disk_s = statistics.median(turn.ttft_s for turn in turns[len(NAMES) :])
    computed_s = statistics.median(turn.ttft_s for turn in computed)
    same = [t.answer for t in turns] == [t.answer for t in without[: len(turns)]]
    console.print(
        f"First token of a second turn (median): {1000 * disk_s:,.0f} ms from disk, "
        f"{1000 * computed_s:,.0f} ms computed: {computed_s / disk_s:.1f}x."
    )
    return _say_same(console, same)


async def _pool_bytes(console: Console, model: str) -> int:
    """Of a pool that holds POOL_TOKENS. One block tells what a token takes."""
    with console.status("loading the model"):
        probe = _config(model, 0, 64 * MIB)
        engine = await asyncio.to_thread(AsyncEngine.start, probe)
        blocks = engine.stats().kv_blocks
        await engine.close()
    return probe.kv_bytes // blocks * (POOL_TOKENS // BLOCK_SIZE)


async def _play(console: Console, model: str, kv_bytes: int, host_tier: bool) -> list[Turn]:
    title = "[green]with[/green] a host tier" if host_tier else "[red]without[/red] a host tier"
    config = _config(model, HOST_BYTES if host_tier else 0, kv_bytes)
    with console.status("loading the model"):
        engine = await asyncio.to_thread(AsyncEngine.start, config)
    table = _turn_table(f"KV {title}", console.width >= WIDTH_FOR_ANSWERS, "host")
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


def _turn_table(title: str, answers: bool, tier: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("conversation", no_wrap=True)
    table.add_column("turn", justify="right")
    table.add_column("first token", justify="right")
    for source in ("prompt", "device", tier, "computed"):
        table.add_column(source, justify="right")
    if answers:
        table.add_column("answer", max_width=38, no_wrap=True, overflow="ellipsis")
    return table


def _add_row(table: Table, turn: Turn) -> None:
    usage = turn.usage
    below = usage.host + sum(usage.tiers.values())
    counts = (usage.prompt_tokens, usage.device, below, usage.computed)
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
    return _say_same(console, same)


def _say_same(console: Console, same: bool) -> bool:
    if same:
        console.print("[green]The answers of both runs are identical.[/green]")
    else:
        console.print("[red]The answers differ: that is a bug. Please report it.[/red]")
    return same
