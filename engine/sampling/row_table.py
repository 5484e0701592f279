"""A table on the device in which each of some sequences has a row."""

from weakref import finalize

import torch
from torch import Tensor

from engine.device.staging import Staging


class RowTable:
    """[rows, vocab] of zeros at first. A row belongs to one owner until that is collected; row 0 belongs to nobody.

    Only running sequences have owners, so the table is made for as many as an engine runs (RoundLimits). It grows only
    where nobody has said how many these are.
    """

    def __init__(self, staging: Staging, vocab_size: int, dtype: torch.dtype) -> None:
        self._staging = staging
        self._values = torch.zeros(0, vocab_size, dtype=dtype, device=staging.device)
        self._num_rows = 1  # that were ever given away, and row 0
        self._free: list[int] = []

    @property
    def values(self) -> Tensor:
        """The table, with a row for each owner."""
        if len(self._values) < self._num_rows:
            most = 1 + self._staging.limits.sequences
            grown = self._values.new_zeros(max(self._num_rows, 2 * len(self._values), most), self._values.shape[1])
            grown[: len(self._values)] = self._values
            self._values = grown
        return self._values

    def take_row(self) -> int:
        """A row for an owner. It holds what its last owner has left."""
        if not self._free:
            self._free.append(self._num_rows)
            self._num_rows += 1
        return self._free.pop()

    def free_with(self, owner: object, row: int) -> None:
        """Take the row back once its owner is collected."""
        finalize(owner, self._free.append, row).atexit = False
