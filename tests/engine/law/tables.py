"""Models that are tables: their logits are looked up by the whole prefix, which they read from the KV cache and nowhere
else. So a wrong rollback, a wrong position or a missing token changes the law, and the law is known exactly.

A token's value is (id + 1)·BASE^position, and all queries and keys are zero, so attention is the mean of the values so
far. Times their number it is the prefix written as an integer in base BASE, exact in fp64; modulo ROWS it is the table's
row. (Contexts that share a row are still told apart by what follows.)
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from deployments.engine.config import EngineConfig
from deployments.engine.drafters.model import ModelDrafter
from deployments.engine.engine import Engine
from deployments.engine.models.attention import Attention
from deployments.engine.models.decoder import Decoder, DecoderConfig
from deployments.engine.models.pair import make_drafters
from deployments.engine.models.tokenizer import Tokenizer
from deployments.engine.runner import Runner

VOCAB = 4
END = 3  # the end-of-sequence token
BASE = VOCAB + 1
MAX_LEN = 17  # tokens: BASE^17 < 2^40 leaves the mean's rounding far below ½
ROWS = 4093  # a prime
CPU = torch.device("cpu")

POWERS = torch.tensor([BASE**n for n in range(MAX_LEN)], dtype=torch.float64)
SHAPE = DecoderConfig(
    architecture="table", vocab_size=VOCAB, hidden_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
    intermediate_size=1, rms_norm_eps=1e-6, max_position_embeddings=MAX_LEN, tied=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableDecoder:
    """What a Runner needs of a Decoder."""

    table: Tensor  # [ROWS, VOCAB] logits
    config: DecoderConfig = SHAPE

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """The prefixes [N, 1] that end in these tokens [N], as numbers."""
        positions = attention.plan.positions
        kv = torch.zeros(len(ids), 2, 1, dtype=self.dtype)
        kv[:, 1, 0] = (ids + 1) * POWERS[positions]
        mean = attention(0, torch.zeros(len(ids), 1, 1, dtype=self.dtype), kv)
        return mean * (positions + 1)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].round().long() % ROWS]


class Letters:
    """What an engine needs of a Tokenizer: every token is a letter."""

    special_ids = frozenset[int]()

    def decode(self, ids: Seq[int]) -> str:
        return letters(ids)


def letters(ids: Seq[int]) -> str:
    return "".join("ABCDEFGH"[i] for i in ids)


def row_of(prefix: Seq[int]) -> int:
    """The table's row for what follows a prefix."""
    return sum((token + 1) * BASE**n for n, token in enumerate(prefix)) % ROWS


def make_tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(target, draft) logits [ROWS, VOCAB].

    The end token is less likely than others; a tenth of the rows are near one-hot. The draft's logits are the target's
    with two of the four tokens raised and two lowered by the same amount s, so p exceeds q for exactly two tokens: the
    noise of a recovered token always decides something. In a tenth of the rows s = 0, and p = q.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)

    target = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
    target[:, END] -= 1.0
    favourite = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    bonus = 5.0 * (uniform(0, 1) < 0.1)
    target.scatter_add_(1, favourite, bonus)
    size = uniform(0.3, 1.0) * (uniform(0, 1) < 0.9)
    order = torch.rand(ROWS, VOCAB, generator=generator).argsort(1)
    sign = torch.where(order < VOCAB // 2, 1.0, -1.0)
    return target, target + size * sign


TARGET, DRAFT = make_tables()


def table_engine(target: Tensor = TARGET, draft: Tensor = DRAFT, **config: Any) -> Engine:
    """An engine over tables [ROWS, VOCAB], with every drafter there is. Prompts are read in chunks under load."""
    settings: dict[str, Any] = {"max_running": 64, "max_spec_length": 3, "spec_length": 3, **config}
    settings.setdefault("max_step_tokens", settings["max_running"] * (1 + settings["max_spec_length"]))
    full = EngineConfig(target="table", draft="table", dtype="float64", max_model_len=MAX_LEN, **settings)
    drafter = make_drafters(ModelDrafter(_runner(draft, full), VOCAB, full.max_step_tokens), CPU)
    tokenizer = cast(Tokenizer, Letters())
    return Engine(full, _runner(target, full), drafter, tokenizer, frozenset({END}), drafter.names)


def _runner(table: Tensor, config: EngineConfig) -> Runner:
    return Runner(cast(Decoder, TableDecoder(table)), config.max_running, MAX_LEN, CPU)
