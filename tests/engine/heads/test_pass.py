"""Look-ahead tokens in the engine (PaSS): their drafts, the text, the caches, and what becomes of faults.

Drafts are compared with a reference that reads each text anew, with the look-ahead tokens behind it. So a wrong
position, a look-ahead token that sees another branch, and one of a rejected draft are noticed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import engine.models.attention as attention_module
import engine.models.feeds as feeds_module
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.heads.files import head_kind
from engine.heads.pass_heads import PassDrafter
from engine.kernels import paged_rows
from engine.loading.load import load_models
from engine.models.look_ahead import LookAhead, LookAheadRows
from engine.trees import ROOT, Parents, with_chains
from engine.types import Request, Verifier
from policies.config import PolicyConfig
from tests.engine.driving import Drive, drive
from tests.engine.fresh import Checker, memory
from tests.engine.heads.fitted import HIDDEN, Fitted, Recorder, save_heads
from tests.engine.heads.passing import TOKENS, Looking, PassReference, embeddings, few_tokens, save_pass
from tests.engine.models.test_adapter import random_checkpoint
from tests.engine.pairs import Pair
from tests.examples import in_proofs, usual_and_proofs
from tests.kv import kv_config, without_prefixes

pytestmark = pytest.mark.usefixtures("pruned_races")

TREES = ((2, 2), (2, 1, 2))


@pytest.fixture(scope="module")
def looking(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Looking:
    directory = save_pass(tmp_path_factory.mktemp("pass"))
    return Looking(pair.target, directory, PassReference(pair.target))


@pytest.fixture(scope="module")
def plain(looking: Looking) -> dict[float, dict[str, list[int]]]:
    engine = looking.engine(max_running=6)
    return {t: drive(engine, few_tokens(t, k=0)).tokens for t in (0.0, 0.8)}


def check(recorder: Recorder, looking: Looking) -> int:
    """Compare all drafts with the reference's. Returns their number."""
    fitted = Fitted(looking.checkpoint, looking.directory, cast(Any, looking.reference), cast(Any, looking.reference))
    return recorder.check(fitted)


def drafter_of(engine: Engine) -> PassDrafter:
    (found,) = (d for d in engine.drafter.drafters if isinstance(d, PassDrafter))  # type: ignore[attr-defined]
    return found


# The text and the drafts


@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_the_text_is_that_without_drafts(
    looking: Looking, plain: dict[float, dict[str, list[int]]], temperature: float
) -> None:
    """For every k, also beyond the look-ahead tokens, and with a prefix index that knows the prompts from before."""
    engine = looking.engine(max_running=4, max_spec_length=8)
    for k in (2, 8):
        run = drive(engine, few_tokens(temperature, k=k))
        assert run.tokens == plain[temperature]
        assert 0.05 * run.drafted < run.accepted < 0.8 * run.drafted
        assert max(max(t.record.column("drafted")) for t in run.received.values() if t.record) == min(k, TOKENS)
    mixed = [replace(r, k=k) for r, k in zip(few_tokens(temperature), (0, 1, 2, 3, 8, 1), strict=True)]
    assert drive(engine, mixed).tokens == plain[temperature]


@pytest.mark.parametrize("tree", usual_and_proofs(TREES, TREES[1:2]))
def test_the_text_is_that_without_trees(
    looking: Looking, plain: dict[float, dict[str, list[int]]], tree: tuple[int, ...]
) -> None:
    engine = looking.engine(max_running=3, max_spec_length=8)
    for temperature in (0.0, 0.8):
        run = drive(engine, few_tokens(temperature, k=None, tree=tree))
        assert run.tokens == plain[temperature]
        assert run.accepted


@pytest.mark.parametrize("tree", usual_and_proofs([None, *TREES], [None, TREES[1]]))
def test_drafts_are_what_the_target_gives_behind_look_ahead_tokens(
    looking: Looking, tree: tuple[int, ...] | None
) -> None:
    engine = looking.engine(max_running=3, max_spec_length=8)
    recorder = Recorder(engine)
    run = drive(engine, few_tokens(k=3 if tree is None else None, tree=tree))
    assert run.accepted
    assert check(recorder, looking) > 75


@pytest.mark.parametrize("scarce", [*in_proofs(False), True])
def test_prefixes_chunks_and_preemption_change_no_draft(
    looking: Looking, plain: dict[float, dict[str, list[int]]], scarce: bool
) -> None:
    if without_prefixes() == {}:
        pytest.skip("this cache has no prefix index")
    limits = {**memory("mapped", 72), "max_model_len": 56} if scarce else kv_config()
    engine = looking.engine(max_running=4, max_spec_length=4, max_step_tokens=48, prefill_chunk=7, **limits)
    checker, recorder = Checker(engine, logits=False), Recorder(engine)
    first, again = (drive(engine, few_tokens(), after_step=checker) for _ in range(2))
    checker.check_index()
    assert first.tokens == again.tokens == plain[0.0]
    cached = sum(told.record.cached_tokens for told in again.received.values() if told.record)
    assert sum(s.preempted for s in (*first.steps, *again.steps)) if scarce else cached > 20
    assert check(recorder, looking) > 75


