"""Chooses the storage for a layout."""

from cache.gathered import GatheredStorage
from cache.layout import Layout
from cache.mapped import MappedStorage, mappable
from cache.paged import PagedCache
from cache.protocol import KVCache
from cache.slotted import SlottedCache
from cache.storage import KVShape, SlottedStorage, Storage


def make_storage(layout: Layout, cache: KVCache, shape: KVShape) -> Storage:
    """Allocate the memory for a cache of `make_cache(layout)`. Raises OSError if there is not enough."""
    if isinstance(cache, SlottedCache):
        return SlottedStorage(cache, layout.slots, layout.max_len, shape)
    assert isinstance(cache, PagedCache), f"there is no storage for a {type(cache).__name__}"
    if mappable(layout, shape):
        return MappedStorage(cache, layout.slots, layout.max_len, shape)
    return GatheredStorage(cache, shape)
