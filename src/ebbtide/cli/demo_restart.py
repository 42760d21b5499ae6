"""The demo's second part: a server is killed and started again, and its conversations go on from disk."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebbtide.cli.options import Failure
from ebbtide.engine.output import Usage

START_S = 120.0  # until a server that does not answer has failed
SETTLED_S = 0.5


class Server:
    """``ebbtide serve`` as a process of its own, and its only client."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        command = [sys.executable, "-m", "ebbtide.cli.main", "serve", "--port", "0", *arguments]
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            self.url = self._wait_for_url()
        except BaseException:  # also where we are told to end meanwhile
            self.kill()
            raise

    def _wait_for_url(self) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            said = self._log.read_text()
            if found := re.search(r"(http://\S+)/v1", said):
                return found[1]
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise Failure(f"the server did not start: {self._log.read_text()[-500:].strip()}")

    def kill(self) -> None:
        """No warning, no time to put things in order."""
        self._process.kill()
        self._process.wait()

    def ask(self, history: list[dict[str, str]], max_tokens: int) -> tuple[float, str, Usage]:
        """Seconds to the first token, the answer, and where the prompt's KV came from."""
        body = {
            "model": self._get("/v1/models")["data"][0]["id"],
            "messages": history,
            "temperature": 0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        start = time.perf_counter()
        first_s, answer, usage = 0.0, "", None
        with urllib.request.urlopen(request) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content") or ""
                    if text and not first_s:
                        first_s = time.perf_counter() - start
                    answer += text
        assert usage is not None
        return first_s, answer, _usage(usage)

    def settle(self) -> None:
        """Wait until all that is to be kept is on the disk."""
        chunks, since = -1.0, time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            with urllib.request.urlopen(f"{self.url}/metrics") as response:
                found = re.search(r'tier_chunks\{tier="file"\} (\S+)', response.read().decode())
            now = float(found[1]) if found else 0.0
            if now != chunks:
                chunks, since = now, time.monotonic()
            time.sleep(0.05)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path) as response:
            return json.load(response)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _usage(said: dict[str, Any]) -> Usage:
    sources = dict(said["prompt_tokens_details"])
    sources.pop("cached_tokens")
    own = {name: sources.pop(name) for name in ("device", "host", "computed")}
    return Usage(said["prompt_tokens"], said["completion_tokens"], **own, tiers=sources)


@contextmanager
def lives(arguments: Sequence[str]) -> Iterator[Iterator[Server]]:
    """Servers one after the other, each killed before the next, on one directory that is removed at
    the end, also where that is SIGTERM."""
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="ebbtide-demo-") as folder:
        log = Path(folder) / "log"
        living: list[Server] = []

        def each() -> Iterator[Server]:
            while True:
                while living:
                    living.pop().kill()
                living.append(Server([*arguments, "--disk", f"{folder}/kv"], log))
                yield living[0]

        try:
            yield each()
        finally:
            for server in living:
                server.kill()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises ``SystemExit``, so that what was begun is put in order."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
