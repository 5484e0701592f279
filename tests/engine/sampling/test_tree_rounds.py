"""Rounds over draft trees through the real sampler and verification.verify: rows see the drafts on their path, siblings
are drawn as told, match emits the text without the tree, and rejection emits the exact law."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import trees
from engine.drafters.base import Draft, DraftBatch
from engine.sampling import sampler as sampler_module
from engine.sampling import tree_acceptance
from engine.sampling.adjustments import RoundRows
from engine.sampling.noise import GumbelRace, gumbel_noise, sequence_key, target_key, uniforms
from engine.sampling.sampler import Sampler
from engine.sampling.tree_acceptance import TreeTable
from engine.sequence import Sequence
from engine.trees import ROOT, Parents
from engine.types import SamplingParams, Verifier
from engine.verification import verify
from tests.engine.driving import make_sequence
from tests.engine.law.checking import PROMPT, REFUSED, law_of
from tests.engine.law.configurations import SETTINGS
from tests.engine.law.statistics import g_test
from tests.engine.law.tables import DRAFT, TARGET, VOCAB, make_tables, row_of

CPU = torch.device("cpu")
LENGTH = 3  # tokens whose joint law is tested
OTHER_DRAFT = make_tables(1)[1]
WIDE = trees.branching([2, 2])

# What rows see

PARAMS = [
    SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.3, seed=1),
    SamplingParams(temperature=1.2, min_tokens=4, max_tokens=9, top_k=5),
    SamplingParams(temperature=0.7, bad_word_ids=((1, 2), (3, 1, 2), (2, 2, 1)), top_p=0.9),
    SamplingParams(temperature=0.0, presence_penalty=1.5, bad_word_ids=((1, 2),)),
    SamplingParams(logit_bias=((2, 1.0),), allowed_token_ids=(0, 1, 2, 3, 4, 6)),
]


def random_shape(rng: random.Random, size: int) -> Parents:
    return tuple(rng.randrange(ROOT, node) for node in range(size))


def random_round(seed: int) -> tuple[list[Sequence], list[Parents], Tensor]:
    """Sequences with some output, the shapes of their drafts and the drafts [B, 6], of four tokens."""
    rng = random.Random(seed)
    sequences = [make_sequence(i, [0, 1, 2, 0, 1], p, key=77 * i + seed, end_ids=(5,)) for i, p in enumerate(PARAMS)]
    for sequence in sequences:
        sequence.tokens += [rng.randrange(4) for _ in range(rng.randint(0, 3))]
    shapes = [random_shape(rng, rng.randint(0, 6)) for _ in sequences]
    return sequences, shapes, torch.tensor([[rng.randrange(4) for _ in range(6)] for _ in sequences])


def rows_apart(seed: int, *, drafting: bool = False) -> int:
    """Rows of trees whose scores or draws are not those of the chain that leads to them."""
    sequences, shapes, drafts = random_round(seed)
    ks = [len(shape) for shape in shapes]
    logits = torch.randn(sum(ks) + len(ks), 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    base = Sampler(sequences, ks, 7, CPU)
    if drafting:
        base.sample(logits[[*base.offsets]], base.offsets, drafting=True)
    sampler = base.on_trees({i: shape for i, shape in enumerate(shapes) if i})  # the first one has a chain
    scores, (drawn, _) = (
        sampler.scores(logits, range(len(logits)), drafts),
        sampler.draw(logits, range(len(logits)), drafts),
    )
    apart = 0
    for i, (sequence, shape) in enumerate(zip(sequences, [trees.chain(ks[0]), *shapes[1:]], strict=True)):
        for node in range(ROOT, ks[i]):
            path = trees.path(shape, node)
            alone, row = Sampler([sequence], [len(path)], 7, CPU), base.offsets[i] + 1 + node
            expected = alone.scores(logits[row : row + 1], [len(path)], drafts[i : i + 1, path])
            token = alone.sample(expected, [len(path)])
            apart += not (torch.equal(scores[row], expected[0]) and torch.equal(drawn[row], token[0]))
    return apart


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.proofs) for n in range(6, 12))])
def test_a_row_sees_the_drafts_on_its_path(seed: int) -> None:
    """Penalties, bad words, min_tokens and the noise; the same with noise that was made for drafting."""
    assert rows_apart(seed) == 0
    assert rows_apart(seed, drafting=True) == 0


def test_rows_that_see_the_drafts_before_them_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a sibling in place of the path."""
    monkeypatch.setattr(RoundRows, "seen", lambda self, row: range(self.places[row][1]))
    assert sum(rows_apart(seed) for seed in range(6)) > 5


