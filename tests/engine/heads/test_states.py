"""The target's states: those of transformers at every layer, and kept until a head has read them, and no longer."""

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.device.staging import Staging
from engine.heads import states as states_module
from engine.heads.states import TargetStates
from engine.models.adapter import ReplacedBase, States
from engine.models.decoder import WatchedStates
from engine.models.feeds import Feed, StateReader
from engine.models.loader import load_model, open_checkpoint
from engine.models.runner import Runner
from engine.sequence import Sequence
from engine.trees import Parents, path
from tests.engine.driving import make_sequence
from tests.engine.models.families import CASES, InFP64, random_checkpoint
from tests.engine.models.test_adapter import random_checkpoint as adapted_checkpoint
from tests.engine.pairs import VOCAB
from tests.examples import in_proofs, usual_and_proofs
from tests.kv import kv_layout

CPU = torch.device("cpu")
MAX_LEN = 64
NATIVE = ("llama", "gemma2", "granite")  # also: multiplied embeddings, residuals and norms behind sublayers
ADAPTED = ("gpt_neox", "cohere", "opt", "starcoder2")
Patch = pytest.MonkeyPatch

# --- what a pass keeps -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorder:
    """A StateReader that compares the states of every row with transformers' for the text up to that row."""

    layers: tuple[int, ...]
    expected: Callable[[list[int]], Tensor]  # text → [len(text), len(layers) · hidden]
    texts: list[list[list[int]]] = field(default_factory=list)  # of each feed of the coming pass: the text of each row
    compared: int = 0

    def wants(self, feeds: Seq[Feed]) -> bool:
        return True

    def prepare(self, feeds: Seq[Feed], starts: Seq[int], staging: Staging) -> None:
        pass

    def read(self, feeds: Seq[Feed], starts: Seq[int], states: Tensor) -> None:
        parts = states.split([feed.committed + feed.drafts for feed in feeds])
        for rows, texts, start in zip(parts, self.texts, starts, strict=True):
            assert len(texts[0]) == start + 1
            for row, text in zip(rows, texts, strict=True):
                error = (row - self.expected(text)[-1]).abs().max().item()
                assert error < 1e-9, f"the states of position {len(text) - 1} differ by {error}"
                self.compared += 1


