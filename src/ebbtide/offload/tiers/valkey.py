"""Chunks in a Valkey or Redis server (6.0 or later), shared by all who use the same model and layout.

    valkey://[user:password@]host[:port][/database][?ttl=86400&timeout=2]

Schemes: valkey, redis; with TLS valkeys, rediss. ttl: seconds after its last use that a chunk is
forgotten; 0 for never. timeout: seconds that the server may take for one batch. ca: a file with the
certificate authority to trust.

A chunk is one string, an envelope, under ``ebbtide:<namespace>:<key>``, both in hex. Which chunks go when
memory runs out is the server's business (``maxmemory``, ``maxmemory-policy``): nothing here sets it. Where
it refuses a chunk for want of memory, the answer is FULL.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from ebbtide.errors import InputError
from ebbtide.offload.tiers import envelope
from ebbtide.offload.tiers.base import MISSING, OK, Entry, Result, Status, TierContext, TierStats
from ebbtide.offload.tiers.breaker import BreakerConfig
from ebbtide.offload.tiers.remote import Down, Line, RisingTotal, count, one_line, seconds, settings

try:
    import valkey
except ModuleNotFoundError:
    valkey = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

SCHEMES = ("valkey", "valkeys", "redis", "rediss")
PIECE_BYTES = 1 << 20  # of a value, per answer: the client takes twice as long over 8 MiB in one
BATCH_BYTES = 8 << 20  # of chunks, in one round trip: bounds what is lost with a connection
BATCH_KEYS = 1000  # in one round trip, where no chunks move
VALUE_BYTES_MAX = 512 << 20  # of a string, as servers come
PREFIX = "ebbtide:"
NO_STRING = "it is no string"
_NAME = re.compile(rb"ebbtide:([0-9a-f]{64}):((?:[0-9a-f]{2})+)")
_READ_BYTES = 256 << 10  # at a time from the socket

Command = tuple[object, ...]
Then = Callable[[int, Any], Any]  # of the number of a command, and its answer


@dataclass(frozen=True, slots=True)
class ValkeyConfig:
    host: str = "localhost"
    port: int = 6379
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca: str | None = None
    ttl_s: int = 86_400
    timeout_s: float = 2.0

    @property
    def server(self) -> str:
        """Its name in messages: no password."""
        return f"valkey at {self.host}:{self.port}/{self.database}"


class Envelope(NamedTuple):
    """A value to send, from where its payload lies."""

    head: bytes
    payload: memoryview


class Arrival:
    """A chunk that comes in pieces, each copied to its place in the buffer as soon as it is there."""

    def __init__(self, key: bytes, buffer: memoryview) -> None:
        self.key = key
        self.payload = buffer.cast("B")
        self.head = b""
        self.bytes = 0  # that came
        self.is_gone = False  # or cut: a piece of it is not there
        self.trouble: object = None  # an error, or Down

    def take(self, piece: slice, answer: object) -> None:
        if not isinstance(answer, bytes):
            self.trouble = answer
            return
        self.bytes += len(answer)
        self.is_gone |= not answer
        body = memoryview(answer)
        if piece.start == 0:
            self.head, body = answer[: envelope.HEADER_BYTES], body[envelope.HEADER_BYTES :]
        at = max(0, piece.start - envelope.HEADER_BYTES)
        body = body[: len(self.payload) - at]
        self.payload[at : at + len(body)] = body

    def is_spoiled(self, result: Result) -> bool:
        """Whether the server keeps something of no use: a bad value, or the beginning of one."""
        return result.status is Status.CORRUPT or (result is MISSING and self.bytes > 0)


Pieces = list[tuple[Arrival, slice]]


class Packer:
    """Writes commands as the protocol (RESP) has them; payloads of envelopes are not copied."""

    def pack(self, *args: object) -> list[bytes | memoryview]:
        words = [*str(args[0]).split(), *args[1:]]
        out: list[bytes | memoryview] = []
        text = [b"*%d\r\n" % len(words)]
        for word in words:
            if isinstance(word, Envelope):
                text.append(b"$%d\r\n%b" % (len(word.head) + len(word.payload), word.head))
                out += [b"".join(text), word.payload]
                text = [b"\r\n"]
            else:
                raw = word if isinstance(word, bytes) else str(word).encode()
                text.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        return [*out, b"".join(text)]


def open_valkey(url: str, context: TierContext) -> ValkeyTier:
    """Opens even where the server cannot be reached: it may come. Raises InputError where the URL is wrong,
    the server refuses the credentials or the database, or is a cluster."""
    config = parse(url)
    if valkey is None:
        raise InputError(f"{config.server} needs a client library: install ebbtide[valkey]")
    if context.chunk_bytes + envelope.HEADER_BYTES > VALUE_BYTES_MAX:
        raise InputError(
            f"a chunk of {context.chunk_bytes >> 20} MiB is larger than the 512 MiB that "
            "Valkey keeps under a key: use fewer blocks per chunk"
        )
    return ValkeyTier(config, context)


def parse(url: str) -> ValkeyConfig:
    """Raises InputError, which does not repeat the URL: it may hold a password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port or 6379
    except ValueError as error:
        raise InputError(f"the Valkey URL is not one: {error}") from None
    if parts.scheme not in SCHEMES:
        raise InputError(f"a Valkey URL begins with one of {', '.join(SCHEMES)}, then ://host:port")
    given = settings(parts.query, {"ttl": count, "timeout": seconds, "ca": str})
    named: dict[str, Any] = {
        {"ttl": "ttl_s", "timeout": "timeout_s"}.get(k, k): v for k, v in given.items()
    }
    return ValkeyConfig(
        host=host,
        port=port,
        database=_database(parts),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme in ("valkeys", "rediss"),
        **named,
    )


