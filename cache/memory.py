"""Which memory a layout gets."""

from cache.gathered import GatheredStorage
from cache.layout import Layout
from cache.mapped import MappedStorage, mappable
from cache.paged import PagedCache
from cache.protocol import KVCache
from cache.storage import KVShape, SlottedStorage, Storage


def make_storage(layout: Layout, cache: KVCache, shape: KVShape) -> Storage:
    """Memory for the cache that `make_cache(layout)` made. Raises OSError where it cannot be had."""
    if not isinstance(cache, PagedCache):
        return SlottedStorage(cache, layout.slots, layout.max_len, shape)
    if mappable(layout, shape):
        return MappedStorage(cache, layout.slots, layout.max_len, shape)
    return GatheredStorage(cache, shape)
