"""Tests policies without models: rounds on a virtual clock, over texts whose acceptance is known.

Under verifier `match` a draft for position t, given the true text before it, is right or wrong in whatever round it is
made. A text is therefore a string of bits, one per position, and the run of any policy over the same bits is exact.
Where drafts may branch, each position also has the rank of the draft that is right. A table gives the seconds of a
round. Standard library and numpy only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from engine.trees import ROOT, Parents, fates, ranks
from policies.held_choice import Decision
from policies.observation import Candidate, Drafted, Prefill, RoundCost, Timing
from policies.trees import depths_of, measure

MODEL = "model"  # the source whose drafts cost forwards of a model
PHASE = 200  # rounds, in the mean
PLENTY = 1 << 30  # drafts: neither memory nor a drafter is a limit here
NOTHING = Decision([], [], [], [], 0.0, 0.0, 0.0)  # where no sequence decodes

Machine = Callable[[int, int], RoundCost]  # (sequences that decode, tokens of prompts) → cost of a round with them


@dataclass(frozen=True, slots=True)
class Job:
    """A request and the fate of any draft for it; see make_job. The pass over its prompt emits position 0."""

    runs: tuple[int, ...]  # at each position, how many drafts from there on are right
    alphas: tuple[float, ...]  # the chance that the bit of each position was drawn with
    length: int  # tokens that it emits
    allowed: int  # tokens that it may emit, as far as is known while it runs
    prompt: int = 1  # tokens
    source: str | None = MODEL
    fixed: int | None = None  # k that it asks for
    max_k: int | None = None
    arrived_s: float = 0.0
    beside: int = 1  # it starts when fewer jobs than this run
    ranks: tuple[int, ...] = ()  # at each position, which of the drafter's guesses is right; (): drafts cannot branch

    def __post_init__(self) -> None:
        if not 1 <= self.length <= min(self.allowed, len(self.runs), len(self.alphas)) or self.beside < 1:
            raise ValueError(f"no job can emit {self.length} of {self.allowed} tokens with {len(self.runs)} bits")


def make_job(bits: ArrayLike, alphas: ArrayLike, length: int | None = None, **fields: Any) -> Job:
    """From bits and chances [positions]. Bits past the length belong to drafts that a stop cut."""
    right = np.asarray(bits, bool)
    places = np.arange(len(right))
    wrong = np.minimum.accumulate(np.where(right, len(right), places)[::-1])[
        ::-1
    ]  # the next wrong position, from each position on
    length = len(right) if length is None else length
    chances = tuple(np.asarray(alphas, np.float64).tolist())
    return Job(tuple((wrong - places).tolist()), chances, length, **({"allowed": length} | fields))


class Controller(Protocol):
    """What is tested: SpecControl, or something in its place."""

    def rest(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None: ...
    def rested(self, round_s: float) -> None: ...
    def plan(self, candidates: Sequence[Candidate], prefill: Prefill) -> Decision: ...
    def observe(self, timing: Timing, drafted: Sequence[Drafted], idle: Iterable[int]) -> None: ...
    def forget(self, handle: int) -> None: ...


@dataclass(slots=True)
class Running:
    """A job that has started."""

    handle: int  # the job's place among all
    job: Job
    done: int  # tokens emitted
    gap: int  # as Candidate.gap

    def candidate(self) -> Candidate:
        job, left = self.job, self.job.allowed - self.done - 1
        branches = bool(job.ranks)
        return Candidate(
            self.handle, job.fixed, job.max_k, left, PLENTY, job.source, PLENTY, self.gap, branches=branches
        )

    def path(self, tree: Parents) -> list[int]:
        """The nodes of a tree that are right, from the root on."""
        found, parent = list[int](), ROOT
        places = {(above, rank): node for node, (above, rank) in enumerate(zip(tree, ranks(tree), strict=True))}
        for rank in self.job.ranks[self.done :]:
            if (parent, rank) not in places:
                break
            parent = places[parent, rank]
            found.append(parent)
        return found

    def advance(self, k: int, tree: Parents | None, broken: bool) -> tuple[int, int, Drafted | None]:
        """A round with k drafts: (accepted, emitted, what became of the drafts)."""
        path = [] if tree is None or broken else self.path(tree)
        accepted = 0 if broken else len(path) if tree else min(k, self.job.runs[self.done])
        emitted = min(accepted + 1, self.job.length - self.done)
        self.done += emitted
        if not k:
            self.gap += emitted if self.job.source == MODEL else 0
            return accepted, emitted, None
        deepest = k if tree is None else measure(tree)[0]
        if self.job.source == MODEL:  # it has read all of its draft but the last token
            self.gap = 1 + (accepted == deepest)
        drafted = Drafted(self.handle, self.job.source or "", k, accepted)
        if tree is not None:
            seen = fates(tree, path)
            tried = [[fate[rank] for fate in seen if rank < len(fate)] for rank in range(1, max(map(len, seen)))]
            counts = tuple((len(of_rank), sum(of_rank)) for of_rank in tried)
            drafted = drafted._replace(overlaps=tuple(float(fate[0]) for fate in seen), sibling_counts=counts)
        return accepted, emitted, drafted


@dataclass(frozen=True, slots=True)
class SimRound:
    """A decision and its outcome; lists are in the order of the candidates."""

    handles: list[int]
    decision: Decision
    accepted: list[int]
    emitted: list[int]
    alphas: list[float]  # true chances of a draft of the next token
    seconds: float
    joined: int  # requests whose prompts were read, each of which emitted a token


class World:
    """Requests, in the order in which they start, on a machine.

    noise: σ of the logarithm of measured over true seconds; the clock shows the true ones. broken: rounds, from 0, in
    which every draft is wrong. slow: factor on the measured seconds in every other phase; a phase lasts PHASE rounds
    in the mean.
    """

    def __init__(
        self,
        jobs: Iterable[Job],
        machine: Machine,
        noise: float = 0.0,
        seed: int = 0,
        broken: range = range(0),
        slow: float = 1.0,
    ) -> None:
        self.clock_s = 0.0
        self.rounds = 0
        self.running: dict[int, Running] = {}  # by handle
        self.machine = machine
        self._jobs = enumerate(jobs)
        self._next = next(self._jobs, None)
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._broken = broken
        self._factors = [1.0, slow]  # on measured seconds: of the present phase, and of the other one
        self._phases = np.random.default_rng([seed, 1])

    @property
    def over(self) -> bool:
        return self._next is None and not self.running

    def alpha(self, handle: int) -> float:
        """Chance of the sequence's next draft."""
        running = self.running[handle]
        return 0.0 if self.rounds in self._broken else running.job.alphas[running.done]

    def run(self, handle: int) -> int:
        """How many of its next drafts are right."""
        running = self.running[handle]
        return 0 if self.rounds in self._broken else running.job.runs[running.done]

    def step(self, control: Controller) -> SimRound:
        """One round. Raises ValueError for a decision that depends on the drafts' laws, which are not known here."""
        decoding = list(self.running.values())
        joining = self._join()
        decision, rest = NOTHING, None
        if decoding:
            candidates = [running.candidate() for running in decoding]
            rest = control.rest({c.handle: c.fixed for c in candidates}, [c.source for c in candidates])
            prefill = Prefill(sum(running.job.prompt for running in joining), len(joining), min(1, len(joining)))
            decision = rest or control.plan(candidates, prefill)
        if decision.confidence:
            raise ValueError("a policy that cuts drafts by their confidence cannot be simulated")
        alphas = [self.alpha(running.handle) for running in decoding]
        trees = decision.shapes
        true = self._timing(decoding, decision.ks, trees, joining)
        broken = self.rounds in self._broken
        columns = zip(decoding, decision.ks, trees, strict=True)
        came = [running.advance(k, tree, broken) for running, k, tree in columns]
        accepted, emitted = [a for a, _, _ in came], [e for _, e, _ in came]
        drafted = [one for _, _, one in came if one]
        idle = [running.handle for running, k in zip(decoding, decision.ks, strict=True) if not k]
        measured, took = self._measured(true), true.draft_s + true.score_s + true.host_s
        if rest is not None:
            control.rested(measured.draft_s + measured.score_s + measured.host_s)
        else:
            control.observe(measured, drafted, [*idle, *(running.handle for running in joining)])
        self.clock_s += took
        self.rounds += 1
        self._leave(control, [*decoding, *joining])
        return SimRound(
            [running.handle for running in decoding], decision, accepted, emitted, alphas, took, len(joining)
        )

    def _join(self) -> list[Running]:
        """Start the jobs that may start. If none runs, the clock goes on to the next arrival."""
        joined: list[Running] = []
        while self._next is not None and len(self.running) < self._next[1].beside:
            handle, job = self._next
            if job.arrived_s > self.clock_s:
                if self.running:
                    break
                self.clock_s = job.arrived_s
            running = Running(handle, job, 1, job.prompt + 1 if job.source == MODEL else 0)
            self.running[handle] = running
            joined.append(running)
            self._next = next(self._jobs, None)
        return joined

    def _timing(
        self,
        decoding: Sequence[Running],
        ks: Sequence[int],
        trees: Sequence[Parents | None],
        joining: Sequence[Running],
    ) -> Timing:
        forwards = read = 0
        for running, k, depth, tree in zip(decoding, ks, depths_of(ks, tuple(trees)), trees, strict=True):
            if k and running.job.source == MODEL:
                forwards = max(forwards, depth)
                read += running.gap - 1 + (k if tree is None else measure(tree)[1])
        batch = len(decoding) + len(joining)
        prefill = sum(running.job.prompt - 1 for running in joining)  # each emits a token, as the others do
        branched = sum(rank > 0 for tree in trees if tree for rank in ranks(tree))
        cost = self.machine(batch, prefill)
        return timing_of(cost, batch, sum(ks), max(ks, default=0), prefill, forwards, read, branched)

    def _measured(self, true: Timing) -> Timing:
        if self._phases.random() < 1 / PHASE:
            self._factors.reverse()
        draft, score, rest = (self._factors[0] * np.exp(self._rng.normal(0.0, self._noise, 3))).tolist()
        return replace(true, draft_s=true.draft_s * draft, score_s=true.score_s * score, host_s=true.host_s * rest)

    def _leave(self, control: Controller, present: Iterable[Running]) -> None:
        for running in present:
            if running.done >= running.job.length:
                del self.running[running.handle]
                control.forget(running.handle)


