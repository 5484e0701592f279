"""The law is the target's also where the draft model has another tokenizer: through the whole engine, by every
verifier, under every kind of cut and penalty."""

from collections.abc import Iterable
from itertools import product

import pytest
from torch import Tensor

from engine.drafters.draft_columns import DraftLaws
from engine.drafters.shared_tokens import SharedTokens
from engine.drafters.translation import Spellings, Translation
from engine.types import VERIFIERS, Verifier
from tests.engine.law.checking import Sample, check_speculation, draw, law_of, prompt_of, refuses
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import benjamini_hochberg, g_test
from tests.engine.law.tables import table_engine
from tests.engine.law.translations import OTHER_WORDS, TABLE_TRANSLATION, TABLE_WORDS
from tests.examples import in_proofs

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-3
SETTINGS = (
    "plain", "combined", "repetition", "top_p", "min_p", "frequency", "logit_bias", "min_tokens", "ignore_eos",
)  # fmt: skip


def ask(setting: str, verifier: Verifier, k: int = 3) -> Configuration:
    return Configuration(setting, "model", verifier, k, mixed=setting == "combined")


def sample(configuration: Configuration, draws: int, translation: Translation = TABLE_TRANSLATION) -> Sample:
    return draw(configuration, draws, engine=table_engine(translation=translation))


def p_value(configuration: Configuration, sampled: Sample) -> float:
    return g_test(sampled.counts, law_of(configuration.params, prompt_of(configuration)))


def p_values(asked: Iterable[tuple[str, Verifier]], draws: int) -> dict[str, float]:
    found = {}
    for setting, verifier in asked:
        configuration = ask(setting, verifier)
        sampled = sample(configuration, draws)
        check_speculation(configuration, sampled)
        found[str(configuration)] = p_value(configuration, sampled)
    return found


def test_the_law_holds() -> None:
    asked: tuple[tuple[str, Verifier], ...] = (("plain", "match"), ("plain", "rejection"), ("combined", "block"))
    assert benjamini_hochberg(p_values(asked, 300), LEVEL) == []


@pytest.mark.proofs
def test_the_law_holds_with_many_more_draws() -> None:
    assert benjamini_hochberg(p_values(product(SETTINGS, VERIFIERS), 20_000), LEVEL) == []


@pytest.mark.parametrize("verifier", [*in_proofs("rejection"), "block"])
def test_a_wrong_map_costs_drafts_and_nothing_else(verifier: Verifier) -> None:
    """Two ids swapped: the model means the one and the other is drafted."""
    wrong = Translation(TABLE_WORDS, Spellings({0: b"A", 1: b"?", 2: b"B"}, OTHER_WORDS.special))
    configuration = ask("plain", verifier)
    assert p_value(configuration, sample(configuration, 400, wrong)) > LEVEL


@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])
def test_a_law_that_is_not_renormalised_is_seen(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's own probabilities of the shared tokens, which sum to less than 1."""
    restrict, keep, missing = SharedTokens.restrict, DraftLaws._keep, list[Tensor]()

    def remembering(self: SharedTokens, logits: Tensor) -> Tensor:
        restricted = restrict(self, logits)
        missing[:] = [restricted.logsumexp(1) - logits.logsumexp(1)]
        return restricted

    def raw(self: DraftLaws, indices: Tensor, column: int, laws: Tensor) -> None:
        keep(self, indices, column, laws + missing[0][:, None])

    monkeypatch.setattr(SharedTokens, "restrict", remembering)
    monkeypatch.setattr(DraftLaws, "_keep", raw)
    assert refuses(ask("plain", verifier), 1200, table_engine(translation=TABLE_TRANSLATION))