class Passes:
    """A model with a recorder of all of its layers, in an order of their own."""

    def __init__(self, checkpoint: str) -> None:
        model = load_model(open_checkpoint(checkpoint), dtype=torch.float64, device=CPU, max_len=MAX_LEN)
        self.runner = Runner(model, kv_layout(4, MAX_LEN), CPU)
        count = model.config.num_layers
        self.layers = (count, *range(count))
        eager = {"attn_implementation": "eager"}  # by default transformers 5.17 leaves out gemma 2's soft caps
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **eager)
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.recorder = Recorder(self.layers, self.hidden)
        self.runner.reader = cast(StateReader, self.recorder)  # nothing is captured
        self.sequences = [make_sequence(n, [(7 * n + 5 * i) % VOCAB for i in range(40)]) for n in range(3)]

    def hidden(self, text: list[int]) -> Tensor:
        if tuple(text) not in self._known:
            out = self._model(torch.tensor([text]), output_hidden_states=True)
            # The last ones are behind the final norm: the head reads them.
            head = self._model.get_output_embeddings()
            assert torch.equal(head(out.hidden_states[-1]).argmax(-1), out.logits.argmax(-1))
            self._known[tuple(text)] = torch.cat([out.hidden_states[layer][0] for layer in self.layers], 1)
        return self._known[tuple(text)]

    def run(self, *parts: tuple[int, int, list[int], Parents | None]) -> None:
        """One pass of (sequence, committed tokens, drafts, their tree)."""
        self.recorder.texts, feeds = [], []
        table = torch.zeros(len(parts), 1 + max(len(p[2]) for p in parts), dtype=torch.int64)
        for i, (n, count, drafts, parents) in enumerate(parts):
            sequence, cache = self.sequences[n], self.runner.cache
            start = cache.length(n) if cache.holds(n) else 0
            text = sequence.tokens[: start + count]
            shape = parents or tuple(range(-1, len(drafts) - 1))
            nodes = [[*text, *(drafts[v] for v in path(shape, node))] for node in range(len(drafts))]
            self.recorder.texts.append([*(text[: end + 1] for end in range(start, start + count)), *nodes])
            feeds.append(Feed(sequence, count, len(drafts), parents=parents))
            table[i, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        with torch.inference_mode():
            self.runner.run(feeds, table)
        for n, _, drafts, _ in parts:
            self.runner.cache.truncate_to(n, self.runner.cache.length(n) - len(drafts))


@pytest.fixture
def in_fp64() -> Iterator[None]:
    with InFP64():
        yield


def saved(kind: str, directory: Path) -> str:
    return random_checkpoint(CASES[kind], directory) if kind in NATIVE else adapted_checkpoint(kind, directory)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.parametrize("kind", usual_and_proofs([*NATIVE, *ADAPTED], ("llama", "gemma2", "gpt_neox")))
def test_states_are_those_of_transformers_at_every_layer(kind: str, tmp_path: Path) -> None:
    """Chunks, several sequences in a pass, chains and trees of drafts."""
    passes = Passes(saved(kind, tmp_path))
    for count in (7, 1, 12):
        passes.run((0, count, [], None))
    passes.run((1, 5, [], None), (0, 1, [9, 11, 13], None), (2, 3, [], None))
    passes.run((2, 1, [20, 21, 22, 23, 24], (-1, -1, 0, 1, 0)), (1, 4, [], None), (0, 1, [30], None))
    assert passes.recorder.compared == 20 + 5 + 4 + 3 + 6 + 4 + 2


@pytest.mark.usefixtures("in_fp64")
def test_negative_control_a_layer_too_late(tmp_path: Path, monkeypatch: Patch) -> None:
    watch = WatchedStates.__init__
    monkeypatch.setattr(WatchedStates, "__init__", lambda self, layers: watch(self, tuple(n + 1 for n in layers)))
    with pytest.raises(AssertionError, match="differ"):
        Passes(saved("llama", tmp_path)).run((0, 4, [], None))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_states_that_cannot_be_kept_cost_no_pass(kind: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """R9: the copies of a pass's states may not fit into the memory."""
    passes = Passes(saved(kind, tmp_path))
    passes.recorder.texts = [[[0]]]

    def full(self: WatchedStates, *args: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(WatchedStates, "_copy", full)
    with torch.inference_mode():
        logits = passes.runner.run([Feed(passes.sequences[0], 3)])
    assert torch.isfinite(logits).all()
    assert passes.recorder.compared == 0


def test_states_of_which_some_cannot_be_kept_leave_nothing_in_memory() -> None:
    watched = WatchedStates((0, 2))
    watched.keep(0, torch.ones(3, 4))
    assert watched.table is not None
    table = weakref.ref(watched.table)
    watched.keep(2, torch.ones(3, 5))
    assert not watched.layers
    assert table() is None


def test_a_target_that_gives_no_states_costs_no_pass(tmp_path: Path, monkeypatch: Patch) -> None:
    passes = Passes(saved("gpt_neox", tmp_path))
    base = ReplacedBase.forward

    def without(self: ReplacedBase, *args: Any, **kwargs: Any) -> Any:
        output = base(self, *args, **kwargs)
        return States(output.last_hidden_state)

    monkeypatch.setattr(ReplacedBase, "forward", without)
    with torch.inference_mode():
        passes.runner.run([Feed(passes.sequences[0], 3)])
    assert passes.recorder.compared == 0


# --- what is kept until a head reads it ------------------------------------------------------------------------------


def drafting(handle: int, drafter: Any = "model", k: int | None = 3) -> Sequence:
    sequence = make_sequence(handle, [1])
    sequence.drafter, sequence.k = drafter, k
    return sequence


SERVED, IDLE = range(4), (8, 9)  # handles


@dataclass(slots=True)
class Modelled:
    """A sequence as the tests see it."""

    base: int = 0  # positions whose tokens are committed and read
    drafts: int = 0  # of the latest pass, about which nothing is decided yet
    kept: dict[int, float] = field(default_factory=dict)  # position → state


def states_of(states: TargetStates, handle: int, positions: range) -> Tensor:
    """The states [n, width] that are kept of these positions."""
    return states.take(torch.tensor(states.row_numbers(handle, positions.start, positions.stop)))


class StatesMachine(RuleBasedStateMachine):
    """TargetStates beside a dictionary of each sequence's positions."""

    max_rows, late_rows = 12, 0
    looks_always = True  # else late states stay late from rule to rule

    def __init__(self) -> None:
        super().__init__()
        self.states = TargetStates((0,), frozenset({"model"}), self.max_rows, self.late_rows)
        self.modelled: dict[int, Modelled] = {}
        self.next_state = 1.0

    @rule(data=st.data(), handles=st.sets(st.sampled_from(SERVED), min_size=1), idle=st.booleans())
    def read(self, data: st.DataObject, handles: set[int], idle: bool) -> None:
        feeds, starts, values = list[Feed](), list[int](), list[float]()
        for handle in [*sorted(handles), *(IDLE if idle else ())]:
            count, drafts = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
            new = [self.next_state + i for i in range(count + drafts)]
            self.next_state += len(new)
            start = 0
            if handle in SERVED:
                start = self._continue(data, handle, count, drafts, new)
                feeds.append(Feed(drafting(handle), count, drafts))
            else:
                feeds.append(
                    Feed(drafting(handle, *(("ngram", 3) if handle == IDLE[0] else ("model", 0))), count, drafts)
                )
            starts.append(start)
            values += new
        fits = sum(len(m.kept) for m in self.modelled.values()) <= self.max_rows
        table = torch.tensor(values)[:, None].expand(-1, 2).contiguous()
        assert self.states.wants(feeds)
        if data.draw(st.booleans()):
            self.states.prepare(feeds, starts, Staging(CPU))
        self.states.read(feeds, starts, table)
        if not self.late_rows:
            table.fill_(-1.0)  # the pass's memory may go to others
        for handle, modelled in self.modelled.items() if self.looks_always else ():
            held = self.states.positions(handle)
            if fits or not held:
                assert not fits or len(held) == len(modelled.kept)
            else:
                assert held.stop == max(modelled.kept) + 1
            modelled.kept = {p: s for p, s in modelled.kept.items() if p in held}

    @rule(data=st.data(), passes=st.integers(1, 40))
    def decode(self, data: st.DataObject, passes: int) -> None:
        """Passes of one row for each sequence, as many as are copied together, and others in between."""
        handles = sorted(data.draw(st.sets(st.sampled_from(SERVED), min_size=1)))
        for number in range(passes):
            if data.draw(st.integers(0, 9)) == 0:
                handles = data.draw(st.permutations(handles))[: data.draw(st.integers(1, len(handles)))]
            starts, states = list[int](), list[float]()
            for handle in handles:
                starts.append(self._continue(data, handle, 1, 0, [self.next_state], moves=number == 0))
                states.append(self.next_state)
                self.next_state += 1
            feeds = [Feed(drafting(handle), 1) for handle in handles]
            self.states.read(feeds, starts, torch.tensor(states)[:, None].expand(-1, 2).contiguous())
            for handle in handles:
                self.states.settle(handle, self.modelled[handle].base, ())
        if sum(len(modelled.kept) for modelled in self.modelled.values()) > self.max_rows:
            for handle, modelled in self.modelled.items():
                held = self.states.positions(handle)
                assert not held or held.stop == max(modelled.kept) + 1
                modelled.kept = {p: s for p, s in modelled.kept.items() if p in held}

    @rule(handles=st.sets(st.sampled_from(SERVED), min_size=1), count=st.integers(1, 5), start=st.integers(0, 9))
    def prepare_a_pass_that_does_not_come(self, handles: set[int], count: int, start: int) -> None:
        feeds = [Feed(drafting(handle), count) for handle in handles]
        self.states.prepare(feeds, [start] * len(feeds), Staging(CPU))

    def _continue(
        self, data: st.DataObject, handle: int, count: int, drafts: int, new: list[float], *, moves: bool = True
    ) -> int:
        """Where the pass begins: behind the last token, earlier if a pass is tried again, later behind a hole; of a new
        sequence behind a prefix."""
        modelled = self.modelled.get(handle)
        if modelled is None:
            modelled = self.modelled[handle] = Modelled(data.draw(st.integers(0, 5)))
            start = modelled.base
        else:
            start = max(0, modelled.base + (data.draw(st.sampled_from((0, 0, 0, 0, -1, -3, 2))) if moves else 0))
        kept = {p: s for p, s in modelled.kept.items() if p < start}
        if start - 1 not in kept:
            kept = {}
        modelled.kept = kept | {start + i: state for i, state in enumerate(new)}
        modelled.base, modelled.drafts = start + count, drafts
        return start

    @rule(data=st.data(), handle=st.sampled_from(SERVED))
    def settle(self, data: st.DataObject, handle: int) -> None:
        modelled = self.modelled.get(handle, Modelled())
        nodes = sorted(data.draw(st.sets(st.integers(0, modelled.drafts - 1)))) if modelled.drafts else []
        base = modelled.base
        self.states.settle(handle, base, nodes)
        path = {base + i: modelled.kept[base + node] for i, node in enumerate(nodes) if base + node in modelled.kept}
        modelled.kept = {p: s for p, s in modelled.kept.items() if p < base} | path
        modelled.base, modelled.drafts = base + len(nodes), 0

    @rule(handle=st.sampled_from(SERVED), count=st.integers(0, 6))
    def skip(self, handle: int, count: int) -> None:
        modelled = self.modelled.get(handle, Modelled())
        start = min(modelled.kept, default=0) + count
        self.states.skip(handle, start)
        modelled.kept = {p: s for p, s in modelled.kept.items() if p >= start}

    @rule(handle=st.sampled_from(SERVED))
    def drop(self, handle: int) -> None:
        self.states.drop(handle)
        self.modelled.pop(handle, None)

    @invariant()
    def rows_are_accounted_for(self) -> None:
        self.states.audit(set(self.modelled))
        if self.looks_always:
            self.look()

    @rule()
    def look(self) -> None:
        for handle, modelled in self.modelled.items():
            held = self.states.positions(handle)
            assert list(held) == sorted(modelled.kept)
            if held:
                table = states_of(self.states, handle, held)
                assert table.tolist() == [[modelled.kept[p]] * 2 for p in held]

        assert not any(self.states.positions(handle) for handle in IDLE)

    def teardown(self) -> None:
        self.look()


class Roomy(StatesMachine):
    max_rows = 1000


class Narrow(StatesMachine):
    late_rows = 9


class Late(Roomy):
    late_rows, looks_always = 25, False


@pytest.mark.parametrize("count", [8, *in_proofs(300)])
@pytest.mark.parametrize("machine", [StatesMachine, Roomy, Narrow, Late])
def test_states_are_kept_as_in_a_dictionary(machine: type[StatesMachine], count: int) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=25))


def test_a_fault_while_preparing_costs_states_and_not_the_pass(monkeypatch: Patch) -> None:
    states, staging = TargetStates((0,), frozenset({"model"}), 12), Staging(CPU)
    feeds = [Feed(drafting(SERVED[0]), 3)]
    states.prepare(feeds, [0], staging)
    states.read(feeds, [0], torch.ones(3, 2))

    def fail(values: Seq[int]) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "ints", fail)
        states.prepare([Feed(drafting(SERVED[0]), 2)], [3], staging)
    states.audit(set())
    states.read(feeds, [5], torch.full((3, 2), 2.0))  # what the pass computes is kept again
    assert list(states.positions(SERVED[0])) == [5, 6, 7]
    assert states_of(states, SERVED[0], range(5, 8)).tolist() == [[2.0, 2.0]] * 3


