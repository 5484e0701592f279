"""The lifecycle table."""

import pytest

from engine.sequence import TRANSITIONS, Sequence, State
from tests.engine.driving import make_sequence


def bring_to(state: State) -> Sequence:
    sequence = make_sequence(1, [1, 2])
    if state is State.RUNNING:
        sequence.start()
    elif state is State.FINISHED:
        sequence.finish("length")
    assert sequence.state is state
    return sequence


EVENTS = {"start": lambda s: s.start(), "preempt": lambda s: s.preempt(), "finish": lambda s: s.finish("stop")}
LEGAL = {
    (State.WAITING, "start"): State.RUNNING,
    (State.WAITING, "finish"): State.FINISHED,
    (State.RUNNING, "preempt"): State.WAITING,
    (State.RUNNING, "finish"): State.FINISHED,
}


@pytest.mark.parametrize("event", sorted(EVENTS))
@pytest.mark.parametrize("state", list(State))
def test_lifecycle(state: State, event: str) -> None:
    sequence = bring_to(state)
    reason = sequence.finish_reason
    if (state, event) in LEGAL:
        EVENTS[event](sequence)
        assert sequence.state is LEGAL[state, event]
    else:
        with pytest.raises(RuntimeError, match=f"sequence-1: {event} in state {state.value}"):
            EVENTS[event](sequence)
        assert (sequence.state, sequence.finish_reason) == (state, reason)


def test_the_table_is_complete() -> None:
    assert TRANSITIONS.keys() == set(State)
    assert {(s, e): t for s, row in TRANSITIONS.items() for e, t in row.items()} == LEGAL
