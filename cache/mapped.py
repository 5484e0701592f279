"""Paged memory for CPUs on Linux, without gathering: the MMU translates positions into blocks.

The idea is vAttention's (Prabhu et al. 2024, arXiv 2405.04437), which does it with CUDA's virtual memory functions:
every sequence is a contiguous range of virtual memory, and its blocks are mapped into that range one after the other.
Attention reads a strided view, exactly as with slots; a shared prefix is a block that is mapped twice.
"""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cache.layout import Layout
from cache.paged import PagedCache
from cache.storage import Blocks, Contiguous, KVShape

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # linux/mman.h; Python's mmap names neither
ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
# The next pass will touch all pages of a block, and one call is cheaper than a fault for each of them: measured, for a
# new block of 28 pages in 14 layers, 47 µs instead of 57; for a prefix of 64 blocks found again, 160 instead of 220.
BLOCK = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
UNKNOWN = -1  # no block's number: what is mapped there has to be mapped again

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mappable(layout: Layout, shape: KVShape) -> bool:
    """Whether MappedStorage can hold it: a block of a layer has to be whole pages of the CPU's memory."""
    block_bytes = layout.block_size * shape.row_bytes
    here = sys.platform == "linux" and shape.device.type == "cpu"
    return here and layout.mapped and layout.paged and block_bytes % mmap.PAGESIZE == 0


def map_count(layout: Layout, layers: int) -> int:
    """Mappings that it may need, at the worst: no two blocks are neighbours. Linux allows vm.max_map_count in all."""
    return layout.slots * -(-layout.max_len // layout.block_size) * layers


class MappedStorage(Contiguous, Blocks):
    """A memory file [layers, blocks, block_size, …], mapped into virtual memory [layers, slots, positions, …].

    Memory is used once a block was first mapped, and unmapped when the last tensor over it goes. A slot that nobody
    prepared since its last owner left may still show that owner's blocks.
    """

    def __init__(self, cache: PagedCache, slots: int, max_len: int, shape: KVShape) -> None:
        table_len = -(-max_len // cache.block_size)
        file_size = (shape.num_layers, cache.num_blocks, cache.block_size, *shape.row)
        size = (shape.num_layers, slots, table_len * cache.block_size, *shape.row)
        self._block_bytes = cache.block_size * shape.row_bytes
        self._layer_bytes = cache.num_blocks * self._block_bytes  # of the file
        self._slot_bytes = table_len * self._block_bytes
        self._layer_stride = slots * self._slot_bytes
        self._block_size = cache.block_size
        self._tables: list[list[int]] = [[] for _ in range(slots)]  # block ids that are mapped, by slot
        self._file = os.memfd_create("kv-cache")
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False  # the process's end closes it, and until then another thread may be mapping
        os.ftruncate(self._file, shape.num_layers * self._layer_bytes)
        memory, self._base = _tensor(size, shape.dtype, ZEROS, -1)
        pool, _ = _tensor(file_size, shape.dtype, mmap.MAP_SHARED, self._file)
        Contiguous.__init__(self, memory, shape.kv_heads)
        Blocks.__init__(self, pool, cache, shape.kv_heads)

    def close(self) -> None:
        """Let go of the file. What is mapped stays readable; `prepare` raises OSError where it had to map more."""
        self._close()
        self._file = -1  # the number may be another file's by now

    def prepare(self, handles: Sequence[int]) -> None:
        self.copy_shared_blocks()
        for handle in handles:
            slot, table = self._cache.slot(handle), self._cache.table(handle)
            if self._tables[slot] != table:
                self._remap(slot, table)

    def row_numbers(self, slot: int, start: int, end: int) -> range:
        """Raises ValueError beyond what is mapped."""
        backed = len(self._tables[slot]) * self._block_size
        if end > backed:
            raise ValueError(f"slot {slot} has memory for {backed} positions, not for {end}")
        return super().row_numbers(slot, start, end)

    def _remap(self, slot: int, table: list[int]) -> None:
        """Map what differs, from the first difference on. What was mapped beyond the table's end becomes zeros again:
        attention reads it masked, and another sequence may own those blocks by now."""
        old = self._tables[slot]
        same = next((i for i, (a, b) in enumerate(zip(old, table, strict=False)) if a != b), min(len(old), len(table)))
        # Should a mapping fail, the next attempt starts here again.
        old[same:] = [UNKNOWN] * (max(len(old), len(table)) - same)
        breaks = [i for i in range(same + 1, len(table)) if table[i] != table[i - 1] + 1]
        for start, end in pairwise([same, *breaks, len(table)] if same < len(table) else []):
            self._map(slot, start, end, table[start])
        if len(old) > len(table):
            self._map(slot, len(table), len(old), None)
        old[:] = table

    def _map(self, slot: int, start: int, end: int, block: int | None) -> None:
        """Let entries start … end − 1 of a slot's table be the file's blocks from `block` on, or zeros."""
        address = self._base + slot * self._slot_bytes + start * self._block_bytes
        size = (end - start) * self._block_bytes
        flags, file, offset, step = ZEROS, -1, 0, 0
        if block is not None:
            flags, file, step = BLOCK, self._file, self._layer_bytes
            offset = block * self._block_bytes
        for _ in range(len(self.rows)):
            _mmap(address, size, flags | MAP_FIXED, file, offset)
            address += self._layer_stride
            offset += step


def _tensor(size: tuple[int, ...], dtype: torch.dtype, flags: int, file: int) -> tuple[Tensor, int]:
    """A tensor over newly mapped memory, and its address. The memory is unmapped when no tensor over it is left."""
    total = dtype.itemsize
    for n in size:
        total *= n
    address = _mmap(None, total, flags, file, 0)
    buffer = (ctypes.c_char * total).from_address(address)
    # The process's end unmaps as well, and until then another thread may be using the memory.
    weakref.finalize(buffer, _libc.munmap, address, total).atexit = False
    return torch.frombuffer(buffer, dtype=dtype).view(size), address


def _mmap(address: int | None, size: int, flags: int, file: int, offset: int) -> int:
    """mmap(2), readable and writable. Raises OSError."""
    mapped: int = _libc.mmap(address, size, READ_WRITE, flags, file, offset)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        hint = ": more mappings than vm.max_map_count allows, or too little memory" if code == errno.ENOMEM else ""
        raise OSError(code, f"cannot map {size:,} bytes of KV cache ({os.strerror(code)}){hint}")
    return mapped
