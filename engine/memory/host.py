"""How much host memory malloc and oneDNN keep, and what Python's garbage collector visits."""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
TRIM_BYTES = 512 * 2**20  # malloc keeps this much free memory at the top of the heap
MMAP_BYTES = 2**25  # blocks below this come from the heap; glibc allows no more

MAX_COMPILED_PRODUCTS = 512  # that oneDNN keeps, about 0.5 MB each; its own default is 1,024
CAPACITY_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")  # go before our limit


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory. Returns False, without any effect, for another C library.

    By default malloc maps blocks of a few hundred kB for each allocation and unmaps them afterwards, so each of their
    pages faults every time: adding two [40, 4096] tensors takes 388 µs into a new block and 57 µs into a kept one.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))


def give_back_freed_memory() -> None:
    """Give the system what glibc's malloc keeps of freed memory, in all heaps. Takes some ms.

    Loading a model frees many blocks that nothing of the same size follows, often in the heap of another thread. They
    would count as this process's memory for good.
    """
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@contextmanager
def old_objects_unvisited() -> Iterator[None]:
    """Within, the garbage collector visits only objects that are made within. With a model's libraries a full
    collection takes more than 0.1 s, as long as ten rounds of many sequences."""
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:  # what somebody else froze stays so
            gc.unfreeze()


def limit_compiled_products() -> None:
    """Let oneDNN keep the MAX_COMPILED_PRODUCTS most recently used products, unless the environment sets a capacity.

    oneDNN compiles a product for each shape of weight and number of rows, and a pass can have any number of rows.
    oneDNN reads the environment once, at its first product, so call this before any weight is loaded.
    """
    if not any(os.environ.get(variable) for variable in CAPACITY_VARIABLES):
        os.environ[CAPACITY_VARIABLES[0]] = str(MAX_COMPILED_PRODUCTS)
