"""The law of an engine that drafts from look-ahead tokens is the target's. The target is a table (tests/engine/law)."""

from collections.abc import Sequence as Seq
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.heads.pass_heads import PassHeads
from engine.heads.state_loading import pass_drafter
from engine.models.decoder import Decoder, WatchedStates
from engine.models.pass_attention import PassAttention
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from engine.types import Verifier
from policies.config import PolicyConfig
from tests.engine.law.checking import check_speculation, draw, law_of
from tests.engine.law.configurations import Configuration
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import BASE, CPU, END, MAX_LEN, TARGET, Letters, TableDecoder
from tests.kv import kv_config, kv_layout

pytestmark = pytest.mark.usefixtures("pruned_races")


class LookingTable(TableDecoder):
    """A table whose embeddings are digits: a look-ahead token is read as a token is."""

    def embed(self, ids: Tensor) -> Tensor:
        return (ids + 1)[:, None].double()

    def forward_embedded(self, x: Tensor, attention: PassAttention, watched: WatchedStates | None = None) -> Tensor:
        kv = torch.zeros(len(x), 2, 1, dtype=self.dtype)
        kv[:, 1, 0] = x[:, 0] * BASE ** attention.positions.double()
        mean = attention(0, torch.zeros(len(x), 1, 1, dtype=self.dtype), kv)
        return mean * (attention.positions + 1)[:, None]


def table_engine() -> Engine:
    config = EngineConfig(
        target="table",
        dtype="float64",
        max_model_len=MAX_LEN + 15,
        max_running=256,
        max_spec_length=8,
        max_step_tokens=256 * 16,
        policy=PolicyConfig("fixed", k=3),
        **kv_config(),
    )
    table = LookingTable(TARGET)
    places = MAX_LEN + 15  # no position is beyond MAX_LEN, but look-ahead tokens take places
    target = Runner(cast(Decoder, table), kv_layout(config.max_running, places), CPU)
    digits = torch.tensor([[2.0], [4.0], [1.0]], dtype=torch.float64)
    drafter = pass_drafter(PassHeads(digits, table.logits), target, 100_000)
    target.look_ahead = drafter.look_ahead
    return Engine(config, target, drafter, cast(Tokenizer, Letters()), frozenset({END}), ("model",))


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [  # block verification decides about chains only
        ("block", ()),
        ("rejection", (2, 2)),
        *(pytest.param(v, tree, marks=pytest.mark.proofs) for v, tree in (("rejection", ()), ("match", ()))),
        pytest.param("match", (2, 2), marks=pytest.mark.proofs),
    ],
)
def test_the_law_is_the_targets(verifier: Verifier, tree: Seq[int]) -> None:
    configuration = Configuration("plain", "model", verifier, 3, mixed=False)
    changes: dict[str, Any] = {"tree": tuple(tree), "k": None} if tree else {}
    sample = draw(configuration, 600, engine=table_engine(), **changes)
    check_speculation(configuration, sample)
    assert g_test(sample.counts, law_of(configuration.params)) > 1e-4
