"""Draw many texts of one configuration through a whole engine, and test them against the exact law."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle, islice
from typing import Any
from zlib import crc32

from engine.engine import Engine
from engine.trees import Parents, trunk
from engine.types import DRAFTERS, REASONS, DrafterName, Output, Request, RequestRecord, SamplingParams
from tests.engine.law.configurations import MAX_TOKENS, SETTINGS, Configuration
from tests.engine.law.exact import Text, exact_law
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import table_engine

MOST = 3  # drafts per round
CHOSEN = {REASONS.index(reason) for reason in ("policy", "acceptance", "load", "probe")}  # not bounds
LENGTH = 4  # tokens whose joint law is tested
SHARING = 8  # texts with the same seed
REFUSED = 1e-5  # a correct engine is refused with at most this probability
LOOK = 400  # texts between two looks of `refuses`
PROMPT: Text = (0, 1, 0, 0, 1, 1, 0, 1, 0, 1)  # 2 and the end token are new to the repetition penalty
REPETITIVE: Text = (0, 1, 0, 0, 1, 1, 0, 1, 2, 0, 1)  # whatever follows but the end, there is something to look up
PREDICTION = max(exact_law(PROMPT, SETTINGS["plain"], MAX_TOKENS).items(), key=lambda item: (len(item[0]), item[1]))[0]
PREDICTIONS: Mapping[DrafterName | None, Text] = {
    "prediction": PREDICTION,
    "cascade": PREDICTION[:2],  # so that others in the cascade have their turn
}
COMPANIONS = (  # every fifth request of a mixed batch
    Request("", (2,), SETTINGS["combined"], k=3, drafter="model", verifier="block"),
    Request("", (0, 1, 2, 0, 1, 2, 0), SETTINGS["presence"], k=2, drafter="ngram", verifier="rejection"),
    Request("", (1, 1), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), k=1, drafter="model"),
    Request("", (2, 0, 1), replace(SETTINGS["top_p"], logprobs=2, prompt_logprobs=1), k=3, drafter="model"),
    Request("", (0, 2), SETTINGS["min_tokens"], k=0, verifier="block"),
    Request("", (1, 0, 1), SETTINGS["frequency"], tree=(1, 2), drafter="model", verifier="rejection"),
    Request("", PROMPT, SETTINGS["top_k"], k=2, drafter="cascade", verifier="rejection", prediction_ids=PREDICTION),
)


@dataclass(slots=True)
class Sample:
    """The first tokens of many texts, and how they came about."""

    texts: list[Text] = field(default_factory=list)  # in the order of their numbers
    drafted: int = 0
    accepted: int = 0
    joint: int = 0  # texts of which at least two rounds with drafts decided about the tokens looked at
    proposers: set[str] = field(default_factory=set)
    lengths: set[int] = field(default_factory=set)  # of drafts, in rounds in which as many as possible were asked for
    chosen: dict[int, set[int]] = field(default_factory=dict)  # step → different k that the policy chose in it
    trees: dict[int, set[Parents]] = field(default_factory=dict)  # step → different trees that the policy chose in it
    beside: int = 0  # rounds that accepted a draft that is not a first child

    @property
    def counts(self) -> Counter[Text]:
        return Counter(self.texts)

    def add(self, tokens: Text, record: RequestRecord) -> None:
        self.texts.append(tokens[:LENGTH])
        self.drafted += sum(record.column("drafted"))
        self.accepted += sum(record.column("accepted"))
        self.proposers |= {DRAFTERS[n] for n in record.column("proposer") if n >= 0}
        rounds, told = 0, 0
        for drafted, emitted in zip(record.column("drafted"), record.column("emitted"), strict=True):
            rounds += drafted > 0 and told < LENGTH
            told += emitted
        self.joint += rounds >= 2
        for step, k, reason, drafted in ((r.step, r.k, r.reason, r.drafted) for r in record.rounds):
            if reason in CHOSEN or (k == MOST and reason >= 0):
                self.chosen.setdefault(step, set()).add(k)
            if k == MOST:
                self.lengths.add(drafted)
        for part in record.rounds:
            if part.reason in CHOSEN and part.tree:
                self.trees.setdefault(part.step, set()).add(part.tree)
            self.beside += not {*part.path} <= {*trunk(part.tree)}


def check(configuration: Configuration, draws: int = 4000) -> float:
    """p-value of the configuration's draws under its exact law.

    Raises AssertionError for a text that the law excludes, for a fault on the way, and where there was no speculation
    of the kind asked for.
    """
    sample = draw(configuration, draws)
    check_speculation(configuration, sample)
    return g_test(sample.counts, law_of(configuration.params, prompt_of(configuration)))


def refuses(configuration: Configuration, most: int = 2400, engine: Engine | None = None, **changes: Any) -> bool:
    """Whether the law refuses the configuration's texts, `most` of them at most: for a text that the law excludes, or
    for the p-value at one of the looks, which share the level REFUSED equally.

    Raises AssertionError for a fault on the way, and where there was no speculation of the kind asked for.
    """
    engine = engine or table_engine()
    law = law_of(configuration.params, prompt_of(configuration))
    counts = Counter[Text]()
    for first in range(0, most, LOOK):
        sample = draw(configuration, LOOK, first, engine, **changes)
        check_speculation(configuration, sample)
        counts += sample.counts
        if any(text not in law for text in counts) or g_test(counts, law) < REFUSED * LOOK / most:
            return True
    return False


@cache
def law_of(params: SamplingParams, prompt: Text = PROMPT) -> dict[Text, float]:
    return exact_law(prompt, params, LENGTH)


def prompt_of(configuration: Configuration) -> Text:
    return REPETITIVE if configuration.drafter == "lookup" else PROMPT


def check_speculation(configuration: Configuration, sample: Sample) -> None:
    """Raise AssertionError unless drafts were made by those asked for, and some but not all of them were accepted."""
    if configuration.drafter is None:
        assert sample.drafted == 0, f"{configuration}: {sample.drafted} drafts, and speculation is off"
        return
    told = f"{configuration}: {sample.accepted} of {sample.drafted} drafts accepted"
    assert 0.02 * sample.drafted < sample.accepted < 0.98 * sample.drafted, told
    assert sample.joint > len(sample.texts) / 200, (
        f"{configuration}: {sample.joint} texts of several rounds with drafts"
    )
    legal = {"prediction", "lookup", "model"} if configuration.drafter == "cascade" else {configuration.drafter}
    assert sample.proposers == legal, f"{configuration}: drafts came from {sample.proposers}"


def draw(
    configuration: Configuration, draws: int, first: int = 0, engine: Engine | None = None, **changes: Any
) -> Sample:
    """Texts number first … first + draws − 1 of a configuration. `changes` replace fields of its requests."""
    engine = engine or table_engine()
    ours = _requests(configuration, first, draws, changes)
    outputs = _run(engine, _with_companions(ours) if configuration.mixed else ours)
    sample = Sample()
    for number in range(first, first + draws):
        tokens, record = outputs[str(number)]
        sample.add(tokens, record)
    return sample


def _requests(configuration: Configuration, first: int, draws: int, changes: dict[str, Any]) -> Iterator[Request]:
    """Every eight share a seed, as four choices each of two prompts: noise that they shared would show."""
    seed = crc32(str(configuration).encode()) << 20  # configurations draw apart: their p-values are independent
    request = Request(
        "",
        prompt_of(configuration),
        configuration.params,
        k=configuration.k if configuration.drafter else 0,
        verifier=configuration.verifier,
        drafter=configuration.drafter,
        prediction_ids=PREDICTIONS.get(configuration.drafter, ()),
    )
    request = replace(request, **changes)
    for number in range(first, first + draws):
        params = replace(request.params, seed=seed + number // SHARING)
        yield replace(request, id=str(number), params=params, prompt_index=number // 4 % 2, choice_index=number % 4)


def _with_companions(requests: Iterator[Request]) -> Iterator[Request]:
    companions = cycle(COMPANIONS)
    for number, request in enumerate(requests):
        if number % 4 == 0:
            companion = next(companions)
            yield replace(companion, id=f"companion-{number}", params=replace(companion.params, seed=number))
        yield request


def _run(engine: Engine, requests: Iterator[Request]) -> dict[str, tuple[Text, RequestRecord]]:
    """(output tokens, record) of each request by its id. The batch is kept full as long as there are requests, and a
    text that is long enough is cancelled."""
    running: dict[str, Text] = {}
    finished: dict[str, tuple[Text, RequestRecord]] = {}
    while True:
        for request in islice(requests, engine.config.max_running - len(running)):
            engine.check(request)
            engine.submit(request)
            running[request.id] = ()
        if not running:
            break
        result = engine.step()
        assert result.stats.sequences or result.outputs, "a step did nothing, and requests are left"
        assert not result.stats.failed, "a pass failed"
        assert not result.stats.draft_faults, "a drafter failed"
        for output in result.outputs:
            _collect(output, running, finished)
            if output.finish_reason is None and len(running[output.request_id]) >= LENGTH:
                engine.cancel(output.request_id)  # its last output comes with the next step
    engine.audit()
    return finished


def _collect(output: Output, running: dict[str, Text], finished: dict[str, tuple[Text, RequestRecord]]) -> None:
    running[output.request_id] += output.token_ids
    if output.finish_reason is not None:
        assert output.record is not None
        assert output.finish_reason in ("stop", "length", "cancelled"), f"{output.request_id}: {output.error}"
        finished[output.request_id] = (running.pop(output.request_id), output.record)
