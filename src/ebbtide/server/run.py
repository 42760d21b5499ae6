"""A whole server: the port, the engine, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ebbtide.server.app import create_app
from ebbtide.server.config import ServerConfig

if TYPE_CHECKING:
    from ebbtide.engine.async_engine import AsyncEngine
    from ebbtide.engine.config import EngineConfig

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

# What may pass after the grace period until the last answers are written and connections closed.
CLOSING_S = 1.0

AT_ONCE = "Ctrl-C ends at once"

Say = Callable[[str], None]

log = logging.getLogger("ebbtide.server")


class BindError(Exception):
    """The address cannot be listened on. Its text is a sentence; ``field`` is "host" or "port"."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises ``BindError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise BindError(f"the host {host!r} is not known: {error}", "host") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def _bind_error(host: str, port: int, error: OSError) -> BindError:
    return BindError(
        f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}",
        "host" if error.errno == errno.EADDRNOTAVAIL else "port",
    )


def url_of(sock: socket.socket) -> str:
    """The base URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    engine_config: EngineConfig,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    config: ServerConfig | None = None,
    progress: Callable[[str, float], None] | None = None,
    ready: Say | None = None,
    stopping: Say | None = None,
) -> str:
    """Load the model and serve it until SIGINT or SIGTERM; a second signal exits at once.

    The port is taken before the model is loaded. ``ready`` gets the base URL once requests are
    answered, ``stopping`` a sentence on each thing that the end waits for. Returns what the tiers below
    the host tier keep, in sentences. Raises ``BindError``, and ``InputError`` for settings or a model
    that cannot work.
    """
    with bind(host, port) as sock:
        from ebbtide.engine.async_engine import AsyncEngine

        engine = AsyncEngine.start(engine_config, progress)
        return serve_engine(engine, sock, config=config, ready=ready, stopping=stopping)


def serve_engine(
    engine: AsyncEngine,
    sock: socket.socket,
    *,
    config: ServerConfig | None = None,
    ready: Say | None = None,
    stopping: Say | None = None,
) -> str:
    """Serve a running engine on a bound socket, like ``serve``; closes both at the end."""
    return asyncio.run(Server(engine, config or ServerConfig(), ready, stopping).run(sock))


class Server(uvicorn.Server):
    """uvicorn's server with our signals and our end: refuse, let finish, cut, close the engine."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        ready: Say | None = None,
        stopping: Say | None = None,
    ) -> None:
        app = create_app(engine, config)
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(config.grace_s + CLOSING_S)),
            )
        )
        self._engine = engine
        self._service = app.state.service
        self._grace_s = config.grace_s
        self._ready = ready
        self._stopping = stopping

    async def run(self, sock: socket.socket) -> str:  # type: ignore[override]
        """Serve until told to stop. Returns what is kept of the KV. Raises ``BindError`` if the port
        was taken meanwhile."""
        url = url_of(sock)
        with self.capture_signals():  # a second signal counts while the engine closes, too
            try:
                await self.serve([sock])
            finally:
                kept = await self._close_engine()
        log.info("stopped serving %s", url)
        return kept

    async def _close_engine(self) -> str:
        """A step cannot be interrupted, and what is to be kept is written: both may take a while."""
        closing = asyncio.ensure_future(self._engine.close())
        await asyncio.wait((closing,), timeout=CLOSING_S)
        if not closing.done():
            what = "the steps in flight, and for KV that is to be kept"
            self._tell(f"Stopping: waiting for {what} ({AT_ONCE}).")
        return await closing

    def _tell(self, sentence: str) -> None:
        if self._stopping is not None:
            self._stopping(sentence)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "the socket is bound before the model is loaded"
        try:
            await super().startup(sockets)
        except OSError as error:
            host, port = sockets[0].getsockname()[:2]
            raise _bind_error(host, port, error) from None
        if self._ready is not None:
            self._ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        if unfinished := self._service.unfinished:
            requests = "1 request has" if unfinished == 1 else f"{unfinished} requests have"
            self._tell(f"Stopping: {requests} {self._grace_s:g} s to finish ({AT_ONCE}).")
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._service.end_all)
        await super().shutdown(sockets)
        timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take SIGINT and SIGTERM while serving; in another than the main thread, leave them."""
        try:
            before = {
                number: signal.signal(number, self.handle_exit)
                for number in (signal.SIGINT, signal.SIGTERM)
            }
        except ValueError:
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
