"""Trees that grow: which nodes are read and kept, against all trees of known chances; and the chances themselves."""

import random
from math import inf, log

import pytest
import torch

from engine import trees
from engine.drafters.growing_trees import DROPPED, GrowingTree
from engine.sampling.noise import GumbelRace, gumbel_noise
from engine.sampling.siblings import NON_FINITE_LOG_CHANCE, SPREAD, Siblings, log_chances
from engine.trees import ROOT, Growth, Parents

WIDTH = 3
Path = tuple[int, ...]  # the rank at each depth


def chances_at(path: Path, seed: int) -> list[float]:
    """The chances of a node's children, the largest first; their sum is at most 1."""
    rng = random.Random(f"{seed} {path}")
    rest, found = 1.0, []
    for _ in range(WIDTH):
        found.append(rest * rng.random())
        rest -= found[-1]
    return sorted(found, reverse=True)


def grow(most: Growth, seed: int) -> tuple[GrowingTree, dict[int, Path]]:
    """A finished tree, and the path of each token's source."""
    tree, paths, level, count = GrowingTree(most), dict[int, Path](), [(ROOT, Path())], 0
    while level:
        tree.depth += 1
        for place, path in level:
            tree.add(place, [log(chance) for chance in chances_at(path, seed)], count)
            paths |= {count + rank: (*path, rank) for rank in range(WIDTH)}
            count += WIDTH
        first = len(tree.read)
        level = [(first + n, paths[node.source]) for n, node in enumerate(tree.expand())]
    return tree, paths


def value(path: Path, seed: int) -> float:
    product = 1.0
    for depth, rank in enumerate(path):
        product *= chances_at(path[:depth], seed)[rank]
    return product


@pytest.mark.parametrize("most", [Growth(1, 1), Growth(3, 2), Growth(7, 4), Growth(9, 1), Growth(12, 12)])
def test_the_most_valuable_nodes_that_were_drawn_are_kept(most: Growth) -> None:
    for seed in range(40):
        tree, paths = grow(most, seed)
        assert len(tree.read) < max(2, most.nodes)
        kept = {paths[node.source] for node in tree.found}
        drawn = sorted((value(path, seed) for path in paths.values()), reverse=True)
        assert sorted((value(path, seed) for path in kept), reverse=True) == pytest.approx(drawn[: most.nodes])
        assert all(len(path) <= most.depth and (len(path) == 1 or path[:-1] in kept) for path in kept)


def test_the_model_reads_the_most_valuable_nodes_of_each_depth() -> None:
    for seed in range(40):
        tree, paths = grow(Growth(8, 4), seed)
        for depth in (1, 2, 3):
            read = [value(paths[node.source], seed) for node in tree.read if len(paths[node.source]) == depth]
            others = [value(path, seed) for path in paths.values() if len(path) == depth]
            assert read == sorted(others, reverse=True)[: len(read)]


def test_a_finished_tree_is_depth_first_and_knows_what_was_read() -> None:
    dropped = 0
    for seed in range(60):
        tree, paths = grow(Growth(7, 4), seed)
        parents, nodes, numbers = tree.shape()
        found: list[Path] = []
        for node, parent in zip(nodes, parents, strict=True):
            found.append(((*found[parent],) if parent != ROOT else ()) + (paths[node.source][-1],))
        assert found == [paths[node.source] for node in nodes]
        assert found == sorted(found)  # siblings by rank, each with what is below it
        assert trees.ranks(parents) == [path[-1] for path in found]
        for place, number in enumerate(numbers):
            assert number == DROPPED or nodes[number] is tree.read[place]
        dropped += numbers.count(DROPPED)
    assert dropped


def test_a_chain_of_certain_tokens_is_as_deep_as_it_may_be() -> None:
    tree = GrowingTree(Growth(4, 4))
    for place in (ROOT, 0, 1, 2):
        tree.depth += 1
        tree.add(place, [0.0, -inf], 2 * (place + 1))
        tree.expand()
    shape: Parents = tree.shape()[0]
    assert shape == trees.chain(4)


def siblings_of(scores: torch.Tensor, width: int, race: GumbelRace | None) -> Siblings:
    rows = range(len(scores))
    return Siblings.draw(scores, width, lambda left: left.argmax(1) if race is None else race.run(left, rows))


@pytest.mark.parametrize("vocab", [50, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chance_is_the_share_among_noisy_scores(vocab: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, vocab, generator=generator, dtype=torch.float64) * 6
    keys, positions = torch.tensor([3, 4, 5]), torch.tensor([7, 7, 9])
    noise = gumbel_noise(keys, positions, vocab) * temperature
    race = (
        GumbelRace(keys, positions, torch.full((3,), temperature, dtype=torch.float64), vocab) if temperature else None
    )

    def of_tokens(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tokens.shape, dtype=torch.float64) if race is None else race.noise(tokens, range(3))

    siblings = siblings_of(scores, 4, race)
    found = log_chances(siblings, scores, of_tokens).exp()
    expected = ((scores + noise) / SPREAD).softmax(1)
    best = expected.sort(dim=1, descending=True, stable=True)
    assert torch.equal(siblings.tokens(), best.indices[:, :4])
    assert torch.allclose(found, best.values[:, :4], atol=1e-12 if vocab == 50 else 0.02)


def test_a_repeated_sibling_has_no_chance_and_unknown_scores_have_a_little() -> None:
    scores = torch.full((2, 5), -inf, dtype=torch.float64)
    scores[0, 2] = 1.0
    scores[1] = torch.nan
    found = log_chances(siblings_of(scores, 3, None), scores, lambda tokens: torch.zeros(tokens.shape))
    assert found[0].tolist() == [0.0, -inf, -inf]
    assert found[1, 0] == NON_FINITE_LOG_CHANCE
