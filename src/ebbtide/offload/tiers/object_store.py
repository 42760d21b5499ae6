"""Chunks in an object store, or in a folder that is treated as one.

    s3://bucket/prefix    gs://bucket/prefix    az://container/prefix    object+file:///folder

Settings in the query: timeout, the seconds that a request may take in all (10); retries after errors
that may pass (2); concurrency, the requests at once for each of reading and writing (8; four times as many
look up); allow_http, which an endpoint that begins with http:// implies. All others are the client's own
(``obstore``): endpoint, region, skip_signature, account_name and so on. Credentials come from where the
cloud's own tools take them: the environment, or the machine's role.

An object is an envelope, named ``prefix/<namespace>/<2 digits>/<key>``, all in hex. It is published whole
or not at all, by one request. Nothing here limits how much is kept, or for how long: give the bucket a
lifecycle rule that deletes what is under the prefix some days after it was written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from ebbtide.errors import InputError
from ebbtide.offload.tiers import envelope
from ebbtide.offload.tiers.base import MISSING, OK, Entry, Result, Status, TierContext, TierStats
from ebbtide.offload.tiers.breaker import BreakerConfig
from ebbtide.offload.tiers.remote import Down, Line, count, flag, one_line, seconds, settings

try:
    import obstore
    from obstore import exceptions, store
except ModuleNotFoundError:
    obstore = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

LOCAL = "object+file"
SCHEMES = ("s3", "gs", "az", LOCAL)
CONCURRENCY_MAX = 64
LOOKUPS_PER_READ = 4  # at once: a lookup waits for the network only, and a request for its lookups
VARIABLES = {
    "s3": "AWS_",
    "gs": "GOOGLE_",
    "az": "AZURE_",
    LOCAL: "-",
}  # what the client reads begins so
FIRST_ENDPOINT = "AWS_ENDPOINT_URL_S3"  # for the client: also before that of a URL
ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", FIRST_ENDPOINT)
_LISTED = 1000  # objects at a time
_NAME = re.compile(r"([0-9a-f]{64})/[0-9a-f]{2}/((?:[0-9a-f]{2})+)")
_FULL = ("No space left on device", "QuotaExceeded", "InsufficientStorage", "StorageFull")
_REASONS = (
    "Connection refused",
    "TimedOut",
    "dns error",
    "certificate",
)  # deep in the client's text
T = TypeVar("T")


class ClientPanicError(Exception):
    """The client hit a wall inside, on a setting that it had not looked at before: no error of its own."""


@dataclass(frozen=True, slots=True)
class ObjectConfig:
    url: str  # without its query
    timeout_s: float = 10.0
    retries: int = 2
    concurrency: int = 8
    allow_http: bool = False
    client: dict[str, str] = field(default_factory=dict, repr=False)  # may hold a secret


def open_object(url: str, context: TierContext) -> ObjectTier:
    """Opens even where the store cannot be reached: it may come. Raises InputError where the URL is wrong,
    the bucket is not there, or the credentials do not allow to list it."""
    config = parse(url)
    if obstore is None:
        raise InputError(f"{config.url} needs a client library: install ebbtide[object]")
    return ObjectTier(config, context)


def parse(url: str) -> ObjectConfig:
    """Raises InputError."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"the object store's URL is not one: {error}") from None
    if parts.scheme not in SCHEMES:
        raise InputError(f"an object store's URL begins with one of {', '.join(SCHEMES)}, then ://")
    if parts.username or parts.password:
        raise InputError("an object store's credentials come from the environment, not its URL")
    if parts.scheme == LOCAL and (parts.netloc or len(parts.path) < 2):
        raise InputError(f"a folder's URL has three slashes and its path, as {LOCAL}:///folder")
    if parts.scheme != LOCAL and not parts.netloc:
        raise InputError(f"the URL names no bucket: write {parts.scheme}://bucket/prefix")
    ours: dict[str, Callable[[str], object]] = {"timeout": seconds, "retries": count}
    ours |= {"concurrency": _concurrency, "allow_http": flag}
    theirs: dict[str, Callable[[str], object]] = {}
    if parts.scheme != LOCAL:
        names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        theirs = {name: _endpoint if "endpoint" in name else str for name in names}
    given: dict[str, Any] = settings(parts.query, theirs | ours)
    client = {name: given.pop(name) for name in theirs if name not in ours}
    endpoints = [text for name, text in client.items() if "endpoint" in name]
    if parts.scheme == "s3":
        endpoints = _s3_endpoints(endpoints)
    if any(text.startswith("http://") for text in endpoints):
        given.setdefault("allow_http", True)
    if "timeout" in given:
        given["timeout_s"] = given.pop("timeout")
    return ObjectConfig(f"{parts.scheme}://{parts.netloc}{parts.path}", client=client, **given)


def _concurrency(text: str) -> int:
    value = count(text)
    if not 1 <= value <= CONCURRENCY_MAX:
        raise ValueError(f"give 1 to {CONCURRENCY_MAX}")
    return value


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give a URL such as https://host:port")
    return text


