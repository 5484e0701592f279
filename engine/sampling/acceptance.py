"""Which drafts are kept, and by what law the next token is drawn. Pure functions, vectorised over a ragged batch.

Vocabulary: accepted (drafts kept), recovered (the target's token after the first rejection), bonus (its token after k
acceptances), emitted (all of them).

Shapes: N sequences, K the largest k among them. logp [N, K + 1, vocab]: row j is the log of the target's law p for the
token after the first j drafts. logq [N, K, vocab]: row j is the log of the law q that draft j was really drawn from,
one-hot for a deterministic drafter; its row may be −inf throughout for a draft that is no token at all. Both are after
all sampling parameters. drafts [N, K]: ids within the vocabulary. Rows from a sequence's own k on are never looked at.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

OVERLAP_SCALE = 1_000_000  # of one, in which overlaps are told


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided, on the host: one entry per sequence, in the round's order."""

    accepted: list[int]
    emitted: list[list[int]]  # accepted drafts, then the recovered or bonus token
    non_finite: list[bool]  # the emitted tokens come from scores that are not finite: the sequence cannot go on
    # Σ min(p, q) at the drafts that were looked at: the accepted ones and the first that was not. () without drafts and
    # where acceptance is equality.
    overlaps: list[tuple[float, ...]]
    num_illegal: int  # sequences whose draft holds an id outside the vocabulary
    drafts: list[list[int]]  # ids that were proposed


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What a verifier decided: [N] each, on the device."""

    accepted: Tensor  # int64
    tokens: Tensor  # int64: the recovered or bonus token
    finite: Tensor  # bool: the emitted tokens were drawn from finite scores; if not, the sequence cannot go on
    overlaps: Tensor | None = None  # [N, ≤ K] int64: see `overlaps`; −1: not looked at


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How rejection and block verification decide, given p, q and the drafts: everything but the coins."""

    chances: Tensor  # [N, K] fp64: probability that a uniform number accepts at this position; 0 from k on
    log_scales: Tensor  # [N, K + 1] the emitted token after j acceptances follows max(scale_j · p − q, 0)


def match(drawn: Tensor, finite: Tensor, drafts: Tensor | None, ks: Seq[int]) -> DeviceVerdict:
    """Accept drafts while they equal what the target itself drew for their position (architecture R6).

    drawn [R]: the target's draws, sequence-major, k + 1 per sequence; finite [R] bool: whether each came from a finite
    score. drafts [N, ≥ K]: row i holds k[i] ids, then anything; None when every k is 0. The emitted tokens are the
    target's own draws whatever was drafted; so the text cannot depend on the drafts, and an illegal id costs its own
    sequence's draft and nothing else.

    Example: drawn (7, 3, 9, 4), drafts (7, 3, 5), k = 3: two accepted, then token 9.
    """
    if drafts is None:
        return DeviceVerdict(torch.zeros_like(drawn), drawn, finite)
    table, good = padded(drawn, ks), padded(finite, ks)  # [N, K + 1]
    depth = table.shape[1] - 1
    agrees = drafts[:, :depth] == table[:, :-1]
    if min(ks) < depth:
        agrees &= proposed(ks, drawn.device)
    accepted = agrees.cumprod(1).sum(1, keepdim=True)
    so_far = good.cumprod(1).gather(1, accepted)  # 1 while every row up to this one is finite
    return DeviceVerdict(accepted[:, 0], table.gather(1, accepted)[:, 0], so_far[:, 0].bool())


def rejection(logp: Tensor, logq: Tensor, drafts: Tensor, ks: Seq[int], lenience: Tensor) -> Acceptance:
    """Token by token: accept with probability min(1, p / (l·q)), else draw from norm(max(p − l·q, 0)).

    Leviathan et al. 2023, Algorithm 1 and appendix A.5; Chen et al. 2023, Algorithm 2. lenience l [N] in (0, 1]; with
    l = 1 the emitted tokens follow p exactly.
    """
    log_scales = -lenience.to(logp.dtype).log()[:, None].expand(-1, logp.shape[1])
    chances = (_log_ratios(logp, logq, drafts) + log_scales[:, 1:]).clamp(max=0).exp()
    return Acceptance(_within(chances, ks), log_scales)


