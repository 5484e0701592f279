"""transformers' own generation as the reference, set up as a careful user would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.stats import first_divergence

Continue = Callable[[Sequence[int]], list[int]]  # prompt ids → the new ids


def load(directory: str, dtype: str, device: str) -> PreTrainedModel:
    """A model with SDPA attention, in eval mode as from_pretrained leaves it.

    It has no end-of-sequence token, so that generate emits as many tokens as it is asked for.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        Path(directory), dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
    model.generation_config.eos_token_id = None
    model.to(device)  # type: ignore[arg-type]
    return model


def greedy(model: PreTrainedModel, max_tokens: int, **options: object) -> Continue:
    """Greedy generation of exactly `max_tokens`; `options` go to generate."""

    run_batch = greedy_batch(model, max_tokens, **options)

    def run(prompt: Sequence[int]) -> list[int]:
        return run_batch([prompt])[0]

    return run


def greedy_batch(
    model: PreTrainedModel, max_tokens: int, **options: object
) -> Callable[[Sequence[Sequence[int]]], list[list[int]]]:
    """Greedy generation of exactly `max_tokens` for each prompt of a batch, padded on the left."""

    @torch.inference_mode()
    def run(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        out: torch.Tensor = model.generate(  # type: ignore[operator]
            input_ids=torch.tensor(ids, device=model.device),  # [batch, longest]
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,  # unset, generate warns
            **options,
        )
        return out[:, longest:].tolist()

    return run


def assisted(target: PreTrainedModel, draft: PreTrainedModel, k: int, max_tokens: int) -> Continue:
    """Assisted generation with exactly k drafts a round: constant schedule, no early stop on an unsure draft."""
    run = greedy(target, max_tokens, assistant_model=draft)

    def with_k(prompt: Sequence[int]) -> list[int]:
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        return run(prompt)

    return with_k


@torch.inference_mode()
def top2_gap(exact: PreTrainedModel, tokens: Sequence[int]) -> float:
    """Difference of the two largest logits after `tokens`: the margin of the greedy choice."""
    logits = exact(torch.tensor([list(tokens)], device=exact.device)).logits[0, -1]  # [vocab]
    best, second = logits.topk(2).values.tolist()
    return float(best - second)


@dataclass(frozen=True)
class Divergence:
    """The first difference of two greedy outputs, and the target's float64 margin there."""

    prompt: int
    position: int  # in the output
    top2_gap: float


def divergences(
    exact: Callable[[], PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
) -> list[Divergence]:
    """First differences of two sets of greedy outputs. `exact` loads the float64 target; called only if needed."""
    found: list[Divergence] = []
    for i, (prompt, a, b) in enumerate(zip(prompts, left, right, strict=True)):
        at = first_divergence(a, b)
        if at is not None:
            found.append(Divergence(i, at, top2_gap(exact(), [*prompt, *a[:at]])))
    return found
