"""Numbers on their way to the device. All numbers that a round puts before it reads the first go there in one copy.

A copy from ordinary memory blocks the host until the device has done all its work. One from pinned memory does not, but
each costs about as much as a small kernel. So the parts of a round put their numbers first and read them later.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cache.transfer import index_tensor
from engine.device.graphs import Graphs
from engine.device.round_clock import wait
from engine.device.round_limits import NO_LIMITS, RoundLimits

T = TypeVar("T")


class Place(NamedTuple):
    """Where numbers are among those that were sent with them."""

    words: slice  # of 64 bits
    dtype: torch.dtype
    size: int | None  # numbers of this type; None: all that fit


class Staged:
    """Numbers [n] that wait for the copy to the device, or have arrived there."""

    __slots__ = ("_place", "_sent", "_staging", "_tensor")

    def __init__(self, staging: "Staging", tensor: Tensor | None, place: Place | None = None) -> None:
        """tensor: the numbers, if they have arrived; None: they wait, and will be at this place of what is sent."""
        self._staging, self._tensor, self._place = staging, tensor, place
        self._sent: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """The numbers on the device. The first read sends all that wait. A replayed graph reads none."""
        if self._tensor is None:
            if self._sent is None:
                self._staging.send()
            assert self._sent is not None, "sending brings all numbers that wait"
            assert self._place is not None, "numbers that wait have a place"
            part = self._sent[self._place.words]
            dtype = self._place.dtype
            self._tensor = part if dtype is torch.int64 else part.view(dtype)[: self._place.size]
        return self._tensor

    def arrive(self, sent: Tensor) -> None:
        """sent [all that waited] int64."""
        self._sent = sent


class Staging:
    """Collects numbers for one device. On the CPU they have arrived at once.

    With graphs, the numbers of a round that may be captured go to fixed memory, one after the other from its start: two
    such rounds of equal layout have equal addresses. They are copied from pinned memory that stays, too: to pin memory
    for each copy takes the host some 50 µs.
    """

    def __init__(self, device: torch.device, graphs: Graphs | None = None, limits: RoundLimits = NO_LIMITS) -> None:
        """graphs: captured work that reads these numbers; None: nothing is captured. limits: the rounds' limits, or
        NO_LIMITS if nobody needs them."""
        self.device = device
        self.graphs = graphs
        self.limits = limits
        self._fixed = None if graphs is None else torch.empty(limits.numbers, dtype=torch.int64, device=device)
        self._pinned: Tensor | None = None  # what is copied to the fixed memory; made when it is used
        self._is_copying = False  # whether the device may not have read the pinned memory yet
        self._used: int | None = None  # numbers in the fixed memory; None: this round's numbers are not all there
        self._layout: list[Hashable] = []
        self.deferred = device.type != "cpu"
        self._numbers = array("q")  # other types by their bits
        self._waiting: list[Staged] = []
        self._kept: dict[Hashable, Any] = {}

    def begin(self, *, fixed: bool = False) -> None:
        """A round begins. fixed: it may be captured. The numbers of the last such round are gone then."""
        self.send()  # what a round that failed has left
        if self._is_copying:
            wait(self.device)  # such a round did not wait
            self._is_copying = False
        self._used = 0 if fixed and self._fixed is not None else None
        self._layout = []

    def end(self) -> None:
        """The round has waited for the device."""
        self._is_copying = False

    def begin_last_part(self) -> None:
        """The numbers that follow were not foreseen. They go to the second half of the fixed memory, and neither their
        addresses nor their layout depend on the numbers before them."""
        if not self._used or self._fixed is None:  # nothing was sent: the others lie at its start
            return
        self.send()
        if self._used is None or self._used > len(self._fixed) // 2:
            self._leave_fixed()
        else:
            self._used, self._layout = len(self._fixed) // 2, ["last part"]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Numbers that are put within do not go to the fixed memory, and do not count in the layout."""
        self.send()
        used, layout, self._used, self._layout = self._used, self._layout, None, []
        try:
            yield
        finally:
            self.send()
            self._used, self._layout = used, layout

    @property
    def fixed(self) -> bool:
        """Whether this round may be captured: its numbers go to the fixed memory."""
        return self._used is not None

    @property
    def layout(self) -> Hashable | None:
        """The types and counts of the round's numbers so far, with all that was noted; None: this round cannot be
        captured. Equal layouts have equal addresses."""
        return None if self._used is None else tuple(self._layout)

    def note(self, name: str, *numbers: int) -> None:
        """Add numbers of the host that shape the device's work to the layout."""
        self._layout.append((name, *numbers))

    def ints(self, values: Sequence[int]) -> Staged:
        """int64 [len(values)]."""
        if not self.deferred:
            return Staged(self, index_tensor(values, self.device))
        return self._wait(array("q", values), torch.int64)

    def int32s(self, values: Sequence[int]) -> Staged:
        """int32 [len(values)]."""
        if not self.deferred:
            return Staged(self, torch.tensor(values, dtype=torch.int32))
        odd = len(values) % 2
        return self._wait(array("q", array("i", [*values, 0] if odd else values).tobytes()), torch.int32, len(values))

    def floats(self, values: Sequence[float]) -> Staged:
        """fp64 [len(values)]."""
        if not self.deferred:
            return Staged(self, torch.tensor(values, dtype=torch.float64))
        return self._wait(array("q", array("d", values).tobytes()), torch.float64)

    def keep(self, name: Hashable, make: Callable[[], T]) -> T:
        """The thing that stays on the device between rounds under this name. The first call makes it."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept

    def drop(self, owner: int) -> None:
        """Forget the graphs of a runner that is out of use, and where they wrote laws."""
        if self.graphs is not None:
            self.graphs.drop(owner)
        self._kept.pop(("laws", owner), None)

    def send(self) -> None:
        """Copy all numbers that wait to the device. The host does not wait for it. If it raises, they go on waiting."""
        if not self._waiting:
            return
        numbers = self._numbers
        sent = self._copy(numbers) if numbers else index_tensor((), self.device)
        waiting, self._waiting, self._numbers = self._waiting, [], array("q")
        for staged in waiting:
            staged.arrive(sent)

    def _copy(self, numbers: "array[int]") -> Tensor:
        used, self._used = self._used, None
        if used is None or self._fixed is None or self.graphs is None:
            return index_tensor(numbers, self.device)
        if used + len(numbers) > len(self._fixed):
            self._leave_fixed()
            return index_tensor(numbers, self.device)
        self._used = used + len(numbers)
        if self._pinned is None:
            self._pinned = torch.empty(len(self._fixed), dtype=torch.int64, pin_memory=True)
        pinned = self._pinned[used : self._used].copy_(torch.frombuffer(numbers, dtype=torch.int64))
        self._is_copying = True
        return self._fixed[used : self._used].copy_(pinned, non_blocking=True)

    def _leave_fixed(self) -> None:
        """The limits do not hold: the round is not captured."""
        self._used = None
        if self.graphs is not None:
            self.graphs.eager["the fixed memory is too small"] += 1

    def _wait(self, numbers: "array[int]", dtype: torch.dtype, count: int | None = None) -> Staged:
        """count: how many numbers of this type; None: all that fit."""
        first = len(self._numbers)
        self._numbers.extend(numbers)
        staged = Staged(self, None, Place(slice(first, len(self._numbers)), dtype, count))
        self._waiting.append(staged)
        if self._used is not None:
            self._layout.append((dtype, len(numbers) if count is None else count))
        return staged


class RoundNumbers:
    """The numbers that one round needs on the device, each list under a name. A list is made and put once."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._staged: dict[Hashable, Staged] = {}

    def ints(self, name: Hashable, make: Callable[[], Sequence[int]]) -> Staged:
        """The list that `make` returns. The same name stands for the same list during the whole round."""
        staged = self._staged.get(name)
        if staged is None:
            staged = self._staged[name] = self.staging.ints(make())
        return staged

    def index(self, values: Sequence[int]) -> Staged:
        """These numbers themselves, for an index. Equal numbers are put once. A graph must not read them: the layout
        does not tell which lists happened to be equal."""
        return self.ints(tuple(values), lambda: values)

    def floats(self, name: Hashable, make: Callable[[], Sequence[float]]) -> Staged:
        staged = self._staged.get(name)
        if staged is None:
            staged = self._staged[name] = self.staging.floats(make())
        return staged
