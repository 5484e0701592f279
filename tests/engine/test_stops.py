"""Where a text ends does not depend on the rounds: stops fall inside accepted blocks, at every place of a block.

The target is its own draft, so every round accepts everything and the block structure is known. A plain run (k = 0)
that ignores the end-of-sequence token tells, in plain Python, what each request must get.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache

import pytest

from engine.engine import Engine
from engine.types import FinishReason, Request, SamplingParams
from tests.engine.driving import Received, drive, load
from tests.engine.pairs import EOS, Pair, Shape, save_pair

pytestmark = pytest.mark.usefixtures("shared_weights", "unprofiled")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("twins"), Shape(layers=1), noise=0.0)


K = 4
LENGTH = 24
REPLACEMENT = "\ufffd"
SEEDS = (4, 6, 8, 9)  # of texts without long runs of invalid bytes


@pytest.fixture(scope="module")
def engine(twins: Pair) -> Engine:
    """Sixteen requests share a pass, and each has room for all of its drafts in every round."""
    return load(twins, max_running=16, max_spec_length=8, max_step_tokens=512, prefill_chunk=512)


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


def run_all(engine: Engine, params: Iterable[SamplingParams], k: int = K) -> list[Received]:
    """What each request gets. They share passes, which changes no text."""
    requests = [Request(f"r{n}", prompt(engine), asked, k=k) for n, asked in enumerate(params)]
    received = drive(engine, requests).received
    return [received[r.id] for r in requests]


def run_with_ends(engine: Engine, cases: Seq[tuple[frozenset[int], Seq[Request]]]) -> dict[str, Received]:
    """What each request gets, by its id. Each case begins one step after the one before it.

    cases: (tokens that end texts, requests of this case).
    """
    ends = iter([ids for ids, _ in cases])

    def next_ends() -> None:
        engine.intake.eos_ids = next(ends, engine.intake.eos_ids)

    next_ends()
    return drive(engine, {n: made for n, (_, made) in enumerate(cases)}, after_step=next_ends).received


def based_on(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(
    scope="module", params=[SEEDS[0], *(pytest.param(seed, marks=pytest.mark.proofs) for seed in SEEDS[1:])]
)
def base(request: pytest.FixtureRequest) -> SamplingParams:
    return based_on(request.param)


@pytest.fixture(scope="module")
def plain(engine: Engine, base: SamplingParams) -> list[int]:
    """Tokens of the text that nothing ends."""
    return run(engine, base, k=0).tokens


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
def test_end_of_sequence_at_every_place(engine: Engine, base: SamplingParams, plain: list[int]) -> None:
    heeding = replace(base, ignore_eos=False)
    ways = {"drafted": (heeding, K), "plain": (heeding, 0), "ignored": (base, K)}
    cases = [
        (frozenset({token}), [Request(f"{name} {n}", prompt(engine), p, k=k) for name, (p, k) in ways.items()])
        for n, token in enumerate(plain)
    ]
    received, places = run_with_ends(engine, cases), set()
    for n, (eos, _) in enumerate(cases):
        for name, (params, _) in ways.items():
            assert_end(received[f"{name} {n}"], reference(engine, plain, params, eos))
        told = received[f"drafted {n}"]
        assert told.tokens[-1] == plain[n]
        places.add(place_in_block(told))
    assert places >= set(range(K + 1))


@pytest.mark.usefixtures("end_tokens")
def test_several_end_tokens_and_their_text(engine: Engine, base: SamplingParams, plain: list[int]) -> None:
    engine.intake.eos_ids = frozenset({plain[9], plain[13]})
    params = replace(base, ignore_eos=False)
    assert_end(run(engine, params), reference(engine, plain, params, engine.intake.eos_ids))


def test_the_real_end_token_adds_no_text(engine: Engine) -> None:
    """With the checkpoint's own end token, which the tokenizer skips; some of the 60 seeds meet it."""
    met = 0
    for told in run_all(engine, (SamplingParams(temperature=2.0, seed=n, max_tokens=60) for n in range(60))):
        assert (EOS in told.tokens) == (told.reason == "stop")
        if told.reason == "stop":
            met += 1
            assert told.tokens.index(EOS) == len(told.tokens) - 1
            assert told.text == decoded(engine, told.tokens[:-1])
    assert met


def test_max_tokens(engine: Engine, base: SamplingParams, plain: list[int]) -> None:
    asked = [replace(base, max_tokens=n) for n in range(1, 2 * K + 4)]
    for params, told in zip(asked, run_all(engine, asked), strict=True):
        assert_end(told, reference(engine, plain, params))
        assert told.record is not None
        assert sum(told.record.column("emitted")) == params.max_tokens


