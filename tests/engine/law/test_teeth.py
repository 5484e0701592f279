"""Faults that were shipped somewhere, put into the engine one at a time: the law test refuses each of them.

The configurations are among those that test_law.py finds right; a correct engine is refused with probability REFUSED
at most.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.drafters.base import Draft, DraftBatch
from engine.drafters.draft_columns import DraftLaws
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.kernels import decide
from engine.sampling import acceptance, sampler
from engine.sampling.acceptance import emitted_law, log_residual
from engine.sampling.noise import DRAFT_STREAM, argmax, stream_key
from engine.sampling.penalties import History, PenaltyRows
from engine.sampling.sampler import Sampler
from engine.types import Verifier
from tests.engine.enumeration import is_draft
from tests.engine.kernels.faults import with_fault
from tests.engine.law.checking import check, draw, law_of, refuses
from tests.engine.law.configurations import SETTINGS, Configuration
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import table_engine_in_fp32
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("pruned_races")

COLD = SETTINGS["temperature"].temperature
Patch = pytest.MonkeyPatch
EXACT = pytest.mark.parametrize("verifier", ["rejection", "block"])
SOME = pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])


def ask(verifier: Verifier, setting: str = "plain", k: int = 3) -> Configuration:
    return Configuration(setting, "model", verifier, k, mixed=False)


@pytest.mark.proofs
@EXACT
def test_the_drafts_noise_reused_for_the_residual(verifier: Verifier, monkeypatch: Patch) -> None:
    """vLLM #47386 and #54282."""
    monkeypatch.setattr(sampler, "RESIDUAL_STREAM", DRAFT_STREAM)
    assert refuses(ask(verifier), 16_000)


def test_block_verification_with_noise_keyed_by_position_alone(monkeypatch: Patch) -> None:
    """The noise of positions that a round discards decided about its length: in the next round it is no longer free."""

    def timeless(key: int, stream: int, start: int | None = None) -> int:
        return stream_key(key, stream)

    monkeypatch.setattr(sampler, "stream_key", timeless)
    assert refuses(ask("block"), 16_000)


@SOME
def test_the_draft_models_raw_law_returned(verifier: Verifier, monkeypatch: Patch) -> None:
    """transformers #47932: q before the temperature."""
    keep = DraftLaws._keep

    def raw(self: DraftLaws, sequences: Tensor, column: int, laws: Tensor) -> None:
        keep(self, sequences, column, (laws * COLD).log_softmax(-1))

    monkeypatch.setattr(DraftLaws, "_keep", raw)
    assert refuses(ask(verifier, "temperature"))


def truncating(monkeypatch: Patch) -> None:
    """Only drafts that the draft model itself finds likely are submitted: a choice that looks at the token drawn."""
    propose = ModelDrafter.propose

    def picky(self: ModelDrafter, batch: DraftBatch, ks: Seq[int]) -> Draft:
        draft = propose(self, batch, ks)
        if draft.tokens is None:
            return draft
        kept = [0 if token == 0 else k for token, k in zip(draft.tokens[:, 0].tolist(), draft.ks, strict=True)]
        return replace(draft, ks=tuple(kept))

    monkeypatch.setattr(ModelDrafter, "propose", picky)


@SOME
def test_truncation_that_looks_at_the_token(verifier: Verifier, monkeypatch: Patch) -> None:
    truncating(monkeypatch)
    assert refuses(ask(verifier))


def test_under_match_any_truncation_is_harmless(monkeypatch: Patch) -> None:
    truncating(monkeypatch)
    assert check(ask("match"), 600) > 1e-3


def at_coin_zero(monkeypatch: Patch, verifier: Verifier, engine: Engine | None = None) -> float:
    """The p-value with every coin at 0, where < and ≤ differ: the law is wrong then, but no text that p excludes."""

    def within(chances: Tensor, ks: Seq[int]) -> Tensor:
        """Nothing beyond a sequence's own drafts can be accepted, not even with ≤."""
        return chances.double().masked_fill(~is_draft(ks, chances.device), -1.0)

    monkeypatch.setattr(acceptance, "_within", within)
    monkeypatch.setattr(decide, "_coins", lambda drafts, keys, ends: torch.zeros(drafts.shape).double())
    sample = draw(ask(verifier, "top_k"), 400, engine=engine)
    try:
        return g_test(sample.counts, law_of(SETTINGS["top_k"]))
    except AssertionError:
        return -1.0


