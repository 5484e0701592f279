"""The CPUs that this process may use, and what they can. Imports no torch."""

import os
from importlib.util import find_spec
from pathlib import Path

INT8_FLAGS = {"avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8"}  # one of them: torch's int8 products are exact
INT4_FLAGS = {"avx2", "avx512f"}  # one of them: a fast kernel for int4


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs by the process's affinity, and by the quota of its container, whose cgroup is below `root`; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *_quotas(root)]))


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Names of an x86 CPU's instructions, as Linux gives them; empty elsewhere."""
    info = root / "proc" / "cpuinfo"
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def has_int8_products(flags: frozenset[str]) -> bool:
    """Whether a CPU with these flags has exact int8 products. One that does not tell its flags may have them; for any
    other Numba compiles them."""
    return not flags or bool(flags & INT8_FLAGS) or find_spec("numba") is not None


def has_int4_products(flags: frozenset[str]) -> bool:
    """Whether a CPU with these flags has a fast kernel for int4. One that does not tell its flags may have it."""
    return not flags or bool(flags & INT4_FLAGS)


def smaller_weights(flags: frozenset[str] | None = None) -> str:
    """What takes less memory, for a message: a smaller dtype, and the forms of weights that a CPU with these flags has
    products for. None: this CPU's. A CPU that does not tell its flags may have all."""
    found = cpu_flags() if flags is None else flags
    forms = [name for name, has in (("int8", has_int8_products), ("int4", has_int4_products)) if has(found)]
    return f"a smaller dtype or {' or '.join(forms)} weights" if forms else "a smaller dtype"


def _quotas(root: Path) -> list[int]:
    """Whole CPUs of cgroup version 2's cpu.max, or version 1's quota over period; none without a limit."""
    groups = root / "sys/fs/cgroup"
    unified = _words(groups / "cpu.max")
    quota, period = (
        unified if len(unified) == 2 else (_word(groups / f"cpu/cpu.cfs_{n}_us") for n in ("quota", "period"))
    )
    known = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return [int(quota) // int(period)] if known else []


def _words(path: Path) -> list[str]:
    return path.read_text("utf-8").split() if path.is_file() else []


def _word(path: Path) -> str:
    return next(iter(_words(path)), "")
