"""Which drafts are kept, and the law of the token after them. Pure functions, vectorised over a ragged batch.

Vocabulary: accepted (drafts kept), recovered (the target's token after the first rejection), bonus (its token after k
acceptances), emitted (all of them).

Shapes: N sequences, K the largest k among them. logp [N, K + 1, vocab]: row j is the log of the target's law p for the
token after the first j drafts. logq [N, K, vocab]: row j is the log of the law q that draft j was really drawn from,
one-hot for a deterministic drafter, −inf everywhere for a draft whose id is illegal. Both are after all sampling
parameters. drafts [N, K]: ids within the vocabulary. Entries beyond a sequence's k are ignored.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling import elementwise
from engine.sampling.ragged import Lengths, lengths

OVERLAP_SCALE = 1_000_000  # overlaps are integers, in millionths


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round decided, on the host: one entry per sequence, in the round's order."""

    accepted: list[int]
    emitted: list[list[int]]  # accepted drafts, then the recovered or bonus token
    non_finite: list[bool]  # the emitted tokens come from scores that are not finite: the sequence cannot go on
    # Σ min(p, q) at the drafts that were tried: those accepted and the first rejected one. In a tree, all that
    # trees.tried names, and p is what their rejected siblings left of it. () without drafts and under match.
    overlaps: list[tuple[float, ...]]
    num_illegal: int  # sequences whose draft holds an id outside the vocabulary
    drafts: list[list[int]]  # proposed ids
    # Index of a sequence whose draft is a tree → the nodes that were accepted, from the root's child on. The drafts of
    # other sequences are chains, of which the first `accepted` were.
    paths: Mapping[int, list[int]] = field(default_factory=dict)
    # If the draft wants it: the target's token behind the last committed token and behind each draft, which is its own
    # draw under match, else its most likely token. There may be more than k + 1 entries, which mean nothing.
    drawn: list[list[int]] = field(default_factory=list)
    last_rows: Tensor | None = (
        None  # as DeviceVerdict's, still on the device, for what else a round with trees does there
    )

    @classmethod
    def without_drafts(cls, tokens: Seq[int], finite: Seq[bool]) -> "Verdict":
        """The verdict of a round without drafts: one token for each sequence, and whether its score is finite."""
        n = len(tokens)
        return cls([0] * n, [[token] for token in tokens], [not f for f in finite], [()] * n, 0, [[]] * n)


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """A round's decisions on the device, [N] each."""

    # int64: the row of its sequence that gives the recovered or bonus token. 0: no draft was accepted. After a chain it
    # is the number of accepted drafts; in a tree, one more than the last accepted node.
    last_rows: Tensor
    tokens: Tensor  # int64: the recovered or bonus token
    finite: Tensor  # bool, or 1 and 0: whether the emitted tokens were drawn from finite scores
    overlaps: Tensor | None = None  # [N, ≤ K] int64: see `overlaps`; −1: no draft
    drawn: Tensor | None = None  # [N, ≤ K + 1] int64: see `drawn`
    table: Tensor | None = None  # [N, 3 + K] int64: last_rows, tokens, finite and the drafts, where they lie together


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """What rejection and block verification compute from p, q and the drafts. The coins then decide."""

    chances: Tensor  # [N, K] fp64: probability that a uniform number accepts at this position; 0 from k on
    log_scales: Tensor  # [N, K + 1] the emitted token after j acceptances follows max(scale_j · p − q, 0)


def rejection(logp: Tensor, logq: Tensor, drafts: Tensor, ks: Lengths, lenience: Tensor) -> AcceptanceLaw:
    """Token by token: accept with probability min(1, p / (l·q)), else draw from norm(max(p − l·q, 0)).

    Leviathan et al. 2023, Algorithm 1 and appendix A.5; Chen et al. 2023, Algorithm 2. lenience l [N] in (0, 1]; with
    l = 1 the emitted tokens follow p exactly.
    """
    log_scales = -lenience.to(logp.dtype).log()[:, None].expand(-1, logp.shape[1])
    chances = (log_ratios(logp[:, :-1], logq, drafts) + log_scales[:, 1:]).clamp(max=0).exp()
    return AcceptanceLaw(_within(chances, ks), log_scales)


