"""The law of an engine whose drafts come from an EAGLE head is the target's. Target and head are tables.

The head's state is the number of the prefix that it belongs to, and its memory holds the text once more. Every row of
every pass compares the two, so a state of another position, branch or sequence fails the drafter. No verifier's law
would show it: any q keeps the law that the draft was drawn from.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cache.layout import Layout
from engine.config import EngineConfig
from engine.device.staging import Staging
from engine.drafters.draft_columns import DraftLaws
from engine.drafters.model_trees import TreeDraft
from engine.engine import Engine
from engine.heads.eagle import EagleHead
from engine.heads.eagle_drafter import EagleDrafter
from engine.heads.eagle_runner import HeadRunner, _Rows
from engine.heads.states import TargetStates
from engine.loading.load import make_drafters
from engine.models.attention import Attention
from engine.models.decoder import Decoder, DecoderConfig
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from engine.types import Verifier
from policies.config import PolicyConfig
from tests.engine.law.checking import Sample, check_speculation, draw, law_of, refuses
from tests.engine.law.configurations import SETTINGS, Configuration
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import (
    CPU,
    DRAFT,
    END,
    MAX_LEN,
    POWERS,
    ROWS,
    SHAPE,
    TARGET,
    VOCAB,
    Letters,
    TableDecoder,
)
from tests.examples import in_proofs
from tests.kv import kv_config, kv_kind, kv_layout

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-4  # for each of the tests below
TREES = ((2, 1), (2, 2, 1))
Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class TableHead:
    """What a HeadRunner needs of an EagleHead."""

    table: Tensor = DRAFT  # [ROWS, VOCAB] logits
    config: DecoderConfig = SHAPE
    dtype: torch.dtype = torch.float64
    weight_bytes: int = 0
    block_rows: int = 0
    layers: tuple[int, ...] = (1,)
    state_width: int = 1
    vocabulary: None = None
    hidden_norm: None = None

    def project(self, states: Tensor) -> Tensor:
        return states

    def carry(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, ids: Tensor, states: Tensor, attention: Attention) -> Tensor:
        """The prefixes [N, 1] that end in these tokens [N], from those before them."""
        count = (states.round() >= POWERS).sum(1)  # tokens of the prefixes before: no digit is 0
        prefixes = states[:, 0].round() + (ids + 1) * POWERS[count]
        positions = attention.plan.positions
        kv = torch.zeros(len(ids), 2, 1, dtype=self.dtype)
        kv[:, 1, 0] = (ids + 1) * POWERS[positions]
        mean = attention(0, torch.zeros(len(ids), 1, 1, dtype=self.dtype), kv)[:, 0]
        read = (mean * (positions + 1)).round()  # the text from where the head begins, as a number
        unread = count - positions  # tokens before it: at least the first one
        assert torch.equal(read, prefixes.div(POWERS[unread], rounding_mode="floor")), "a row reads another state"
        return prefixes[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long() % ROWS]


def head_engine() -> Engine:
    config = EngineConfig(
        target="table",
        draft="table",
        dtype="float64",
        max_model_len=MAX_LEN,
        max_running=128,
        max_spec_length=10,
        max_step_tokens=128 * 11,
        policy=PolicyConfig("fixed", k=3),
        **kv_config(),
    )
    slots = config.max_running
    # Small blocks, so that prompts are found in both indices, or in the target's only.
    layout = kv_layout(slots, MAX_LEN) if kv_kind() == "slotted" else Layout(slots, MAX_LEN, 4, slots * 5 + 1)
    target = Runner(cast(Decoder, TableDecoder(TARGET)), layout, CPU)
    target.reader = states = TargetStates((1,), {"model", "cascade"}, max_rows=20_000)
    head = HeadRunner(cast(EagleHead, TableHead()), layout, states, Staging(CPU))
    drafter = make_drafters([EagleDrafter(head, VOCAB, config.max_step_tokens, 512)], CPU, suffix_tokens=100)
    return Engine(config, target, drafter, cast(Tokenizer, Letters()), frozenset({END}), drafter.names)


def asked(verifier: Verifier, setting: str = "plain") -> Configuration:
    return Configuration(setting, "model", verifier, 3, mixed=False)


def of_tree(tree: Seq[int]) -> dict[str, Any]:
    return {"tree": tuple(tree), "k": None} if tree else {}


def sample(verifier: Verifier, draws: int, tree: Seq[int] = (), setting: str = "plain") -> Sample:
    drawn = draw(asked(verifier, setting), draws, engine=head_engine(), **of_tree(tree))
    check_speculation(asked(verifier), drawn)
    return drawn


@pytest.mark.parametrize(
    ("verifier", "setting"),
    [
        ("rejection", "plain"),
        ("block", "combined"),
        *(
            pytest.param(*asked, marks=pytest.mark.proofs)
            for asked in (("match", "plain"), ("match", "combined"), ("rejection", "combined"), ("block", "plain"))
        ),
    ],
)
def test_the_law_is_the_targets(verifier: Verifier, setting: str) -> None:
    drawn = sample(verifier, 600, setting=setting)
    assert g_test(drawn.counts, law_of(SETTINGS[setting])) > LEVEL


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("rejection", TREES[1]),
        pytest.param("match", TREES[0], marks=pytest.mark.proofs),
        pytest.param("match", TREES[1], marks=pytest.mark.proofs),
        pytest.param("rejection", TREES[0], marks=pytest.mark.proofs),
    ],
)
def test_the_law_of_trees_is_the_targets(verifier: Verifier, tree: Seq[int]) -> None:
    assert g_test(sample(verifier, 600, tree).counts, law_of(SETTINGS["plain"])) > LEVEL


@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])
def test_another_law_than_a_draft_was_drawn_from_is_seen(verifier: Verifier, monkeypatch: Patch) -> None:
    """q of the batch's next sequence. (Under match no q is looked at.)"""
    keep = DraftLaws._keep

    def of_another_row(self: DraftLaws, indices: Tensor, column: int, laws: Tensor) -> None:
        keep(self, indices, column, laws.roll(1, 0))

    monkeypatch.setattr(DraftLaws, "_keep", of_another_row)
    assert refuses(asked(verifier), engine=head_engine())


