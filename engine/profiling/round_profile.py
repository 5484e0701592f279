"""Measures what rounds cost on this machine: real rounds over throw-away sequences, before the first request.

Each shape of round is run in a row, as in serving, until it becomes no faster: after a round of another shape the
weights have partly left the processor's caches, and come back over several rounds (two sequences of the demo pair
without drafts take 4.8, 4.3, 3.6, 3.2, 2.8, 2.6 and 2.6 ms after rounds with 16 drafts each). All shapes are measured
in turn, then all again, so that a slow phase of the machine hits them alike; the lower quartile counts. After each
round both caches are rolled back. In the end nothing is left: no slot is held, and no block is in the prefix index.

One thread on a CPU is timed by its own processor time, which other processes disturb less. All shapes slow down alike
then, and choices of k depend on ratios only.
"""

import logging
import random
from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from math import exp, inf
from math import log as ln
from statistics import median
from time import perf_counter, thread_time_ns

import torch

from cache.protocol import CacheFull
from engine.device import round_clock
from engine.device.computing import computing
from engine.device.round_clock import wait
from engine.drafters.base import NO_OFFER, Draft, DraftBatch, Drafter, Offer
from engine.drafters.chain import ChainedDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import ModelDrafter
from engine.heads.state_drafter import StateDrafter
from engine.models.feeds import Feed
from engine.models.runner import Runner
from engine.profiling.profile_cache import ProfileFile
from engine.profiling.quartile import lower_quartile
from engine.profiling.round_shapes import RoundShape, missing_shapes, round_shapes
from engine.round import Outcome, run_round
from engine.sampling.acceptance import Verdict
from engine.scheduler import Plan, Slice
from engine.sequence import Sequence, scratch_sequence
from engine.types import SamplingParams
from policies.observation import Timing

log = logging.getLogger(__name__)

MEAN_LENGTH = 128  # tokens per sequence, if the context and the memory allow
SWEEPS = 2  # over all shapes
RUNS = 4  # least runs of each shape in a row; the first of these many last ones warms up and does not count
MOST_RUNS = 16  # of each shape in a row
CAPTURING = 5.0  # times as much time where rounds are captured: the second one of a shape takes 0.1 s and more
SETTLED = 0.98  # share of the fastest run so far: a run that is not below it ends the row
LENGTH_STEP = 37  # in 64ths of a third of the length: so that neighbours differ, and the first few as much as all
SALT = "profiling"
CHECKED_BATCHES, CHECKED_KS = (1, 4), (0, 4)  # the shapes that are measured again where a profile was kept
AGREEMENT = 1.2  # a shape that is measured again differs at most by this from the factor that all have in common

Over = Callable[[], bool]  # whether the measurement must end


def profile(
    target: Runner,
    drafter: Drafter,
    max_running: int,
    depth: int,
    budget_s: float,
    *,
    kept: bool = True,
    interrupted: Over = lambda: False,
) -> list[Timing]:
    """Timings of rounds of 1, 2, 4, … max_running sequences with 0, 1, 2, 4, … depth drafts each, without prompts and
    without the host's work around them. No other sequence may hold memory during this.

    The profile of most shapes is kept in a file. If a start finds one, a few shapes are measured. The file counts if
    they agree with it but for a common factor, by which all its seconds are then multiplied: the machine may be busier.
    If it lacks shapes, the rest of the budget goes to those, the largest first. kept: whether to look for the file.

    Without a draft model, a drafter that costs nothing proposes. Left out are the largest batches that do not fit into
    the budget, which also covers prefill; batches without enough memory; and rounds in which the drafter failed or had
    no memory. The budget is CAPTURING times as long where rounds are captured. A plain round of one sequence is always
    measured. An interrupted profile is empty.
    """
    models = _models(drafter)
    runners = [m.runner for m in models if isinstance(m, ModelDrafter)]
    heads = next((m for m in models if isinstance(m, StateDrafter)), None)
    budget_s *= 1.0 if target.staging.graphs is None else CAPTURING
    began = perf_counter()
    file = ProfileFile([target, *runners], max_running, depth, None if heads is None else heads.describe())
    bench = ProfileBench(target, drafter if models else ConstantDrafter(target.device), runners, heads)

    def over() -> bool:
        return perf_counter() > began + budget_s or interrupted()

    def measure(choose: Callable[[ProfileBench], Seq[RoundShape]], most: int = max_running) -> tuple[list[Timing], int]:
        """(timings, number of chosen shapes). most: sequences that are needed."""
        try:
            bench.fill(max_running, depth, over, most)
            return list(_measure(bench, shapes := choose(bench), over, interrupted).values()), len(shapes)
        finally:
            bench.clear(drafter)

    with computing(target.device):
        known = file.read() if kept and budget_s > 0 else []
        if known:
            measured, _ = measure(_checked_shapes, max(CHECKED_BATCHES))
            factor = common_factor(measured, known)
            _tell_of_check(factor, len(measured), perf_counter() - began, file)
            known = [] if factor is None else [_times(timing, factor) for timing in known]
            if known and file.whole:
                return known
        measured, wanted = measure(lambda bench: missing_shapes(bench.shapes(), known))
    if interrupted():
        return []
    timings = _joined(known, measured)
    told = len(timings), len(known) + wanted, perf_counter() - began
    log.info("%d of %d shapes of rounds are profiled (%.1f s)", *told)
    # A slow start reaches fewer shapes, and a later profile has only the memory that requests leave.
    if len(timings) > 1 and len(timings) >= len(file.read()):
        file.write(timings, whole=bench.in_time and len(measured) >= wanted and (kept or file.whole))
    return timings


