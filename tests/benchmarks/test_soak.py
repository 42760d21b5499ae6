"""What the soak calls wrong is noticed, and what it does to files is done."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

OURS = ("soak", "soak_server", "soak_faults", "conversations", "tier_sides")


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import soak
    import soak_faults
    import soak_server

    yield SimpleNamespace(run=soak, faults=soak_faults, server=soak_server)
    for name in OURS:
        sys.modules.pop(name, None)


def life(soak: Any, rss: Any, files: Any = lambda n: 40, threads: Any = lambda n: 30) -> list[Any]:
    return [soak.server.Sample(int(rss(n)), int(files(n)), int(threads(n))) for n in range(100)]


def test_what_grows_all_the_time_is_growth_and_what_levels_off_is_not(soak) -> None:
    mib = 1 << 20
    assert soak.server.growth(life(soak, lambda n: 900 * mib + min(n, 20) * 30 * mib)) == []
    assert soak.server.growth(life(soak, lambda n: (900 + n % 7) * mib)) == []
    (grown,) = soak.server.growth(life(soak, lambda n: (900 + n) * mib))
    assert grown == "937 MiB of RSS became 987"
    (grown,) = soak.server.growth(life(soak, lambda n: mib, files=lambda n: 40 + n / 5))
    assert grown == "47 open files became 57"
    (grown,) = soak.server.growth(life(soak, lambda n: mib, threads=lambda n: 30 + n / 20))
    assert "open threads" in grown


def test_a_short_life_says_nothing_of_growth(soak) -> None:
    assert soak.server.growth(life(soak, lambda n: n << 20)[:20]) == []


def test_all_files_count_in_the_quota_and_one_with_two_names_counts_once(soak, tmp_path) -> None:
    (tmp_path / "ab" / "00").mkdir(parents=True)
    (tmp_path / "ab" / "00" / "1.kv").write_bytes(bytes(1000))
    (tmp_path / "writing").mkdir()
    (tmp_path / "writing" / "2").write_bytes(bytes(50))
    (tmp_path / "ab" / "2.kv").hardlink_to(tmp_path / "writing" / "2")
    assert soak.server.bytes_under(tmp_path) == 1050
    assert soak.server.bytes_under(tmp_path / "gone") == 0


PAGE = """
# TYPE ebbtide_steps_total counter
ebbtide_steps_total 12.0
ebbtide_tier_reads_total{result="ok",tier="file"} 3.0
ebbtide_tier_reads_total{result="failed",tier="file"} 1.0
ebbtide_requests{state="running"} 2.0
ebbtide_requests{state="waiting"} 5.0
ebbtide_kv_blocks_in_use 7.0
"""


def test_metrics_are_read(soak) -> None:
    assert soak.server.counters_in(PAGE)["steps_total"] == 12
    assert soak.server.gauge_in(PAGE, "requests") == 7
    assert soak.server.gauge_in(PAGE, "kv_blocks_in_use") == 7


async def test_a_counter_that_goes_down_is_a_problem_and_lives_add_up(soak, tmp_path) -> None:
    server = soak.server.Server(1, [], tmp_path / "log")
    pages = [PAGE, PAGE.replace("12.0", "11.0"), PAGE]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=pages.pop(0)))
    server.http = httpx.AsyncClient(base_url="http://x", transport=transport)
    server.lives.append(soak.server.LifeOfServer())
    await server.scrape()
    await server.scrape()
    assert server.problems == ["the counter steps_total went from 12 to 11"]
    server.lives.append(soak.server.LifeOfServer())
    await server.scrape()
    assert server.total("tier_reads", "ok", "file") == 6
    assert server.total("tier_reads") == 8


@pytest.mark.parametrize("kind", ["delete", "cut", "turn"])
def test_files_are_spoiled(soak, tmp_path, kind) -> None:
    path, content = tmp_path / "chunk", bytes(range(200))
    path.write_bytes(content)
    assert soak.faults.spoil(path, kind, random.Random(1))
    if kind == "delete":
        assert not path.exists()
    else:
        assert path.read_bytes() != content
        assert (len(path.read_bytes()) == 200) is (kind == "turn")
    assert not soak.faults.spoil(tmp_path / "gone", kind, random.Random(1))


def test_a_neighbour_fills_the_directory_and_empties_it(soak, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(soak.faults, "NEIGHBOUR_S", 0)
    size = 4 << 20
    soak.faults.neighbour(str(tmp_path), size, 2.0, empties=False)
    assert size / 2 < soak.server.bytes_under(tmp_path) <= size
    soak.faults.neighbour(str(tmp_path), size, 2.0, empties=True)
    assert soak.server.bytes_under(tmp_path) < 4096


def events(*lines: str) -> bytes:
    return "".join(f"data: {line}\n\n" for line in lines).encode()


HI = '{"choices": [{"delta": {"content": "Hi"}, "finish_reason": null}]}'
END = '{"choices": [{"delta": {}, "finish_reason": "stop"}]}'
USAGE = '{"choices": [], "usage": {"completion_tokens": 2}}'
DOWN = '{"error": {"message": "going down", "code": "shutting_down"}}'
BUG = '{"error": {"message": "a bug", "code": "engine_error"}}'


class Answers:
    """A server that sends one stream, or a status; and may be restarted the while."""

    def __init__(
        self, soak: Any, tmp_path: Path, body: bytes, status: int, disturbed: bool
    ) -> None:
        self.server = soak.server.Server(1, [], tmp_path / "log")
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
        self.server.http = httpx.AsyncClient(base_url="http://x", transport=transport)
        self.server.ready.set()
        self.server.was_disturbed = lambda since: disturbed
        self.turn = soak.run.Turn([{"role": "user", "content": "x"}], 4, "Hi", "stop", 2)
        self.clients = soak.run.Clients(self.server, [[self.turn]], "m", 5)

    async def settle(self) -> tuple[str, list[str]]:
        patient = SimpleNamespace(random=lambda: 1.0)
        return await self.clients._try(self.turn, "", patient), self.clients.tally.problems


@pytest.mark.parametrize(
    ("body", "status", "disturbed", "settled", "problem"),
    [
        (events(HI, END, USAGE, "[DONE]"), 200, False, "answered", ""),
        (events(HI, HI, END, USAGE, "[DONE]"), 200, False, "answered", "wrong answer"),
        (events(HI, END, USAGE), 200, False, "aborted", "without [DONE]"),
        (events(HI, END, USAGE), 200, True, "aborted", "without [DONE]"),
        (events(HI, DOWN), 200, True, "", ""),
        (events(HI, DOWN), 200, False, "aborted", "shutting_down"),
        (DOWN.encode(), 503, True, "", ""),
        (BUG.encode(), 500, False, "aborted", "500 engine_error: a bug"),
    ],
)
async def test_answers_are_judged(
    soak, tmp_path, body, status, disturbed, settled, problem
) -> None:
    got, problems = await Answers(soak, tmp_path, body, status, disturbed).settle()
    assert got == settled
    assert problem in " ".join(problems)
    assert bool(problems) is bool(problem)
