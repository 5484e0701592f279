"""Paged memory for CPUs on Linux without gathering: the MMU translates positions into blocks.

The idea comes from vAttention (Prabhu et al. 2024, arXiv 2405.04437), which uses CUDA's virtual memory functions. For
attention that multiplies matrices every sequence is a contiguous range of virtual memory, and its blocks are mapped
into that range one after the other. Attention reads a strided view, as with slots. A shared prefix is a block that is
mapped twice. Attention that reads blocks where they lie needs none of this, and saves some 15 µs for each block and
layer.
"""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from cache.layout import Layout
from cache.paged import HIDDEN, PagedCache
from cache.storage import Blocks, KVShape, KVView, SlotViews

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # from linux/mman.h; Python's mmap has no names for them
ZEROS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
# MAP_POPULATE, because the next pass touches all pages of a block, and one call is cheaper than a fault for each page.
# Measured: a new block of 28 pages in 14 layers takes 47 µs instead of 57 µs, a cached prefix of 64 blocks 160 µs
# instead of 220 µs.
BLOCK = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
UNKNOWN_BLOCK = -2  # marks a table entry that must be mapped again

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mappable(layout: Layout, shape: KVShape) -> bool:
    """Whether MappedStorage can hold this layout: one layer's part of a block must be whole memory pages of a CPU."""
    block_bytes = layout.block_size * shape.row_bytes
    supported = sys.platform == "linux" and shape.device.type == "cpu"
    return supported and layout.mapped and layout.paged and block_bytes % mmap.PAGESIZE == 0


def map_count(layout: Layout, layers: int) -> int:
    """Return the most mappings that the layout may need: no two neighbouring positions lie in neighbouring blocks.

    Linux allows vm.max_map_count mappings per process.
    """
    return layout.slots * -(-layout.max_len // layout.block_size) * layers


class MappedStorage(Blocks):
    """A memory file [layers, blocks, block_size, …], and views of it in virtual memory [layers, slots, positions, …].

    A block takes memory when it is first written or mapped. The memory is unmapped when the last tensor over it is
    freed.
    """

    def __init__(self, cache: PagedCache, slots: int, max_len: int, shape: KVShape) -> None:
        table_len = -(-max_len // cache.block_size)
        file_size = (shape.num_layers, cache.num_blocks, cache.block_size, *shape.row)
        size = (shape.num_layers, slots, table_len * cache.block_size, *shape.row)
        self._block_bytes = cache.block_size * shape.row_bytes
        self._layer_bytes = cache.num_blocks * self._block_bytes  # of the file
        self._slot_bytes = table_len * self._block_bytes
        self._layer_stride = slots * self._slot_bytes
        self._tables: list[list[int]] = [[] for _ in range(slots)]  # mapped blocks of each slot
        self._file = os.memfd_create("kv-cache")
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False  # another thread may still map at exit; the end of the process closes the file
        os.ftruncate(self._file, shape.num_layers * self._layer_bytes)
        memory, self._base = _tensor(size, shape.dtype, ZEROS, -1)
        pool, _ = _tensor(file_size, shape.dtype, mmap.MAP_SHARED, self._file)
        super().__init__(pool, cache, shape.kv_heads)
        self._views = SlotViews(memory, shape.kv_heads)

    def close(self) -> None:
        """Close the file. Mapped memory stays readable; `view` raises OSError if it has to map more."""
        self._close()
        self._file = -1  # the system may give the old number to another file

    def view(self, first_slot: int, slots: int, length: int) -> KVView:
        """As in Storage. Raises OSError; then the call may be repeated."""
        for slot in range(first_slot, first_slot + slots):
            if self._tables[slot] != (table := self._cache.slot_table(slot)):
                self._remap(slot, table)
        return self._views.view(first_slot, slots, length)

    def _remap(self, slot: int, table: list[int]) -> None:
        """Map the entries that differ.

        Entries beyond the table's end, and those that its window has left, become zeros again: attention still reads
        them, masked, and another sequence may own their old blocks.
        """
        old = self._tables[slot]
        new = table + [HIDDEN] * (len(old) - len(table))
        old += [UNKNOWN_BLOCK] * (len(table) - len(old))
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        for i in changed:  # if a mapping fails, the next call maps them all again
            old[i] = UNKNOWN_BLOCK
        for start, end in _runs(changed, new):
            self._map(slot, start, end, None if new[start] == HIDDEN else new[start])
        old[:] = table

    def _map(self, slot: int, start: int, end: int, block: int | None) -> None:
        """Map the file's blocks from `block` on, or zeros for None, at entries start … end − 1 of a slot's table."""
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


def _runs(entries: list[int], table: list[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of the runs of ascending entries that one mapping serves: neighbouring blocks, or none."""
    first = 0
    for last, entry in enumerate(entries):
        after = entries[last + 1] if last + 1 < len(entries) else -1
        following = HIDDEN if table[entry] == HIDDEN else table[entry] + 1
        if after != entry + 1 or table[after] != following:
            yield entries[first], entry + 1
            first = last + 1


def _tensor(size: tuple[int, ...], dtype: torch.dtype, flags: int, file: int) -> tuple[Tensor, int]:
    """Return a tensor over newly mapped memory, and its address. The memory is unmapped with its last tensor."""
    total = dtype.itemsize
    for n in size:
        total *= n
    address = _mmap(None, total, flags, file, 0)
    buffer = (ctypes.c_char * total).from_address(address)
    # atexit False: another thread may still use the memory at exit, and the end of the process unmaps it.
    weakref.finalize(buffer, _libc.munmap, address, total).atexit = False
    return torch.frombuffer(buffer, dtype=dtype).view(size), address


def _mmap(address: int | None, size: int, flags: int, file: int, offset: int) -> int:
    """Call mmap(2) for readable and writable memory and return the address. Raises OSError."""
    mapped: int = _libc.mmap(address, size, READ_WRITE, flags, file, offset)
    if mapped == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        hint = ""
        if code == errno.ENOMEM:
            hint = ": too many mappings or too little memory; raise vm.max_map_count or lower kv_tokens"
        raise OSError(code, f"cannot map {size:,} bytes of KV cache ({os.strerror(code)}){hint}")
    return mapped
