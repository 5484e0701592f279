"""From logits to the law and to tokens: the one transform (architecture R4), for plain decoding, q and p alike.

A round's rows are sequence-major: sequence i has rows offset[i] … offset[i] + k[i]. Row (i, j) gives the token at
absolute position len(tokens[i]) + j, after the committed tokens and the first j drafts. Draft j + 1 and the target's
own token are drawn for the same row, so with the same parameters and, under `match`, with the same noise.

The drafts may be a tree (engine/trees.py). Row j + 1 of the sequence then follows node j: it sees the drafts on the
node's path and gives the token after them. All rows of one depth share the noise of their position. That is exact: a
round walks along one path, so it uses the noise of a depth for one row only, and the drafts and coins of smaller depths
alone decide for which.

The transform, in transformers' order: logit bias, repetition, frequency and presence penalties (penalties.py), no token
that the request excludes (exclusions.py), no end tokens before min_tokens, temperature, top-k, top-p, min-p
(filters.py).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import copy
from itertools import accumulate

import torch
from torch import Tensor

from engine.sampling.candidates import NO_TOKENS, CutRows
from engine.sampling.exclusions import Exclusions
from engine.sampling.filters import (
    Filters,
    apply_temperature,
    cut_without_sorting,
    cuts_without_sorting,
    truncated,
    truncated_rows,
    truncates,
)
from engine.sampling.noise import (
    COIN_STREAM,
    DRAFT_STREAM,
    RESIDUAL_STREAM,
    TARGET_STREAM,
    GumbelRace,
    argmax,
    sibling_stream,
    stream_key,
    uniforms,
)
from engine.sampling.penalties import History, biased, penalised
from engine.sampling.siblings import Siblings
from engine.sequence import Sequence
from engine.trees import Parents, depths, path, ranks


class Sampler:
    """Sampling for the rows of one round. A greedy row costs an argmax; only rows that need more pay for more.

    `rows` [R] are row numbers of the round, in the order of the given logits. `indices` are sequences of the round. The
    logits' vocabulary may be smaller than the target's: a draft model's.
    """

    def __init__(self, sequences: Seq[Sequence], ks: Seq[int], vocab_size: int, device: torch.device) -> None:
        self.device = device
        self._sequences = sequences
        self._vocab_size = vocab_size
        self.offsets = tuple(accumulate((k + 1 for k in ks), initial=0))[:-1]
        self._rows = [
            (i, j) for i, k in enumerate(ks) for j in range(k + 1)
        ]  # (sequence, number of drafts that the row sees)
        self._paths: dict[int, list[int]] = {}  # row of a tree's node → columns of the drafts that it sees
        self._latest: tuple[Mapping[int, Parents], Sampler] | None = None  # trees, and the sampler for them
        self._params = params = [sequences[i].params for i, _ in self._rows]
        noisy = [row for row, (i, _) in enumerate(self._rows) if params[row].temperature and sequences[i].coupled]
        self._noisy = dict.fromkeys(noisy)  # in order
        self._race_row = {self._rows[row]: n for n, row in enumerate(noisy)}
        self._race: GumbelRace | None = None  # of all noisy rows, made when the first draft is drawn
        truncating = {i for i, s in enumerate(sequences) if truncates(s.params)}
        truncated_rows = [row for row, (i, _) in enumerate(self._rows) if i in truncating] if truncating else []
        self._filter_row = {row: n for n, row in enumerate(truncated_rows)}
        self._biased = frozenset(row for row, p in enumerate(params) if p.logit_bias)
        self._penalised = frozenset(row for row, p in enumerate(params) if p.penalised)
        self._banned = self._bans()
        self._filters = (
            Filters.make([params[row] for row in truncated_rows], vocab_size, device) if truncated_rows else None
        )
        self._exclusions = {i: self._excluded(s) for i, s in enumerate(sequences) if s.params.excludes}
        self._histories = [self._history(s) for s in sequences] if self._penalised else []

    def on_trees(self, trees: Mapping[int, Parents]) -> "Sampler":
        """The same round's sampler, with the same noise, for drafts that are trees. Other sequences keep their chains.

        trees: index of a sequence → the shape of its draft, of at most its k nodes. The verification gets the sampler
        of a drafter that asked for the same trees, with the noise that it has made.
        """
        if self._latest is not None and self._latest[0] == trees:
            return self._latest[1]
        other = copy(self)
        other._rows, other._paths = list(self._rows), {}
        for i, parents in trees.items():
            for node in range(len(parents)):
                row, columns = self.offsets[i] + 1 + node, path(parents, node)
                other._rows[row], other._paths[row] = (i, len(columns)), columns
        other._banned = other._bans()
        if self._race is None:
            places = dict.fromkeys(other._rows[row] for row in self._noisy)
            other._race_row = {place: n for n, place in enumerate(places)}
        self._latest = dict(trees), other
        return other

    def _bans(self) -> dict[int, tuple[int, ...]]:
        """Row → end tokens that it must not draw."""
        rows = [(row, i, ahead) for row, (i, ahead) in enumerate(self._rows) if self._params[row].min_tokens]
        return {row: ids for row, i, ahead in rows if (ids := _banned(self._sequences[i], ahead))}

    def _seen(self, row: int) -> Seq[int]:
        """Columns of the drafts that the row sees."""
        return self._paths[row] if row in self._paths else range(self._rows[row][1])

    def draw(
        self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None, *, drafting: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(token ids [R], whether each one's score is finite), as sample(scores(…)). On the CPU no scores are made for
        rows that keep few tokens."""
        logits = self._before_filters(logits, rows, drafts)
        if cuts_without_sorting(logits) and all(row in self._filter_row and row in self._noisy for row in rows):
            return self._draw_kept(logits.contiguous(), rows, drafting)
        scores = self._filtered(logits, rows)
        drawn = self.sample(scores, rows, drafting=drafting)
        return drawn, scores.gather(1, drawn[:, None])[:, 0].abs() < torch.inf  # an argmax over NaN picks a NaN

    def _draw_kept(self, logits: Tensor, rows: Seq[int], drafting: bool) -> tuple[Tensor, Tensor]:
        """As draw(), for rows that all have filters and noise. Only rows that keep many tokens get scores."""
        filters = self._filters_of(rows)
        cut = cut_without_sorting(logits, filters)
        race, numbers = self._race_of(rows, drafting)
        drawn, finite = race.run_kept(cut.kept, numbers), torch.ones(len(rows), dtype=torch.bool)
        if rest := sorted([*cut.last_removed, *cut.left]):
            index, place = torch.tensor(rest), {row: n for n, row in enumerate(rest)}
            removed = {place[row]: last for row, last in cut.last_removed.items()}
            found = CutRows(NO_TOKENS, removed, [place[row] for row in cut.left])
            if len(rest) < len(rows):
                logits, filters = logits[index], filters.pick(index)
            scores = truncated_rows(logits, filters, found)
            drawn[index] = race.run(scores, [numbers[n] for n in rest])
            finite[index] = scores.gather(1, drawn[index, None])[:, 0].abs() < torch.inf
        return drawn, finite

    def scores(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None = None) -> Tensor:
        """The transform without the division by the temperature, [R, vocab] → [R, vocab]; −inf for excluded tokens.

        drafts [B, ≥ what the rows see]: the round's drafts so far; None if no row sees any. `logits` is not changed.
        """
        return self._filtered(self._before_filters(logits, rows, drafts), rows)

    def _before_filters(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        if picked := [n for n, row in enumerate(rows) if row in self._biased]:
            logits = _put(logits, picked, biased(_take(logits, picked), [self._params[rows[n]] for n in picked]))
        if picked := [n for n, row in enumerate(rows) if row in self._penalised]:
            logits = _put(logits, picked, self._penalise(_take(logits, picked), [rows[n] for n in picked], drafts))
        if self._exclusions:
            logits = self._without_excluded(logits, rows, drafts)
        if self._banned:
            logits = self._without_banned(logits, rows)
        return logits

    def _filtered(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        picked = [n for n, row in enumerate(rows) if row in self._filter_row]
        if not picked:
            return logits
        filters = self._filters_of([rows[n] for n in picked])
        return _put(logits, picked, truncated(_take(logits, picked), filters))

    def _filters_of(self, rows: Seq[int]) -> Filters:
        assert self._filters is not None
        return self._filters.pick(self._index([self._filter_row[row] for row in rows]))

    def sample(self, scores: Tensor, rows: Seq[int], *, drafting: bool = False) -> Tensor:
        """Token ids [R], drawn for these rows from the target's own stream (stream 0). Ties take the lowest id.

        drafting: the target will draw for the same rows, so the noise of all rows is made and kept.
        """
        noisy = [n for n, row in enumerate(rows) if row in self._noisy]
        if not noisy:
            return argmax(scores)
        race, numbers = self._race_of([rows[n] for n in noisy], drafting)
        drawn = race.run(_take(scores, noisy), numbers)
        return drawn if len(noisy) == len(rows) else _put(argmax(scores), noisy, drawn)

    def _race_of(self, rows: Seq[int], drafting: bool) -> tuple[GumbelRace, Seq[int]]:
        """(a race, the numbers that these noisy rows have in it)."""
        if (drafting or self._paths) and self._race is None:
            self._race = self._make_race(list(self._race_row))
        if self._race is None:
            return self._make_race([self._rows[row] for row in rows]), range(len(rows))
        return self._race, [self._race_row[self._rows[row]] for row in rows]

    def laws(self, scores: Tensor, rows: Seq[int]) -> Tensor:
        """The log of the law [R, vocab] of these rows' tokens, in fp32 or fp64. Their temperature must be positive."""
        return apply_temperature(scores, self._temperatures(rows)).log_softmax(-1)

    def propose(self, laws: Tensor, rows: Seq[int], rank: int = 0) -> Tensor:
        """Draft token ids [R], drawn from these rows' log-laws [R, vocab] (stream 1). Draws of other ranks for the same
        rows are independent."""
        return self._draft_race(rows, laws, rank).run(laws, range(len(rows)))

    def _draft_race(self, rows: Seq[int], laws: Tensor, rank: int = 0) -> GumbelRace:
        indices, ahead = zip(*(self._rows[row] for row in rows), strict=True)
        return self._race_in(sibling_stream(DRAFT_STREAM, rank), indices, self._index(ahead), laws.shape[1])

    def sample_top(self, scores: Tensor, rows: Seq[int], width: int) -> Tensor:
        """Siblings [R, width]: the best tokens of the race in which sample() draws the first of them; at temperature 0
        the likeliest tokens.

        A row with fewer tokens repeats its first one, of which no verifier accepts the second.
        """
        siblings, left = Siblings(), scores.clone()
        for _ in range(width):
            siblings.add(left, self.sample(left, rows, drafting=True))
        return siblings.tokens()

    def propose_top(self, laws: Tensor, rows: Seq[int], width: int) -> tuple[Tensor, Tensor]:
        """(siblings [R, width], the log-law [R, width, vocab] of each one given those before it), drawn from these
        rows' log-laws [R, vocab] without replacement (stream 1).

        The best tokens of a Gumbel race are draws without replacement (Kool et al. 2019, arXiv 1903.06059), and
        propose() draws the first of them. A row with fewer tokens repeats its first one, with a one-hot law.
        """
        siblings, left, race = Siblings(), laws.clone(), self._draft_race(rows, laws)
        given = []
        for rank in range(width):
            law = left.log_softmax(-1) if rank else laws
            found = siblings.add(left, race.run(left, range(len(rows))))
            one_hot = torch.full_like(law, -torch.inf).scatter_(1, siblings.first[:, None], 0.0)
            given.append(torch.where(found[:, None], law, one_hot) if rank else law)
        return siblings.tokens(), torch.stack(given, 1)

    def emit(self, weights: Tensor, indices: Seq[int], ahead: Tensor) -> Tensor:
        """The recovered or bonus tokens [N] of these sequences, drawn from log-weights [N, vocab] (stream 3) at `ahead`
        [N] positions past their committed text."""
        return self._race_in(RESIDUAL_STREAM, indices, ahead, weights.shape[1]).run(weights, range(len(indices)))

    def _race_in(self, stream: int, indices: Seq[int], ahead: Tensor, vocab_size: int) -> GumbelRace:
        ones = torch.ones(len(indices), dtype=torch.float64, device=self.device)
        return GumbelRace(self._keys(stream, indices), self._ends(indices) + ahead, ones, vocab_size)

    def coins(self, indices: Seq[int], depth: int) -> Tensor:
        """Uniform numbers [N, depth] in [0, 1), fp64, that decide about the drafts of these sequences."""
        positions = self._ends(indices)[:, None] + torch.arange(depth, device=self.device)
        return uniforms(self._keys(COIN_STREAM, indices)[:, None], positions)

    def tree_coins(self, indices: Seq[int], trees: Seq[Parents]) -> Tensor:
        """As coins(), [N, largest number of nodes] for the nodes of these trees. A node's position and rank give its
        coin, and a chain gets the coins of coins()."""
        width = max(map(len, trees))
        keys, positions = [], []
        for i, parents in zip(indices, trees, strict=True):
            sequence, rest = self._sequences[i], [0] * (width - len(parents))
            streams = [sibling_stream(COIN_STREAM, rank) for rank in ranks(parents)]
            by_stream = {stream: _key(sequence, stream, True) for stream in set(streams)}
            keys.append([*(by_stream[stream] for stream in streams), *rest])
            positions.append([*(len(sequence.tokens) + depth - 1 for depth in depths(parents)), *rest])
        table = torch.tensor([keys, positions], dtype=torch.int64, device=self.device)
        return uniforms(table[0], table[1])

    def _keys(self, stream: int, indices: Seq[int]) -> Tensor:
        """Keys [N] of a stream. All but the target's stream have new keys in every round (R5)."""
        per_round = stream != TARGET_STREAM
        keys = {i: _key(self._sequences[i], stream, per_round) for i in set(indices)}
        return self._index([keys[i] for i in indices])

    def _make_race(self, places: Seq[tuple[int, int]]) -> GumbelRace:
        """The race of (sequence, number of drafts that are seen) pairs."""
        keys = self._keys(TARGET_STREAM, [i for i, _ in places])
        positions = [len(self._sequences[i].tokens) + ahead for i, ahead in places]
        temperatures = self._column([self._sequences[i].params.temperature for i, _ in places])
        return GumbelRace(keys, self._index(positions), temperatures, self._vocab_size)

    def _ends(self, indices: Seq[int]) -> Tensor:
        return self._index([len(self._sequences[i].tokens) for i in indices])

    def _temperatures(self, rows: Seq[int]) -> Tensor:
        return self._column([self._params[row].temperature for row in rows])

    def _column(self, values: Seq[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)

    def _history(self, sequence: Sequence) -> History | None:
        """The sequence's token counts, up to its end; made in its first round. None if it has no penalties."""
        if not sequence.params.penalised:
            return None
        if sequence.history is None:
            sequence.history = History(sequence.params, sequence.num_prompt, self._vocab_size, self.device)
        sequence.history.sync(sequence.tokens)
        return sequence.history

    def _penalise(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        numbered = [self._rows[row] for row in rows]
        histories = [h for h in (self._histories[i] for i, _ in numbered) if h is not None]
        seen = [(n, i, j) for n, (i, _) in enumerate(numbered) for j in self._seen(rows[n])]
        owners, sequences, columns = self._index([x for triple in seen for x in triple]).view(-1, 3).unbind(1)
        # An illegal draft is rejected, so the rows behind it do not matter.
        drafted = owners if drafts is None else drafts[sequences, columns].clamp(0, self._vocab_size - 1)
        return penalised(logits, histories, drafted, owners)

    def _excluded(self, sequence: Sequence) -> Exclusions:
        """The sequence's exclusions, up to its end; made in its first round."""
        if sequence.exclusions is None:
            sequence.exclusions = Exclusions(sequence.params, self._vocab_size, self.device)
        return sequence.exclusions

    def _without_excluded(self, logits: Tensor, rows: Seq[int], drafts: Tensor | None) -> Tensor:
        logits = logits.clone()
        for i, exclusions in self._exclusions.items():
            picked = [n for n, row in enumerate(rows) if self._rows[row][0] == i]
            if not picked:
                continue
            sequence, columns = self._sequences[i], [self._seen(rows[n]) for n in picked]
            tail = sequence.tokens[max(sequence.num_prompt, len(sequence.tokens) - exclusions.width) :]
            index = self._index(picked)
            logits[index] = exclusions.apply(logits[index], tail, None if drafts is None else drafts[i], columns)
        return logits

    def _without_banned(self, logits: Tensor, rows: Seq[int]) -> Tensor:
        pairs = [(i, t) for i, row in enumerate(rows) for t in self._banned.get(row, ()) if t < logits.shape[-1]]
        if not pairs:
            return logits
        row, token = self._index([x for pair in pairs for x in pair]).view(-1, 2).unbind(1)
        return logits.index_put((row, token), logits.new_tensor(-torch.inf))

    def _index(self, values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def _banned(sequence: Sequence, ahead: int) -> tuple[int, ...]:
    """Tokens that would end the text before min_tokens, if drawn `ahead` positions past its end."""
    early = sequence.num_output + ahead < sequence.params.min_tokens
    return tuple(sorted(sequence.end_ids)) if early else ()


def _key(sequence: Sequence, stream: int, per_round: bool) -> int:
    return stream_key(sequence.key, stream, len(sequence.tokens) if per_round else None)


def _take(values: Tensor, rows: Seq[int]) -> Tensor:
    """values[rows]; `values` itself if these are all its rows in order."""
    whole = list(rows) == list(range(values.shape[0]))
    return values if whole else values[torch.tensor(rows, device=values.device)]


def _put(values: Tensor, rows: Seq[int], new: Tensor) -> Tensor:
    """A copy of values with these rows replaced; `new` itself if these are all rows."""
    if len(rows) == values.shape[0]:
        return new
    return values.index_copy(0, torch.tensor(rows, device=values.device), new)
