"""allowed_token_ids and bad words against the obvious definition, at every row of a round."""

import random

import pytest
import torch
from torch import Tensor

from engine.sampling.exclusions import Exclusions
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.types import SamplingParams
from tests.engine.driving import make_sequence

CPU = torch.device("cpu")
VOCAB = 8


def ends_with(output: list[int], start: list[int]) -> bool:
    return len(start) <= len(output) and output[len(output) - len(start) :] == start


def excluded(params: SamplingParams, output: list[int]) -> set[int]:
    """The definition (vLLM's): the last token of each bad word whose other tokens end the output."""
    bad = {word[-1] for word in params.bad_word_ids if ends_with(output, [*word[:-1]])}
    allowed = range(VOCAB) if params.allowed_token_ids is None else params.allowed_token_ids
    return bad | (set(range(VOCAB)) - {*allowed})


def with_output(handle: int, prompt: list[int], output: list[int], params: SamplingParams) -> Sequence:
    sequence = make_sequence(handle, prompt, params)
    sequence.tokens += output
    return sequence


def random_params(rng: random.Random) -> SamplingParams:
    words = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 5))]
    allowed = tuple(rng.sample(range(VOCAB), rng.randint(1, VOCAB))) if rng.random() < 0.5 else None
    return SamplingParams(temperature=1.0, bad_word_ids=tuple(words), allowed_token_ids=allowed)


def rounds(seed: int) -> tuple[list[Sequence], list[int], Tensor]:
    """Sequences with outputs of 0 to 5 tokens of three kinds, the number of drafts of each, and the drafts."""
    rng = random.Random(seed)
    sequences = [
        with_output(i, [0, 1, 2, 0, 1], [rng.randrange(3) for _ in range(rng.randint(0, 5))], random_params(rng))
        for i in range(6)
    ]
    drafts = torch.tensor([[rng.randrange(3) for _ in range(5)] for _ in sequences])
    return sequences, [rng.randint(0, 5) for _ in sequences], drafts


@pytest.mark.parametrize("seed", range(40))
def test_every_row_excludes_what_the_definition_says(seed: int) -> None:
    sequences, ks, drafts = rounds(seed)
    rows = [(i, j) for i, k in enumerate(ks) for j in range(k + 1)]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = Sampler(sequences, ks, VOCAB, CPU).scores(logits, range(len(rows)), drafts)
    for n, (i, j) in enumerate(rows):
        sequence = sequences[i]
        output = sequence.tokens[sequence.num_prompt :] + drafts[i, :j].tolist()
        gone = excluded(sequence.params, output)
        assert {t for t in range(VOCAB) if scores[n, t] == -torch.inf} == gone
        kept = [t for t in range(VOCAB) if t not in gone]
        assert torch.equal(scores[n, kept], logits[n, kept])


def test_a_draft_models_smaller_vocabulary() -> None:
    params = SamplingParams(bad_word_ids=((1, 7), (1, 2), (6,), (3,)), allowed_token_ids=(0, 2, 3, 4, 6, 7))
    exclusions = Exclusions(params, VOCAB)
    scores = exclusions.apply(torch.zeros(1, 5), [1], None, [()])
    assert scores.isinf()[0].tolist() == [False, True, True, True, False]


def test_the_drafts_of_the_first_columns_and_none() -> None:
    """The draft model asks column by column: at first there are no drafts, and no tensor of them."""
    params = SamplingParams(bad_word_ids=((1, 2, 3),))
    sequence = with_output(0, [1, 2], [1], params)
    sampler = Sampler([sequence], [2], VOCAB, CPU)
    for drafts, row, gone in ((None, 0, False), (torch.tensor([[2]]), 1, True), (torch.tensor([[2, 0]]), 2, False)):
        assert (sampler.scores(torch.zeros(1, VOCAB), [row], drafts)[0, 3] == -torch.inf) == gone
