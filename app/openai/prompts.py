"""Turns a request's texts into token ids."""

from collections.abc import Sequence

from app.client import EngineClient, TextField
from app.openai.fields import ParsedPrompt
from app.openai.pauses import Pauses
from engine.types import check_bad_word

PIECE = 4_000  # characters of bad words that are read without a pause

IdTuple = tuple[int, ...]


async def prompt_ids(
    client: EngineClient, prompt: ParsedPrompt, field: TextField, *, special: bool, most: int | None = None
) -> IdTuple:
    """Return a prompt's ids. special: whether to add the special tokens that the checkpoint puts around a text.

    most: how many tokens to keep from its end, with the special tokens before and behind them (as in vLLM); None: all.
    """
    if not isinstance(prompt, str):
        return prompt if most is None else prompt[-most:]
    ids = await client.tokenize(prompt, field, add_special_tokens=special, any_length=most is not None)
    if most is None or len(ids) <= most:
        return tuple(ids)
    inner = await client.tokenize(prompt, field, add_special_tokens=False, any_length=True)
    around = len(ids) - len(inner)  # special tokens
    before = next((n for n in range(around + 1) if ids[n : n + len(inner)] == inner), None)
    if before is None or around >= most:
        return tuple(ids[-most:])
    return (*ids[:before], *inner[around - most :], *ids[before + len(inner) :])


async def bad_word_ids(client: EngineClient, words: Sequence[str]) -> tuple[IdTuple, ...]:
    """Return the runs of tokens that spell these words, without and with a space in front (as in vLLM).

    The spelling with a space counts only where the space makes no token of its own. Long words are read with pauses.
    Raises InvalidRequest for a word of too many tokens.
    """
    runs: dict[IdTuple, None] = {}
    pauses, characters = Pauses(), 0  # read since the last pause
    for word in words:
        if (characters := characters + len(word)) > PIECE:
            await pauses.rest()
            characters = len(word)
        bare = tuple(await client.tokenize(word.lstrip(), "bad_words", add_special_tokens=False))
        check_bad_word(bare)
        spaced = tuple(await client.tokenize(" " + word.lstrip(), "bad_words", add_special_tokens=False))
        runs[bare] = None
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            runs[spaced] = None
    return tuple(runs)
