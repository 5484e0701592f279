"""Counters, histograms and gauges of this process. They keep their totals, and tell an exporter of every change.

Only the event loop uses them.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Values = tuple[str, ...]  # of an instrument's labels, in the order of their names
Tell = Callable[[float, Mapping[str, str]], None]  # (value, labels)


class Exporter(Protocol):
    """Where the values go besides GET /metrics. The functions that it returns take a value with its labels."""

    def counter(self, name: str, about: str, labels: Sequence[str]) -> Tell:
        """Return what takes a counter's growth. The first growth of a series may be 0."""
        ...

    def histogram(self, name: str, about: str, bounds: Sequence[float], labels: Sequence[str]) -> Tell: ...

    def gauge(self, name: str, about: str, labels: Sequence[str]) -> Tell: ...


class Instrument:
    """What all kinds have. `name` and `labels` follow Prometheus."""

    def __init__(self, name: str, about: str, labels: Sequence[str], tell: Tell | None) -> None:
        self.name, self.about, self.labels = name, about, tuple(labels)
        self._tell = tell
        self._tags: dict[Values, dict[str, str]] = {}

    def _export(self, value: float, values: Values) -> None:
        if self._tell is None:
            return
        tags = self._tags.get(values)
        if tags is None:
            tags = self._tags[values] = dict(zip(self.labels, values, strict=True))
        self._tell(value, tags)


class CounterMetric(Instrument):
    """A counter that grows here, often and cheaply. `tell` adds the growth to the totals and exports it."""

    def __init__(self, name: str, about: str, labels: Sequence[str], tell: Tell | None) -> None:
        super().__init__(name, about, labels, tell)
        self.totals: dict[Values, float] = {}
        self._grown: dict[Values, float] = {}

    def add(self, value: float, *labels: str) -> None:
        """Add a value ≥ 0. A value of 0 starts the series."""
        self._grown[labels] = self._grown.get(labels, 0) + value

    def tell(self) -> None:
        grown, self._grown = self._grown, {}
        for labels, value in grown.items():
            if value or labels not in self.totals:
                self.totals[labels] = self.totals.get(labels, 0) + value
                self._export(value, labels)


class Histogram:
    """The values of one series."""

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets  # the last one: beyond every bound
        self.sum = 0.0


class HistogramMetric(Instrument):
    """A histogram."""

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], labels: Sequence[str], tell: Tell | None
    ) -> None:
        super().__init__(name, about, labels, tell)
        self.bounds = tuple(bounds)  # upper ones, inclusive
        self.series: dict[Values, Histogram] = {}

    def observe(self, value: float, *labels: str) -> None:
        series = self.series.get(labels)
        if series is None:
            series = self.series[labels] = Histogram(len(self.bounds) + 1)
        series.counts[bisect_left(self.bounds, value)] += 1
        series.sum += value
        self._export(value, labels)


class GaugeMetric(Instrument):
    """A gauge."""

    def __init__(self, name: str, about: str, labels: Sequence[str], tell: Tell | None) -> None:
        super().__init__(name, about, labels, tell)
        self.values: dict[Values, float] = {}

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value
        self._export(value, labels)


class Maker:
    """Makes instruments and keeps them in the order in which they were made."""

    def __init__(self, exporter: Exporter | None) -> None:
        self._exporter = exporter
        self.made: list[CounterMetric | HistogramMetric | GaugeMetric] = []

    def count(self, name: str, about: str, *labels: str) -> CounterMetric:
        tell = None if self._exporter is None else self._exporter.counter(name, about, labels)
        made = CounterMetric(name, about, labels, tell)
        self.made.append(made)
        return made

    def histogram(self, name: str, about: str, bounds: Sequence[float], *labels: str) -> HistogramMetric:
        tell = None if self._exporter is None else self._exporter.histogram(name, about, bounds, labels)
        made = HistogramMetric(name, about, bounds, labels, tell)
        self.made.append(made)
        return made

    def gauge(self, name: str, about: str, *labels: str) -> GaugeMetric:
        tell = None if self._exporter is None else self._exporter.gauge(name, about, labels)
        made = GaugeMetric(name, about, labels, tell)
        self.made.append(made)
        return made

    def tell(self) -> None:
        """Add the growth of the counters to their totals, and export it."""
        for instrument in self.made:
            if isinstance(instrument, CounterMetric):
                instrument.tell()
