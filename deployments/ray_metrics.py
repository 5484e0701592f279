"""Exports metric families (app/metrics) by Ray.

Ray puts `ray_` before each name and adds labels of its own; Serve adds deployment, replica and application.

Three properties of Ray (2.60) shape the families and this module. A counter refuses to grow by 0, so a counter that has
not grown does not exist, and `rate` and `increase` miss its first growth: each series starts with a number that
vanishes in any sum. A histogram's sum is computed from the middles of its buckets: use ratios of counters for means and
histograms for quantiles. A gauge that is not set for two reports (20 s) disappears until it is set again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import metrics

from app.metrics.metric_instruments import Tell

BIRTH = 5e-324  # the smallest positive number: it vanishes in any sum


class RayMetrics:
    """An Exporter (app/metrics/metric_instruments.py). All its instruments carry the model's name as a label."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def counter(self, name: str, about: str, labels: Sequence[str]) -> Tell:
        counter = metrics.Counter(name, about, self._keys(labels))
        counter.set_default_tags({"model_name": self._model_name})

        def grow(value: float, tags: Mapping[str, str]) -> None:
            counter.inc(value or BIRTH, dict(tags))

        return grow

    def histogram(self, name: str, about: str, bounds: Sequence[float], labels: Sequence[str]) -> Tell:
        histogram = metrics.Histogram(name, about, list(bounds), self._keys(labels))
        histogram.set_default_tags({"model_name": self._model_name})
        return histogram.observe  # type: ignore[return-value]  # Ray takes a dictionary only, which it does not change

    def gauge(self, name: str, about: str, labels: Sequence[str]) -> Tell:
        gauge = metrics.Gauge(name, about, self._keys(labels))
        gauge.set_default_tags({"model_name": self._model_name})
        return gauge.set  # type: ignore[return-value]  # as above

    def _keys(self, labels: Sequence[str]) -> Any:
        """Return a tuple. The type is Any because Serve annotates it as a tuple of a single string."""
        return ("model_name", *labels)
