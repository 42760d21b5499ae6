"""The step loop: the one place where decisions meet I/O, and the only thread that runs steps.

    schedule -> submit -> (hand out what the step before brought) -> wait -> apply -> ...

What a step brought is handed out after the next step was submitted. With two plans in flight the device
has work all the while, and scheduling, detokenising and streaming hide behind it; with one, it waits for
them (``docs/performance.md``). The scheduler is guarded by one lock, held for decisions only,
never while a step runs or bytes move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ebbtide.core.output import Output
from ebbtide.core.plan import Executor, StepFuture, StepOutcome, StepPlan, TransferResult
from ebbtide.core.request import FinishReason
from ebbtide.core.scheduler import Scheduler
from ebbtide.engine.lookups import Lookups
from ebbtide.errors import EngineStopped, InputError
from ebbtide.offload.below import JobResult
from ebbtide.offload.manager import OffloadManager
from ebbtide.offload.mover import Mover
from ebbtide.params import SamplingParams

log = logging.getLogger(__name__)

# Takes the outputs of a step; returns the requests that are to end now, their stop string found.
Listener = Callable[[Sequence[Output]], Iterable[str]]


PREFILL_TOKENS = 32  # a step that feeds so many, and so many per row, says how fast prefill is
PREFILL_TOKENS_PER_ROW = 8


class EngineLoop:
    """Runs ``scheduler``'s plans on ``executor`` until closed. ``listener`` is called on its thread.

    ``offload`` is what the scheduler stores and loads with; ``lookups`` asks its tiers that take time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        offload: OffloadManager,
        executor: Executor,
        mover: Mover,
        listener: Listener,
    ) -> None:
        self._scheduler = scheduler
        self._offload = offload
        self._executor = executor
        self._mover = mover
        self._listener = listener
        self.lookups: Lookups | None = None  # to be set before the start
        self._overlap = scheduler.config.overlap
        self._wake = threading.Condition()  # its lock guards the scheduler
        self._in_flight: deque[tuple[StepPlan, StepFuture]] = deque()
        self._untold: list[Output] = []  # outputs that the listener has not heard
        self._closing = self._flushed = self._over = False
        self._give_up_at = 0.0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ebbtide-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- called from any thread ------------------------------------------------------------

    def add(
        self,
        requests: Iterable[tuple[str, list[int], SamplingParams]],
        *,
        cache_salt: str = "",
        **options: Any,
    ) -> None:
        """Queue requests, all or none. Where tiers are looked up, their prompts must be the same one.
        Raises InputError, QueueFull, EngineStopped."""
        requests = list(requests)
        with self._wake:
            self._check()
            names = [request_id for request_id, _, _ in requests]
            held = self.lookups is not None and self.lookups.ask(names, requests[0][1], cache_salt)
            added: list[str] = []
            try:
                for request_id, prompt, params in requests:
                    self._scheduler.add(
                        request_id, prompt, params, cache_salt=cache_salt, held=held, **options
                    )
                    added.append(request_id)
            except InputError:
                for request_id in added:
                    self._scheduler.end(request_id)
                raise
            self._wake.notify()

    def end(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        with self._wake:
            for request_id in request_ids:
                self._scheduler.end(request_id, reason)
            self._wake.notify()

    def found(self, tier: str, keys: list[bytes]) -> None:
        """A lookup in the tier has found these chunks."""
        with self._wake:
            self._offload.found(tier, keys)

    def ready(self, request_ids: Iterable[str]) -> None:
        """The lookups that these requests waited for are answered."""
        with self._wake:
            for request_id in request_ids:
                self._scheduler.ready(request_id)
            self._wake.notify()

    def wake(self) -> None:
        with self._wake:
            self._wake.notify()

    def reset(self, tiers: Sequence[str] | None = None) -> None:
        """Forget all cached KV, on the device and below; or that of the tiers named, in which case the
        device keeps its own. Raises InputError for a name that is none of theirs."""
        with self._wake:
            if tiers is None:
                self._scheduler.reset()
            else:
                self._offload.clear(tiers)
            self._wake.notify()

    def inspect(self, look: Callable[[Scheduler], Any]) -> Any:
        """What ``look`` reads from the scheduler between two decisions. Raises EngineStopped."""
        with self._wake:
            self._check()
            return look(self._scheduler)

    def wait_for_jobs(self, patience_s: float) -> None:
        """Wait until no job is under way for a tier, but not longer than that."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until and self.inspect(lambda _: self._offload.jobs_in_flight):
            time.sleep(0.001)

    def _check(self) -> None:
        if self._failure is not None or self._closing:
            raise EngineStopped(f"the engine has stopped: {self._failure or 'it was closed'}")

    def close(self, patience_s: float = 10.0) -> None:
        """Abort what is unfinished, wait for what is in flight, let the host tier's chunks go to the
        tiers below, stop all threads. Transfers that take longer than ``patience_s`` are left behind."""
        with self._wake:
            self._closing = True
            self._give_up_at = time.monotonic() + patience_s
            for request_id in list(self._scheduler.requests):
                self._scheduler.end(request_id)
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        left = max(0.0, self._give_up_at - time.monotonic())
        if self.lookups is not None:
            self.lookups.close(left)
        self._mover.close(left)
        self._executor.close()

    # --- the engine's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # a bug of ours: nobody may be left waiting
            log.exception("the engine stopped because of a bug")
            self._fail(error)

    def _loop(self) -> None:
        while True:
            plan = self._decide()
            if plan is not None:
                self._in_flight.append((plan, self._executor.submit(plan)))
            self._hand_out()
            if self._in_flight and (plan is None or len(self._in_flight) == self._overlap):
                self._finish_step()
            elif self._over:
                return

    def _decide(self) -> StepPlan | None:
        """The next plan. Sleeps while there is nothing to do."""
        scheduler = self._scheduler
        with self._wake:
            while True:
                self._take_in()
                now = time.monotonic()
                self._offload.tick(now)
                if given_up := self._offload.take_given_up():
                    scheduler.give_up(given_up)
                    self._mover.call_back(given_up)
                    self._take_in()
                plan = scheduler.schedule(now)
                self._send_out()
                self._untold += scheduler.take_outputs()
                busy = plan is not None or self._untold or self._in_flight
                self._over = not busy and self._closing and self._is_over()
                if busy or self._over:
                    return plan
                deadline = self._next_deadline()
                self._wake.wait(None if deadline is None else max(0.001, deadline - now))

    def _take_in(self) -> None:
        """What has come back from beside the steps. The lock is held, as for the next three."""
        transfers: list[TransferResult] = []
        for result in self._mover.take_results():
            if isinstance(result, JobResult):
                self._offload.done(result)
            else:
                transfers.append(result)
        self._scheduler.transferred(transfers)
        if self.lookups is not None:
            for request_id in self.lookups.expired(time.monotonic()):
                self._scheduler.ready(request_id)

    def _send_out(self) -> None:
        self._mover.submit(self._scheduler.take_transfers())
        self._mover.submit(self._offload.take_jobs())

    def _next_deadline(self) -> float | None:
        times = [self._scheduler.next_deadline(), self._offload.next_deadline()]
        if self.lookups is not None:
            times.append(self.lookups.next_deadline())
        if self._closing:
            times.append(self._give_up_at)
        return min((t for t in times if t is not None), default=None)

    def _is_over(self) -> bool:
        """Whether nothing is left that could still come back in time. Flushes first, once nothing runs."""
        if time.monotonic() >= self._give_up_at:
            return True
        if self._scheduler.requests or self._scheduler.kv.transfers_in_flight:
            return False
        if not self._flushed:
            self._flushed = True
            self._offload.flush()
            self._send_out()
        return not self._offload.jobs_in_flight and not self._offload.uncleared

    def _finish_step(self) -> None:
        plan, future = self._in_flight.popleft()
        outcome = future.result()
        with self._wake:
            self._untold += self._scheduler.apply(plan, outcome)
            self._note_speed(plan, outcome)
            self._send_out()

    def _hand_out(self) -> None:
        """Tell the listener; requests that it found to be over end at once."""
        while self._untold:
            stopped = list(self._listener(self._untold))
            self._untold = []
            if stopped:
                with self._wake:
                    for request_id in stopped:
                        self._scheduler.end(request_id, FinishReason.STOP)
                    self._send_out()
                    self._untold = self._scheduler.take_outputs()

    def _note_speed(self, plan: StepPlan, outcome: StepOutcome) -> None:
        fed = plan.num_tokens
        if outcome.seconds and fed >= max(PREFILL_TOKENS, PREFILL_TOKENS_PER_ROW * len(plan.rows)):
            self._offload.computed(fed / self._scheduler.config.block_size, outcome.seconds)

    def _fail(self, error: BaseException) -> None:
        """Nobody may be left waiting: whoever was not told of an end is told of this one."""
        with self._wake:
            self._failure = error
            untold = [*self._untold, *self._scheduler.take_outputs()]
            ids = [output.request_id for output in untold if output.finish is not None]
            ids += self._scheduler.requests
        message = f"the engine stopped because of a bug: {type(error).__name__}: {error}"
        for request_id in dict.fromkeys(ids):
            try:
                self._listener([Output(request_id, finish=FinishReason.ERROR, message=message)])
            except Exception:
                log.exception("request %s could not be told", request_id)
