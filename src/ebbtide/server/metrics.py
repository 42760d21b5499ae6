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

from ebbtide.engine.output import Delta

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


class EngineCollector(Collector):
    """Reads ``engine.stats()`` anew whenever the metrics are read."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

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


class Metrics:
    """One server's registry and the histograms that the server itself fills."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
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

    def render(self) -> bytes:
        """Everything in the Prometheus text format."""
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