def careless_failure(chances: Tensor, coins: Tensor) -> Tensor:
    return (coins <= chances).cumprod(1).sum(1)


def careless_success(chances: Tensor, coins: Tensor) -> Tensor:
    return ((coins <= chances) * torch.arange(1, chances.shape[1] + 1)).amax(1)


@pytest.mark.parametrize(
    ("verifier", "name", "careless"),
    [
        ("rejection", "first_failure", careless_failure),
        pytest.param("block", "last_success", careless_success, marks=pytest.mark.proofs),
    ],
)
def test_a_coin_of_zero_accepts_nothing_impossible(
    verifier: Verifier, name: str, careless: Callable[..., Tensor], monkeypatch: Patch
) -> None:
    """u ≤ p/q accepts a draft that p excludes when u is 0 (transformers uses ≤)."""
    assert at_coin_zero(monkeypatch, verifier) >= 0
    monkeypatch.setattr(acceptance, name, careless)
    assert at_coin_zero(monkeypatch, verifier) == -1


@pytest.mark.parametrize(
    ("verifier", "before", "after"),
    [
        ("rejection", "if not coins[j] < np.exp", "if not coins[j] <= np.exp"),
        pytest.param("block", "if coins[j - 1] < chance", "if coins[j - 1] <= chance", marks=pytest.mark.proofs),
    ],
)
def test_compiled_code_accepts_nothing_impossible(
    verifier: Verifier, before: str, after: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    from engine.kernels import cpu_laws

    assert at_coin_zero(monkeypatch, verifier, table_engine_in_fp32()) >= 0
    with with_fault(cpu_laws, before, after, tmp_path) as faulty:
        monkeypatch.setattr(decide, "compiled_module", lambda name: faulty)
        assert at_coin_zero(monkeypatch, verifier, table_engine_in_fp32()) == -1


@SOME
def test_the_bonus_from_raw_logits(verifier: Verifier, monkeypatch: Patch) -> None:
    def raw(logp: Tensor, logq: Tensor, log_scales: Tensor, accepted: Tensor, ks: Seq[int]) -> Tensor:
        weights = emitted_law(logp, logq, log_scales, accepted, ks)
        complete = accepted == torch.as_tensor(ks)
        return torch.where(complete[:, None], weights * COLD, weights)

    monkeypatch.setattr(acceptance, "emitted_law", raw)
    assert refuses(ask(verifier, "temperature", k=1))


@pytest.mark.parametrize(
    ("verifier", "setting"),
    [
        ("rejection", "frequency"),
        *(pytest.param(*a, marks=pytest.mark.proofs) for a in (("match", "presence"), ("block", "repetition"))),
    ],
)
def test_penalties_frozen_at_the_rounds_start(verifier: Verifier, setting: str, monkeypatch: Patch) -> None:
    """text-generation-inference's utils/tokens.py; SGLang calls it a relaxed version of penalties."""

    put = PenaltyRows.__init__

    def frozen(self: PenaltyRows, histories: Seq[History], seen: Any, *others: Any) -> None:
        put(self, histories, (), *others)

    monkeypatch.setattr(PenaltyRows, "__init__", frozen)
    assert refuses(ask(verifier, setting), 4000)


@SOME
def test_the_residual_clamped(verifier: Verifier, monkeypatch: Patch) -> None:
    """An ε against a mass of 0 gives tokens a chance that p excludes. (Smaller ones: test_exact.py.)"""

    def clamped(*args: Any) -> Tensor:
        return log_residual(*args).clamp(min=-6.0)

    monkeypatch.setattr(acceptance, "log_residual", clamped)
    assert refuses(ask(verifier, "top_k"))


@SOME
def test_an_argmax_draft_scored_as_a_sample(verifier: Verifier, monkeypatch: Patch) -> None:
    """jaymody/speculative-sampling #3: the likeliest token is drafted, and q is still the whole law."""
    monkeypatch.setattr(Sampler, "propose", lambda self, laws, rows, rank: argmax(laws))
    assert refuses(ask(verifier))
