"""The memory of this machine, within the limits of this process's cgroups. Imports no torch."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class DeviceMemory(NamedTuple):
    """Bytes that this process may have in all, and bytes that it can still get."""

    total: int
    available: int


def machine_memory(root: Path = Path("/")) -> DeviceMemory:
    """The memory of the machine whose /proc and /sys are below `root`. Droppable page cache counts as available."""
    total, available = _meminfo(root / "proc" / "meminfo")
    for limit, used in _cgroup_limits(root):
        total, available = min(total, limit), min(available, limit - used)
    return DeviceMemory(total, max(available, 0))


def _meminfo(meminfo: Path) -> tuple[int, int]:
    if not meminfo.is_file():  # not Linux
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else pages
        return pages * page, free * page
    sizes = _numbers(meminfo)  # in kB
    return sizes["MemTotal:"] * 1024, sizes["MemAvailable:"] * 1024


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used bytes) of every cgroup, version 1 or 2, that limits this process's memory.

    A container may see its own group as the root of the mount, so all folders from the named one upwards are read.
    """
    membership = root / "proc" / "self" / "cgroup"
    for line in membership.read_text("utf-8").splitlines() if membership.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (f for f in (group, *group.parents) if f.is_relative_to(mount)):
            limit, used = read_number(folder / names[0]), read_number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _numbers(folder / "memory.stat").get(names[2], 0)


def read_number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or it holds "max"."""
    text = path.read_text("utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """First word of each line → the number after it."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1 and words[1].isdecimal()}
