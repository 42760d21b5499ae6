"""llama.cpp through llama-cpp-python, with the 4-bit file. One request at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from protocol import Ran, Request, serve


class LlamaCpp:
    def __init__(self, settings: dict[str, Any]) -> None:
        from llama_cpp import Llama

        threads = settings["threads"]
        self._llama = Llama(
            settings["file"],
            n_ctx=settings["length"],
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def run(self, requests: Sequence[Request], limit: int) -> Ran:
        """``generate`` keeps the KV of the prefix that a prompt shares with the one before it."""
        first, outputs = [], []
        begin = time.perf_counter()
        for prompt, count in requests:
            handed_in = time.perf_counter()
            tokens = self._llama.generate(prompt, temp=0.0)
            output = [next(tokens)]
            first.append(time.perf_counter() - handed_in)
            output += [next(tokens) for _ in range(count - 1)]
            outputs.append(output)
        return Ran(time.perf_counter() - begin, first, outputs)


if __name__ == "__main__":
    serve(LlamaCpp)
