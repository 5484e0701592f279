"""Keeps the profile of rounds from one start to the next, on one kind of machine for one pair of shapes.

A file holds the timings of a whole profile. It is replaced at once, so nobody reads half of it, and a file that is
broken or of another pair is not used.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from math import isfinite
from typing import Any

import torch

from engine.models.product_times import cpu_model
from engine.models.runner import Runner
from engine.profiling.kept_files import UNUSABLE, cache_folder, code_digest, replace_file
from policies.observation import Timing

log = logging.getLogger(__name__)


class ProfileFile:
    """The file in which the profile of these models is kept."""

    def __init__(self, runners: Sequence[Runner], max_running: int, depth: int, heads: str | None = None) -> None:
        """heads: describes heads without memory."""
        device = runners[0].device
        self._about = {
            "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
            "torch": torch.__version__,
            "code": code_digest(),
            "threads": torch.get_num_threads(),
            # The number of blocks follows the free memory of a start. No round takes longer for it.
            "models": [
                [repr(r.decoder.config), r.decoder.weight_bytes, repr(replace(r.layout, blocks=0))] for r in runners
            ],
            "graphs": runners[0].staging.graphs is not None,
            "max_running": max_running,
            "depth": depth,
            "heads": heads,
        }
        name = hashlib.sha256(json.dumps(self._about).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"rounds-{name}.json"
        self.whole = False  # whether the timings are all that a start had memory for; filled by `read`

    def read(self) -> list[Timing]:
        """The timings; none if there is no file that can be used."""
        try:
            content = json.loads(self.path.read_text("utf-8"))
            if content["about"] != self._about:
                raise ValueError("it is of another machine or pair")
            timings = [_timing(row) for row in content["timings"]]
            self.whole = content.get("whole") is True
            return timings
        except (FileNotFoundError, NotADirectoryError):
            return []
        except UNUSABLE as error:
            log.warning("%s cannot be used, so rounds are measured again: %s", self.path, error)
            return []

    def write(self, timings: Sequence[Timing], *, whole: bool) -> None:
        """Replace the file. A folder that cannot be written is no fault."""
        try:
            rows = [asdict(timing) for timing in timings]
            replace_file(self.path, json.dumps({"about": self._about, "whole": whole, "timings": rows}))
        except OSError as error:
            log.debug("the profile is not kept: %s", error)


def _timing(row: dict[str, Any]) -> Timing:
    """Raises ValueError or TypeError for what is no timing of a round."""
    timing = Timing(**row)
    for field in fields(Timing):
        value, kinds = getattr(timing, field.name), (int,) if field.type is int else (int, float)
        if type(value) not in kinds or not isfinite(value) or value < 0:
            raise ValueError(f"{field.name} of a round cannot be {value!r}")
    if timing.batch < 1 or timing.score_s <= 0:
        raise ValueError("a round without sequences or seconds")
    return timing
