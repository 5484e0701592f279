"""R9: a round that fails ends the requests that fail alone; all others read the text that they would have read."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.models.feeds import Feed
from engine.sampling import logprobs
from engine.sampling.penalties import History
from engine.types import Request, SamplingParams, TokenLogprob
from tests.engine.driving import Drive, drive, load
from tests.engine.fresh import Checker
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def pair(thin: Pair) -> Pair:
    return thin


RUNNING = 8
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB for the secret")
OUTPUT = {"r1": 4, "r2": 0, "r5": 5, "r6": 2}  # alternatives that requests want for their tokens
PROMPT = {"r2": 3, "r6": 7}  # and for those of their prompts


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


def make_requests(k: int = 3, count: int = RUNNING) -> list[Request]:
    """Prompts of one or several passes, greedy and sampled; penalties and log-probabilities for some of them."""
    requests = []
    for i in range(count):
        params = SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=10 if i else 30,
            ignore_eos=True,
            presence_penalty=0.1 * (i % 4),
            logprobs=OUTPUT.get(f"r{i}"),
            prompt_logprobs=PROMPT.get(f"r{i}"),
        )
        requests.append(Request(f"r{i}", tuple((7 * i + 3 * j) % VOCAB for j in range(2 + 9 * i)), params, k=k))
    return requests


def load_eight(pair: Pair) -> Engine:
    return load(pair, max_running=RUNNING, max_spec_length=3, max_step_tokens=40, prefill_chunk=24)


@pytest.fixture
def engine(pair: Pair) -> Engine:
    return load_eight(pair)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    return drive(load_eight(pair), make_requests(0)).tokens


class Passes:
    """Sizes of the target's passes, in sequences, by step; `fails` says which of them raise, after their forward."""

    def __init__(
        self,
        engine: Engine,
        monkeypatch: pytest.MonkeyPatch,
        fails: Callable[[set[str]], bool] = lambda names: False,
        error: Exception = OUT_OF_MEMORY,
    ) -> None:
        self.steps: list[list[int]] = [[]]
        self.check: Callable[[], None] = lambda: None
        run = engine.target.run

        def counting(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
            self.steps[-1].append(len(feeds))
            logits = run(feeds, drafts)
            if fails({feed.sequence.request_id for feed in feeds}):
                raise error
            return logits

        monkeypatch.setattr(engine.target, "run", counting)

    def next_step(self) -> None:
        self.check()
        self.steps.append([])

    @property
    def failing(self) -> list[list[int]]:
        """Passes of those steps that needed more than one."""
        return [passes for passes in self.steps if len(passes) > 1]


def check_others(run: Drive, expected: dict[str, list[int]], *bad: str) -> None:
    for name, told in run.received.items():
        if name in bad:
            assert told.reason == "error"
            assert "secret" not in (told.error or "")
            assert told.tokens == expected[name][: len(told.tokens)] != expected[name]
        else:
            assert (told.reason, told.tokens) == ("length", expected[name])


@pytest.mark.parametrize("bad", [*in_proofs(0, 3), 7])
def test_a_request_that_fails_every_pass_ends_alone(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """From its fifth token on. One failing request of n costs two passes for each halving, after the first two."""
    name = f"r{bad}"

    def fails(names: set[str]) -> bool:
        return any(s.request_id == name and s.num_output >= 5 for s in engine.scheduler.running) and name in names

    passes = Passes(engine, monkeypatch, fails)
    passes.check = Checker(engine, every=3)
    run = drive(engine, make_requests(), after_step=passes.next_step)
    check_others(run, expected, name)
    assert run.received[name].error == "there was not enough memory to process this request"
    assert len(run.received[name].tokens) >= 5
    (failing,) = passes.failing
    assert failing[:2] == [failing[0]] * 2
    assert len(failing) <= 2 + 2 * ceil(log2(failing[0]))
    assert not any(s.failed for s in run.steps)
    assert sum(s.draft_faults for s in run.steps) == 1
    assert run.accepted


def test_a_prompt_that_cannot_be_read_ends_alone(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(engine, monkeypatch, lambda names: "r7" in names, RuntimeError("the secret"))
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    check_others(run, expected, "r7")
    assert run.received["r7"].error == "the model failed to process this request"
    assert len(passes.steps[0]) > len(run.steps)


def test_several_requests_that_fail_end_and_the_others_go_on(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"r0", "r1", "r3", "r4", "r6"}
    Passes(engine, monkeypatch, lambda names: bool(names & bad))
    run = drive(engine, make_requests(), after_step=Checker(engine, every=3))
    check_others(run, expected, *bad)
    assert sum(s.draft_faults for s in run.steps) == sum(s.draft_faults > 0 for s in run.steps)


def test_a_batch_that_is_too_large_is_run_in_parts_and_nobody_ends(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(engine, monkeypatch, lambda names: len(names) > 3)
    passes.check = Checker(engine, every=3)
    run = drive(engine, make_requests(), after_step=passes.next_step)
    check_others(run, expected)
    assert [RUNNING, RUNNING, 4, 4, 2, 2, 2, 2] in passes.steps
    assert not any(s.failed for s in run.steps)


def test_a_dead_device_ends_everything_after_few_passes(
    pair: Pair, engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are; and it serves again once the passes succeed."""
    many = load(pair, max_running=128, max_spec_length=0, max_step_tokens=1024, prefill_chunk=1024)
    for broken, count in ((engine, RUNNING), (many, 128)):
        with monkeypatch.context() as patch:
            passes = Passes(broken, patch, lambda names: True)
            requests = [replace(r, prompt_ids=(5, 6)) for r in make_requests(0, count)]
            run = drive(broken, requests, after_step=passes.next_step)
        assert {told.reason for told in run.received.values()} == {"error"}
        assert all(not told.tokens for told in run.received.values())
        assert all(s.failed for s in run.steps if s.sequences)
        (sizes,) = passes.failing
        assert sizes[:2] == [count, count]
        assert len(sizes) <= 1 + 4 * (1 + ceil(log2(count)))
    assert drive(engine, make_requests()).tokens == expected


# --- parts of the pass that are one request's own --------------------------------------------------------------------


def test_a_request_whose_penalties_fail_ends_alone(
    engine: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = History.sync

    def failing(self: History, tokens: Seq[int]) -> None:
        if self.params.seed == 5 and len(tokens) > 50:
            raise OUT_OF_MEMORY
        sync(self, tokens)

    monkeypatch.setattr(History, "sync", failing)
    check_others(drive(engine, make_requests(), after_step=Checker(engine, every=3)), expected, "r5")


def tell_or_fail(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int, Seq[int]], bool], error: Exception) -> None:
    """`fails` is asked with the rows of a call and the numbers of alternatives that are to be told for them."""
    tell = logprobs.token_logprobs

    def failing(logits: Tensor, ids: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
        if fails(len(tokens), counts):
            raise error
        return tell(logits, ids, tokens, counts)

    monkeypatch.setattr(logprobs, "token_logprobs", failing)


class Logprobs:
    """What requests are told beside their tokens."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output: dict[str, list[TokenLogprob]] = {}
        self.prompt: dict[str, list[TokenLogprob]] = {}
        step = engine.step

        def listening() -> Any:
            result = step()
            for output in result.outputs:
                self.output.setdefault(output.request_id, []).extend(output.logprobs)
                self.prompt.setdefault(output.request_id, []).extend(output.prompt_logprobs)
            return result

        monkeypatch.setattr(engine, "step", listening)

    def without(self, *names: str) -> tuple[dict[str, list[TokenLogprob]], ...]:
        return tuple({n: told for n, told in each.items() if n not in names} for each in (self.output, self.prompt))


@pytest.fixture(scope="module")
def told(pair: Pair) -> Logprobs:
    """Without any fault."""
    engine = load_eight(pair)
    with pytest.MonkeyPatch.context() as patch:
        listener = Logprobs(engine, patch)
        drive(engine, make_requests(0))
    return listener


def same(a: tuple[dict[str, list[TokenLogprob]], ...], b: tuple[dict[str, list[TokenLogprob]], ...]) -> bool:
    """To nine digits: batches differ."""

    def digest(part: dict[str, list[TokenLogprob]]) -> dict[str, list[tuple[int, float, tuple[int, ...]]]]:
        return {n: [(t.token, t.logprob, tuple(i for i, _ in t.top)) for t in told] for n, told in part.items()}

    for one, other in zip(map(digest, a), map(digest, b), strict=True):
        assert one.keys() == other.keys()
        for name, entries in one.items():
            assert [e[::2] for e in entries] == [e[::2] for e in other[name]]
            assert [e[1] for e in entries] == pytest.approx([e[1] for e in other[name]], abs=1e-9)
    return True


NO_MEMORY = OUT_OF_MEMORY, "there was not enough memory for the log-probabilities of this request"
OTHER_FAULT = RuntimeError("the secret"), "the log-probabilities of this request could not be computed"


@pytest.mark.parametrize(
    ("name", "count", "error", "reason"),
    [
        pytest.param("r5", 5, *NO_MEMORY, id="output, out of memory", marks=pytest.mark.proofs),
        pytest.param("r6", 7, *OTHER_FAULT, id="prompt, other", marks=pytest.mark.proofs),
        pytest.param("r2", 3, *NO_MEMORY, id="prompt of several passes, out of memory"),
        pytest.param("r5", 5, *OTHER_FAULT, id="output, other"),
        pytest.param("r6", 7, *NO_MEMORY, id="prompt, out of memory", marks=pytest.mark.proofs),
        pytest.param("r2", 3, *OTHER_FAULT, id="prompt of several passes, other", marks=pytest.mark.proofs),
    ],
)
def test_log_probabilities_that_fail_end_their_own_request(
    engine: Engine,
    expected: dict[str, list[int]],
    told: Logprobs,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    count: int,
    error: Exception,
    reason: str,
) -> None:
    """No pass is run again for it: all that fails is tried again, request by request."""
    tell_or_fail(monkeypatch, lambda rows, counts: count in counts, error)
    passes, heard = Passes(engine, monkeypatch), Logprobs(engine, monkeypatch)
    passes.check = Checker(engine, every=3)
    run = drive(engine, make_requests(), after_step=passes.next_step)
    check_others(run, expected, name)
    assert run.received[name].error == reason
    assert not passes.failing
    assert not any(s.failed or s.draft_faults for s in run.steps)
    assert same(heard.without(name), told.without(name))


def test_log_probabilities_for_which_only_the_batch_is_too_large_cost_nobody(
    engine: Engine, expected: dict[str, list[int]], told: Logprobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_or_fail(monkeypatch, lambda rows, counts: len(set(counts)) > 1, OUT_OF_MEMORY)
    heard = Logprobs(engine, monkeypatch)
    check_others(drive(engine, make_requests(), after_step=Checker(engine, every=3)), expected)
    assert same(heard.without(), told.without())
