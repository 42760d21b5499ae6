"""The object tier against a real S3 server and a folder, on good days and bad ones."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from tests.offload.tiers.damage import READ, when_listed
from tests.offload.tiers.servers import BUCKET, S3_CREDENTIALS, Process, s3_server

from ebbtide.errors import InputError
from ebbtide.offload.tiers import object_store as module
from ebbtide.offload.tiers.base import OK, Status, TierContext
from ebbtide.offload.tiers.object_store import ObjectTier, open_object, parse
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

HEAL_S = 30.0
prefixes = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(shared: Process) -> Process:
    """A running server; a test may leave it dead or frozen."""
    if shared.child is None:
        shared.start()
    shared.thaw()
    return shared


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_url(server: Process) -> str:
    """A place with nothing in it."""
    return url(server, f"{BUCKET}/test/{next(prefixes)}")


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return f"object+file://{tmp_path}/a%20folder"


def url(server: Process, place: str, settings: str = "timeout=1&retries=0") -> str:
    return f"s3://{place}?endpoint=http://127.0.0.1:{server.port}&region=us-east-1&{settings}"


def healed(tier: ObjectTier) -> bool:
    """Whether it answers again, after a while of asking."""
    until = time.monotonic() + HEAL_S
    while tier.stats().state != "up" and time.monotonic() < until:
        tier.lookup([Chunk(99).key])
        time.sleep(0.02)
    return tier.stats().state == "up"


def stored(tier: ObjectTier, chunk: Chunk) -> str:
    """The object's name, as the tier has it."""
    assert_ok(tier.write([chunk.key], [chunk.buffer]))
    return tier._path(chunk.key)


class TestContractOnS3(TierContract):
    @pytest.fixture
    def open_tier(self, s3_url: str) -> Callable[[TierContext], ObjectTier]:
        patient = s3_url.replace("timeout=1&retries=0", "timeout=30")
        return lambda context: open_object(patient, context)


class TestContractOnAFolder(TierContract):
    @pytest.fixture
    def open_tier(self, folder_url: str) -> Callable[[TierContext], ObjectTier]:
        return lambda context: open_object(folder_url, context)


@pytest.fixture(params=["s3", "folder"])
def tier(request: pytest.FixtureRequest) -> Iterator[ObjectTier]:
    tier = open_object(request.getfixturevalue(f"{request.param}_url"), context())
    yield tier
    tier.close()


