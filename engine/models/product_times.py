"""The file that keeps what product_choice.py measured, so that only the first start on a machine measures."""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from engine.models.linear import BUCKETS, FORMS, ProductForm
from engine.profiling.kept_files import UNUSABLE, code_digest, replace_file

log = logging.getLogger(__name__)


class TimesFile:
    """Seconds of products, by shape, form and bucket of rows, on one kind of machine in one size of model.

    The size counts because it decides which cache the weights come from.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, model_bytes: int) -> None:
        self._about = {
            "cpu": cpu_model(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "model_mib_below": 2 ** (model_bytes >> 20).bit_length(),
            "rows": list(BUCKETS),
            "code": code_digest(),
        }
        name = hashlib.sha256(json.dumps(self._about).encode()).hexdigest()[:16]
        self.path = folder / f"products-{name}.json"

    def read(self) -> dict[str, dict[ProductForm, list[float]]]:
        """Shape → form → seconds. Empty if there is no file, or if it is broken or of another machine."""
        try:
            content = json.loads(self.path.read_text("utf-8"))
            if content["about"] != self._about:
                raise ValueError("it is of another machine")
            return {shape: _checked(times) for shape, times in content["seconds"].items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except UNUSABLE as error:
            log.warning("%s cannot be used, so products are measured again: %s", self.path, error)
            return {}

    def write(self, seconds: Mapping[str, Mapping[ProductForm, Sequence[float]]]) -> None:
        """Replace the file. A folder that cannot be written is no fault."""
        try:
            replace_file(self.path, json.dumps({"about": self._about, "seconds": seconds}, indent=1))
        except OSError as error:
            log.debug("the times of products are not kept: %s", error)


def _checked(times: Mapping[str, Any]) -> dict[ProductForm, list[float]]:
    """Raises ValueError or TypeError for what is no time of each bucket."""
    checked: dict[ProductForm, list[float]] = {form: [float(s) for s in times[form]] for form in FORMS if form in times}
    for seconds in checked.values():
        if len(seconds) != len(BUCKETS) or not all(isfinite(s) and s > 0 for s in seconds):
            raise ValueError(f"{seconds} are not {len(BUCKETS)} times in seconds")
    return checked


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    fields = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
    parts = [fields.get(name, "").strip() for name in ("model name", "cpu family", "model", "stepping")]
    return " ".join(part for part in parts if part) or platform.processor() or platform.machine()
