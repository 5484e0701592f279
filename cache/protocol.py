"""What the engine asks of a KV cache's bookkeeping, slotted or paged. Handles are the engine's sequence numbers."""

from collections.abc import Sequence, Set
from typing import Protocol


class CacheFull(RuntimeError):
    """No room for what was asked; nothing was changed."""


class KVCache(Protocol):
    """Who owns which memory and how many positions of it are valid. Lengths count tokens; owners are explicit.

    A sequence holds a slot from `allocate` to `release`; a slot is a run of max_len positions, all backed by memory in
    a slotted cache, backed block by block in a paged one. Positions 0 … length − 1 are valid. `reserve` backs the next
    ones, a forward pass writes them, and `extend` says that they became valid.
    """

    max_len: int  # positions of one sequence
    shares: bool  # whether one sequence can ever find or take over what another has computed

    @property
    def free_slots(self) -> int: ...

    @property
    def withheld(self) -> Set[int]:
        """Memory that nobody gets before `restore`: slots of a slotted cache, blocks of a paged one."""
        ...

    @property
    def used(self) -> float:
        """Share of its memory that sequences hold, 0 … 1; what is only kept to be found again does not count."""
        ...

    def allocate(self, handle: int, tokens: Sequence[int] = (), salt: str = "") -> int:
        """Give the sequence a slot and the longest prefix of `tokens` that is there already under this salt; returns
        its length, never all of `tokens`. Raises CacheFull, or KeyError if it already holds a slot."""
        ...

    def holds(self, handle: int) -> bool: ...

    def slot(self, handle: int) -> int: ...

    def length(self, handle: int) -> int: ...

    def room(self, handle: int) -> int:
        """The most positions that `reserve` could back now."""
        ...

    def reserve(self, handle: int, count: int) -> None:
        """Back the next `count` positions with memory of its own: what the sequence shares there is copied first.

        Raises CacheFull; then nothing was changed.
        """
        ...

    def extend(self, handle: int, count: int) -> None:
        """The next `count` positions are valid now. Raises ValueError beyond what was reserved."""
        ...

    def truncate_to(self, handle: int, length: int) -> None:
        """Forget positions ≥ length (rollback) and free what only they needed. No data moves, and what others share
        stays theirs. A length beyond the current one is a ValueError."""
        ...

    def fork(self, parent: int, child: int, length: int) -> int:
        """Let `child`, which holds a slot, take over the parent's first `length` positions in place of its own fewer;
        returns how many it has now. Whoever first writes into a shared block copies it: the parent must reserve anew.
        Nothing is shared across salts. More positions than the parent has are a ValueError."""
        ...

    def publish(self, handle: int, tokens: Sequence[int]) -> None:
        """The sequence's valid positions hold these committed tokens: other sequences may share its full blocks (I6).

        Called after every round that committed tokens; `tokens` may go on beyond what is valid.
        """
        ...

    def release(self, handle: int) -> None:
        """Take the slot back. A handle that holds none is ignored, so that every exit path may call it. What was
        published stays to be found until its memory is needed."""
        ...

    def discard(self, handle: int) -> None:
        """What the sequence's positions hold is not to be trusted: nobody may find it any more. It keeps its slot, and
        what could only be found, in nobody's hands, is withheld."""
        ...

    def quarantine(self, handle: int) -> None:
        """Take back a discarded sequence's slot, and withhold the memory that nobody else holds: it is not to be
        trusted, and could not be zeroed."""
        ...

    def restore(self) -> None:
        """What is withheld was zeroed: whoever needs it may have it."""
        ...

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError with the numbers unless all memory is accounted for exactly once (I3): free, held,
        findable or withheld. What is held belongs to one of the `live` handles."""
        ...
