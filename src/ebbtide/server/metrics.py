"""What ``/metrics`` says: the engine's own gauges and counters, and latencies measured here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ebbtide.engine.output import Delta, TierFigures
from ebbtide.offload.tiers.base import TierStats

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "kv_blocks": "KV blocks on the device.",
    "kv_blocks_in_use": "KV blocks on the device that requests hold.",
    "kv_blocks_cached": "KV blocks on the device that are free but hold reusable KV.",
    "host_slots": "Chunk slots of the host tier.",
    "host_slots_in_use": "Chunk slots of the host tier that hold a chunk.",
}
_COUNTERS = {
    "steps": "Steps of the engine.",
    "failed_steps": "Steps that failed as a whole.",
    "preemptions": "Requests that had to give up their blocks to others.",
    "generated_tokens": "Tokens generated.",
    "host_evictions": "Chunks evicted from the host tier.",
}
_LABELLED_COUNTERS = {
    "prompt_tokens": ("source", "Prompt tokens by where their KV came from."),
    "recomputed_tokens": ("cause", "Positions computed once more, by cause."),
    "finished_requests": ("reason", "Finished completions by reason."),
    "transfer_bytes": ("direction", "Bytes moved between device and host."),
}


_TIER_TEXTS = {
    "left_alone_total": "Blocks that a tier had, computed since reading them was slower.",
    "read_seconds_per_chunk": "What one thread takes to read a chunk, lately.",
    "compute_seconds_per_chunk": "What computing a chunk takes, lately.",
    "chunks": "Chunks that a tier keeps.",
    "bytes": "Bytes that a tier keeps.",
    "bytes_max": "A tier's quota.",
    "evictions_total": "Chunks that a tier evicted.",
    "up": "Whether a tier answers.",
}


class EngineCollector(Collector):
    """Reads ``engine.stats()`` anew whenever the metrics are read."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.tiers: dict[str, TierStats] = {}  # as they were when last asked: that may take a while

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        requests = GaugeMetricFamily(
            "ebbtide_requests", "Unfinished completions by state.", labels=["state"]
        )
        for state in ("running", "waiting", "loading"):
            requests.add_metric([state], getattr(stats, state))
        yield requests
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ebbtide_{name}", text, getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ebbtide_{name}", text, getattr(stats, name))
        for name, (label, text) in _LABELLED_COUNTERS.items():
            family = CounterMetricFamily(f"ebbtide_{name}", text, labels=[label])
            for value, count in getattr(stats, name).items():
                family.add_metric([value], count)
            yield family
        transfers = CounterMetricFamily(
            "ebbtide_transfers",
            "Chunk transfers between device and host by how they ended.",
            labels=["direction", "result"],
        )
        for key, count in stats.transfers.items():
            direction, _, result = key.partition("_")
            transfers.add_metric([direction, result], count)
        yield transfers
        if stats.tiers:
            yield from self._of_tiers(stats.tiers)

    def _of_tiers(self, figures: dict[str, TierFigures]) -> Iterator[Metric]:
        for name, what, text in (
            ("reads", "reads", "Chunks read from a tier by how that ended."),
            ("writes", "writes", "Chunks written to a tier by how that ended."),
        ):
            family = CounterMetricFamily(f"ebbtide_tier_{name}", text, labels=["tier", "result"])
            for tier, each in figures.items():
                for result, count in getattr(each, what).items():
                    family.add_metric([tier, result], count)
            yield family
        values: dict[str, dict[str, float | None]] = {
            "left_alone_total": {t: f.left_alone for t, f in figures.items()},
            "read_seconds_per_chunk": {t: f.chunk_seconds for t, f in figures.items()},
            "compute_seconds_per_chunk": {t: f.compute_seconds for t, f in figures.items()},
            "chunks": {t: s.chunks for t, s in self.tiers.items()},
            "bytes": {t: s.bytes for t, s in self.tiers.items()},
            "bytes_max": {t: s.bytes_max for t, s in self.tiers.items()},
            "evictions_total": {t: s.evictions for t, s in self.tiers.items()},
            "up": {t: float(not s.state.startswith("down")) for t, s in self.tiers.items()},
        }
        for name, by_tier in values.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = kind(f"ebbtide_tier_{name}", _TIER_TEXTS[name], labels=["tier"])
            for tier, value in by_tier.items():
                if value is not None:
                    metric.add_metric([tier], value)
            yield metric


class Metrics:
    """One server's registry and the histograms that the server itself fills."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self._engine = EngineCollector(engine)
        self.registry.register(self._engine)
        self.first_token = Histogram(
            "ebbtide_time_to_first_token_seconds",
            "From a request's arrival to the first token of each completion.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "ebbtide_inter_token_latency_seconds",
            "Between two tokens of a completion.",
            buckets=_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self.request = Histogram(
            "ebbtide_request_duration_seconds",
            "From a request's arrival to its last token, for requests that got a full answer.",
            buckets=_REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.responses = Counter(
            "ebbtide_http_responses",
            "Responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )

    def render(self, tiers: dict[str, TierStats]) -> bytes:
        """Everything in the Prometheus text format; ``tiers`` is what they say of themselves."""
        self._engine.tiers = tiers
        return generate_latest(self.registry)


class RequestTimer:
    """Times one HTTP request, from now on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}  # choice -> when its latest token came

    def observe(self, choice: int, delta: Delta) -> None:
        """Note the tokens of a delta that has just arrived."""
        count = len(delta.token_ids)
        if not count:
            return
        now = time.perf_counter()
        last = self._last.get(choice)
        self._last[choice] = now
        if last is None:
            self._metrics.first_token.observe(now - self._started)
            return
        for _ in range(count):
            self._metrics.inter_token.observe((now - last) / count)

    def finish(self) -> None:
        """Note that the request is answered in full."""
        self._metrics.request.observe(time.perf_counter() - self._started)