def block(logp: Tensor, logq: Tensor, drafts: Tensor, ks: Lengths) -> AcceptanceLaw:
    """Jointly: keep the longest prefix that any coin accepts (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    The emitted tokens follow p. In expectation it accepts at least as many drafts as `rejection`.
    """
    ratios = log_ratios(logp[:, :-1], logq, drafts)
    scales = [torch.zeros_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        # log of min(p₁…pᵢ / q₁…qᵢ, 1), step by step; it stays at −inf, even where the next ratio is NaN.
        scales.append((scales[-1] + ratio).clamp(max=0).masked_fill(scales[-1] == -torch.inf, -torch.inf))
    log_scales = torch.stack(scales, 1)
    chances = log_scales[:, 1:].exp()
    if chances.shape[1] > 1:
        inner = log_scales[:, 1:-1]
        mass = residual_mass(logp[:, 1:-1], logq[:, 1:], inner[..., None])
        room = mass - torch.expm1(inner)
        last = lengths(ks, logp.device)[:, None] == torch.arange(1, chances.shape[1], device=logp.device)
        # 0/0 is 1. NaN is 1 as well: the draft is reached, and the sequence then ends, as under rejection. Behind a
        # draft that p excludes the chance is 0: those rows do not matter.
        inside = torch.where(room > 0, mass / room, 1.0).masked_fill(inner == -torch.inf, 0.0)
        chances = torch.cat([torch.where(last, chances[:, :-1], inside), chances[:, -1:]], 1)
    return AcceptanceLaw(_within(chances, ks), log_scales)


def overlaps(logp: Tensor, logq: Tensor, lenience: Tensor | None = None) -> Tensor:
    """Σ min(p / l, q) [N, K] at each draft's position, int64, in millionths; 0 where that is NaN.

    It is the probability that rejection accepts a draft at this position, given that all before it are accepted
    (Leviathan et al. 2023, Theorem 3.5). Block verification accepts at least as many drafts in expectation.
    """
    scaled = logp[:, :-1] if lenience is None else logp[:, :-1] - lenience.to(logp.dtype).log()[:, None, None]
    return shared_mass(scaled, logq)


def shared_mass(logp: Tensor, logq: Tensor) -> Tensor:
    """Σ min(p, q) over the last dimension, int64, in millionths; 0 where that is NaN."""
    shares = elementwise.exp(torch.minimum(logp, logq)).sum(-1).nan_to_num(0.0).clamp(0, 1)
    return (shares * OVERLAP_SCALE).round().long()


def first_failure(chances: Tensor, coins: Tensor) -> Tensor:
    """Drafts that rejection accepts [N]: all before the first coin that is not below its chance."""
    return (coins < chances).cumprod(1).sum(1)


def last_success(chances: Tensor, coins: Tensor) -> Tensor:
    """Drafts that block verification accepts [N]: all up to the last coin that is below its chance."""
    lengths = torch.arange(1, chances.shape[1] + 1, device=chances.device)
    return ((coins < chances) * lengths).amax(1)


def emitted_law(logp: Tensor, logq: Tensor, log_scales: Tensor, accepted: Tensor, ks: Lengths) -> Tensor:
    """Log-weights [N, vocab] of the token after `accepted` [N] drafts: the residual, or p itself after all k."""
    rows = torch.arange(len(accepted), device=logp.device)
    p = logp[rows, accepted]
    complete = accepted == lengths(ks, logp.device)
    q = logq[rows, accepted.clamp(max=logq.shape[1] - 1)].masked_fill(complete[:, None], -torch.inf)
    return law_after(p, q, log_scales[rows, accepted].masked_fill(complete, 0)[:, None])


def law_after(p: Tensor, q: Tensor, log_scale: Tensor) -> Tensor:
    """Log-weights [N, vocab] of the token after the rejection of a draft: the residual of log-laws p and q.

    If the residual has no mass, p equals q up to rounding, and only rounding made the rejection possible: p is used.
    """
    weights = log_residual(p, q, log_scale)
    return torch.where((weights == -torch.inf).all(1, keepdim=True), p, weights)


def log_residual(logp: Tensor, logq: Tensor, log_scale: Tensor) -> Tensor:
    """log max(scale·p − q, 0), elementwise, as a + log(1 − e^(b − a)): precise also where p and q are close."""
    scaled, gap = _scaled_and_gap(logp, logq, log_scale)
    return scaled + elementwise.log(-torch.expm1(gap))


def residual_mass(logp: Tensor, logq: Tensor, log_scale: Tensor) -> Tensor:
    """Σ max(scale·p − q, 0) over the last dimension, as precise as log_residual."""
    scaled, gap = _scaled_and_gap(logp, logq, log_scale)
    return -(elementwise.exp(scaled) * torch.expm1(gap)).sum(-1)


def _scaled_and_gap(logp: Tensor, logq: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(log(scale·p), the log of q / (scale·p), at most 0: no mass is left where it is 0)."""
    scaled = logp + log_scale
    return scaled, (logq - scaled).masked_fill(scaled == -torch.inf, 0.0).clamp(max=0)


def log_ratios(logp: Tensor, logq: Tensor, drafts: Tensor) -> Tensor:
    """log p/q […] at the drafts […], given both laws […, vocab] of each; −inf for an illegal draft, to which q gives no
    probability."""
    p = logp.gather(-1, drafts[..., None])[..., 0]
    q = logq.gather(-1, drafts[..., None])[..., 0]
    return (p - q).masked_fill(q == -torch.inf, -torch.inf)


def fill_one_hot(logq: Tensor, drafts: Tensor) -> Tensor:
    """The log-laws logq [N, K, vocab] of drafts [N, K], changed in place where they say nothing.

    A token gets a one-hot law if its own gives it no finite probability: it came without a law, or its model's numbers
    are NaN. An id outside the vocabulary gets −inf everywhere.
    """
    legal = drafts.clamp(0, logq.shape[-1] - 1)
    of_drafts = logq.gather(2, legal[..., None])
    outside = (legal != drafts)[..., None]
    one_hot = outside | ~torch.isfinite(of_drafts)
    logq.masked_fill_(one_hot, -torch.inf)
    return logq.scatter_(2, legal[..., None], of_drafts.masked_fill_(one_hot, 0.0).masked_fill_(outside, -torch.inf))


def _within(chances: Tensor, ks: Lengths) -> Tensor:
    inside = torch.arange(chances.shape[1], device=chances.device) < lengths(ks, chances.device)[:, None]
    return chances.double().masked_fill(~inside, 0.0)
