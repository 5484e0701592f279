"""Plans the attention of one model's passes: over blocks by one operation on a GPU, by spans on a CPU."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq

from cache.gathered import GatheredStorage
from cache.storage import KVShape, Storage
from engine.device.staging import Staging
from engine.models.attention import Attention, plan_attention
from engine.models.attention_choice import measured_lanes
from engine.models.cpu_attention import BlockReader
from engine.models.decoder import DecoderConfig
from engine.models.linear import BUCKETS
from engine.models.paged_attention import PagedAttention, PagedPlan
from engine.models.spans import Span


class AttentionPlans:
    """The storage's memory of the spans' sequences must be prepared before each call."""

    def __init__(
        self,
        config: DecoderConfig,
        storage: Storage,
        shape: KVShape,
        separate_to: int | None = None,
        few_rows: Callable[[], int] = int,
    ) -> None:
        """separate_to, few_rows: as in `plan_attention`."""
        self.separate_to, self._few_rows = separate_to, few_rows
        self._config, self._storage, self._shape = config, storage, shape
        self._paged = storage if shape.device.type != "cpu" and isinstance(storage, GatheredStorage) else None
        self.reader = BlockReader.over(storage)

    @property
    def ahead(self) -> bool:
        """Whether a pass is planned when it is put on its way to the device."""
        return self._paged is not None

    def measure(self) -> None:
        """Let the attention of each span be computed by what is faster here for its number of rows. Where a row must
        not depend on others, blocks are read anyway."""
        if self.reader is not None and self.separate_to is None:
            any_length = self._few_rows() == sys.maxsize
            self.reader.most_lanes = measured_lanes(self._config.num_heads, self._shape, any_length)

    def plan_ahead(self, spans: Seq[Span], staging: Staging) -> PagedPlan | None:
        """The plan of a pass by one operation. None: `attention` plans it."""
        assert self._paged is not None
        return PagedPlan.of(spans, self._paged, staging, self._config.traits.windows)

    def attention(self, spans: Seq[Span], planned: PagedPlan | None) -> Attention | PagedAttention:
        if planned is not None:
            assert self._paged is not None
            return PagedAttention(planned, self._paged)
        config, shape, few_rows = self._config, self._shape, self._few_rows()
        if self.reader is not None and self.reader.most_lanes < sys.maxsize:  # torch is faster for prompts
            few_rows = min(few_rows, BUCKETS[-1])
        plan = plan_attention(
            spans,
            self._storage,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dtype=shape.dtype,
            device=shape.device,
            separate_to=self.separate_to,
            reader=self.reader,
            few_rows=few_rows,
        )
        return Attention(plan, self._storage, self.reader)
