"""The log-laws of rows and of drafts, and the check of a model's draws, each as one operation on the device.

On CUDA they are the Triton kernels of laws_kernel.py, on a CPU for fp32 the compiled code of cpu_laws.py. Elsewhere,
without Triton or without Numba, they are the references: torch operations of fixed shapes that never wait for the
device.
"""

import numpy as np
import torch
from torch import Tensor

from engine.kernels.operations import operation
from engine.models.compiled import compiled_module
from engine.sampling import acceptance
from engine.sampling.filters import apply_temperature

NO_LAW = -1  # a sequence whose drafts came without laws


def _log_law_shapes(scores: Tensor, temperatures: Tensor) -> Tensor:
    return torch.empty(scores.shape, dtype=_law_dtype(scores), device=scores.device)


def _compiled_log_law(scores: Tensor, temperatures: Tensor) -> Tensor | None:
    kernels = compiled_module("cpu_laws")
    if kernels is None or scores.dtype is not torch.float32:
        return None
    laws = np.empty(scores.shape, np.float32)
    kernels.log_laws(np.ascontiguousarray(scores.numpy()), temperatures.numpy(), laws)
    return torch.from_numpy(laws)


@operation("laws_kernel.log_law", compiled=_compiled_log_law, shapes=_log_law_shapes)
def log_law(scores: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(scores / temperature) [R, vocab], in fp64 for scores in fp64, else in fp32.

    scores [R, vocab] in fp32, fp64, bf16 or fp16; −inf excludes a token. temperatures [R] fp64, positive; however low
    one is, the best token keeps a finite score. A row whose best score is not finite becomes NaN.
    """
    return log_law_reference(scores, temperatures)


def log_law_reference(scores: Tensor, temperatures: Tensor) -> Tensor:
    """The definition of log_law()."""
    return apply_temperature(scores.to(_law_dtype(scores)), temperatures).log_softmax(-1)


def _law_dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype is torch.float64 else torch.float32


def _draft_laws_shapes(laws: Tensor | None, sources: Tensor | None, drafts: Tensor, logp: Tensor) -> Tensor:
    return logp.new_empty(*drafts.shape, logp.shape[-1])


def _compiled_draft_laws(laws: Tensor | None, sources: Tensor | None, drafts: Tensor, logp: Tensor) -> Tensor | None:
    kernels = compiled_module("cpu_laws")
    if kernels is None or laws is None or not laws.dtype == logp.dtype == torch.float32:
        return None
    (count, depth), vocab = drafts.shape, logp.shape[-1]
    logq = np.empty((count, depth, vocab), np.float32)
    rows = np.arange(count) if sources is None else sources.numpy()
    given = np.ascontiguousarray(laws.numpy()).reshape(-1, laws.shape[2]), laws.shape[1], rows
    kernels.draft_laws(*given, np.ascontiguousarray(drafts.numpy()), logq.reshape(-1, vocab))
    return torch.from_numpy(logq)


@operation("laws_kernel.draft_laws", compiled=_compiled_draft_laws, shapes=_draft_laws_shapes)
def draft_laws(laws: Tensor | None, sources: Tensor | None, drafts: Tensor, logp: Tensor) -> Tensor:
    """log q [N, K, vocab] of drafts [N, K] int64, in the type and vocabulary of logp [N, …, vocab].

    laws [n, ≥ K, vocab']: the log-laws that drafts came with; ids beyond vocab are cut off, and those beyond vocab' get
    −inf. None: no draft came with any. sources [N] int64: the row of `laws` for each sequence, or NO_LAW; None: the
    rows in order, N of them. What no law says is one-hot, see acceptance.fill_one_hot().
    """
    return draft_laws_reference(laws, sources, drafts, logp)


def draft_laws_reference(laws: Tensor | None, sources: Tensor | None, drafts: Tensor, logp: Tensor) -> Tensor:
    """The definition of draft_laws()."""
    depth, vocab = drafts.shape[1], logp.shape[-1]
    logq = logp.new_full((*drafts.shape, vocab), -torch.inf)
    if laws is not None:
        known = laws[:, :depth, :vocab]
        if sources is not None:
            known = known[sources.clamp(min=0)].masked_fill((sources == NO_LAW)[:, None, None], -torch.inf)
        logq[:, :, : known.shape[-1]] = known
    return acceptance.fill_one_hot(logq, drafts)


def _mark_non_finite_shapes(drawn: Tensor, logits: Tensor, mark: int) -> Tensor:
    return torch.empty_like(drawn, memory_format=torch.contiguous_format)


@operation("laws_kernel.mark_non_finite", shapes=_mark_non_finite_shapes)
def mark_non_finite(drawn: Tensor, logits: Tensor, mark: int) -> Tensor:
    """The ids drawn [R, width] int64, with `mark` in place of each whose logit in logits [R, vocab] is not finite."""
    return mark_reference(drawn, logits, mark)


def mark_reference(drawn: Tensor, logits: Tensor, mark: int) -> Tensor:
    """The definition of mark_non_finite()."""
    return torch.where(logits.gather(1, drawn).abs() < torch.inf, drawn, mark)