@pytest.fixture(scope="module")
def with_room(twins: Pair, engine: Engine) -> Callable[[int], Engine]:
    """Room behind the prompt, tokens → an engine whose context ends there."""

    @cache
    def loaded(room: int) -> Engine:
        return load(twins, max_model_len=len(prompt(engine)) + room, max_running=1, max_spec_length=8)

    return loaded


@pytest.mark.parametrize("room", range(1, 2 * K + 4))
def test_context_end(
    with_room: Callable[[int], Engine], engine: Engine, base: SamplingParams, plain: list[int], room: int
) -> None:
    """The last token fills the context exactly; drafts shrink before it."""
    small, params = with_room(room), replace(base, max_tokens=room)
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
    asked = [replace(base, stop=(stop,)) for stop in stop_strings(text)[::2]]
    for params, told in zip(asked, run_all(engine, asked), strict=True):
        end = reference(engine, plain, params)
        assert end.reason == "stop"
        assert_end(told, end)
        assert params.stop[0] not in told.text
        places.add(place_in_block(told))
        # The string began in an earlier token, and in an earlier round, than the one that completed it.
        last_round = told.record.column("emitted")[-1] if told.record else 0
        spanning += len(certain(engine, told.tokens[: len(told.tokens) - last_round])) > len(told.text)
    return places, spanning


def test_several_stop_strings(engine: Engine, base: SamplingParams, plain: list[int]) -> None:
    pieces = stop_strings(certain(engine, plain))
    asked = [
        replace(base, stop=(pieces[i + 9], "never there", pieces[i][:1] + "\x00\x00", pieces[i]))
        for i in range(0, len(pieces) - 9, 5)
    ]
    for params, told in zip(asked, run_all(engine, asked), strict=True):
        assert_end(told, reference(engine, plain, params))


def test_stop_strings_with_min_tokens(engine: Engine, base: SamplingParams, plain: list[int]) -> None:
    asked, later = list[SamplingParams](), 0
    for stop in stop_strings(certain(engine, plain))[::3]:
        first = len(reference(engine, plain, replace(base, stop=(stop,))).tokens)
        these = [replace(base, stop=(stop,), min_tokens=n) for n in (first, first + 1, first + 3) if n <= LENGTH]
        later += sum(len(reference(engine, plain, params).tokens) > first for params in these)
        asked += these
    for params, told in zip(asked, run_all(engine, asked), strict=True):
        assert_end(told, reference(engine, plain, params))
    assert later


@pytest.mark.usefixtures("end_tokens")
@pytest.mark.parametrize("k", [0, K])
def test_ignored_ends_are_not_banned_under_min_tokens(
    engine: Engine, base: SamplingParams, plain: list[int], k: int
) -> None:
    """Every token of the text ends texts; who ignores that gets the same text with min_tokens as without."""
    engine.intake.eos_ids = frozenset(plain)
    assert run(engine, replace(base, min_tokens=LENGTH), k=k).tokens == plain
    assert run(engine, replace(base, min_tokens=LENGTH, ignore_eos=False), k=k).tokens != plain  # the ban is felt


@pytest.mark.usefixtures("end_tokens")
def test_end_of_sequence_is_banned_under_min_tokens(engine: Engine) -> None:
    """The end token is the likeliest everywhere (a ban must be felt), so the text ends as soon as it may."""
    greedy = replace(based_on(SEEDS[0]), temperature=0.0)
    plain = run(engine, greedy, k=0).tokens
    engine.intake.eos_ids = frozenset(plain)
    asked = [replace(greedy, ignore_eos=False, min_tokens=n) for n in range(0, LENGTH, 3)]
    for params, told, again in zip(asked, run_all(engine, asked), run_all(engine, asked, k=0), strict=True):
        assert not engine.intake.eos_ids & set(told.tokens[: min(params.min_tokens, len(told.tokens) - 1)])
        assert len(told.tokens) > params.min_tokens or told.reason == "length"
        if not params.min_tokens:
            assert told.tokens == plain[:1]
        assert (again.tokens, again.text, again.reason) == (told.tokens, told.text, told.reason)


def test_streamed_text_is_cut_only_between_characters(engine: Engine) -> None:
    """Sixty random texts, half of whose tokens are single bytes of longer characters."""
    held = 0
    for told in run_all(engine, (based_on(seed) for seed in range(60)), k=2):
        assert told.text == decoded(engine, told.tokens)
        held += sum(not p for p in told.pieces)
    assert held
