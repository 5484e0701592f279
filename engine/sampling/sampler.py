"""Turns logits into the law and into tokens: the one transform (architecture R4), for plain decoding, q and p alike.

A round's rows are sequence-major: sequence i has rows offset[i] … offset[i] + k[i]. Row (i, j) gives the token at
absolute position len(tokens[i]) + j, after the committed tokens and the first j drafts. Draft j + 1 and the target's
own token are drawn for the same row, so with the same parameters and, under `match`, with the same noise.

The drafts may be a tree (engine/trees.py). Row j + 1 of the sequence then follows node j: it sees the drafts on the
node's path and gives the token after them. All rows of one depth share the noise of their position. That is exact: a
round walks along one path, so it uses the noise of a depth for one row only, and the drafts and coins of smaller depths
alone decide for which.

The transform, in transformers' order: what changes single logits (adjustments.py, device_adjustments.py), temperature,
top-k, top-p, min-p (filters.py).

On another device than the CPU, what draws need is put ahead by the prepare… methods, so that a round sends it in one
copy (device/staging.py).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import copy
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.transfer import index_tensor
from engine.device.staging import RoundNumbers, Staged, Staging
from engine.kernels.laws import log_law
from engine.sampling.adjustments import Adjustments, RoundRows, put, take
from engine.sampling.candidates import Cuts
from engine.sampling.device_adjustments import DeviceAdjustments
from engine.sampling.device_draws import DeviceFilters, DeviceRace
from engine.sampling.filters import (
    Filters,
    cuts_of,
    cuts_without_sorting,
    truncated,
    truncates,
)
from engine.sampling.kept_draws import draw_kept
from engine.sampling.noise import (
    COIN_STREAM,
    DRAFT_STREAM,
    RESIDUAL_STREAM,
    GumbelRace,
    Race,
    are_finite,
    argmax,
    sibling_stream,
    stream_key,
    target_key,
    uniforms,
)
from engine.sampling.siblings import Siblings
from engine.sequence import Sequence
from engine.trees import Parents, depths, path, ranks


class Sampler:
    """Sampling for the rows of one round. A greedy row costs an argmax; only rows that need more pay for more.

    `rows` [R] are row numbers of the round, in the order of the given logits. `indices` are sequences of the round. The
    logits' vocabulary may be smaller than the target's: a draft model's.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        ks: Seq[int],
        vocab_size: int,
        device: torch.device,
        staging: Staging | None = None,
    ) -> None:
        """staging: what takes numbers to the device; None: one of its own."""
        self.device = device
        self.numbers = RoundNumbers(Staging(device) if staging is None else staging)
        self._sequences = sequences
        self._vocab_size = vocab_size
        self.offsets = tuple(accumulate((k + 1 for k in ks), initial=0))[:-1]
        self._rows = RoundRows([(i, j) for i, k in enumerate(ks) for j in range(k + 1)])
        self._latest: tuple[Mapping[int, Parents], Sampler] | None = None  # trees, and the sampler for them
        self._params = params = [sequences[i].params for i, _ in self._rows.places]
        places = self._rows.places
        noisy = [row for row, (i, _) in enumerate(places) if params[row].temperature and sequences[i].coupled]
        self._noisy = dict.fromkeys(noisy)  # in order
        self._race_row = {places[row]: n for n, row in enumerate(noisy)}
        self._race: GumbelRace | None = None  # of all noisy rows, made when the first draft is drawn
        truncating = {i for i, s in enumerate(sequences) if truncates(s.params)}
        truncated_rows = [row for row, (i, _) in enumerate(places) if i in truncating] if truncating else []
        self._filter_row = {row: n for n, row in enumerate(truncated_rows)}
        self._filters: Filters | None = None
        self._cuts: Cuts | None = None  # the filters' cuts, made when they are needed
        if truncated_rows and not self.numbers.staging.deferred:
            self._filters = Filters.make([params[row] for row in truncated_rows], vocab_size, device)
        self._adjust()

    @property
    def adjusts(self) -> bool:
        """Whether any row of the round is adjusted on the device, and so sees the drafts before it."""
        return self._on_device is not None and self._on_device.touches(range(len(self._params)))

    def take_in_texts(self) -> None:
        """Record new parts of texts and biases on the device. This is not captured."""
        if self._on_device:
            self._on_device.take_in()

    def _adjust(self) -> None:
        """Make what adjusts the rows, on the device or on the CPU."""
        kind = DeviceAdjustments if self.numbers.staging.deferred else Adjustments
        self._adjustments = adjustments = kind(self._sequences, self._rows, self._vocab_size, self.numbers)
        self._on_device = adjustments if isinstance(adjustments, DeviceAdjustments) else None

    def on_trees(self, trees: Mapping[int, Parents], like: "Sampler | None" = None) -> "Sampler":
        """The same round's sampler, with the same noise, for drafts that are trees. Other sequences keep their chains.

        trees: index of a sequence → its draft's shape, of at most its k nodes. The verification gets the sampler of a
        drafter that asked for the same trees, with its noise. like: one for deeper trees, whose noise is taken."""
        if self._latest is not None and self._latest[0] == trees:
            return self._latest[1]
        other = copy(like or self)
        other._rows = rows = RoundRows(list(self._rows.places), {})
        other.numbers, other._latest = RoundNumbers(self.numbers.staging), None
        for i, parents in trees.items():
            for node in range(len(parents)):
                row, columns = self.offsets[i] + 1 + node, path(parents, node)
                rows.places[row], rows.paths[row] = (i, len(columns)), columns
        other._adjust()
        if other._race is None:
            other._race_row = {place: n for n, place in enumerate(dict.fromkeys(rows.places[r] for r in self._noisy))}
        self._latest = dict(trees), other
        return other

    def prepare(self, rows: Seq[int]) -> None:
        """Put what draws for these rows need on its way to the device, with all else that waits. Without it the first
        draw does, in a copy of its own."""
        if self._on_device:
            self._on_device.prepare(rows)
            self._device_filters(rows)
            self._race_numbers(rows)

    def draw(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(token ids [R], whether each one's score is finite), as sample(scores(…)). On the CPU no scores are made for
        rows that keep few tokens."""
        if self._on_device:
            return self._device_race(rows).draw(self.scores(logits, rows, drafts))
        logits = self._before_filters(logits, rows, drafts)
        if self._keeps_few(logits, rows):
            return self._draw_kept(logits, rows, drafting=False)
        scores = self._filtered(logits, rows)
        drawn = self.sample(scores, rows)
        return drawn, are_finite(scores, drawn)  # an argmax over NaN picks a NaN

    def draw_drafts(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None) -> Tensor:
        """The tokens of draw(). The target will draw for the same rows, so the noise of all rows is made and kept."""
        if self._on_device:
            return self.draw(logits, rows, drafts)[0]
        logits = self._before_filters(logits, rows, drafts)
        if self._keeps_few(logits, rows):
            return self._draw_kept(logits, rows, drafting=True)[0]
        return self.sample(self._filtered(logits, rows), rows, drafting=True)

    def _keeps_few(self, logits: Tensor, rows: Seq[int]) -> bool:
        return all(row in self._filter_row and row in self._noisy for row in rows) and cuts_without_sorting(logits)

    def _draw_kept(self, logits: Tensor, rows: Seq[int], *, drafting: bool) -> tuple[Tensor, Tensor]:
        """As draw(), for rows that all have filters and noise."""
        if self._cuts is None and self._filters is not None:
            self._cuts = cuts_of(self._filters, self._vocab_size)
        assert self._cuts is not None
        cuts = self._cuts.pick([self._filter_row[row] for row in rows])
        return draw_kept(logits, cuts, lambda: self._filters_of(rows), *self._race_of(rows, drafting), self.numbers)

    def scores(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None) -> Tensor:
        """The transform without the division by the temperature, [R, vocab] → [R, vocab]; −inf for excluded tokens.

        drafts [B, ≥ what the rows see]: the round's drafts so far; None if no row sees any. `logits` is not changed. On
        the CPU scores are in fp32 or fp64. The operations of other devices also take scores in 16 bits."""
        if self._on_device and not self._on_device.touches(rows):
            return self._device_filters(rows).cut(logits)
        return self._filtered(self._before_filters(logits, rows, drafts), rows)

    def _before_filters(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return self._adjustments.apply(logits, rows, drafts)

    def _filtered(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        if self._on_device:
            return self._device_filters(rows).cut(logits)
        picked = [n for n, row in enumerate(rows) if row in self._filter_row]
        if not picked:
            return logits
        filters = self._filters_of([rows[n] for n in picked])
        return put(logits, picked, truncated(take(logits, picked, self.numbers), filters), self.numbers)

    def _filters_of(self, rows: Seq[int]) -> Filters:
        assert self._filters is not None
        return self._filters.pick(index_tensor([self._filter_row[row] for row in rows], self.device))

    def _device_filters(self, rows: Seq[int]) -> DeviceFilters:
        return DeviceFilters([self._params[row] for row in rows if self._filter_row], self.numbers, tuple(rows))

    def _device_race(self, rows: Seq[int]) -> DeviceRace:
        """The race of these rows. Rows of the target's own stream have noise in it."""
        keys_and_positions, temperatures = self._race_numbers(rows)
        keys, positions = keys_and_positions.tensor.view(2, -1).unbind(0)
        return DeviceRace(keys, positions, temperatures.tensor, self._vocab_size)

    def _race_numbers(self, rows: Seq[int]) -> tuple[Staged, Staged]:
        """(keys, then positions, of these rows; temperatures, 0 for a row without noise)."""

        def keys_and_positions() -> list[int]:
            places = [self._rows.places[row] for row in rows]
            keys = {i: target_key(self._sequences[i].key) for i in {i for i, _ in places}}
            return [*(keys[i] for i, _ in places), *(len(self._sequences[i].tokens) + ahead for i, ahead in places)]

        name = tuple(rows)
        temperatures = (self._params[row].temperature if row in self._noisy else 0.0 for row in rows)
        make = keys_and_positions if self._noisy else lambda: [0] * (2 * len(rows))  # without noise nobody reads them
        return self.numbers.ints(("race", name), make), self.numbers.floats(("noise", name), lambda: list(temperatures))

    def sample(self, scores: Tensor, rows: Seq[int], *, drafting: bool = False) -> Tensor:
        """Token ids [R], drawn for these rows from the target's own stream (stream 0). Ties take the lowest id.
        drafting: the target will draw for the same rows, so the noise of all rows is made and kept."""
        if self._on_device:
            return self._device_race(rows).draw(scores)[0]
        noisy = [n for n, row in enumerate(rows) if row in self._noisy]
        if not noisy:
            return argmax(scores)
        race, numbers = self._race_of([rows[n] for n in noisy], drafting)
        drawn = race.run(take(scores, noisy, self.numbers), numbers)
        return drawn if len(noisy) == len(rows) else put(argmax(scores), noisy, drawn, self.numbers)

    def _race_of(self, rows: Seq[int], drafting: bool) -> tuple[GumbelRace, Seq[int]]:
        """(a race, the numbers that these noisy rows have in it)."""
        if (drafting or self._rows.paths) and self._race is None:
            self._race = self._make_race(list(self._race_row))
        if self._race is None:
            return self._make_race([self._rows.places[row] for row in rows]), range(len(rows))
        return self._race, [self._race_row[self._rows.places[row]] for row in rows]

    def noise_keys(self, rows: Seq[int]) -> NDArray[np.uint64] | None:
        """The key [R] of the noise of each token that these rows draw, on a CPU; 0 for a row without noise. None: they
        draw from more than logits and such noise. The target will draw for the same rows."""
        if self._on_device or self._filter_row.keys() & rows or self._adjustments.touches(rows):
            return None
        keys, noisy = np.zeros(len(rows), np.uint64), [n for n, row in enumerate(rows) if row in self._noisy]
        if noisy:
            race, numbers = self._race_of([rows[n] for n in noisy], drafting=True)
            if (made := race.keys(numbers)) is None:
                return None
            keys[noisy] = made
        return keys

    def laws(self, scores: Tensor, rows: Seq[int]) -> Tensor:
        """The log of the law [R, vocab] of these rows' tokens, in fp32 or fp64. Their temperature must be positive."""
        return log_law(scores, self._staged_temperatures(rows).tensor)

    def propose(self, laws: Tensor, rows: Seq[int], rank: int = 0) -> Tensor:
        """Draft token ids [R], drawn from these rows' log-laws [R, vocab] (stream 1). Draws of other ranks for the same
        rows are independent."""
        return self._draft_race(rows, laws, rank).run(laws, range(len(rows)))

    def _draft_race(self, rows: Seq[int], laws: Tensor, rank: int = 0) -> Race:
        keys, positions, temperatures = self._draft_numbers(rows, rank)
        return self._race_with(keys.tensor, positions.tensor, temperatures.tensor, laws.shape[1])

    def _draft_numbers(self, rows: Seq[int], rank: int) -> tuple[Staged, Staged, Staged]:
        """(keys, positions, temperatures, which are 1) of draws from the drafts' own laws."""
        places, name = [self._rows.places[row] for row in rows], (rank, tuple(rows))
        return (
            self._keys(sibling_stream(DRAFT_STREAM, rank), [i for i, _ in places]),
            self.numbers.ints(("drafts", *name), lambda: [len(self._sequences[i].tokens) + j for i, j in places]),
            self._ones(len(places)),
        )

    def sample_top(self, scores: Tensor, rows: Seq[int], width: int) -> Siblings:
        """`width` siblings: the best tokens of the race in which sample() draws the first of them; at temperature 0 the
        likeliest tokens. A row with fewer tokens repeats its first one. No verifier accepts the repeated one."""
        return Siblings.draw(scores, width, lambda left: self.sample(left, rows, drafting=True))

    def noise(self, tokens: Tensor, rows: Seq[int]) -> Tensor:
        """What sample_top() adds to the scores of tokens [R, n]."""
        if self._on_device:
            return self._device_race(rows).noise(tokens)
        noisy = [n for n, row in enumerate(rows) if row in self._noisy]
        if not noisy:
            return torch.zeros(tokens.shape, dtype=torch.float64)
        race, numbers = self._race_of([rows[n] for n in noisy], drafting=True)
        noise = race.noise(take(tokens, noisy, self.numbers), numbers)
        return put(noise.new_zeros(tokens.shape), noisy, noise, self.numbers)

    def propose_top(self, laws: Tensor, rows: Seq[int], width: int) -> tuple[Tensor, Tensor]:
        """(siblings [R, width], the log-law [R, width, vocab] of each one given those before it), drawn from these
        rows' log-laws [R, vocab] without replacement (stream 1).

        The best tokens of a Gumbel race are draws without replacement (Kool et al. 2019, arXiv 1903.06059), and
        propose() draws the first of them. A row with fewer tokens repeats its first one, with a one-hot law.
        """
        race = self._draft_race(rows, laws)
        return Siblings.draw_with_laws(laws, width, lambda left: race.run(left, range(len(rows))))

    def emit(self, weights: Tensor, indices: Seq[int], ahead: Tensor) -> Tensor:
        """The recovered or bonus tokens [N] of these sequences, drawn from log-weights [N, vocab] (stream 3) at `ahead`
        [N] positions past their committed text."""
        ones = self._ones(len(indices))
        keys, positions = self._keys(RESIDUAL_STREAM, indices).tensor, self._ends(indices).tensor + ahead
        return self._race_with(keys, positions, ones.tensor, weights.shape[1]).run(weights, range(len(indices)))

    def prepare_emit(self, indices: Seq[int]) -> None:
        """As prepare(), for coin_numbers() and emit()."""
        if self._on_device:
            self._keys(RESIDUAL_STREAM, indices)
            self._keys(COIN_STREAM, indices)
            self._ends(indices)
            self._ones(len(indices))

    def prepare_laws(self, rows: Seq[int]) -> None:
        """As prepare(), for laws()."""
        if self._on_device:
            self._on_device.prepare(rows)
            self._device_filters(rows)
            self._staged_temperatures(rows)

    def prepare_proposals(self, rows: Seq[int], rank: int = 0) -> None:
        """As prepare(), for propose() from the laws of these rows."""
        if self._on_device:
            self.prepare_laws(rows)
            self._draft_numbers(rows, rank)

    def _race_with(self, keys: Tensor, positions: Tensor, temperatures: Tensor, vocab_size: int) -> Race:
        kind = DeviceRace if self._on_device else GumbelRace
        return kind(keys, positions, temperatures, vocab_size)

    def coin_numbers(self, indices: Seq[int]) -> tuple[Tensor, Tensor]:
        """(keys, positions) [N] of the coins that decide about the first drafts of these sequences. Those of the next
        drafts are at the next positions."""
        return self._keys(COIN_STREAM, indices).tensor, self._ends(indices).tensor

    def tree_coins(self, indices: Seq[int], trees: Seq[Parents]) -> Tensor:
        """Uniform numbers [N, largest number of nodes] in [0, 1), fp64, that decide about the nodes of these trees. A
        node's position and rank give its coin, and a chain gets the coins of coin_numbers()."""
        return uniforms(*self.tree_coin_numbers(indices, trees))

    def tree_coin_numbers(self, indices: Seq[int], trees: Seq[Parents]) -> tuple[Tensor, Tensor]:
        """(keys, positions) [N, largest number of nodes] that tree_coins() are made of."""
        keys, positions = self._staged_tree_coins(indices, trees).tensor.view(2, len(trees), -1).unbind(0)
        return keys, positions

    def prepare_tree_coins(self, indices: Seq[int], trees: Seq[Parents]) -> None:
        """As prepare(), for tree_coins()."""
        if self._on_device:
            self._staged_tree_coins(indices, trees)

    def _staged_tree_coins(self, indices: Seq[int], trees: Seq[Parents]) -> Staged:
        """Keys, then positions, of the coins of all nodes."""

        def keys_and_positions() -> list[int]:
            width = max(map(len, trees))
            keys, positions = list[int](), list[int]()
            for i, parents in zip(indices, trees, strict=True):
                sequence, rest = self._sequences[i], [0] * (width - len(parents))
                streams = [sibling_stream(COIN_STREAM, rank) for rank in ranks(parents)]
                by_stream = {s: stream_key(sequence.key, s, len(sequence.tokens)) for s in set(streams)}
                keys += [*(by_stream[stream] for stream in streams), *rest]
                positions += [*(len(sequence.tokens) + depth - 1 for depth in depths(parents)), *rest]
            return keys + positions

        return self.numbers.ints(("coins", tuple(indices), tuple(trees)), keys_and_positions)

    def _keys(self, stream: int, indices: Seq[int]) -> Staged:
        """Keys [N] of a stream that has new keys in every round (R5)."""

        def keys() -> list[int]:
            sequences = {i: self._sequences[i] for i in set(indices)}
            by_sequence = {i: stream_key(s.key, stream, len(s.tokens)) for i, s in sequences.items()}
            return [by_sequence[i] for i in indices]

        return self.numbers.ints(("keys", stream, tuple(indices)), keys)

    def _make_race(self, places: Seq[tuple[int, int]]) -> GumbelRace:
        """The race of (sequence, number of drafts that are seen) pairs."""
        sequences = self._sequences
        keys = index_tensor([target_key(sequences[i].key) for i, _ in places], self.device)
        positions = index_tensor([len(sequences[i].tokens) + ahead for i, ahead in places], self.device)
        temperatures = torch.from_numpy(np.array([sequences[i].params.temperature for i, _ in places], np.float64))
        return GumbelRace(keys, positions, temperatures, self._vocab_size)

    def _ends(self, indices: Seq[int]) -> Staged:
        return self.numbers.ints(("ends", tuple(indices)), lambda: [len(self._sequences[i].tokens) for i in indices])

    def _staged_temperatures(self, rows: Seq[int]) -> Staged:
        name = "temperatures", tuple(rows)
        return self.numbers.floats(name, lambda: [self._params[row].temperature or 1.0 for row in rows])

    def _ones(self, count: int) -> Staged:
        return self.numbers.floats(("ones", count), lambda: [1.0] * count)
