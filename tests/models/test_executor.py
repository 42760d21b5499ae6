"""Plans in, outcomes out: what the scheduler relies on."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from ebbtide.core.plan import Direction, Row, StepPlan, Table, Transfer
from ebbtide.params import SamplingParams

from .harness import GREEDY, Driver, config_of, tiny

DRAWN = SamplingParams(temperature=1.0, seed=11, logprobs=1, presence_penalty=0.5).with_defaults({})
PROMPTS = ([5, 6, 7, 8, 9] * 5, [17] * 16, [1], list(range(40, 75)))


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3-mixed")


@pytest.fixture
def driver(model):
    made = Driver(config_of(model), model.state_dict(), failing={2})
    yield made
    made.close()


def answers(model, sampling=GREEDY, max_tokens=20, chunk=512):
    """Each prompt on its own, one plan at a time."""
    found = []
    for prompt in PROMPTS:
        driver = Driver(config_of(model), model.state_dict())
        request = driver.add(prompt, sampling)
        driver.run([request], chunk, max_tokens)
        driver.close()
        found.append(request.output)
    return found


def overlapped(driver: Driver, requests, steps: int) -> None:
    """Two plans in flight: each is submitted before the tokens of the one before are known."""
    pending = None
    for _ in range(steps):
        rows = []
        for request in requests:
            left = len(request.tokens) - request.fed
            # with the prompt fed and one token in the air, feed that token
            rows.append(driver.row(request, min(10, left) if left > 0 else 1))
        plan = driver.plan(rows)
        future = driver.executor.submit(plan)
        if pending is not None:
            driver.apply(pending[0], pending[1].result())
        pending = (plan, future)
    driver.apply(pending[0], pending[1].result())


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_two_plans_in_flight_give_the_same_tokens(model, driver, sampling):
    requests = [driver.add(prompt, sampling) for prompt in PROMPTS]
    overlapped(driver, requests, 24)
    for request, expected in zip(requests, answers(model, sampling), strict=True):
        assert request.output[:20] == expected


def test_chunk_and_batch_do_not_change_drawn_tokens(model, driver):
    requests = [driver.add(prompt, DRAWN) for prompt in PROMPTS]
    driver.run(requests, 3, 20)
    assert [request.output for request in requests] == answers(model, DRAWN)
    assert all(len(request.logprobs) == 20 for request in requests)


def test_a_plan_means_only_what_its_lists_held(model, driver):
    """Tokens and tables that grow while the plan is in flight change nothing."""
    request = driver.add(PROMPTS[0], DRAWN)
    gate = threading.Event()
    driver.executor._worker.submit(gate.wait)
    plan = driver.plan([driver.row(request, len(PROMPTS[0]))])
    future = driver.executor.submit(plan)
    request.tokens.extend([1, 2, 3])
    for table in request.tables:
        table.blocks.append(99)
    gate.set()
    assert list(future.result().tokens) == answers(model, DRAWN)[0][:1]


def test_what_blocks_held_before_does_not_matter(model, driver):
    """Blocks come with any bytes in them, even with such as are no numbers."""
    driver.kv.blocks.fill_(float("nan"))
    requests = [driver.add(prompt) for prompt in PROMPTS]
    driver.run(requests, 9, 20)
    assert [request.output for request in requests] == answers(model)


def test_windows_that_slide_out_of_freed_blocks(model, driver):
    """Blocks below a window are released and overwritten while their request goes on."""
    request = driver.add(list(range(30)) * 7)
    expected = driver.add(list(range(30)) * 7)
    driver.run([expected], 512, 10)
    while len(request.output) < 10:
        row = driver.row(request, min(13, len(request.tokens) - request.fed))
        plan = driver.plan([row])
        driver.apply(plan, driver.executor.submit(plan).result())
        for spec, table in zip(driver.layout.groups, request.tables, strict=True):
            if spec.window is not None:
                released = set(range(driver._next_block)) - {
                    block for r in driver.requests for t in r.tables for block in t.blocks
                }
                driver.kv.blocks[sorted(released)] = float("nan")
                assert len(table.blocks) <= 5
    assert request.output == expected.output


def transfer(number: int, blocks: tuple[int, ...]) -> Transfer:
    return Transfer(number, Direction.LOAD, b"key", 0, 0, blocks)


def test_loads_come_first_and_failed_ones_are_reported(driver):
    request = driver.add(PROMPTS[0])
    row = driver.row(request, 25)
    loads = [transfer(1, (50,)), transfer(2, (51, 52)), transfer(3, (53,))]
    outcome = driver.executor.submit(driver.plan([row], loads)).result()
    assert driver.loads == loads
    assert outcome.error is None
    assert outcome.invalid_blocks == {51, 52}
    assert len(outcome.tokens) == 1


def test_a_plan_of_loads_alone(driver):
    outcome = driver.executor.submit(driver.plan([], [transfer(2, (3,))])).result()
    assert outcome.invalid_blocks == {3}
    assert outcome.tokens == ()


def test_a_step_that_samples_nothing(driver):
    request = driver.add(PROMPTS[3])
    outcome = driver.executor.submit(driver.plan([driver.row(request, 4)])).result()
    assert outcome.tokens == ()
    assert outcome.error is None


def bad_plan() -> StepPlan:
    row = Row("bad", [1, 2], 2, 0, 2, (Table(0, []), Table(0, [])), GREEDY, 0)
    return StepPlan(0, [row], [], 2)


def test_a_step_that_raises_is_an_outcome_and_the_worker_lives(model, driver):
    outcome = driver.executor.submit(bad_plan()).result()
    assert isinstance(outcome.error, Exception)
    request = driver.add(PROMPTS[0])
    driver.run([request], 512, 5)
    assert request.output == answers(model, max_tokens=5)[0]


def test_after_a_failed_step_the_next_plan_still_serves_its_other_rows(model, driver):
    lost, fine = driver.add([3, 4]), driver.add(PROMPTS[0])
    driver.executor.submit(bad_plan())
    waits = driver.row(lost, 3)  # feeds the token of the step that failed
    plan = driver.plan([waits, driver.row(fine, 25)])
    outcome = driver.executor.submit(plan).result()
    assert outcome.error is None
    assert outcome.tokens[1] == answers(model, max_tokens=1)[0][0]


def test_logprobs_are_keyed_by_the_plans_row_number(driver):
    sampling = SamplingParams(temperature=0.0, logprobs=2).with_defaults({})
    rows = [
        driver.row(driver.add(PROMPTS[3]), 10),  # samples nothing yet
        driver.row(driver.add(PROMPTS[0]), 25),  # asks for none
        driver.row(driver.add(PROMPTS[1], sampling), 16),
        driver.row(driver.add(PROMPTS[2], sampling), 1),
    ]
    outcome = driver.executor.submit(driver.plan(rows)).result()
    assert len(outcome.tokens) == 3
    assert {i: entry.token for i, entry in outcome.logprobs.items()} == {
        2: outcome.tokens[1],
        3: outcome.tokens[2],
    }
    assert all(entry.top[0] == (entry.token, entry.logprob) for entry in outcome.logprobs.values())


def test_close_runs_what_was_submitted_and_joins_the_thread(model):
    driver = Driver(config_of(model), model.state_dict())
    request = driver.add(PROMPTS[0])
    future = driver.executor.submit(driver.plan([driver.row(request, 25)]))
    worker = next(t for t in threading.enumerate() if t.name.startswith("ebbtide-step"))
    driver.close()
    assert future.result().error is None
    assert not worker.is_alive()
    with pytest.raises(RuntimeError):
        driver.executor.submit(driver.plan([]))


def test_nothing_of_a_finished_request_is_kept(driver):
    class Tokens(list):
        pass

    request = driver.add([1, 2, 3])
    request.tokens = Tokens(request.tokens)
    driver.run([request], 512, 3)
    watch = weakref.ref(request.tokens)
    driver.requests.clear()
    other = driver.add([4, 5])
    driver.run([other], 512, 2)
    del request
    gc.collect()
    assert watch() is None
    assert driver.executor._sampled.keys() == {other.id}


def test_bfloat16_runs_the_same_plans(model):
    driver = Driver(config_of(model), model.state_dict(), dtype=torch.bfloat16)
    requests = [driver.add(prompt, DRAWN) for prompt in PROMPTS]
    driver.run(requests, 7, 6)
    driver.close()
    assert all(len(request.output) == 6 for request in requests)
