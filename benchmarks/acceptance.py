"""How many drafts are accepted, measured and expected, by drafter, verifier and temperature.

    python -m benchmarks.acceptance --target models/demo/target --draft models/demo/draft --temperatures 0,0.7,1

At each temperature the target writes one text per prompt without drafts, because α is about the target's own text
(Leviathan et al. 2023, Table 3). First table: both models read these texts, which gives p and q at every output
position. From them follow α of rejection, Σ min(p, q), and α of match, the agreement of two draws with the same Gumbel
noise. `greedy draft` is p of the draft's likeliest token. `tok/round` is (1 − α^(k+1)) / (1 − α). `repeated` is the
share of repeated 8-grams: if it is large, the figures are about loops.

Second table: the engine at k drafts a round. `alpha` is accepted over reached drafts. `predicted` is the tokens per
round if every reached draft were accepted with that α, with each round's real number of drafts. For the draft model
under match and rejection, p and q give the chance c of acceptance at the positions that were reached: `expected` is its
mean, `points above` is α minus that mean, in percentage points, with standard error √Σ c(1 − c) / n. At temperature 0
all verifiers decide alike, and only the first one runs.

The third table has the tokens per round of block minus those of rejection, on the same prompts. Other standard errors
(±) are over texts.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.forced import Column, ForcedAcceptance, ForcedReader, TextReader, make_forced_reader
from benchmarks.identity import seeded
from benchmarks.lab.analysis import expected_tokens
from benchmarks.measure import Run
from benchmarks.prompts import Prompts
from benchmarks.stats import Rows, repeated_ngram_share
from engine.llm import LLM
from engine.types import DRAFTERS, VERIFIERS, DrafterName, RequestRecord, Verifier, acceptance_of

BATCH = 8


class LawCase(NamedTuple):
    """The setting of one run; without a drafter it is plain decoding."""

    temperature: float
    drafter: DrafterName | None
    verifier: Verifier


def reached(record: RequestRecord) -> Iterator[tuple[int, bool]]:
    """(output position, whether accepted) of each draft that was reached, in order."""
    position = 0
    for round_ in record.rounds:
        for j in range(min(round_.accepted + 1, round_.drafted)):
            yield position + j, j < round_.accepted
        position += round_.emitted


def expectation(records: Sequence[RequestRecord], chances: Sequence[Column]) -> dict[str, object]:
    """α at the reached positions against the mean of their chances; one array [output tokens] per record.

    Whether a position is reached does not depend on its coin, so the difference has mean 0 and variance
    Σ c(1 − c) / n², whatever the text.
    """
    pairs = [(ok, c[position]) for record, c in zip(records, chances, strict=True) for position, ok in reached(record)]
    if not pairs:
        return {"expected": None, "points above": None, "points ±": None}
    accepted, chance = np.array(pairs, np.float64).T
    error = sqrt((chance * (1 - chance)).clip(0).sum()) / len(pairs)
    return {
        "expected": float(chance.mean()),
        "points above": float(100 * (accepted - chance).mean()),
        "points ±": 100 * error,
    }


def predicted(run: Run) -> float | None:
    """Tokens per round by equation 1 of Leviathan et al., at the row's α and each round's number of drafts."""
    drafts = [round_.drafted for record in run.records for round_ in record.rounds if round_.drafted]
    if run.alpha is None:
        return None
    return sum(expected_tokens(run.alpha, d) for d in drafts) / len(drafts)


def influence(run: Run) -> Column:
    """[texts] how much each text moves the tokens per round: (emitted − mean · rounds) / all rounds; their sum is 0."""
    rounds = np.array([acceptance_of(record).rounds for record in run.records], np.float64)
    emitted = np.array([sum(round_.emitted for round_ in record.rounds if round_.drafted) for record in run.records])
    return (emitted - emitted.sum() / rounds.sum() * rounds) / rounds.sum()


def clustered_error(influences: Column) -> float | None:
    """Standard error of a figure, from each text's influence on it; None for a single text."""
    n = influences.size
    return sqrt(n / (n - 1) * float((influences**2).sum())) if n > 1 else None


def forced_row(temperature: float, k: int, plain: Run, texts: Sequence[ForcedAcceptance]) -> dict[str, object]:
    row: dict[str, object] = {"T": temperature, "positions": sum(text.match.size for text in texts)}
    for name in ("rejection", "match"):
        means = np.array([getattr(text, name).mean() for text in texts])
        row[f"alpha {name}"] = alpha = float(means.mean())
        row[f"{name} ±"] = clustered_error((means - alpha) / means.size)
        row[f"tok/round {name}"] = expected_tokens(min(alpha, 1.0), k)
    row["greedy draft"] = float(np.mean([text.greedy.mean() for text in texts]))
    row["repeated"] = repeated_ngram_share(plain.outputs)
    return row


