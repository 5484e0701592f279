"""The law of what a whole engine emits is the target's: whatever is asked for, whoever drafts, however it is verified.

Every configuration's joint law of four tokens is tested against the exact one; then one decision is made over all of
them. Seeds are fixed, so an outcome repeats; over other seeds a correct engine would fail a decision with probability
LEVEL at most.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from engine import intake
from engine.kernels import decide
from engine.models.compiled import compiled_module
from engine.sampling.noise import sequence_key
from engine.types import SamplingParams, Verifier
from tests.engine.law import checking, tables
from tests.engine.law.checking import LOOK, PROMPT, SHARING, check, check_speculation, draw, law_of, refuses
from tests.engine.law.configurations import SETTINGS, Configuration, everything, pairwise, small_design
from tests.engine.law.statistics import benjamini_hochberg, g_test, two_sample_g_test, uniformity

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-3
CHUNK = 13 * SHARING  # texts of each side of one comparison
CHUNKS = 25  # comparisons: as few as `uniformity` takes
MODEL_BLOCK = Configuration("plain", "model", "block", 3, mixed=False)
MODEL_REJECTION = Configuration("plain", "model", "rejection", 3, mixed=False)
MODEL_MATCH = Configuration("plain", "model", "match", 2, mixed=False)


def p_values(configurations: Seq[Configuration], draws: int) -> dict[str, float]:
    return {str(configuration): check(configuration, draws) for configuration in configurations}


def refused(found: Mapping[str, float]) -> dict[str, float]:
    return {name: found[name] for name in benjamini_hochberg(found, LEVEL)}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return p_values(small_design(), draws=200)


@pytest.mark.slow
def test_the_law_holds_for_the_pairs_that_matter_most(found: Mapping[str, float]) -> None:
    assert refused(found) == {}


@pytest.mark.slow
def test_p_values_of_the_law_are_uniform(found: Mapping[str, float]) -> None:
    """Draws that fit too well are wrong as well: noise that repeats or avoids itself."""
    assert uniformity(list(found.values())) > LEVEL


@pytest.mark.proofs
def test_the_law_holds_for_every_pair_of_levels() -> None:
    found = p_values(pairwise(), draws=8000)
    assert refused(found) == {}
    assert uniformity(list(found.values())) > LEVEL


@pytest.mark.proofs
def test_the_law_holds_for_everything() -> None:
    found = p_values(everything(), draws=600)
    assert refused(found) == {}
    assert uniformity(list(found.values()), bins=20) > LEVEL


Chunks = list[Mapping[Any, int]]


def chunks(turn: int, **changes: Any) -> Chunks:
    """Counts of CHUNKS disjoint samples of CHUNK texts each; those of another turn are independent."""
    texts = draw(MODEL_BLOCK, CHUNKS * CHUNK, turn * CHUNKS * CHUNK, **changes).texts
    return [Counter(texts[n : n + CHUNK]) for n in range(0, len(texts), CHUNK)]


@pytest.fixture(scope="module")
def left() -> Chunks:
    return chunks(0)


@pytest.fixture(scope="module")
def right() -> Chunks:
    return chunks(1)


@pytest.mark.proofs
def test_the_law_of_block_verification_holds_in_more_texts(left: Chunks, right: Chunks) -> None:
    counts = Counter[Any]()
    for chunk in (*left, *right):
        counts.update(chunk)
    assert g_test(counts, law_of(MODEL_BLOCK.params)) > LEVEL


@pytest.mark.parametrize(
    ("verifier", "setting"),
    [
        ("rejection", "top_k"),
        ("block", "plain"),
        *(pytest.param(*asked, marks=pytest.mark.proofs) for asked in (("rejection", "plain"), ("block", "top_k"))),
    ],
)
def test_the_law_holds_in_fp32(verifier: Verifier, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU decides about laws in fp32 in compiled code."""
    calls, kernels = 0, compiled_module("cpu_laws")

    def counted(name: str) -> ModuleType | None:
        nonlocal calls
        calls += 1
        return kernels

    monkeypatch.setattr(decide, "compiled_module", counted)
    configuration = Configuration(setting, "model", verifier, 3, mixed=True)
    sample = draw(configuration, 1000, engine=tables.table_engine_in_fp32())
    check_speculation(configuration, sample)
    assert calls
    assert g_test(sample.counts, law_of(configuration.params)) > LEVEL


