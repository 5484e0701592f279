"""Models that are tables: their logits are looked up by the whole prefix, which they read from the KV cache and nowhere
else. So a wrong rollback, a wrong position or a missing token changes the law, and the law is known exactly.

A token's value is (id + 1)·BASE^position, and all queries and keys are zero, so attention is the mean of the values so
far. Times their number it is the prefix written as an integer in base BASE, exact in fp64; modulo ROWS it is the
table's row. (Contexts that share a row are still told apart by what follows.)
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.drafters.model import ModelDrafter
from engine.drafters.translation import Translation
from engine.engine import Engine
from engine.loading.load import make_drafters
from engine.models.attention import Attention
from engine.models.decoder import Decoder, DecoderConfig, WatchedStates
from engine.models.runner import Runner
from engine.models.tokenizer import Tokenizer
from policies.config import PolicyConfig
from tests.kv import kv_config, kv_layout

VOCAB = 4
END = 3  # the end-of-sequence token
BASE = VOCAB + 1
MAX_LEN = 17  # tokens: BASE^17 < 2^40 leaves the mean's rounding far below ½
ROWS = 4093  # a prime
CANDIDATES = 64  # draft rows, of which the one with most bite is taken
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
        """The states are prefixes as numbers, which fp32 cannot hold."""
        return torch.float64

    @property
    def block_rows(self) -> int:
        return 0

    @property
    def can_capture(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return self.table.nbytes

    def forward(self, ids: Tensor, attention: Attention, watched: WatchedStates | None = None) -> Tensor:
        """The prefixes [N, 1] that end in these tokens [N], as numbers, which heads can watch as well."""
        positions = attention.plan.positions
        kv = torch.zeros(len(ids), 2, 1, dtype=self.dtype)
        kv[:, 1, 0] = (ids + 1) * POWERS[positions]
        mean = attention(0, torch.zeros(len(ids), 1, 1, dtype=self.dtype), kv)
        prefixes = mean * (positions + 1)[:, None]
        if watched is not None:
            watched.keep(self.config.num_layers, prefixes)
        return prefixes

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

    The end token is less likely than others; a twentieth of the rows are near one-hot. The draft's logits are the
    target's plus noise; in a twentieth of the rows they are equal, p = q.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def one_in_twenty() -> Tensor:
        return torch.rand(ROWS, 1, generator=generator, dtype=torch.float64) < 0.05

    target = normal(ROWS, VOCAB)
    target[:, END] -= 1.0
    favourite = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    target.scatter_add_(1, favourite, 5.0 * one_in_twenty().double())
    drafts = target + normal(CANDIDATES, ROWS, VOCAB)
    best = _bite(target.softmax(-1), drafts.softmax(-1)).argmax(0)
    return target, torch.where(one_in_twenty(), target, drafts[best, torch.arange(ROWS)])


def _bite(p: Tensor, q: Tensor) -> Tensor:
    """How much it matters [..., ROWS] with what noise a recovered token is drawn; 0 if more than half is rejected.

    It matters if the residual has two tokens or more, in other shares than q: clocks that a draft was drawn with, and
    that did not ring first, are still right for shares as in q, as exponentials have no memory.
    """
    residual = (p - q).clamp(min=0)
    rejected = residual.sum(-1)
    others = q * (residual > 0)
    shares, stale = residual / rejected[..., None], others / others.sum(-1, keepdim=True)
    return torch.where(rejected < 0.5, (shares - stale).abs().sum(-1) * rejected, 0.0)


TARGET, DRAFT = make_tables()
# What the second of two drafts says, so that both are right in some rows and each is in others.
SECOND_DRAFT = TARGET + torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table_engine(
    target: Tensor = TARGET,
    draft: Tensor = DRAFT,
    translation: Translation | None = None,
    second: Tensor | None = SECOND_DRAFT,
    **config: Any,
) -> Engine:
    """An engine over tables [ROWS, VOCAB], with every drafter there is. Prompts are read in chunks under load. second:
    of drafter `merged`, beside `draft`; a translation leaves it out."""
    settings: dict[str, Any] = {
        "max_running": 256,
        "max_spec_length": 3,
        "policy": PolicyConfig("fixed", k=3),
        **config,
    }
    settings.setdefault("max_step_tokens", settings["max_running"] * (1 + settings["max_spec_length"]))
    settings.setdefault("prefill_chunk", settings["max_step_tokens"])
    full = EngineConfig(
        target="table", draft="table", dtype="float64", max_model_len=MAX_LEN, **kv_config(), **settings
    )
    most = full.max_step_tokens
    tables = [draft] if second is None or translation is not None else [draft, second]
    models = [ModelDrafter(_runner(table, full), VOCAB, most, most, translation, n) for n, table in enumerate(tables)]
    drafter = make_drafters(models, CPU, suffix_tokens=1000)
    tokenizer = cast(Tokenizer, Letters())
    return Engine(full, _runner(target, full), drafter, tokenizer, frozenset({END}), drafter.names)


def table_engine_in_fp32() -> Engine:
    """Logits are fp32. A CPU decides about such laws in compiled code, where Numba is there."""
    return table_engine(TARGET.float(), DRAFT.float(), second=SECOND_DRAFT.float())


def _runner(table: Tensor, config: EngineConfig) -> Runner:
    return Runner(cast(Decoder, TableDecoder(table)), kv_layout(config.max_running, MAX_LEN), CPU)
