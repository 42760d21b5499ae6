"""/metrics and /health."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from tests.server.fake import FakeEngine
from tests.server.serving import Served, served

from ebbtide.engine.output import TierFigures
from ebbtide.offload.tiers.base import TierStats


def samples(server: Served) -> dict[str, float]:
    """Every sample by its name and labels, without times of creation."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_engine_values() -> None:
    with served(FakeEngine()) as server:
        found = samples(server)
    assert all(name.startswith("ebbtide_") for name in found)
    assert found["ebbtide_requests{state=running}"] == 0
    assert found["ebbtide_kv_blocks"] == 64
    assert found["ebbtide_kv_blocks_in_use"] == 3
    assert found["ebbtide_host_slots_in_use"] == 1
    assert found["ebbtide_prompt_tokens_total{source=host}"] == 2
    assert found["ebbtide_recomputed_tokens_total{cause=failed}"] == 0
    assert found["ebbtide_transfers_total{direction=load,result=ok}"] == 4
    assert found["ebbtide_transfers_total{direction=store,result=dropped}"] == 5
    assert found["ebbtide_transfer_bytes_total{direction=store}"] == 500
    assert found["ebbtide_host_evictions_total"] == 6


def test_tiers_have_their_own() -> None:
    engine = FakeEngine()
    engine.tiers = {
        "file": (
            TierFigures({"ok": 3, "failed": 1}, {"ok": 5, "failed": 0, "dropped": 2}, 7, 0.5, None),
            TierStats(chunks=11, bytes=1100, bytes_max=2000, evictions=4, state="down: no disk"),
        )
    }
    with served(engine) as server:
        found = samples(server)
    assert found["ebbtide_tier_reads_total{result=failed,tier=file}"] == 1
    assert found["ebbtide_tier_writes_total{result=dropped,tier=file}"] == 2
    assert found["ebbtide_tier_left_alone_total{tier=file}"] == 7
    assert found["ebbtide_tier_read_seconds_per_chunk{tier=file}"] == 0.5
    assert not any(name.startswith("ebbtide_tier_compute_seconds") for name in found)
    assert found["ebbtide_tier_bytes{tier=file}"] == 1100
    assert found["ebbtide_tier_evictions_total{tier=file}"] == 4
    assert found["ebbtide_tier_up{tier=file}"] == 0


def test_a_reset_empties_the_tiers_named_or_all() -> None:
    engine = FakeEngine()
    with served(engine) as server:
        assert server.http.post("/v1/kv/reset", json={}).json()["tiers"] is None
        assert server.http.post("/v1/kv/reset", json={"tiers": ["host"]}).is_success
        wrong = server.http.post("/v1/kv/reset", json={"tiers": "host"})
        unknown = server.http.post("/v1/kv/reset", json={"tiers": ["tape"]})
    assert engine.resets == [None, ["host"]]
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_type")
    assert unknown.status_code == 400
    assert "tape" in unknown.json()["error"]["message"]


def test_latencies_count_tokens_and_requests() -> None:
    with served(FakeEngine()) as server:
        before = samples(server)
        assert before["ebbtide_time_to_first_token_seconds_count"] == 0
        assert server.completion("hello", n=2).is_success
        server.completion("hello", stream=True)
        after = samples(server)
    assert after["ebbtide_time_to_first_token_seconds_count"] == 3
    assert after["ebbtide_inter_token_latency_seconds_count"] == 3 * 4
    assert after["ebbtide_request_duration_seconds_count"] == 2
    assert after["ebbtide_generated_tokens_total"] == 15
    assert after["ebbtide_http_responses_total{route=/v1/completions,status=200}"] == 2


def test_counters_only_grow_and_errors_are_counted() -> None:
    with served(FakeEngine()) as server:
        before = samples(server)
        server.completion(temperature=-1)
        server.chat()
        server.http.get("/nothing")
        after = samples(server)
    counters = [name for name in before if "_total" in name or "_count" in name]
    assert all(after[name] >= before[name] for name in counters)
    assert after["ebbtide_http_responses_total{route=/v1/completions,status=400}"] == 1
    assert after["ebbtide_http_responses_total{route=other,status=404}"] == 1


def test_two_servers_in_one_process_count_apart() -> None:
    with served(FakeEngine()) as one, served(FakeEngine()) as other:
        one.completion()
        assert samples(other)["ebbtide_time_to_first_token_seconds_count"] == 0


def test_health() -> None:
    engine = FakeEngine()
    with served(engine) as server:
        assert server.http.get("/health").json() == {"status": "ok", "model": "fake"}
        assert server.http.head("/health").status_code == 200
        engine.closed = True
        assert server.http.get("/health").status_code == 503