def _s3_endpoints(in_url: list[str]) -> list[str]:
    """Those of the URL, else of the environment, which the client would not check until it is too late."""
    given = [(name, os.environ[name]) for name in ENDPOINTS if name in os.environ]
    for name, text in given:
        if in_url and name == FIRST_ENDPOINT:
            raise InputError(
                f"the URL names an endpoint, but {name} in the environment goes before it: unset one"
            )
        try:
            _endpoint(text)
        except ValueError as error:
            raise InputError(
                f"the environment variable {name}={text!r} is no good: {error}"
            ) from None
    return in_url or [text for _, text in given]


class ObjectTier:
    name = "object"
    immediate = False

    def __init__(self, config: ObjectConfig, context: TierContext) -> None:
        self._config = config
        self._namespace = context.namespace
        self._object_bytes = envelope.HEADER_BYTES + context.chunk_bytes
        self._folder = context.namespace.hex()
        self._store = _client(config)
        # The client has tried again by itself; one request of many may still fail for its own reasons.
        # A try may take its own time limit, and that of its retries.
        breaker = BreakerConfig(failures_max=3, probe_s=3 * config.timeout_s)
        errors = (exceptions.BaseError, OSError, ClientPanicError)
        self._line = Line(config.url, errors, breaker, describe=_describe)
        # Pools apart, so that neither a read nor a lookup waits behind a long row of writes.
        lookups = LOOKUPS_PER_READ * config.concurrency
        self._lookups, self._reads, self._writes = (
            ThreadPoolExecutor(count, f"object-{what}")
            for what, count in (
                ("lookup", lookups),
                ("read", config.concurrency),
                ("write", config.concurrency),
            )
        )
        self._greet()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        return [found is True for found in self._each(self._lookups, self._head, keys)]

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return _results(self._each(self._reads, self._get, keys, buffers))

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return _results(self._each(self._writes, self._put, keys, buffers))

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        return _results(self._each(self._writes, self._delete, list(map(self._path, keys))))

    def clear(self) -> Result:
        return _results([self._ask(self._clear)])[0]

    def entries(self) -> Iterator[Entry]:
        """``used_at`` is when it was written: a store knows no more."""
        listing = self._ask(lambda: iter(obstore.list(self._store, chunk_size=_LISTED)))
        while True:
            page = listing if isinstance(listing, Down) else self._ask(lambda: next(listing, None))
            if isinstance(page, Down):
                raise OSError(page.why)
            if page is None:
                return
            for found in page:
                if match := _NAME.fullmatch(found["path"]):
                    namespace, key = map(bytes.fromhex, match.groups())
                    yield Entry(namespace, key, found["size"], found["last_modified"].timestamp())

    def check(self, entry: Entry) -> Result:
        return _results([self._ask(lambda: self._check(entry))])[0]

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        paths = [_path(entry.namespace, entry.key) for entry in entries]
        return _results(self._each(self._writes, self._delete, paths))

    def stats(self) -> TierStats:
        """Counts nothing: a store would have to be listed for that, which takes long and may cost."""
        return TierStats(state=self._line.state())

    def close(self) -> None:
        self._line.close()
        for pool in (self._lookups, self._reads, self._writes):
            pool.shutdown()

    def _greet(self) -> None:
        """Finds out at the start what would never work; a store that is not there yet is no such thing."""

        store, folder = self._store, self._folder

        def hello() -> str:
            try:
                _without_panic(lambda: next(iter(obstore.list(store, folder, chunk_size=1)), None))
            except ClientPanicError as error:
                return _describe(error) + _blame(self._config.url, str(error))
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                return _describe(error)
            except exceptions.BaseError as error:
                if re.search(r"status code: 4(?!08|29)", str(error)):  # not those that may pass
                    return _describe(error)
                raise
            return ""

        trouble = self._line.ask(hello)
        if isinstance(trouble, Down):
            self._line.trip(trouble.why)
            log.warning("going on without %s; it is used as soon as it answers", trouble.why)
        elif trouble:
            self.close()
            raise InputError(f"{self._config.url} cannot be listed: {trouble}")

    def _ask(self, question: Callable[[], T]) -> T | Down:
        return self._line.ask(partial(_without_panic, question))

    def _each(
        self, pool: ThreadPoolExecutor, act: Callable[..., Any], *columns: Sequence[Any]
    ) -> list[Any]:
        """What ``act`` returns for each row, or Down. None is at work any more when this returns."""
        rows = list(zip(*columns, strict=True))
        running: list[Future[Any]] = []
        with contextlib.suppress(RuntimeError):  # the pool is shut down: the tier was closed
            for row in rows:
                running.append(pool.submit(self._ask, partial(act, *row)))
        answers = [each.result() for each in running]
        return answers + [Down(f"{self._config.url} was closed")] * (len(rows) - len(answers))

    def _path(self, key: bytes) -> str:
        return _path(self._namespace, key)

    def _head(self, key: bytes) -> bool:
        try:
            size: int = obstore.head(self._store, self._path(key))["size"]
        except FileNotFoundError:
            return False
        return size == self._object_bytes

    def _get(self, key: bytes, buffer: memoryview) -> Result:
        """Piece by piece from the socket into the buffer: no object is held besides it."""
        try:
            found = obstore.get(self._store, self._path(key))
        except FileNotFoundError:
            return MISSING
        payload, head = buffer.cast("B"), b""
        if found.meta["size"] == self._object_bytes:
            head = _fill(payload, found.stream(min_chunk_size=1))
            wrong = envelope.verify(head, self._namespace, key, payload)
        else:
            wrong = f"it has {found.meta['size']} bytes, not {self._object_bytes}"
        if not wrong:
            return OK
        self._delete(self._path(key))
        return self._corrupt(self._path(key), wrong)

    def _put(self, key: bytes, buffer: memoryview) -> Result:
        payload = buffer.cast("B")
        whole = b"".join((envelope.header(self._namespace, key, payload), payload))
        try:
            # In one request, which replaces what is there: what is stored under a key is always the same.
            obstore.put(self._store, self._path(key), whole, use_multipart=False)
        except (exceptions.BaseError, OSError) as error:
            if not any(word in str(error) for word in _FULL):
                raise
            return Result(Status.FULL, f"{self._config.url}: {_describe(error)}")
        return OK

    def _delete(self, path: str) -> Result:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, path)
        return OK

    def _check(self, entry: Entry) -> Result:
        path = _path(entry.namespace, entry.key)
        try:
            value = memoryview(obstore.get(self._store, path).bytes())
        except FileNotFoundError:
            return MISSING
        head, payload = value[: envelope.HEADER_BYTES], value[envelope.HEADER_BYTES :]
        wrong = envelope.verify(head, entry.namespace, entry.key, payload)
        return self._corrupt(path, wrong) if wrong else OK

    def _corrupt(self, path: str, wrong: str) -> Result:
        return Result(Status.CORRUPT, f"{self._config.url}, {path}: {wrong}")

    def _clear(self) -> Result:
        for page in obstore.list(self._store, self._folder, chunk_size=_LISTED):
            paths = [found["path"] for found in page]
            try:
                obstore.delete(self._store, paths)
            except FileNotFoundError:  # somebody else deletes, too
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._store, path)
        return OK


