"""The same seed gives the same text with an EAGLE head, whatever happens; and its prefix index serves no other keys."""

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.heads.eagle import EagleHead
from engine.heads.eagle_runner import HeadRunner
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.sequence import Sequence
from engine.types import DrafterName, Request, SamplingParams
from tests.engine.driving import drive, load, make_sequence, model_drafter
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.pairs import VOCAB, Pair
from tests.examples import in_proofs
from tests.kv import kv_kind

Patch = pytest.MonkeyPatch
SHAPES = ((2, 1, 1), (3,), (2, 2))


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_eagle_pair(tmp_path_factory.mktemp("eagle"))


def start(pair: Pair, **config: Any) -> Engine:
    return load(pair, **{"max_running": 4, "max_spec_length": 6, "max_step_tokens": 50, **config})


def mixed_requests(count: int = 12) -> list[Request]:
    """Chains of any length, trees, plain ones, drafters and salts; half of the prompts share 24 tokens."""
    rng = random.Random(2)
    shared = [rng.randrange(2, VOCAB) for _ in range(24)]
    requests = []
    for i in range(count):
        own = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randint(2, 24), ignore_eos=True)
        tree = rng.choice((None, None, *SHAPES))
        drafter: DrafterName = rng.choice(("model", "model", "cascade"))
        k = None if tree else rng.choice((0, 1, 2, 5, None))
        prompt = tuple(shared + own if i % 2 else own)
        salt = rng.choice(("", "other"))
        requests.append(Request(f"r{i}", prompt, params, k=k, tree=tree, drafter=drafter, cache_salt=salt))
    return requests


def plain(requests: Seq[Request]) -> list[Request]:
    return [replace(request, k=0, tree=None, drafter=None) for request in requests]


@pytest.fixture(scope="module")
def texts(eagle: Pair) -> dict[str, list[int]]:
    """The same requests give these texts without drafts."""
    return drive(start(eagle), plain(mixed_requests())).tokens


def arrivals(requests: Seq[Request]) -> dict[int, Seq[Request]]:
    return {2 * n: requests[4 * n : 4 * n + 4] for n in range(len(requests) // 4)}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cache": "paged", "block_size": 16, "kv_tokens": 112, "max_running": 6},
        *in_proofs({"cache": "paged", "block_size": 5, "kv_tokens": 120, "prefix_cache": False}, {"max_running": 1}),
    ],
    ids=["roomy", "little memory", "less memory", "alone"],
)
def test_texts_do_not_depend_on_drafts(eagle: Pair, texts: dict[str, list[int]], config: dict[str, Any]) -> None:
    run = drive(start(eagle, **config), arrivals(mixed_requests()))
    assert run.tokens == texts
    assert 0 < run.accepted < run.drafted
    assert not sum(step.draft_faults for step in run.steps)
    if "kv_tokens" in config:
        assert sum(step.preempted for step in run.steps) > 0


def test_cancelled_requests_leave_nothing(eagle: Pair, texts: dict[str, list[int]]) -> None:
    engine, requests = start(eagle), mixed_requests()
    cancels = {n: [requests[n].id, requests[(5 * n) % 12].id] for n in range(1, 12, 2)}
    gone = {name for names in cancels.values() for name in names}
    run = drive(engine, arrivals(requests), cancels)
    for name, tokens in run.tokens.items():
        assert tokens == texts[name] or (name in gone and tokens == texts[name][: len(tokens)])
    runner = model_drafter(engine).runner
    assert isinstance(runner, HeadRunner)
    runner.audit(set())


@pytest.mark.parametrize("where", ["forward", *in_proofs("logits", "project")])
def test_a_failing_head_changes_no_text(
    eagle: Pair, texts: dict[str, list[int]], where: str, monkeypatch: Patch
) -> None:
    engine, works, calls = start(eagle), getattr(EagleHead, where), 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 2:
            raise RuntimeError("a fault of the head")
        return works(*args)

    monkeypatch.setattr(EagleHead, where, sometimes)
    run = drive(engine, arrivals(mixed_requests()))
    assert run.tokens == texts
    assert sum(step.draft_faults for step in run.steps) > 2
    assert run.accepted > 0


