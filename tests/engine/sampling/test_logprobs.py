"""Log-probabilities, told along with tokens, are those of a fresh full forward of the target, whatever else happens.

Everything is fp64; the reference is transformers' own module.
"""

import logging
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.round as round_module
import engine.sampling.logprobs as logprobs_module
from engine.drafters.base import DraftBatch
from engine.engine import Engine, StepResult
from engine.memory.budget import measure_activations
from engine.models.decoder import Decoder
from engine.models.feeds import Feed
from engine.sampling.logprobs import (
    LogitRows,
    LogprobRequest,
    _likeliest,
    _likeliest_on_device,
    compute_logprobs,
    compute_logprobs_alone,
    token_logprobs,
)
from engine.types import DrafterName, Output, Request, SamplingParams, TokenLogprob, Verifier
from tests.engine.driving import Drive, drive, load
from tests.engine.pairs import EOS, VOCAB, Pair, reference_model

TOLERANCE = 1e-9
LENGTH = 14


@dataclass(slots=True)
class Heard:
    """A run with the log-probabilities that came with it."""

    run: Drive
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompts: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    outputs: dict[str, list[Output]] = field(default_factory=dict)


def hear(engine: Engine, requests: Seq[Request]) -> Heard:
    """Drive, and keep what `Received` does not: outputs and log-probabilities by request."""
    heard, step = Heard(Drive()), engine.step

    def listening() -> StepResult:
        result = step()
        for output in result.outputs:
            heard.outputs.setdefault(output.request_id, []).append(output)
            heard.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            heard.prompts.setdefault(output.request_id, []).extend(output.prompt_logprobs)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", listening)
        heard.run = drive(engine, requests)
    return heard


def equal(ours: Seq[TokenLogprob], theirs: Seq[TokenLogprob]) -> bool:
    """The same tokens, and values within TOLERANCE."""

    def pairs(entries: Iterable[TokenLogprob]) -> list[tuple[int, float]]:
        return [pair for entry in entries for pair in ((entry.token, entry.logprob), *entry.top)]

    if len(ours) != len(theirs) or [len(e.top) for e in ours] != [len(e.top) for e in theirs]:
        return False
    return all(a == b and abs(x - y) < TOLERANCE for (a, x), (b, y) in zip(pairs(ours), pairs(theirs), strict=True))


def likeliest_first(law: Seq[float]) -> list[int]:
    return sorted(range(len(law)), key=lambda token: (-law[token], token))


Reference = Callable[[Seq[int], int, int, int], list[TokenLogprob]]


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    """(tokens, first, end, count) → entries for tokens[first:end], from one forward over all of them."""
    model = reference_model(pair.target)

    @cache
    def sorted_laws(tokens: tuple[int, ...]) -> list[tuple[list[float], list[int]]]:
        """(log-probabilities, ids of the likeliest first) for each position."""
        with torch.inference_mode():
            laws = model(torch.tensor([tokens])).logits[0].log_softmax(-1).tolist()
        return [(law, likeliest_first(law)) for law in laws]

    def entries(tokens: Seq[int], first: int, end: int, count: int) -> list[TokenLogprob]:
        laws, told = sorted_laws(tuple(tokens)), []
        for at in range(first, end):
            values, order = laws[at - 1]
            best = order[:count]
            told.append(TokenLogprob(tokens[at], values[tokens[at]], tuple((t, values[t]) for t in best)))
        return told

    return entries


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Engine:
    return load(pair, max_running=8, max_spec_length=8, max_step_tokens=256)


@pytest.fixture(scope="module")
def narrow(pair: Pair) -> Engine:
    """Prompts are read in chunks of at most nine tokens."""
    return load(pair, max_running=2, max_spec_length=3, max_step_tokens=9)


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCAB) for _ in range(length))


WAYS: tuple[tuple[int, DrafterName | None, Verifier], ...] = (
    (0, None, "match"),
    (4, "model", "match"),
    (4, "model", "rejection"),
    (4, "model", "block"),
    (3, "lookup", "match"),
    (8, "cascade", "rejection"),
)
COUNTS = (None, 0, 1, 5, 20)