def _database(parts: SplitResult) -> int:
    text = parts.path.strip("/")
    if text and not (text.isascii() and text.isdecimal()):
        raise InputError(
            f"a Valkey URL ends in the number of a database, such as /0, not {parts.path!r}"
        )
    return int(text or 0)


class ValkeyTier:
    name = "valkey"
    immediate = False

    def __init__(self, config: ValkeyConfig, context: TierContext) -> None:
        self._config = config
        self._namespace = context.namespace
        self._value_bytes = envelope.HEADER_BYTES + context.chunk_bytes
        self._batch = max(1, BATCH_BYTES // self._value_bytes)
        self._client: Any = valkey.Valkey(connection_pool=_pool(config))
        # One failure opens it: a retry costs a connection, and a quarter of a second without hits is cheap.
        # A try may take a connection, and a batch each way.
        breaker = BreakerConfig(failures_max=1, probe_s=4 * config.timeout_s)
        self._line = Line(config.server, (valkey.ValkeyError, OSError), breaker)
        self._evictions = RisingTotal()
        self._greet()

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []
        for part in _parts(len(keys), BATCH_KEYS):
            answers = self._ask([("EXISTS", self._key(key)) for key in keys[part]])
            found += [answer == 1 for answer in answers]
        return found

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        results: list[Result] = []
        for part in _parts(len(keys), self._batch):
            arrivals = [
                Arrival(key, buffer) for key, buffer in zip(keys[part], buffers[part], strict=True)
            ]
            pieces = [
                (each, piece)
                for each in arrivals
                for piece in _parts(self._value_bytes, PIECE_BYTES)
            ]
            commands: list[Command] = [
                ("GETRANGE", self._key(each.key), piece.start, self._last(piece))
                for each, piece in pieces
            ]
            if self._config.ttl_s:
                commands += [("EXPIRE", self._key(key), self._config.ttl_s) for key in keys[part]]

            def take(n: int, answer: Any, pieces: Pieces = pieces) -> None:
                if n < len(pieces):
                    arrival, piece = pieces[n]
                    arrival.take(piece, answer)

            self._ask(commands, take)
            verdicts = [self._judge(each) for each in arrivals]
            self.delete([a.key for a, r in zip(arrivals, verdicts, strict=True) if a.is_spoiled(r)])
            results += verdicts
        return results

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        expiry = ("EX", self._config.ttl_s) if self._config.ttl_s else ()
        results: list[Result] = []
        for part in _parts(len(keys), self._batch):
            commands: list[Command] = []
            for key, buffer in zip(keys[part], buffers[part], strict=True):
                payload = buffer.cast("B")
                value = Envelope(envelope.header(self._namespace, key, payload), payload)
                commands.append(("SET", self._key(key), value, *expiry))
            results += [self._told(answer) for answer in self._ask(commands)]
        return results

    def delete(self, keys: Sequence[bytes]) -> list[Result]:
        return self._unlink([self._key(key) for key in keys])

    def clear(self) -> Result:
        for names in self._scan(_name(self._namespace)):
            told = self._told(names)
            if told is OK and names:
                told = self._told(self._ask([("UNLINK", *names)])[0])
            if told is not OK:
                return told
        return OK

    def entries(self) -> Iterator[Entry]:
        """One may come twice where the server's table grows meanwhile. To ask for them is no use of them."""
        for names in self._scan(PREFIX):
            if isinstance(names, Down | Exception):
                raise OSError(self._told(names).message)
            found = [match for match in map(_NAME.fullmatch, names) if match]
            if found:
                yield from self._described(found)

    def check(self, entry: Entry) -> Result:
        """For the server, this is a use of the chunk; for its TTL it is none."""
        name = _name(entry.namespace, entry.key)
        (value,) = self._ask([("GET", name)])
        if value is None:
            return MISSING
        if isinstance(value, bytes):
            body = memoryview(value)
            head, payload = body[: envelope.HEADER_BYTES], body[envelope.HEADER_BYTES :]
            wrong = envelope.verify(head, entry.namespace, entry.key, payload)
        elif _is_no_string(value):
            wrong = NO_STRING
        else:
            return self._told(value)
        return self._corrupt(name, wrong) if wrong else OK

    def remove(self, entries: Sequence[Entry]) -> list[Result]:
        return self._unlink([_name(entry.namespace, entry.key) for entry in entries])

    def stats(self) -> TierStats:
        """Asks the server. ``chunks``: keys of the whole database; the other figures are the server's own."""
        answer = self._line.ask(self._facts)
        if isinstance(answer, Down):
            return TierStats(evictions=self._evictions.total, state=self._line.state())
        info, keys = answer
        return TierStats(
            chunks=keys,
            bytes=int(info.get("used_memory", 0)),
            bytes_max=int(info.get("maxmemory", 0)) or None,
            evictions=self._evictions.read(int(info.get("evicted_keys", 0))),
            state=self._line.state(),
            note=memory_note(info, self._config.ttl_s),
        )

    def close(self) -> None:
        self._line.close()
        self._client.connection_pool.disconnect()

    def _greet(self) -> None:
        """Finds out at the start what would never work; a server that is not there yet is no such thing."""

        def hello() -> str:
            try:
                self._client.ping()
            except (valkey.AuthenticationError, valkey.ResponseError) as error:
                return one_line(error)
            return "it is a cluster" if self._facts()[0].get("cluster_enabled") else ""

        trouble = self._line.ask(hello)
        if isinstance(trouble, Down):
            log.warning("going on without %s; it is used as soon as it answers", trouble.why)
        elif trouble:
            self.close()
            raise InputError(f"{self._config.server} cannot be used: {trouble}")

    def _facts(self) -> tuple[dict[str, Any], int]:
        """What the server tells of itself, and how many keys it has: as far as this user may know."""
        try:
            return self._client.info(), self._client.dbsize()
        except valkey.ResponseError:
            return {}, 0

    def _key(self, key: bytes) -> str:
        return _name(self._namespace, key)

    def _unlink(self, names: Sequence[str]) -> list[Result]:
        results: list[Result] = []
        for part in _parts(len(names), BATCH_KEYS):
            told = self._told(self._ask([("UNLINK", *names[part])])[0])
            results += [told] * len(names[part])
        return results

    def _scan(self, prefix: str) -> Iterator[Any]:
        """Names that begin with ``prefix``, a list at a time; last of all what went wrong, if anything did.

        This goes through all keys of the database, since a server finds keys by their beginning in no other
        way; other clients are served meanwhile.
        """
        cursor = 0
        while True:
            (answer,) = self._ask([("SCAN", cursor, "MATCH", prefix + "*", "COUNT", BATCH_KEYS)])
            if isinstance(answer, Down | Exception):
                yield answer
                return
            cursor = int(answer[0])
            yield answer[1]
            if cursor == 0:
                return

    def _described(self, found: list[re.Match[bytes]]) -> Iterator[Entry]:
        asked = [question for match in found for question in _about(match[0])]
        answers, now = self._ask(asked), time.time()
        for n, match in enumerate(found):
            size, idle_s, left_ms = answers[3 * n : 3 * n + 3]
            for answer in (size, left_ms):
                if isinstance(answer, Down | Exception):
                    raise OSError(self._told(answer).message)
            if size is not None:
                namespace, key = (bytes.fromhex(text.decode()) for text in match.groups())
                yield Entry(namespace, key, size, self._used_at(now, idle_s, left_ms))

    def _used_at(self, now: float, idle_s: object, left_ms: int) -> float | None:
        """A server that evicts by frequency knows no idle time: then what is left of the TTL tells it."""
        if isinstance(idle_s, int):
            return now - idle_s
        is_ours = 0 <= left_ms <= 1000 * self._config.ttl_s  # or of one who has another ttl
        return now - self._config.ttl_s + left_ms / 1000 if is_ours else None

    def _ask(self, commands: Sequence[Command], then: Then | None = None) -> list[Any]:
        """Per command: the server's answer, its refusal (a ResponseError), or Down; or what ``then`` makes
        of it as soon as it is there, so that only one value is held at a time."""
        then = then or (lambda n, answer: answer)
        answers = self._line.ask(lambda: self._exchange(commands, then))
        if isinstance(answers, Down):
            return [then(n, answers) for n in range(len(commands))]
        return answers

    def _exchange(self, commands: Sequence[Command], then: Then) -> list[Any]:
        """All commands in one go, then their answers. The client's own pipeline would collect the answers
        first, which takes 1.5 times as long for values of this size: the memory is new each time."""
        connections = self._client.connection_pool
        connection = connections.get_connection("")
        answers = []
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for n in range(len(commands)):
                try:
                    answer = connection.read_response()
                except valkey.ResponseError as refusal:
                    answer = refusal
                answers.append(then(n, answer))
        except BaseException:
            connection.disconnect()  # answers are left in it
            raise
        finally:
            connections.release(connection)
        return answers

    def _last(self, piece: slice) -> int:
        """Number of the last byte to ask for. At the end one more than there should be: so a value that is
        too large is noticed, and does not come whole."""
        is_last = piece.stop == self._value_bytes
        return self._value_bytes if is_last else int(piece.stop) - 1

    def _judge(self, arrival: Arrival) -> Result:
        trouble = arrival.trouble
        if trouble is None and arrival.is_gone:
            return MISSING
        if trouble is None:
            wrong = f"it has not {self._value_bytes} bytes"
            if arrival.bytes == self._value_bytes:
                wrong = envelope.verify(arrival.head, self._namespace, arrival.key, arrival.payload)
        elif _is_no_string(trouble):
            wrong = NO_STRING
        else:
            return self._told(trouble)
        return self._corrupt(self._key(arrival.key), wrong) if wrong else OK

    def _corrupt(self, name: str, wrong: str) -> Result:
        return Result(Status.CORRUPT, f"{self._config.server}, {name}: {wrong}")

    def _told(self, answer: object) -> Result:
        """What an answer to a change means."""
        if isinstance(answer, Down):
            return Result(Status.FAILED, answer.why)
        if isinstance(answer, valkey.exceptions.OutOfMemoryError):
            return Result(Status.FULL, f"{self._config.server}: {one_line(answer)}")
        if isinstance(answer, Exception):
            return Result(Status.FAILED, f"{self._config.server}: {one_line(answer)}")
        return OK


def memory_note(info: Mapping[str, Any], ttl_s: int) -> str:
    """What is unwise about the server's memory settings, in a sentence; "" where nothing is known to be."""
    policy = str(info.get("maxmemory_policy", ""))
    if not policy:
        return ""
    if not int(info.get("maxmemory", 0)):
        return "maxmemory is not set, so the server takes memory without limit"
    if policy == "noeviction":
        return "maxmemory-policy is noeviction, so a full server refuses chunks and keeps old ones"
    if policy.startswith("volatile-") and not ttl_s:
        return f"maxmemory-policy is {policy}, which evicts no chunks, since ttl=0 lets none expire"
    return ""


def _name(namespace: bytes, key: bytes = b"") -> str:
    return f"{PREFIX}{namespace.hex()}:{key.hex()}"


def _about(name: bytes) -> list[Command]:
    """Three questions about a key, none of which the server takes for its use."""
    return [("MEMORY USAGE", name), ("OBJECT IDLETIME", name), ("PTTL", name)]


def _is_no_string(answer: object) -> bool:
    return isinstance(answer, Exception) and str(answer).startswith("WRONGTYPE")


def _pool(config: ValkeyConfig) -> Any:
    """Connections, as many as there are threads that call at once."""
    options: dict[str, Any] = {"connection_class": valkey.Connection}
    if config.tls:
        options = {"connection_class": valkey.SSLConnection, "ssl_ca_certs": config.ca}
    return valkey.ConnectionPool(
        host=config.host,
        port=config.port,
        db=config.database,
        username=config.username,
        password=config.password,
        socket_timeout=config.timeout_s,
        socket_connect_timeout=config.timeout_s,
        socket_keepalive=True,
        socket_read_size=_READ_BYTES,
        command_packer=Packer(),
        **options,
    )


def _parts(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
