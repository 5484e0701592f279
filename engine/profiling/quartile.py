"""The lower quartile, which sums up repeated timings."""

from collections.abc import Sequence


def lower_quartile(values: Sequence[float]) -> float:
    """The smallest value that at least a quarter of the values do not exceed. One of up to four values is the smallest.

    Disturbances only make a run longer, so the fast runs are the typical ones.
    """
    return sorted(values)[(len(values) - 1) // 4]
