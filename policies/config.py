"""The policy that chooses k, its parameters, and its reasons. Standard library only: the HTTP edge uses the words."""

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["off", "fixed", "heuristic", "optimal", "confidence", "goodput"]
Reason = Literal["policy", "user", "cap", "cache", "acceptance", "load", "probe"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""
policy      the policy gives this k to every sequence, whatever it costs (off, fixed, heuristic), or to all that join
user        its request fixed k, turned speculation off, or set a max_k that prevents more
cap         it may not emit more tokens, its drafter offers no more, or the server allows no more
cache       there is no memory for more
acceptance  more drafts would be rejected too often to pay, even if it ran alone
load        more would pay if it ran alone, but not beside the others of this round
probe       drafts that are not expected to pay, made to learn whether they would
"""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A policy and its parameters; each policy reads its own. Raises ValueError that names the field."""

    name: PolicyName = "goodput"
    k: int = 5  # fixed: for every sequence; heuristic: for a sequence's first round
    max_k: int | None = None  # most drafts of a sequence whose request does not fix its k
    threshold: float = 0.4  # confidence: a draft ends before the first position with a lower joint confidence
    hysteresis: float = 0.02  # goodput: share by which a plan must beat the last one, and no drafts
    probe_share: float = 0.01  # goodput: share of all time to spend on learning whether drafts would pay again
    trees: bool = False  # goodput: whether the drafts of a draft model may be trees

    @property
    def drafts(self) -> bool:
        """Whether the policy ever drafts for requests that do not fix their k."""
        starts = self.k > 0 if self.name in ("fixed", "heuristic") else self.name != "off"
        return starts and self.max_k != 0

    def __post_init__(self) -> None:
        names = get_args(PolicyName)
        if self.name not in names:
            raise ValueError(f"name must be one of {', '.join(names)}, not {self.name!r}")
        if self.k < 0:
            raise ValueError(f"k must not be negative, not {self.k}")
        if self.max_k is not None and self.max_k < 0:
            raise ValueError(f"max_k must not be negative, not {self.max_k}")
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold must lie between 0 and 1, not {self.threshold}")
        if not 0.0 <= self.hysteresis < 1.0:
            raise ValueError(f"hysteresis must be at least 0 and less than 1, not {self.hysteresis}")
        if not 0.0 <= self.probe_share <= 0.5:
            raise ValueError(f"probe_share must lie between 0 and 0.5, not {self.probe_share}")