def make_requests(**changes: Any) -> list[Request]:
    """Every way to speculate with every count, greedy and sampled; the prompts repeat a phrase, so that lookup drafts.

    Each asks for one more (or fewer) alternative of the prompt's tokens than of its own.
    """
    requests = []
    for i, (k, drafter, verifier) in enumerate(WAYS):
        for j, count in enumerate(COUNTS):
            params = SamplingParams(
                temperature=0.9 * ((i + j) % 2),
                seed=i,
                max_tokens=LENGTH,
                ignore_eos=True,
                logprobs=count,
                prompt_logprobs=COUNTS[j - 1],
            )
            prompt = make_prompt(1 + 3 * j, seed=i) * 2
            request = Request(
                f"{k}-{drafter}-{verifier}-{count}", prompt, params, k, verifier=verifier, drafter=drafter
            )
            requests.append(replace(request, params=replace(params, **changes)))
    return requests


def wrong(heard: Heard, requests: Seq[Request], reference: Reference) -> list[str]:
    """Requests whose entries are not those of the reference, one per token, or that got what they did not ask for."""
    bad = []
    for request in requests:
        tokens, first = [*request.prompt_ids, *heard.run.tokens[request.id]], len(request.prompt_ids)
        count, prompt_count = request.params.logprobs, request.params.prompt_logprobs
        told = [] if count is None else reference(tokens, first, len(tokens), count)
        of_prompt = [] if prompt_count is None else reference(tokens, 1, first, prompt_count)
        if not (equal(heard.logprobs[request.id], told) and equal(heard.prompts[request.id], of_prompt)):
            bad.append(request.id)
    return bad


@pytest.fixture(scope="module")
def heard(engine: Engine) -> Heard:
    return hear(engine, make_requests())


def test_they_are_those_of_a_full_forward(heard: Heard, reference: Reference) -> None:
    """In one batch with every way to speculate, and with requests that ask for none."""
    requests = make_requests()
    assert wrong(heard, requests, reference) == []
    assert 0 < heard.run.accepted < heard.run.drafted
    assert {r.id for r in requests if not heard.logprobs[r.id]} == {r.id for r in requests if r.params.logprobs is None}


def test_alone_and_in_chunks(narrow: Engine, reference: Reference) -> None:
    """One at a time, with prompts that take up to four passes: every way to speculate, with half of the counts."""
    requests = make_requests()[::2]
    requests = [replace(r, prompt_ids=r.prompt_ids + make_prompt(7, seed=3), k=min(r.k or 0, 3)) for r in requests]
    for request in requests:
        heard = hear(narrow, [request])
        assert wrong(heard, [request], reference) == []
        assert sum(s.emitted == 0 for s in heard.run.steps) == (len(request.prompt_ids) - 1) // 9


def test_sampling_parameters_do_not_change_them(engine: Engine, heard: Heard, reference: Reference) -> None:
    """They tell of the raw logits; the tokens they are told for do change."""
    requests = make_requests(
        temperature=1.7,
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        repetition_penalty=1.4,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias=((5, 3.0), (EOS, -100.0)),
    )
    changed = hear(engine, requests)
    assert wrong(changed, requests, reference) == []
    assert changed.run.tokens != heard.run.tokens


