"""Drafters without a model on the work of agents: tokens per round, as chains and as trees, by replay.

    python -m benchmarks.agents --tokenizer models/demo/target

An agent's session has five requests; each prompt holds the session so far. It looks for a name (tool), reads a file
(tool), quotes what a test's log says (log), edits lines of the file (edit), repeats the edit with a change (edit) and
reports all tests (log). Files and prose are standard library sources; names, numbers and choices are drawn from --seed.
Sessions follow each other, all of one tenant. No model runs: the outputs are given, the target is greedy, and a round
emits the accepted drafts and one token more. A drafter is asked for --rows tokens in each round; pauses count.

The last line is a JSON object: for each drafter, as chain and as tree, its tokens per round by kind of request and in
all, its drafts and accepted drafts per round, and µs per round. `suffix, own text` reads no other request's output.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch

from benchmarks.common import describe_machine, positive
from benchmarks.prompts import held_out_sources
from benchmarks.stats import table
from engine.config import EngineConfig
from engine.drafters.base import DraftBatch
from engine.drafters.chain import ChainedDrafter
from engine.loading.load import make_drafters
from engine.models.tokenizer import Tokenizer
from engine.sampling.acceptance import Verdict
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence, scratch_sequence
from engine.trees import ROOT, Parents, chain
from engine.types import DrafterName, SamplingParams

KINDS = ("tool", "log", "edit")
NO_SAMPLER = Sampler((), [], 1, torch.device("cpu"))  # guesses are not drawn
READ_LINES = (30, 70)  # lines of a file that an agent reads
TOOLS = """\
You are an agent. Call one tool per turn, as JSON: {"tool": "search", "arguments": {"pattern": …, "path": …}},
{"tool": "read", "arguments": {"path": …, "first": …, "last": …}}, {"tool": "edit", "arguments": {"path": …, "old": …,
"new": …}}, {"tool": "run", "arguments": {"command": …}}. Say what you found before each call.
"""


class Work(NamedTuple):
    """One request: its prompt and the output that the target gives."""

    kind: str
    prompt: list[int]
    output: list[int]


class Sources:
    """Lines of the standard library's held-out sources."""

    def __init__(self) -> None:
        texts = dict(sorted(held_out_sources()))
        self.files = {name: text.splitlines() for name, text in texts.items() if text.count("\n") > 2 * READ_LINES[1]}
        lines = [line.strip() for text in texts.values() for line in text.splitlines()]
        self.prose = [line for line in lines if len(line) > 40 and line[0].isupper() and line.count(" ") > 5]

    def excerpt(self, rng: random.Random) -> tuple[str, int, list[str]]:
        """(file, first line, lines)"""
        name = rng.choice(sorted(self.files))
        lines, length = self.files[name], rng.randint(*READ_LINES)
        first = rng.randrange(len(lines) - length)
        return name, first + 1, lines[first : first + length]


def call(tool: str, **arguments: object) -> str:
    return json.dumps({"tool": tool, "arguments": arguments}) + "\n"


def log_lines(rng: random.Random, path: str, names: Seq[str]) -> list[str]:
    """A test run: one line per test, then the errors."""
    clock = rng.randrange(80_000)
    lines = []
    for number, name in enumerate(names):
        clock += rng.randrange(900)
        stamp = f"{clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02}.{rng.randrange(1000):03}"
        state = "FAILED" if rng.random() < 0.2 else "passed"
        lines.append(f"{stamp} INFO  tests/{path}::test_{name} {state} [{100 * (number + 1) // len(names):3}%]")
    return lines


def edited(rng: random.Random, lines: Seq[str], names: Seq[str]) -> list[str]:
    """The lines with one name replaced, and with a few lines left out, repeated or changed."""
    old, new = rng.choice(names), f"{rng.choice(names)}_{rng.choice(names)}"
    changed = []
    for line in lines:
        draw = rng.random()
        if draw < 0.04:
            continue
        line = line.replace(old, new)
        changed.append(line if draw < 0.92 else f"{line}  # {rng.choice(names)}")
    return changed


def identifiers(lines: Seq[str]) -> list[str]:
    words = {w for line in lines for w in "".join(c if c.isalnum() or c == "_" else " " for c in line).split()}
    return sorted(w for w in words if len(w) > 3 and w[0].isalpha()) or ["name"]


def session(rng: random.Random, sources: Sources) -> Iterator[tuple[str, str, str]]:
    """(kind, what came since the last output, output) of each request of a session."""
    path, first, lines = sources.excerpt(rng)
    names = identifiers(lines)
    said = lambda: " ".join(rng.sample(sources.prose, 2)) + "\n"  # noqa: E731
    name = rng.choice(names)
    task = f"{TOOLS}\nUser: {rng.choice(sources.prose)} See {name} in {path}.\n"
    yield "tool", task, said() + call("search", pattern=name, path=path)
    hits = "".join(f"{path}:{first + i}: {line}\n" for i, line in enumerate(lines) if name in line)
    yield "tool", hits, said() + call("read", path=path, first=first, last=first + len(lines) - 1)
    log = log_lines(rng, path, rng.sample(names, min(12, len(names))))
    failed = [line for line in log if "FAILED" in line]
    result = "\n".join(lines) + "\n" + "\n".join(log) + "\n"
    yield "log", result, said() + "\n".join(f"- {line}" for line in failed) + "\n" + call("run", command=f"test {path}")
    start = rng.randrange(len(lines) - 12)
    old = lines[start : start + rng.randint(8, 12)]
    new = edited(rng, old, names)
    yield "edit", "exit status 1\n", said() + call("edit", path=path, old="\n".join(old), new="\n".join(new))
    newer = edited(rng, new, names)
    yield "edit", "exit status 1\n", said() + call("edit", path=path, old="\n".join(new), new="\n".join(newer))
    again = log_lines(rng, path, [line.split("::test_")[1].split()[0] for line in log])
    report = "".join(f"| {line.split('::')[1].split()[0]} | {line.split()[3]} |\n" for line in again)
    yield "log", "\n".join(again) + "\n", said() + report


