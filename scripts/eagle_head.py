"""An EAGLE-3 head in plain torch: the trainer's module, and a reference for the engine's tests.

Li et al. 2025, "EAGLE-3", arXiv 2503.01840. Tensor names are those of SafeAILab's checkpoints.

Position t has the target's hidden states of token t and the embedding of token t+1, and predicts token t+2. Its input
besides the embedding is g: at first g_t = fc(hidden states of t); where the target has not read token t yet,
g_t = h_{t-1}, the head's own output one position before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

KV = tuple[torch.Tensor, torch.Tensor]  # keys after RoPE, values: [batch, kv heads, positions, head size]


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head. `hidden` is also the target's hidden size, since the head uses its embedding."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # of the target
    draft_vocab: int  # equal to vocab: the head uses the target's own output matrix
    n_features: int = 3  # hidden states of the target per position
    eps: float = 1e-5
    rope_theta: float = 10_000.0


class HeadAttention(nn.Module):
    """Causal attention whose input is twice as wide as its output."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, key, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, KV]:
        """x [batch, n, 2 hidden], positions [n] → queries [batch, heads, n, size], and keys and values."""
        split = (*x.shape[:2], -1, self.shape.head_dim)
        q, k, v = (p(x).view(split).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = self._rotation(positions)
        return rotate(q, cos, sin), (rotate(k, cos, sin), v)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        angles = positions[:, None] * self.shape.rope_theta**-exponents
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def attend(self, q: torch.Tensor, base: KV, later: Sequence[KV] = ()) -> torch.Tensor:
        """Attend causally over `base`, and over the entry of the query's own row in each of `later`.

        The last n of base's positions belong to the n queries. Returns [batch, n, hidden].
        """
        batch, heads, n, size = q.shape
        kv_heads, past = base[0].shape[1], base[0].shape[2]
        q = q.reshape(batch, kv_heads, -1, size) * size**-0.5  # the queries of one kv head side by side
        later_than_query = torch.full((n, past), -torch.inf, dtype=q.dtype).triu(past - n + 1)
        scores = (q @ base[0].mT).view(batch, heads, n, past) + later_than_query
        grouped = q.view(batch, kv_heads, -1, n, size)
        own = [(grouped * k[:, :, None]).sum(-1).view(batch, heads, n, 1) for k, _ in later]
        shares, *own = torch.cat((scores, *own), -1).softmax(-1).split((past, *[1] * len(own)), -1)
        mixed = (shares.reshape(batch, kv_heads, -1, past) @ base[1]).view(batch, kv_heads, -1, n, size)
        for share, (_, v) in zip(own, later, strict=True):
            mixed = mixed + share.reshape(batch, kv_heads, -1, n, 1) * v[:, :, None]
        return self.o_proj(mixed.reshape(batch, heads, n, size).transpose(1, 2).reshape(batch, n, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the last axis: halves, not pairs, are rotated, as in transformers' Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class HeadFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """The head's one layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = HeadAttention(shape)
        self.mlp = HeadFeedForward(shape)

    def enter(self, embedded: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the input of the attention, [..., 2 hidden]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(g)), -1)

    def leave(self, mixed: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return h from the attention's output and the residual g."""
        a = mixed + g
        return self.mlp(self.post_attention_layernorm(a)) + a


class EagleModule(nn.Module):
    """The head beside its target's frozen embedding and output matrix, [vocab, hidden] each.

    With a smaller draft vocabulary the head has its own output matrix `lm_head`, and row i of it is the target's token
    i + d2t[i]; t2d says which tokens of the target are in it.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor
    target_head: torch.Tensor

    def __init__(
        self,
        shape: HeadShape,
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        draft_ids: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.n_features * shape.hidden, shape.hidden, bias=False)
        self.midlayer = HeadLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("target_head", target_head.detach(), persistent=False)
        self.lm_head: nn.Linear | None = None
        if draft_ids is not None:
            self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
            self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
            self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, draft_ids, True))

    @property
    def output_matrix(self) -> torch.Tensor:
        """[draft vocab, hidden]"""
        return self.target_head if self.lm_head is None else self.lm_head.weight

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """The target's token of each row of the output matrix, or None if the rows are the target's own."""
        return None if self.lm_head is None else self.d2t + torch.arange(len(self.d2t))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target, [..., n_features × hidden] in the order of the layers → g [..., hidden]."""
        return self.fc(features)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → [..., draft vocab]"""
        return self.norm(h) @ self.output_matrix.T

    def forward(
        self, next_tokens: torch.Tensor, g: torch.Tensor, start: int = 0, past: KV | None = None
    ) -> tuple[torch.Tensor, KV]:
        """Run positions start … start + n - 1 after all positions of `past`.

        next_tokens [batch, n]: token t+1 for each position t. g [batch, n, hidden]: `fuse` of the position's features,
        or h of the position before. Returns h [batch, n, hidden] and the keys and values with the new positions.
        Decoding: one whole pass over the text with features, then passes of n = 1 with g = h and the drafted token.
        """
        positions = torch.arange(start, start + next_tokens.shape[1])
        attention = self.midlayer.self_attn
        q, (k, v) = attention.project(self.midlayer.enter(self.embedding[next_tokens], g), positions)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        return self.midlayer.leave(attention.attend(q, (k, v)), g), (k, v)

    def unroll(self, tokens: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Run `steps` draft steps from every position at once, with the tokens of the text as drafts.

        tokens [batch, T], features [batch, T, n_features × hidden]. Returns for step s the h of positions s … T - 2,
        [batch, T - 1 - s, hidden]; row r of it began at position r and predicts token r + s + 2. It sees the features
        of positions up to r, and what steps 1 … s of the same row wrote (training-time test: EAGLE-3, §3.2).
        """
        embedded, g = self.embedding[tokens[:, 1:]], self.fuse(features[:, :-1])
        written: list[KV] = []
        outputs: list[torch.Tensor] = []
        for s in range(steps):
            n = embedded.shape[1] - s
            q, kv = self.midlayer.self_attn.project(self.midlayer.enter(embedded[:, s:], g), torch.arange(s, s + n))
            written.append(kv)
            base, *later = [(k[:, :, :n], v[:, :, :n]) for k, v in written]
            outputs.append(self.midlayer.leave(self.midlayer.self_attn.attend(q, base, later), g))
            g = outputs[-1][:, :-1]
        return outputs