def test_another_law_than_a_node_was_drawn_from_is_seen(monkeypatch: Patch) -> None:
    put = TreeDraft._put_laws

    def of_another_row(self: TreeDraft, children: Any, given: Tensor) -> None:
        put(self, children, given.roll(1, 0))

    monkeypatch.setattr(TreeDraft, "_put_laws", of_another_row)
    assert refuses(asked("rejection"), engine=head_engine(), **of_tree(TREES[1]))


# --- faults that no law would show -----------------------------------------------------------------------------------


def settle_as_a_chain(monkeypatch: Patch) -> None:
    """The states of rejected nodes stay, in place of those of accepted ones."""
    settle = TargetStates.settle

    def first_rows(self: TargetStates, handle: int, base: int, accepted: Seq[int]) -> None:
        settle(self, handle, base, range(len(accepted)))

    monkeypatch.setattr(TargetStates, "settle", first_rows)


def read_the_latest_states(monkeypatch: Patch) -> None:
    """The head reads the latest rows of drafts, also of those that were rejected."""
    rows = TargetStates.row_numbers
    monkeypatch.setattr(TargetStates, "settle", lambda self, handle, base, accepted: None)

    def latest(self: TargetStates, handle: int, start: int, stop: int) -> list[int]:
        surplus = self.positions(handle).stop - stop
        return rows(self, handle, start + surplus, stop + surplus)

    monkeypatch.setattr(TargetStates, "row_numbers", latest)


def carry_another_sequence(monkeypatch: Patch) -> None:
    find = _Rows.find
    monkeypatch.setattr(_Rows, "find", lambda self, keys: find(self, [*keys[-1:], *keys[:-1]]))


def carry_the_roots(monkeypatch: Patch) -> None:
    """Every node follows the committed text."""
    find = _Rows.find
    monkeypatch.setattr(_Rows, "find", lambda self, keys: find(self, [(handle, -1) for handle, _ in keys]))


@pytest.mark.parametrize(
    ("fault", "tree"),
    [
        (settle_as_a_chain, (4,)),
        (read_the_latest_states, ()),
        (carry_another_sequence, ()),
        (carry_another_sequence, TREES[1]),
        (carry_the_roots, TREES[1]),
    ],
)
def test_a_row_that_reads_another_state_is_seen(
    fault: Callable[[Patch], None], tree: Seq[int], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="a drafter failed"):
        sample("rejection", 250, tree)
