"""Which memory a layout gets."""

from cache.gathered import GatheredStorage
from cache.layout import Layout
from cache.mapped import MappedStorage, mappable
from cache.paged import PagedCache
from cache.protocol import KVCache
from cache.slotted import SlottedCache
from cache.storage import KVShape, SlottedStorage, Storage


def make_storage(layout: Layout, cache: KVCache, shape: KVShape) -> Storage:
    """Memory for the cache that `make_cache(layout)` made. Raises OSError where it cannot be had."""
    if isinstance(cache, SlottedCache):
        return SlottedStorage(cache, layout.slots, layout.max_len, shape)
    assert isinstance(cache, PagedCache), f"no memory is made for a {type(cache).__name__}"
    if mappable(layout, shape):
        return MappedStorage(cache, layout.slots, layout.max_len, shape)
    return GatheredStorage(cache, shape)
