"""Log-probabilities to tell the client: of the target's raw logits, before any sampling parameter (vLLM's default)."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from deployments.engine.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """What each row of logits [R, vocab] gives its token, and its `counts[i]` likeliest, equals by their ids."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = _likeliest(logp, min(max(counts), logits.shape[-1]))
    return [
        TokenLogprob(token, value, tuple(sorted(top, key=lambda pair: (-pair[1], pair[0]))[:count]))
        for token, value, top, count in zip(tokens, own, best, counts, strict=True)
    ]


def _likeliest(logp: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` best (id, logprob) of each row in any order, and all that equal the last of them."""
    best: list[list[tuple[int, float]]] = [[] for _ in logp]
    if count:
        rows, ids = (logp >= logp.topk(count).values[:, -1:]).nonzero(as_tuple=True)
        for row, token, value in zip(rows.tolist(), ids.tolist(), logp[rows, ids].tolist(), strict=True):
            best[row].append((token, value))
    return best
