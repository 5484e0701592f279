"""A sample of the cases that `make test-external` runs: no server error, and every reply matches /openapi.json."""

from tests.app.openapi.conformance import WITH_BODIES, run_cases


def test_replies_match_their_schemas() -> None:
    seen = run_cases(48)
    for path in WITH_BODIES:
        assert {status for where, _, status in seen if where == path} >= {200, 400}, "both kinds of cases occur"
