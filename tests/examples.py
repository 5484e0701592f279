"""How many examples Hypothesis tries: few by default, ten times as many in `make proofs`."""

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
