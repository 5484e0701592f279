"""Drive an engine step by step and keep all that it says; the laws of every request are checked on the way."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from engine.config import EngineConfig
from engine.detokenize import Detokenizer, TextStream
from engine.drafters.chain import ChainedDrafter
from engine.drafters.merged import MergedDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.sequence import Sequence
from engine.types import (
    REASONS,
    FinishReason,
    Output,
    Request,
    RequestRecord,
    RoundRecord,
    SamplingParams,
    StepStats,
    acceptance_of,
)
from policies.config import PolicyConfig
from tests.engine.pairs import Pair
from tests.kv import kv_config

DEFAULT = SamplingParams()


def load(pair: Pair, **config: Any) -> Engine:
    """An engine over a tiny pair. Defaults: fp64, and a fixed k of 5, or max_spec_length if that is smaller. `drafts`
    take the place of the pair's draft."""
    policy = PolicyConfig("fixed", k=min(5, config.get("max_spec_length", 5)))
    settings = {"dtype": "float64", "max_model_len": 96, "policy": policy, **kv_config(), **config}
    draft = None if config.get("drafts") else pair.draft
    return Engine.from_config(EngineConfig(target=pair.target, draft=draft, **settings))


def model_drafters(engine: Engine) -> tuple[ModelDrafter, ...]:
    """The engine's draft models as drafters; () where it has none."""
    assert isinstance(engine.drafter, ChainedDrafter)
    return next(
        (
            part.models if isinstance(part, MergedDrafter) else (part,)
            for part in engine.drafter.drafters
            if isinstance(part, ModelDrafter | MergedDrafter)
        ),
        (),
    )


def model_drafter(engine: Engine) -> ModelDrafter:
    """The drafter `model`."""
    return model_drafters(engine)[0]


def make_sequence(
    handle: int,
    tokens: Seq[int],
    params: SamplingParams = DEFAULT,
    *,
    key: int = 0,
    k: int = 0,
    end_ids: Iterable[int] = (),
) -> Sequence:
    """A sequence outside any engine: its tokens are all prompt."""
    return Sequence(
        handle=handle,
        request_id=f"sequence-{handle}",
        tokens=list(tokens),
        num_prompt=len(tokens),
        params=params,
        k=k,
        key=key,
        max_len=1024,
        text=TextStream(Detokenizer(lambda ids: "".join(map(chr, ids))), params.stop),
        record=RequestRecord(f"sequence-{handle}", 0, len(tokens), k, arrived=0.0),
        end_ids=frozenset(end_ids),
    )


@dataclass(slots=True)
class Received:
    """What an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None
    record: RequestRecord | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Drive:
    """A whole run: what each request received, and the statistics of each step."""

    received: dict[str, Received] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: told.tokens for name, told in self.received.items()}

    @property
    def drafted(self) -> int:
        return sum(s.drafted for s in self.steps)

    @property
    def accepted(self) -> int:
        return sum(s.accepted for s in self.steps)


def drive(
    engine: Engine,
    arrivals: Seq[Request] | Mapping[int, Seq[Request]],
    cancels: Mapping[int, Seq[str]] = {},
    after_step: Callable[[], None] = lambda: None,
) -> Drive:
    """Run until nothing is left. arrivals and cancels happen before the step of that number (0 is the first).

    Checks I5 (one finish event each, nothing after it), I8, that steps and records tell the same and, once idle, I3.
    """
    timetable = arrivals if isinstance(arrivals, Mapping) else {0: arrivals}
    run = Drive({r.id: Received() for requests in timetable.values() for r in requests})
    step = 0
    while engine.has_work or step <= max(timetable, default=0):
        for request in timetable.get(step, ()):
            engine.check(request)
            engine.submit(request)
        for request_id in cancels.get(step, ()):
            engine.cancel(request_id)
        result = engine.step()
        run.steps.append(result.stats)
        for output in result.outputs:
            check_drafts(output)
            told = run.received[output.request_id]
            assert told.reason is None, f"{output.request_id} spoke after it had finished"
            told.tokens += output.token_ids
            told.pieces.append(output.text)
            told.reason, told.error, told.record = output.finish_reason, output.error, output.record
        after_step()
        step += 1
    engine.audit()
    assert engine.target.cache.free_slots == engine.config.max_running
    if isinstance(engine.drafter, ChainedDrafter):
        for model in model_drafters(engine):
            assert model.runner.cache.free_slots == engine.config.max_running
    for request_id, told in run.received.items():
        check_finished(request_id, told)
    check_steps(run)
    return run


def check_drafts(output: Output) -> None:
    """What reached the client begins with the accepted drafts, unless a stop cut it before their end."""
    assert 0 <= output.accepted <= len(output.drafts)
    accepted = output.drafts[: output.accepted]
    count = min(len(accepted), len(output.token_ids))
    assert output.token_ids[:count] == accepted[:count]


def check_steps(run: Drive) -> None:
    """A step's statistics are those of its requests' records."""
    rounds = defaultdict[int, list[RoundRecord]](list)
    for told in run.received.values():
        if told.record is not None:
            for part in told.record.rounds:
                rounds[part.step].append(part)
    for stats in run.steps:
        assert sorted(stats.parts) == sorted(rounds[stats.step])
        assert len(stats.parts) <= len(set(stats.requests)) == stats.sequences


def check_finished(request_id: str, told: Received) -> None:
    """I5, and the record's identities I8."""
    assert told.reason is not None, f"{request_id} never finished"
    record = told.record
    assert record is not None
    assert record.request_id == request_id
    assert record.finished is not None
    assert (told.error is None) == (told.reason != "error")
    acceptance = acceptance_of(record)
    assert sum(acceptance.histogram) == acceptance.rounds == sum(part.drafted > 0 for part in record.rounds)
    assert sum(j * n for j, n in enumerate(acceptance.histogram)) == sum(record.column("accepted"))
    assert all(part.accepted <= part.drafted <= part.k <= record.k_max for part in record.rounds)
    assert all(before < after for before, after in pairwise(record.column("step")))
    assert all(-1 <= reason < len(REASONS) for reason in record.column("reason"))
    assert all(0 <= alpha <= 1000 for alpha in record.column("alpha"))
    assert sum(record.column("emitted")) == len(told.tokens)
    if told.reason != "error":
        assert record.output_tokens == len(told.tokens)
