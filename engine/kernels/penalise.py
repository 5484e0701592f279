"""Penalties of all rows of a round as one operation on the device, and the table of texts that they read.

On CUDA they are the Triton kernels of penalise_kernel.py. Elsewhere, and without Triton, they are the references: torch
operations of fixed shapes that never wait for the device.
"""

import torch
from torch import Tensor

from engine.kernels.operations import operation

NO_ROW = -1  # of the table of texts: the row of logits has no penalties
NO_COLUMN = -1  # fills up the columns of a row that sees fewer drafts than another
SEEN, OUTPUT = 1, 2  # what a token adds to its entry: the bit is set once, each output token adds OUTPUT


@operation("penalise_kernel.record", mutates=["uses"])
def record_texts(uses: Tensor, tokens: Tensor) -> None:
    """Add tokens to texts. uses [S, vocab] int32, changed in place: row s holds for each token twice the number of
    times that it is in output s, plus 1 if it is in prompt or output s.

    tokens [3 · n] int64: n rows of the table, then n token ids, then for each token 1 if it is output, else 0.
    """
    record_reference(uses, tokens)


def record_reference(uses: Tensor, tokens: Tensor) -> None:
    """The definition of record_texts()."""
    rows, ids, output = tokens.view(3, -1).unbind(0)
    places, flat = rows * uses.shape[1] + ids, uses.view(-1)
    flat.index_put_((places,), flat[places] | SEEN)  # equal places get equal numbers
    flat.index_add_(0, places, (output * OUTPUT).int())


def _penalise_shapes(logits: Tensor, uses: Tensor, index: Tensor, strengths: Tensor, drafts: Tensor | None) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operation("penalise_kernel.penalise", shapes=_penalise_shapes)
def penalise(logits: Tensor, uses: Tensor, index: Tensor, strengths: Tensor, drafts: Tensor | None) -> Tensor:
    """Logits with the repetition, frequency and presence penalties of each row's text.

    logits [A, vocab'] in fp32 or fp64; vocab' ≤ vocab may be a draft model's smaller vocabulary. uses [S, vocab] int32:
    see record_texts(). index [A, 2 + W] int64: per row its row of `uses` or NO_ROW, its row of `drafts`, and the
    columns of the drafts that it sees, filled up with NO_COLUMN. strengths [3, A] fp64: repetition, frequency and
    presence penalties. drafts [B, K] int64; None if no row sees any. An id outside of the vocabulary counts as the
    nearest one: such a draft is rejected, so the rows behind it do not matter.

    A token of the text or of a seen draft gets old / repetition if positive, else old · repetition, minus
    (frequency · count + presence · (count > 0)), in the logits' type. count: how often it is in the output and in the
    drafts that the row sees.
    """
    return penalise_reference(logits, uses, index, strengths, drafts)


def penalise_reference(logits: Tensor, uses: Tensor, index: Tensor, strengths: Tensor, drafts: Tensor | None) -> Tensor:
    """The definition of penalise()."""
    rows, owners, columns = index[:, 0], index[:, 1:2], index[:, 2:]
    known = uses[rows.clamp(min=0)].masked_fill((rows == NO_ROW)[:, None], 0)
    seen, counts = known % OUTPUT == SEEN, known // OUTPUT
    if drafts is not None:
        tokens = drafts[owners, columns.clamp(min=0)].clamp(0, uses.shape[1] - 1)
        drafted = torch.zeros_like(counts).scatter_add_(1, tokens, (columns != NO_COLUMN).int())
        seen, counts = seen | (drafted > 0), counts + drafted
    seen, counts = seen[:, : logits.shape[1]], counts[:, : logits.shape[1]].to(logits.dtype)
    repetition, frequency, presence = strengths.to(logits.dtype)[..., None].unbind(0)
    new = torch.where(logits > 0, logits / repetition, logits * repetition)
    new = new - (frequency * counts + presence * (counts > 0))
    return torch.where(seen, new, logits)
