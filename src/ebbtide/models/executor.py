"""Runs step plans with PyTorch, in order, on a thread of its own.

Invariants: only the worker touches ``_sampled``, and the model and the blocks while a plan runs. A
step that raises becomes an outcome with ``error``; the worker lives on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from ebbtide.core.plan import StepOutcome, StepPlan, Transfer, TransferResult
from ebbtide.models.kv import KVMemory
from ebbtide.models.llama import LlamaModel
from ebbtide.models.sampler import Ask, sample
from ebbtide.models.threads import release_idle_threads


class TorchExecutor:
    """``core.plan.Executor`` for a PyTorch model.

    load: does one of a plan's loads, on the worker thread, before the plan's compute. Where its
    result has an ``error``, the destination blocks are reported as invalid; the step goes on.

    The worker computes with as many threads as PyTorch is set to when the executor is made; no other
    thread should run large PyTorch operations beside it (``models/threads.py`` says what they cost).

    After a step that failed, a row of the next plan that waits for its token is fed token 0: the
    scheduler drops what that row brings, and the rows beside it are right.
    """

    def __init__(
        self, model: LlamaModel, kv: KVMemory, load: Callable[[Transfer], TransferResult]
    ) -> None:
        assert model.layout == kv.layout, "model and KV memory have different layouts"
        self._model = model
        self._kv = kv
        self._load = load
        self._sampled: Mapping[str, int] | None = {}  # by the last plan; None: it failed
        release_idle_threads()  # those that building the model took
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="ebbtide-step",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )

    def submit(self, plan: StepPlan) -> Future[StepOutcome]:
        """Queue a plan. Raises ``RuntimeError`` after ``close``."""
        return self._worker.submit(self._run, plan)

    def close(self) -> None:
        """Finish what was submitted, then end the worker."""
        self._worker.shutdown(wait=True)

    def _run(self, plan: StepPlan) -> StepOutcome:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                outcome = self._step(plan)
            return replace(outcome, seconds=time.perf_counter() - start)
        except Exception as error:
            self._sampled = None
            return StepOutcome(error=error)

    def _step(self, plan: StepPlan) -> StepOutcome:
        results = [self._load(transfer) for transfer in plan.loads]
        invalid = frozenset(
            block for result in results if result.error for block in result.transfer.blocks
        )
        if not plan.rows:
            self._sampled = {}
            return StepOutcome(invalid_blocks=invalid)
        fed = self._fed(plan)
        batch = self._model.plan(plan.rows, fed)
        logits = self._model.forward(batch, self._kv)
        places = [i for i, row in enumerate(plan.rows) if row.sampling is not None]
        asks = []
        for i in places:
            row = plan.rows[i]
            assert row.sampling is not None
            asks.append(Ask(row.sampling, row.output_index, row.tokens, row.end, fed.get(i)))
        tokens, logprobs = sample(logits, asks) if asks else ([], {})
        self._sampled = {
            plan.rows[i].request_id: token for i, token in zip(places, tokens, strict=True)
        }
        return StepOutcome(
            tokens=tuple(tokens),
            logprobs={places[k]: value for k, value in logprobs.items()},
            invalid_blocks=invalid,
        )

    def _fed(self, plan: StepPlan) -> dict[int, int]:
        """Row number -> the token that the preceding step sampled for it, where the row feeds it."""
        waiting = [i for i, row in enumerate(plan.rows) if row.end > row.known]
        if self._sampled is None:
            return dict.fromkeys(waiting, 0)
        return {i: self._sampled[plan.rows[i].request_id] for i in waiting}
