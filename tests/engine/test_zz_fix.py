from typing import Any
import pytest
from cache.paged import PagedCache
from cache.storage import Blocks
from tests.engine import test_sharing as T
from tests.engine.pairs import Pair

spoilt: list[int] = []

@pytest.mark.parametrize("kind", ["mapped", "gathered"])
def test_fix(pair: Pair, kind: str, caplog: Any, monkeypatch: Any) -> None:
    discard, clear = PagedCache.discard, Blocks.clear
    def d(self: Any, handle: int) -> None:
        before = set(self._index.nodes)
        discard(self, handle)
        spoilt.extend(b for b in before - set(self._index.nodes) if not self._pool.counts[b])
    def c(self: Any, handle: int) -> None:
        clear(self, handle)
        while spoilt:
            self.pool[:, spoilt.pop()].zero_()
    monkeypatch.setattr(PagedCache, "discard", d)
    monkeypatch.setattr(Blocks, "clear", c)
    T.test_what_is_not_finite_harms_nobody_else(pair, kind, caplog)
