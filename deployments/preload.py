"""Imports what a replica needs, in a process that may become one."""

import os
from contextlib import suppress


def preload(target: str, threads: str) -> None:
    """Import what a replica of this target imports. threads: for OpenMP, which reads them when torch is imported."""
    os.environ["OMP_NUM_THREADS"] = threads
    import ray.serve._private.replica  # noqa: F401

    import deployments.bridge
    import deployments.replica  # noqa: F401
    from engine.config import ConfigError
    from engine.models.loader import open_checkpoint

    with suppress(ConfigError):
        open_checkpoint(target)  # imports the configuration's class
