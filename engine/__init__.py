"""The speculative core."""

import os

# Turns that an idle OpenMP worker of torch's wheel (libgomp) waits before it sleeps, about 5 µs. By default it keeps
# its CPU busy for milliseconds after each pass, and where it shares a CPU with anything else, passes wait for it.
# libgomp reads this once, when torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
