"""Where the numbers of a round go: those of captured rounds to fixed memory, so that equal layouts have equal
addresses."""

from collections.abc import Iterator

import pytest
import torch

from engine.device import staging as staging_module
from engine.device.graphs import Graphs
from engine.device.round_clock import wait
from engine.device.round_limits import RoundLimits
from engine.device.staging import Staged, Staging
from engine.sampling.device_penalties import TextTable
from tests.engine.shadow.cuda import shadow_cuda
from tests.engine.shadow.device import CUDA, ShadowError, ShadowTensor, active


@pytest.fixture(autouse=True)
def _shadow() -> Iterator[None]:
    with shadow_cuda():
        yield


def capturing(numbers: int = 1000) -> Staging:
    """For rounds of at most so many numbers."""
    return Staging(CUDA, Graphs(CUDA), RoundLimits(4, 4, numbers))


def address(staged: Staged) -> int:
    assert isinstance(staged.tensor, ShadowTensor)
    return staged.tensor.elem.data_ptr()


def put_round(staging: Staging, first: int, *, fixed: bool = True) -> list[Staged]:
    staging.begin(fixed=fixed)
    return [
        staging.ints(range(first, first + 3)),
        staging.int32s([first] * 5),
        staging.floats([first / 3]),
        staging.ints([]),
    ]


def test_rounds_of_equal_layout_have_equal_addresses() -> None:
    staging = capturing()
    earlier = put_round(staging, 1)
    before, layout = [address(s) for s in earlier], staging.layout
    later = put_round(staging, 70)
    assert [address(s) for s in later] == before
    assert staging.layout == layout is not None
    assert [s.tensor.tolist() for s in later] == [[70, 71, 72], [70] * 5, [70 / 3], []]
    assert earlier[0].tensor.tolist() == [70, 71, 72]  # its memory is the later round's now


def test_numbers_that_are_sent_later_in_a_round_lie_behind_the_earlier_ones() -> None:
    staging = capturing()
    together = [address(s) for s in put_round(staging, 1)]
    parts = put_round(staging, 1)
    staging.send()
    more = staging.ints([5])
    assert [address(s) for s in parts] == together
    assert address(more) not in together
    assert parts[0].tensor.tolist() == [1, 2, 3]


def test_a_layout_tells_types_counts_and_what_was_noted() -> None:
    staging = capturing()

    def layout(*, ints: int = 2, floats: int = 2, note: int = 3) -> object:
        staging.begin(fixed=True)
        staging.note("width", note)
        staging.ints([0] * ints)
        staging.floats([0.0] * floats)
        return staging.layout

    kinds = [layout(), layout(ints=3, floats=1), layout(note=4), layout(ints=3)]
    assert len(set(kinds)) == 4
    assert layout() == kinds[0]


def test_other_rounds_have_memory_of_their_own() -> None:
    for staging in (Staging(CUDA), capturing()):
        earlier = put_round(staging, 1, fixed=staging.graphs is None)
        assert earlier[0].tensor.tolist() == [1, 2, 3]
        put_round(staging, 70, fixed=staging.graphs is None)[0].tensor.tolist()
        assert earlier[0].tensor.tolist() == [1, 2, 3]
        assert staging.layout is None


def test_a_round_that_does_not_fit_is_not_captured_and_is_counted() -> None:
    staging = capturing(numbers=8)
    fits = put_round(staging, 1)
    assert address(fits[0])
    assert staging.layout is not None
    assert staging.graphs is not None
    assert not staging.graphs.eager
    more = staging.ints([4, 5])
    assert more.tensor.tolist() == [4, 5]
    assert staging.layout is None
    assert fits[0].tensor.tolist() == [1, 2, 3]
    assert staging.graphs.eager == {"the fixed memory is too small": 1}
    put_round(staging, 1)
    assert staging.layout is not None


def test_what_was_not_foreseen_lies_at_the_same_addresses_whatever_came_before() -> None:
    staging = capturing()

    def last_part(before: int, first: int) -> tuple[int, object]:
        staging.begin(fixed=True)
        earlier = staging.ints([first] * before)
        assert earlier.tensor.tolist() == [first] * before
        staging.begin_last_part()
        more = staging.ints([first + 1] * 2)
        found = address(more), staging.layout
        assert earlier.tensor.tolist() == [first] * before
        assert more.tensor.tolist() == [first + 1] * 2
        return found

    found = last_part(3, 20)
    assert last_part(70, 30) == found
    assert found[1] is not None
    assert last_part(501, 40)[1] is None, "the first part reaches into the last one"
    assert staging.graphs is not None
    assert staging.graphs.eager == {"the fixed memory is too small": 1}


def test_what_a_failed_round_has_left_does_not_move_the_next_one() -> None:
    staging = capturing()
    before = [address(s) for s in put_round(staging, 1)]
    put_round(staging, 2)  # nobody reads it
    assert [address(s) for s in put_round(staging, 3)] == before


def send_two_rounds(staging: Staging, *, ended: bool) -> int:
    """How often the second round waits for the device. ended: whether the first one has, as all do that do not fail."""
    put_round(staging, 1)
    staging.send()
    if ended:
        wait(CUDA)
        staging.end()
    before = active().counts.copy()
    put_round(staging, 70)
    staging.send()
    waits = sum(n for crossing, n in active().counts.since(before).crossings.items() if crossing.kind == "wait")
    wait(CUDA)  # the device reads what it was sent
    return waits


def test_pinned_memory_is_written_again_only_when_the_device_has_read_it() -> None:
    assert send_two_rounds(capturing(), ended=True) == 0
    assert send_two_rounds(capturing(), ended=False) == 1


def test_negative_control_pinned_memory_is_written_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "wait", lambda device: None)
    with pytest.raises(ShadowError, match="written before its upload had ended"):
        send_two_rounds(capturing(), ended=False)


def test_on_the_cpu_nothing_is_fixed() -> None:
    staging = Staging(torch.device("cpu"))
    assert put_round(staging, 1)[0].tensor.tolist() == [1, 2, 3]
    assert staging.layout is None


@pytest.mark.parametrize("ended", [False, True])
def test_texts_of_a_round_that_failed_outlast_the_fixed_memory(ended: bool) -> None:
    """The next captured round has no penalties. ended: the text's row then belongs to another text."""
    staging = capturing()
    table = TextTable(staging, 8)
    staging.begin(fixed=True)
    text = table.start(0)
    text.sync([3, 3])
    table.put(1)
    put_round(staging, 70)
    staging.send()
    staging.begin()
    if ended:
        row = text.row
        del text
        text = table.start(0)
        assert text.row == row
    text.sync([3, 3, 4])
    table.put()
    assert table.uses[text.row].tolist() == [0, 0, 0, 5, 3, 0, 0, 0]