@pytest.mark.proofs
def test_two_samples_of_the_same_configuration_agree(left: Chunks, right: Chunks) -> None:
    """The A/A null: comparisons whose p-values are uniform."""
    found = [two_sample_g_test(a, b) for a, b in zip(left, right, strict=True)]
    assert uniformity(found) > LEVEL
    assert benjamini_hochberg({str(n): p for n, p in enumerate(found)}, LEVEL) == []


@pytest.mark.proofs
def test_two_samples_of_different_laws_do_not_agree(left: Chunks) -> None:
    warm = chunks(1, params=replace(SETTINGS["plain"], temperature=1.5))
    found = [two_sample_g_test(a, b) for a, b in zip(left, warm, strict=True)]
    assert uniformity(found) < LEVEL


@pytest.mark.parametrize(
    "params",
    [
        replace(SETTINGS["plain"], temperature=1.2),
        pytest.param(replace(SETTINGS["plain"], temperature=1.1), marks=pytest.mark.proofs),
        pytest.param(replace(SETTINGS["plain"], presence_penalty=0.25), marks=pytest.mark.proofs),
        pytest.param(replace(SETTINGS["plain"], logit_bias=((1, 0.2),)), marks=pytest.mark.proofs),
    ],
    ids=["temperature", "lower temperature", "presence", "logit_bias"],
)
def test_a_law_that_is_off_by_a_few_percent_is_refused(params: SamplingParams) -> None:
    assert refuses(MODEL_MATCH, 8000, params=params)
    assert g_test(draw(MODEL_MATCH, LOOK, params=params).counts, law_of(params)) > LEVEL


def test_lenience_is_seen() -> None:
    """The one lossy mode there is comes out as one."""
    assert refuses(MODEL_REJECTION, 2000, lenience=0.7)


def test_an_impossible_text_is_refused_at_once() -> None:
    sample = draw(MODEL_REJECTION, 40)
    with pytest.raises(AssertionError, match="excludes"):
        g_test(sample.counts, law_of(SETTINGS["top_k"]))


def test_noise_shared_by_choices_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text has the right law then, and four at a time are equal."""
    monkeypatch.setattr(intake, "sequence_key", lambda seed, prompt, choice: sequence_key(seed, prompt, 0))
    assert refuses(MODEL_MATCH, 4000)


def test_a_context_that_is_read_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models overlook what stands behind the first token of the output; the exact law does not."""
    powers = tables.POWERS.clone()
    powers[len(PROMPT) + 1 :] = 0
    monkeypatch.setattr(tables, "POWERS", powers)
    assert refuses(MODEL_MATCH, 4000)


def test_speculation_that_does_not_happen_is_no_proof() -> None:
    with pytest.raises(AssertionError, match="0 of 0"):
        check_speculation(MODEL_MATCH, draw(MODEL_MATCH, 40, k=0))
    off, sample = replace(MODEL_MATCH, drafter=None), draw(MODEL_MATCH, 40)
    with pytest.raises(AssertionError, match="speculation is off"):
        check_speculation(off, sample)


def test_speculation_without_rejections_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "table_engine", lambda: tables.table_engine(draft=tables.TARGET))
    sample = draw(MODEL_MATCH, 40)
    assert 0 < sample.accepted == sample.drafted
    with pytest.raises(AssertionError, match="drafts accepted"):
        check_speculation(MODEL_MATCH, sample)
