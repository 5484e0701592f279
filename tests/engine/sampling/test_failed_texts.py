"""The table of penalised texts on a device: a fault costs a round, never a text."""

from typing import Any

import pytest
import torch
from torch import Tensor

import engine.device.staging as staging_module
from cache.transfer import index_tensor
from engine.device.staging import Staging
from engine.kernels.penalise import record_texts
from engine.sampling import device_penalties
from engine.sampling.device_penalties import DeviceText, TextTable

VOCAB = 8
PROMPT, OUTPUT = [1, 2], [2, 3, 3]
USES = [0, 1, 3, 5, 0, 0, 0, 0]  # 1 if the token is in the text, plus twice its number in the output


def started(table: TextTable) -> DeviceText:
    text = table.start(len(PROMPT))
    text.sync(PROMPT + OUTPUT)
    table.put()
    return text


def uses(table: TextTable, text: DeviceText) -> Any:
    return table.uses[text.row].tolist()


def once(fail: Any, work: Any) -> Any:
    """work, which raises at its first call."""
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            fail()
        return work(*args)

    return failing


def out_of_memory() -> None:
    raise torch.OutOfMemoryError


def test_tokens_that_a_failed_round_did_not_record_are_recorded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TextTable(Staging(torch.device("cpu")), VOCAB)
    text = started(table)
    monkeypatch.setattr(device_penalties, "record_texts", once(out_of_memory, record_texts))
    with pytest.raises(torch.OutOfMemoryError):
        uses(table, text)
    assert uses(table, text) == USES


def test_numbers_that_could_not_be_sent_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging(torch.device("cpu"))
    staging.deferred = True
    table = TextTable(staging, VOCAB)
    text, other = started(table), staging.floats([0.5])

    monkeypatch.setattr(staging_module, "index_tensor", once(out_of_memory, index_tensor))
    with pytest.raises(torch.OutOfMemoryError):
        uses(table, text)
    assert uses(table, text) == USES
    assert isinstance(other.tensor, Tensor)
    assert other.tensor.tolist() == [0.5]


def test_a_row_of_an_ended_text_begins_empty() -> None:
    table = TextTable(Staging(torch.device("cpu")), VOCAB)
    first = started(table)
    row = first.row
    assert uses(table, first) == USES
    del first
    again = started(table)
    assert again.row == row
    assert uses(table, again) == USES