def make_load(tokenizer: Tokenizer, sessions: int, seed: int) -> list[Work]:
    """The requests of all sessions, in order. The same for one seed, Python version and tokenizer."""
    rng, sources = random.Random(seed), Sources()
    load = []
    for _ in range(sessions):
        history: list[int] = []
        for kind, news, output in session(rng, sources):
            history += tokenizer.encode(news)
            ids = tokenizer.encode(output)
            load.append(Work(kind, list(history), ids))
            history += ids
    return load


class GuessVariant(NamedTuple):
    """One way to draft, and whether it may branch."""

    name: str
    drafter: DrafterName
    tree: bool
    shared: bool = True  # whether outputs that have ended are kept


DRAFTINGS = (
    GuessVariant("lookup", "lookup", False),
    GuessVariant("lookup, tree", "lookup", True),
    GuessVariant("ngram", "ngram", False),
    GuessVariant("ngram, tree", "ngram", True),
    GuessVariant("suffix, own text", "suffix", False, shared=False),
    GuessVariant("suffix, own text, tree", "suffix", True, shared=False),
    GuessVariant("suffix", "suffix", False),
    GuessVariant("suffix, tree", "suffix", True),
)


@dataclass(slots=True)
class Played:
    """Sums over the rounds of a load."""

    rounds: Counter[str] = field(default_factory=Counter)  # by kind
    emitted: Counter[str] = field(default_factory=Counter)  # tokens, by kind
    drafted: int = 0
    accepted: int = 0
    drafter_ns: int = 0  # time of the drafter

    def row(self, name: str) -> dict[str, object]:
        rounds = self.rounds.total()
        by_kind = {kind: self.emitted[kind] / self.rounds[kind] for kind in KINDS if self.rounds[kind]}
        return {
            "drafter": name,
            "tok/round": self.emitted.total() / rounds,
            **by_kind,
            "drafts/round": self.drafted / rounds,
            "accepted/round": self.accepted / rounds,
            "us/round": self.drafter_ns / 1000 / rounds,
        }


def accepted_path(tokens: Seq[int], parents: Parents, output: Seq[int]) -> int:
    """How many drafts a greedy target accepts whose next tokens are `output`. One token of it is never a draft's."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    node, accepted = ROOT, 0
    while accepted < len(output) - 1 and (node := children.get((node, output[accepted]), -2)) >= 0:
        accepted += 1
    return accepted


def play(load: Seq[Work], drafter: ChainedDrafter, drafting: GuessVariant, rows: int) -> Played:
    """Run every request to its end, one after the other."""
    played = Played()
    for handle, work in enumerate(load):
        params = SamplingParams(temperature=0, max_tokens=len(work.output))
        sequence = scratch_sequence(f"agent-{handle}", handle, list(work.prompt), params, drafter=drafting.drafter)
        sequence.start()
        while sequence.remaining:
            _play_round(played, work, sequence, drafter, drafting, rows)
        started = perf_counter_ns()
        sequence.finish("length")
        drafter.forget(sequence)
        played.drafter_ns += perf_counter_ns() - started
    return played


def _play_round(
    played: Played, work: Work, sequence: Sequence, drafter: ChainedDrafter, drafting: GuessVariant, rows: int
) -> None:
    output = work.output[sequence.num_output :]
    started = perf_counter_ns()
    k = min(rows, sequence.remaining - 1)
    k = drafter.offer(sequence, k).max_k and k
    batch = DraftBatch((sequence,), NO_SAMPLER, branches=(drafting.tree,))
    draft = drafter.propose(batch, [k])
    played.drafter_ns += perf_counter_ns() - started
    tokens = [] if draft.tokens is None else draft.tokens[0, : draft.ks[0]].tolist()
    accepted = accepted_path(tokens, draft.trees.get(0, chain(len(tokens))), output)
    started = perf_counter_ns()
    drafter.observe(batch, cast(Verdict, SimpleNamespace(accepted=[accepted])))
    played.drafter_ns += perf_counter_ns() - started
    sequence.tokens += output[: accepted + 1]
    played.rounds[work.kind] += 1
    played.emitted[work.kind] += accepted + 1
    played.drafted += len(tokens)
    played.accepted += accepted


def main(argv: Seq[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokenizer", default="models/demo/target", help="directory of a tokenizer (default %(default)s)")
    p.add_argument("--sessions", type=positive, default=8, help="of six requests each (default %(default)s)")
    p.add_argument("--rows", type=positive, default=8, help="drafts per round (default %(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--suffix-tokens", type=int, default=EngineConfig("").suffix_tokens)
    args = p.parse_args(argv)
    load = make_load(Tokenizer(args.tokenizer), args.sessions, args.seed)
    workload = {
        "requests": len(load),
        "prompt tokens": sum(len(work.prompt) for work in load),
        "output tokens": sum(len(work.output) for work in load),
        "rows": args.rows,
        "seed": args.seed,
    }
    machine = describe_machine("cpu")
    results = []
    for drafting in DRAFTINGS:
        drafter = make_drafters([], torch.device("cpu"), args.suffix_tokens if drafting.shared else 0)
        results.append(play(load, drafter, drafting, args.rows).row(drafting.name))
    print("machine  ", machine)
    print("workload ", workload)
    print("\n" + table(results))
    print(json.dumps({"benchmark": "agents", "machine": machine, "workload": workload, "results": results}))


if __name__ == "__main__":
    main()
