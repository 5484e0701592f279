"""What `make test` tries, and what only `make proofs` does: further parameters, ten times as many examples."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

USUAL = 40  # where a test does not say how many
IN_PROOFS = 10  # times as many


def register_profiles() -> None:
    """A busy machine is no fault of what is tested, so there are no deadlines."""
    usual = settings(max_examples=USUAL, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("usual", usual)
    settings.register_profile("proofs", usual, max_examples=IN_PROOFS * USUAL)
    settings.load_profile("usual")


def examples(count: int) -> settings:
    """At most so many examples; in `make proofs` ten times as many."""
    return settings(max_examples=count * settings().max_examples // USUAL)


def in_proofs(*values: Any) -> list[Any]:
    """Parameters of a test that are tried in proofs only."""
    return [pytest.param(value, marks=pytest.mark.proofs) for value in values]


def usual_and_proofs(values: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """The parameters of a test. Those that are not `usual` are tried in proofs only."""
    found = list(values)
    assert all(value in found for value in usual)
    return [parameter for value in found for parameter in ([value] if value in usual else in_proofs(value))]
