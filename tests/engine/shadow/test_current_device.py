"""Kernels are launched on the engine's GPU: Triton takes the thread's current one, wherever the tensors lie."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine import verification
from engine.models import paged_attention
from engine.sampling import device_draws
from engine.types import Request
from tests.engine.pairs import Pair
from tests.engine.shadow import cuda
from tests.engine.shadow.both import run_both
from tests.engine.shadow.test_same_text import PARAMS, PROMPT, start

LAUNCHES: list[tuple[Any, str]] = [
    (paged_attention, "attend"),
    (device_draws, "race"),
    (verification, "match_verdict"),
]


def test_all_kernels_run_with_the_engines_device_as_the_current_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, which measures memory and costs, and while requests are served."""
    current: list[torch.device] = []
    launched: dict[str, set[tuple[torch.device, ...]]] = {}

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def watched(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        def launching(*args: Any) -> Any:
            launched.setdefault(name, set()).add(tuple(current[-1:]))
            return launch(*args)

        return launching

    monkeypatch.setitem(cuda._FUNCTIONS, "device", on)
    for module, name in LAUNCHES:
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    requests = [Request("r", PROMPT, replace(PARAMS, seed=1))]
    run_both(lambda device: start(pair, device, max_running=2), requests).check()
    assert launched["attend"] == {(torch.device("cuda"),)}
    assert launched["race"] == launched["match_verdict"] == launched["attend"]
