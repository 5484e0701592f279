"""What rounds cost on this machine: real ones, over throw-away sequences, before the first request.

Each kind of round is run several times in a row, as rounds follow each other while serving: after a round of another
size the weights that a pass needs lie farther away (16 sequences of the demo pair without drafts: 3.1 ms in a row, 5.5
after rounds with 8 drafts each). All kinds come in turn and then all again, so that a phase in which the machine is
slow hits them alike; what is told is the lower quartile. After each round both caches go back to where they were, and
in the end nothing is left of it: no slot is held, no block can be found, nothing is published.
"""

import logging
import random
from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import ClassVar

import torch

from cache.protocol import CacheFull
from engine.detokenize import Detokenizer, TextStream
from engine.drafters.base import NO_OFFER, Draft, DraftBatch, Drafter, Offer
from engine.drafters.chain import ChainedDrafter
from engine.drafters.model import ModelDrafter
from engine.models.runner import Feed, Runner
from engine.round import Outcome, run_round
from engine.sampling.acceptance import Verdict
from engine.scheduler import Plan, Slice
from engine.sequence import Sequence
from engine.types import RequestRecord, SamplingParams
from policies.observation import Timing

log = logging.getLogger(__name__)

LENGTH = 128  # mean tokens of the sequences, where the context and the memory allow
DEPTHS = (0, 1, 2, 4, 8, 16)
RAGGED = (4, 0, 2, 1, 3, 0, 4, 2)  # drafts of the sequences in a round that tells what uneven ones cost, over and over
BEHIND = 32  # tokens of one sequence that the draft model reads first, in a round that tells what such a gap costs
SWEEPS = 2  # over all kinds of rounds
RUNS = 4  # in a row of each kind; the first one warms up, and counts only where there is no other
SPREAD = 37  # of 64ths: neighbours differ in length, the first few as much as all
SALT = "profiling"


def profile(target: Runner, drafter: Drafter, max_running: int, depth: int, budget_s: float) -> list[Timing]:
    """Timings of rounds of 1, 2, 4, … max_running sequences with 0, 1, 2, 4, … depth drafts each, without prompts and
    without the host's work around them. Nobody else may hold memory meanwhile.

    Where there is no draft model, something that costs nothing drafts. What takes longer than the budget is left out,
    the largest batches first, and never a plain round of one sequence; so are batches that there is no memory for, and
    rounds in which the drafter failed or had no memory. The budget covers the reading of the sequences too.
    """
    models = [part for part in _parts(drafter) if isinstance(part, ModelDrafter)]
    deadline = perf_counter() + budget_s
    with torch.inference_mode():
        bench = ProfileBench(target, drafter if models else ConstantDrafter(target.device), [m.runner for m in models])
        try:
            bench.fill(max_running, depth, deadline)
            kinds = [
                kind for batch in _batches(len(bench.sequences)) for kind in _kinds(batch, bench.depth, bool(models))
            ]
            timings = _measure(bench, kinds, deadline)
        finally:
            bench.clear(drafter)
    return timings


@dataclass(frozen=True, slots=True)
class RoundShape:
    """A round to be measured."""

    ks: tuple[int, ...]  # by sequence
    behind: int = 1  # tokens that the draft model has yet to read of the first sequence; of the others it is one


@dataclass(slots=True)
class Samples:
    """What rounds of one kind took."""

    forwards: int
    read: int
    draft_s: list[float] = field(default_factory=list)
    score_s: list[float] = field(default_factory=list)

    def timing(self, kind: RoundShape) -> Timing:
        return Timing(
            batch=len(kind.ks),
            drafts=sum(kind.ks),
            depth=max(kind.ks),
            prefill=0,
            forwards=self.forwards,
            read=self.read,
            draft_s=_quartile(self.draft_s),
            score_s=_quartile(self.score_s),
            rest_s=0.0,
        )