def _tell_of_check(factor: float | None, count: int, seconds: float, file: ProfileFile) -> None:
    if factor is None:
        log.info("the costs of rounds in %s do not hold any more", file.path)
        return
    what = "which is used" if file.whole else "which is used and completed"
    message = "%d shapes of rounds were profiled (%.1f s): %.2f times as long as in %s, %s"
    log.info(message, count, seconds, factor, file.path, what)


def _joined(known: Seq[Timing], measured: Seq[Timing]) -> list[Timing]:
    """All timings in the order of a whole profile, each kind once; those measured now go before."""
    kinds = {_kind(timing): timing for timing in (*known, *measured)}
    return [kinds[kind] for kind in sorted(kinds)] if known else list(measured)


def _times(timing: Timing, factor: float) -> Timing:
    return replace(timing, draft_s=timing.draft_s * factor, score_s=timing.score_s * factor)


def common_factor(measured: Seq[Timing], known: Seq[Timing]) -> float | None:
    """Return how many times as long as the known shapes the measured ones take: the median of all ratios.

    None if some ratio differs from it by more than noise, or if nothing can be compared.
    """
    if not (ratios := _ratios(measured, known)):
        return None
    middle = median(ratios)
    return exp(middle) if all(abs(ratio - middle) <= ln(AGREEMENT) for ratio in ratios) else None


def renewed(known: Seq[Timing], measured: Seq[Timing]) -> list[Timing]:
    """Return the measured timings, and the known ones of other kinds times the median of all ratios between both.

    If nothing can be compared, they are the measured ones.
    """
    if not (ratios := _ratios(measured, known)):
        return list(measured)
    return _joined([_times(timing, exp(median(ratios))) for timing in known], measured)


def _ratios(measured: Seq[Timing], known: Seq[Timing]) -> list[float]:
    """Logarithms of the measured seconds over the known ones of the same kind; empty if some are not above 0."""
    before = {_kind(timing): timing for timing in reversed(known)}
    pairs = [(timing, before[_kind(timing)]) for timing in measured if _kind(timing) in before]
    seconds = [(a.score_s, b.score_s) for a, b in pairs] + [(a.draft_s, b.draft_s) for a, b in pairs if a.forwards]
    if any(a <= 0 or b <= 0 for a, b in seconds):
        return []
    return [ln(a / b) for a, b in seconds]


def _kind(timing: Timing) -> tuple[int, ...]:
    return timing.batch, timing.drafts, timing.depth, timing.forwards, timing.read


@dataclass(slots=True)
class Samples:
    """The measured times of one shape."""

    forwards: int  # of the draft model
    read: int  # tokens that these forwards fed
    draft_s: list[float] = field(default_factory=list)
    score_s: list[float] = field(default_factory=list)

    def timing(self, shape: RoundShape) -> Timing:
        return Timing(
            batch=len(shape.ks),
            drafts=sum(shape.ks),
            depth=max(shape.ks),
            prefill=0,
            forwards=self.forwards,
            read=self.read,
            draft_s=lower_quartile(self.draft_s),
            score_s=lower_quartile(self.score_s),
            host_s=0.0,
        )


