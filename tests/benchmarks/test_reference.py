"""The transformers peer on the demo pair in float64, where every way to decode greedily must give one text."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import reference

PROMPT = [23, 871, 15, 402, 77, 3001, 19, 54]
TOKENS = 12


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    torch.set_num_threads(1)
    return reference.load("models/demo/target", "float64", "cpu")


@pytest.fixture(scope="module")
def plain(target: PreTrainedModel) -> list[int]:
    return reference.greedy(target, TOKENS)(PROMPT)


def test_plain_is_the_argmax_of_the_whole_context(target: PreTrainedModel, plain: list[int]) -> None:
    with torch.inference_mode():
        logits = target(torch.tensor([PROMPT + plain])).logits[0, len(PROMPT) - 1 : -1]  # [TOKENS, vocab]
    assert logits.argmax(-1).tolist() == plain


def test_nothing_stops_generation(target: PreTrainedModel, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control makes a token of the text the end-of-sequence token: without `load` clearing it, text ends early."""
    assert len(plain) == TOKENS
    monkeypatch.setattr(target.generation_config, "eos_token_id", plain[3])
    assert len(reference.greedy(target, TOKENS)(PROMPT)) < TOKENS


@pytest.mark.parametrize("k", [1, 4])
def test_assisted_makes_k_drafts_a_round(
    target: PreTrainedModel, plain: list[int], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = reference.load("models/demo/draft", "float64", "cpu")
    asked: list[int] = []
    generate = draft.generate

    def recording(*args: object, **options: object) -> object:
        asked.append(int(str(options["max_new_tokens"])))
        out = generate(*args, **options)  # type: ignore[operator]
        assert out.sequences.shape[1] - int(options["input_ids"].shape[1]) == asked[-1]  # type: ignore[attr-defined]
        return out

    monkeypatch.setattr(draft, "generate", recording)
    assert reference.assisted(target, draft, k, TOKENS)(PROMPT) == plain
    assert asked[0] == k
    assert max(asked) == k


def test_prompt_lookup_gives_the_same_text(target: PreTrainedModel, plain: list[int]) -> None:
    assert reference.greedy(target, TOKENS, prompt_lookup_num_tokens=4)(PROMPT) == plain


def test_divergences_carry_the_margin_where_they_start(target: PreTrainedModel, plain: list[int]) -> None:
    other = [*plain[:5], plain[5] + 1, *plain[6:]]
    with torch.inference_mode():
        best = target(torch.tensor([PROMPT + plain[:5]])).logits[0, -1].sort(descending=True).values
    (found,) = reference.divergences(lambda: target, [PROMPT, PROMPT], [plain, plain], [plain, other])
    assert (found.prompt, found.position) == (1, 5)
    assert found.top2_gap == pytest.approx(float(best[0] - best[1]), abs=1e-9)


def test_equal_outputs_load_nothing() -> None:
    def forbidden() -> PreTrainedModel:
        raise AssertionError("loaded")

    assert reference.divergences(forbidden, [[1]], [[2, 3]], [[2, 3]]) == []
    with pytest.raises(AssertionError, match="loaded"):
        reference.divergences(forbidden, [[1]], [[2, 3]], [[2, 4]])
