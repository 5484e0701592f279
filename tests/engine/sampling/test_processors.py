"""The transform against transformers' own processors, called with the text that each row of a round really follows: the
prompt, the output and the drafts before it. In fp64, processed laws within 1e-9.

Presence and frequency penalties, which transformers has not, against OpenAI's formula.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.config import EngineConfig
from engine.intake import Intake
from engine.models.tokenizer import Tokenizer
from engine.sampling import penalties
from engine.sampling.penalties import History, PenaltyRows, occurrences
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.engine.driving import make_sequence
from tests.examples import examples

CPU, VOCAB, CLOSE = torch.device("cpu"), 12, 1e-9
END_IDS = (2, 7)


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence of a round: its text, its drafts, and the logits of its k + 1 rows."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    drafts: tuple[int, ...]
    params: SamplingParams
    seed: int

    @property
    def logits(self) -> Tensor:
        """[k + 1, vocab]; no two are equal, since what is kept of equals is nobody's promise."""
        g = torch.Generator().manual_seed(self.seed)
        return torch.randn(len(self.drafts) + 1, VOCAB, generator=g, dtype=torch.float64) * 3

    def text(self, row: int) -> tuple[int, ...]:
        """What row `row` follows."""
        return self.prompt + self.output + self.drafts[:row]


def sequence_of(case: Case, handle: int = 0) -> Sequence:
    sequence = make_sequence(handle, case.prompt + case.output, case.params, end_ids=END_IDS)
    sequence.num_prompt = len(case.prompt)
    return sequence


def drafts_of(cases: Seq[Case]) -> Tensor:
    """[B, K + 1]; what lies beyond a sequence's drafts is junk."""
    width = max(len(case.drafts) for case in cases) + 1
    return torch.tensor([[*case.drafts, *[-7] * (width - len(case.drafts))] for case in cases])


def ours(cases: Seq[Case], vocab: int = VOCAB) -> Tensor:
    """The laws [R, vocab] of all rows of a round; the caller's logits must come out as they went in."""
    sequences = [sequence_of(case, i) for i, case in enumerate(cases)]
    sampler = Sampler(sequences, [len(case.drafts) for case in cases], VOCAB, CPU)
    logits = torch.cat([case.logits[:, :vocab] for case in cases])
    before, rows = logits.clone(), range(len(logits))
    laws = sampler.laws(sampler.scores(logits, rows, drafts_of(cases)), rows)
    assert torch.equal(logits, before)
    return laws.exp()


def theirs(case: Case, row: int) -> Tensor:
    """The law [vocab] of one row, by transformers' processors in generate's order."""
    p, text = case.params, torch.LongTensor([case.text(row)])
    chain = LogitsProcessorList()
    if p.logit_bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in p.logit_bias]))
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.presence_penalty or p.frequency_penalty:
        chain.append(OpenAIPenalties(len(case.prompt), p))
    chain.append(MinNewTokensLengthLogitsProcessor(len(case.prompt), p.min_tokens, list(END_IDS)))
    chain.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    processed: Tensor = chain(text, case.logits[row : row + 1])
    return processed[0].softmax(0)


class OpenAIPenalties:
    """mu[j] − c[j] · frequency − (c[j] > 0) · presence, with c[j] how often j was sampled so far."""

    def __init__(self, num_prompt: int, params: SamplingParams) -> None:
        self._num_prompt, self._params = num_prompt, params

    def __call__(self, text: Tensor, scores: Tensor) -> Tensor:
        c = text[0, self._num_prompt :].bincount(minlength=scores.shape[1]).to(scores.dtype)
        return scores - c * self._params.frequency_penalty - c.clamp(max=1) * self._params.presence_penalty


def error(cases: Seq[Case]) -> float:
    """The largest difference in any token's probability, over all rows of the round."""
    expected = [theirs(case, row) for case in cases for row in range(len(case.drafts) + 1)]
    return (ours(cases) - torch.stack(expected)).abs().max().item()


# Rounds

TOKENS = st.integers(0, VOCAB - 1)
TEXTS = st.lists(TOKENS, max_size=8).map(tuple)
# Eighths, since transformers keeps biases in fp32. Its 5.17 refuses a bias of token 0.
BIASES = st.dictionaries(st.integers(1, VOCAB - 1), st.integers(-40, 40).map(lambda n: n / 8), max_size=4).map(
    lambda d: tuple(d.items())
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 4, 9, VOCAB, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    logit_bias=BIASES,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 2.0]),
    min_tokens=st.sampled_from([0, 0, 3, 9]),
)
PENALISED = st.builds(
    lambda params, presence, frequency: replace(params, presence_penalty=presence, frequency_penalty=frequency),
    PARAMS,
    st.sampled_from([0.0, 0.8, -1.1, 2.0]),
    st.sampled_from([0.0, 0.5, -0.4, 2.0]),
)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=8).map(tuple)


