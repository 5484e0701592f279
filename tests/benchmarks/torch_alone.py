"""Engines that compile and measure nothing when they load a model, for tests that do not ask what computes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from engine.models import compiled, products
from engine.models.linear import Linear, usable_forms


@contextmanager
def torch_alone() -> Iterator[None]:
    """Engines find no Numba, as on a machine without it, and take plain products. To compile code for a pair and to
    measure its products takes far longer than what these tests do with it."""
    compiled.compiled_module.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "find_spec", lambda name: None)
        patch.setattr(compiled.log, "disabled", True)  # a step of benchmarks.gpu fails where the engine warns
        patch.setattr(products, "choose_forms", _use_plain_forms)
        yield
    compiled.compiled_module.cache_clear()


def _use_plain_forms(undecided: Sequence[Linear], **settings: object) -> int:
    """As choose_forms, without a measurement."""
    for product in undecided:
        assert product.given is not None
        forms = usable_forms(product.given)
        product.use(["plain" if "plain" in forms else forms[0]])
    return 0
