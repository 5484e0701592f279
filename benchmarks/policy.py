"""Compare policies on the same texts, of a recorded run or made up. Only --record runs a model.

    python -m benchmarks.policy --record run.jsonl --target models/demo/target --draft models/demo/draft \
        --concurrency 8 --spec goodput
    python -m benchmarks.policy --trace run.jsonl
    python -m benchmarks.policy --simulate

--record also takes the arguments of the other benchmarks. It writes the decision, its reason and the outcome of every
round (see trace.py). --trace lets every policy decide for the recorded texts, at the prices that the engine measured at
its start. A draft that the recorded run verified ends as it did there, whichever policy asks for it. Other drafts are
drawn. The report gives the share of known bits, and the recording policy's own run shows what the prices leave out.
One pass reads a whole prompt. `confidence` cuts drafts by the draft model's own laws, which a trace does not hold. The
clairvoyant plans know the true prices, and each request's mean rate or the fate of every draft.

--simulate draws requests whose acceptance drifts and changes, on prices like a GPU's with noise in the measurements. It
compares goodput with a plan that knows prices and chances, and with the best fixed k of this run, which no server knows
beforehand. It also reports milliseconds per round in the policy's code; a load that ramps 1 → 16 → 1, half of whose
requests copy, on prices like the demo pair's; the rounds until a broken drafter is left alone, and until it is used
again after its repair; goodput where the machine is slow in phases, over goodput on a steady one; and goodput that may
choose trees over the same with chains only, where further guesses are often right. The rates leave out the first tenth
of the rounds, in which all prompts come at once.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from benchmarks import common, trace
from benchmarks.common import Spec
from benchmarks.lab.clairvoyant import Clairvoyant
from benchmarks.lab.scenarios import branching, cpu, drifting, gpu, mixed, profile, recovery
from benchmarks.lab.simulator import Controller, Report, World, simulate
from benchmarks.stats import Rows
from engine.llm import LLM
from engine.types import DRAFTERS, RequestRecord, SamplingParams
from policies.config import PolicyConfig
from policies.control import SpecControl
from policies.cost import CostModel
from policies.held_choice import Decision
from policies.observation import Candidate, Drafted, Prefill, Timing

FIXED = (1, 2, 4, 8)
REPLAYED: tuple[Spec, ...] = (0, *FIXED, "heuristic", "optimal", "goodput")
DEPTH = 8
NOISE = 0.05  # σ of the logarithm of measured over true seconds
BATCHES = (4, 16, 64, 256)
TIMED = (32, 256)
BROKEN = range(300, 600)
PRICES = {"cpu": cpu, "gpu": gpu}
DAMAGED = (("cpu", 1), ("cpu", 8), ("gpu", 16))
PHASED = (("cpu", 1, 1.3), ("cpu", 1, 1.6), ("cpu", 4, 1.3), ("cpu", 4, 1.6), ("gpu", 1, 1.6), ("gpu", 4, 1.6))
PHASED_SEEDS = 6
BRANCHED = (("gpu", 1), ("gpu", 8), ("gpu", 32), ("cpu", 1), ("cpu", 8))


class Timed:
    """Measures the time of a controller."""

    def __init__(self, control: Controller) -> None:
        self._control = control
        self._ns: list[int] = []  # of each round

    @property
    def median_ms(self) -> float:
        return median(self._ns) / 1e6

    def rest(self, fixed: Mapping[int, int | None], drafters: Sequence[str | None]) -> Decision | None:
        start = perf_counter_ns()
        decision = self._control.rest(fixed, drafters)
        if decision is not None:
            self._ns.append(perf_counter_ns() - start)
        return decision

    def rested(self, round_s: float) -> None:
        self._control.rested(round_s)

    def plan(self, candidates: Sequence[Candidate], prefill: Prefill) -> Decision:
        start = perf_counter_ns()
        decision = self._control.plan(candidates, prefill)
        self._ns.append(perf_counter_ns() - start)
        return decision

    def observe(self, timing: Timing, drafted: Sequence[Drafted], idle: Iterable[int]) -> None:
        start = perf_counter_ns()
        self._control.observe(timing, drafted, idle)
        if self._ns:
            self._ns[-1] += perf_counter_ns() - start

    def forget(self, handle: int) -> None:
        self._control.forget(handle)


def policy(spec: Spec, depth: int) -> PolicyConfig:
    """As common.policy. A k that is only where a policy starts is at most the depth."""
    config = common.policy(spec)
    return replace(config, k=min(config.k, depth)) if isinstance(spec, str) else config


def row(name: str, report: Report, undrafted: Report) -> dict[str, object]:
    return {
        "policy": name,
        "tok/s": report.tokens_per_s,
        "over off": report.tokens_per_s / undrafted.tokens_per_s,
        "mean k": report.mean_k,
        "accepted": report.accepted / max(1, report.drafted),
        "probes": report.probe_share,
        "rounds": report.rounds,
        "seconds error": report.seconds_error,
        "α error": report.alpha_error,
    }


def compare(worlds: Callable[[], World], specs: Sequence[Spec], depth: int, timings: Sequence[Timing]) -> list[Report]:
    """The report of each policy, each in a new world."""
    return [simulate(worlds(), SpecControl(policy(spec, depth), depth, timings)) for spec in specs]


def replay(recorded: trace.Trace, seed: int) -> tuple[Rows, float]:
    """(a row for each policy, share of known bits). Raises ValueError for a trace without timings."""
    if not recorded.timings:
        raise ValueError("the trace holds no timings: there are no prices to replay it at")
    texts, known = trace.jobs(recorded, seed)
    depth = recorded.depth
    worlds = partial(World, texts, CostModel(depth, recorded.timings).round_cost)
    specs = [spec for spec in REPLAYED if isinstance(spec, str) or spec <= depth]
    reports = compare(worlds, specs, depth, recorded.timings)
    rows = [row(common.spec_name(spec), report, reports[0]) for spec, report in zip(specs, reports, strict=True)]
    rows.append({**dict.fromkeys(rows[0]), "policy": "confidence (not replayable)"})
    for name, bits in (("clairvoyant, rates", False), ("clairvoyant, bits", True)):
        world = worlds()
        rows.append(row(name, simulate(world, Clairvoyant(world, depth, bits)), reports[0]))
    return rows, known


def simulated(batch: int, rounds: int, seed: int) -> dict[str, object]:
    """goodput and its rivals, on prices like a GPU's."""
    machine = partial(gpu, DEPTH)
    timings = profile(machine, DEPTH, batch)
    control = partial(SpecControl, max_k=DEPTH, timings=timings)

    def world() -> World:
        return World(drifting(batch, seed), machine, NOISE, seed)

    run = partial(simulate, rounds=rounds, skip=rounds // 10)
    fixed = {k: run(world(), control(policy(k, DEPTH))).tokens_per_s for k in (0, *FIXED)}
    goodput = run(world(), control(policy("goodput", DEPTH)))
    known = world()
    clairvoyant = run(known, Clairvoyant(known, DEPTH))
    best = max(fixed, key=lambda k: fixed[k])
    return {
        "batch": batch,
        "off tok/s": fixed[0],
        "best k": best,
        "its tok/s": fixed[best],
        "goodput tok/s": goodput.tokens_per_s,
        "clairvoyant tok/s": clairvoyant.tokens_per_s,
        "over off": goodput.tokens_per_s / fixed[0],
        "over best k": goodput.tokens_per_s / fixed[best],
        "over clairvoyant": goodput.tokens_per_s / clairvoyant.tokens_per_s,
        "mean k": goodput.mean_k,
        "clairvoyant's": clairvoyant.mean_k,
        "probes": goodput.probe_share,
        "seconds error": goodput.seconds_error,
        "α error": goodput.alpha_error,
    }


def timed(batch: int, rounds: int, seed: int) -> dict[str, object]:
    """Milliseconds of a round in the policy's code, at the GPU's prices: there it has most to weigh."""
    machine = partial(gpu, DEPTH)
    control = Timed(SpecControl(PolicyConfig(), DEPTH, profile(machine, DEPTH, batch)))
    simulate(World(drifting(batch, seed), machine, NOISE, seed), control, rounds)
    return {"sequences": batch, "ms per round": control.median_ms}


def ramp(seed: int) -> Rows:
    """All policies on a mixed load, on prices like the demo pair's."""
    machine = partial(cpu, DEPTH)
    worlds = partial(World, mixed(seed), machine, NOISE, seed)
    reports = compare(worlds, REPLAYED, DEPTH, profile(machine, DEPTH, 16))
    rows = [row(common.spec_name(spec), report, reports[0]) for spec, report in zip(REPLAYED, reports, strict=True)]
    world = worlds()
    return [*rows, row("clairvoyant", simulate(world, Clairvoyant(world, DEPTH)), reports[0])]


def damage(prices: str, batch: int, seed: int) -> dict[str, object]:
    """Rounds until a drafter that is always wrong is left alone, and from its repair until it is used again."""
    machine = partial(PRICES[prices], DEPTH)
    world = World(drifting(batch, seed), machine, NOISE, seed, BROKEN)
    control = SpecControl(PolicyConfig(), DEPTH, profile(machine, DEPTH, batch))
    left, found = recovery(simulate(world, control, BROKEN.stop + 400).mean_ks, BROKEN)
    return {"prices": prices, "batch": batch, "left alone after": left, "used again after": found}


def phased(prices: str, batch: int, slow: float, rounds: int, seed: int) -> dict[str, object]:
    """goodput where all rounds are measured `slow` times as long in phases, over the same on a steady machine."""
    machine = partial(PRICES[prices], DEPTH)
    rates = [0.0, 0.0]
    for nth in range(PHASED_SEEDS):
        for place, factor in enumerate((1.0, slow)):
            control = SpecControl(PolicyConfig(), DEPTH, profile(machine, DEPTH, batch))
            world = World(drifting(batch, seed + nth), machine, NOISE, seed + nth, slow=factor)
            rates[place] += simulate(world, control, rounds, skip=rounds // 10).tokens_per_s
    return {"prices": prices, "batch": batch, "slow": slow, "over steady": rates[1] / rates[0]}


def branched(prices: str, batch: int, rounds: int, seed: int) -> dict[str, object]:
    """goodput with trees and with chains only, on the same requests."""
    machine = partial(PRICES[prices], DEPTH)
    chains, trees = (
        simulate(
            World(branching(batch, seed), machine, NOISE, seed),
            SpecControl(PolicyConfig(trees=may), DEPTH, profile(machine, DEPTH, batch)),
            rounds,
            skip=rounds // 10,
        )
        for may in (False, True)
    )
    return {
        "prices": prices,
        "batch": batch,
        "chains tok/s": chains.tokens_per_s,
        "trees tok/s": trees.tokens_per_s,
        "over chains": trees.tokens_per_s / chains.tokens_per_s,
        "chains' mean k": chains.mean_k,
        "trees' mean k": trees.mean_k,
    }


def record(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run the prompts and write the trace. Returns its head."""
    workload = common.prepare(args)
    about = workload.describe(max_tokens=args.max_tokens, temperature=args.temperature, concurrency=args.concurrency)
    described = common.describe_run(args, "policy", about)
    specs: list[Spec] = [DEPTH, args.spec]
    config = common.engine_config(args, specs, args.concurrency, len(workload.prompts))
    config["policy"] = replace(config["policy"], trees=False)  # a trace tells the fate of chains
    llm = LLM(args.target, args.draft, **config)
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.max_tokens, ignore_eos=True)
    completions = llm.generate(workload.prompts, params)
    head = described | {
        "policy": common.spec_name(args.spec),
        "verifier": llm.engine.config.verifier,
        "depth": llm.engine.max_spec_length,
        "max_running": args.concurrency,
    }
    requests = [request_line(completion.record, params) for completion in completions]
    steps = [{name: getattr(step, name) for name in trace.STEP_FIELDS} for step in llm.steps]
    trace.save(path, head, llm.engine.speculator.control.timings, [*requests, *steps])
    return head


def request_line(record: RequestRecord, params: SamplingParams) -> dict[str, object]:
    """A request's line in the trace: its source drafted most, and all requests arrive before the first step."""
    proposers = [DRAFTERS[part.proposer] for part in record.rounds if part.proposer >= 0]
    return {
        "request": record.request_id,
        "source": max(proposers, key=proposers.count) if proposers else record.drafter,
        "prompt_tokens": record.prompt_tokens - record.cached_tokens,
        "max_tokens": params.max_tokens,
        "arrived_s": 0.0,
        "fixed_k": record.fixed_k,
        "max_k": None,
        "rounds": [[getattr(part, name) for name in trace.TraceRow._fields] for part in record.rounds],
    }


def one_spec(text: str) -> Spec:
    if text in common.POLICIES:
        return next(name for name in common.POLICIES if name == text)
    return common.spec_list(text)[-1]


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    mode = p.add_mutually_exclusive_group(required=True)
    mode.add_argument("--trace", type=Path, metavar="FILE")
    mode.add_argument("--record", type=Path, metavar="FILE", help="takes the arguments of the other benchmarks, too")
    mode.add_argument("--simulate", action="store_true")
    p.add_argument("--rounds", type=common.positive, default=1000, help="of each simulation (default %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="end with the report as one JSON line")
    args, rest = p.parse_known_args(argv)
    if args.record:
        main_record(args, rest)
    elif rest:
        p.error(f"unknown arguments: {' '.join(rest)}")
    elif args.trace:
        main_trace(args)
    else:
        main_simulate(args)


def main_record(args: argparse.Namespace, rest: Sequence[str]) -> None:
    p = common.parser(__doc__)
    p.add_argument("--concurrency", type=common.positive, default=8, help="sequences that run at once")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--spec", type=one_spec, default="goodput", help="what chooses k: off, a number or a policy")
    head = record(p.parse_args(rest), args.record)
    print(f"{args.record}: policy {head['policy']}, k up to {head['depth']}, workload {head['workload']}")
    if args.json:
        print(json.dumps(head))


def main_trace(args: argparse.Namespace) -> None:
    recorded = trace.load(args.trace)
    rows, known = replay(recorded, args.seed)
    head = recorded.head
    seconds = recorded.seconds
    about = {"policy": head["policy"], "requests": len(recorded.requests), "tokens": recorded.tokens}
    about |= {"tok/s": recorded.tokens / seconds if seconds else None, "known_bits": round(known, 3)}
    report = {
        "benchmark": "policy",
        "machine": head.get("machine"),
        "models": head.get("models", {}),
        "workload": head.get("workload"),
        "recorded": about,
        "results": rows,
    }
    print("recorded ", about)
    common.print_report(report, [rows], args.json)


def main_simulate(args: argparse.Namespace) -> None:
    about = {"rounds": args.rounds, "seed": args.seed, "depth": DEPTH, "noise": NOISE}
    report: dict[str, Any] = {"benchmark": "policy", "machine": common.describe_machine("cpu"), "models": {}}
    report["workload"] = about
    report["simulated"] = [simulated(batch, args.rounds, args.seed) for batch in BATCHES]
    report["policy_time"] = [timed(batch, args.rounds, args.seed) for batch in TIMED]
    report["ramp"] = ramp(args.seed)
    report["damage"] = [damage(prices, batch, args.seed) for prices, batch in DAMAGED]
    report["phased"] = [phased(*load, args.rounds, args.seed) for load in PHASED]
    report["trees"] = [branched(*load, args.rounds, args.seed) for load in BRANCHED]
    tables = [report[name] for name in ("simulated", "policy_time", "ramp", "damage", "phased", "trees")]
    common.print_report(report, tables, args.json)


if __name__ == "__main__":
    main()
