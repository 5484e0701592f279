"""Doubles of ray.serve.metrics. They record all values and refuse what Ray refuses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

Tags = tuple[tuple[str, str], ...]  # sorted


@dataclass
class Instrument:
    """One family. What it is told lies under the values of its labels, in the order of their names."""

    name: str
    about: str
    keys: tuple[str, ...]
    bounds: tuple[float, ...] = ()
    default: dict[str, str] = field(default_factory=dict)
    told: dict[Tags, list[float]] = field(default_factory=dict)
    kind: ClassVar[str]
    made: ClassVar[dict[str, "Instrument"]] = {}

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[a-z_]+", self.name)
        assert self.about
        assert self.name not in Instrument.made, "a family is made once"
        Instrument.made[self.name] = self

    def set_default_tags(self, tags: Mapping[str, str]) -> None:
        self.default = dict(tags)

    def tell(self, value: float, tags: Mapping[str, str]) -> None:
        every = self.default | dict(tags)
        assert set(every) == set(self.keys)
        assert all(isinstance(one, str) for one in every.values())
        self.told.setdefault(tuple(sorted(tags.items())), []).append(value)


class Counter(Instrument):
    kind = "counter"

    def __init__(self, name: str, about: str, keys: tuple[str, ...]) -> None:
        super().__init__(name, about, keys)

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        self.tell(value, tags)


class Gauge(Instrument):
    kind = "gauge"

    def __init__(self, name: str, about: str, keys: tuple[str, ...]) -> None:
        super().__init__(name, about, keys)

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.tell(value, tags)


class Histogram(Instrument):
    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float], keys: tuple[str, ...]) -> None:
        assert bounds[0] > 0
        assert all(low < high for low, high in pairwise(bounds))
        super().__init__(name, about, keys, tuple(bounds))

    def observe(self, value: float, tags: Mapping[str, str]) -> None:
        self.tell(value, tags)


class Told:
    """The recorded values by family, as Prometheus would show them."""

    def __getitem__(self, name: str) -> dict[str, float]:
        """{values of the labels: sum of a counter, last value of a gauge, count of a histogram}; without what is 0."""
        instrument = Instrument.made[name]
        value = {"counter": sum, "gauge": lambda told: told[-1], "histogram": len}[instrument.kind]
        read = {" ".join(one for _, one in tags): value(told) for tags, told in instrument.told.items()}
        return {labels: total for labels, total in read.items() if total > 1e-300 or instrument.kind == "gauge"}

    def values(self, name: str) -> dict[str, list[float]]:
        """Of a histogram, in order."""
        return {" ".join(one for _, one in tags): told for tags, told in Instrument.made[name].told.items()}

    def total(self, name: str) -> float:
        return sum(self[name].values())

    @property
    def series(self) -> int:
        return sum(len(instrument.told) for instrument in Instrument.made.values())