@pytest.mark.parametrize("tree", [*in_proofs(None), (2, 2)])
def test_caches_hold_committed_tokens_only(looking: Looking, tree: tuple[int, ...] | None) -> None:
    engine = looking.engine(max_running=3, max_spec_length=8)
    checker = Checker(engine)
    drive(engine, few_tokens(0.8, k=3 if tree is None else None, tree=tree), after_step=checker)
    checker.check_index()
    assert checker.compared["target"] > 250


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_other_verifiers_accept_drafts_too(looking: Looking, verifier: Verifier) -> None:
    engine = looking.engine(max_running=4)
    run = drive(engine, few_tokens(0.8, verifier=verifier))
    assert 10 < run.accepted < run.drafted


# What look-ahead tokens cost


def ridden(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of look-ahead tokens of passes with any."""
    counts: list[int] = []
    plan = LookAhead.plan

    def watching(self: LookAhead, feeds: Any, starts: Any, staging: Any) -> LookAheadRows | None:
        counts.append(sum(feed.riders for feed in feeds))
        return plan(self, feeds, starts, staging)

    monkeypatch.setattr(LookAhead, "plan", watching)
    return counts


def test_rounds_without_drafts_carry_none(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = ridden(monkeypatch)
    drive(looking.engine(max_running=3), few_tokens(k=0))
    assert not counts
    drive(looking.engine(max_running=1), few_tokens(k=2, count=1))
    assert set(counts) == {2, 6}  # two behind the prompt, then behind two drafts as well


def test_a_pass_is_no_larger_than_allowed(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ahead tokens are left out where the pass has no room for them."""
    counts = ridden(monkeypatch)
    engine = looking.engine(max_running=4, max_spec_length=3, max_step_tokens=16)
    run = drive(engine, few_tokens(k=3))
    assert run.tokens == drive(engine, few_tokens(k=0)).tokens
    assert counts
    assert max(counts) <= 12


def test_cascade_has_no_look_ahead_tokens(looking: Looking) -> None:
    engine = Engine.from_config(config_of(looking))
    run = drive(engine, few_tokens(drafter="cascade"))
    assert run.tokens == drive(engine, few_tokens(k=0)).tokens
    engine.audit()


# Faults


def test_positions_that_are_wrong_are_noticed(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    """All look-ahead tokens hang on the last committed token."""

    def at_root(parents: Parents, length: int) -> Parents:
        whole = with_chains(parents, length)
        return tuple(ROOT if n >= len(parents) and (n - len(parents)) % length == 0 else p for n, p in enumerate(whole))

    monkeypatch.setattr(feeds_module, "with_chains", at_root)
    assert_noticed(looking)


def test_a_mask_that_shows_other_branches_is_noticed(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_before(parents: Parents, window: int | None = None) -> list[tuple[int, int]]:
        return [(node, seen) for node in range(len(parents)) for seen in range(node + 1)]

    for module in (attention_module, paged_rows):  # for masks, and for bits
        monkeypatch.setattr(module, "seen_pairs", all_before)
    assert_noticed(looking)


def test_tokens_in_the_wrong_order_are_noticed(looking: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LookAhead.forward

    def turned(self: LookAhead, planned: LookAheadRows, ids: Tensor, *rest: Any) -> Tensor:
        original, self.embeddings = self.embeddings, self.embeddings.flip(0)
        try:
            return forward(self, planned, ids, *rest)
        finally:
            self.embeddings = original

    monkeypatch.setattr(LookAhead, "forward", turned)
    assert_noticed(looking)


def assert_noticed(looking: Looking) -> None:
    engine = looking.engine(max_running=2)
    recorder = Recorder(engine)
    drive(engine, few_tokens(count=3))
    with pytest.raises(AssertionError, match="behind"):
        check(recorder, looking)


def test_look_ahead_tokens_that_stay_in_memory_are_noticed(looking: Looking) -> None:
    engine = looking.engine(max_running=2)
    cache = engine.target.cache
    truncate = cache.truncate_to

    def keeping(handle: int, length: int) -> None:
        truncate(handle, length)
        if cache.holds(handle) and length:  # a look-ahead token's or a rejected draft's
            cache.reserve(handle, 1)
            cache.extend(handle, 1)

    cache.truncate_to = keeping  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="cached of"):
        drive(engine, few_tokens(count=2), after_step=Checker(engine, logits=False))


@pytest.mark.parametrize("temperature", [*in_proofs(0.0), 0.8])
def test_embeddings_that_spoil_scores_cost_drafts_only(
    looking: Looking, plain: dict[float, dict[str, list[int]]], temperature: float
) -> None:
    engine = looking.engine(max_running=4)
    riding = drafter_of(engine).look_ahead
    riding.embeddings = riding.embeddings * torch.nan
    run = drive(engine, few_tokens(temperature))
    assert run.tokens == plain[temperature]
    assert not run.accepted
    assert not any(told.error for told in run.received.values())
    assert 0 < sum(s.draft_faults for s in run.steps) <= 6  # a sequence costs a round at most
    engine.audit()


def test_states_that_cannot_be_kept_cost_drafts_only(
    looking: Looking, plain: dict[float, dict[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = looking.engine(max_running=4)
    riding = drafter_of(engine).look_ahead
    read, calls = riding.reader.read, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] % 3:
            read(*args)
        else:
            drafter_of(engine).states._held.clear()
            drafter_of(engine).states._free = list(range(10_000))

    monkeypatch.setattr(riding.reader, "read", failing)
    run = drive(engine, few_tokens())
    assert run.tokens == plain[0.0]
    assert run.accepted


def test_nothing_is_kept_of_sequences_that_have_ended(looking: Looking) -> None:
    engine = looking.engine(max_running=4)
    drive(engine, few_tokens(0.8), {5: ["r1"], 9: ["r3"]})
    drafter_of(engine).audit(set())
    drafter_of(engine).look_ahead.audit(set())
    drafter_of(engine).look_ahead.imagine(engine_sequence(engine), 2)
    with pytest.raises(AssertionError, match="ended sequences"):
        drafter_of(engine).look_ahead.audit(set())


def engine_sequence(engine: Engine) -> Any:
    return engine.intake.sequence(Request("other", (5, 6)), 77, 0.0)


# A draft of a configuration


def config_of(looking: Looking, **changes: Any) -> EngineConfig:
    settings = {"dtype": "float64", "max_model_len": 96, "max_running": 4, "max_spec_length": 6, **kv_config()}
    own = {"target": looking.checkpoint, "draft": str(looking.directory), "policy": PolicyConfig("fixed", k=3)}
    return EngineConfig(**{**settings, **own, **changes})


def test_it_is_loaded_profiled_and_exchanged(looking: Looking, plain: dict[float, dict[str, list[int]]]) -> None:
    engine = Engine.from_config(config_of(looking))
    assert drafted(engine, plain)
    engine.put_draft(engine.load_draft(None)).release()
    assert engine.target.look_ahead is None
    assert drive(engine, few_tokens(drafter=None, k=None)).tokens == plain[0.0]
    engine.put_draft(engine.load_draft(str(looking.directory))).release()
    assert drafted(engine, plain)


def drafted(engine: Engine, plain: dict[float, dict[str, list[int]]]) -> int:
    run: Drive = drive(engine, few_tokens())
    assert run.tokens == plain[0.0]
    assert not sum(s.draft_faults for s in run.steps)
    return run.accepted


BAD: tuple[tuple[Tensor | None, dict[str, Any], str], ...] = (
    (None, {"num_lookahead_tokens": 2}, r"embeddings has shape \(3, 64\), and \(2, 64\) is needed"),
    (None, {"num_lookahead_tokens": 17}, "num_lookahead_tokens is 17, and at most 16 are supported"),
    (None, {"num_lookahead_tokens": "3"}, "num_lookahead_tokens must be a whole number above 0, not '3'"),
    (embeddings(hidden=32), {}, r"read states of 32 numbers, and those of target .* have 64"),
    (
        None,
        {"num_target_layers": 3},
        r"num_target_layers is 3, and target .* has 2: give the embeddings of this target",
    ),
    (None, {"vocab_size": 401}, r"vocab_size is 401, and target .* has 400"),
    (embeddings() * torch.inf, {}, "embeddings holds numbers that are not finite"),
)


@pytest.mark.parametrize(("tensor", "config", "message"), BAD)
def test_what_does_not_fit_is_refused(
    looking: Looking, tmp_path: Path, tensor: Tensor | None, config: dict[str, Any], message: str
) -> None:
    directory = save_pass(tmp_path, tensor, **config)
    assert head_kind(directory) == "pass"
    with pytest.raises(ConfigError, match=message):
        load_models(config_of(looking, draft=str(directory)))


def test_a_target_that_is_not_native_is_refused(tmp_path: Path) -> None:
    checkpoint = random_checkpoint("gpt_neox", tmp_path / "target")
    directory = save_pass(tmp_path / "pass", embeddings(hidden=32))
    looking = Looking(checkpoint, directory, cast(PassReference, None))
    with pytest.raises(ConfigError, match="in the passes of native architectures only"):
        load_models(config_of(looking))


def test_other_tensors_and_pickles_are_refused(looking: Looking, tmp_path: Path) -> None:
    config = {"model_type": "pass", "num_lookahead_tokens": TOKENS, "hidden_size": HIDDEN}
    directory = save_heads(tmp_path / "more", {"embeddings": embeddings(), "other": embeddings()}, **config)
    with pytest.raises(ConfigError, match="holds 1 tensors that look-ahead embeddings do not have, 'other'"):
        load_models(config_of(looking, draft=str(directory)))
    directory = save_heads(tmp_path / "pickle", {"x": embeddings()}, **config)
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "embeddings.pt")
    with pytest.raises(ConfigError, match=r"embeddings\.pt is a pickle, .* convert it to safetensors"):
        load_models(config_of(looking, draft=str(directory)))