class ProfileBench:
    """Throw-away sequences that both models have read, and rounds over them that leave no trace."""

    def __init__(self, target: Runner, drafter: Drafter, draft_runners: Seq[Runner]) -> None:
        self._target = target
        self._drafter = drafter
        self._drafts = draft_runners
        self.sequences: list[Sequence] = []
        self.depth = 0  # the most drafts that there is memory for

    def fill(self, count: int, depth: int, deadline: float) -> None:
        """As many of `count` sequences as there is memory and time for, each to be followed by up to `depth` drafts."""
        runners = [self._target, *self._drafts]
        max_len = min(runner.cache.max_len for runner in runners)
        largest = count * (1 + depth)  # tokens of a round: no pass may be larger
        length = max(2, min(LENGTH * 3 // 2, max_len - depth, largest))  # of the longest
        self.depth = min(depth, max_len - length)
        draw = random.Random(0)
        for i in range(count):
            own = length - i * SPREAD % 64 * length // 96  # a third of it to all: a batch is never even
            tokens = [draw.randrange(self._target.vocab_size) for _ in range(max(2, own))]
            sequence = _sequence(-1 - i, tokens, modelled=bool(self._drafts))
            if not all(_hold(runner, sequence, self.depth) for runner in runners):
                _let_go(runners, sequence)
                break
            self.sequences.append(sequence)
        read = self._read(runners, max(1, largest // length), deadline)
        for sequence in self.sequences[read:]:
            _let_go(runners, sequence)
        del self.sequences[read:]
        for sequence in self.sequences:
            for runner in runners:
                runner.cache.discard(sequence.handle)  # so that nothing of it is ever indexed

    def _read(self, runners: Seq[Runner], together: int, deadline: float) -> int:
        """How many sequences the models have read by the deadline, so many `together` in a pass. The target reads the
        first sequence even if time is up: it is what a plain round needs."""
        read = 0
        while read < len(self.sequences):
            part = self.sequences[read : read + together] if read else self.sequences[:1]
            for runner in runners:
                if (read or runner is not self._target) and perf_counter() > deadline:
                    return max(1, read)
                runner.run([Feed(s, runner.uncached(s), outputs=0) for s in part])
            read += len(part)
        return read

    def run(self, kind: RoundShape) -> Outcome:
        batch = self.sequences[: len(kind.ks)]
        for i, sequence in enumerate(batch):
            _go_back(self._target, sequence, 1)
            for runner in self._drafts:
                _go_back(runner, sequence, 1 if i else kind.behind)
        slices = tuple(Slice(s, 1, k, emits=True) for s, k in zip(batch, kind.ks, strict=True))
        return run_round(Plan(slices), self._target, self._drafter)

    def clear(self, drafter: Drafter) -> None:
        for sequence in self.sequences:
            drafter.forget(sequence)
            _let_go([self._target, *self._drafts], sequence)
        self.sequences.clear()


class ConstantDrafter:
    """Drafts one token over and over, at no cost: for an engine without a draft model."""

    needs_hidden: ClassVar[tuple[int, ...]] = ()

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def offer(self, sequence: Sequence, k: int) -> Offer:
        return NO_OFFER

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        return Draft(tuple(ks), torch.zeros(len(ks), max(ks), dtype=torch.int64, device=self._device))

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def audit(self, live: Set[int]) -> None:
        pass


def _measure(bench: ProfileBench, kinds: Seq[RoundShape], deadline: float) -> list[Timing]:
    samples: dict[RoundShape, Samples] = {}
    for kind in list(kinds) * SWEEPS:
        if samples and perf_counter() > deadline:
            break
        outcomes = [bench.run(kind) for _ in range(RUNS)]
        whole = [o for o in outcomes if not o.draft.failed and o.draft.ks == kind.ks]
        for outcome in whole[1:] or whole:
            draft = outcome.draft
            made = samples.setdefault(kind, Samples(draft.steps, draft.read))
            made.draft_s.append(outcome.draft_us * 1e-6 if draft.steps else 0.0)
            made.score_s.append(outcome.score_us * 1e-6)
    if len(samples) < len(kinds):
        log.info("%d of %d kinds of rounds were profiled", len(samples), len(kinds))
    return [made.timing(kind) for kind, made in samples.items()]


def _batches(count: int) -> Iterator[int]:
    """1, 2, 4, … and count itself."""
    batch = 1
    while batch < count:
        yield batch
        batch *= 2
    if count:
        yield count


def _kinds(batch: int, depth: int, modelled: bool) -> Iterator[RoundShape]:
    for k in sorted({*(k for k in DEPTHS if k <= depth), depth}):
        yield RoundShape((k,) * batch)
    if not depth:
        return
    ragged = tuple(min(RAGGED[i % len(RAGGED)], depth) for i in range(batch))
    if batch > 1:
        yield RoundShape(ragged)
    if modelled:
        yield RoundShape((1,) * batch, behind=BEHIND)


def _quartile(values: Seq[float]) -> float:
    """The lower one: whatever disturbs a round makes it longer."""
    return sorted(values)[len(values) // 4]


def _parts(drafter: Drafter) -> Seq[Drafter]:
    return drafter.drafters if isinstance(drafter, ChainedDrafter) else (drafter,)


def _hold(runner: Runner, sequence: Sequence, depth: int) -> bool:
    """Whether there is a slot for it, and memory for it and its drafts, which it then holds."""
    try:
        runner.cache.allocate(sequence.handle, (), SALT)
        runner.cache.reserve(sequence.handle, len(sequence.tokens) + depth)
    except CacheFull:
        return False
    return True


def _go_back(runner: Runner, sequence: Sequence, uncached: int) -> None:
    """Let so many of its last tokens be uncached, at most half of them: what begins anew could be indexed."""
    kept = max(len(sequence.tokens) // 2, len(sequence.tokens) - uncached)
    length = min(runner.cache.length(sequence.handle), kept)
    runner.cache.truncate_to(sequence.handle, length)


def _let_go(runners: Seq[Runner], sequence: Sequence) -> None:
    for runner in runners:
        if runner.cache.holds(sequence.handle):
            runner.cache.discard(sequence.handle)
        runner.release(sequence)  # its memory is cleared first if what it holds is not finite


def _sequence(handle: int, tokens: list[int], *, modelled: bool) -> Sequence:
    name = f"profiling-{-handle}"
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return Sequence(
        handle=handle,
        request_id=name,
        tokens=tokens,
        num_prompt=len(tokens),
        params=params,
        k=None,
        key=0,
        max_len=len(tokens) + params.max_tokens,
        text=TextStream(Detokenizer(lambda ids: ""), ()),
        record=RequestRecord(name, 0, len(tokens), 0, arrived=0.0),
        drafter="model" if modelled else None,
        cache_salt=SALT,
    )
