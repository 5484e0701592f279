"""Texts of typical acceptance through a whole engine against their exact law, which is not the target's.

The law is enumerated round by round, by none of the engine's code: drafts come from the draft's law, each is kept if it
is typical of the target's, and the token behind the kept ones comes from the target's law.
"""

from math import exp, log

import pytest

from engine.types import Typical
from tests.engine.law.checking import LENGTH, PROMPT, check_speculation, draw, law_of
from tests.engine.law.configurations import SETTINGS, Configuration
from tests.engine.law.exact import Text, next_law
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import DRAFT, END, TARGET, row_of

pytestmark = pytest.mark.usefixtures("pruned_races")

DRAWS = 800
LEVEL = 1e-4  # a correct engine fails a test with this probability
REFUSED = 1e-6
USUAL, STRICT, LAX = Typical(0.3, 0.9), Typical(0.6, 1.0), Typical(0.05, 0.1)


def typical_law(limits: Typical, k: int, setting: str) -> dict[Text, float]:
    """Probability of every text of LENGTH tokens, or of fewer where the end token ends it."""
    law: dict[Text, float] = {}
    rounds: list[tuple[Text, int, float]] = [
        ((), 0, 1.0)
    ]  # (text, drafts, probability); the prompt's pass has no drafts
    while rounds:
        text, most, mass = rounds.pop()
        if len(text) >= LENGTH or text[-1:] == (END,):
            law[text[:LENGTH]] = law.get(text[:LENGTH], 0.0) + mass
            continue
        rounds += [(after, k, mass * p) for after, p in one_round(text, most, limits, setting)]
    return law


def one_round(text: Text, most: int, limits: Typical, setting: str) -> list[tuple[Text, float]]:
    """(text, probability) of what a round makes of a text, with `most` drafts left."""
    own = next_law(TARGET[row_of(PROMPT + text)].tolist(), PROMPT, text, SETTINGS[setting])
    drafts = next_law(DRAFT[row_of(PROMPT + text)].tolist(), PROMPT, text, SETTINGS[setting]) if most else []
    threshold = min(limits.epsilon, limits.delta * exp(sum(p * log(p) for p in own if p)))
    kept = {token: q for token, q in enumerate(drafts) if own[token] > threshold}
    after = [((*text, token), (1 - sum(kept.values())) * p) for token, p in enumerate(own)]
    for token, q in kept.items():
        longer = (*text, token)
        ends = [(longer, 1.0)] if token == END else one_round(longer, most - 1, limits, setting)
        after += [(whole, q * p) for whole, p in ends]
    return [(whole, p) for whole, p in after if p]


@pytest.mark.parametrize(
    ("limits", "k", "setting"),
    [
        (STRICT, 3, "top_k"),
        *(
            pytest.param(USUAL, k, setting, marks=pytest.mark.proofs)
            for k, setting in ((1, "plain"), (3, "temperature"))
        ),
    ],
)
def test_texts_follow_the_law_of_typical_acceptance(limits: Typical, k: int, setting: str) -> None:
    configuration = Configuration(setting, "model", "rejection", k, mixed=True)
    sample = draw(configuration, DRAWS, typical=limits)
    check_speculation(configuration, sample)
    expected = typical_law(limits, k, setting)
    assert sum(expected.values()) == pytest.approx(1)
    assert g_test(sample.counts, expected) > LEVEL
    others = (typical_law(limits, 2 if k == 1 else 1, setting), typical_law(LAX, k, setting))
    for other in (law_of(configuration.params), *others):
        assert g_test(sample.counts, other) < REFUSED
