"""Texts that stay on the device: counted in pieces, in rows that are used again, whatever happens to a round."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.device.round_limits import RoundLimits
from engine.device.staging import RoundNumbers, Staging
from engine.kernels.penalise import OUTPUT, SEEN
from engine.sampling.device_penalties import DevicePenalties, DeviceText, TextTable
from engine.sampling.penalties import History, PenaltyRows
from engine.sequence import Sequence, State, scratch_sequence
from engine.types import SamplingParams

VOCAB = 12
CPU = torch.device("cpu")
STRICT = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25)


def uses_of(prompt: list[int], output: list[int]) -> list[int]:
    """A row of the table, from the whole text."""
    return [OUTPUT * output.count(t) + SEEN * (t in prompt + output) for t in range(VOCAB)]


def put(table: TextTable, *texts: tuple[DeviceText, list[int]]) -> None:
    """The part of a round that comes before its draws."""
    for text, tokens in texts:
        text.sync(tokens)
    table.put()


def test_a_text_counted_in_pieces() -> None:
    table = TextTable(Staging(CPU), VOCAB)
    text, other = table.start(4), table.start(1)
    tokens = [1, 3, 3, 4, 3, 5, 5]
    for n in (2, 3, 6, 7):
        put(table, (text, tokens[:n]), (other, [7]))
        expected = [uses_of(tokens[:4][:n], tokens[4:n]), uses_of([7], [])]
        assert table.uses.tolist()[1:3] == expected


def test_a_round_that_failed_before_its_draws_loses_no_token() -> None:
    table = TextTable(Staging(CPU), VOCAB)
    text = table.start(2)
    put(table, (text, [1, 2]))
    put(table, (text, [1, 2, 3]))  # the round before has read nothing
    assert table.uses[text.row].tolist() == uses_of([1, 2], [3])


def test_the_row_of_a_text_that_has_ended_is_used_again() -> None:
    """Also where its last tokens are still on their way."""
    table = TextTable(Staging(CPU), VOCAB)
    text, lasting = table.start(1), table.start(1)
    row = text.row
    put(table, (text, [1, 1]), (lasting, [9, 9]))
    del text
    gc.collect()
    new = table.start(1)
    put(table, (new, [2]))
    assert new.row == row
    assert table.uses[row].tolist() == uses_of([2], [])
    assert table.uses[lasting.row].tolist() == uses_of([9], [9])
    assert len(table.uses) == 1 + 2  # one row belongs to no text


def test_texts_stay_when_the_table_grows() -> None:
    table = TextTable(Staging(CPU), VOCAB)
    texts = []
    for n in range(9):
        texts.append(table.start(1))
        put(table, (texts[-1], [n, n + 1]))
        assert [table.uses[text.row].tolist() for text in texts] == [uses_of([i], [i + 1]) for i in range(n + 1)]


def test_one_table_for_each_device_and_vocabulary() -> None:
    staging = Staging(CPU)
    assert TextTable.of(staging, VOCAB) is TextTable.of(staging, VOCAB)
    assert TextTable.of(staging, VOCAB) is not TextTable.of(staging, VOCAB + 1)
    assert TextTable.of(staging, VOCAB) is not TextTable.of(Staging(CPU), VOCAB)


def penalised(logits: Tensor, drafts: Tensor, columns: list[tuple[int, ...]]) -> Tensor:
    """The rows of one sequence, penalised by the table. A row between them belongs to a sequence without penalties."""
    staging = Staging(CPU)
    table = TextTable(staging, VOCAB)
    text = table.start(3)
    put(table, (text, [1, 3, 3, 4, 5, 5]))
    texts, params = [text, None, text], [STRICT, SamplingParams(), STRICT]
    places = [(1, columns[0]), (0, (0, 1)), (1, columns[1])]
    rows = DevicePenalties(table, texts, params, places, RoundNumbers(staging), (4, 5, 6))
    return rows.apply(logits, drafts)


def test_rows_are_penalised_as_on_the_cpu() -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(3, VOCAB, generator=g, dtype=torch.float64)
    drafts = torch.tensor([[1, 2], [6, 5]])
    history = History(STRICT, 3, VOCAB)
    history.sync([1, 3, 3, 4, 5, 5])
    cases: list[list[tuple[int, ...]]] = [[(), (0,)], [(1,), (0, 1)], [(), ()]]
    for columns in cases:
        seen = [(n, 1, column) for n, row in enumerate(columns) for column in row]
        cpu = PenaltyRows([history] * 2, seen, RoundNumbers(Staging(CPU)), (0, 2)).apply(logits[[0, 2]], drafts)
        found = penalised(logits, drafts, columns)
        assert torch.equal(found[[0, 2]], cpu)
        assert torch.equal(found[1], logits[1])
        assert not torch.equal(cpu, logits[[0, 2]])


def test_a_table_for_all_texts_that_an_engine_runs_never_moves() -> None:
    """Its memory is known at the start, and captured graphs keep its address."""
    table = TextTable(Staging(CPU, limits=RoundLimits(4, 0)), VOCAB)
    texts = [table.start(0)]
    put(table, (texts[0], [1]))
    address, size = table.uses.data_ptr(), table.uses.shape
    assert size == (1 + 4, VOCAB)  # one row belongs to no text
    for n in range(12):
        texts = [*texts[-3:]]
        texts.append(table.start(0))
        put(table, (texts[-1], [n]))
        assert (table.uses.data_ptr(), table.uses.shape) == (address, size)
    for text, token in zip(texts, (8, 9, 10, 11), strict=True):
        assert table.uses[text.row].tolist() == uses_of([], [token])


@pytest.mark.parametrize("leave", [lambda s: s.preempt(), lambda s: s.finish("stop")])
def test_a_sequence_that_runs_no_more_has_no_text(leave: Callable[[Sequence], None]) -> None:
    table = TextTable(Staging(CPU, limits=RoundLimits(1, 0)), VOCAB)
    sequence = scratch_sequence("s", 0, [1], STRICT)
    sequence.start()
    for _ in range(2):
        sequence.device_text = table.start(1)
        put(table, (sequence.device_text, [1]))
        assert len(table.uses) == 1 + 1
        if sequence.state is State.RUNNING:
            leave(sequence)