def cases(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[Case]]:
    case = st.builds(Case, PROMPTS, TEXTS, st.lists(TOKENS, max_size=4).map(tuple), params, st.integers(0, 10**6))
    return st.lists(case, min_size=1, max_size=3)


@examples(50)
@given(cases(PARAMS))
def test_laws_are_those_of_transformers(batch: list[Case]) -> None:
    """Every row of a mixed round, after the drafts that it sees."""
    assert error(batch) < CLOSE


@examples(40)
@given(cases(PENALISED))
def test_penalties_are_those_of_openai(batch: list[Case]) -> None:
    """Together with all the rest; over the output alone, never the prompt."""
    assert error(batch) < CLOSE


# The prompt shares a token with the output, drafts repeat one another and what came before.
ALL = SamplingParams(
    temperature=0.8,
    logit_bias=((1, 2.0), (5, -1.0)),
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    min_tokens=4,
)
TELLING = Case(prompt=(1, 3, 3, 4), output=(3, 5), drafts=(5, 6, 6, 1), params=ALL, seed=1)

Seen = Seq[tuple[int, int, int]]

put_penalties, sync = PenaltyRows.__init__, History.sync


def freeze_at_the_rounds_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(self: PenaltyRows, histories: Seq[History], seen: Seen, *others: Any) -> None:
        put_penalties(self, histories, (), *others)

    monkeypatch.setattr(PenaltyRows, "__init__", frozen)


def see_one_draft_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: PenaltyRows, histories: Seq[History], seen: Seen, *others: Any) -> None:
        newest = {row: entry for entry in seen for row in entry[:1]}
        put_penalties(self, histories, [entry for entry in seen if entry != newest[entry[0]]], *others)

    monkeypatch.setattr(PenaltyRows, "__init__", late)


def count_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def counting(self: History, tokens: Seq[int]) -> None:
        self._num_prompt = 0
        sync(self, tokens)

    monkeypatch.setattr(History, "sync", counting)


def look_at_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: History, tokens: Seq[int]) -> None:
        sync(self, tokens)
        self.tokens = self.tokens[self.counts[self.tokens] > 0]

    monkeypatch.setattr(History, "sync", blind)


def count_drafts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(numbers: Tensor, among: Tensor) -> Tensor:
        return occurrences(numbers, among).clamp(max=1)

    monkeypatch.setattr(penalties, "occurrences", once)


def ban_as_if_all_rows_were_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_rows(sequence: Sequence, ahead: int) -> tuple[int, ...]:
        return tuple(sorted(sequence.end_ids)) if sequence.num_output < sequence.params.min_tokens else ()

    monkeypatch.setattr("engine.sampling.adjustments.banned", first_rows)


@pytest.mark.parametrize(
    "fault",
    [
        freeze_at_the_rounds_start,
        see_one_draft_too_few,
        count_the_prompt,
        look_at_the_output_alone,
        count_drafts_once,
        ban_as_if_all_rows_were_the_first,
    ],
)
def test_a_fault_shows(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert error([TELLING]) < CLOSE
    fault(monkeypatch)
    assert error([TELLING]) > 1e-4


def test_each_parameter_has_an_effect() -> None:
    """Control of the comparison: a parameter that both sides ignored would pass it."""
    defaults = SamplingParams()
    knobs = {"top_k": 2, "top_p": 0.3, "min_p": 0.5, "temperature": 0.5}
    knobs |= {name: getattr(ALL, name) for name in ("logit_bias", "repetition_penalty", "presence_penalty")}
    knobs |= {name: getattr(ALL, name) for name in ("frequency_penalty", "min_tokens")}
    plain = ours([replace(TELLING, params=defaults)])
    for name, value in knobs.items():
        params = replace(defaults, **{name: value})  # type: ignore[arg-type]
        changed = (ours([replace(TELLING, params=params)]) - plain).abs().amax(1)
        assert changed.max() > 1e-3, name


def test_an_illegal_draft_disturbs_no_row_before_it_and_no_other_sequence() -> None:
    """Rows behind it are rejected anyway."""
    broken = replace(TELLING, drafts=(5, VOCAB + 3, -4, 6))
    batch = ours([broken, TELLING])
    alone = ours([TELLING])
    assert torch.equal(batch[:2], alone[:2])
    assert torch.equal(batch[5:], alone)


# Smaller tables


@examples(40)
@given(cases(PENALISED.map(lambda p: replace(p, top_k=min(p.top_k, 1), top_p=1.0, min_p=0.0))), st.integers(8, VOCAB))
def test_a_smaller_table_is_a_cut_of_the_larger(batch: list[Case], vocab: int) -> None:
    """A draft's law over its own vocabulary: the target's, given that the token lies inside. (Truncation depends on
    what is outside, but for a top-1 that lies inside.) Biased, seen or banned ids beyond the table do no harm."""
    whole, cut = ours(batch), ours(batch, vocab)
    rows = [case for case in batch for _ in range(len(case.drafts) + 1)]
    for large, small, case in zip(whole, cut, rows, strict=True):
        if case.params.top_k == 1 and large.argmax() >= vocab:
            continue
        assert torch.allclose(small, large[:vocab] / large[:vocab].sum(), rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    "knobs", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}]
)
def test_a_law_that_lies_inside_a_smaller_table_is_the_same_there(knobs: dict[str, float]) -> None:
    params = replace(ALL, logit_bias=tuple((token, -100.0) for token in range(8, VOCAB)), **knobs)  # type: ignore[arg-type]
    case = replace(TELLING, params=params)
    assert torch.allclose(ours([case], 8), ours([case])[:, :8], rtol=0, atol=CLOSE)


