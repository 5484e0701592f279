"""Where a text ends does not depend on the rounds: stops fall inside accepted blocks, at every place of a block.

The target is its own draft here, so every round accepts everything and the block structure is known. What each request
should get follows, in plain Python, from a plain run (k = 0) that ignores the end-of-sequence token.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest

from engine.engine import Engine
from engine.types import FinishReason, Request, SamplingParams
from tests.engine.driving import Received, drive, load
from tests.engine.pairs import EOS, Pair

K = 4
LENGTH = 24
REPLACEMENT = "\ufffd"
SEEDS = (4, 6, 8, 9)  # of texts without long runs of invalid bytes


@pytest.fixture(scope="module")
def engine(twins: Pair) -> Engine:
    return load(twins, max_model_len=96, max_running=8, max_spec_length=8, max_step_tokens=80)


@pytest.fixture
def end_tokens(engine: Engine) -> Iterator[None]:
    """Tests may choose which tokens end a text."""
    before = engine.intake.eos_ids
    yield
    engine.intake.eos_ids = before


def prompt(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode("def main(argv=None):"))


def run(engine: Engine, params: SamplingParams, k: int = K) -> Received:
    return drive(engine, [Request("r", prompt(engine), params, k=k)]).received["r"]


def based_on(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module", params=SEEDS, ids=lambda seed: f"seed{seed}")
def base(request: pytest.FixtureRequest) -> SamplingParams:
    return based_on(request.param)


@dataclass(frozen=True, slots=True)
class End:
    tokens: list[int]
    text: str
    reason: FinishReason


def decoded(engine: Engine, tokens: Seq[int]) -> str:
    return engine.tokenizer.decode(tokens)


def certain(engine: Engine, tokens: Seq[int]) -> str:
    """The text of the longest beginning of `tokens` that does not end inside a character."""
    texts = (decoded(engine, tokens[:n]) for n in range(len(tokens), -1, -1))
    return next(t for t in texts if not t.endswith(REPLACEMENT))


def reference(engine: Engine, plain: Seq[int], params: SamplingParams, eos: frozenset[int] = frozenset()) -> End:
    """Token by token over what the model would say if nothing ended it."""
    before = ""
    for n in range(1, params.max_tokens + 1):
        tokens, may_stop = list(plain[:n]), n >= params.min_tokens
        if plain[n - 1] in eos and may_stop and not params.ignore_eos:
            return End(tokens, decoded(engine, tokens[:-1]), "stop")  # the end token itself has no text
        text = certain(engine, tokens)
        found = [text.find(s, max(0, len(before) - len(s) + 1)) for s in params.stop]
        if may_stop and (starts := [at for at in found if at >= 0]):
            return End(tokens, text[: min(starts)], "stop")
        before = text
    return End(list(plain[: params.max_tokens]), decoded(engine, plain[: params.max_tokens]), "length")


def assert_end(told: Received, end: End) -> None:
    assert (told.tokens, told.text, told.reason) == (end.tokens, end.text, end.reason)


def place_in_block(told: Received) -> int:
    """Which token of its round's 1 + K the text ended with, counted from 0; −1 if drafts ran short there."""
    assert told.record is not None
    return told.record.column("emitted")[-1] - 1 if told.record.column("drafted")[-1] == K else -1


def test_everything_is_accepted(engine: Engine, base: SamplingParams) -> None:
    told = run(engine, base)
    assert told.record is not None
    assert told.record.column("accepted") == told.record.column("drafted")
    assert told.record.column("emitted")[1:-1] == [1 + K] * (len(told.record.column("emitted")) - 2)
    assert told.text == decoded(engine, told.tokens)


@pytest.mark.usefixtures("end_tokens")
def test_end_of_sequence_at_every_place(engine: Engine, base: SamplingParams) -> None:
    plain = run(engine, base, k=0).tokens
    places = set()
    for n in range(LENGTH):
        engine.intake.eos_ids = frozenset({plain[n]})
        params = replace(base, ignore_eos=False)
        told = run(engine, params)
        assert_end(told, reference(engine, plain, params, engine.intake.eos_ids))
        assert_end(run(engine, params, k=0), reference(engine, plain, params, engine.intake.eos_ids))
        assert told.tokens[-1] == plain[n]
        assert_end(run(engine, base), reference(engine, plain, base, engine.intake.eos_ids))  # ignore_eos
        places.add(place_in_block(told))
    assert places >= set(range(K + 1))


@pytest.mark.usefixtures("end_tokens")
def test_several_end_tokens_and_their_text(engine: Engine, base: SamplingParams) -> None:
    plain = run(engine, base, k=0).tokens
    engine.intake.eos_ids = frozenset({plain[9], plain[13]})
    params = replace(base, ignore_eos=False)
    assert_end(run(engine, params), reference(engine, plain, params, engine.intake.eos_ids))


def test_the_real_end_token_adds_no_text(engine: Engine) -> None:
    """With the checkpoint's own end token, which the tokenizer skips; some of the 60 seeds meet it."""
    met = 0
    for seed in range(60):
        params = SamplingParams(temperature=2.0, seed=seed, max_tokens=60)
        told = run(engine, params)
        assert (EOS in told.tokens) == (told.reason == "stop")
        if told.reason == "stop":
            met += 1
            assert told.tokens.index(EOS) == len(told.tokens) - 1
            assert told.text == decoded(engine, told.tokens[:-1])
    assert met


