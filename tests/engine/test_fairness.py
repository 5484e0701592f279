"""Whose prompts are read and who starts: what is scarce is divided between clients' requests, not between choices."""

import random
from collections import Counter
from typing import Any

import pytest

from engine import scheduler as scheduler_module
from engine.engine import Engine
from engine.types import Request, SamplingParams
from policies.config import PolicyConfig
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import VOCAB, Pair
from tests.engine.test_pressure import Watch
from tests.kv import without_prefixes

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


CONFIG: dict[str, Any] = {"policy": PolicyConfig("off"), "max_spec_length": 1, "max_step_tokens": 24}


def make_engine(pair: Pair, max_running: int, **config: Any) -> Engine:
    return load(pair, max_running=max_running, **(CONFIG | without_prefixes() | config))


def ask(name: str, length: int, max_tokens: int, group: str = "") -> Request:
    """A prompt that has nothing in common with others."""
    prompt = tuple(random.Random(name).choices(range(2, VOCAB), k=length))
    return Request(
        name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), k=0, group=group
    )


def large(count: int, length: int = 80, max_tokens: int = 0) -> list[Request]:
    return [ask(f"large-{i}", length, max_tokens, "large") for i in range(count)]


def apart(requests: list[Request]) -> list[Request]:
    """The same from clients of their own."""
    return [Request(r.id, r.prompt_ids, r.params, k=0) for r in requests]


def read_steps(run: Drive) -> dict[str, int]:
    """The step in which each request's prompt had been read."""
    return {name: told.record.column("step")[0] for name, told in run.received.items() if told.record is not None}


def read_by_group(engine: Engine) -> Counter[str]:
    """Tokens of prompts in the next plan. The plan is not run."""
    counts: Counter[str] = Counter()
    for part in engine.scheduler.plan().slices:
        counts[part.sequence.group] += part.committed
    return counts


