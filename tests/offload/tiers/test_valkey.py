"""The Valkey tier against a real server, on good days and bad ones."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import valkey
from tests.offload.tiers.damage import flip, when_listed, when_read
from tests.offload.tiers.servers import Process, free_ports, redis_server

from ebbtide.errors import InputError
from ebbtide.offload.tiers import valkey as module
from ebbtide.offload.tiers.base import OK, Status, TierContext
from ebbtide.offload.tiers.valkey import ValkeyTier, memory_note, open_valkey, parse
from ebbtide.testing.tier_contract import (
    PAGE,
    Chunk,
    TierContract,
    assert_intact,
    assert_ok,
    buffers,
    context,
    keys,
)

HEAL_S = 20.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: Process) -> Process:
    """A running server with nothing in it; a test may leave it dead or frozen."""
    if shared.child is None:
        shared.start()
    shared.thaw()
    client(shared).flushall()
    return shared


@pytest.fixture
def tier(server: Process) -> Iterator[ValkeyTier]:
    tier = open_valkey(url(server), context())
    yield tier
    tier.close()


def url(server: Process, settings: str = "timeout=0.3") -> str:
    return f"valkey://127.0.0.1:{server.port}/0?{settings}"


def client(server: Process):
    return valkey.Valkey(port=server.port)


def healed(tier: ValkeyTier) -> bool:
    """Whether it answers again, after a while of asking."""
    until = time.monotonic() + HEAL_S
    while tier.stats().state != "up" and time.monotonic() < until:
        time.sleep(0.02)
    return tier.stats().state == "up"


def stored(tier: ValkeyTier, server: Process, chunk: Chunk) -> bytes:
    """The name under which the tier keeps the chunk, found as an operator would."""
    assert_ok(tier.write([chunk.key], [chunk.buffer]))
    (name,) = client(server).keys(f"ebbtide:*:{chunk.key.hex()}")
    return name


class TestContract(TierContract):
    @pytest.fixture
    def open_tier(self, server: Process) -> Callable[[TierContext], ValkeyTier]:
        return lambda context: open_valkey(url(server, "timeout=10"), context)


class TestServer:
    def test_batches_are_bounded_and_in_order(self, tier, monkeypatch) -> None:
        monkeypatch.setattr(tier, "_batch", 3)
        monkeypatch.setattr(module, "BATCH_KEYS", 2)
        chunks = [Chunk(number) for number in range(10)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        assert tier.lookup(keys(chunks)) == [True] * 10
        assert_intact(tier, chunks)
        assert_ok(tier.delete(keys(chunks[1:])))
        assert tier.lookup(keys(chunks)) == [True] + [False] * 9
        assert tier.clear() is OK
        assert tier.lookup(keys(chunks)) == [False] * 10

    def test_a_lookup_is_one_round_trip(self, tier, server) -> None:
        chunks = [Chunk(number) for number in range(50)]
        tier.lookup(keys(chunks))
        before = client(server).info("stats")["total_reads_processed"]
        tier.lookup(keys(chunks))
        reads = client(server).info("stats")["total_reads_processed"] - before
        assert reads < 10  # the clients that ask for this figure have some, too

    def test_chunks_live_as_long_as_they_are_used(self, server) -> None:
        tier = open_valkey(url(server, "ttl=100"), context())
        name = stored(tier, server, Chunk(1))
        assert 90 < client(server).ttl(name) <= 100
        client(server).expire(name, 5)
        assert_intact(tier, [Chunk(1)])
        assert client(server).ttl(name) > 90
        tier.close()

    def test_or_for_ever(self, server) -> None:
        tier = open_valkey(url(server, "ttl=0"), context())
        name = stored(tier, server, Chunk(1))
        assert_intact(tier, [Chunk(1)])
        assert client(server).ttl(name) == -1
        tier.close()

    def test_clearing_leaves_the_keys_of_others(self, tier, server) -> None:
        client(server).set("theirs", "x")
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        assert tier.clear() is OK
        assert client(server).keys() == [b"theirs"]

    def test_a_password_a_user_and_a_database(self, tmp_path: Path) -> None:
        acl = tmp_path / "users.acl"
        acl.write_text("user default off\nuser kv on >s3:cr%t ~ebbtide:* +@all -@dangerous\n")
        with redis_server(tmp_path, "--aclfile", str(acl)) as server:
            where = f"127.0.0.1:{server.port}"
            tier = open_valkey(f"redis://kv:s3%3Acr%25t@{where}/3", context())
            assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
            assert_intact(tier, [Chunk(1)])
            assert tier.stats().state == "up"  # though it may not ask: INFO is "dangerous"
            tier.close()
            for wrong in (f"redis://{where}", f"redis://kv:other@{where}", f"redis://x:y@{where}"):
                with pytest.raises(InputError, match="cannot be used") as refusal:
                    open_valkey(wrong, context())
                assert "other" not in str(refusal.value)
            with pytest.raises(InputError, match="DB index is out of range"):
                open_valkey(f"redis://kv:s3%3Acr%25t@{where}/99", context())

    def test_a_cluster_is_refused(self, tmp_path: Path) -> None:
        (bus,) = free_ports(1)
        options = ("--cluster-enabled", "yes", "--cluster-port", str(bus))
        with (
            redis_server(tmp_path, *options) as server,
            pytest.raises(InputError, match="it is a cluster"),
        ):
            open_valkey(url(server), context())

    def test_tls(self, tmp_path: Path) -> None:
        """With an authority of one's own; a server that it does not vouch for is not used."""
        if shutil.which("openssl") is None:
            pytest.skip("needs a certificate: apt-get install openssl")
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        make = (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key}"
        )
        make += f" -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -out {cert}"
        subprocess.run(make.split(), check=True, capture_output=True)
        (port,) = free_ports(1)
        options = [
            "--tls-port",
            str(port),
            "--tls-cert-file",
            str(cert),
            "--tls-key-file",
            str(key),
        ]
        with redis_server(tmp_path, *options, "--tls-auth-clients", "no"):
            tier = open_valkey(f"rediss://127.0.0.1:{port}?ca={cert}", context())
            assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
            assert_intact(tier, [Chunk(1)])
            tier.close()
            strict = open_valkey(f"rediss://127.0.0.1:{port}", context())
            assert "certificate" in strict.stats().state
            assert strict.lookup([Chunk(1).key]) == [False]
            strict.close()


