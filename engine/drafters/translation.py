"""Lets a draft model with another tokenizer draft. It drafts only tokens that both vocabularies have, and it reads the
text in its own tokens (token-level intersection, Timor et al. 2025, arXiv 2502.05202, Algorithm 4).

The draft's logits of the shared tokens become the logits of the target's tokens of the same bytes; every other token
gets −inf. What follows is the one transform (R4), so q is a law over the target's tokens like any other.

Each token of the target is read as a fixed run of draft tokens. So the text that the draft model reads only grows, and
texts with a common beginning are read with a common beginning. The draft's own tokenizer would split the text in
another way here and there; that costs acceptance and nothing else.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from engine.models.tokenizer import BYTE_TOKEN, Tokenizer


@dataclass(frozen=True, slots=True)
class Spellings:
    """How the tokens of a vocabulary are spelled."""

    data: Mapping[int, bytes]  # token → its bytes, without special tokens; equal bytes: the last counts
    special: Mapping[int, str]  # special token → its name
    start: tuple[int, ...] = ()  # special tokens with which a text begins

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> "Spellings":
        """The spellings of the ids below `size`, the rows of the model's embedding."""
        names = {i: name for name, i in tokenizer.vocab.items() if i < size}
        # sentencepiece may have a character both as a byte and as a token. It encodes texts with the token.
        ids = sorted(names, key=lambda i: (BYTE_TOKEN.fullmatch(names[i]) is None, i))
        data = {i: data for i in ids if (data := tokenizer.data(i))}
        special = {i: name for i, name in names.items() if i in tokenizer.special_ids}
        return cls(data, special, tuple(takewhile(special.__contains__, tokenizer.encode("a"))))


class Translation:
    """Maps the target's tokens to the draft's. `shared`: target token → the draft token of the same bytes."""

    def __init__(self, target: Spellings, draft: Spellings) -> None:
        """Raises ValueError if no token is shared."""
        theirs = {data: i for i, data in draft.data.items()}
        ours = {data: i for i, data in target.data.items()}
        self.shared: Mapping[int, int] = {i: theirs[data] for data, i in ours.items() if data in theirs}
        if not self.shared:
            raise ValueError("the vocabularies share no token")
        self.start = draft.start if not target.start else ()  # the draft reads these before every text
        self._target = target
        self._draft = draft
        self._names = {name: i for i, name in draft.special.items()}
        self._ids = theirs
        self._longest = max(map(len, theirs))  # bytes
        self._filler = theirs.get(b" ", min(self.shared.values()))  # in place of what the draft has no token for
        self._read_as: dict[int, tuple[int, ...]] = {token: (i,) for token, i in self.shared.items()}

    def read_as(self, token: int) -> tuple[int, ...]:
        """The draft tokens, one at least, as which the draft model reads a token of the target."""
        known = self._read_as.get(token)
        if known is None:
            known = self._read_as[token] = self._special(token) or self._spell(token) or (self._filler,)
        return known

    def num_fed(self, drafts: Seq[int]) -> int:
        """How many of the first drafts were fed as they are read: those before the first that is not shared."""
        return next((n for n, token in enumerate(drafts) if token not in self.shared), len(drafts))

    def _special(self, token: int) -> tuple[int, ...]:
        same = self._names.get(self._target.special.get(token, ""))
        if same is not None:
            return (same,)
        return self._draft.start if token in self._target.start else ()

    def _spell(self, token: int) -> tuple[int, ...]:
        """The longest draft tokens from left to right; bytes that the draft has no token for are left out."""
        data = self._target.data.get(token) or self._target.special.get(token, "").encode()
        ids: list[int] = []
        first = 0
        while first < len(data):
            ends = range(min(len(data), first + self._longest), first, -1)
            end = next((end for end in ends if data[first:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[data[first:end]])
            first = end or first + 1
        return tuple(ids)


class DraftText:
    """A sequence's committed tokens as the draft model reads them."""

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        self._ids = list(translation.start)
        self._count = 0  # tokens of the target that are in it

    def sync(self, tokens: Seq[int]) -> list[int]:
        """Append what is new in the target's `tokens`. Returns the draft tokens of all; read only."""
        for token in tokens[self._count :]:
            self._ids += self._translation.read_as(token)
        self._count = len(tokens)
        return self._ids