def keep_the_first_rows(self: TargetStates, handle: int, base: int, accepted: Seq[int]) -> None:
    settle(self, handle, base, range(len(accepted)))


def keep_all(self: TargetStates, handle: int, base: int, accepted: Seq[int]) -> None:
    pass


def begin_behind(self: TargetStates, handle: int, start: int) -> object:
    """A pass that is tried again does not replace what the first try computed."""
    return begin(self, handle, max(start, self.positions(handle).stop))


def skip_one_more(self: TargetStates, handle: int, start: int) -> None:
    skip(self, handle, start + 1)


def before_the_copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """It does not see what is late."""

    def wrong(self: TargetStates, *args: Any) -> Any:
        late, self._late = self._late, None
        try:
            return method(self, *args)
        finally:
            self._late = late

    return wrong


def follow_anything(self: object, handles: object, starts: object) -> bool:
    return True


def copy_the_last_pass_only(self: TargetStates) -> None:
    if self._late is not None:
        del self._late.passes[:-1]
    copy_late(self)


copy_late = TargetStates._copy_late
settle, begin, skip = TargetStates.settle, TargetStates._begin, TargetStates.skip


def lose_the_rows_of_a_plan(self: TargetStates) -> None:
    """The rows of a pass that does not come are lost."""
    self._planned = None


