"""p and q at every position of a given text: both models read it, and nothing is drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.lab.analysis import coupling_acceptance, rejection_acceptance
from cache.layout import Layout
from engine.detokenize import Detokenizer, TextStream
from engine.models.feeds import Feed
from engine.models.loader import load_decoder, open_checkpoint
from engine.models.products import AS_IS, Weights
from engine.models.runner import Runner
from engine.sequence import Sequence as EngineSequence
from engine.types import RequestRecord, SamplingParams

Column = NDArray[np.float64]


@dataclass(frozen=True)
class ForcedAcceptance:
    """The chance of acceptance at each output position of one text: arrays [output tokens]."""

    rejection: Column
    match: Column
    greedy: Column  # p of the draft's likeliest token


ForcedReader = Callable[[float, Sequence[int], Sequence[int]], ForcedAcceptance]  # temperature, prompt, output


class TextReader:
    """One model, which reads whole texts, one at a time."""

    def __init__(self, directory: str, dtype: str, device: str, max_len: int, weights: Weights = AS_IS) -> None:
        on = torch.device(device)
        checkpoint = open_checkpoint(directory)
        decoder = load_decoder(checkpoint, dtype=getattr(torch, dtype), device=on, max_len=max_len, weights=weights)
        self._runner = Runner(decoder, Layout(1, max_len), on)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """[output tokens, vocab] fp64 on the host: row t holds the logits for output[t]."""
        sequence = _sequence([*prompt, *output[:-1]])
        logits = self._runner.run([Feed(sequence, len(sequence.tokens), outputs=len(output))])
        self._runner.cache.release(sequence.handle)
        return logits.double().cpu()


def _sequence(tokens: list[int]) -> EngineSequence:
    """A sequence outside any engine, to feed a Runner with."""
    params = SamplingParams(max_tokens=0)
    return EngineSequence(
        handle=0,
        request_id="text",
        tokens=tokens,
        num_prompt=len(tokens),
        params=params,
        k=0,
        key=0,
        max_len=len(tokens),
        text=TextStream(Detokenizer(lambda ids: ""), params.stop),
        record=RequestRecord("text", 0, len(tokens), 0, arrived=0.0),
    )


def law(logits: Tensor, temperature: float, vocab: int) -> Column:
    """[n, vocab] probabilities; at temperature 0 one-hot at the argmax, lowest id first. Missing ids get 0."""
    table = torch.full((logits.shape[0], vocab), -torch.inf, dtype=torch.float64)
    width = min(vocab, logits.shape[1])
    table[:, :width] = logits[:, :width]
    if temperature:
        return (table / temperature).softmax(-1).numpy()
    one_hot = np.zeros(table.shape)
    np.put_along_axis(one_hot, table.numpy().argmax(-1)[:, None], 1.0, axis=-1)
    return one_hot


def forced(target: Tensor, draft: Tensor, temperature: float) -> ForcedAcceptance:
    """Compute them from both models' logits [n, vocab] of one text. The draft's vocabulary may be smaller or larger."""
    vocab = target.shape[1]
    p, q = law(target, temperature, vocab), law(draft, temperature, vocab)
    greedy = np.take_along_axis(p, q.argmax(-1)[:, None], axis=-1)[:, 0]
    return ForcedAcceptance(rejection_acceptance(p, q), coupling_acceptance(p, q), greedy)


def make_forced_reader(target: TextReader, draft: TextReader) -> ForcedReader:
    """A function that reads texts. It keeps its results, since `match` writes the same text again."""
    known: dict[tuple[float, tuple[int, ...], tuple[int, ...]], ForcedAcceptance] = {}

    def force(temperature: float, prompt: Sequence[int], output: Sequence[int]) -> ForcedAcceptance:
        key = temperature, tuple(prompt), tuple(output)
        if key not in known:
            known[key] = forced(target.logits(prompt, output), draft.logits(prompt, output), temperature)
        return known[key]

    return force
