"""Kernels are imported where they are first needed: the engine runs without Triton."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def triton_module(name: str) -> ModuleType | None:
    """The module of this dotted name, which imports Triton; None where Triton is not installed."""
    return import_module(name) if find_spec("triton") else None