def timing_of(
    cost: RoundCost,
    batch: int,
    drafts: int,
    depth: int,
    prefill: int,
    forwards: int,
    read: int,
    branched_drafts: int = 0,
) -> Timing:
    """The Timing of a round that takes what `cost` says."""
    draft = cost.drafting_s if drafts else 0.0
    if forwards:
        draft += cost.model_s + forwards * cost.step_s + read * cost.token_s
    score = float(cost.verify_s[drafts] + cost.padding_s[depth])
    slow = cost.tree if branched_drafts else 1.0
    times = draft * slow, score * slow, cost.base_s * slow
    return Timing(batch, drafts, depth, prefill, forwards, read, *times, branched_drafts)


@dataclass(slots=True)
class Report:
    """A run in figures. Errors are means of |predicted − true|, for seconds as a share of the true ones."""

    seconds: float = 0.0  # virtual
    rounds: int = 0  # in which any sequence decoded
    tokens: int = 0
    plans: int = 0  # of one sequence in one round
    drafted: int = 0
    accepted: int = 0
    probes: int = 0  # plans whose reason is one
    mean_ks: list[float] = field(default_factory=list)  # of each round; 0 where no sequence decoded
    predicted_tokens: float = 0.0
    decoded: int = 0  # tokens of sequences that decoded, which predicted_tokens predicts
    _seconds_errors: float = 0.0
    _predicted: int = 0  # rounds
    _alpha_errors: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_k(self) -> float:
        return self.drafted / max(1, self.plans)

    @property
    def probe_share(self) -> float:
        return self.probes / max(1, self.plans)

    @property
    def seconds_error(self) -> float:
        return self._seconds_errors / max(1, self._predicted)

    @property
    def alpha_error(self) -> float:
        return self._alpha_errors / max(1, self.plans)

    @property
    def tokens_bias(self) -> float:
        """Predicted over emitted tokens, less 1."""
        return self.predicted_tokens / max(1, self.decoded) - 1

    def add(self, result: SimRound) -> None:
        decision, batch = result.decision, len(result.handles)
        self.tokens += sum(result.emitted) + result.joined
        self.mean_ks.append(sum(decision.ks) / max(1, batch))
        if not batch:
            return
        self.rounds += 1
        self.plans += batch
        self.drafted += sum(decision.ks)
        self.accepted += sum(result.accepted)
        self.probes += decision.reasons.count("probe")
        self.predicted_tokens += decision.tokens
        self.decoded += sum(result.emitted)
        if decision.seconds:  # 0: a held choice served other sequences
            self._seconds_errors += abs(decision.seconds / result.seconds - 1)
            self._predicted += 1
        self._alpha_errors += sum(abs(a - b) for a, b in zip(decision.alphas, result.alphas, strict=True))


def simulate(world: World, control: Controller, rounds: int | None = None, skip: int = 0) -> Report:
    """Run to the end, or for `rounds` rounds. The first `skip` rounds, in which a load begins, are not reported."""
    for _ in range(skip):
        world.step(control)
    report, start = Report(), world.clock_s
    while not world.over and (rounds is None or world.rounds < rounds):
        report.add(world.step(control))
    report.seconds = world.clock_s - start
    return report
