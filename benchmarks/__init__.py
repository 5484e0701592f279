"""Benchmarks of the engine and the server. Each is a module to run: `python -m benchmarks.decode --help`."""

import engine  # noqa: F401 - before torch, which reads how long idle threads wait when it is imported