def run_row(case: LawCase, run: Run, prompts: Prompts, read_forced: ForcedReader) -> dict[str, object]:
    drafts = run.alpha is not None
    row: dict[str, object] = {
        "T": case.temperature,
        "drafter": case.drafter,
        "verifier": case.verifier,
        "rounds": acceptance_of(*run.records).rounds,
        "alpha": run.alpha,
        "tok/round": run.tokens_per_round,
        "±": clustered_error(influence(run)) if drafts else None,
        "predicted": predicted(run),
    }
    chances: list[Column] = []
    records: Sequence[RequestRecord] = []
    if case.drafter == "model" and case.verifier != "block":  # block's coins depend on the drafts before them
        records = run.records
        texts = [read_forced(case.temperature, prompt, out) for prompt, out in zip(prompts, run.outputs, strict=True)]
        chances = [text.match if case.verifier == "match" else text.rejection for text in texts]
    return row | expectation(records, chances)


def block_rows(runs: dict[LawCase, Run]) -> list[dict[str, object]]:
    """Block against rejection, paired by prompt, wherever both ran and drafted."""
    rows: list[dict[str, object]] = []
    for case, block in runs.items():
        rejection = runs.get(case._replace(verifier="rejection"))
        if case.verifier != "block" or rejection is None:
            continue
        new, old = block.tokens_per_round, rejection.tokens_per_round
        if new is None or old is None:
            continue
        row: dict[str, object] = {"T": case.temperature, "drafter": case.drafter, "rejection": old, "block": new}
        row |= {"block − rejection": new - old, "±": clustered_error(influence(block) - influence(rejection))}
        rows.append(row)
    return rows


def cases(
    temperatures: Sequence[float], drafters: Sequence[DrafterName], verifiers: Sequence[Verifier]
) -> list[LawCase]:
    """Per temperature the plain run, then every drafter with every verifier (at temperature 0 with the first one)."""
    return [
        case
        for t in temperatures
        for case in [
            LawCase(t, None, "match"),
            *(
                LawCase(t, drafter, verifier)
                for drafter in drafters
                for verifier in (verifiers if t else verifiers[:1])
            ),
        ]
    ]


def measure(args: argparse.Namespace, prompts: Prompts) -> dict[LawCase, Run]:
    """The engine's runs. All have the same seeds, so match writes the same text as the plain run."""
    llm = LLM(args.target, args.draft, **common.engine_config(args, [0, args.spec], BATCH, len(prompts)))
    runs: dict[LawCase, Run] = {}
    for case in cases(args.temperatures, args.drafters, args.verifiers):
        params = seeded(len(prompts), case.temperature, args.max_tokens)
        k = args.spec if case.drafter else 0
        start = time.perf_counter()
        done = llm.generate(prompts, params, k, verifier=case.verifier, drafter=case.drafter)
        seconds = time.perf_counter() - start
        runs[case] = Run(seconds, [list(c.token_ids) for c in done], [c.record for c in done], list(llm.steps))
    return runs


def report_tables(args: argparse.Namespace, prompts: Prompts, runs: dict[LawCase, Run]) -> list[Rows]:
    """The three tables. The readers load the models again, after the engine is gone."""
    longest = max(map(len, prompts)) + args.max_tokens
    read_forced = make_forced_reader(
        *(TextReader(path, args.dtype, args.device, longest) for path in (args.target, args.draft))
    )
    by_text: list[dict[str, object]] = []
    by_run: list[dict[str, object]] = []
    for case, run in runs.items():
        if case.drafter is None:
            texts = [
                read_forced(case.temperature, prompt, out) for prompt, out in zip(prompts, run.outputs, strict=True)
            ]
            by_text.append(forced_row(case.temperature, args.spec, run, texts))
        else:
            by_run.append(run_row(case, run, prompts, read_forced))
    return [by_text, by_run, block_rows(runs)]


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return parse


def _temperatures(text: str) -> list[float]:
    return list(dict.fromkeys(float(part) for part in text.split(",")))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = common.parser(__doc__)
    drafters = [name for name in DRAFTERS if name != "prediction"]  # it needs a guess of the output
    p.add_argument("--temperatures", type=_temperatures, default=[0.0, 0.3, 0.7, 1.0], help="such as 0,0.7,1")
    p.add_argument("--drafters", type=_names(drafters), default=["model", "ngram", "lookup"])
    p.add_argument("--verifiers", type=_names(VERIFIERS), default=list(VERIFIERS))
    p.add_argument("--spec", type=common.positive, default=4, help="drafts per round (default %(default)s)")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    workload = common.prepare(args)
    about = workload.describe(max_tokens=args.max_tokens, spec=args.spec, batch=BATCH)
    report = common.describe_run(args, "acceptance", about)
    runs = measure(args, workload.prompts)
    tables = report_tables(args, workload.prompts, runs)
    report |= dict(zip(("texts", "results", "block"), tables, strict=True))
    common.print_report(report, [rows for rows in tables if rows], args.json)


if __name__ == "__main__":
    main()
