"""A sample of the cases that `make test-external` runs: no server error, and every reply matches /openapi.json."""

from collections import Counter

import pytest

from tests.app.openapi.conformance import WITH_BODIES, Seen, run_cases


def test_replies_match_their_schemas() -> None:
    """The cases of a seed depend on the modules that were imported, so both kinds may need a few seeds."""
    seen: Seen = Counter()
    for start in range(5):
        seen += run_cases(32, start)
        both = [{status for where, _, status in seen if where == path} >= {200, 400} for path in WITH_BODIES]
        if all(both):
            return
    pytest.fail(f"both kinds of cases must occur: {seen}")
