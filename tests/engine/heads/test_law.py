"""The law of an engine whose drafts come from heads is the target's. Models and heads are tables (tests/engine/law)."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafters.draft_columns import DraftLaws
from engine.engine import Engine
from engine.heads.state_drafter import StateDrafter
from engine.heads.state_heads import StateHeads
from engine.heads.states import TargetStates
from engine.models.decoder import Decoder
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from engine.types import Verifier
from policies.config import PolicyConfig
from tests.engine.law.checking import check_speculation, draw, law_of, refuses
from tests.engine.law.configurations import SETTINGS, Configuration
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import CPU, DRAFT, END, MAX_LEN, POWERS, ROWS, TARGET, VOCAB, Letters, TableDecoder
from tests.examples import in_proofs
from tests.kv import kv_config, kv_layout

pytestmark = pytest.mark.usefixtures("pruned_races")

LEVEL = 1e-4  # for each of the tests below
# Recurrent heads may depend on all that independent ones do. So these are tried in proofs, but for the plain law.
MOSTLY_RECURRENT = pytest.mark.parametrize("kind", [*in_proofs("independent"), "recurrent"])


def numbers(states: Tensor) -> Tensor:
    return states[:, 0].round().long()


@dataclass
class Independent:
    """Head d's logits depend on the target's state alone, as a Medusa head's."""

    most: int = 3
    weight_bytes: int = 0

    def start(self, states: Tensor, depth: int) -> "Independent.Run":
        return Independent.Run(numbers(states))

    @dataclass
    class Run:
        prefixes: Tensor
        depth: int = 0

        def step(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
            if rows is not None:
                self.prefixes = self.prefixes[rows]
            self.depth += 1
            return HEAD_TABLES[self.depth - 1][self.prefixes % ROWS]


@dataclass
class Recurrent:
    """Each head's logits depend on the drafts before it too, as an MLP speculator's."""

    most: int = 3
    weight_bytes: int = 0

    def start(self, states: Tensor, depth: int) -> "Recurrent.Run":
        return Recurrent.Run(numbers(states))

    @dataclass
    class Run:
        prefixes: Tensor

        def step(self, rows: Tensor | None, tokens: Tensor) -> Tensor:
            before = self.prefixes if rows is None else self.prefixes[rows]
            lengths = (before[:, None] >= POWERS.long()).sum(1)  # no digit of a prefix is 0
            self.prefixes = before + (tokens + 1) * POWERS.long()[lengths]
            return DRAFT[self.prefixes % ROWS]


def _head_tables() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) for _ in range(3)]
    for table in tables:
        table[:, END] -= 1.0
    return tables


HEAD_TABLES = _head_tables()
KINDS: dict[str, Callable[[], StateHeads]] = {"independent": Independent, "recurrent": Recurrent}


def heads_engine(kind: str) -> Engine:
    config = EngineConfig(
        target="table",
        dtype="float64",
        max_model_len=MAX_LEN,
        max_running=256,
        max_spec_length=8,
        max_step_tokens=256 * 9,
        policy=PolicyConfig("fixed", k=3),
        **kv_config(),
    )
    target = Runner(cast(Decoder, TableDecoder(TARGET)), kv_layout(config.max_running, MAX_LEN), CPU)
    target.reader = states = TargetStates((1,), {"model"}, max_rows=100_000)
    drafter = StateDrafter(KINDS[kind](), states, VOCAB, CPU)
    return Engine(config, target, drafter, cast(Tokenizer, Letters()), frozenset({END}), ("model",))


def asked(verifier: Verifier, setting: str = "plain") -> Configuration:
    return Configuration(setting, "model", verifier, 3, mixed=False)


def p_value(configuration: Configuration, kind: str, draws: int = 600, tree: Seq[int] = ()) -> float:
    changes: dict[str, Any] = {"tree": tuple(tree), "k": None} if tree else {}
    sample = draw(configuration, draws, engine=heads_engine(kind), **changes)
    check_speculation(configuration, sample)
    return g_test(sample.counts, law_of(configuration.params))


@pytest.mark.parametrize(
    ("kind", "verifier"),
    [
        ("recurrent", "rejection"),
        ("independent", "block"),
        *(pytest.param("recurrent", v, marks=pytest.mark.proofs) for v in ("match", "block")),
        *(pytest.param("independent", v, marks=pytest.mark.proofs) for v in ("match", "rejection")),
    ],
)
def test_the_law_is_the_targets(kind: str, verifier: Verifier) -> None:
    assert p_value(asked(verifier), kind) > LEVEL


@MOSTLY_RECURRENT
@pytest.mark.parametrize("verifier", [*in_proofs("rejection"), "block"])
def test_the_law_holds_with_every_parameter_at_once(kind: str, verifier: Verifier) -> None:
    assert p_value(asked(verifier, "combined"), kind) > LEVEL


@MOSTLY_RECURRENT
@pytest.mark.parametrize("verifier", [*in_proofs("match"), "rejection"])
def test_the_law_of_trees_is_the_targets(kind: str, verifier: Verifier) -> None:
    assert p_value(asked(verifier), kind, tree=(2, 2)) > LEVEL


@MOSTLY_RECURRENT
@pytest.mark.parametrize("verifier", ["rejection", *in_proofs("block")])
def test_another_law_than_the_drafts_were_drawn_from_is_seen(
    kind: str, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laws before the temperature in place of those behind it."""
    keep, cold = DraftLaws._keep, SETTINGS["temperature"].temperature

    def raw(self: DraftLaws, sequences: Tensor, column: int, laws: Tensor) -> None:
        keep(self, sequences, column, (laws * cold).log_softmax(-1))

    monkeypatch.setattr(DraftLaws, "_keep", raw)
    assert refuses(replace(asked(verifier), setting="temperature"), engine=heads_engine(kind))