def test_numbers_that_are_not_finite_change_no_text(
    eagle: Pair, texts: dict[str, list[int]], monkeypatch: Patch
) -> None:
    """A head whose keys overflow drafts no more for the sequence, and its memory reaches nobody else."""
    engine, works, calls = start(eagle), EagleHead.project, 0

    def sometimes(self: EagleHead, states: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return works(self, states) * (torch.inf if calls in (3, 9) else 1)

    monkeypatch.setattr(EagleHead, "project", sometimes)
    assert drive(engine, arrivals(mixed_requests())).tokens == texts


def test_a_failing_pass_of_the_target_is_rescued(eagle: Pair, texts: dict[str, list[int]], monkeypatch: Patch) -> None:
    """The states that it gave are those of a pass that did not happen."""
    engine, run, calls = start(eagle), Runner.run, 0

    def sometimes(self: Runner, feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        nonlocal calls
        logits = run(self, feeds, drafts)
        calls += self is engine.target
        if self is engine.target and calls % 5 == 4:
            raise RuntimeError("a fault behind the pass")
        return logits

    monkeypatch.setattr(Runner, "run", sometimes)
    drawn = drive(engine, arrivals(mixed_requests()))
    assert drawn.tokens == texts
    assert drawn.accepted > 0


# --- the head's prefix index -----------------------------------------------------------------------------------------

TEXT = list(range(40, 90))


class Heads:
    """The runners of a target and its head, and sequences that both read."""

    def __init__(self, pair: Pair) -> None:
        engine = load(pair, max_running=4, max_step_tokens=64, max_spec_length=4)
        runner = model_drafter(engine).runner
        assert isinstance(runner, HeadRunner)
        self.target, self.head = engine.target, runner

    def read(self, handle: int, tokens: Seq[int], salt: str = "", start: int = 0) -> Sequence:
        """The target reads all but the last token, from `start` on; then the head gets its slot."""
        sequence = make_sequence(handle, tokens, k=2)
        sequence.drafter, sequence.cache_salt = "model", salt
        with torch.inference_mode():
            self.target.run([Feed(sequence, len(tokens) - 1, outputs=0)])
        if start:
            self.head.states.skip(handle, start)
        self.head.allocate(sequence)
        return sequence

    def publish(self, sequence: Sequence) -> None:
        """The head reads the text and lets others find it."""
        with torch.inference_mode():
            self.head.run([Feed(sequence, self.head.uncached(sequence))])
        assert self.head.publish(sequence)

    def found(self, handle: int, tokens: Seq[int], salt: str = "") -> int:
        return self.head.cache.length(self.read(handle, tokens, salt).handle)


@pytest.fixture
def heads(eagle: Pair) -> Heads:
    if kv_kind() == "slotted":
        pytest.skip("a slotted cache has no prefix index")
    return Heads(eagle)


def test_an_equal_text_is_found(heads: Heads) -> None:
    heads.publish(heads.read(1, TEXT))
    assert heads.found(2, [*TEXT[:48], 7]) >= 32


@pytest.mark.parametrize(
    ("tokens", "salt"),
    [(TEXT, "b"), ([9, *TEXT[1:]], "a"), ([TEXT[0], 9, *TEXT[2:]], "a")],
    ids=["salt", "first", "second"],
)
def test_other_features_are_not_found(heads: Heads, tokens: list[int], salt: str) -> None:
    """The target's states depend on the first token, though the head never reads it."""
    heads.publish(heads.read(1, TEXT, "a"))
    assert heads.found(2, tokens, salt) == 0
    assert heads.found(3, TEXT, "a") > 0


def test_a_salt_that_looks_like_another_ones_key(heads: Heads) -> None:
    heads.publish(heads.read(1, TEXT, "a"))
    for salt in (f"a\n{TEXT[0]}", f"{TEXT[0]}\na", f"a\n{TEXT[0]}\n1\n16", f"\n{TEXT[0]}\na"):
        other = heads.read(2, [TEXT[0], *TEXT[1:]], salt)
        assert heads.head.cache.length(2) == 0
        heads.head.release(other)
        heads.target.release(other)
        heads.head.states.drop(2)


def test_entries_behind_a_hole_are_found_by_nobody(heads: Heads) -> None:
    behind = heads.read(1, TEXT, "a", start=16)
    assert heads.head._texts[1].offset == 16
    heads.publish(behind)
    assert heads.found(2, TEXT, "a") == 0
    assert heads.found(3, TEXT[16:], "a") == 0
    # A salt that looks like a key of this sequence, and a text that begins with the number of the hole.
    assert heads.found(4, [16, *TEXT[17:]], f"a\n{TEXT[0]}\n1") == 0


def test_a_head_uses_its_index_only_up_to_the_states_that_are_kept(heads: Heads) -> None:
    """It must not continue keys behind a hole between them and the states."""
    heads.publish(heads.read(1, TEXT[:20]))
    late = heads.read(2, TEXT, start=40)
    assert heads.head.cache.length(2) == 0
    assert heads.head._texts[2].offset == 40
    assert heads.head.ready(late)
