"""What the engine's law must not depend on: the factors, their full product, a small covering array."""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import combinations, product

from engine.types import DRAFTERS, VERIFIERS, DrafterName, SamplingParams, Verifier
from tests.engine.law.tables import END, letters

MAX_TOKENS = 6  # more than are looked at, so that three drafts fit behind the first token


def _params(**settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, **settings)  # type: ignore[arg-type]


SETTINGS: Mapping[str, SamplingParams] = {
    "plain": _params(),
    "temperature": _params(temperature=0.5),
    "top_k": _params(top_k=3),
    "top_p": _params(top_p=0.85),
    "min_p": _params(min_p=0.15),
    "presence": _params(presence_penalty=1.2),
    "frequency": _params(frequency_penalty=0.9),
    "repetition": _params(repetition_penalty=6.0),
    "logit_bias": _params(logit_bias=((0, -0.8), (2, 1.2))),
    "min_tokens": _params(min_tokens=3, logit_bias=((END, 1.5),)),
    "stop_token_ids": _params(stop_token_ids=(2,)),
    "stop": _params(stop=(letters((0, 1)), letters((2, 2)))),
    "ignore_eos": _params(ignore_eos=True),
    "combined": _params(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.05,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        logit_bias=((1, 0.7),),
        min_tokens=2,
        stop_token_ids=(2,),
    ),
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to ask for a text; its law is that of `setting`, whatever the rest."""

    setting: str
    drafter: DrafterName | None  # None: off
    verifier: Verifier
    k: int
    mixed: bool  # whether requests of other kinds share its batches

    @property
    def params(self) -> SamplingParams:
        return SETTINGS[self.setting]

    def __str__(self) -> str:
        batch = "mixed" if self.mixed else "alone"
        return f"{self.setting}-{self.drafter or 'off'}-{self.verifier}-k{self.k}-{batch}"


FACTORS: tuple[Seq[object], ...] = (tuple(SETTINGS), (None, *DRAFTERS), VERIFIERS, (1, 2, 3), (False, True))
SMALL_FACTORS = (*FACTORS[:2], ("rejection", "block"), *FACTORS[3:])


def everything() -> list[Configuration]:
    """The full product. Without a drafter k means nothing, so those occur with one k only."""
    rows = product(*FACTORS)
    return [Configuration(*row) for row in rows if row[1] is not None or row[3] == 1]  # type: ignore[arg-type]


def pairwise() -> list[Configuration]:
    """A covering array of strength 2: every pair of levels of two factors occurs."""
    return [Configuration(*row) for row in covering_array(FACTORS)]  # type: ignore[arg-type]


def small_design() -> list[Configuration]:
    """Every pair of levels of drafter, verifier, k and batch, and each setting, under `rejection` and under `block`.

    Under `match` test_matrix.py compares every setting's texts token by token.
    """
    return [Configuration(*row) for row in covering_array(SMALL_FACTORS, _in_small_design)]  # type: ignore[arg-type]


def _in_small_design(i: int, a: object, j: int, b: object) -> bool:
    return i > 0 or j == 2


def _every_pair(i: int, a: object, j: int, b: object) -> bool:
    return True


def covering_array(
    factors: Seq[Seq[object]], needed: Callable[[int, object, int, object], bool] = _every_pair
) -> Iterator[tuple[object, ...]]:
    """Rows, a level of each factor, until every needed pair of levels of two factors has occurred. `needed` is asked
    with a factor's number and level, and with those of a later factor.

    Greedy: a row begins with the first pair left, and each further factor takes the level that covers most pairs left.
    """
    left = {
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(factors)), 2)
        for a, b in product(factors[i], factors[j])
        if needed(i, a, j, b)
    }  # a dictionary, for its order

    def gain(chosen: Mapping[int, object], factor: int, level: object) -> int:
        return sum(_pair(factor, level, other, value) in left for other, value in chosen.items())

    while left:
        row: dict[int, object] = dict(next(iter(left)))
        for factor, levels in enumerate(factors):
            if factor not in row:
                turn = len(left) % len(levels)  # ties go round, not always to the first level
                row[factor] = max((*levels[turn:], *levels[:turn]), key=lambda level: gain(row, factor, level))
        for (i, a), (j, b) in combinations(sorted(row.items(), key=lambda item: item[0]), 2):
            left.pop(_pair(i, a, j, b), None)
        yield tuple(row[n] for n in range(len(factors)))


def _pair(i: int, a: object, j: int, b: object) -> tuple[tuple[int, object], tuple[int, object]]:
    return ((i, a), (j, b)) if i < j else ((j, b), (i, a))