# Histories


@examples(40)
@given(PROMPTS, st.lists(TEXTS, max_size=5))
def test_a_history_counted_in_pieces_is_one_counted_at_once(prompt: tuple[int, ...], commits: list[list[int]]) -> None:
    pieces = History(ALL, len(prompt), VOCAB)
    tokens = list(prompt)
    pieces.sync(tokens)
    for commit in commits:
        tokens += commit
        pieces.sync(tokens)
        once = History(ALL, len(prompt), VOCAB)
        once.sync(tokens)
        assert torch.equal(pieces.tokens, once.tokens)
        assert torch.equal(pieces.counts, once.counts)
    output = torch.tensor(tokens[len(prompt) :], dtype=torch.int64)
    assert pieces.counts.tolist() == output.bincount(minlength=VOCAB).tolist()
    assert pieces.tokens.tolist() == tokens


def test_a_history_first_counted_inside_the_prompt() -> None:
    """Commits that end before the prompt does are prompt to the last token."""
    history = History(ALL, 4, VOCAB)
    for n in (2, 3, 6):
        history.sync([1, 3, 3, 4, 3, 5][:n])
    assert history.counts.nonzero().flatten().tolist() == [3, 5]


def test_a_round_leaves_the_history_at_its_committed_tokens() -> None:
    """Drafts are seen by their round's rows and forgotten: most of them are about to be rejected."""
    sequence = sequence_of(TELLING)
    for _ in range(2):
        sampler = Sampler([sequence], [4], VOCAB, CPU)
        first = sampler.scores(TELLING.logits, range(5), drafts_of([TELLING]))
        assert sequence.history is not None
        assert sequence.history.counts.nonzero().flatten().tolist() == [3, 5]
        assert torch.equal(first, sampler.scores(TELLING.logits, range(5), drafts_of([TELLING])))


# What cannot be drawn before min_tokens


class Letters:
    """All that intake needs of a tokenizer here."""

    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Seq[int]) -> str:
        return "".join(chr(97 + token) for token in ids)


INTAKE = Intake(EngineConfig(target="target"), cast(Tokenizer, Letters()), frozenset(END_IDS), VOCAB, 64, ())


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop_token_ids", [(), (4,), (4, 2)])
@pytest.mark.parametrize("num_output", [0, 2])
@pytest.mark.parametrize("min_tokens", [0, 1, 3, 16])
def test_bans_are_the_ids_that_would_end_the_text(
    min_tokens: int, num_output: int, stop_token_ids: tuple[int, ...], ignore_eos: bool
) -> None:
    """Row j draws output number num_output + j: of rows before min_tokens exactly the end ids have no chance."""
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    sequence = INTAKE.sequence(Request("a", (1, 1, 1), params), 0, 0.0)
    sequence.tokens += [1] * num_output
    scores = Sampler([sequence], [4], VOCAB, CPU).scores(torch.zeros(5, VOCAB), range(5))
    ends = set(stop_token_ids) | (set() if ignore_eos else set(END_IDS))
    for j, row in enumerate(scores):
        banned = {token for token, score in enumerate(row.tolist()) if score == -inf}
        assert banned == (ends if num_output + j < min_tokens else set())
