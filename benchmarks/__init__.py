"""Benchmarks of the engine and the server. Each is a module to run: `python -m benchmarks.decode --help`."""
