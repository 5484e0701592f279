"""The protocol of a KV cache's bookkeeping, slotted or paged. Handles are the engine's sequence numbers."""

from collections.abc import Sequence, Set
from typing import Protocol


class CacheFull(RuntimeError):
    """There is not enough room. The call changed nothing."""


class KVCache(Protocol):
    """Knows which sequence owns which memory and how many of its positions are valid. Lengths are in tokens.

    A sequence holds a slot from `allocate` to `release`. A slot is a run of max_len positions. A slotted cache has
    memory for all of them; a paged cache adds memory block by block. Positions 0 … length − 1 are valid. `reserve`
    gives memory to the next positions, a forward pass writes them, and `extend` makes them valid.
    """

    max_len: int  # most positions of one sequence
    shares: bool  # whether a sequence can use what another one has computed
    window: int | None  # how many positions a query sees, its own included; None: all up to its own

    @property
    def free_slots(self) -> int: ...

    @property
    def withheld(self) -> Set[int]:
        """Memory that no sequence gets before `restore`: slots of a slotted cache, blocks of a paged one."""
        ...

    @property
    def used(self) -> float:
        """Share of the memory that sequences hold, 0 … 1. Memory that only the prefix index keeps does not count."""
        ...

    @property
    def empty(self) -> int:
        """Positions whose memory neither a sequence nor the prefix index keeps."""
        ...

    def allocate(self, handle: int, tokens: Sequence[int] = (), salt: str = "") -> int:
        """Give the sequence a slot and the longest prefix of `tokens` that the cache holds under this salt.

        Returns the prefix's length, which is less than len(tokens). Raises CacheFull without a free slot and KeyError
        if the sequence already holds one.
        """
        ...

    def holds(self, handle: int) -> bool: ...

    def slot(self, handle: int) -> int: ...

    def length(self, handle: int) -> int: ...

    def held(self, handle: int) -> int:
        """As `length`; 0 for a sequence without a slot."""
        ...

    def room(self, handle: int) -> int:
        """Return how many positions `reserve` could add now."""
        ...

    def reserve(self, handle: int, count: int) -> None:
        """Give the next `count` positions memory that no other sequence reads. A shared block is copied first.

        Raises CacheFull and then changes nothing.
        """
        ...

    def extend(self, handle: int, count: int) -> None:
        """Make the next `count` positions valid. Raises ValueError if they were not reserved."""
        ...

    def writable(self, handle: int, start: int) -> bool:
        """Whether no other sequence reads or finds the positions from `start` on. `reserve` makes the next ones so."""
        ...

    def truncate_to(self, handle: int, length: int) -> None:
        """Forget positions from `length` on (rollback) and free the memory that only they used. No data moves.

        Memory that other sequences share stays theirs. Raises ValueError for more than the current length, and for a
        length above 0 whose next query would see memory that `slide` has freed.
        """
        ...

    def unseen(self, handle: int, length: int) -> int:
        """Return how many positions with memory no query at `length` or behind it sees."""
        ...

    def slide(self, handle: int, length: int) -> None:
        """Free the memory of the positions that are `unseen`. The sequence must never be truncated below `length`,
        except to 0. The freed memory must be finite."""
        ...

    def fork(self, parent: int, child: int, length: int) -> int:
        """Let `child`, which holds a slot, share the parent's first `length` positions if it has fewer itself.

        Returns the child's length. The first of the two to write into a shared block copies it, so the parent must
        reserve again. Sequences with different salts share nothing, and nothing is shared if the child's next query
        would see memory that the parent's window has left. Raises ValueError for more positions than the parent has.
        """
        ...

    def publish(self, handle: int, tokens: Sequence[int]) -> None:
        """Let other sequences find this one's full blocks (I6). Its valid positions hold these committed `tokens`.

        Called after every round that committed tokens. `tokens` may be longer than the valid positions.
        """
        ...

    def release(self, handle: int) -> None:
        """Take the slot back. A handle without a slot is ignored, so that every exit path may call this.

        Later sequences still find the published blocks until the memory is needed.
        """
        ...

    def discard(self, handle: int) -> None:
        """Stop others from finding this sequence's positions, because they may hold values that are not finite.

        The sequence keeps its slot. Memory that only the prefix index kept is withheld.
        """
        ...

    def quarantine(self, handle: int) -> None:
        """Take back the slot of a discarded sequence whose memory could not be zeroed.

        Memory that no other sequence holds is withheld.
        """
        ...

    def restore(self) -> None:
        """Free the withheld memory. The caller has zeroed it."""
        ...

    def audit(self, handles: Set[int]) -> None:
        """Raise AssertionError unless all memory is in exactly one state: free, held, cached or withheld (I3).

        `handles` are all sequences that may hold memory.
        """
        ...
