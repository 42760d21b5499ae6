"""Who worked when: times recorded around the parts of a running engine, from outside.

One lane is the executor's thread (the device), the other the engine's (the host). The parts are
wrapped in place while the engine is idle, so nothing in the product knows of it. Times are in seconds
of ``time.perf_counter``, CPU times are those of the thread that did the work.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.engine.loop import EngineLoop

DEVICE, HOST = "device", "host"
EDGE_STEPS = 2  # at either end of a run: they are not like those between them


class Span(NamedTuple):
    """tokens, sampled: what a device span fed and sampled; 0 for the host's."""

    lane: str
    name: str
    step: int
    begin_s: float
    end_s: float
    cpu_s: float
    tokens: int = 0
    sampled: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Recorder:
    """Records the spans of one loop from ``start`` to ``stop``, both called while it is idle."""

    def __init__(self, loop: EngineLoop) -> None:
        self._spans: list[Span] = []
        self._applied = 0
        self._on = False
        scheduler: Any = loop._scheduler
        executor: Any = loop._executor
        scheduler.schedule = self._timed(HOST, "schedule", scheduler.schedule, _step_of_result)
        scheduler.apply = self._timed(HOST, "apply", scheduler.apply, self._step_applied)
        executor.submit = self._timed(HOST, "submit", executor.submit, _step_of_argument)
        executor._run = self._timed(DEVICE, "step", executor._run, _step_of_argument)
        loop._listener = self._timed(HOST, "hand out", loop._listener, lambda *_: self._applied)

    def start(self) -> None:
        self._spans, self._on = [], True

    def stop(self) -> list[Span]:
        self._on = False
        return sorted(self._spans, key=lambda span: span.begin_s)

    def _timed(
        self, lane: str, name: str, work: Callable[..., Any], step_of: Callable[..., int | None]
    ) -> Callable[..., Any]:
        def timed(first: Any, *others: Any) -> Any:
            begin_s, cpu_s = time.perf_counter(), time.thread_time()
            result = work(first, *others)
            end_s, spent_s = time.perf_counter(), time.thread_time() - cpu_s
            step = step_of(first, result) if self._on else None
            if step is not None:
                fed = sampled = 0
                if lane == DEVICE:
                    fed = first.num_tokens
                    sampled = sum(row.sampling is not None for row in first.rows)
                self._spans.append(Span(lane, name, step, begin_s, end_s, spent_s, fed, sampled))
            return result

        return timed

    def _step_applied(self, plan: Any, result: Any) -> int:
        self._applied = plan.step
        return self._applied


def _step_of_argument(plan: Any, result: Any) -> int:
    return int(plan.step)


def _step_of_result(now: float, plan: Any) -> int | None:
    return None if plan is None else int(plan.step)


@dataclass(frozen=True)
class Summary:
    """Milliseconds per step, means over the steady steps. Host times by part.

    hidden: share of the host's time during which the device was computing, 0 to 1. idle_ms: from
    the end of one step on the device to the start of the next, the median. host_cpu_ms: of the
    host's time, what it did not spend waiting for a processor or for the interpreter's lock.
    """

    steps: int
    wall_ms: float
    device_ms: float
    host_ms: dict[str, float]
    host_cpu_ms: float
    hidden: float
    idle_ms: float

    @property
    def host_total_ms(self) -> float:
        return sum(self.host_ms.values())


def steady(spans: Iterable[Span], batch: int) -> list[Span]:
    """The device's spans of steps in which all of ``batch`` requests decode, without the edges."""
    device = [s for s in spans if s.lane == DEVICE and s.tokens == s.sampled == batch]
    return device[EDGE_STEPS:-EDGE_STEPS]


def summarise(spans: Sequence[Span], batch: int) -> Summary:
    """What a run of ``batch`` decoding requests shows. Needs at least 6 steps of all of them."""
    device = steady(spans, batch)
    assert len(device) >= 2, "too few steps to say anything"
    begin_s, end_s = device[0].begin_s, device[-1].begin_s
    count = len(device) - 1
    busy = [span for span in spans if span.lane == DEVICE]
    host = [s for s in spans if s.lane == HOST and begin_s <= s.begin_s and s.end_s <= end_s]
    parts: dict[str, float] = {}
    for span in host:
        parts[span.name] = parts.get(span.name, 0.0) + span.seconds * 1e3 / count
    total_s = sum(span.seconds for span in host)
    hidden_s = sum(_common(span, other) for span in host for other in busy)
    return Summary(
        steps=count,
        wall_ms=(end_s - begin_s) * 1e3 / count,
        device_ms=statistics.fmean(span.seconds for span in device) * 1e3,
        host_ms=parts,
        host_cpu_ms=sum(span.cpu_s for span in host) * 1e3 / count,
        hidden=hidden_s / total_s if total_s else 0.0,
        idle_ms=statistics.median(
            (b.begin_s - a.end_s) * 1e3 for a, b in itertools.pairwise(device)
        ),
    )


