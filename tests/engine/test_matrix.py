"""Every sampling parameter under every drafter and every verifier, in one mixed batch and alone (fp64, one tiny pair).

Greedy requests and those verified by `match` get what they get without speculation: tokens, text, finish reason and
log-probabilities. The others draw with noise of their own: their text repeats for the same drafts, and keeps every
promise that can be seen in a text. That it follows the law p is shown elsewhere, by enumeration and by statistics.
"""

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.chain import ChainedDrafter
from engine.engine import Engine
from engine.sampling import acceptance, matching
from engine.sampling.acceptance import Verdict
from engine.sampling.exclusions import Exclusions
from engine.sampling.noise import sequence_key
from engine.sampling.penalties import PenaltyRows
from engine.trees import chain, trunk
from engine.types import (
    DRAFTERS,
    VERIFIERS,
    DrafterName,
    FinishReason,
    Request,
    RequestRecord,
    SamplingParams,
    TokenLogprob,
    Verifier,
)
from tests.engine.driving import drive, load, model_drafter
from tests.engine.pairs import EOS, VOCAB, Pair, copy_of
from tests.engine.sampling.test_logprobs import Heard, equal, hear
from tests.examples import in_proofs, usual_and_proofs

pytestmark = pytest.mark.usefixtures("pruned_races")

K = 4
LENGTH = 24
TEMPERATURES = (0.0, 0.8)
FORCED = 77
FEW = (5, 60, 200)  # a bias for these makes texts that repeat themselves
OFF = None
WAYS: tuple[tuple[DrafterName | None, Verifier], ...] = tuple((d, v) for d in (OFF, *DRAFTERS) for v in VERIFIERS)


@dataclass(frozen=True, slots=True)
class Job:
    """One cell of the matrix."""

    case: str
    drafter: DrafterName | None
    verifier: Verifier
    params: SamplingParams
    prompt: tuple[int, ...]
    prediction: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.case} at {self.params.temperature}, {self.drafter}, {self.verifier}"

    @property
    def exact(self) -> bool:
        """Whether the tokens must be those without speculation."""
        return self.verifier == "match" or self.params.temperature == 0

    def request(self) -> Request:
        guess = self.prediction if self.drafter in ("prediction", "cascade") else ()
        return Request(
            self.name,
            self.prompt,
            self.params,
            k=(K, 1, 7)[CASES.index(self.case) % 3] if self.drafter else 0,
            verifier=self.verifier,
            drafter=self.drafter,
            prediction_ids=guess,
        )


@dataclass(frozen=True, slots=True)
class Got:
    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    record: RequestRecord


def got(heard: Heard) -> dict[str, Got]:
    results = {}
    for name, told in heard.run.received.items():
        assert told.reason in ("stop", "length"), f"{name}: {told.error}"
        assert told.record is not None
        logprobs, prompt = tuple(heard.logprobs[name]), tuple(heard.prompts[name])
        results[name] = Got(tuple(told.tokens), told.text, told.reason, logprobs, prompt, told.record)
    return results


def same(a: Got, b: Got) -> bool:
    return (
        (a.tokens, a.text, a.reason) == (b.tokens, b.text, b.reason)
        and equal(a.logprobs, b.logprobs)
        and equal(a.prompt_logprobs, b.prompt_logprobs)
    )


