"""What the engine asks of a KV cache's bookkeeping, slotted or paged. Handles are the engine's sequence numbers."""

from collections.abc import Set
from typing import Protocol


class CacheFull(RuntimeError):
    """No room for what was asked; nothing was changed."""


class KVCache(Protocol):
    """Who owns which memory and how many positions of it are valid. Lengths count tokens; owners are explicit.

    A sequence holds memory from `allocate` to `release`. Positions 0 … length − 1 are valid; writing beyond them is the
    caller's business until `extend` says that they became valid.
    """

    def allocate(self, handle: int) -> None:
        """Give the sequence memory, length 0. Raises CacheFull, or KeyError if it already holds some."""
        ...

    def holds(self, handle: int) -> bool: ...

    def length(self, handle: int) -> int: ...

    def extend(self, handle: int, count: int) -> None:
        """The next `count` positions are valid now. Raises CacheFull beyond the sequence's capacity."""
        ...

    def truncate_to(self, handle: int, length: int) -> None:
        """Forget positions ≥ length (rollback). No data moves. A length beyond the current one is an error."""
        ...

    def release(self, handle: int) -> None:
        """Take the memory back. A handle that holds none is ignored, so that every exit path may call it."""
        ...

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError with the numbers unless all memory is accounted for exactly once (I3), and what is held
        belongs to one of the `live` handles."""
        ...
