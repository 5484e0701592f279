"""The exact law of a text's first tokens, from the sampling parameters, by none of the engine's code.

Plain Python floats. In transformers' order: logit bias; repetition penalty over prompt and output, as its processor;
frequency and presence penalty over the output, as OpenAI defines them; no end token before min_tokens; temperature;
then its top-k, top-p and min-p warpers.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from math import exp, inf

from torch import Tensor

from engine.types import SamplingParams
from tests.engine.law.tables import END, TARGET, letters, row_of

Text = tuple[int, ...]


def exact_law(prompt: Text, params: SamplingParams, length: int, table: Tensor = TARGET) -> dict[Text, float]:
    """Probability of every text of `length` tokens, or of fewer where an end token or a stop string ends it."""
    rows: list[list[float]] = table.tolist()
    law: dict[Text, float] = {}
    open_texts: dict[Text, float] = {(): 1.0}
    while open_texts:
        output, mass = open_texts.popitem()
        if len(output) == length or _ended(output, params):
            law[output] = mass
            continue
        following = next_law(rows[row_of(prompt + output)], prompt, output, params)
        open_texts |= {(*output, token): mass * p for token, p in enumerate(following) if p}
    return law


def next_law(logits: Seq[float], prompt: Text, output: Text, params: SamplingParams) -> list[float]:
    """The law of the next token, given its logits; exactly 0 for what cannot come."""
    scores = list(logits)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in set(prompt + output):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, count in Counter(output).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in _end_ids(params):
            scores[token] = -inf
    law = _softmax([s / params.temperature for s in scores])
    law = _keep(law, _top_k(law, params.top_k)) if params.top_k else law
    law = _keep(law, _nucleus(law, params.top_p)) if params.top_p < 1 else law
    return _keep(law, {t for t, p in enumerate(law) if p >= params.min_p * max(law)})


def _top_k(law: Seq[float], k: int) -> set[int]:
    return set(sorted(range(len(law)), key=lambda t: -law[t])[:k])


def _nucleus(law: Seq[float], top_p: float) -> set[int]:
    """All but the largest set of least likely tokens whose mass is at most 1 − top_p; the likeliest stays."""
    mass = 0.0
    ascending = sorted(range(len(law)), key=lambda t: law[t])
    for place, token in enumerate(ascending[:-1]):
        mass += law[token]
        if mass > 1 - top_p:
            return set(ascending[place:])
    return {ascending[-1]}


def _keep(law: Seq[float], kept: set[int]) -> list[float]:
    total = sum(law[t] for t in kept)
    return [p / total if t in kept else 0.0 for t, p in enumerate(law)]


def _softmax(scores: Seq[float]) -> list[float]:
    highest = max(scores)
    weights = [exp(s - highest) for s in scores]
    return [w / sum(weights) for w in weights]


def _end_ids(params: SamplingParams) -> set[int]:
    return set(params.stop_token_ids) | (set() if params.ignore_eos else {END})


def _ended(output: Text, params: SamplingParams) -> bool:
    """Whether the text ends with its last token. Nothing ends it before min_tokens; a stop string that is complete by
    then does not count later either."""
    if not output or len(output) < params.min_tokens:
        return False
    return output[-1] in _end_ids(params) or any(letters(output).endswith(stop) for stop in params.stop)
