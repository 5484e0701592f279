"""Kernels are imported where they are first needed: the engine runs without Triton.

Triton compiles a module of its own for the GPU's driver when it is first asked for the GPU, and needs a C compiler for
it. So it is asked once, before any kernel is launched.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger(__name__)


def triton_module(name: str) -> ModuleType | None:
    """The module of this dotted name, which imports Triton; None where Triton cannot run kernels."""
    return import_module(name) if triton_reason() is None else None


@cache
def triton_reason() -> str | None:
    """Why Triton cannot run kernels on this machine's GPU, which is then logged once. None: it can."""
    if find_spec("triton") is None:
        reason = "triton is not installed"
    else:
        try:
            import_module("triton.runtime").driver.active.get_current_target()
        except Exception as error:  # of a compiler, a driver or a library, each with a type of its own
            reason = f"triton cannot use the GPU: {type(error).__name__}: {error}"
        else:
            return None
    logger.warning("kernels are replaced by torch's operations, which are slower: %s", reason)
    return reason
