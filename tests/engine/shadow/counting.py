"""Counts what an engine asks of the shadow device: crossings between host and device, and operations on the device.

Both are counted by the line of the project that asked, with the lines that called it. The shadow's own lines are left
out. Where launches are watched, what the project's operations launch is counted too.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OWN = {HERE / name for name in ("counting.py", "device.py", "cuda.py", "guard.py")}
CALLERS = 3  # lines that are kept of a call: the innermost of the project, and its callers

# H2D: from host to device. A wait is an event or a stream that the host waits for, without a copy.
Kind = Literal["H2D copy", "H2D index", "D2H copy", "D2H sync", "wait"]
UPLOADS: tuple[Kind, ...] = ("H2D copy", "H2D index")
DOWNLOADS: tuple[Kind, ...] = ("D2H copy", "D2H sync")


@dataclass(frozen=True, slots=True)
class Crossing:
    """One reason for the host and the device to meet."""

    kind: Kind
    operation: str
    blocks: bool  # whether the host waits for all work of the device
    where: str  # "engine/a.py:12 < engine/b.py:34"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that runs on the device. Views and memory without contents are none."""

    name: str
    in_model: bool  # inside of a model's forward pass or its logits
    where: str

    @property
    def is_own(self) -> bool:
        """Whether it is the project's: what it launches is counted beside it."""
        return self.name.startswith("foretoken.")


class Counts:
    """How often each crossing and each operation happened."""

    def __init__(self) -> None:
        self.crossings = Counter[Crossing]()
        self.operations = Counter[Operation]()
        self.launches = Counter[tuple[str, bool]]()  # by name, and whether it was inside of a model
        self._models_entered = 0

    def cross(self, kind: Kind, operation: str, *, blocks: bool = True) -> None:
        self.crossings[Crossing(kind, operation, blocks, project_lines())] += 1

    def operate(self, name: str) -> None:
        self.operations[Operation(name, self._models_entered > 0, project_lines())] += 1

    @contextmanager
    def in_model(self) -> Iterator[None]:
        self._models_entered += 1
        try:
            yield
        finally:
            self._models_entered -= 1

    def launch(self, name: str) -> None:
        """Count what one of the project's operations launches: a kernel, or an operation of torch."""
        self.launches[name, self._models_entered > 0] += 1

    def copy(self) -> "Counts":
        counts = Counts()
        counts.crossings, counts.operations = self.crossings.copy(), self.operations.copy()
        counts.launches = self.launches.copy()
        return counts

    def since(self, earlier: "Counts") -> "Counts":
        """What was counted after `earlier`, a copy of these counts."""
        counts = Counts()
        counts.crossings = self.crossings - earlier.crossings
        counts.operations = self.operations - earlier.operations
        counts.launches = self.launches - earlier.launches
        return counts

    @property
    def uploads(self) -> int:
        return sum(n for crossing, n in self.crossings.items() if crossing.kind in UPLOADS)

    @property
    def downloads(self) -> int:
        return sum(n for crossing, n in self.crossings.items() if crossing.kind in DOWNLOADS)

    @property
    def stalls(self) -> int:
        """How often the host waits for the device: at blocking copies of either direction, syncs and waits."""
        return sum(n for crossing, n in self.crossings.items() if crossing.blocks)

    @property
    def outside(self) -> int:
        """Operations outside of the models."""
        return sum(n for operation, n in self.operations.items() if not operation.in_model)

    @property
    def inside(self) -> int:
        return sum(self.operations.values()) - self.outside

    @property
    def launched_outside(self) -> int:
        """Launches outside of the models: torch's operations as one each, and all that the project's launch."""
        return self._launched(in_model=False)

    @property
    def launched_inside(self) -> int:
        return self._launched(in_model=True)

    def _launched(self, *, in_model: bool) -> int:
        known = [n for op, n in self.operations.items() if op.in_model == in_model and not op.is_own]
        return sum(known) + sum(n for (_, inside), n in self.launches.items() if inside == in_model)

    def lines(self) -> list[str]:
        """Crossings, operations outside of the models by line, and what the project's operations launch; of each the
        most frequent first."""
        crossings = [
            f"{n:5} {c.kind:9} {'blocks' if c.blocks else '      '} {c.operation:32} {c.where}"
            for c, n in self.crossings.most_common()
        ]
        outside = Counter[str]()
        for operation, n in self.operations.items():
            if not operation.in_model:
                outside[operation.where] += n
        operations = [f"{n:5} operations  {where}" for where, n in outside.most_common()]
        launches = [
            f"{n:5} launches    {name}{' in a model' if inside else ''}"
            for (name, inside), n in self.launches.most_common()
        ]
        return crossings + operations + launches


def project_lines() -> str:
    """The innermost lines of the project in the current call: "a.py:12 < b.py:34 < …"."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < CALLERS:
        name = _project_name(frame.f_code.co_filename)
        if name is not None:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "?"


_names: dict[str, str | None] = {}


def _project_name(filename: str) -> str | None:
    """The file's path in the project; None for a file of the shadow or of a library."""
    if filename not in _names:
        path = Path(filename)
        counts = path.is_relative_to(ROOT) and path not in OWN and "site-packages" not in path.parts
        _names[filename] = str(path.relative_to(ROOT)) if counts else None
    return _names[filename]
