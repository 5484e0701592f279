"""What the engine refuses, by which name of the client's vocabulary; and how a request speculates that does not say."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.types import (
    DRAFTERS,
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKENS,
    MAX_TOP_K,
    SEED_RANGE,
    DrafterName,
    InvalidRequest,
    Output,
    Request,
    RequestRecord,
    SamplingParams,
    Typical,
    Verifier,
)
from policies.config import PolicyConfig
from tests.engine.driving import load
from tests.engine.pairs import EOS, VOCAB, Pair
from tests.examples import in_proofs, usual_and_proofs

CONTEXT = 96
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = (5, 6, 7, 5, 6, 7, 5, 6)
BASE = Request("r", PROMPT, GREEDY)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return load(pair, max_spec_length=8, max_model_len=CONTEXT)


@pytest.fixture(scope="module")
def alone(pair: Pair) -> Engine:
    """A target without a draft."""
    return without_draft(pair, max_spec_length=8)


def without_draft(pair: Pair, **config: Any) -> Engine:
    return Engine.from_config(EngineConfig(target=pair.target, dtype="float64", max_model_len=CONTEXT, **config))


def run(engine: Engine, request: Request) -> Output:
    """The last output of a request that must be taken and finish well."""
    engine.check(request)
    engine.submit(request)
    while engine.has_work:
        outputs = engine.step().outputs
    (last,) = outputs
    engine.audit()
    assert last.finish_reason in ("length", "stop")
    return last


def record_of(engine: Engine, request: Request) -> RequestRecord:
    record = run(engine, request).record
    assert record is not None
    return record


def refusal(engine: Engine, request: Request) -> InvalidRequest:
    """Refused by check, which leaves nothing behind."""
    with pytest.raises(InvalidRequest) as caught:
        engine.check(request)
    assert not engine.has_work
    return caught.value


# --- parameters that mean nothing under any model --------------------------------------------------------------------

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    *(("temperature", value, "between 0 and 2") for value in (-0.1, 2.1, nan, inf)),
    *(("top_p", value, "greater than 0 and at most 1") for value in (0.0, 1.1, -1.0, nan)),
    *(("top_k", value, "between 0 \\(every token\\) and 2147483647") for value in (-1, MAX_TOP_K + 1)),
    ("top_k", 2.5, "must be an integer"),
    *(("min_p", value, "between 0 and 1") for value in (-0.1, 1.1, nan)),
    *(("seed", value, "must lie within ±") for value in (MAX_SEED + 1, -MAX_SEED - 1)),
    ("seed", "7", "must be an integer"),
    *(("repetition_penalty", value, "between 0.01 and 10") for value in (0.0, -1.0, 0.009, 10.5, nan, inf)),
    *(("presence_penalty", value, "between -2 and 2") for value in (-2.1, 2.1, nan, inf)),
    *(("frequency_penalty", value, "between -2 and 2") for value in (-2.1, 2.1, nan, -inf)),
    *(("logit_bias", ((5, value),), "values between -100 and 100") for value in (-100.5, 101.0, nan, inf)),
    ("logit_bias", (("5", 1.0),), "token ids as keys"),
    ("logit_bias", ((5, 1.0), (6, 1.0), (5, 2.0)), "not name a token twice"),
    ("logit_bias", tuple((t, 1.0) for t in range(MAX_LOGIT_BIAS + 1)), "at most 1024 tokens"),
    ("allowed_token_ids", (), "at least one token"),
    ("allowed_token_ids", ("5",), "must hold integers"),
    *(("logprobs", value, "integer between 0 and 20") for value in (-1, MAX_LOGPROBS + 1, 1.5)),
    *(("prompt_logprobs", value, "integer between 0 and 20") for value in (-1, MAX_LOGPROBS + 1, "all")),
    ("max_tokens", -1, "not be negative"),
    ("max_tokens", 3.0, "must be an integer"),
    *(("min_tokens", value, "between 0 and max_tokens") for value in (-1, 7)),
    ("min_tokens", 0.5, "must be an integer"),
    ("stop", ("a", "b", "c", "d", "e"), "at most 4 strings"),
    ("stop", ("a", ""), "not contain an empty string"),
    ("stop", "abc", "a tuple of strings"),
    ("stop", ("a", 5), "a tuple of strings"),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKENS + 1)), "at most 64 ids"),
    ("stop_token_ids", (5, "6"), "must hold integers"),
]


@pytest.mark.parametrize(("param", "value", "message"), OUT_OF_RANGE, ids=lambda value: str(value)[:24])
def test_values_out_of_range(param: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{param} .*{message}") as caught:
        SamplingParams(**{"max_tokens": 6, param: value})
    assert (caught.value.param, caught.value.code) == (param, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (((5,),) * (2 * MAX_BAD_WORDS + 1), "at most 64 words"),
        (((5,), ()), "a word without tokens"),
        (((5,) * (MAX_BAD_WORD + 1),), "words of at most 128 tokens"),
    ],
)
def test_bad_words_out_of_range(words: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        SamplingParams(bad_word_ids=words)
    assert caught.value.param == "bad_words"


LIMITS: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (0.0, 2.0)),
    *(("top_p", value) for value in (1e-9, 1.0)),
    *(("top_k", value) for value in (0, 1, MAX_TOP_K)),
    *(("min_p", value) for value in (0.0, 1.0)),
    *(("seed", value) for value in (-MAX_SEED, 0, MAX_SEED)),
    *(("repetition_penalty", value) for value in (0.01, 10.0)),
    *(("presence_penalty", value) for value in (-2.0, 2.0)),
    *(("frequency_penalty", value) for value in (-2.0, 2.0)),
    ("logit_bias", ((0, 100.0), (VOCAB - 1, -100.0))),
    ("logit_bias", tuple((t, 1.0) for t in range(VOCAB))),
    ("allowed_token_ids", (VOCAB - 1,)),
    ("allowed_token_ids", tuple(range(VOCAB))),
    ("bad_word_ids", tuple((t, t + 1) for t in range(2 * MAX_BAD_WORDS))),
    ("bad_word_ids", (tuple(range(MAX_BAD_WORD)),)),
    *(("logprobs", value) for value in (0, MAX_LOGPROBS)),
    *(("prompt_logprobs", value) for value in (0, MAX_LOGPROBS)),
    *(("max_tokens", value) for value in (0, CONTEXT - len(PROMPT))),
    *(("min_tokens", value) for value in (0, 6)),
    ("stop", ("a", "b", "c", "d")),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKENS))),
    ("stop_token_ids", (VOCAB - 1, 0, 0)),
]


@pytest.mark.parametrize(("param", "value"), LIMITS, ids=lambda value: str(value)[:24])
def test_values_at_their_limits_are_served(engine: Engine, param: str, value: Any) -> None:
    params = replace(GREEDY, temperature=0.7, seed=1)
    for k in (0, 3):
        run(engine, replace(BASE, params=replace(params, **{param: value}), k=k))


# --- what this model cannot serve ------------------------------------------------------------------------------------


def with_params(**changes: Any) -> dict[str, Any]:
    return {"params": replace(GREEDY, **changes)}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt_ids": ()}, "prompt", "holds no tokens: give at least one"),
    (
        {"prompt_ids": (5, VOCAB)},
        "prompt",
        f"prompt token id {VOCAB} is outside the vocabulary: give ids from 0 to {VOCAB - 1}",
    ),
    ({"prompt_ids": (-1, 5)}, "prompt", "prompt token id -1 is outside"),
    ({"prompt_ids": (5,) * 91}, "max_tokens", "the prompt's 91 tokens and max_tokens 6 exceed the context of 96"),
    ({"prompt_ids": (5,) * 97}, "prompt", "the prompt's 97 tokens and max_tokens 6 exceed the context of 96"),
    (with_params(logit_bias=((VOCAB, 1.0),)), "logit_bias", f"outside the vocabulary: give ids from 0 to {VOCAB - 1}"),
    (with_params(logit_bias=((5, 1.0), (-1, 1.0))), "logit_bias", "outside the vocabulary"),
    (with_params(stop_token_ids=(5, VOCAB)), "stop_token_ids", "outside the vocabulary"),
    (with_params(stop_token_ids=(-1,)), "stop_token_ids", "outside the vocabulary"),
    (with_params(allowed_token_ids=(5, VOCAB)), "allowed_token_ids", "outside the vocabulary"),
    (with_params(allowed_token_ids=(-1,)), "allowed_token_ids", "outside the vocabulary"),
    (with_params(bad_word_ids=((5, VOCAB),)), "bad_words", "outside the vocabulary"),
    (with_params(bad_word_ids=((-1,),)), "bad_words", "outside the vocabulary"),
    (with_params(allowed_token_ids=(5, 6), bad_word_ids=((5,), (7, 6))), "allowed_token_ids", "no token would be left"),
    (
        with_params(allowed_token_ids=(EOS, 6), bad_word_ids=((6,),), ignore_eos=False, min_tokens=1),
        "allowed_token_ids",
        "no token would be left",
    ),
    (with_params(allowed_token_ids=(5, 6), stop_token_ids=(5, 6), min_tokens=1), "allowed_token_ids", "no token"),
    ({"prediction_ids": (5, VOCAB)}, "prediction", "outside the vocabulary"),
    ({"prediction_ids": (-1,)}, "prediction", "outside the vocabulary"),
    ({"drafter": "medusa"}, "speculation.drafter", "no drafter 'medusa'; it has: "),
    ({"verifier": "typical"}, "speculation.verifier", "'typical' is not one of match, rejection, block"),
    ({"k": -1}, "speculation.k", "maximum, 8"),
    ({"k": 9}, "speculation.k", "maximum, 8"),
    ({"prediction_ids": (5,), "drafter": "model"}, "prediction", "needs drafter 'prediction' or 'cascade'"),
    ({"prediction_ids": (5,), "drafter": "lookup"}, "prediction", "needs drafter 'prediction' or 'cascade'"),
    ({"prediction_ids": (5,), "k": 0}, "prediction", "k and max_k above 0"),
    ({"prediction_ids": (5,) * 97}, "prediction", "as long as a prediction of 97"),
]
TYPICAL = Typical(0.09, 0.3)
SAMPLED: dict[str, Any] = {"params": replace(GREEDY, temperature=0.7), "verifier": "rejection"}
REFUSED_LENIENCE: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({**SAMPLED, "lenience": value}, "lossy.lenience", "between 0 and 1, both excluded")
        for value in (0, 1, -1, nan)
    ),
    (
        {**SAMPLED, "lenience": 0.5, "verifier": "match"},
        "lossy",
        "this request's is 'match'",
    ),
    ({**SAMPLED, "lenience": 0.5, "verifier": "block"}, "lossy", "needs the verifier 'rejection'"),
    ({**SAMPLED, "lenience": 0.5, "verifier": None}, "lossy", "needs the verifier 'rejection'"),
    ({**SAMPLED, "lenience": 0.5, "k": 0}, "lossy", "drafts"),
    ({**SAMPLED, "lenience": 0.5, "params": GREEDY}, "lossy", "a temperature above 0"),
    *(
        ({**SAMPLED, "typical": Typical(*limits)}, f"lossy.typical.{name}", message)
        for *limits, name, message in (
            (0.0, 0.5, "epsilon", "between 0 and 1, both excluded"),
            (1.0, 0.5, "epsilon", "between 0 and 1, both excluded"),
            (nan, 0.5, "epsilon", "between 0 and 1, both excluded"),
            (0.1, 0.0, "delta", "greater than 0 and at most 1"),
            (0.1, 1.5, "delta", "greater than 0 and at most 1"),
        )
    ),
    ({**SAMPLED, "typical": TYPICAL, "lenience": 0.5}, "lossy", "not both"),
    ({**SAMPLED, "typical": TYPICAL, "verifier": "match"}, "lossy", "needs the verifier 'rejection'"),
    ({**SAMPLED, "typical": TYPICAL, "verifier": "block"}, "lossy", "needs the verifier 'rejection'"),
    ({**SAMPLED, "typical": TYPICAL, "k": 0}, "lossy", "drafts"),
    ({**SAMPLED, "typical": TYPICAL, "params": GREEDY}, "lossy", "a temperature above 0"),
]


@pytest.mark.parametrize(("changes", "param", "message"), [*REFUSED, *REFUSED_LENIENCE])
def test_what_this_model_cannot_serve(engine: Engine, changes: dict[str, Any], param: str, message: str) -> None:
    error = refusal(engine, replace(BASE, **changes))
    assert error.param == param
    assert message in str(error)
    assert error.code == ("context_length_exceeded" if "exceed" in message else None)


def test_the_same_requests_without_what_is_wrong_are_served(engine: Engine) -> None:
    """So that none of them is refused for something else."""
    run(engine, BASE)
    run(engine, replace(BASE, prompt_ids=(5,) * 90))
    run(engine, replace(BASE, prediction_ids=(0, VOCAB - 1)))
    record = record_of(engine, replace(BASE, **SAMPLED, lenience=0.5))
    assert (record.lenience, record.verifier, record.drafter, record.k_max) == (0.5, "rejection", "model", 8)
    assert record_of(engine, BASE).lenience is None
    record = record_of(engine, replace(BASE, **SAMPLED, typical=TYPICAL))
    assert (record.typical, record.lenience, record.verifier) == (TYPICAL, None, "rejection")


@pytest.fixture
def every_token_ends(engine: Engine) -> Iterator[None]:
    before = engine.intake.eos_ids
    engine.intake.eos_ids = frozenset(range(VOCAB - 2))
    yield
    engine.intake.eos_ids = before


@pytest.mark.usefixtures("every_token_ends")
def test_min_tokens_must_leave_a_token_to_draw(engine: Engine) -> None:
    heeding = replace(GREEDY, ignore_eos=False, min_tokens=2, stop_token_ids=(VOCAB - 2, VOCAB - 1))
    error = refusal(engine, replace(BASE, params=heeding))
    assert error.param == "stop_token_ids"
    assert "every token would end the text, and min_tokens forbids them all" in str(error)
    for served in (
        replace(heeding, min_tokens=0),
        replace(heeding, ignore_eos=True),
        replace(heeding, stop_token_ids=(VOCAB - 2,)),
    ):
        run(engine, replace(BASE, params=served))


def test_an_engine_without_a_draft_model(alone: Engine) -> None:
    """Names what it has; and drafts are offered by none of them unless a request says by which."""
    error = refusal(alone, replace(BASE, drafter="model"))
    assert error.param == "speculation.drafter"
    assert "no drafter 'model'; it has: ngram, lookup, prediction, cascade, suffix" in str(error)
    error = refusal(alone, replace(BASE, k=3))
    assert error.param == "speculation.drafter"
    assert "no drafter is configured here, and the request names none" in str(error)
    error = refusal(alone, replace(BASE, **SAMPLED, lenience=0.5))
    assert error.param == "lossy"
    served: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "cascade", "suffix", "lookahead")
    assert [record_of(alone, replace(BASE, drafter=name, k=3)).drafter for name in served] == list(served)


def test_an_engine_that_never_drafts(pair: Pair) -> None:
    engine = load(pair, max_spec_length=0)
    assert engine.max_spec_length == 0
    error = refusal(engine, replace(BASE, k=1))
    assert error.param == "speculation.k"
    assert "between 0 and this server's maximum, 0" in str(error)
    assert refusal(engine, replace(BASE, prediction_ids=(5,))).param == "prediction"
    assert refusal(engine, replace(BASE, drafter="lookup")).param == "speculation.drafter"
    assert record_of(engine, BASE).k_max == 0


@pytest.mark.parametrize("dtype", [*in_proofs("float64", "bfloat16"), "float32"])
@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_any_temperature_above_zero_is_served(pair: Pair, dtype: str, temperature: float) -> None:
    """Close to 0 the law is the likeliest token, by any verifier and with any filter."""
    engine = load(pair, dtype=dtype, max_spec_length=8)
    greedy = run(engine, BASE).token_ids
    params = replace(GREEDY, temperature=temperature, top_p=0.9, min_p=0.1)
    verifiers: tuple[Verifier, ...] = ("match", "rejection", "block")
    for verifier in verifiers:
        assert run(engine, replace(BASE, params=params, verifier=verifier)).token_ids == greedy


# --- how a request speculates ----------------------------------------------------------------------------------------

OFF = PolicyConfig("off")
Resolved = tuple[DrafterName | None, int, Verifier]
CONFIGURED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], Resolved]]]] = {
    "nothing configured": (
        {},
        [
            ({}, ("model", 16, "match")),
            ({"k": 0}, (None, 0, "match")),
            ({"k": 2}, ("model", 2, "match")),
            ({"max_k": 2}, ("model", 2, "match")),
            ({"max_k": 0}, (None, 0, "match")),
            ({"k": 8, "verifier": "block"}, ("model", 8, "block")),
            ({"drafter": "ngram"}, ("ngram", 16, "match")),
            ({"drafter": "lookup", "k": 0}, (None, 0, "match")),
            ({"prediction_ids": (5, 6, 7)}, ("cascade", 16, "match")),
            ({"prediction_ids": (5, 6, 7), "k": 1}, ("cascade", 1, "match")),
            ({"prediction_ids": (5, 6, 7), "drafter": "prediction"}, ("prediction", 16, "match")),
        ],
    ),
    "model": ({"drafter": "model", "policy": PolicyConfig("fixed", k=3)}, [({}, ("model", 16, "match"))]),
    "lookup": (
        {"drafter": "lookup", "verifier": "rejection"},
        [
            ({}, ("lookup", 16, "rejection")),
            ({"drafter": "model", "verifier": "match"}, ("model", 16, "match")),
            ({"prediction_ids": (5, 6, 7)}, ("cascade", 16, "rejection")),
            ({"k": 0}, (None, 0, "rejection")),
        ],
    ),
    "cascade": (
        {"drafter": "cascade", "verifier": "block"},
        [({}, ("cascade", 16, "block")), ({"prediction_ids": (5, 6, 7)}, ("cascade", 16, "block"))],
    ),
    "off by default": (
        {"policy": OFF},
        [
            ({"max_k": 3}, ("model", 3, "match")),
            ({"max_k": 0}, (None, 0, "match")),
            ({"drafter": "lookup", "max_k": 3}, ("lookup", 3, "match")),
            ({"k": 4}, ("model", 4, "match")),
            ({"drafter": "lookup"}, ("lookup", 5, "match")),
            ({"drafter": "lookup", "k": 2}, ("lookup", 2, "match")),
            ({"prediction_ids": (5, 6, 7)}, ("cascade", 5, "match")),
        ],
    ),
    "off by default, and never many": (
        {"policy": OFF, "max_spec_length": 3},
        [({"drafter": "ngram"}, ("ngram", 3, "match"))],
    ),
}
WITHOUT_DRAFT: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], Resolved]]]] = {
    "no draft": (
        {},
        [
            ({}, (None, 0, "match")),
            ({"k": 0}, (None, 0, "match")),
            ({"drafter": "cascade"}, ("cascade", 16, "match")),
            ({"prediction_ids": (5, 6, 7)}, ("cascade", 16, "match")),
        ],
    ),
    "no draft, lookup": ({"drafter": "lookup"}, [({}, ("lookup", 16, "match")), ({"k": 1}, ("lookup", 1, "match"))]),
    "no draft, cascade": ({"drafter": "cascade"}, [({}, ("cascade", 16, "match"))]),
    "no draft, off by default": (
        {"drafter": "ngram", "policy": OFF},
        [
            ({}, ("ngram", 16, "match")),
            ({"k": 2}, ("ngram", 2, "match")),
            ({"drafter": "ngram"}, ("ngram", 5, "match")),
        ],
    ),
}


def check_resolved(engine: Engine, cases: list[tuple[dict[str, Any], Resolved]]) -> None:
    """By the record, and by what really happened: no drafts without a drafter, and never more than k at once."""
    for changes, (drafter, k_max, verifier) in cases:
        record = record_of(engine, replace(BASE, **changes))
        assert (record.drafter, record.k_max, record.verifier) == (drafter, k_max, verifier), changes
        assert max(record.column("drafted")) <= k_max
        assert all((part.proposer == -1) == (part.drafted == 0) for part in record.rounds)
        if drafter in ("model", "lookup", "ngram", "suffix"):
            assert {p for p in record.column("proposer") if p >= 0} <= {DRAFTERS.index(drafter)}
        by_itself = record.fixed_k is None and engine.policy.name == "off"
        if (drafter == "model" or "prediction_ids" in changes) and not by_itself:
            assert any(record.column("drafted")), changes
        if by_itself:
            assert not any(record.column("drafted")), changes
        assert record.prediction_tokens == len(changes.get("prediction_ids", ()))


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_a_request_gets(pair: Pair, name: str) -> None:
    config, cases = CONFIGURED[name]
    check_resolved(load(pair, **config), cases)


@pytest.mark.parametrize("name", WITHOUT_DRAFT)
def test_what_a_request_gets_without_a_draft_model(pair: Pair, name: str) -> None:
    config, cases = WITHOUT_DRAFT[name]
    check_resolved(without_draft(pair, **config), cases)


def test_a_seed_that_was_not_given_is_drawn_for_each(engine: Engine) -> None:
    """And small enough for every client to send it back."""
    seeds = [record_of(engine, BASE).seed for _ in range(20)]
    assert len({*seeds}) == 20
    assert all(0 <= seed < SEED_RANGE for seed in seeds)
    assert max(seeds) > SEED_RANGE // 2**16
    for seed in (0, -5, MAX_SEED):
        assert record_of(engine, replace(BASE, params=replace(GREEDY, seed=seed))).seed == seed


def test_end_tokens_of_a_request(engine: Engine) -> None:
    for params, ends in (
        (GREEDY, set()),
        (replace(GREEDY, ignore_eos=False), {EOS}),
        (replace(GREEDY, stop_token_ids=(7, 9)), {7, 9}),
        (replace(GREEDY, stop_token_ids=(7, EOS)), {7, EOS}),
        (replace(GREEDY, ignore_eos=False, stop_token_ids=(7,)), {7, EOS}),
    ):
        assert engine.intake.sequence(replace(BASE, params=params), 0, 0.0).end_ids == ends


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verifier": "typical"}, "verifier 'typical' is not one of match, rejection, block"),
        ({"drafter": "medusa"}, "drafter 'medusa' is not one of model, .*, lookahead, merged"),
        ({"drafter": "merged"}, "drafter 'merged' needs at least two draft checkpoints: drafts has 0"),
        ({"drafts": ("a", "b")}, "draft d and drafts a, b are both set: set one of them"),
        ({"draft": None, "drafts": ("a", "b"), "deterministic": True}, "deterministic cannot be honoured with several"),
        ({"drafter": "model", "draft": None}, "drafter 'model' needs a draft checkpoint, and draft is not set"),
        ({"policy": PolicyConfig("fixed", k=17)}, "policy fixed with k 17 exceeds max_spec_length, which is 16"),
        ({"policy": PolicyConfig("heuristic", k=17)}, "policy heuristic with k 17 exceeds max_spec_length"),
        ({"policy": PolicyConfig(max_k=17)}, "max_k 17 exceeds max_spec_length, which is 16"),
        ({"policy": PolicyConfig("fixed", k=1), "max_spec_length": 0}, "policy fixed with k 1 exceeds"),
        ({"suffix_tokens": -1}, "suffix_tokens must not be negative, not -1"),
        ({"max_spec_length": -1}, "max_spec_length must not be negative, not -1"),
        ({"deterministic": True, "policy": PolicyConfig(trees=True)}, "policy trees cannot be honoured"),
        ({"graphs": True}, "graphs need device cuda and cache paged, not cpu and paged"),
        ({"graphs": True, "device": "cuda", "cache": "slotted"}, "graphs need .*, not cuda and slotted"),
    ],
)
def test_configurations_that_cannot_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"target": "t", "draft": "d", **changes})


@pytest.mark.parametrize("name", usual_and_proofs(DRAFTERS, ("model", "lookup", "merged")))
def test_every_drafter_can_be_the_default(pair: Pair, drafts: tuple[str, str], name: DrafterName) -> None:
    engine = load(pair, drafter=name, **({"drafts": drafts} if name == "merged" else {}))
    has: tuple[DrafterName, ...] = ("ngram", "lookup", "prediction", "cascade", "suffix", "lookahead", "model")
    assert engine.drafters == ((*has, "merged") if name == "merged" else has)
    assert record_of(engine, BASE).drafter == name


class Counted(tuple[int, ...]):
    """Token ids that count how often they are read."""

    readings = 0

    def __iter__(self) -> Iterator[int]:
        self.readings += 1
        return super().__iter__()


def test_choices_that_share_their_parameters_share_the_check(engine: Engine) -> None:
    """A list of allowed tokens may hold hundreds of thousands, and the event loop waits for the check."""
    allowed = Counted(range(VOCAB))
    request = replace(BASE, params=replace(GREEDY, allowed_token_ids=allowed))
    allowed.readings = 0
    engine.check(request)
    before, allowed.readings = allowed.readings, 0
    engine.check(*(replace(request, id=f"r-{i}", choice_index=i) for i in range(8)))
    assert allowed.readings == before
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.check(request, replace(request, params=replace(GREEDY, allowed_token_ids=(VOCAB,))))


@pytest.mark.parametrize("name", ["prompt_ids", "prediction_ids"])
def test_choices_that_share_their_text_share_the_check(engine: Engine, name: str) -> None:
    ids, wrong = Counted((5, 6, 7)), dict[str, Any]({name: (5, VOCAB)})
    request = replace(BASE, **dict[str, Any]({name: ids}))
    engine.check(request)
    before, ids.readings = ids.readings, 0
    engine.check(*(replace(request, id=f"r-{i}", choice_index=i) for i in range(8)))
    assert ids.readings == before > 0
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        engine.check(request, replace(request, **wrong))


def test_an_empty_prompt_is_refused_behind_an_empty_prediction(engine: Engine) -> None:
    """Both are the same object."""
    with pytest.raises(InvalidRequest, match="holds no tokens"):
        engine.check(BASE, replace(BASE, prompt_ids=()))
