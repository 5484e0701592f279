"""The processes of a server under test, from /proc: which there are, and on which addresses they listen."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

LISTEN = "0A"  # Linux's number of that TCP state


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that these started."""
    parents = {int(p.name): _parent(p) for p in Path("/proc").iterdir() if p.name.isdecimal()}
    found = [pid]
    for parent in found:  # which grows meanwhile
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def named(pid: int, name: str) -> list[int]:
    """Descendants whose command begins so: Ray names a worker for its actor."""
    return [p for p in descendants(pid) if _command(p).startswith(name)]


def wait_for_another(pid: int, name: str, old: int, limit_s: float) -> int:
    """The process that took the place of `old`. Raises TimeoutError."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if new := [p for p in named(pid, name) if p != old]:
            return new[0]
        time.sleep(0.1)
    raise TimeoutError(f"no new {name} in {limit_s:g} s")


def listening(pids: list[int]) -> dict[str, str]:
    """{address:port: command} of the TCP sockets on which these processes accept connections."""
    owners = {inode: pid for pid in pids for inode in _sockets(pid)}
    return {address: _command(owners[inode])[:60] for address, inode in _listeners() if inode in owners}


def _parent(process: Path) -> int:
    try:
        return int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _sockets(pid: int) -> Iterator[str]:
    try:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            link = os.readlink(file)
            if link.startswith("socket:["):
                yield link.removeprefix("socket:[").removesuffix("]")
    except OSError:
        return


def _listeners() -> Iterator[tuple[str, str]]:
    """(address:port, inode) of all listening TCP sockets of this machine."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                digits, port = fields[1].split(":")
                yield f"{_address(digits, family)}:{int(port, 16)}", fields[9]


def _address(digits: str, family: socket.AddressFamily) -> str:
    """Words of four bytes each in the machine's order, which is little-endian wherever this runs."""
    words = bytes.fromhex(digits)
    return socket.inet_ntop(family, b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4)))