LATE = [
    ("_Late.follows", follow_anything),
    ("read", before_the_copy(TargetStates.read)),
    ("_copy_late", copy_the_last_pass_only),
    *((name, before_the_copy(getattr(TargetStates, name))) for name in ("drop", "skip", "_plan")),
]
LATE_FAULTS = {wrong for _, wrong in LATE}
FAULTS = [
    ("_drop_plan", lose_the_rows_of_a_plan),
    ("settle", keep_the_first_rows),
    ("_begin", begin_behind),
    ("settle", keep_all),
    ("skip", skip_one_more),
]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(*FAULTS[:3], *LATE[:2]),
        *(pytest.param(*fault, marks=pytest.mark.proofs) for fault in (*FAULTS[3:], *LATE[2:])),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_negative_controls(name: str, wrong: Callable[..., Any], monkeypatch: Patch) -> None:
    owner = states_module._Late if name.startswith("_Late.") else TargetStates
    monkeypatch.setattr(owner, name.removeprefix("_Late."), wrong)
    quick = settings(max_examples=300, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Late if wrong in LATE_FAULTS else Roomy, settings=quick)


def test_the_longest_sequence_loses_its_oldest_half() -> None:
    states = TargetStates((0,), frozenset({"model"}), 20)
    states.read([Feed(drafting(0), 12), Feed(drafting(1), 6)], [0, 3], torch.zeros(18, 1))
    states.read([Feed(drafting(1), 4)], [9], torch.zeros(4, 1))
    assert states.positions(0) == range(6, 12)
    assert states.positions(1) == range(3, 13)


