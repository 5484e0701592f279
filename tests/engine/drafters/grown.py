"""What every grown tree must be, given what may follow a path."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import strategies as st

from engine import trees

FLOOR = 0.05
Path = tuple[int, ...]


@st.composite
def shapes(draw: st.DrawFn) -> trees.Parents:
    return tuple(draw(st.integers(trees.ROOT, node - 1)) for node in range(draw(st.integers(1, 6))))


def all_values(children: Callable[[Path], Seq[tuple[int, float]]]) -> dict[Path, float]:
    """Every path whose value reaches the floor. children: path → (token, share) of what may follow it."""
    values: dict[Path, float] = {}
    open_paths: list[tuple[Path, float]] = [((), 1.0)]
    while open_paths:
        path, value = open_paths.pop()
        for token, share in children(path):
            if value * share >= FLOOR:
                values[*path, token] = value * share
                open_paths.append(((*path, token), value * share))
    return values


def check_grown(grown: tuple[list[int], trees.Parents], size: int, values: dict[Path, float]) -> None:
    """The tree has the most valuable nodes, at most `size`; siblings differ, and the better one comes first."""
    tokens, parents = grown
    trees.check(parents)
    paths = [tuple(tokens[v] for v in trees.path(parents, node)) for node in range(len(tokens))]
    assert len(set(paths)) == len(paths) == len(parents)
    chosen = [values[path] for path in paths]
    assert sorted(chosen, reverse=True) == pytest.approx(sorted(values.values(), reverse=True)[:size])
    _check_order(parents, chosen)


def check_filled(
    filled: tuple[list[int], trees.Parents], shape: trees.Parents, children: Callable[[Path], Seq[tuple[int, float]]]
) -> None:
    """Each node of the shape whose rank among its siblings is below the number of continuations has one of its own."""
    tokens, parents = filled
    trees.check(parents)
    paths = [tuple(tokens[v] for v in trees.path(parents, node)) for node in range(len(tokens))]
    assert len(set(paths)) == len(paths) == len(parents)
    placed: dict[int, Path] = {trees.ROOT: ()}
    for node, (parent, rank) in enumerate(zip(shape, trees.ranks(shape), strict=True)):
        following = dict(children(placed[parent])) if parent in placed else {}
        if rank < len(following):
            *path, token = placed[node] = paths.pop(0)
            assert tuple(path) == placed[parent]
            assert following[token] == pytest.approx(sorted(following.values(), reverse=True)[rank])
    assert not paths


def _check_order(parents: trees.Parents, chosen: Seq[float]) -> None:
    firsts = [node for node, parent in enumerate(parents) if parent not in parents[:node]]
    assert all(parents[node] == node - 1 for node in firsts)
    for node, parent in enumerate(parents):
        for later in range(node + 1, len(parents)):
            assert parents[later] != parent or chosen[later] <= chosen[node] + 1e-12