def make_cases(plain: Got) -> dict[str, dict[str, Any]]:
    """What each case asks for, given what a request that asks for nothing gets."""
    text = plain.text
    pieces = (text[at : at + 2] for at in range(len(text) // 3, len(text) - 1))
    stop = next(piece for piece in pieces if "\ufffd" not in piece)
    letters = range(2, 96)  # of the tokenizer: tokens with a text of their own
    end = next(t for t in plain.tokens if t in letters and plain.tokens.index(t) >= LENGTH // 3)
    to_eos = ((EOS, 9.0),)
    few = tuple((token, 9.0) for token in FEW)
    return {
        "nothing": {},
        "top_k": {"top_k": 5, "logprobs": 5},
        "top_k of one": {"top_k": 1},
        "top_p": {"top_p": 0.3, "logprobs": 20},
        "min_p": {"min_p": 0.2, "logprobs": 1},
        "presence_penalty": {"presence_penalty": 2.0, "logit_bias": few},
        "negative presence_penalty": {"presence_penalty": -2.0},
        "frequency_penalty": {"frequency_penalty": 1.5, "logit_bias": few},
        "repetition_penalty": {"repetition_penalty": 1.8, "logit_bias": few},
        "repetition_penalty below 1": {"repetition_penalty": 0.6},
        "logit_bias": {"logit_bias": few},
        "bans": {"logit_bias": tuple((token, -100.0) for token in sorted({*plain.tokens}))},
        "allowed_token_ids": {"allowed_token_ids": (*FEW, FORCED)},
        "bad words": {"logit_bias": few, "bad_word_ids": bad_words(plain.tokens)},
        "bad words of one token": {"bad_word_ids": tuple((token,) for token in sorted({*plain.tokens})[::2])},
        "one forced": {"logit_bias": ((FORCED, 100.0),)},
        "one of a few": {"logit_bias": tuple((token, 100.0) for token in FEW)},
        "min_tokens": {"min_tokens": LENGTH * 3 // 4, "stop_token_ids": tuple(sorted({*plain.tokens}))},
        "eos": {"ignore_eos": False, "logit_bias": to_eos},
        "eos after min_tokens": {"ignore_eos": False, "logit_bias": ((EOS, 100.0),), "min_tokens": 9},
        "ignore_eos": {"ignore_eos": True, "logit_bias": to_eos},
        "stop": {"stop": (stop, "never there")},
        "stop, included": {"stop": (stop,), "include_stop_str_in_output": True},
        "stop_token_ids": {"stop_token_ids": (end,)},
        "stop_token_ids, included": {"stop_token_ids": (end,), "include_stop_str_in_output": True},
        "special tokens shown": {"ignore_eos": True, "logit_bias": to_eos, "skip_special_tokens": False},
        "seed": {"seed": 8},
        "logprobs": {"logprobs": 3},
        "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
        "all together": {
            "top_k": 60,
            "top_p": 0.95,
            "min_p": 0.01,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
            "logit_bias": (*((token, 6.0) for token in FEW), (EOS, 5.0), (plain.tokens[0], -100.0)),
            "allowed_token_ids": tuple(range(VOCAB - 20)),
            "bad_word_ids": ((60, 200), *((token,) for token in plain.tokens[-2:])),
            "skip_special_tokens": False,
            "min_tokens": 10,
            "ignore_eos": False,
            "stop": (stop,),
            "stop_token_ids": (end, FEW[0]),
            "include_stop_str_in_output": True,
            "logprobs": 2,
            "prompt_logprobs": 1,
        },
    }


def bad_words(tokens: Seq[int]) -> tuple[tuple[int, ...], ...]:
    """Words of one to three tokens of a text, and of the few tokens that a bias makes likely."""
    return ((tokens[0],), tuple(tokens[3:5]), tuple(tokens[6:9]), (5, 60), (200, 200), (60, 5, 200), (5, 5, 5))


CASES = tuple(make_cases(Got(tuple(range(LENGTH)), "abcdef", "stop", (), (), RequestRecord("", 0, 0, 0, 0.0))))


def guess_of(tokens: Seq[int], drafter: DrafterName | None) -> tuple[int, ...]:
    """The true output with a few errors; for a cascade only its beginning, so that the others get their turn."""
    wrong = [(token + 1) % VOCAB if at % 7 == 5 else token for at, token in enumerate(tokens)]
    return tuple(wrong[: LENGTH // 3] if drafter == "cascade" else wrong)


@pytest.fixture(scope="module")
def engine(pair: Pair, drafts: tuple[str, str]) -> Engine:
    limits = {"max_running": 48, "max_spec_length": 8, "max_step_tokens": 1024, "prefill_chunk": 1024}
    return load(pair, drafts=drafts, **limits)  # pieces of prompts would vary k


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[tuple[str, float], Got]:
    """(case, temperature) → what it gets without speculation. test_alone compares with what others get alone."""
    prompt = make_prompt()
    results: dict[tuple[str, float], Got] = {}
    for temperature in TEMPERATURES:
        base = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH, ignore_eos=True)
        first = got(hear(engine, [Request("first", prompt, base, k=0)]))["first"]
        cases = make_cases(first).items()
        run = hear(engine, [Request(case, prompt, replace(base, **asked), k=0) for case, asked in cases])
        assert run.run.drafted == 0
        results |= {(case, temperature): result for case, result in got(run).items()}
    return results


def make_prompt() -> tuple[int, ...]:
    """A phrase three times over, so that there is something to look up."""
    rng = random.Random(3)
    return tuple(rng.randrange(2, VOCAB) for _ in range(5)) * 3


@pytest.fixture(scope="module")
def whole(plain: dict[tuple[str, float], Got]) -> list[Job]:
    """All cells of the matrix."""
    made = []
    for temperature in TEMPERATURES:
        base = SamplingParams(temperature=temperature, seed=3, max_tokens=LENGTH, ignore_eos=True)
        for case, asked in make_cases(plain["nothing", temperature]).items():
            tokens = plain[case, temperature].tokens
            for drafter, verifier in WAYS:
                guess = guess_of(tokens, drafter)
                made.append(Job(case, drafter, verifier, replace(base, **asked), make_prompt(), guess))
    return made


def part_of(job: Job) -> int:
    """0 to 5. A part has each case under each drafter, with one verifier and at one temperature, in turn; and each case
    under each verifier at both temperatures."""
    drafter, verifier = divmod(WAYS.index((job.drafter, job.verifier)), len(VERIFIERS))
    place = CASES.index(job.case) + drafter
    shift = (verifier - place) % len(VERIFIERS)
    return 2 * shift + (TEMPERATURES.index(job.params.temperature) + place // len(VERIFIERS)) % 2


PARTS = [0, *(pytest.param(part, marks=pytest.mark.proofs) for part in range(1, 6))]


@pytest.fixture(scope="module", params=PARTS, ids=lambda part: f"part{part}")
def jobs(request: pytest.FixtureRequest, whole: list[Job]) -> list[Job]:
    """A sixth of the matrix."""
    return [job for job in whole if part_of(job) == request.param]


@pytest.fixture(scope="module")
def mixed(engine: Engine, jobs: list[Job]) -> dict[str, Got]:
    """All jobs in one batch, in no order: any 48 cells share a pass."""
    shuffled = random.Random(1).sample(jobs, len(jobs))
    heard = hear(engine, [job.request() for job in shuffled])
    assert sum(s.draft_faults for s in heard.run.steps) == 0
    return got(heard)


Plain = dict[tuple[str, float], Got]


def cells(jobs: Seq[Job], drafter: DrafterName | None, verifier: Verifier, **where: Any) -> list[Job]:
    found = [j for j in jobs if (j.drafter, j.verifier) == (drafter, verifier)]
    return [j for j in found if all(getattr(j, name) == value for name, value in where.items())]


def expected(job: Job, plain: Plain) -> Got:
    return plain[job.case, job.params.temperature]


# --- what the matrix is made of --------------------------------------------------------------------------------------


def test_every_field_is_in_the_matrix(jobs: list[Job]) -> None:
    """This test finds a field that somebody adds and does not test here."""
    default = SamplingParams()
    varied = {n for n in SamplingParams.__slots__ for j in jobs if getattr(j.params, n) != getattr(default, n)}
    assert varied == set(SamplingParams.__slots__)
    assert len(jobs) == len(CASES) * (1 + len(DRAFTERS))
    assert len({(j.case, j.drafter) for j in jobs}) == len(jobs)
    assert len({(j.case, j.verifier, j.params.temperature) for j in jobs}) == len(CASES) * 3 * len(TEMPERATURES)


def test_every_parameter_acts(plain: Plain) -> None:
    """No two cases are told the same at both temperatures: what changed nothing could not be lost to speculation."""
    alike = [(a, b) for a, b in combinations(CASES, 2) if all(same(plain[a, t], plain[b, t]) for t in TEMPERATURES)]
    assert alike == []


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_are_offered_accepted_and_rejected(
    jobs: list[Job], mixed: dict[str, Got], drafter: DrafterName, verifier: Verifier
) -> None:
    """The matrix tests nothing where a drafter is dead, or always right."""
    records = [mixed[j.name].record for j in cells(jobs, drafter, verifier)]
    drafted, accepted = sum(sum(r.column("drafted")) for r in records), sum(sum(r.column("accepted")) for r in records)
    assert 0.02 * drafted < accepted < 0.95 * drafted
    assert sum(any(r.column("drafted")) for r in records) >= 3
    proposers = {DRAFTERS[p] for r in records for p in r.column("proposer") if p >= 0}
    assert proposers == ({"prediction", "lookup", "model"} if drafter == "cascade" else {drafter})
    assert all((r.drafter, r.verifier) == (drafter, verifier) for r in records)


# --- what must be identical ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafter", "verifier"), WAYS)
def test_in_one_mixed_batch(
    jobs: list[Job], mixed: dict[str, Got], plain: Plain, drafter: DrafterName | None, verifier: Verifier
) -> None:
    wanted = [j for j in cells(jobs, drafter, verifier) if j.exact]
    assert len(wanted) >= len(CASES) // (3 if verifier == "match" else 6)
    assert [j.name for j in wanted if not same(mixed[j.name], expected(j, plain))] == []


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.proofs) for part in range(1, 8))])
@pytest.mark.parametrize(("drafter", "verifier"), WAYS)
def test_alone(
    engine: Engine,
    jobs: list[Job],
    mixed: dict[str, Got],
    plain: Plain,
    drafter: DrafterName | None,
    verifier: Verifier,
    part: int,
) -> None:
    """Each cell by itself; one whose text is its own draws the same again, as its drafts were as many.

    Every part has an eighth of the jobs."""
    first = (WAYS.index((drafter, verifier)) + part) % 8
    for job in cells(jobs, drafter, verifier)[first::8]:
        alone = got(hear(engine, [job.request()]))[job.name]
        if job.exact:
            assert same(alone, expected(job, plain)), job.name
        if job.drafter != "suffix" or not job.exact:  # suffix drafts for exact texts from what others said before
            assert alone.record.column("drafted") == mixed[job.name].record.column("drafted")
        assert same(alone, mixed[job.name]), job.name


@pytest.mark.parametrize("drafter", usual_and_proofs(DRAFTERS, ("model",)))
def test_negative_control_a_verifier_that_accepts_everything(
    engine: Engine, whole: list[Job], plain: Plain, monkeypatch: pytest.MonkeyPatch, drafter: DrafterName
) -> None:
    monkeypatch.setattr(matching, "walk", lambda _, drafts, parents: trunk(parents or chain(len(drafts))))
    wanted = cells(whole, drafter, "match")[::2]
    results = got(hear(engine, [j.request() for j in wanted]))
    wrong = [j.params.temperature for j in wanted if not same(results[j.name], expected(j, plain))]
    assert len(wrong) >= 3
    assert {*wrong} == {*TEMPERATURES}


@pytest.mark.parametrize(
    "case", ["frequency_penalty", *in_proofs("presence_penalty", "repetition_penalty", "all together")]
)
def test_negative_control_penalties_that_do_not_see_the_drafts(
    engine: Engine, whole: list[Job], plain: Plain, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The rows of a round then have the penalties of its first row."""
    put = PenaltyRows.__init__
    monkeypatch.setattr(PenaltyRows, "__init__", lambda self, h, seen, *others: put(self, h, (), *others))
    wanted = [j for d in DRAFTERS for j in cells(whole, d, "match", case=case)]
    results = got(hear(engine, [j.request() for j in wanted]))
    assert any(not same(results[j.name], expected(j, plain)) for j in wanted)


def test_negative_control_bad_words_that_do_not_see_the_drafts(
    engine: Engine, whole: list[Job], plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(
        self: Exclusions, logits: Tensor, tail: Seq[int], drafts: Tensor | None, columns: Seq[Seq[int]]
    ) -> Tensor:
        return apply(self, logits, tail, None, [()] * len(columns))

    apply = Exclusions.apply
    monkeypatch.setattr(Exclusions, "apply", blind)
    wanted = [j for d in DRAFTERS for j in cells(whole, d, "match", case="bad words")]
    results = got(hear(engine, [j.request() for j in wanted]))
    assert any(not same(results[j.name], expected(j, plain)) for j in wanted)


# --- what the others promise -----------------------------------------------------------------------------------------


def broken_promise(job: Job, result: Got, plain: Plain, ends: frozenset[int]) -> str | None:
    """What a text shows of its parameters whatever was drawn; None if all of it is kept."""
    tokens, params = result.tokens, job.params
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
    promises = {
        "length": len(tokens) <= LENGTH and (len(tokens) == LENGTH or result.reason == "stop"),
        "bans": not {t for t, bias in params.logit_bias if bias == -100} & {*tokens},
        "stop tokens": not stops & {*tokens[:-1]},
        "min_tokens": len(tokens) >= params.min_tokens and not stops & {*tokens[: params.min_tokens]},
        "logprobs": [e.token for e in result.logprobs] == ([] if params.logprobs is None else list(tokens)),
        "prompt": equal(result.prompt_logprobs, expected(job, plain).prompt_logprobs),
        "stop": params.include_stop_str_in_output or not any(s in result.text for s in params.stop),
    }
    if job.case == "top_k of one":
        promises["greedy"] = tokens == plain["nothing", 0.0].tokens
    if job.case == "one forced":
        promises["forced"] = {*tokens} == {FORCED}
    if job.case == "allowed_token_ids":
        promises["allowed"] = {*tokens} <= {*FEW, FORCED}
    if params.bad_word_ids:
        runs = {tokens[at : at + n] for n in (1, 2, 3) for at in range(len(tokens))}
        promises["bad words"] = not runs & {*params.bad_word_ids}
    if job.case == "one of a few":
        promises["few"] = {*tokens} <= {*FEW}
    if job.case == "eos after min_tokens":
        promises["end"] = result.reason == "stop" and (len(tokens), tokens[-1]) == (10, EOS)
    if job.case == "top_k":
        promises["best"] = all(e.token in [t for t, _ in e.top] for e in result.logprobs)
    if job.case == "min_p":
        least = job.params.temperature * log(params.min_p)
        promises["likely"] = all(e.logprob >= e.top[0][1] + least - 1e-9 for e in result.logprobs)
    if job.case == "top_p" and params.temperature:
        promises["nucleus"] = all(within_nucleus(e, params) for e in result.logprobs)
    return next((name for name, kept in promises.items() if not kept), None)


def within_nucleus(entry: TokenLogprob, params: SamplingParams) -> bool:
    """Whether the likelier tokens leave it a place, as far as the list tells: a lower bound of their mass is below
    top_p, where every token that is not listed weighs no more than the last one that is."""
    weights = [exp(value / params.temperature) for _, value in entry.top]
    before = sum(w for w in weights if w > exp(entry.logprob / params.temperature))
    return before / (sum(weights) + (VOCAB - len(weights)) * weights[-1]) < params.top_p


OWN_DRAWS = [(d, v) for d, v in WAYS if v != "match"]


@pytest.mark.parametrize(("drafter", "verifier"), OWN_DRAWS)
def test_promises_of_texts_with_draws_of_their_own(
    engine: Engine,
    jobs: list[Job],
    mixed: dict[str, Got],
    plain: Plain,
    drafter: DrafterName | None,
    verifier: Verifier,
) -> None:
    wanted = [j for j in cells(jobs, drafter, verifier) if not j.exact]
    assert len(wanted) >= len(CASES) // 6
    broken = {j.name: broken_promise(j, mixed[j.name], plain, engine.intake.eos_ids) for j in wanted}
    assert {name: promise for name, promise in broken.items() if promise} == {}
    assert any(mixed[j.name].tokens != expected(j, plain).tokens for j in wanted)  # draws of their own indeed


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_negative_control_promises_that_nobody_keeps(
    engine: Engine, whole: list[Job], plain: Plain, monkeypatch: pytest.MonkeyPatch, verifier: Verifier
) -> None:
    """A verifier that accepts everything lets through what the client guessed, be it banned or not."""
    monkeypatch.setattr(acceptance, "first_failure", lambda chances, coins: torch.full((len(chances),), K))
    monkeypatch.setattr(acceptance, "last_success", lambda chances, coins: torch.full((len(chances),), K))
    monkeypatch.setattr(acceptance, "emitted_law", lambda logp, *rest: logp[:, -1])
    guess = plain["nothing", 0.8].tokens + plain["nothing", 0.0].tokens
    cases = ("bans", "one forced", "top_k of one", "top_k", "min_p", "top_p", "min_tokens")
    wanted = [replace(j, prediction=guess) for j in cells(whole, "prediction", verifier) if not j.exact]
    wanted = [j for j in wanted if j.case in cases]
    results = got(hear(engine, [replace(j.request(), k=K) for j in wanted]))
    kept = {j.case for j in wanted if not broken_promise(j, results[j.name], plain, engine.intake.eos_ids)}
    assert kept == set()


# --- drafts that are no good -----------------------------------------------------------------------------------------


class Spoiler:
    """Puts an id that is no token somewhere into every third draft, and checks that it is not kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits = 0
        self._offered = 0
        self._places: dict[str, int] = {}  # by request, of the round that is under way
        self._propose, self._observe = ChainedDrafter.propose, ChainedDrafter.observe
        monkeypatch.setattr(ChainedDrafter, "propose", lambda own, batch, ks: self.propose(own, batch, ks))
        monkeypatch.setattr(ChainedDrafter, "observe", lambda own, batch, verdict: self.observe(own, batch, verdict))

    def propose(self, drafters: ChainedDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft, self._places = self._propose(drafters, batch, ks), {}
        for i, (sequence, k) in enumerate(zip(batch.sequences, draft.ks, strict=True)):
            self._offered += k > 0
            if k and draft.tokens is not None and self._offered % 3 == 0:
                place, bad = self.hits % k, (-1, VOCAB, VOCAB + 7, 2**40, -(2**40))[self.hits % 5]
                draft.tokens[i, place] = bad
                self._places[sequence.request_id] = place
                self.hits += 1
        return draft

    def observe(self, drafters: ChainedDrafter, batch: DraftBatch, verdict: Verdict) -> None:
        for i, sequence in enumerate(batch.sequences):
            kept = verdict.paths.get(i, range(verdict.accepted[i]))
            assert self._places.get(sequence.request_id) not in kept
        self._observe(drafters, batch, verdict)


@pytest.mark.parametrize("drafter", usual_and_proofs(DRAFTERS, ("model",)))
def test_illegal_ids_cost_their_own_draft_only(
    engine: Engine, jobs: list[Job], plain: Plain, monkeypatch: pytest.MonkeyPatch, drafter: DrafterName
) -> None:
    """Under every verifier at once."""
    spoiler = Spoiler(monkeypatch)
    wanted = [j for v in VERIFIERS for j in cells(jobs, drafter, v)]
    heard = hear(engine, [j.request() for j in wanted])
    results = got(heard)
    assert sum(s.draft_faults for s in heard.run.steps) == spoiler.hits > 5
    assert [j.name for j in wanted if j.exact and not same(results[j.name], expected(j, plain))] == []
    ends = engine.intake.eos_ids
    assert [j.name for j in wanted if not j.exact and broken_promise(j, results[j.name], plain, ends)] == []
    assert heard.run.accepted  # of the drafts that were left alone


@pytest.mark.parametrize(
    ("drafter", "part"),
    [
        ("model", "one entry"),
        pytest.param("cascade", "one infinite", marks=pytest.mark.proofs),
        pytest.param("model", "all", marks=pytest.mark.proofs),
        pytest.param("model", "one infinite", marks=pytest.mark.proofs),
        pytest.param("cascade", "all", marks=pytest.mark.proofs),
        pytest.param("cascade", "one entry", marks=pytest.mark.proofs),
    ],
)
def test_a_draft_law_that_is_nan_costs_acceptance_only(
    engine: Engine,
    jobs: list[Job],
    mixed: dict[str, Got],
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    drafter: DrafterName,
    part: str,
) -> None:
    runner = model_drafter(engine).runner
    spoiled = []

    def spoil(logits: Tensor) -> Tensor:
        spoiled.append(len(logits))
        logits = logits.clone()
        logits[..., slice(None) if part == "all" else 9] = torch.inf if part == "one infinite" else torch.nan
        return logits

    run, step = runner.run, runner.step
    monkeypatch.setattr(runner, "run", lambda feeds: spoil(run(feeds)))
    monkeypatch.setattr(runner, "step", lambda sequences, tokens: spoil(step(sequences, tokens)))
    wanted = [j for v in VERIFIERS for j in cells(jobs, drafter, v)]
    heard = hear(engine, [j.request() for j in wanted])
    results = got(heard)
    assert spoiled
    assert [j.name for j in wanted if j.exact and not same(results[j.name], expected(j, plain))] == []
    ends = engine.intake.eos_ids
    assert [j.name for j in wanted if not j.exact and broken_promise(j, results[j.name], plain, ends)] == []
    assert kept_of_the_model(results.values()) < 0.02 < 0.05 < kept_of_the_model(mixed[j.name] for j in wanted)


def kept_of_the_model(results: Iterable[Got]) -> float:
    """The part of the draft model's drafts that was accepted."""
    drafted = accepted = 0
    for record in (result.record for result in results):
        for proposer, offered, kept in ((r.proposer, r.drafted, r.accepted) for r in record.rounds):
            if proposer == DRAFTERS.index("model"):
                drafted, accepted = drafted + offered, accepted + kept
    return accepted / drafted


# --- choices, ties, lenience -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", usual_and_proofs([OFF, *DRAFTERS], [OFF, "model", "cascade"]))
def test_choices_draw_apart(engine: Engine, drafter: DrafterName | None) -> None:
    """Requests that differ in their choice's index only get different texts, and the same ones for the same index."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
    guess = tuple(range(40, 60)) if drafter in ("prediction", "cascade") else ()
    base = Request("", make_prompt(), params, K if drafter else 0, 0, 0, "match", drafter, guess)
    requests = [
        replace(base, id=f"{verifier} {choice}{twin}", choice_index=choice, verifier=verifier)
        for verifier in VERIFIERS
        for choice in range(4)
        for twin in "ab"
    ]
    greedy = [replace(r, id=f"greedy {r.id}", params=replace(params, temperature=0.0)) for r in requests[::3]]
    tokens = drive(engine, [*requests, *greedy]).tokens
    for verifier in VERIFIERS:
        texts = [tokens[f"{verifier} {n}a"] for n in range(4)]
        assert texts == [tokens[f"{verifier} {n}b"] for n in range(4)]
        assert len({*map(tuple, texts)}) == 4
        assert len({text[0] for text in texts}) > 1  # also before any draft
    assert len({tuple(tokens[r.id]) for r in greedy}) == 1  # at temperature 0 there is nothing to draw


def test_negative_control_one_key_for_all_choices(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_for_all(seed: int, prompt: int, choice: int) -> int:
        return sequence_key(seed, prompt, 0)

    monkeypatch.setattr("engine.intake.sequence_key", one_for_all)
    with pytest.raises(AssertionError):
        test_choices_draw_apart(engine, OFF)


def tie(pair: Pair, directory: Path, spoil: Callable[[Tensor], Tensor]) -> Pair:
    """The pair with other head weights in both checkpoints."""
    paths = []
    for name in ("target", "draft"):
        copied = copy_of(getattr(pair, name), directory / name)
        file = copied / "model.safetensors"
        weights = load_file(file)
        weights["lm_head.weight"] = spoil(weights["lm_head.weight"]).contiguous()
        save_file(weights, file, {"format": "pt"})
        paths.append(str(copied))
    return Pair(*paths)


def doubled(head: Tensor) -> Tensor:
    """Rows 2n and 2n + 1 are equal: every token is tied with its neighbour."""
    return head[::2].repeat_interleave(2, 0)


@pytest.mark.parametrize("spoil", [*in_proofs(torch.zeros_like), doubled], ids=["all equal", "pairs"])
def test_ties_take_the_lowest_id_on_every_path(pair: Pair, tmp_path: Path, spoil: Callable[[Tensor], Tensor]) -> None:
    tied = tie(pair, tmp_path, spoil)
    engine = load(tied, drafts=(tied.draft, tied.target), max_spec_length=8)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    requests = [
        Request(f"{d}, {v}, {k}", make_prompt(), params, k, verifier=v, drafter=d)
        for d, v in WAYS
        for k in ((0,) if d is OFF else (1, 4, 8))
    ]
    alone = [requests[0], *(r for n, r in enumerate(requests[3:]) if (n + n // 3) % 6 == 0)]  # a k for each other way
    plain, *others = (got(hear(engine, [r]))[r.id] for r in alone)
    assert all(token % 2 == 0 for token in plain.tokens)
    if spoil is torch.zeros_like:
        assert {*plain.tokens} == {0}
    assert all(entry.top[0][1] == entry.top[1][1] for entry in plain.logprobs)  # they are tied indeed
    assert all(same(other, plain) for other in others)
    heard = hear(engine, requests)
    assert all(same(result, plain) for result in got(heard).values())
    assert heard.run.accepted
    if spoil is torch.zeros_like:
        drafted = [result.record for name, result in got(heard).items() if name.startswith("model")]
        assert sum(map(sum, (record.column("drafted") for record in drafted)))
        assert all(
            record.column("accepted") == record.column("drafted") for record in drafted
        )  # the draft takes the lowest too


@pytest.mark.parametrize("drafter", ["model", *in_proofs("prediction")])
def test_lenience_accepts_more_and_says_so(engine: Engine, plain: Plain, drafter: DrafterName) -> None:
    """Drafts with a law of their own and certain ones; how it changes the law is for the statistics."""
    params = SamplingParams(temperature=0.8, max_tokens=LENGTH, ignore_eos=True)
    guess = plain["nothing", 0.8].tokens if drafter == "prediction" else ()
    accepted = {}
    for lenience in (None, 0.5, 0.05):
        base = Request("", make_prompt(), params, 3, 0, 0, "rejection", drafter, guess, lenience)
        results = got(hear(engine, [replace(base, id=f"r{n}", params=replace(params, seed=n)) for n in range(40)]))
        records = [result.record for result in results.values()]
        assert {(r.lenience, r.drafter, r.verifier, r.k_max) for r in records} == {(lenience, drafter, "rejection", 3)}
        assert all(max(r.column("drafted")) <= 3 for r in records)
        accepted[lenience] = sum(sum(r.column("accepted")) for r in records) / sum(
            sum(r.column("drafted")) for r in records
        )
    assert accepted[None] * 1.1 < accepted[0.5] < accepted[0.05] / 1.1
