"""The table in the start log adds up."""

from cache.layout import Layout
from engine.memory.machine import DeviceMemory
from engine.memory.table import MemoryTable, ModelMemory

MIB = 2**20


def table(*, blocks: int = 300, activations: int | None = 8 * MIB, max_len: int = 4096, graphs: int = 0) -> MemoryTable:
    models = (
        ModelMemory("target", "Qwen/Qwen3-8B", "bfloat16", 100 * MIB, 8192),
        ModelMemory("draft", "Qwen/Qwen3-0.6B", "bfloat16", 10 * MIB, 1024),
    )
    layouts = (Layout(16, max_len, 32, blocks), Layout(16, max_len, 32, 100))
    return MemoryTable("cuda:0", models, layouts, activations, DeviceMemory(1024 * MIB, 900 * MIB), graphs)


def test_the_table() -> None:
    """300 blocks of 32 are 9,600 tokens: 75.0 MiB for the target. The draft's 3,200 tokens take 3.1 MiB. Two more
    blocks of each take 0.6 MiB."""
    assert str(table()) == (
        "  cuda:0        1,024.0 MiB  in all\n"
        "  target          100.0 MiB  bfloat16 weights of Qwen/Qwen3-8B\n"
        "  draft            10.0 MiB  bfloat16 weights of Qwen/Qwen3-0.6B\n"
        "  KV               78.7 MiB  9,600 tokens\n"
        "  activations       8.0 MiB  of the largest round\n"
        "  room left       813.3 MiB\n"
        "  requests                   at once: 16 of 512, 4 of 2,048, 2 of 4,096 tokens (max_running 16)"
    )


def test_graphs_take_their_share() -> None:
    assert "  graphs          256.0 MiB  at most, of captured rounds\n" in str(table(graphs=256 * MIB))
    assert table(graphs=256 * MIB).room == table().room - 256 * MIB


def test_how_many_requests_fit() -> None:
    assert [table().fitting(n) for n in (1, 32, 600, 601, 608, 609, 4096)] == [16, 16, 15, 15, 15, 15, 2]
    assert MemoryTable("cpu", table().models[:1], (Layout(8, 512),), None, DeviceMemory(1, 1)).fitting(512) == 8


def test_a_short_context_is_the_only_length() -> None:
    assert "at once: 16 of 256 tokens" in str(table(max_len=256))
    assert "not measured" in str(table(activations=None))
