"""The loss of a draft head, λ·CE(p, q) + (1 - λ)·TV(p, q), with the product that gives the logits inside it.

LK losses: arXiv 2602.23881. The logits of all positions would take more memory than everything else, and most of the
time goes into reading and writing them. Here they live for CHUNK rows at a time, forward and backward at once.
"""

from typing import Any

import torch

CHUNK = 128  # rows; with 4,096 tokens 2 MB per array


class Distillation(torch.autograd.Function):
    """Mean loss over rows; see `distil`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, matrix: torch.Tensor, p: torch.Tensor, weight: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dx = torch.empty_like(x)
        dmatrix = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        loss, overlap = 0.0, 0.0
        for start in range(0, len(x), CHUNK):
            rows = slice(start, start + CHUNK)
            chunk_loss, chunk_overlap, dlogits = _chunk(x[rows] @ matrix.T, p[rows], weight)
            loss, overlap = loss + chunk_loss, overlap + chunk_overlap
            dx[rows] = dlogits @ matrix
            if dmatrix is not None:
                dmatrix.addmm_(dlogits.T, x[rows])
        ctx.gradients = dx, dmatrix
        return torch.tensor(loss / len(x)), torch.tensor(overlap / len(x))

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dmatrix = ctx.gradients
        scale = outer[0] / len(dx)
        return dx * scale, None if dmatrix is None else dmatrix * scale, None, None


def _chunk(logits: torch.Tensor, p: torch.Tensor, weight: float) -> tuple[float, float, torch.Tensor]:
    """Return the sums of loss and of Σ min(p, q), and the gradient of the loss by the logits."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    mass = p.sum(-1, keepdim=True)  # below 1 where the draft vocabulary lacks tokens of p
    cross_entropy = -torch.dot(p.flatten(), log_q.flatten()).item()
    difference = q - p
    # d TV / d q is the half of the sign; through the softmax it becomes q · (sign/2 - Σ q · sign/2).
    sign = difference.sign()
    lacking = (1 - mass).sum().item()  # p outside the draft vocabulary, where q is 0
    variation = 0.5 * (torch.dot(difference.flatten(), sign.flatten()).item() + lacking)
    pull = sign - (q * sign).sum(-1, keepdim=True)
    gradient = torch.addcmul(weight * (q * mass - p), q, pull, value=0.5 * (1 - weight))
    return weight * cross_entropy + (1 - weight) * variation, len(p) - variation, gradient


def distil(x: torch.Tensor, matrix: torch.Tensor, p: torch.Tensor, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss in nats, and the mean acceptance Σ min(p, q), which has no gradient.

    x [rows, hidden], matrix [draft vocab, hidden], p [rows, draft vocab]: the target's probabilities of the tokens in
    the draft vocabulary, which need not sum to 1. q = softmax(x · matrixᵀ). weight: λ.
    """
    return Distillation.apply(x, matrix, p, weight)