@pytest.mark.parametrize("max_tokens", range(1, 2 * K + 4))
def test_max_tokens(engine: Engine, base: SamplingParams, max_tokens: int) -> None:
    plain = run(engine, base, k=0).tokens
    params = replace(base, max_tokens=max_tokens)
    told = run(engine, params)
    assert_end(told, reference(engine, plain, params))
    assert told.record is not None
    assert sum(told.record.column("emitted")) == max_tokens


@pytest.mark.parametrize("room", range(1, 2 * K + 4))
def test_context_end(twins: Pair, engine: Engine, base: SamplingParams, room: int) -> None:
    """The last token fills the context exactly; drafts shrink before it."""
    plain = run(engine, base, k=0).tokens
    small = load(twins, max_model_len=len(prompt(engine)) + room, max_running=1, max_spec_length=8)
    params = replace(base, max_tokens=room)
    assert_end(run(small, params), reference(engine, plain, params))
    assert_end(run(small, params, k=8), reference(engine, plain, params))


def stop_strings(text: str) -> list[str]:
    """Pieces of one, two, three and six characters from all over the text.

    Without U+FFFD: when invalid bytes are given up is the detokenizer's, whose tests are elsewhere.
    """
    pieces = [text[at : at + n] for at in range(len(text)) for n in (1, 2, 3, 6) if at + n <= len(text)]
    return [piece for piece in pieces if REPLACEMENT not in piece]


def test_stop_strings_at_every_place(engine: Engine) -> None:
    places: set[int] = set()
    spanning = 0
    for seed in SEEDS:
        base = based_on(seed)
        more, across = stop_everywhere(engine, base)
        places |= more
        spanning += across
    assert places >= set(range(K + 1))
    assert spanning


def stop_everywhere(engine: Engine, base: SamplingParams) -> tuple[set[int], int]:
    """(places in their block at which texts were stopped, how many stop strings began in an earlier round)."""
    plain = run(engine, base, k=0).tokens
    text = certain(engine, plain)
    places, spanning = set(), 0
    for stop in stop_strings(text)[::2]:
        params = replace(base, stop=(stop,))
        told = run(engine, params)
        end = reference(engine, plain, params)
        assert end.reason == "stop"
        assert_end(told, end)
        assert stop not in told.text
        places.add(place_in_block(told))
        # The string began in an earlier token, and in an earlier round, than the one that completed it.
        last_round = told.record.column("emitted")[-1] if told.record else 0
        spanning += len(certain(engine, told.tokens[: len(told.tokens) - last_round])) > len(told.text)
    return places, spanning


def test_several_stop_strings(engine: Engine, base: SamplingParams) -> None:
    plain = run(engine, base, k=0).tokens
    pieces = stop_strings(certain(engine, plain))
    for i in range(0, len(pieces) - 9, 5):
        params = replace(base, stop=(pieces[i + 9], "never there", pieces[i][:1] + "\x00\x00", pieces[i]))
        assert_end(run(engine, params), reference(engine, plain, params))


def test_stop_strings_with_min_tokens(engine: Engine, base: SamplingParams) -> None:
    plain = run(engine, base, k=0).tokens
    text = certain(engine, plain)
    later = 0
    for stop in stop_strings(text)[::3]:
        free = reference(engine, plain, replace(base, stop=(stop,)))
        for min_tokens in (len(free.tokens), len(free.tokens) + 1, len(free.tokens) + 3):
            if min_tokens <= LENGTH:
                params = replace(base, stop=(stop,), min_tokens=min_tokens)
                end = reference(engine, plain, params)
                assert_end(run(engine, params), end)
                later += len(end.tokens) > len(free.tokens)
    assert later


@pytest.mark.usefixtures("end_tokens")
@pytest.mark.parametrize("k", [0, K])
def test_ignored_ends_are_not_banned_under_min_tokens(engine: Engine, base: SamplingParams, k: int) -> None:
    """Every token of the text ends texts; who ignores that gets the same text with min_tokens as without."""
    plain = run(engine, base, k=0).tokens
    engine.intake.eos_ids = frozenset(plain)
    assert run(engine, replace(base, min_tokens=LENGTH), k=k).tokens == plain
    assert run(engine, replace(base, min_tokens=LENGTH, ignore_eos=False), k=k).tokens != plain  # the ban is felt


@pytest.mark.usefixtures("end_tokens")
@pytest.mark.parametrize("min_tokens", range(0, LENGTH, 3))
def test_end_of_sequence_is_banned_under_min_tokens(engine: Engine, base: SamplingParams, min_tokens: int) -> None:
    """The end token is the likeliest everywhere (a ban must be felt), so the text ends as soon as it may."""
    plain = run(engine, replace(base, temperature=0.0), k=0).tokens
    engine.intake.eos_ids = frozenset(plain)
    params = replace(base, temperature=0.0, ignore_eos=False, min_tokens=min_tokens)
    told = run(engine, params)
    assert not engine.intake.eos_ids & set(told.tokens[: min(min_tokens, len(told.tokens) - 1)])
    assert len(told.tokens) > min_tokens or told.reason == "length"
    if not min_tokens:
        assert told.tokens == plain[:1]
    again = run(engine, params, k=0)
    assert (again.tokens, again.text, again.reason) == (told.tokens, told.text, told.reason)


def test_streamed_text_is_cut_only_between_characters(engine: Engine) -> None:
    """Sixty random texts, half of whose tokens are single bytes of longer characters."""
    held = 0
    for seed in range(60):
        told = run(engine, SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True), k=2)
        assert told.text == decoded(engine, told.tokens)
        held += sum(not p for p in told.pieces)
    assert held
