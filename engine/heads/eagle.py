"""EAGLE heads: one decoder layer that continues the target's hidden states.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads the states that enter three of the target's layers. EAGLE and EAGLE-2
(arXiv 2401.15077 and 2406.16858) read the states behind the target's final norm.

The head's row t reads the embedding of token t + 1 together with a state of position t, and gives the law of token
t + 2. The state is the target's as far as the target has read, and behind that the head's own output of the row before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.models.decoder import Decoder, DecoderConfig
from engine.models.layer import Norm
from engine.models.linear import Product
from engine.models.pass_attention import PassAttention

OUTSIDE = -1e4  # logit of a token outside the head's vocabulary: no probability, and finite as a faultless row must be


class HeadTarget(Protocol):
    """What a head shares with its target."""

    @property
    def config(self) -> DecoderConfig: ...
    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        ...

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Normed states [R, hidden] → logits [R, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class EagleHead:
    """Weights and forward pass, without state.

    EAGLE-3: the states of several layers are fused to the layer's residual g. Attention reads the normed embedding and
    the normed g side by side. EAGLE: one product makes the residual of embedding and state.
    """

    body: Decoder  # the head's layers, over the target's embedding or its own
    layers: tuple[int, ...]  # of the target's whose states it reads, numbered as in WatchedStates
    fuse: Product  # EAGLE-3: states [N, len(layers) · target hidden] → g [N, hidden]; EAGLE: embedding and g → residual
    fused_norm: Norm  # of the states before `fuse`
    hidden_norm: Norm | None  # of g, for attention; None: an EAGLE head
    norm_residual: bool  # whether the normed g is the residual
    norm_output: bool  # whether the next row reads the output behind the final norm
    vocabulary: Tensor | None  # [draft vocab] int64: the target's id of each token that it drafts; None: all, in order
    state_width: int  # numbers of the target's states that it reads of a position
    own_products: tuple[Product, ...]  # that it does not share with the target
    own_embedding_bytes: int  # 0: the embedding is the target's

    @property
    def config(self) -> DecoderConfig:
        return self.body.config

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    @property
    def block_rows(self) -> int:
        return self.body.block_rows

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the head does not share with the target."""
        return self.own_embedding_bytes + sum(product.num_bytes for product in self.own_products)

    def project(self, states: Tensor) -> Tensor:
        """The target's states [N, len(layers) · target hidden] → g [N, hidden], as the rows of a pass read them."""
        return states if self.hidden_norm is None else self.fuse(self.fused_norm(states))

    def carry(self, hidden: Tensor) -> Tensor:
        """The outputs [N, hidden] of rows → g of the rows that follow them."""
        return self.body.norm(hidden) if self.norm_output else hidden

    def forward(self, ids: Tensor, states: Tensor, attention: PassAttention) -> Tensor:
        """Outputs [N, hidden] of N packed rows: tokens ids [N] int64, and g [N, hidden] of the positions before."""
        body, embedded = self.body, self.body.embed(ids)
        if self.hidden_norm is None:
            x = self.fuse(torch.cat([embedded, states], 1))
            inputs = body.layers[0].before_attention(x)
        else:
            normed = self.hidden_norm(states)
            inputs = torch.cat([body.layers[0].before_attention(embedded), normed], 1)
            x = normed.clone() if self.norm_residual else states.clone()
        body.add_layers(x, attention, inputs=inputs)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [R, hidden] → logits [R, target vocab]."""
        logits = self.body.head(self.body.norm(hidden))
        if self.vocabulary is None:
            return logits
        full = logits.new_full((logits.shape[0], self.config.vocab_size), OUTSIDE)
        return full.index_copy_(1, self.vocabulary, logits)
