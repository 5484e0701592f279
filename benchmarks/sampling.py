"""What sampling and acceptance cost per round, without the forwards, by verifier, temperature and vocabulary.

    python -m benchmarks.sampling --target models/demo/target --draft models/demo/draft --threads 2

The target's logits are synthetic: a Zipf law over the vocabulary (exponent 1.1, with about the entropy of a language
model). The draft's logits are the same with noise. Columns are medians in microseconds per round: prepare (the round's
parameters), draft (drawing k drafts from their logits), verify (laws, draws, acceptance, the copy to the host), total.
`of a round` is the total over a whole round of the given pair with the same batch and k at temperature 0.
"""

import argparse
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from benchmarks import common
from engine.detokenize import Detokenizer, TextStream
from engine.drafters.base import Draft, DraftBatch
from engine.drafters.draft_columns import DraftLaws
from engine.llm import LLM
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import RequestRecord, SamplingParams, Verifier
from engine.verification import verify

EXPONENT, DISTURBANCE = 1.1, 0.5
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """One way to sample."""

    name: str
    params: SamplingParams
    verifier: Verifier = "match"


CASES = (
    SamplingCase("greedy", SamplingParams(temperature=0)),
    SamplingCase("match", SamplingParams(temperature=0.8)),
    SamplingCase("match, top-p", SamplingParams(temperature=0.8, top_p=0.9)),
    SamplingCase("match, min-p", SamplingParams(temperature=0.8, min_p=0.05)),
    SamplingCase("match, penalties", SamplingParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1)),
    SamplingCase("rejection", SamplingParams(temperature=0.8), "rejection"),
    SamplingCase("block", SamplingParams(temperature=0.8), "block"),
)


@dataclass(slots=True)
class Times:
    """Seconds of each part, one entry per round."""

    prepare: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(median(part) for part in (self.prepare, self.draft, self.verify))


def zipf_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """[rows, vocab] fp32: log of a Zipf law, each row over its own order of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    law = -EXPONENT * torch.arange(1, vocab + 1).float().log()
    return torch.stack([law[torch.randperm(vocab, generator=generator)] for _ in range(rows)])


def make_sequences(case: SamplingCase, batch: int, length: int = 64) -> tuple[Sequence, ...]:
    return tuple(
        Sequence(
            handle=i,
            request_id=str(i),
            tokens=list(range(length)),
            num_prompt=length // 2,
            params=case.params,
            k=None,
            key=i,
            max_len=4096,
            text=TextStream(Detokenizer(lambda ids: ""), ()),
            record=RequestRecord(str(i), 0, length, 0, arrived=0.0),
            verifier=case.verifier,
        )
        for i in range(batch)
    )


def run_round(case: SamplingCase, target: Tensor, draft: Tensor, k: int, times: Times) -> float:
    """One round's sampling and acceptance over logits [B·(k + 1), vocab]; returns drafts accepted per sequence."""
    count = len(target) // (k + 1)
    sequences = make_sequences(case, count)
    started = perf_counter()
    batch = DraftBatch(sequences, Sampler(sequences, [k] * count, target.shape[1], CPU))
    prepared = perf_counter()
    offered = draw_drafts(batch, draft, k)
    drafted = perf_counter()
    verdict = verify(batch, offered, target)
    verified = perf_counter()
    times.prepare.append(prepared - started)
    times.draft.append(drafted - prepared)
    times.verify.append(verified - drafted)
    return sum(verdict.accepted) / count


def draw_drafts(batch: DraftBatch, logits: Tensor, k: int) -> Draft:
    """Draw drafts from logits column by column, as ModelDrafter does."""
    active = range(len(batch.sequences))
    laws = DraftLaws([i for i in active if not batch.sequences[i].coupled], k)
    columns = torch.zeros(k, len(active), dtype=torch.int64)
    for j in range(k):
        columns[j] = laws.draw(batch, active, logits[j :: k + 1], columns[:j].t())
    return Draft((k,) * len(active), columns.t(), laws.table, laws.rows)


def measure(vocab: int, batch: int, k: int, rounds: int) -> dict[str, Times]:
    """Every case in turn, round by round, over the same logits."""
    target = zipf_logits(batch * (k + 1), vocab, seed=0)
    disturbance = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    draft = target + DISTURBANCE * disturbance
    times = {case.name: Times() for case in CASES}
    with torch.inference_mode():
        for _ in range(rounds + 2):
            for case in CASES:
                run_round(case, target, draft, k, times[case.name])
    for each in times.values():
        del each.prepare[:2], each.draft[:2], each.verify[:2]
    return times


def round_seconds(llm: LLM, prompts: Seq[Seq[int]], k: int) -> float:
    """Median wall time of a decode step with every sequence in it."""
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), k)
    full = [s.step_us for s in llm.steps if not s.prefill_tokens and s.drafted == k * len(prompts)]
    return median(full) / 1e6


def main(argv: Seq[str] | None = None) -> None:
    p = common.parser(__doc__)
    p.add_argument("--vocabularies", type=lambda text: [int(v) for v in text.split(",")], default=[4096, 151_936])
    p.add_argument("--batch", type=common.positive, default=8)
    p.add_argument("--k", type=common.positive, default=4)
    p.add_argument("--rounds", type=common.positive, default=40)
    args = p.parse_args(argv)
    workload = common.prepare(args)
    report = common.describe_run(args, "sampling", {"batch": args.batch, "k": args.k, "rounds": args.rounds})
    rows = measure_all(args, workload.prompts[: args.batch])
    report["results"] = rows
    common.print_report(report, [rows], args.json)


def measure_all(args: argparse.Namespace, prompts: Seq[Seq[int]]) -> list[dict[str, object]]:
    llm = LLM(args.target, args.draft, **common.engine_config(args, [args.k], args.batch, 0))
    round_seconds(llm, prompts, args.k)
    rows: list[dict[str, object]] = []
    for vocab in args.vocabularies:
        whole = [round_seconds(llm, prompts, args.k)]
        times = measure(vocab, args.batch, args.k, args.rounds)
        whole.append(round_seconds(llm, prompts, args.k))
        rows += [summarise(vocab, name, each, sum(whole) / 2) for name, each in times.items()]
    return rows


def summarise(vocab: int, name: str, times: Times, whole: float) -> dict[str, object]:
    parts = {part: median(getattr(times, part)) * 1e6 for part in ("prepare", "draft", "verify")}
    return {"vocab": vocab, "case": name, **parts, "total": times.total * 1e6, "of a round": times.total / whole}


if __name__ == "__main__":
    main()