def _client(config: ObjectConfig) -> Any:
    """Raises InputError where it cannot be made of the settings."""
    try:
        return _without_panic(partial(_make_client, config))
    except (exceptions.BaseError, OSError, ValueError, ClientPanicError) as error:
        why = _describe(error) + _blame(config.url, str(error))
        raise InputError(f"{config.url} cannot be used: {why}") from None


def _make_client(config: ObjectConfig) -> Any:
    scheme, path = config.url.split("://", 1)
    if scheme == LOCAL:
        return store.LocalStore(unquote(path), mkdir=True)
    return store.from_url(
        config.url,
        config=config.client,  # type: ignore[call-overload]
        client_options={
            "timeout": timedelta(seconds=config.timeout_s),
            "connect_timeout": timedelta(seconds=config.timeout_s),
            "allow_http": config.allow_http,
        },
        retry_config={
            "max_retries": config.retries,
            "retry_timeout": timedelta(seconds=config.timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    )


def _without_panic(question: Callable[[], T]) -> T:
    """A panic of the client is a BaseException, which nobody above expects, of a class not to be had."""
    try:
        return question()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ClientPanicError(f"the client gave up: {error}") from None


def _blame(url: str, text: str) -> str:
    """The environment variables that may have brought the trouble: their names only, they may be secrets.

    Those whose value ``text`` repeats; after a panic, which does not say, all that the client reads.
    """
    prefix = VARIABLES[urlsplit(url).scheme]
    given = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
    named = [name for name, value in given.items() if len(value) > 1 and value in text]
    if text.startswith("the client gave up"):
        named = named or list(given)
    return f" (from the environment: {', '.join(sorted(named))})" if named else ""


def _path(namespace: bytes, key: bytes) -> str:
    name = key.hex()
    return f"{namespace.hex()}/{name[:2]}/{name}"


def _fill(payload: memoryview, pieces: Any) -> bytes:
    """Write what follows the header into ``payload``. Returns the header."""
    head, at = b"", 0
    for piece in pieces:
        missing = envelope.HEADER_BYTES - len(head)
        head += piece[:missing]
        rest = memoryview(piece)[missing:][: len(payload) - at]
        payload[at : at + len(rest)] = rest
        at += len(rest)
    return head


def _results(answers: Sequence[Any]) -> list[Result]:
    return [
        Result(Status.FAILED, answer.why) if isinstance(answer, Down) else answer
        for answer in answers
    ]


def _describe(error: Exception) -> str:
    """One line, without the server's XML; why the network failed is further down in what the client says."""
    deeper = [reason for reason in _REASONS if reason in str(error)]
    line = one_line(error).partition(": <")[0]
    return " ".join([line, *(f"({reason})" for reason in deeper[:1])])