def _common(a: Span, b: Span) -> float:
    return max(0.0, min(a.end_s, b.end_s) - max(a.begin_s, b.begin_s))


def write_trace(path: Path, runs: dict[str, Sequence[Span]]) -> None:
    """Chrome's trace format, which Perfetto reads too: a process per run, a thread per lane."""
    events: list[dict[str, Any]] = []
    for pid, (run, spans) in enumerate(runs.items(), start=1):
        origin_s = min(span.begin_s for span in spans)
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": run}})
        for tid, lane in enumerate((DEVICE, HOST), start=1):
            named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid}
            events.append({**named, "args": {"name": lane}})
        for span in spans:
            args: dict[str, float] = {"step": span.step, "cpu_ms": round(span.cpu_s * 1e3, 3)}
            if span.lane == DEVICE:
                args |= {"tokens": span.tokens}
            events.append(
                {
                    "ph": "X",
                    "name": f"{span.name} {span.step}",
                    "cat": span.name,
                    "pid": pid,
                    "tid": 1 if span.lane == DEVICE else 2,
                    "ts": round((span.begin_s - origin_s) * 1e6, 1),
                    "dur": round(span.seconds * 1e6, 1),
                    "args": args,
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


COLOURS = {"schedule": "#d1495b", "submit": "#6b4e9b", "apply": "#edae49", "hand out": "#00798c"}
STEP_COLOURS = ("#c5d0c9", "#98a89c")  # in turn, so that one step can be told from the next


def draw(path: Path, runs: dict[str, tuple[Sequence[Span], int]], title: str, steps: int) -> None:
    """A few consecutive steps of each run, one below the other; on the right, one end of a step.

    runs: name -> spans and how many requests decode. Of all rows of that many steps, the one that
    took the median time is drawn. Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    height = 1.2 + 1.4 * len(runs)
    figure, axes = pyplot.subplots(
        len(runs), 2, sharex="col", figsize=(11, height), squeeze=False, width_ratios=(5, 3)
    )
    until_ms = near_ms = 0.0
    for (left, right), (run, (spans, batch)) in zip(axes, runs.items(), strict=True):
        shown = _typical(steady(spans, batch), steps)
        until_ms = max(until_ms, (shown[-1].end_s - shown[0].begin_s) * 1e3)
        summary = summarise(spans, batch)
        near_ms = max(near_ms, summary.host_total_ms + summary.idle_ms)
        _draw_lanes(left, spans, shown[0].begin_s)
        _draw_lanes(right, spans, _typical_end(shown))
        left.set_title(run, loc="left", fontsize=10)
        right.set_yticklabels([])
    axes[-1, 0].set(xlim=(0, until_ms), xlabel="ms")
    axes[-1, 1].set(xlim=(-0.3 * near_ms, 1.5 * near_ms), xlabel="ms from the end of a step")
    names = [Patch(color=STEP_COLOURS[0], label="a step on the device")]
    names += [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=names, loc="lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _typical(device: Sequence[Span], count: int) -> Sequence[Span]:
    """Of all rows of ``count`` consecutive steps, the one that took the median time."""
    rows = [device[i : i + count] for i in range(max(1, len(device) - count + 1))]
    return sorted(rows, key=lambda row: row[-1].end_s - row[0].begin_s)[len(rows) // 2]


def _typical_end(shown: Sequence[Span]) -> float:
    """The end of the step whose gap to the next one is the median of those shown."""
    gaps = sorted((b.begin_s - a.end_s, a.end_s) for a, b in itertools.pairwise(shown))
    return gaps[len(gaps) // 2][1]


def _draw_lanes(axis: Any, spans: Iterable[Span], origin_s: float) -> None:
    for span in spans:
        device = span.lane == DEVICE
        colour = STEP_COLOURS[span.step % 2] if device else COLOURS[span.name]
        axis.barh(
            1 if device else 0,
            span.seconds * 1e3,
            left=(span.begin_s - origin_s) * 1e3,
            height=0.7,
            color=colour,
            edgecolor=colour,
            linewidth=0 if device else 0.8,  # so that a span too short for the scale is seen
        )
    axis.set_yticks([0, 1], [HOST, DEVICE])
    axis.spines[["top", "right"]].set_visible(False)
