"""The policy that chooses k, and its parameters. Standard library only."""

from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["off", "fixed", "heuristic", "optimal", "confidence", "goodput"]


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