def test_passes_are_copied_together_where_the_table_is_full(monkeypatch: Patch) -> None:
    states, copies = TargetStates((0,), frozenset({"model"}), 40, 32), list[int]()
    copy = TargetStates._copy_found

    def counted(self: TargetStates, rows: list[int], sources: list[int], table: Tensor) -> None:
        copies.append(len(rows))
        copy(self, rows, sources, table)

    monkeypatch.setattr(TargetStates, "_copy_found", counted)
    feeds = [Feed(drafting(handle), 1) for handle in (0, 1)]
    for position in range(400):
        states.read(feeds, [position] * 2, torch.full((2, 1), float(position)))
    assert len(copies) < 400 / 2
    assert 800 - 32 < sum(copies) <= 800  # at most 32 rows are late
    for handle in (0, 1):
        held = states.positions(handle)
        assert held.stop == 400
        assert states_of(states, handle, held)[:, 0].tolist() == list(held)


def test_a_pass_beyond_the_bound_keeps_its_end() -> None:
    states = TargetStates((0,), frozenset({"model"}), 5)
    states.read([Feed(drafting(0), 3)], [0], torch.arange(3.0)[:, None])
    states.read([Feed(drafting(0), 9)], [3], torch.arange(3.0, 12.0)[:, None])
    assert states.positions(0) == range(7, 12)
    assert states_of(states, 0, range(7, 12))[:, 0].tolist() == [7, 8, 9, 10, 11]
    states.audit({0})


def test_states_that_cannot_be_read_are_all_dropped(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a later pass could continue a text with a hole in it."""
    states = TargetStates((0,), frozenset({"model"}), 20)
    states.read([Feed(drafting(0), 3)], [0], torch.zeros(3, 1))
    states.read([Feed(drafting(0), 3)], [3], torch.zeros(3, 7))  # of another width
    assert "could not be kept" in caplog.text
    assert not states.positions(0)
    states.audit(set())
