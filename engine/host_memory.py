"""How much host memory the libraries below the engine keep: malloc's free blocks, and oneDNN's compiled products; and
which errors say that there is none left."""

import ctypes
import os
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
TRIM_BYTES = 512 * 2**20  # free memory at the top of the heap that is kept
MMAP_BYTES = 2**25  # blocks below this come from the heap; glibc allows no more

COMPILED = 512  # products that oneDNN keeps compiled, some 0.5 MB each; its own default is 1,024
COMPILED_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")  # go before it


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep what is freed; returns whether it was told. Other C libraries are left as they are.

    A round's temporaries of a megabyte must not go back to the kernel every time. By default blocks of some hundred
    kilobytes are mapped for each allocation and unmapped after, and every page of them faults once: adding two
    [40, 4096] tensors takes 388 µs into a new block and 57 µs into a kept one.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that there is not enough memory. torch has a class of its own for a GPU, none for a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "you tried to allocate" in str(error)


def limit_compiled_products() -> None:
    """Let oneDNN keep COMPILED products, the most recently used, unless the environment says how many.

    oneDNN compiles one product for each number of rows and shape of weight, and a pass can have any number of rows.
    It reads the environment at its first product and never again, so call this before the weights are loaded.
    """
    if not any(os.environ.get(variable) for variable in COMPILED_VARIABLES):
        os.environ[COMPILED_VARIABLES[0]] = str(COMPILED)
