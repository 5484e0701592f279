"""Kernels that may start before the ones in front of them have ended, from compute capability 9.0 on.

CUDA calls this programmatic dependent launch. Between two kernels of a decoding pass lie some µs: the second one is
launched, and its programs begin. A kernel with these options does that while the one in front of it still runs. It must
wait (gdc_wait) before it reads or writes what others use, and in each of its programs. A kernel in front lets it start
by gdc_launch_dependents, or by its end. Needs triton.
"""

from functools import cache

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]


@cache
def starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def early_options(device: torch.device) -> dict[str, bool]:
    """Options of the launch of a kernel that waits."""
    return {"launch_pdl": True} if starts_early(device) else {}


@triton.jit
def begin(EARLY: tl.constexpr) -> None:
    """Let the next kernel start, and wait for the one in front. The first thing that a small kernel does. EARLY: what
    starts_early() says."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
