"""From logits to the law and to tokens: the one transform (architecture R4), used alike for plain decoding, q and p.

A round's rows are sequence-major: sequence i owns rows offset[i] … offset[i] + k[i], and row (i, j) is about the token
at absolute position len(tokens[i]) + j, given the committed tokens and the first j drafts. Draft j + 1 and the target's
own token are drawn for the same row, hence with the same parameters; under `match` also with the same noise.

The transform, in transformers' order: logit bias, repetition, frequency and presence penalties (penalties.py), no end
tokens before min_tokens, temperature, top-k, top-p, min-p (filters.py).
"""

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from engine.sampling.filters import Filters, apply_temperature, truncated, truncates
from engine.sampling.noise import (
    COIN_STREAM,
    DRAFT_STREAM,
    RESIDUAL_STREAM,
    TARGET_STREAM,
    GumbelRace,
    argmax,
    stream_key,
    uniforms,
)
from engine.sampling.penalties import History, biased, penalised
from engine.sequence import Sequence


class Sampler:
    """A round's sampling parameters. A greedy row costs an argmax; everything else exists for the rows that use it.

    Rows are named by their number in the round, in the order in which their logits are given. The logits' vocabulary
    may be smaller than the target's (a draft's table).
    """

    def __init__(self, sequences: Seq[Sequence], ks: Seq[int], vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._sequences = sequences
        self._vocab_size = vocab_size
        self.offsets = tuple(accumulate((k + 1 for k in ks), initial=0))[:-1]
        self._rows = [(i, j) for i, k in enumerate(ks) for j in range(k + 1)]  # sequence, drafts that the row sees
        self._params = params = [sequences[i].params for i, _ in self._rows]
        self._noisy = [row for row, (i, _) in enumerate(self._rows) if params[row].temperature and sequences[i].coupled]
        self._places = {row: place for place, row in enumerate(self._noisy)}
        self._race: GumbelRace | None = None  # of all noisy rows, once a draft draws
        narrow = {i for i, s in enumerate(sequences) if truncates(s.params)}
        truncated = [row for row, (i, _) in enumerate(self._rows) if i in narrow] if narrow else []
        self._truncated = {row: place for place, row in enumerate(truncated)}
        self._biased = frozenset(row for row, p in enumerate(params) if p.logit_bias)
        self._penalised = frozenset(row for row, p in enumerate(params) if p.penalised)
        self._banned = {
            row: ids
            for row, (i, j) in enumerate(self._rows)
            if params[row].min_tokens and (ids := _banned(sequences[i], j))
        }
        self._filters = Filters.make([params[row] for row in truncated], vocab_size, device) if truncated else None
        self._histories = [self._history(s) for s in sequences] if self._penalised else []

    def scores(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None) -> Tensor:
        """The transform up to the division by the temperature, [R, vocab] → [R, vocab]; −inf for what p does not hold.

        drafts [B, ≥ those the rows see]: the round's drafts so far; None if no row sees any. The logits are left alone.
        """
        if logits.dtype is torch.bfloat16:
            logits = logits.float()
        if at := [i for i, row in enumerate(rows) if row in self._biased]:
            logits = _put(logits, at, biased(_take(logits, at), [self._params[rows[i]] for i in at]))
        if at := [i for i, row in enumerate(rows) if row in self._penalised]:
            logits = _put(logits, at, self._penalise(_take(logits, at), [rows[i] for i in at], drafts))
        if self._banned:
            logits = self._without_banned(logits, rows)
        at = [i for i, row in enumerate(rows) if row in self._truncated]
        if at and self._filters is not None:
            filters = self._filters.pick(self._index([self._truncated[rows[i]] for i in at]))
            logits = _put(logits, at, truncated(_take(logits, at), filters))
        return logits

    def sample(self, scores: Tensor, rows: Seq[int], *, drafting: bool = False) -> Tensor:
        """Token ids [R]: the target's own draws for these rows (stream 0), by `match`. Ties take the lowest id.

        drafting: the target will draw for the same rows, so that their noise is worth making all at once.
        """
        noisy = [i for i, row in enumerate(rows) if row in self._places]
        if not noisy:
            return argmax(scores)
        chosen = [rows[i] for i in noisy]
        if drafting and self._race is None:
            self._race = self._make_race(self._noisy)
        if self._race is None:
            drawn = self._make_race(chosen).run(_take(scores, noisy), range(len(chosen)))
        else:
            drawn = self._race.run(_take(scores, noisy), [self._places[row] for row in chosen])
        return drawn if len(noisy) == len(rows) else _put(argmax(scores), noisy, drawn)

    def laws(self, scores: Tensor, rows: Seq[int]) -> Tensor:
        """The log of the law [R, vocab] that these rows' tokens follow, in fp32 or fp64. They need a temperature."""
        return apply_temperature(scores, self._temperatures(rows)).log_softmax(-1)

    def propose(self, laws: Tensor, rows: Seq[int]) -> Tensor:
        """Token ids [R] drawn from these rows' log-laws [R, vocab] for a draft (stream 1)."""
        which, ahead = zip(*(self._rows[row] for row in rows), strict=True)
        return self._draw(laws, DRAFT_STREAM, which, self._index(ahead))

    def emit(self, weights: Tensor, which: Seq[int], ahead: Tensor) -> Tensor:
        """Token ids [N] drawn from log-weights [N, vocab] to end the round of sequences `which` (stream 3), `ahead` [N]
        positions past their committed text."""
        return self._draw(weights, RESIDUAL_STREAM, which, ahead)

    def _draw(self, weights: Tensor, stream: int, which: Seq[int], ahead: Tensor) -> Tensor:
        ones = torch.ones(len(which), dtype=torch.float64, device=self.device)
        race = GumbelRace(self._keys(stream, which), self._ends(which) + ahead, ones, weights.shape[1])
        return race.run(weights, range(len(which)))

    def coins(self, which: Seq[int], depth: int) -> Tensor:
        """Uniform numbers [N, depth] in [0, 1), fp64, that decide about the drafts of sequences `which`."""
        positions = self._ends(which)[:, None] + torch.arange(depth, device=self.device)
        return uniforms(self._keys(COIN_STREAM, which)[:, None], positions)

    def _keys(self, stream: int, which: Seq[int]) -> Tensor:
        """Keys [N] of a stream; all but the target's own begin anew with every round (R5)."""
        own = stream == TARGET_STREAM
        keys = {i: _key(self._sequences[i], stream, own) for i in set(which)}
        return self._index([keys[i] for i in which])

    def _make_race(self, rows: Seq[int]) -> GumbelRace:
        keys = self._keys(TARGET_STREAM, [self._rows[row][0] for row in rows])
        positions = [len(self._sequences[i].tokens) + j for i, j in (self._rows[row] for row in rows)]
        return GumbelRace(keys, self._index(positions), self._temperatures(rows), self._vocab_size)

    def _ends(self, which: Seq[int]) -> Tensor:
        return self._index([len(self._sequences[i].tokens) for i in which])

    def _temperatures(self, rows: Seq[int]) -> Tensor:
        values = [self._params[row].temperature for row in rows]
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def _history(self, sequence: Sequence) -> History | None:
        """The sequence's own, counted up to its end; made in its first round."""
        if not sequence.params.penalised:
            return None
        if sequence.history is None:
            sequence.history = History(sequence.params, sequence.num_prompt, self._vocab_size, self.device)
        sequence.history.sync(sequence.tokens)
        return sequence.history

    def _penalise(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        places = [self._rows[row] for row in rows]
        histories = [h for h in (self._histories[i] for i, _ in places) if h is not None]
        seen = [(n, i, j) for n, (i, ahead) in enumerate(places) for j in range(ahead)]
        owners, which, columns = self._index([x for triple in seen for x in triple]).view(-1, 3).unbind(1)
        # An illegal draft is rejected, so what is made of the rows behind it does not matter.
        drafted = owners if drafts is None else drafts[which, columns].clamp(0, self._vocab_size - 1)
        return penalised(logits, histories, drafted, owners)

    def _without_banned(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        pairs = [(i, t) for i, row in enumerate(rows) for t in self._banned.get(row, ()) if t < logits.shape[-1]]
        if not pairs:
            return logits
        where, which = self._index([x for pair in pairs for x in pair]).view(-1, 2).unbind(1)
        return logits.index_put((where, which), logits.new_tensor(-torch.inf))

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _banned(sequence: Sequence, ahead: int) -> tuple[int, ...]:
    """Tokens that would end the text too early, if drawn `ahead` positions past its end."""
    early = sequence.num_output + ahead < sequence.params.min_tokens
    return tuple(sorted(sequence.end_ids)) if early else ()


def _key(sequence: Sequence, stream: int, own: bool) -> int:
    return stream_key(sequence.key, stream, None if own else len(sequence.tokens))


def _take(values: Tensor, at: Seq[int]) -> Tensor:
    """values[at], without a copy where that is all of them in order."""
    whole = list(at) == list(range(values.shape[0]))
    return values if whole else values[torch.tensor(at, device=values.device)]


def _put(values: Tensor, at: Seq[int], new: Tensor) -> Tensor:
    """A copy of values with rows `at` replaced; `new` itself where that is all of them."""
    if len(at) == values.shape[0]:
        return new
    return values.index_copy(0, torch.tensor(at, device=values.device), new)
