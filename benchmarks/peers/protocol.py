"""What a worker of ``bench_peers`` is: an engine that runs requests, driven by lines of JSON.

The only thing asked of an engine is ``run``; every figure is derived from that by the driver, so that
all engines are measured alike. Imports nothing heavy: the time of a start begins here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Request(NamedTuple):
    """A prompt of token ids, and how many tokens are to follow, greedily, whatever they are."""

    prompt: list[int]
    count: int


class Ran(NamedTuple):
    """seconds: for all. first: seconds to each request's first token, from when it was handed in."""

    seconds: float
    first: list[float]
    outputs: list[list[int]]


class Peer(Protocol):
    def run(self, requests: Sequence[Request], limit: int) -> Ran:
        """Run requests in this order, at most ``limit`` of them at a time."""
        ...


def serve(make: Callable[[dict[str, object]], Peer]) -> None:
    """Answer each line of standard input with a line on what standard output was at the start; what
    the engine prints goes to standard error. The first line says how to make the engine."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = make(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        requests, limit = json.loads(line)
        ran = peer.run([Request(*each) for each in requests], limit)
        print(json.dumps(ran), file=answers, flush=True)