class TestStore:
    def test_clearing_goes_beyond_one_page(self, tier, monkeypatch) -> None:
        monkeypatch.setattr(module, "_LISTED", 3)
        chunks = [Chunk(number) for number in range(10)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        assert tier.clear() is OK
        assert tier.lookup(keys(chunks)) == [False] * 10

    def test_clearing_beside_another_who_deletes(self, tier, monkeypatch) -> None:
        chunks = [Chunk(number) for number in range(4)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        listed = list(obstore.list(tier._store, tier._folder))
        obstore.delete(tier._store, tier._path(chunks[0].key))
        monkeypatch.setattr(obstore, "list", lambda *args, **options: listed)
        assert tier.clear() is OK
        assert tier.lookup(keys(chunks)) == [False] * 4

    def test_a_row_of_writes_does_not_hold_up_reads(self, tier, monkeypatch) -> None:
        chunk, go_on = Chunk(1), threading.Event()
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        monkeypatch.setattr(obstore, "put", lambda *args, **options: go_on.wait(30))
        many = [chunk] * 50
        writer = threading.Thread(target=tier.write, args=(keys(many), buffers(many)))
        writer.start()
        try:
            assert_intact(tier, [chunk])
            assert tier.lookup([chunk.key]) == [True]
            assert writer.is_alive()
        finally:
            go_on.set()
            writer.join()

    def test_requests_at_once_are_bounded(self, folder_url, monkeypatch) -> None:
        tier = open_object(f"{folder_url}?concurrency=3", context())
        lock, now, most = threading.Lock(), [0], [0]

        def put(*args: object, **options: object) -> None:
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.005)
            with lock:
                now[0] -= 1

        monkeypatch.setattr(obstore, "put", put)
        many = [Chunk(1)] * 12
        tier.write(keys(many), buffers(many))
        assert 1 <= most[0] <= 3
        tier.close()

    def test_four_times_as_many_look_up_at_once(self, folder_url, monkeypatch) -> None:
        tier = open_object(f"{folder_url}?concurrency=2", context())
        all_there = threading.Barrier(8, timeout=20)
        size = PAGE + module.envelope.HEADER_BYTES

        def head(*args: object) -> dict[str, int]:
            all_there.wait()
            return {"size": size}

        monkeypatch.setattr(obstore, "head", head)
        many = keys([Chunk(number) for number in range(16)])
        assert tier.lookup(many) == [True] * 16
        tier.close()

    def test_a_full_disk_or_quota_is_full_and_not_down(self, tier, monkeypatch) -> None:
        def put(*args: object, **options: object) -> None:
            raise obstore.exceptions.GenericError("Generic error: No space left on device\nmore")

        monkeypatch.setattr(obstore, "put", put)
        many = [Chunk(number) for number in range(6)]
        results = tier.write(keys(many), buffers(many))
        assert [result.status for result in results] == [Status.FULL] * 6
        assert "more" not in results[0].message
        assert tier.stats().state == "up"

    def test_closing_while_calls_are_under_way(self, tier) -> None:
        """Each chunk is written, or failed; nothing is at work on a buffer after its call returned."""
        chunks = [Chunk(number) for number in range(40)]
        results = []

        def work() -> None:
            results.extend(tier.write(keys(chunks), buffers(chunks)))

        worker = threading.Thread(target=work)
        worker.start()
        tier.close()
        worker.join()
        assert {result.status for result in results} <= {Status.OK, Status.FAILED}
        assert len(results) == 40


class TestInventory:
    def test_it_goes_beyond_one_page_past_what_belongs_to_others(self, tier, monkeypatch) -> None:
        monkeypatch.setattr(module, "_LISTED", 3)
        chunks = [Chunk(number) for number in range(10)]
        assert_ok(tier.write(keys(chunks), buffers(chunks)))
        for name in ("theirs", f"{'00' * 32}/ab/abcd.txt", f"{'00' * 32}/ab/abc", "odd/ab/abcd"):
            obstore.put(tier._store, name, b"x")
        found = list(tier.entries())
        assert sorted(entry.key for entry in found) == sorted(keys(chunks))
        assert {entry.namespace for entry in found} == {context().namespace}
        assert {entry.bytes for entry in found} == {PAGE + module.envelope.HEADER_BYTES}

    def test_an_empty_store(self, tier) -> None:
        assert list(tier.entries()) == []

    @when_listed
    def test_what_is_damaged_is_found_and_left(self, tier, damage, says) -> None:
        path = stored(tier, Chunk(1))
        obstore.put(tier._store, path, damage(bytes(obstore.get(tier._store, path).bytes())))
        (entry,) = tier.entries()
        for _ in range(2):
            result = tier.check(entry)
            assert result.status is Status.CORRUPT
            assert says in result.message
        assert tier.remove([entry]) == [OK]
        assert tier.check(entry).status is Status.MISSING

    def test_a_store_that_is_gone(self, server, s3_url) -> None:
        tier = open_object(s3_url, context())
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        (entry,) = tier.entries()
        server.kill()
        with pytest.raises(OSError, match="Connection refused"):
            list(tier.entries())
        assert tier.check(entry).status is Status.FAILED
        assert [result.status for result in tier.remove([entry] * 2)] == [Status.FAILED] * 2
        tier.close()
        with pytest.raises(OSError, match="closed"):
            list(tier.entries())


class TestPanic:
    def test_a_client_that_panics_later_is_a_failure_like_any_other(
        self, tier, monkeypatch
    ) -> None:
        class PanicException(BaseException):
            pass

        def panic(*args: object, **options: object) -> None:
            raise PanicException("called `Option::unwrap()` on a `None` value")

        chunk = Chunk(1)
        for name in ("get", "put", "head", "list", "delete"):
            monkeypatch.setattr(obstore, name, panic)
        results = [
            *tier.read([chunk.key], [chunk.buffer]),
            *tier.write([chunk.key], [chunk.buffer]),
            *tier.delete([chunk.key]),
            tier.clear(),
        ]
        assert [result.status for result in results] == [Status.FAILED] * 4
        assert "the client gave up" in results[0].message
        assert tier.lookup([chunk.key]) == [False]


class TestBadObjects:
    @pytest.mark.parametrize(("damage", "says"), [*READ, (lambda value: b"", "bytes")])
    def test_a_damaged_object_is_found_and_dropped(self, tier, damage, says) -> None:
        good, bad = Chunk(1), Chunk(2)
        path = stored(tier, bad)
        value = bytes(obstore.get(tier._store, path).bytes())
        obstore.put(tier._store, path, damage(value))
        assert_ok(tier.write([good.key], [good.buffer]))
        self._assert_corrupt(tier, bad, says)
        assert_intact(tier, [good])

    def test_an_object_of_another_model_under_our_name(self, tier) -> None:
        path = stored(tier, Chunk(1))
        chunk = Chunk(1)
        head = module.envelope.header(b"x" * 32, chunk.key, chunk.buffer)
        obstore.put(tier._store, path, head + bytes(chunk.buffer))
        self._assert_corrupt(tier, chunk, "another model")

    def test_another_chunk_under_its_name(self, tier) -> None:
        path = stored(tier, Chunk(1))
        other = stored(tier, Chunk(2))
        obstore.put(tier._store, path, obstore.get(tier._store, other).bytes())
        self._assert_corrupt(tier, Chunk(1), "another chunk")

    def test_an_object_of_the_wrong_size_is_no_hit_and_is_written_over(self, tier) -> None:
        chunk = Chunk(1)
        obstore.put(tier._store, stored(tier, chunk), b"short")
        assert tier.lookup([chunk.key]) == [False]
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        assert_intact(tier, [chunk])

    def _assert_corrupt(self, tier: ObjectTier, chunk: Chunk, says: str) -> None:
        (result,) = tier.read([chunk.key], [Chunk.blank()])
        assert result.status is Status.CORRUPT
        assert says in result.message
        (result,) = tier.read([chunk.key], [Chunk.blank()])
        assert result.status is Status.MISSING
        assert tier.stats().state == "up"


class TestDown:
    def test_a_killed_server_is_left_alone_and_used_again_when_it_is_back(
        self, server, s3_url, caplog
    ) -> None:
        """By a tier that knew it, and by one that was opened meanwhile."""
        chunk = Chunk(1)
        before = open_object(s3_url, context())
        assert_ok(before.write([chunk.key], [chunk.buffer]))
        server.kill()
        after = open_object(s3_url, context())
        assert "going on without" in caplog.text
        for tier in (before, after):
            self._assert_down(tier)
            assert "Connection refused" in tier.stats().state
        server.start()
        for tier in (before, after):
            assert healed(tier)
            assert_ok(tier.write([chunk.key], [chunk.buffer]))
            assert_intact(tier, [chunk])
            tier.close()
        assert "answers again" in caplog.text

    def test_a_frozen_server_is_given_up_after_its_time(self, server, s3_url) -> None:
        tier = open_object(s3_url.replace("timeout=1", "timeout=0.3"), context())
        chunk = Chunk(1)
        assert_ok(tier.write([chunk.key], [chunk.buffer]))
        server.freeze()
        self._assert_down(tier)
        server.thaw()
        assert healed(tier)
        assert_intact(tier, [chunk])
        tier.close()

    def test_while_it_is_down_it_is_not_asked(self, server, s3_url, monkeypatch) -> None:
        tier = open_object(s3_url, context())
        tier._line.trip("said so")
        monkeypatch.setattr(tier._line, "_clock", lambda: 0.0)  # the wait never ends
        monkeypatch.setattr(tier, "_store", None)  # asking would be an error
        self._assert_down(tier)
        tier.close()

    def _assert_down(self, tier: ObjectTier) -> None:
        """Also in the first call after it went: three requests that fail are enough."""
        many = keys([Chunk(number) for number in range(20)])
        blank = [Chunk.blank() for _ in many]
        assert tier.lookup(many) == [False] * 20
        results = [*tier.read(many, blank), *tier.write(many, blank), *tier.delete(many)]
        assert [result.status for result in results] == [Status.FAILED] * 60
        assert tier.clear().status is Status.FAILED
        assert tier.stats().state.startswith("down: ")


class TestUrl:
    def test_all_of_it(self) -> None:
        config = parse(
            "s3://bucket/some/prefix?timeout=3&retries=0&concurrency=4"
            "&endpoint=http://localhost:9000&region=eu&secret_access_key=hidden"
        )
        assert config.url == "s3://bucket/some/prefix"
        assert (config.timeout_s, config.retries, config.concurrency) == (3.0, 0, 4)
        assert config.allow_http  # the endpoint says so
        assert config.client["region"] == "eu"
        assert "hidden" not in repr(config)

    def test_little_of_it(self) -> None:
        config = parse("gs://bucket")
        assert config == module.ObjectConfig("gs://bucket")
        assert not config.allow_http

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ("http://host", "begins with"),
            ("file:///tmp/x", "begins with"),
            ("s3://", "names no bucket"),
            ("s3://[bucket", "is not one"),
            ("s3:bucket", "names no bucket"),
            ("s3://me:secret@bucket", "from the environment"),
            ("object+file://tmp/x", "three slashes"),
            ("object+file:///", "three slashes"),
            ("object+file:///tmp/x?timout=3", "did you mean 'timeout'"),
            ("object+file:///dev/null/x", "cannot be used"),
            ("s3://bucket?timeout=0", "more than 0"),
            ("s3://bucket?retries=-1", "0 or more"),
            ("s3://bucket?concurrency=0", "1 to 64"),
            ("s3://bucket?allow_http=perhaps", "true or false"),
            ("s3://bucket?endpoint=nonsense", "https://host:port"),
            ("s3://bucket?region=a&region=b", "twice"),
            ("s3://bucket?regoin=a", "regoin"),
            ("az://container", "Account"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_sentence(self, wrong: str, says: str) -> None:
        with pytest.raises(InputError, match=says) as error:
            open_object(wrong, context())
        assert "\n" not in str(error.value)
        assert "secret" not in str(error.value)

    def test_a_bucket_that_is_not_there(self, server) -> None:
        with pytest.raises(InputError, match=r"s3://nowhere/x cannot be listed: .*404"):
            open_object(url(server, "nowhere/x"), context())

    @pytest.mark.parametrize("name", S3_CREDENTIALS)
    def test_credentials_that_are_refused(self, s3_url, monkeypatch, name) -> None:
        monkeypatch.setenv(name, "another")
        with pytest.raises(InputError, match=r"cannot be listed: .*403"):
            open_object(s3_url, context())

    @pytest.mark.parametrize("name", module.ENDPOINTS)
    @pytest.mark.parametrize("text", ["nonsense", "", "localhost:9000", "http://[bad"])
    def test_an_endpoint_of_the_environment_that_is_none(self, monkeypatch, name, text) -> None:
        monkeypatch.setenv(name, text)
        with pytest.raises(InputError, match=name):
            open_object("s3://bucket", context())

    @pytest.mark.parametrize("name", module.ENDPOINTS)
    def test_an_endpoint_of_the_environment_is_used(self, server, monkeypatch, name) -> None:
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.port}")
        place = f"s3://{BUCKET}/test/{next(prefixes)}?region=us-east-1&timeout=5"
        tier = open_object(place, context())
        assert_ok(tier.write([Chunk(1).key], [Chunk(1).buffer]))
        tier.close()

    def test_an_endpoint_in_the_url_is_never_passed_over(self, server, s3_url, monkeypatch) -> None:
        for name in module.ENDPOINTS:
            monkeypatch.setenv(name, "http://127.0.0.1:9")
            if name == module.FIRST_ENDPOINT:
                with pytest.raises(InputError, match=f"{name} in the environment"):
                    open_object(s3_url, context())
            else:
                tier = open_object(s3_url, context())
                assert tier.stats().state == "up"
                tier.close()
            monkeypatch.delenv(name)

    @pytest.mark.parametrize(
        ("name", "value", "place"),
        [
            ("AWS_SKIP_SIGNATURE", "perhaps", "s3://bucket"),
            ("AWS_REGION", "a b", "s3://bucket"),  # the client panics
            ("GOOGLE_SERVICE_ACCOUNT", "/no/such/file", "gs://bucket"),
            ("AZURE_ENDPOINT", "nonsense", "az://container?account_name=a"),
        ],
    )
    def test_another_variable_that_is_no_good(self, monkeypatch, name, value, place) -> None:
        monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=rf"from the environment: .*{name}") as error:
            open_object(place, context())
        assert "\n" not in str(error.value)
        assert S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in str(error.value)

    def test_the_extra_is_not_installed(self, monkeypatch) -> None:
        monkeypatch.setattr(module, "obstore", None)
        with pytest.raises(InputError, match=r"install ebbtide\[object\]"):
            open_object("s3://bucket", context())

    def test_each_store_can_be_made(self, monkeypatch) -> None:
        """No server for these: only that their settings are understood."""
        for place in (
            "az://container/x?account_name=a&account_key=a2V5",
            "gs://bucket/x?skip_signature=true",
        ):
            assert module._client(parse(place)) is not None
