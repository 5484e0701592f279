"""Tokens that a request names end its text like an end-of-sequence token; and what of its end the text keeps.

The target is its own draft, so every round of every verifier accepts everything and the block structure is known.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cache

import pytest

from engine import commit as commit_module
from engine.detokenize import TextStream
from engine.engine import Engine
from engine.types import Request, SamplingParams, Verifier
from tests.engine.driving import Received, drive, load
from tests.engine.pairs import EOS, Pair, Shape, save_pair
from tests.engine.test_stops import certain, decoded, place_in_block, prompt, run_with_ends, stop_strings

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("twins"), Shape(layers=1), noise=0.0)


K = 4
LENGTH = 24


@dataclass(frozen=True, slots=True)
class Way:
    k: int
    verifier: Verifier
    temperature: float

    def __str__(self) -> str:
        return f"k{self.k}-{self.verifier}-{self.temperature}"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=8, max_tokens=LENGTH, ignore_eos=True)


WAYS = [Way(k, "match", t) for k in (0, K) for t in (0.0, 1.0)] + [
    Way(k, v, 1.0) for k in (0, K) for v in ("rejection", "block")
]
SPECULATIVE = [way for way in WAYS if way.k and way.temperature]
USUAL = (Way(0, "match", 0.0), Way(K, "block", 1.0))
every_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in USUAL else pytest.mark.proofs) for way in WAYS], ids=str
)
every_speculative_way = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in USUAL else pytest.mark.proofs) for way in SPECULATIVE], ids=str
)


@pytest.fixture(scope="module")
def engine(twins: Pair) -> Engine:
    """Sixteen requests share a pass, and each has room for all of its drafts in every round."""
    return load(twins, max_running=16, max_spec_length=8, max_step_tokens=512, prefill_chunk=512)


@pytest.fixture
def end_tokens(engine: Engine) -> Iterator[None]:
    """Tests may choose which tokens end every text."""
    before = engine.intake.eos_ids
    yield
    engine.intake.eos_ids = before


def asks(engine: Engine, way: Way, params: SamplingParams, name: str = "r") -> Request:
    return Request(name, prompt(engine), params, k=way.k, verifier=way.verifier)


def run(engine: Engine, way: Way, params: SamplingParams) -> Received:
    return drive(engine, [asks(engine, way, params)]).received["r"]


def run_all(engine: Engine, way: Way, params: Iterable[SamplingParams]) -> list[Received]:
    """What each request gets. They share passes, which changes no text."""
    requests = [asks(engine, way, asked, f"r{n}") for n, asked in enumerate(params)]
    received = drive(engine, requests).received
    return [received[r.id] for r in requests]


def wordy(engine: Engine, way: Way) -> SamplingParams:
    """Texts with many tokens of several letters, so that strings begin and end inside of tokens."""
    words = [t for t in engine.tokenizer.vocab.values() if len(w := decoded(engine, [t])) > 1 and w.isascii()]
    return replace(way.params, logit_bias=tuple((token, 6.0) for token in sorted(words)))


@cache
def free(engine: Engine, way: Way, params: SamplingParams | None = None) -> list[int]:
    """What it says when nothing ends it: a stop may only cut this, as the rounds before it are the same."""
    told = run(engine, way, params or way.params)
    assert (len(told.tokens), told.reason) == (LENGTH, "length")
    return told.tokens


def ends_of(params: SamplingParams, tokens: list[int]) -> list[int]:
    """The tokens up to the first one that ends the text."""
    at = next(i for i, token in enumerate(tokens) if token in params.stop_token_ids)
    return tokens[: at + 1]


@every_way
@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
def test_a_stop_token_ends_the_text_wherever_it_falls(engine: Engine, way: Way, include: bool) -> None:
    tokens = free(engine, way)
    places = set()
    asked = [
        replace(way.params, stop_token_ids=(stop,), include_stop_str_in_output=include)
        for stop in dict.fromkeys(tokens)
    ]
    for params, told in zip(asked, run_all(engine, way, asked), strict=True):
        expected = ends_of(params, tokens)
        assert (told.tokens, told.reason) == (expected, "stop")
        assert told.text == decoded(engine, expected if include else expected[:-1])
        assert told.record is not None
        assert told.record.output_tokens == len(expected)  # usage counts what ended the text, whether shown or not
        places.add(place_in_block(told))
    if way in SPECULATIVE:
        assert places >= set(range(K + 1))


@pytest.mark.usefixtures("end_tokens")
@every_way
def test_it_does_what_an_end_of_sequence_token_does(engine: Engine, way: Way) -> None:
    stops = [*dict.fromkeys(free(engine, way))]
    heeding = replace(way.params, ignore_eos=False)
    cases = [(frozenset({stop}), [asks(engine, way, heeding, f"r{n}")]) for n, stop in enumerate(stops)]
    received = run_with_ends(engine, cases)
    engine.intake.eos_ids = frozenset({EOS})
    named = run_all(engine, way, (replace(way.params, stop_token_ids=(stop,)) for stop in stops))
    for n, told in enumerate(named):
        own = received[f"r{n}"]
        assert (told.tokens, told.text, told.reason) == (own.tokens, own.text, own.reason)


@every_way
def test_the_first_of_several(engine: Engine, way: Way) -> None:
    tokens = free(engine, way)
    params = replace(way.params, stop_token_ids=(tokens[20], tokens[9], tokens[15], 399))
    told = run(engine, way, params)
    assert told.tokens == ends_of(params, tokens)
    assert len(told.tokens) <= 10


@pytest.mark.usefixtures("end_tokens")
@every_way
def test_ignore_eos_does_not_ignore_them(engine: Engine, way: Way) -> None:
    """Not even if a token is both; and without it both kinds end the text."""
    tokens = free(engine, way)
    early, late = tokens[6], tokens[14]
    engine.intake.eos_ids = frozenset({early})
    ignoring = replace(way.params, stop_token_ids=(late,))
    assert run(engine, way, ignoring).tokens == ends_of(ignoring, tokens)
    both = replace(way.params, stop_token_ids=(early,))
    assert run(engine, way, both).tokens == ends_of(both, tokens)
    heeding = run(engine, way, replace(ignoring, ignore_eos=False)).tokens
    assert heeding == ends_of(replace(ignoring, stop_token_ids=(early, late)), tokens)


@every_way
def test_min_tokens_bans_them_before_and_allows_them_after(engine: Engine, way: Way) -> None:
    """The stop token has all the mass, so the ban is felt at every position, and its end is felt at once."""
    free = replace(way.params, stop_token_ids=(80, 90), logit_bias=((80, 100.0),))
    asked = [replace(free, min_tokens=n) for n in (*range(1, 8), LENGTH)]
    for params, told in zip(asked, run_all(engine, way, asked), strict=True):
        least = params.min_tokens
        assert not {80, 90} & {*told.tokens[:least]}
        assert len({*told.tokens[:least]}) > least // 4
        if least < LENGTH:
            assert (told.tokens[least:], told.reason) == ([80], "stop")
        else:
            assert (len(told.tokens), told.reason) == (LENGTH, "length")
    assert run(engine, way, free).tokens == [80]


@every_way
@pytest.mark.parametrize("include", [False, True], ids=["left out", "included"])
def test_special_tokens_have_no_text(engine: Engine, way: Way, include: bool) -> None:
    params = replace(
        way.params,
        min_tokens=7,
        stop_token_ids=(EOS,),
        logit_bias=((EOS, 100.0),),
        include_stop_str_in_output=include,
    )
    told = run(engine, way, params)
    assert told.tokens[7:] == [EOS]
    assert told.text == decoded(engine, told.tokens[:7])
    assert told.record is not None
    assert told.record.output_tokens == 8


# --- stop strings that stay in the text ------------------------------------------------------------------------------


def up_to(engine: Engine, tokens: list[int], stop: str) -> tuple[list[int], str, bool]:
    """(tokens, text up to the end of the stop string, whether its last token goes on behind it)."""
    for n in range(1, len(tokens) + 1):
        text = certain(engine, tokens[:n])
        if (at := text.find(stop)) >= 0:
            return tokens[:n], text[: at + len(stop)], at + len(stop) < len(text)
    raise AssertionError(f"{stop!r} does not occur")


@every_way
def test_the_text_keeps_the_stop_string(engine: Engine, way: Way) -> None:
    """Begun in an earlier token or round, and ended inside a token, whose rest is cut."""
    base = wordy(engine, way)
    tokens = free(engine, way, base)
    places, inside, spanning = set(), 0, 0
    stops = [*dict.fromkeys(stop_strings(certain(engine, tokens))[::3])]
    kept = run_all(engine, way, (replace(base, stop=(s,), include_stop_str_in_output=True) for s in stops))
    left_out = run_all(engine, way, (replace(base, stop=(s,)) for s in stops))
    for stop, told, without in zip(stops, kept, left_out, strict=True):
        expected, text, cut = up_to(engine, tokens, stop)
        assert (told.tokens, told.text, told.reason) == (expected, text, "stop")
        assert (without.tokens, without.text + stop) == (told.tokens, told.text)
        assert told.record is not None
        assert told.record.output_tokens == len(expected)
        earlier = certain(engine, expected[: len(expected) - told.record.column("emitted")[-1]])
        spanning += len(earlier) > len(without.text)
        inside += cut
        places.add(place_in_block(told))
    assert inside
    assert spanning
    if way in SPECULATIVE:
        assert places >= set(range(K + 1))


@every_way
def test_the_stop_string_that_begins_first(engine: Engine, way: Way) -> None:
    """Of several that are complete at once; of two that begin together the shorter one."""
    tokens = free(engine, way)
    text = certain(engine, tokens)
    at = next(
        i for i in range(len(text) // 2, len(text)) if "\ufffd" not in text[i : i + 3] and text.find(text[i]) == i
    )
    stop = (text[at : at + 3], text[at], "never there")
    told = run(engine, way, replace(way.params, stop=stop, include_stop_str_in_output=True))
    assert told.text == text[: at + 1]


@every_way
def test_a_stop_string_before_min_tokens_stays_and_does_not_count(engine: Engine, way: Way) -> None:
    tokens = free(engine, way)
    first, text, _ = up_to(engine, tokens, stop_strings(certain(engine, tokens))[0])
    params = replace(way.params, stop=(text[-1],), min_tokens=LENGTH, include_stop_str_in_output=True)
    told = run(engine, way, params)
    assert len(told.tokens) == LENGTH > len(first)
    assert told.text.startswith(text)
    just = run(engine, way, replace(params, min_tokens=len(first)))
    assert (just.tokens, just.text, just.reason) == (first, text, "stop")


@every_way
def test_a_stop_token_with_part_of_a_stop_string_before_it(engine: Engine, way: Way) -> None:
    """What was held back for a stop string that never came is part of the text."""
    tokens = free(engine, way)
    stop = tokens[10]
    params = replace(way.params, stop_token_ids=(stop,))
    expected = ends_of(params, tokens)
    text = decoded(engine, expected[:-1])
    held = replace(params, stop=(text[-2:] + "\x00",))
    assert run(engine, way, held).text == text
    included = run(engine, way, replace(held, include_stop_str_in_output=True))
    assert included.text == decoded(engine, expected)


# --- what makes these tests fail -------------------------------------------------------------------------------------


@every_speculative_way
def test_negative_control_stop_tokens_seen_at_the_end_of_a_round_only(
    engine: Engine, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    proper = commit_module.commit

    def late(sequence: object, emitted: list[int]) -> object:
        ends = sequence.end_ids  # type: ignore[attr-defined]
        if emitted[-1] not in ends:
            sequence.end_ids = frozenset()  # type: ignore[attr-defined]
        committed = proper(sequence, emitted)  # type: ignore[arg-type]
        sequence.end_ids = ends  # type: ignore[attr-defined]
        return committed

    monkeypatch.setattr("engine.engine.commit", late)
    with pytest.raises(AssertionError):
        test_a_stop_token_ends_the_text_wherever_it_falls(engine, way, False)


def test_negative_control_a_text_that_is_not_cut_behind_the_stop_string(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = TextStream.push

    def uncut(self: TextStream, token: int, *, may_stop: bool) -> tuple[str, bool]:
        whole, held = copy(self._detokenizer), self._held
        whole._window = list(whole._window)
        text, stopped = push(self, token, may_stop=may_stop)
        return (held + whole.push(token) if stopped else text), stopped

    monkeypatch.setattr(TextStream, "push", uncut)
    with pytest.raises(AssertionError):
        test_the_text_keeps_the_stop_string(engine, WAYS[2])
