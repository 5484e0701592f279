"""Look-ahead tokens that ride in a target's passes, so that the target itself proposes the next round's drafts.

PaSS (Monea et al. 2023, arXiv 2311.13581). A look-ahead token has a learned embedding and no id. Token i, from 1,
stands i positions behind a row and sees the row's text and the look-ahead tokens before it. Its state gives the law of
the token behind its position. The row itself gives the law of the token at position 1.

Where the next round begins is known after the verdict only. So a chain of look-ahead tokens hangs behind the last
committed token and behind each draft, as a tree. The look-ahead tokens behind the last accepted draft make the next
round's drafts. They lie behind all drafts in memory, are never made valid, and so are in no text and no prefix index.
"""

import logging
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cache.protocol import KVCache
from engine.device.staging import Staged, Staging
from engine.kernels.paged_rows import MAX_NODES
from engine.models.decoder import WatchedStates
from engine.models.feeds import Feed, StateReader
from engine.models.pass_attention import PassAttention
from engine.sequence import Sequence
from engine.trees import Parents, depths
from engine.types import DrafterName

log = logging.getLogger(__name__)


class EmbeddingModel(Protocol):
    """A model whose embeddings and layers can be asked apart: a native Decoder."""

    def embed(self, ids: Tensor) -> Tensor: ...
    def forward_embedded(self, x: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LookAheadRows:
    """The look-ahead tokens of a pass, on their way to the device."""

    feeds: tuple[Feed, ...]  # those with look-ahead tokens
    places: tuple[Feed, ...]  # per feed, the rows that its look-ahead tokens hang on, as a feed of its own
    starts: tuple[int, ...]  # … and the position of the first one
    rows: Staged  # [n] int64: the rows of the pass that hold look-ahead tokens
    numbers: Staged  # [n] int64: which look-ahead token each row holds, from 0
    groups: Staged  # [places · L] int64: the rows behind each place; its first row fills it up to L


class LookAhead:
    """The look-ahead tokens of a target's runner. `reader` keeps their states by the position that they hang on."""

    def __init__(
        self, model: EmbeddingModel, embeddings: Tensor, reader: StateReader, drafters: Set[DrafterName]
    ) -> None:
        """model: the target. embeddings [L, hidden]: they enter the first layer as they are. drafters: sequences of
        these drafters look ahead."""
        self._model = model
        self.embeddings = embeddings
        self.reader = reader
        self._drafters = drafters
        self._held: dict[int, int] = {}  # handle → look-ahead tokens behind each position of its latest pass
        self._refused: set[int] = set()  # handles of sequences whose numbers were not finite beside look-ahead tokens

    @property
    def most(self) -> int:
        return self.embeddings.shape[0]

    def held(self, handle: int) -> int:
        """How many look-ahead tokens the sequence's positions have states of."""
        return self._held.get(handle, 0)

    def reserve(
        self,
        cache: KVCache,
        sequence: Sequence,
        k: int,
        tree: Parents | None = None,
        *,
        committed: int = 1,
        most: int = MAX_NODES,
    ) -> tuple[int, int]:
        """Reserve memory for the look-ahead tokens of a pass with `committed` tokens and k drafts, a tree or a chain.

        Returns (look-ahead tokens behind each place, all of them); (0, 0) without memory, and for more than `most`.

        A pass that decodes without drafts has no look-ahead tokens: plain decoding costs what it costs without them.
        """
        refused = sequence.k == 0 or sequence.handle in self._refused
        if sequence.drafter not in self._drafters or refused or not (k or committed > 1):
            return 0, 0
        places = 1 + (len(tree) if tree else min(k, self.most))
        wanted = max(depths(tree)) if tree else k or self._first(sequence)
        ahead = min(wanted, self.most, (MAX_NODES + 1) // places - 1)
        rows = places * ahead
        if not 0 < rows <= most or cache.room(sequence.handle) < committed + k + rows:
            return 0, 0
        cache.reserve(sequence.handle, committed + k + rows)
        return ahead, rows

    def _first(self, sequence: Sequence) -> int:
        """The look-ahead tokens behind a prompt."""
        if sequence.tree:
            return max(depths(sequence.tree))
        return sequence.k or sequence.max_k or self.most

    def plan(self, feeds: Seq[Feed], starts: Seq[int], staging: Staging) -> LookAheadRows | None:
        """Put what a pass over these feeds needs on its way to the device. None: no feed has look-ahead tokens."""
        rows, numbers, groups = list[int](), list[int](), list[int]()
        chosen, places, firsts, end = list[Feed](), list[Feed](), list[int](), 0
        for feed, start in zip(feeds, starts, strict=True):
            first = end + feed.count
            end = first + feed.riders
            if not feed.ahead:
                continue
            rows += range(first, end)
            numbers += list(range(feed.ahead)) * feed.outputs
            for chain in range(first, end, feed.ahead):
                groups += [*range(chain, chain + feed.ahead), *[chain] * (self.most - feed.ahead)]
            chosen.append(feed)
            places.append(Feed(feed.sequence, 1, feed.outputs - 1))
            firsts.append(start + feed.count - feed.outputs)
        if not chosen:
            return None
        if staging.deferred:
            self.reader.prepare(places, firsts, staging)
        staged = staging.ints(rows), staging.ints(numbers), staging.ints(groups)
        return LookAheadRows(tuple(chosen), tuple(places), tuple(firsts), *staged)

    def forward(
        self, planned: LookAheadRows, ids: Tensor, attention: PassAttention, watched: WatchedStates | None = None
    ) -> Tensor:
        """As LanguageModel.forward, of a pass with look-ahead tokens. Their rows may have any id."""
        x = self._model.embed(ids)
        x.index_copy_(0, planned.rows.tensor, self.embeddings[planned.numbers.tensor])
        return self._model.forward_embedded(x, attention, watched)

    @torch.inference_mode()
    def read(self, planned: LookAheadRows, states: Tensor) -> None:
        """Keep the look-ahead tokens' states of a pass, states [N, hidden] of all its rows. Does not raise (R9)."""
        for feed in planned.feeds:
            self._held[feed.sequence.handle] = feed.ahead
        try:
            table = states[planned.groups.tensor].view(-1, self.most * states.shape[1])
        except Exception:
            log.exception("the states of look-ahead tokens could not be kept; nothing is drafted from this pass")
            self._held.clear()
            return
        self.reader.read(planned.places, planned.starts, table)

    def refuse(self, sequence: Sequence) -> None:
        """Let no more look-ahead tokens ride beside this sequence."""
        log.error(
            "request %s: its scores are not finite beside look-ahead tokens; it gets no more", sequence.request_id
        )
        self._refused.add(sequence.handle)

    def imagine(self, sequence: Sequence, depth: int) -> None:
        """Set how many look-ahead tokens the latest pass of a throw-away sequence had."""
        self._held[sequence.handle] = depth

    def forget(self, handle: int) -> None:
        """Idempotent."""
        self._held.pop(handle, None)
        self._refused.discard(handle)

    def audit(self, live: Set[int]) -> None:
        """Raise AssertionError if something is known of other handles than those in `live`."""
        known = self._held.keys() | self._refused
        assert known <= live, f"look-ahead tokens of ended sequences are held: {sorted(known - live)}"


class LookAheadFault(RuntimeError):
    """A round's numbers are not finite, and look-ahead tokens rode in its pass: it is tried again without them."""