def test_negative_control_of_the_transformed_logits(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(logits: Tensor, ids: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
        return token_logprobs(logits / 0.9, ids, tokens, counts)

    monkeypatch.setattr(logprobs_module, "token_logprobs", scaled)
    requests = make_requests()[::3]
    asked = {r.id for r in requests if r.params.logprobs is not None}
    assert set(wrong(hear(engine, requests), requests, reference)) >= asked


@pytest.mark.parametrize("shift", [-1, 1])
def test_negative_control_of_rows_that_are_one_off(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    def shifted(logits: Tensor, ids: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
        return token_logprobs(logits.roll(shift, 0), ids, tokens, counts)

    monkeypatch.setattr(logprobs_module, "token_logprobs", shifted)
    requests = make_requests()[::3]
    assert len(wrong(hear(engine, requests), requests, reference)) > len(requests) // 2


def test_ties_go_by_the_lowest_id(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper half of the logits are the lower half's again, so every place of a list is tied."""
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: twice(logits(self, hidden)))
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5, prompt_logprobs=4, ignore_eos=True)
    heard = hear(engine, [Request("r", make_prompt(6), params, k=3)])
    half = VOCAB // 2
    for entry in heard.logprobs["r"] + heard.prompts["r"]:
        ids, values = [t for t, _ in entry.top], [v for _, v in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(low < half for low in ids[::2])
        assert ids[1::2] == [low + half for low in ids[: 2 * (len(ids) // 2) : 2]]
    assert heard.run.tokens["r"] == [entry.top[0][0] for entry in heard.logprobs["r"]]


def twice(logits: Tensor) -> Tensor:
    half = logits[..., : VOCAB // 2]
    return torch.cat([half, half], -1)


@pytest.mark.parametrize("k", [0, 4])
def test_tokens_that_a_stop_cut_off_have_none(twins: Pair, k: int) -> None:
    """The target drafts for itself, so a round emits five tokens and the stop falls at every place among them."""
    engine = load(twins)
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    request = Request("r", make_prompt(5), params, k=k)
    plain = hear(engine, [replace(request, k=0)])
    cut = set()
    for stop in dict.fromkeys(plain.run.tokens["r"]):
        heard = hear(engine, [replace(request, params=replace(params, stop_token_ids=(stop,)))])
        tokens = heard.run.tokens["r"]
        assert tokens[-1] == stop
        assert equal(heard.logprobs["r"], plain.logprobs["r"][: len(tokens)])
        assert all(len(output.logprobs) == len(output.token_ids) for output in heard.outputs["r"])
        record = heard.run.received["r"].record
        assert record is not None
        cut.add(1 + record.column("accepted")[-1] - record.column("emitted")[-1])
    assert cut == {0} if k == 0 else cut >= {0, 1, 2, 3, 4}


# --- of the prompt ---------------------------------------------------------------------------------------------------


def of_prompt(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": count, **changes})


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 11, 18, 19, 40])
def test_chunks_of_a_prompt(narrow: Engine, reference: Reference, length: int) -> None:
    """Lengths around the chunk's: the last chunk may hold one token, which tells of no other."""
    requests = [Request(f"r{i}", make_prompt(length, seed=i), of_prompt(3 * i), k=i) for i in range(2)]
    heard = hear(narrow, requests)
    assert wrong(heard, requests, reference) == []
    for request in requests:
        assert len(heard.prompts[request.id]) == length - 1
        told = [bool(output.prompt_logprobs) for output in heard.outputs[request.id]]
        assert told == [length > 1] + [False] * (len(told) - 1)  # all with the first output


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pass_that_is_tried_again_tells_nothing_twice(
    narrow: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: bool
) -> None:
    """Every other pass fails once, before or after its forward."""
    caplog.set_level(logging.CRITICAL, "engine")
    run, calls = narrow.target.run, []

    def failing(feeds: Seq[Feed], drafts: Tensor | None = None) -> Tensor:
        calls.append(len(feeds))
        logits = run(feeds, drafts) if after or len(calls) % 3 else torch.empty(0)
        if len(calls) % 3 == 0:
            raise RuntimeError("once")
        return logits

    monkeypatch.setattr(narrow.target, "run", failing)
    requests = [
        Request(f"r{i}", make_prompt(31 + i, seed=i), of_prompt(2, max_tokens=9, logprobs=2, ignore_eos=True), k=3)
        for i in range(4)
    ]
    assert wrong(hear(narrow, requests), requests, reference) == []
    assert len(calls) > 12


def test_negative_control_of_what_a_failed_pass_told(
    narrow: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A round that wrote to its sequences before it failed would tell everything twice."""
    caplog.set_level(logging.CRITICAL, "engine")
    collect, calls = round_module._prompt_logprobs, []

    def eager(*args: Any) -> Any:
        calls.append(told := collect(*args))
        for part, entries in told:
            part.sequence.prompt_logprobs += entries
        if len(calls) == 2:
            raise RuntimeError("once")
        return ()

    monkeypatch.setattr(round_module, "_prompt_logprobs", eager)
    requests = [Request("r", make_prompt(31), of_prompt(2))]
    assert wrong(hear(narrow, requests), requests, reference) == ["r"]


@pytest.mark.parametrize("length", [1, 30])
def test_no_tokens_at_all(narrow: Engine, reference: Reference, length: int) -> None:
    """max_tokens 0: the prompt's alone, in one finish event; drive checks that every slot is free again."""
    requests = [
        Request("none", make_prompt(length), of_prompt(4, max_tokens=0, logprobs=2), k=3),
        Request("some", make_prompt(12), of_prompt(1)),
        Request("silent", make_prompt(length), SamplingParams(max_tokens=0)),
    ]
    heard = hear(narrow, requests)
    assert wrong(heard, requests, reference) == []
    for name in ("none", "silent"):
        (output,) = heard.outputs[name]
        assert (output.token_ids, output.text, output.finish_reason, output.logprobs) == ((), "", "length", ())
        assert output.record is not None
        assert (output.record.output_tokens, output.record.column("drafted"), output.record.first_token) == (
            0,
            [0],
            None,
        )
    assert len(heard.prompts["none"]) == length - 1
    assert heard.prompts["silent"] == []
    assert not narrow.scheduler.running


def test_no_tokens_at_the_very_end_of_the_context(pair: Pair, reference: Reference) -> None:
    engine = load(pair, max_model_len=24)
    requests = [Request("full", make_prompt(24), of_prompt(1, max_tokens=0))]
    assert wrong(hear(engine, requests), requests, reference) == []


def test_rows_that_score_a_prompt_are_not_drawn_from(narrow: Engine) -> None:
    """Asking for them changes no text, of the request itself or of those beside it."""
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)
    requests = [Request("asks", make_prompt(25), params, k=2), Request("beside", make_prompt(3, seed=1), params, k=3)]
    before = drive(narrow, requests).tokens
    requests[0] = replace(requests[0], params=replace(params, prompt_logprobs=3))
    assert drive(narrow, requests).tokens == before


def test_nobody_asks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no second copy to the host."""
    asked = []
    collect = round_module._logprobs

    def counting(batch: DraftBatch, *args: Any) -> Any:
        asked.append(told := collect(batch, *args))
        return told

    monkeypatch.setattr(round_module, "_logprobs", counting)
    monkeypatch.setattr(logprobs_module, "token_logprobs", lambda *_: pytest.fail("nobody asked"))
    drive(engine, [Request("r", make_prompt(4), SamplingParams(max_tokens=6), k=2)])
    assert asked
    assert all(told == ((),) for told in asked)


def table_of(logits: torch.Tensor, taken: list[int]) -> LogitRows:
    """Rows of these logits; `taken` notes how many rows each slice has."""

    def take(rows: torch.Tensor) -> torch.Tensor:
        taken.append(rows.shape[0])
        return logits[rows]

    return LogitRows(take, logits.shape[1], logits.device)


def test_slices_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 500, generator=generator).round(decimals=1)  # with ties
    requests = [
        LogprobRequest(range(3, 30), list(range(27)), 20),
        LogprobRequest(range(32, 33), [5], 0),
        LogprobRequest(range(35, 40), [1] * 5, 2),
    ]
    whole: list[int] = []
    parts: list[int] = []
    expected = compute_logprobs(table_of(logits, whole), requests)
    monkeypatch.setattr(logprobs_module, "SLICE_BYTES", 4 * 500 * logprobs_module.LOGIT_BYTES)
    assert compute_logprobs(table_of(logits, parts), requests) == expected
    assert whole == [33]
    assert parts == [4] * 8 + [1], "33 rows, at most 4 at a time"
    assert [len(found) for found in expected] == [27, 1, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_log_probabilities_of_a_long_prompt_stay_within_their_slice(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 rows of a vocabulary of 20,000 in fp32 are 30.5 MiB of logits alone."""
    monkeypatch.setattr(logprobs_module, "SLICE_BYTES", 2**23)
    states, head = torch.randn(400, 8).to(dtype), torch.randn(8, 20_000).to(dtype)
    logits = LogitRows(lambda rows: states[rows] @ head, 20_000, states.device)
    request = LogprobRequest(range(400), [7] * 400, 20)
    peak = measure_activations(lambda: compute_logprobs_alone(logits, request), states.device)
    assert 2**21 < peak <= 2**23


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_the_likeliest_on_a_device_are_those_on_the_cpu(count: int) -> None:
    """With equal numbers inside and at the end of the list, with nothing but −inf, and with a NaN."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.randint(-4, 0, (40, 9), generator=generator).double()
    logp[0], logp[1, 3], logp[2, 5:] = -torch.inf, torch.nan, -torch.inf
    of_tokens = torch.arange(40.0)[:, None]
    expected, found = (find(logp, of_tokens, count) for find in (_likeliest, _likeliest_on_device))
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        first, second = (sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count] for pairs in (one, other))
        assert first == second