def submit(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.submit(request)


@pytest.mark.parametrize("grouped", [True, False])
def test_a_newcomer_does_not_wait_for_all_prompts_of_another_request(pair: Pair, grouped: bool) -> None:
    """Twelve prompts of 80 tokens take 40 steps of 24. From clients of their own, those that came first go first."""
    prompts = large(12) if grouped else apart(large(12))
    run = drive(make_engine(pair, 4), {0: prompts, 3: [ask("newcomer", 10, 3)]})
    first = read_steps(run)["newcomer"]
    assert (first <= 3 + 2) == grouped
    assert all(told.reason == "length" for told in run.received.values())


def test_what_a_pass_reads_is_divided_between_groups(pair: Pair) -> None:
    engine = make_engine(pair, 8)
    submit(engine, *large(6), ask("other", 90, 1))
    assert read_by_group(engine) == {"large": 12, "other": 12}


def test_what_a_group_does_not_need_goes_to_the_others(pair: Pair) -> None:
    engine = make_engine(pair, 8)
    submit(engine, *large(6), ask("short", 4, 1), ask("other", 90, 1))
    assert read_by_group(engine) == {"short": 4, "large": 10, "other": 10}
    alone = make_engine(pair, 8)
    submit(alone, *large(6))
    assert read_by_group(alone) == {"large": 24}


def test_a_group_reads_one_prompt_after_another(pair: Pair) -> None:
    engine = make_engine(pair, 8)
    submit(engine, *large(6))
    while engine.has_work:
        assert sum(engine.target.uncached(s) > 1 for s in engine.scheduler.running) <= 1
        engine.step()


def test_few_groups_read_at_the_same_time(pair: Pair) -> None:
    """Else all of a burst would get their first tokens as late as the last of them."""
    engine = make_engine(pair, 8)
    submit(engine, *(ask(f"r{i}", 60, 1) for i in range(7)))
    assert read_by_group(engine) == {f"r{i}": 6 for i in range(scheduler_module.MAX_PREFILL_GROUPS)}


def test_the_next_slot_is_for_a_group_that_has_none(pair: Pair) -> None:
    """Both slots are taken and five choices wait, when two newcomers come: they go first, in order of arrival."""
    engine = make_engine(pair, 2)
    requests = [ask(f"large-{i}", 4, 10 + 40 * (i == 1), "large") for i in range(7)]
    run = drive(engine, {0: requests, 3: [ask("a", 4, 5), ask("b", 4, 5)]})
    first = read_steps(run)
    assert sorted(first, key=lambda name: first[name])[:4] == ["large-0", "large-1", "a", "b"]


def test_a_group_that_waits_is_not_starved_by_newcomers(pair: Pair) -> None:
    """One newcomer after another, as fast as they end: the large request has a slot all the same, and its prompts
    are read."""
    engine = make_engine(pair, 2)
    arrivals = {step: [ask(f"new-{step}", 20, 2)] for step in range(2, 80)}
    run = drive(engine, {0: large(4, 40, 3)} | arrivals)
    first = read_steps(run)
    assert max(first[f"large-{i}"] for i in range(4)) < 60


@pytest.mark.parametrize("chunk", [1, 2])
def test_who_reads_advances_however_little_a_pass_may_read(pair: Pair, chunk: int) -> None:
    """Four groups begin while nobody decodes; then a stream does, beside which only so many tokens are read."""
    engine = make_engine(pair, 5, prefill_chunk=chunk)
    requests = [ask("stream", 1, 20), *(ask(f"r{i}", 60, 1) for i in range(3))]
    run = drive(engine, requests, after_step=Watch(engine))
    assert all(told.reason == "length" for told in run.received.values())
    assert all(s.prefill_tokens <= max(chunk, 3) for s in run.steps[1:19])


def test_negative_control_who_reads_gets_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(pair, 5, prefill_chunk=1)
    read = engine.scheduler._divide_prefill

    def stingy(budget: int, queue: scheduler_module.StartQueue, unread: Any) -> dict[Any, int]:
        counts = read(budget, queue, unread)
        last = next(reversed(counts), None)
        return {s: n for s, n in counts.items() if s is not last or len(counts) < 3}

    monkeypatch.setattr(engine.scheduler, "_divide_prefill", stingy)
    requests = [ask("stream", 1, 20), *(ask(f"r{i}", 60, 1) for i in range(3))]
    with pytest.raises(AssertionError, match="did not advance"):
        drive(engine, requests, after_step=Watch(engine))


def test_whose_memory_was_taken_back_is_the_next_of_its_group(pair: Pair) -> None:
    engine = make_engine(pair, 2)
    submit(engine, *large(4, 4, 40))
    for _ in range(3):
        engine.step()
    youngest = engine.scheduler._preempt()
    assert youngest.request_id == "large-1"
    assert [s.request_id for s in engine.scheduler._start_order()] == ["large-1", "large-2", "large-3"]
    engine.submit(ask("newcomer", 4, 1))
    assert engine.scheduler._start_order()[0].request_id == "newcomer"
    engine.cancel_all()


@pytest.mark.parametrize("seed", [n if n == 3 else pytest.param(n, marks=pytest.mark.proofs) for n in range(6)])
def test_every_request_ends_whatever_the_groups(pair: Pair, seed: int) -> None:
    """Groups of all sizes, some of whose prompts begin alike, with memory for little more than one sequence: all that
    hold memory advance or give way, the oldest never does, and the tokens are those of a run without groups."""
    rng = random.Random(seed)
    common = rng.choices(range(2, VOCAB), k=70)
    arrivals: dict[int, list[Request]] = {}
    for group in range(8):
        for i in range(rng.choice((1, 1, 2, 9))):
            length = rng.randint(1, 70)
            shared = common[: rng.choice((0, length // 2))]
            prompt = (*shared, *rng.choices(range(2, VOCAB), k=length - len(shared)))
            params = SamplingParams(temperature=0, max_tokens=rng.randint(0, 24), ignore_eos=True)
            request = Request(f"{group}-{i}", prompt, params, k=0, group=f"g{group}")
            arrivals.setdefault(4 * group, []).append(request)
    config = {"cache": "paged", "block_size": 8, "kv_tokens": 136, "prefill_chunk": rng.choice((1, 7, 24))}
    engine = load(pair, max_running=5, **(CONFIG | config))
    run = drive(engine, arrivals, after_step=Watch(engine))
    expected = drive(load(pair, max_running=5, **CONFIG), apart([r for rs in arrivals.values() for r in rs]))
    assert run.tokens == expected.tokens
    assert all(told.reason == "length" for told in run.received.values())
