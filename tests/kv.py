"""Which KV memory the engines under test have: every test of the engine passes with each kind (`pytest --kv KIND`)."""

from typing import Any

from cache.layout import Layout

KINDS = ("mapped", "gathered", "slotted")
_CONFIG: dict[str, dict[str, Any]] = {
    "mapped": {"block_size": 16},  # what a CPU on Linux can map, and tests cross often
    "gathered": {"block_size": 5},  # not whole pages, so that nothing can be mapped
    "slotted": {"cache": "slotted"},
}
_chosen = "mapped"


def use(kind: str) -> None:
    global _chosen
    _chosen = kind


def kv_kind() -> str:
    return _chosen


def kv_config() -> dict[str, Any]:
    """Fields of an EngineConfig."""
    return dict(_CONFIG[_chosen])


def without_prefixes() -> dict[str, Any]:
    """For tests that count what is read: no request finds what another has computed."""
    return {} if _chosen == "slotted" else {"prefix_cache": False}


def kv_layout(slots: int, max_len: int) -> Layout:
    """For a Runner without an engine; room for all slots at once."""
    if _chosen == "slotted":
        return Layout(slots, max_len)
    size = 16 if _chosen == "mapped" else 5
    return Layout(slots, max_len, size, slots * -(-max_len // size) + 1)
