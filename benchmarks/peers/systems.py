"""Systems that continue the same prompts in turn, and their times. Ours and transformers run in this process."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from benchmarks import common, reference
from benchmarks.common import Chooser, Spec
from benchmarks.prompts import Prompts
from engine.config import WeightForm
from engine.llm import LLM
from engine.types import SamplingParams


class TimedOutputs(NamedTuple):
    seconds: float
    outputs: list[list[int]]


@dataclass
class System:
    """One way to continue a group of prompts at once, and its times."""

    peer: str  # the program: ours, transformers, ...
    spec: Spec
    run: Callable[[Prompts], TimedOutputs]
    kind: str = ""  # of speculation, where a program has several
    seconds: list[float] = field(default_factory=list)  # per repeat and group
    outputs: list[list[int]] = field(default_factory=list)  # of the last repeat, in the order of the prompts

    @property
    def name(self) -> str:
        return f"{self.peer} {self.kind}".strip()


@dataclass
class BatchSize:
    """All systems at one batch size. `ours` begins with plain decoding; `again` is the same once more, as a control."""

    batch: int
    groups: list[Prompts]  # of `batch` prompts each
    ours: list[System]
    again: System
    theirs: list[System]

    @property
    def systems(self) -> list[System]:
        return [*self.ours, *self.theirs, self.again]


def whole_groups(prompts: Prompts, batch: int) -> list[Prompts]:
    """Raises ValueError for fewer prompts than a batch."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    if not groups:
        raise ValueError(f"{len(prompts)} prompts are no batch of {batch}: raise --prompts-count")
    return groups


def run_group(systems: Sequence[System], group: Prompts, max_tokens: int, first: int = 0) -> None:
    """Every system once; index `first` begins. Raises RuntimeError for an output without max_tokens tokens."""
    first %= len(systems)
    for system in [*systems[first:], *systems[:first]]:
        timed = system.run(group)
        for tokens in timed.outputs:
            if len(tokens) != max_tokens:
                spec = common.spec_name(system.spec)
                raise RuntimeError(f"{system.name} at k = {spec} emitted {len(tokens)} tokens, not {max_tokens}")
        system.seconds.append(timed.seconds)
        system.outputs += timed.outputs


def run_repeat(size: BatchSize, max_tokens: int, repeat: int) -> None:
    """Every group once. The system that begins changes from group to group."""
    for system in size.systems:
        system.outputs = []
    for i, group in enumerate(size.groups):
        run_group(size.systems, group, max_tokens, first=repeat * len(size.groups) + i)


def our_systems(args: argparse.Namespace, batch: int) -> tuple[list[System], System]:
    """(one system per spec, plain decoding once more), on one engine. No prompt shares memory with another."""
    weights: WeightForm = args.weights
    config = common.engine_config(args, args.spec, batch, batch)
    llm = LLM(args.target, args.draft, **config, target_weights=weights, draft_weights=weights, prefix_cache=False)
    chooser = Chooser(llm.engine)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)

    def run(spec: Spec, prompts: Prompts) -> TimedOutputs:
        chooser.use(common.spec_name(spec), spec)
        start = time.perf_counter()
        completions = llm.generate(prompts, params, None if spec else 0)
        return TimedOutputs(time.perf_counter() - start, [c.token_ids for c in completions])

    systems = [System("ours", spec, partial(run, spec)) for spec in args.spec]
    return systems, System("ours", 0, partial(run, 0), kind="again")


def transformers_systems(args: argparse.Namespace) -> dict[int, list[System]]:
    """Per batch size: plain generation; for one sequence at a time, assisted generation and prompt lookup as well."""
    target = reference.load(args.target, args.dtype, args.device)
    plain = partial(_timed, reference.greedy_batch(target, args.max_tokens))
    systems = {batch: [System("transformers", 0, plain, "plain")] for batch in args.concurrency}
    if 1 not in systems:
        return systems
    draft = reference.load(args.draft, args.dtype, args.device)
    for k in fixed_drafts(args.spec):
        assisted = reference.assisted(target, draft, k, args.max_tokens)
        lookup = reference.greedy(target, args.max_tokens, prompt_lookup_num_tokens=k)
        for kind, one in (("assisted", assisted), ("lookup", lookup)):
            systems[1].append(System("transformers", k, partial(_timed, partial(_one_by_one, one)), kind))
    return systems


def fixed_drafts(specs: Sequence[Spec]) -> list[int]:
    return [spec for spec in specs if isinstance(spec, int) and spec]


def _one_by_one(run: reference.Continue, prompts: Prompts) -> list[list[int]]:
    return [run(prompt) for prompt in prompts]


def _timed(run: Callable[[Prompts], list[list[int]]], prompts: Prompts) -> TimedOutputs:
    start = time.perf_counter()
    outputs = run(prompts)
    return TimedOutputs(time.perf_counter() - start, outputs)