class ProfileBench:
    """Throw-away sequences that both models have read, and rounds over them."""

    def __init__(
        self, target: Runner, drafter: Drafter, draft_runners: Seq[Runner], heads: StateDrafter | None = None
    ) -> None:
        """heads: the drafter, if it is one of heads without memory."""
        self._target = target
        self._drafter = drafter
        self._drafts = draft_runners
        self._heads = heads
        # On a GPU rounds are timed by the device. Several threads wait for each other, which is no processor time.
        alone = target.device.type not in round_clock.QUEUES and torch.get_num_threads() == 1
        self._host_ns = thread_time_ns if alone else None
        self.sequences: list[Sequence] = []
        self.depth = 0  # drafts per sequence that there is memory for
        self.in_time = True  # whether all sequences that there is memory for were read before the time was up

    def fill(self, count: int, depth: int, over: Over, most: int) -> None:
        """Make and read the first `most` of `count` sequences, as far as there is memory for `depth` drafts after each,
        and time."""
        runners = [self._target, *self._drafts]
        translations = [runner.translation for runner in self._drafts if runner.translation is not None]
        limits = [n for runner in runners for n in (runner.cache.max_len, runner.cache.window) if n is not None]
        # No sequence is longer than a window: the rounds take back what they read, and a window does not go back.
        max_len = min(limits) - max((len(t.start) for t in translations), default=0)
        largest_pass = count * (1 + depth)  # tokens of the largest round: prefill must not need more
        length = max(2, min(MEAN_LENGTH * 3 // 2, max_len - depth, largest_pass))  # tokens of the longest sequence
        self.depth = min(depth, max_len - length)
        draw = random.Random(0)
        ids = sorted(translations[0].shared) if translations else range(self._target.vocab_size)
        for i in range(min(count, most)):
            count_i = max(2, length - i * LENGTH_STEP % 64 * length // 96)  # a third of the length to all of it
            tokens = [draw.choice(ids) for _ in range(count_i)]
            drafter = "model" if self._drafts or self._heads else None
            params = SamplingParams(temperature=0.0, ignore_eos=True)
            sequence = scratch_sequence(f"profiling-{i}", -1 - i, tokens, params, drafter=drafter, cache_salt=SALT)
            if not all(_reserve(runner, sequence, self.depth) for runner in runners):
                _release(runners, sequence)
                break
            self.sequences.append(sequence)
        num_read = self._prefill(runners, max(1, largest_pass // length), over)
        self.in_time = num_read == len(self.sequences)
        for sequence in self.sequences[num_read:]:
            _release(runners, sequence)
            self._drafter.forget(sequence)  # a head's, whose states the target may have computed
        del self.sequences[num_read:]
        for sequence in self.sequences:
            for runner in runners:
                runner.cache.discard(sequence.handle)  # keeps it out of the prefix index

    def _prefill(self, runners: Seq[Runner], per_pass: int, over: Over) -> int:
        """Let the models read the sequences, `per_pass` at a time. Returns how many they have read in time.

        The target reads the first sequence in any case, because a plain round needs it.
        """
        num_read = 0
        while num_read < len(self.sequences):
            sequences = self.sequences[num_read : num_read + per_pass] if num_read else self.sequences[:1]
            for runner in runners:
                if (num_read or runner is not self._target) and over():
                    return max(1, num_read)
                runner.run([Feed(s, runner.uncached(s), outputs=0) for s in sequences])
                wait(runner.device)  # before the clock is asked, and before a round is timed
                runner.read_forwards()
            num_read += len(sequences)
        return num_read

    def shapes(self) -> list[RoundShape]:
        gap = min(_longest_gap(len(runner.tokens(self.sequences[0]))) for runner in self._drafts) if self._drafts else 0
        return round_shapes(len(self.sequences), self.depth, gap)

    def run(self, shape: RoundShape) -> Outcome:
        batch = self.sequences[: len(shape.ks)]
        for i, sequence in enumerate(batch):
            _roll_back(self._target, sequence, 1)
            for runner in self._drafts:
                _roll_back(runner, sequence, 1 if i else shape.gap)
                runner.imagine_inputs(sequence)
            if self._heads is not None:
                self._heads.imagine_inputs(sequence, self._target)
        # Other drafters may have more drafts than there are heads.
        beyond = self._heads is not None and max(shape.ks) > self._heads.heads.most
        riding = None if beyond else self._target.look_ahead
        slices = tuple(
            Slice(s, 1, k, emits=True, ahead=0 if riding is None else riding.reserve(self._target.cache, s, k)[0])
            for s, k in zip(batch, shape.ks, strict=True)
        )
        drafter = ConstantDrafter(self._target.device) if beyond else self._drafter
        return run_round(Plan(slices), self._target, drafter, self._host_ns)

    def clear(self, drafter: Drafter) -> None:
        for sequence in self.sequences:
            drafter.forget(sequence)
            _release([self._target, *self._drafts], sequence)
        self.sequences.clear()


class ConstantDrafter:
    """Proposes token 0 at no cost, in place of a draft model, in chains or in the trees that are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def offer(self, sequence: Sequence, k: int) -> Offer:
        return NO_OFFER

    def propose(self, batch: DraftBatch, ks: Seq[int]) -> Draft:
        tokens = torch.zeros(len(ks), max(ks), dtype=torch.int64, device=self._device)
        return Draft(tuple(ks), tokens, trees={i: shape for i, shape in enumerate(batch.shapes) if shape})

    def observe(self, batch: DraftBatch, verdict: Verdict) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def audit(self, live: Set[int]) -> None:
        pass


def _measure(bench: ProfileBench, shapes: Seq[RoundShape], over: Over, interrupted: Over) -> dict[RoundShape, Timing]:
    samples: dict[RoundShape, Samples] = {}
    for shape in list(shapes) * SWEEPS:
        if samples and over():
            break
        complete = [o for o in _row(bench, shape, interrupted) if not o.draft.failed and o.draft.ks == shape.ks]
        complete = [o for o in complete if o.usual] or complete
        for outcome in complete[1:] or complete:
            draft = outcome.draft
            of_shape = samples.setdefault(shape, Samples(draft.steps, draft.read))
            of_shape.draft_s.append(outcome.draft_us * 1e-6 if draft.steps else 0.0)
            of_shape.score_s.append(outcome.score_us * 1e-6)
    return {shape: of_shape.timing(shape) for shape, of_shape in samples.items()}


def _row(bench: ProfileBench, shape: RoundShape, interrupted: Over) -> list[Outcome]:
    """The last rounds of a row. A waiting request waits for one round at most."""
    outcomes: list[Outcome] = []
    fastest_us = inf
    while len(outcomes) < MOST_RUNS and not interrupted():
        outcomes.append(bench.run(shape))
        took_us = outcomes[-1].score_us
        if len(outcomes) >= RUNS and took_us >= SETTLED * fastest_us:
            break
        fastest_us = min(fastest_us, took_us)
    return outcomes[-RUNS:]


def _checked_shapes(bench: ProfileBench) -> list[RoundShape]:
    batches = [batch for batch in CHECKED_BATCHES if batch <= len(bench.sequences)]
    ks = sorted({min(k, bench.depth) for k in CHECKED_KS})
    return [RoundShape((k,) * batch) for batch in batches for k in ks]


def _models(drafter: Drafter) -> list[ModelDrafter | StateDrafter]:
    """What drafter `model` asks, if there is one."""
    parts = drafter.drafters if isinstance(drafter, ChainedDrafter) else (drafter,)
    firsts = (part.models[0] if isinstance(part, MergedDrafter) else part for part in parts)
    return [first for first in firsts if isinstance(first, ModelDrafter | StateDrafter)]


def _reserve(runner: Runner, sequence: Sequence, depth: int) -> bool:
    """Reserve a slot, and memory for the sequence and its drafts. False if prefixes of requests would be evicted."""
    count = len(runner.tokens(sequence)) + depth
    if count > runner.cache.empty:
        return False
    try:
        runner.cache.allocate(sequence.handle, (), SALT)
        runner.cache.reserve(sequence.handle, count)
    except CacheFull:
        return False
    return True


def _longest_gap(length: int) -> int:
    """Half of a sequence: never all of it, or it could be indexed."""
    return length - length // 2


def _roll_back(runner: Runner, sequence: Sequence, uncached: int) -> None:
    """Make the sequence's last `uncached` tokens uncached, as far as a gap may go."""
    length = len(runner.tokens(sequence))
    kept = length - min(uncached, _longest_gap(length))
    runner.cache.truncate_to(sequence.handle, min(runner.cache.length(sequence.handle), kept))


def _release(runners: Seq[Runner], sequence: Sequence) -> None:
    for runner in runners:
        if runner.cache.holds(sequence.handle):
            runner.cache.discard(sequence.handle)
        runner.release(sequence)
