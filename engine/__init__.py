"""The speculative core."""

import os
import sys

_GIVEN = any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
# Turns that an idle OpenMP worker of torch's wheel (libgomp) waits before it sleeps, about 5 µs. By default it keeps
# its CPU busy for milliseconds after each pass, and whatever shares the CPU waits for it: the threads of compiled
# layers, too. libgomp reads this once, when torch loads it.
if not _GIVEN:
    os.environ["GOMP_SPINCOUNT"] = "1000"
IDLE_WORKERS_SPIN = not _GIVEN and "torch" in sys.modules  # it was loaded too early