def block(logp: Tensor, logq: Tensor, drafts: Tensor, ks: Seq[int]) -> Acceptance:
    """Jointly: keep the longest prefix that any coin accepts (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    It accepts at least as many drafts as `rejection` in expectation, and never another law.
    """
    ratios = _log_ratios(logp, logq, drafts)
    scales = [torch.zeros_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        # log of min(p₁…pᵢ / q₁…qᵢ, 1), taken step by step; once at −inf it stays there, whatever is behind.
        scales.append((scales[-1] + ratio).clamp(max=0).masked_fill(scales[-1] == -torch.inf, -torch.inf))
    log_scales = torch.stack(scales, 1)
    chances = log_scales[:, 1:].exp()
    if chances.shape[1] > 1:
        inner = log_scales[:, 1:-1]
        mass = log_residual(logp[:, 1:-1], logq[:, 1:], inner[..., None]).logsumexp(-1).exp()
        room = mass - torch.expm1(inner)
        last = torch.tensor(ks, device=logp.device)[:, None] == torch.arange(1, chances.shape[1], device=logp.device)
        # 0/0 is 1. So is NaN, for then the sequence must end, as it does by rejection; but not behind a draft that p
        # excludes, where the scores are nobody's.
        inside = torch.where(room > 0, mass / room, 1.0).masked_fill(inner == -torch.inf, 0.0)
        chances = torch.cat([torch.where(last, chances[:, :-1], inside), chances[:, -1:]], 1)
    return Acceptance(_within(chances, ks), log_scales)


def overlaps(logp: Tensor, logq: Tensor, lenience: Tensor | None = None) -> Tensor:
    """Σ min(p / l, q) [N, K] of each draft's position, in parts per million, int64; 0 where that is NaN.

    Given that all before it are accepted, this is the probability that rejection accepts a draft, whichever is drawn
    (Leviathan et al. 2023, Theorem 3.5). Block verification accepts no fewer of them in expectation.
    """
    scaled = logp[:, :-1] if lenience is None else logp[:, :-1] - lenience.to(logp.dtype).log()[:, None, None]
    shares = torch.minimum(scaled, logq).exp_().sum(-1).nan_to_num(0.0).clamp(0, 1)
    return (shares * OVERLAP_SCALE).round().long()


def first_failure(chances: Tensor, coins: Tensor) -> Tensor:
    """Drafts accepted [N] by rejection: all before the first coin that is not below its chance."""
    return (coins < chances).cumprod(1).sum(1)


def last_success(chances: Tensor, coins: Tensor) -> Tensor:
    """Drafts accepted [N] by block verification: up to the last coin that is below its chance, failures or not."""
    places = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return ((coins < chances) * places).amax(1)


def emitted_law(logp: Tensor, logq: Tensor, log_scales: Tensor, accepted: Tensor, ks: Seq[int]) -> Tensor:
    """Log-weights [N, vocab] of the token after `accepted` [N] drafts: the residual, or p itself after all k.

    A residual without any mass means p = q up to rounding, where rejection has probability 0 but for that rounding:
    then p is right.
    """
    rows = torch.arange(len(accepted), device=logp.device)
    p = logp[rows, accepted]
    complete = accepted == torch.tensor(ks, device=logp.device)
    q = logq[rows, accepted.clamp(max=logq.shape[1] - 1)].masked_fill(complete[:, None], -torch.inf)
    weights = log_residual(p, q, log_scales[rows, accepted].masked_fill(complete, 0)[:, None])
    return torch.where((weights == -torch.inf).all(1, keepdim=True), p, weights)


def log_residual(logp: Tensor, logq: Tensor, log_scale: Tensor) -> Tensor:
    """log max(scale·p − q, 0), elementwise: a + log(1 − e^(b − a)), which loses nothing where p and q are close."""
    scaled = logp + log_scale
    gap = (logq - scaled).masked_fill(scaled == -torch.inf, 0.0).clamp(max=0)  # 0: no mass left
    return scaled + torch.log(-torch.expm1(gap))


def _log_ratios(logp: Tensor, logq: Tensor, drafts: Tensor) -> Tensor:
    """log p/q [N, K] at the drafts; −inf for a draft that q cannot have given, which is no token."""
    p = logp[:, :-1].gather(2, drafts[..., None])[..., 0]
    q = logq.gather(2, drafts[..., None])[..., 0]
    return (p - q).masked_fill(q == -torch.inf, -torch.inf)


def _within(chances: Tensor, ks: Seq[int]) -> Tensor:
    return chances.double().masked_fill(~proposed(ks, chances.device), 0.0)


def proposed(ks: Seq[int], device: torch.device) -> Tensor:
    """[N, K] bool: which places of the table hold drafts."""
    return torch.arange(max(ks), device=device) < torch.tensor(ks, device=device)[:, None]


def padded(values: Tensor, ks: Seq[int]) -> Tensor:
    """[R, …] with k + 1 rows per sequence → [N, K + 1, …], the last row repeated where a sequence has fewer."""
    depth, first, index = max(ks), 0, []
    if min(ks) == depth:
        return values.view(len(ks), depth + 1, *values.shape[1:])
    for k in ks:
        index.append([first + min(j, k) for j in range(depth + 1)])
        first += k + 1
    return values[torch.tensor(index, device=values.device)]
