"""A device whose work is done later than it is asked for, as a GPU's is: for tests of what is timed.

Models compute on the CPU as ever. Beside them two clocks run: the host's, which calls do not move, and the device's,
which each forward moves by its cost. A download lets the host wait for the device.
"""

from typing import Any

import pytest
import torch

import engine.round as round_module
from engine.device import round_clock
from engine.models.decoder import LanguageModel
from engine.models.runner import Runner
from engine.verification import verify


class LateDevice:
    def __init__(self) -> None:
        self.now_ns = 0  # by the host's clock
        self.idle_ns = 0  # when all that was asked for is done
        self.downloads = 0
        self.waits = 0  # for the device, without a download

    def launch(self, cost_ns: int) -> None:
        self.idle_ns = max(self.idle_ns, self.now_ns) + cost_ns

    def download(self) -> None:
        self.downloads += 1
        self.now_ns = max(self.idle_ns, self.now_ns)

    def synchronize(self) -> None:
        self.waits += 1
        self.now_ns = max(self.idle_ns, self.now_ns)

    def run(self, runner: Runner, cost_ns: int) -> None:
        """Each forward of the runner takes so long on the device."""
        decoder: Any = LateDecoder(runner.decoder, self, cost_ns)
        runner.decoder = decoder

    def install(self, patch: pytest.MonkeyPatch, *, events: bool = True) -> None:
        """Let rounds be timed as on CUDA. events: False for the control, a host that takes queued work for done."""

        def downloading(*arguments: Any) -> Any:
            verdict = verify(*arguments)
            if verdict.accepted:
                self.download()
            return verdict

        patch.setattr(round_module, "verify", downloading)
        patch.setattr(round_clock, "perf_counter_ns", lambda: self.now_ns)
        patch.setattr(round_clock, "QUEUES", ("cpu",) if events else ())
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self)


class LateDecoder:
    def __init__(self, decoder: LanguageModel, device: LateDevice, cost_ns: int) -> None:
        self._decoder = decoder
        self._device = device
        self._cost_ns = cost_ns

    def forward(self, *arguments: Any) -> torch.Tensor:
        self._device.launch(self._cost_ns)
        return self._decoder.forward(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class Event:
    """A point in the device's work. As with CUDA's, asking for a time before the device has come there is an error."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._at_ns = 0

    def record(self, stream: LateDevice) -> None:
        self._at_ns = max(stream.idle_ns, stream.now_ns)

    def elapsed_time(self, end: "Event") -> float:
        if max(self._at_ns, end._at_ns) > self._device.now_ns:
            raise RuntimeError("device not ready")
        return (end._at_ns - self._at_ns) / 1e6
