"""Draws on another device than the CPU: what the rows of a round need is put ahead, and one operation draws them."""

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.device.staging import RoundNumbers, Staged
from engine.kernels.race import race
from engine.kernels.truncate import truncate
from engine.sampling.filters import truncates
from engine.sampling.noise import DENSE_NOISE_LIMIT, gumbel_noise
from engine.types import SamplingParams


class DeviceRace:
    """A race of R rows, by one operation that also makes the noise. Keys and positions [R] int64, temperatures [R]
    fp64; a row of temperature 0 has no noise."""

    def __init__(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> None:
        self._numbers = keys, positions, temperatures
        self._vocab_size = vocab_size
        self._blocks = vocab_size > DENSE_NOISE_LIMIT

    def run(self, scores: Tensor, rows: Seq[int]) -> Tensor:
        """As Race.run, for all rows in order."""
        assert len(rows) == len(scores), "all rows run"
        return self.draw(scores)[0]

    def draw(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(ids [R], whether each one's score is finite) of all rows, for scores [R, vocab'] of any float type."""
        keys, positions, temperatures = self._numbers
        return race(scores, keys, positions, temperatures, self._blocks)

    def noise(self, tokens: Tensor) -> Tensor:
        """What the race adds to the scores of tokens [R, m], fp64. It makes the noise of the whole vocabulary."""
        keys, positions, temperatures = self._numbers
        return gumbel_noise(keys, positions, self._vocab_size).gather(1, tokens) * temperatures[:, None]


class DeviceFilters:
    """The filters of R rows. Some of these rows truncate their law."""

    def __init__(self, params: Seq[SamplingParams], numbers: RoundNumbers, name: tuple[int, ...]) -> None:
        """name: tells these rows from others of the round."""
        active = [truncates(p) for p in params]
        pairs = list(zip(params, active, strict=True))
        self._any = any(active)
        self._top_k: Staged | None = None
        if self._any:
            off = 1 << 30  # keeps every token of any vocabulary
            self._top_k = numbers.ints(("top_k", name), lambda: [(p.top_k or off) if on else off for p, on in pairs])
            self._shares = numbers.floats(
                ("shares", name),
                lambda: [
                    *((p.temperature if on else 1.0) for p, on in pairs),
                    *((p.top_p if on else 1.0) for p, on in pairs),
                    *((p.min_p if on else 0.0) for p, on in pairs),
                ],
            )

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [R, vocab], with −inf for the tokens that the filters remove; `logits` itself if there are none.
        Logits of 16 bits become fp32 if there are filters."""
        if self._top_k is None:
            return logits
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        temperatures, top_p, min_p = self._shares.tensor.view(3, -1).unbind(0)
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        return truncate(wide, temperatures, self._top_k.tensor, top_p, min_p)
