"""Log-probabilities to tell the client: of the target's raw logits, before any sampling parameter (vLLM's default)."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from deployments.engine.types import TokenLogprob


def token_logprobs(logits: Tensor, tokens: Seq[int], counts: Seq[int]) -> list[TokenLogprob]:
    """What each row of logits [R, vocab] gives its token, and its `counts[i]` likeliest. One device-to-host copy."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    own = logp.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best = _likeliest(logp, min(max(counts), logits.shape[-1]))
    return [
        TokenLogprob(token, value, top[:count])
        for token, value, top, count in zip(tokens, own, best, counts, strict=True)
    ]


def _likeliest(logp: Tensor, count: int) -> Iterator[tuple[tuple[int, float], ...]]:
    """The `count` best (id, logprob) of each row; equals by their ids, also where the last place is tied."""
    if not count:
        yield from [()] * len(logp)
        return
    threshold = logp.topk(count).values[:, -1:]
    for row, ids in zip(logp, (logp >= threshold).unbind(0), strict=True):
        at = ids.nonzero()[:, 0]
        pairs = zip(at.tolist(), row[at].tolist(), strict=True)
        yield tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