def test_noise_that_was_made_for_drafting_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A race per level of the trees is made once for drafting and verification, one row for each position."""
    made = []

    class Watched(GumbelRace):
        def __init__(self, keys: Tensor, *rest: Any) -> None:
            made.append(len(keys))
            super().__init__(keys, *rest)

    monkeypatch.setattr(sampler_module, "GumbelRace", Watched)
    play(sequences_of(3, SamplingParams(), "match"), WIDE, 1)
    assert made == [3 * 3]


def test_coins_are_the_chains_and_differ_between_siblings() -> None:
    sequences = [make_sequence(i, [0] * (3 + i), key=i) for i in range(3)]
    sampler = Sampler(sequences, [6] * 3, 9, CPU)
    shapes = [trees.chain(4), (ROOT, ROOT, 0, 1, ROOT, 1), (ROOT, 0, 1)]
    keys, ends = sampler.coin_numbers(range(3))
    coins, chain = sampler.tree_coins(range(3), shapes), uniforms(keys[:, None], ends[:, None] + torch.arange(4))
    assert torch.equal(coins[0, :4], chain[0])
    assert torch.equal(coins[2, :3], chain[2, :3])
    of_tree = coins[1].tolist()
    assert [of_tree[0], of_tree[2]] == chain[1, :2].tolist()
    assert of_tree[3] == of_tree[2]  # cousins of one rank: at most one of them is reached
    assert len(set(of_tree)) == 5


# Draws of siblings


def sibling_rows(count: int, params: SamplingParams, vocab: int, *, coupled: bool) -> tuple[Sampler, Tensor]:
    """A sampler with `count` rows, and their logits."""
    sequence = make_sequence(0, [0] * 4, params, key=5)
    sequence.verifier = "match" if coupled else "rejection"
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64) * 2
    return Sampler([sequence], [count - 1], vocab, CPU), logits


@pytest.mark.parametrize("vocab", [40, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_siblings_are_the_best_tokens_of_the_targets_race(temperature: float, vocab: int) -> None:
    sampler, logits = sibling_rows(5, SamplingParams(temperature=temperature), vocab, coupled=True)
    logits = logits.round() if not temperature else logits  # ties take the lowest id
    siblings = sampler.sample_top(logits, range(5), 4).tokens()
    assert torch.equal(siblings[:, 0], sampler.sample(logits, range(5)))
    noisy = logits + temperature * gumbel_noise(torch.full((5,), target_key(5)), 4 + torch.arange(5), vocab)
    assert torch.equal(siblings, noisy.argsort(dim=1, descending=True, stable=True)[:, :4])
    rows = [3, 1]
    assert torch.equal(sampler.sample_top(logits[rows], rows, 2).tokens(), siblings[rows, :2])


def test_rows_with_fewer_tokens_repeat_the_first_one() -> None:
    sampler, logits = sibling_rows(4, SamplingParams(), 9, coupled=True)
    logits[0, 2:], logits[1, 1:], logits[2] = -inf, -inf, nan
    siblings = sampler.sample_top(logits, range(4), 3).tokens()
    assert set(siblings[0, :2].tolist()) == {0, 1}
    assert siblings[0, 2] == siblings[0, 0]
    assert siblings[1].tolist() == [0] * 3
    proposing, _ = sibling_rows(4, SamplingParams(), 9, coupled=False)
    siblings, laws = proposing.propose_top(logits.log_softmax(1), range(4), 3)
    assert siblings[1].tolist() == [0] * 3
    assert laws[0, 2].exp().tolist() == [float(token == siblings[0, 0]) for token in range(9)]
    assert laws[2, 0].isnan().all()


def test_siblings_are_drawn_without_replacement() -> None:
    """Pairs of 6,000 rows follow q(x)·q(y) / (1 − q(x)); false alarms as in g_test, 1e-5. Each comes with its law."""
    sampler, _ = sibling_rows(6000, SamplingParams(), 4, coupled=False)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    laws = q.log().expand(6000, -1)
    siblings, given = sampler.propose_top(laws, range(6000), 2)
    assert torch.equal(siblings[:, 0], sampler.propose(laws, range(6000)))
    assert torch.equal(given[:, 0], laws)
    without = laws.scatter(1, siblings[:, :1], -inf).log_softmax(1)
    assert torch.allclose(given[:, 1], without, rtol=0, atol=1e-14)
    law = {(x, y): float(q[x] * q[y] / (1 - q[x])) for x in range(4) for y in range(4) if x != y}
    assert g_test(Counter(map(tuple, siblings.tolist())), law) > REFUSED


def test_draws_of_other_ranks_are_independent() -> None:
    sampler, _ = sibling_rows(6000, SamplingParams(), 3, coupled=False)
    q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    drawn = [sampler.propose(q.log().expand(6000, -1), range(6000), rank).tolist() for rank in range(3)]
    law = {(x, y): float(q[x] * q[y]) for x in range(3) for y in range(3)}
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert g_test(Counter(zip(drawn[first], drawn[second], strict=True)), law) > REFUSED
    with pytest.raises(AssertionError, match="excludes"):  # control: the same draw twice
        g_test(
            Counter(zip(drawn[0], drawn[0], strict=True)), {pair: p for pair, p in law.items() if pair[0] != pair[1]}
        )


# Whole rounds over the tables


def table_logits(
    sequences: Seq[Sequence], shape: Parents, drafts: Tensor, nodes: Seq[int], table: Tensor = TARGET
) -> Tensor:
    """[Σ nodes, vocab]: the rows of these nodes that a pass over the trees gives."""
    paths = [trees.path(shape, node) for node in nodes]
    pairs = zip(sequences, drafts.tolist(), strict=True)
    return table[[row_of([*s.tokens, *(tokens[n] for n in path)]) for s, tokens in pairs for path in paths]]


def draft_trees(batch: DraftBatch, shape: Parents, models: Seq[Tensor] = (DRAFT,)) -> Draft:
    """A tree for each sequence, level by level: siblings without replacement from one model, or each from its own."""
    sequences, size = batch.sequences, len(shape)
    every = dict.fromkeys(range(len(sequences)), shape)
    sampler = batch.sampler.on_trees(every)
    tokens = torch.zeros(len(sequences), size, dtype=torch.int64)
    logq = torch.full((len(sequences), size, VOCAB), nan, dtype=torch.float64)
    for parent in (node for node in range(ROOT, size) if node in shape):
        children = [node for node in range(size) if shape[node] == parent]
        rows = [offset + 1 + parent for offset in sampler.offsets]
        logits = [table_logits(sequences, shape, tokens, [parent], model) for model in models]
        scores = [sampler.scores(of_model, rows, tokens) for of_model in logits]
        if sequences[0].coupled:
            tokens[:, children] = sampler.sample_top(scores[0], rows, len(children)).tokens()
            continue
        laws = [sampler.laws(of_model, rows) for of_model in scores]
        if len(models) == 1:
            tokens[:, children], logq[:, children] = sampler.propose_top(laws[0], rows, len(children))
            continue
        for rank, child in enumerate(children):
            logq[:, child] = laws[rank % len(models)]
            tokens[:, child] = sampler.propose(logq[:, child], rows, rank)
    if sequences[0].coupled:
        return Draft((size,) * len(sequences), tokens, trees=every)
    return Draft((size,) * len(sequences), tokens, logq, {i: i for i in every}, trees=every)


def play(
    sequences: Seq[Sequence], shape: Parents, length: int, models: Seq[Tensor] = (DRAFT,)
) -> tuple[list[tuple[int, ...]], Counter[int]]:
    """(the first `length` tokens of each sequence, accepted drafts per round)."""
    counts = Counter[int]()
    while left := [s for s in sequences if s.num_output < length]:
        batch = DraftBatch(tuple(left), Sampler(left, [len(shape)] * len(left), VOCAB, CPU))
        draft = draft_trees(batch, shape, models) if shape else Draft.none(len(left))
        tokens = torch.zeros(len(left), 0) if draft.tokens is None else draft.tokens
        verdict = verify(batch, draft, table_logits(left, shape, tokens, range(ROOT, len(shape))))
        assert not any(verdict.non_finite)
        counts.update(verdict.accepted)
        for sequence, emitted in zip(left, verdict.emitted, strict=True):
            sequence.tokens += emitted
    return [tuple(s.tokens[s.num_prompt :][:length]) for s in sequences], counts


def endless(setting: str) -> SamplingParams:
    return replace(SETTINGS[setting], ignore_eos=True, min_tokens=0, stop_token_ids=())


def sequences_of(count: int, params: SamplingParams, verifier: Verifier, seed: int = 0) -> list[Sequence]:
    sequences = [make_sequence(i, PROMPT, params, key=sequence_key(seed, 0, i)) for i in range(count)]
    for sequence in sequences:
        sequence.verifier = verifier
    return sequences


@pytest.mark.parametrize("shape", [WIDE, (ROOT, ROOT, ROOT), (ROOT, 0, ROOT, 1, 1)])
@pytest.mark.parametrize("setting", ["plain", "combined", "frequency"])
def test_match_emits_the_text_without_the_tree(setting: str, shape: Parents) -> None:
    params = endless(setting)
    plain, _ = play(sequences_of(24, params, "match"), (), 6)
    found, counts = play(sequences_of(24, params, "match"), shape, 6)
    assert found == plain
    chain, chain_counts = play(sequences_of(24, params, "match"), trees.chain(max(trees.depths(shape))), 6)
    assert chain == plain
    assert counts.total() < chain_counts.total()  # fewer rounds: siblings are accepted too


def test_at_temperature_zero_every_verifier_follows_the_target() -> None:
    params = SamplingParams(temperature=0.0)
    plain, _ = play(sequences_of(10, params, "match"), (), 6)
    for verifier in ("match", "rejection", "block"):
        assert play(sequences_of(10, params, verifier), WIDE, 6)[0] == plain


def p_value(
    setting: str, shape: Parents, count: int, models: Seq[Tensor] = (DRAFT,), seed: int = 0, length: int = LENGTH
) -> float:
    """Test the texts that rejection emits against the exact law. Return 0 if the law excludes one of them."""
    params = endless(setting)
    texts, counts = play(sequences_of(count, params, "rejection", seed), shape, length, models)
    assert counts[0]
    assert sum(counts[n] for n in range(1, 9)) > count / 4
    law = defaultdict[tuple[int, ...], float](float)
    for text, p in law_of(params).items():
        law[text[:length]] += p
    return g_test(Counter(texts), law) if all(law.get(text) for text in texts) else 0.0


DESIGN = [
    ("plain", WIDE, (DRAFT,)),
    ("frequency", (ROOT, ROOT, ROOT, 1, 1), (DRAFT,)),
    ("combined", (ROOT, 0, ROOT, 1, 2), (DRAFT, OTHER_DRAFT)),
    ("plain", (ROOT, ROOT, 1, 0), (DRAFT, DRAFT)),
]


@pytest.mark.parametrize(("setting", "shape", "models"), DESIGN)
def test_rejection_emits_the_exact_law(setting: str, shape: Parents, models: Seq[Tensor]) -> None:
    """Siblings without replacement, of two models, and with replacement; false alarms with probability 1e-5."""
    assert p_value(setting, shape, 1000, models) > REFUSED


@pytest.mark.proofs
@pytest.mark.parametrize("setting", ["plain", "temperature", "top_k", "presence", "repetition", "combined"])
@pytest.mark.parametrize("models", [(DRAFT,), (DRAFT, OTHER_DRAFT)])
@pytest.mark.parametrize("shape", [WIDE, trees.branching([3, 1]), (ROOT, 0, ROOT, 1, 2, 2)])
def test_rejection_emits_the_exact_law_in_more_texts(setting: str, models: Seq[Tensor], shape: Parents) -> None:
    assert p_value(setting, shape, 12_000, models, seed=1) > REFUSED


def p_value_of_two_siblings() -> float:
    """Test the first tokens of 1,500 sequences against one law. Most first siblings are the same token."""
    p, q = (torch.tensor(law, dtype=torch.float64) for law in ((0.4, 0.3, 0.3), (0.8, 0.19, 0.01)))
    sequences = sequences_of(1500, SamplingParams(), "rejection")
    sampler, every = Sampler(sequences, [2] * 1500, 3, CPU), dict.fromkeys(range(1500), (ROOT, ROOT))
    siblings, laws = sampler.propose_top(q.log().expand(1500, -1), sampler.offsets, 2)
    draft = Draft((2,) * 1500, siblings, laws, {i: i for i in every}, trees=every)
    verdict = verify(DraftBatch(tuple(sequences), sampler), draft, p.log().expand(4500, -1))
    return g_test(Counter(emitted[0] for emitted in verdict.emitted), dict(enumerate(p.tolist())))


def test_a_coin_that_siblings_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p_value_of_two_siblings() > REFUSED
    monkeypatch.setattr(sampler_module, "sibling_stream", lambda stream, rank: stream)
    assert p_value_of_two_siblings() < REFUSED


def forget_the_siblings_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings without replacement are told as if each were drawn from the whole law."""
    propose_top = Sampler.propose_top

    def careless(self: Sampler, laws: Tensor, rows: Seq[int], width: int) -> tuple[Tensor, Tensor]:
        siblings, _ = propose_top(self, laws, rows, width)
        return siblings, laws[:, None].expand(-1, width, -1)

    monkeypatch.setattr(Sampler, "propose_top", careless)


def see_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target's rows see a sibling. The draft model's laws stay what its tokens were drawn from."""
    monkeypatch.setattr(RoundRows, "seen", lambda self, row: range(self.places[row][1]))


def descend_from_a_rejected_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(passes: Tensor, table: TreeTable) -> Tensor:
        visited = walk(passes, table)
        below = passes & (table.parent_rows > 0)
        return torch.where(below.any(1, keepdim=True), below.byte().argmax(1, keepdim=True) + 1, visited)

    walk = tree_acceptance.walk
    monkeypatch.setattr(tree_acceptance, "walk", careless)


@pytest.mark.parametrize(
    ("fault", "setting", "shape", "length"),
    [
        (forget_the_siblings_before, "plain", WIDE, 1),
        (see_a_sibling, "frequency", WIDE, LENGTH),
        (descend_from_a_rejected_node, "plain", WIDE, LENGTH),
    ],
)
def test_a_fault_is_refused(
    fault: Callable[[pytest.MonkeyPatch], None],
    setting: str,
    shape: Parents,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert p_value(setting, shape, 1500 if length == 1 else 800, length=length) < REFUSED