class TestMemory:
    def test_a_server_that_is_full_says_so_and_is_not_down(self, tmp_path: Path) -> None:
        limit = ("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
        with redis_server(tmp_path, *limit) as server:
            tier = open_valkey(url(server, "timeout=5"), context(256))
            chunks = [Chunk(number, 256) for number in range(12)]
            results = tier.write(keys(chunks), buffers(chunks))
            assert {result.status for result in results} == {Status.OK, Status.FULL}
            assert "maxmemory" in results[-1].message
            stats = tier.stats()
            assert stats.state == "up"
            assert "noeviction" in stats.note
            assert stats.bytes_max == 6 << 20
            assert_intact(tier, [c for c, r in zip(chunks, results, strict=True) if r is OK])
            tier.close()

    def test_a_server_that_evicts_keeps_its_limit(self, tmp_path: Path) -> None:
        limit = ("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
        with redis_server(tmp_path, *limit) as server:
            tier = open_valkey(url(server, "timeout=5"), context(256))
            for number in range(12):
                chunk = Chunk(number, 256)
                assert_ok(tier.write([chunk.key], [chunk.buffer]))
            stats = tier.stats()
            assert stats.evictions > 0
            assert stats.note == ""
            assert tier.lookup([Chunk(number).key for number in range(12)]).count(True) < 8
        assert tier.stats().evictions == stats.evictions  # also while the server is gone
        tier.close()

    @pytest.mark.parametrize(
        ("maxmemory", "policy", "ttl_s", "says"),
        [
            (0, "allkeys-lru", 60, "maxmemory is not set"),
            (1000, "noeviction", 60, "refuses chunks"),
            (1000, "volatile-lru", 0, "evicts no chunks"),
            (1000, "volatile-lru", 60, ""),
            (1000, "allkeys-lfu", 0, ""),
        ],
    )
    def test_what_is_unwise_is_noted(self, maxmemory, policy, ttl_s, says) -> None:
        note = memory_note({"maxmemory": maxmemory, "maxmemory_policy": policy}, ttl_s)
        assert says in note
        assert bool(note) == bool(says)

    def test_a_server_that_tells_nothing_is_not_blamed(self) -> None:
        assert memory_note({}, 60) == ""


class TestInventory:
    def test_it_goes_in_batches_past_what_belongs_to_others(
        self, tier, server, monkeypatch
    ) -> None:
        monkeypatch.setattr(module, "BATCH_KEYS", 5)
        chunks = [Chunk(number) for number in range(60)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        space = "00" * 32
        for name in (
            "theirs",
            "ebbtide:odd:abcd",
            f"ebbtide:{space}:",
            f"ebbtide:{space}:0",
            f"ebbtide:{space}:abcd:1",
        ):
            client(server).set(name, "x")
        found = list(tier.entries())
        assert {entry.key for entry in found} == set(keys(chunks))
        assert {entry.namespace for entry in found} == {context().namespace}
        assert all(PAGE < entry.bytes < 2 * PAGE + 1000 for entry in found)

    def test_the_time_of_use_is_when_it_was_read(self, tier, server) -> None:
        assert_ok(tier.write([Chunk(1).key, Chunk(2).key], buffers([Chunk(1), Chunk(2)])))
        time.sleep(2.1)
        assert_intact(tier, [Chunk(2)])
        list(tier.entries())  # is no use
        tier.lookup([Chunk(1).key])  # nor is this
        ages = {entry.key: time.time() - entry.used_at for entry in tier.entries()}
        assert ages[Chunk(2).key] < 1.1
        assert ages[Chunk(1).key] > 1.5

    @pytest.mark.parametrize(("ttl_s", "knows"), [(100, True), (0, False)])
    def test_a_server_that_counts_uses_instead(self, tmp_path: Path, ttl_s, knows) -> None:
        limit = ("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lfu")
        with redis_server(tmp_path, *limit) as server:
            tier = open_valkey(url(server, f"ttl={ttl_s}"), context())
            name = stored(tier, server, Chunk(1))
            if knows:
                client(server).expire(name, 40)
            (entry,) = tier.entries()
            if knows:
                assert abs(time.time() - 60 - entry.used_at) < 5
                client(server).expire(name, 4000)  # by one with another ttl
                (entry,) = tier.entries()
            assert entry.used_at is None
            tier.close()

    def test_a_user_of_few_rights(self, tmp_path: Path) -> None:
        acl = tmp_path / "users.acl"
        acl.write_text("user default off\nuser kv on >pw ~ebbtide:* +@all -@dangerous\n")
        with redis_server(tmp_path, "--aclfile", str(acl)) as server:
            tier = open_valkey(f"redis://kv:pw@127.0.0.1:{server.port}", context())
            assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
            (entry,) = tier.entries()
            assert tier.check(entry) is OK
            assert tier.remove([entry]) == [OK]
            tier.close()

    @when_listed
    def test_what_is_damaged_is_found_and_left(self, tier, server, damage, says) -> None:
        name = stored(tier, server, Chunk(1))
        client(server).set(name, damage(client(server).get(name)))
        (entry,) = tier.entries()
        for _ in range(2):
            result = tier.check(entry)
            assert result.status is Status.CORRUPT
            assert says in result.message
        assert tier.remove([entry]) == [OK]
        assert tier.check(entry).status is Status.MISSING

    def test_a_key_of_another_type(self, tier, server) -> None:
        name = stored(tier, server, Chunk(1))
        client(server).delete(name)
        client(server).rpush(name, "a", "b")
        (entry,) = tier.entries()
        assert tier.check(entry).status is Status.CORRUPT
        assert tier.remove([entry]) == [OK]
        assert list(tier.entries()) == []

    def test_a_server_that_is_gone_half_way(self, tier, server, monkeypatch) -> None:
        monkeypatch.setattr(module, "BATCH_KEYS", 5)
        chunks = [Chunk(number) for number in range(60)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        entries = tier.entries()
        entry = next(entries)
        server.kill()
        with pytest.raises(OSError, match="valkey at"):
            list(entries)
        assert tier.check(entry).status is Status.FAILED
        assert [result.status for result in tier.remove([entry] * 2)] == [Status.FAILED] * 2


class TestBadValues:
    @when_read
    def test_a_damaged_value_is_found_and_dropped(self, tier, server, damage, says) -> None:
        good, bad = Chunk(1), Chunk(2)
        name = stored(tier, server, bad)
        client(server).set(name, damage(client(server).get(name)))
        assert_ok(tier.write([good.key], [good.buffer]))
        self._assert_corrupt(tier, bad, says)
        assert_intact(tier, [good])

    def test_a_value_of_another_model_under_our_name(self, tier, server) -> None:
        name = stored(tier, server, Chunk(1))
        assert_ok([tier.clear()])
        other = open_valkey(url(server), context(space=2))
        client(server).set(name, client(server).get(stored(other, server, Chunk(1))))
        self._assert_corrupt(tier, Chunk(1), "another model")
        assert_intact(other, [Chunk(1)])
        other.close()

    def test_another_chunk_under_its_name(self, tier, server) -> None:
        name = stored(tier, server, Chunk(1))
        client(server).set(name, client(server).get(stored(tier, server, Chunk(4))))
        self._assert_corrupt(tier, Chunk(1), "another chunk")

    def test_a_key_of_another_type(self, tier, server) -> None:
        name = stored(tier, server, Chunk(1))
        client(server).delete(name)
        client(server).rpush(name, "a", "b")
        self._assert_corrupt(tier, Chunk(1), "no string")

    @pytest.mark.parametrize("kept", [1, 999, 1000, 1001, 4000, 4223])
    def test_a_value_in_pieces_that_was_cut(self, tier, server, monkeypatch, kept) -> None:
        """Missing where a piece is: it may be going just now. Either way it is not found again."""
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
        name = stored(tier, server, Chunk(1))
        assert_intact(tier, [Chunk(1)])
        client(server).set(name, client(server).get(name)[:kept])
        (result,) = tier.read([Chunk(1).key], [Chunk.blank()])
        assert result.status is (Status.CORRUPT if kept > 4000 else Status.MISSING)
        assert tier.lookup([Chunk(1).key]) == [False]

    @pytest.mark.parametrize("damage", [flip, lambda value: value + b"x", lambda value: value * 9])
    def test_a_value_in_pieces_that_was_altered(self, tier, server, monkeypatch, damage) -> None:
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
        name = stored(tier, server, Chunk(1))
        client(server).set(name, damage(client(server).get(name)))
        self._assert_corrupt(tier, Chunk(1), "")

    def test_an_empty_value_is_a_miss_and_is_written_over(self, tier, server) -> None:
        client(server).set(stored(tier, server, Chunk(1)), b"")
        (result,) = tier.read([Chunk(1).key], [Chunk.blank()])
        assert result.status is Status.MISSING
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        assert_intact(tier, [Chunk(1)])

    def _assert_corrupt(self, tier: ValkeyTier, chunk: Chunk, says: str) -> None:
        (result,) = tier.read([chunk.key], [Chunk.blank()])
        assert result.status is Status.CORRUPT
        assert says in result.message
        assert tier.lookup([chunk.key]) == [False]
        assert tier.stats().state == "up"


class TestDown:
    def test_a_killed_server_is_left_alone_and_used_again_when_it_is_back(
        self, tier, server
    ) -> None:
        chunk = Chunk(1)
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        server.kill()
        self._assert_down(tier)
        server.start()
        assert healed(tier)
        assert tier.lookup([chunk.key]) == [False]
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        assert_intact(tier, [chunk])

    def test_a_frozen_server_costs_one_timeout(self, tier, server, caplog) -> None:
        chunk = Chunk(1)
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        server.freeze()
        self._assert_down(tier)
        assert "is down" in caplog.text
        server.thaw()
        assert healed(tier)
        assert "answers again" in caplog.text
        assert_intact(tier, [chunk])

    def test_while_it_is_down_it_is_not_asked(self, tier, server, monkeypatch) -> None:
        server.kill()
        tier.lookup([Chunk(1).key])
        monkeypatch.setattr(tier._line, "_clock", lambda: 0.0)  # the wait never ends
        monkeypatch.setattr(tier, "_client", None)  # asking would be an error
        self._assert_down(tier)

    def test_a_restarted_server_is_not_noticed_where_nobody_asked(self, tier, server) -> None:
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        server.kill()
        server.start()
        assert tier.lookup([Chunk(1).key]) == [False]
        assert tier.stats().state == "up"

    def test_a_server_that_is_not_there_at_the_start_may_come(self, server, caplog) -> None:
        server.kill()
        tier = open_valkey(url(server), context())
        assert "going on without" in caplog.text
        self._assert_down(tier)
        server.start()
        assert healed(tier)
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        tier.close()

    def test_killed_in_the_middle_of_calls(self, server) -> None:
        """Every result is an honest one, whatever the moment."""
        tier = open_valkey(url(server, "timeout=2"), context(64))
        chunks = [Chunk(number, 64) for number in range(24)]
        results, stop = [], threading.Event()

        def work() -> None:
            targets = [Chunk.blank(64) for _ in chunks]
            while not stop.is_set():
                results.extend(tier.write(keys(chunks), buffers(chunks)))
                read = tier.read(keys(chunks), targets)
                results.extend(read)
                for chunk, result, target in zip(chunks, read, targets, strict=True):
                    if result is OK and target != chunk.buffer:
                        results.append("wrong bytes")

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            time.sleep(0.1)
            server.kill()
            server.start()
        stop.set()
        for thread in threads:
            thread.join()
        assert "wrong bytes" not in results
        assert {r.status for r in results} <= {Status.OK, Status.MISSING, Status.FAILED}
        assert healed(tier)
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        assert_intact(tier, chunks)
        tier.close()

    def _assert_down(self, tier: ValkeyTier) -> None:
        two = keys([Chunk(1), Chunk(2)])
        assert tier.lookup(two) == [False, False]
        blank = [Chunk.blank(), Chunk.blank()]
        results = [*tier.read(two, blank), *tier.write(two, blank), *tier.delete(two), tier.clear()]
        assert [result.status for result in results] == [Status.FAILED] * 7
        assert "down" in results[-1].message
        assert tier.stats().state.startswith("down: ")


class TestUrl:
    def test_all_of_it(self) -> None:
        config = parse("rediss://me:p%40ss@kv.example:7000/5?ttl=60&timeout=0.5&ca=/etc/ca.pem")
        assert config == module.ValkeyConfig(
            "kv.example", 7000, 5, "me", "p@ss", True, "/etc/ca.pem", 60, 0.5
        )
        assert "p@ss" not in config.server

    def test_little_of_it(self) -> None:
        assert parse("valkey://") == module.ValkeyConfig()
        assert parse("redis://[::1]") == replace(module.ValkeyConfig(), host="::1")

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ("http://host", "begins with"),
            ("host:6379", "begins with"),
            ("valkey://host:port", "Port"),
            ("valkey://host/db", "number of a database"),
            ("valkey://host/-1", "number of a database"),
            ("valkey://host?tll=3", "did you mean 'ttl'"),
            ("valkey://host?ttl=3&ttl=4", "twice"),
            ("valkey://host?ttl=1.5", "whole number"),
            ("valkey://host?ttl=-1", "0 or more"),
            ("valkey://host?timeout=nan", "give a number"),
            ("valkey://host?timeout=0", "more than 0"),
            ("valkey://host?timeout=soon", "give a number"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_sentence(self, wrong: str, says: str) -> None:
        with pytest.raises(InputError, match=says):
            open_valkey(wrong, context())

    def test_the_extra_is_not_installed(self, monkeypatch) -> None:
        monkeypatch.setattr(module, "valkey", None)
        with pytest.raises(InputError, match=r"install ebbtide\[valkey\]"):
            open_valkey("valkey://localhost", context())

    def test_a_chunk_that_is_too_large_for_a_value(self) -> None:
        with pytest.raises(InputError, match="fewer blocks per chunk"):
            open_valkey("valkey://localhost", TierContext(bytes(32), 512 << 20))
