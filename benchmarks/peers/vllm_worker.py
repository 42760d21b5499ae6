"""vLLM for CPU as it comes: compiled, prefix caching on. Driven step by step through ``LLMEngine``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from protocol import Ran, Request, serve


class VLLM:
    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._engine = LLM(
            settings["directory"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=settings["length"],
            kv_cache_memory_bytes=settings["kv_bytes"],
        ).llm_engine
        self._params = SamplingParams
        self._names = itertools.count()

    def run(self, requests: Sequence[Request], limit: int) -> Ran:
        first = [0.0] * len(requests)
        outputs: list[list[int]] = [[] for _ in requests]
        waiting = iter(range(len(requests)))
        running: dict[str, tuple[int, float]] = {}

        def hand_in() -> None:
            for number in itertools.islice(waiting, limit - len(running)):
                prompt, count = requests[number]
                params = self._params(
                    temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
                )
                name = str(next(self._names))
                running[name] = (number, time.perf_counter())
                self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

        begin = time.perf_counter()
        hand_in()
        while running:
            for output in self._engine.step():
                number, handed_in = running[output.request_id]
                if not first[number]:
                    first[number] = time.perf_counter() - handed_in
                outputs[number] = list(output.outputs[0].token_ids)
                if output.finished:
                    del running[output.request_id]
            hand_in()
        return Ran(time.perf_counter() - begin, first, outputs)


if __name__ == "__main__":
    serve(VLLM)
