"""Which rounds a profile holds: batches of 1, 2, 4, … sequences with 0, 1, 2, 4, … drafts each, and two kinds more."""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from policies.observation import Timing

DEPTHS = (0, 1, 2, 4, 8, 16)  # drafts per sequence
UNEVEN_KS = (4, 0, 2, 1, 3, 0, 4, 2)  # drafts per sequence, repeated, in the round with uneven drafts
LONG_GAP = 96  # most tokens that the draft model reads of one sequence, in a round with a gap; in another one a third.
# Two lengths, because a gap may cost something whatever its length is, where rounds without one are captured graphs


@dataclass(frozen=True, slots=True)
class RoundShape:
    """A round to be measured."""

    ks: tuple[int, ...]  # by sequence
    gap: int = 1  # tokens of the first sequence that the draft model has not read; for the others it is 1

    @property
    def size(self) -> tuple[int, int, int]:
        """(sequences, drafts, drafts of the longest)."""
        return len(self.ks), sum(self.ks), max(self.ks)


def round_shapes(count: int, depth: int, longest_gap: int) -> list[RoundShape]:
    """The shapes of up to `count` sequences with up to `depth` drafts each, small batches first. longest_gap: tokens
    that a draft model can have unread; 0: there is no draft model."""
    return [shape for batch in _batch_sizes(count) for shape in _of_batch(batch, depth, longest_gap)]


def missing_shapes(shapes: Seq[RoundShape], known: Seq[Timing]) -> list[RoundShape]:
    """The shapes that the known timings lack, the largest batches first. If nothing is known: all shapes, in order.

    Two shapes of one size differ in what the draft model has to read. Both are missing if one is.
    """
    if not known:
        return list(shapes)
    found = Counter((timing.batch, timing.drafts, timing.depth) for timing in known)
    asked = Counter(shape.size for shape in shapes)
    missing = [shape for shape in shapes if found[shape.size] < asked[shape.size]]
    return sorted(missing, key=lambda shape: -len(shape.ks))


def _batch_sizes(count: int) -> Iterator[int]:
    """1, 2, 4, … and count itself."""
    batch = 1
    while batch < count:
        yield batch
        batch *= 2
    if count:
        yield count


def _of_batch(batch: int, depth: int, longest_gap: int) -> list[RoundShape]:
    """By number of drafts, so that each shape follows one that left the processor's caches much as it does itself."""
    shapes = [RoundShape((k,) * batch) for k in sorted({*(k for k in DEPTHS if k <= depth), depth})]
    if depth and batch > 1:
        shapes.append(RoundShape(tuple(min(UNEVEN_KS[i % len(UNEVEN_KS)], depth) for i in range(batch))))
    if depth:
        longest = min(LONG_GAP, longest_gap)
        gaps = (longest // 3, longest)
        shapes += [RoundShape((1,) * batch, gap) for gap in gaps if gap > batch + 1]  # else it shows nothing
    return sorted(shapes, key=lambda shape: sum(shape.ks))
