"""Which tokens two vocabularies share, as what a draft model reads the others, and the law of its drafts."""

import random
from itertools import chain
from pathlib import Path

import pytest
import torch

from engine.drafters.base import DraftBatch
from engine.drafters.shared_tokens import SharedTokens
from engine.drafters.translation import DraftText, Spellings, Translation
from engine.models.tokenizer import Tokenizer
from engine.sampling.sampler import Sampler
from engine.types import SamplingParams, Verifier
from tests.engine.driving import make_sequence, model_drafter
from tests.engine.law.tables import DRAFT, VOCAB, row_of, table_engine
from tests.engine.law.translations import OTHER_WORDS, TABLE_TRANSLATION, TABLE_WORDS
from tests.engine.models.tokenizer_families import PREPEND, SP, byte_level, sentencepiece, split

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A byte-level one without BOS and one in the way of sentencepiece, whose texts begin with <s>."""
    backends = {
        "byte-level": byte_level(("<|end|>", "<s>"), split(r"\s?\S+|\s+")),
        "sentencepiece": sentencepiece(SP, normalizer=PREPEND, pre_tokenizer=None, strip=True),
    }
    loaded = {}
    for name, backend in backends.items():
        directory = tmp_path_factory.mktemp(name)
        backend.save(str(directory / "tokenizer.json"))
        if name == "sentencepiece":
            (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": true}')
        loaded[name] = Tokenizer(str(directory))
    return loaded


def words(tokenizer: Tokenizer, size: int = 10_000) -> Spellings:
    return Spellings.of(tokenizer, size)


DIRECTIONS = pytest.mark.parametrize(
    ("target", "draft"), [("byte-level", "sentencepiece"), ("sentencepiece", "byte-level")]
)


@DIRECTIONS
def test_tokens_of_equal_bytes_are_shared(target: str, draft: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Whatever the vocabulary calls them: "Ġ12" and "▁12"."""
    ours, theirs = tokenizers[target], tokenizers[draft]
    shared = Translation(words(ours), words(theirs)).shared
    assert {ours.data(i): theirs.data(j) for i, j in shared.items()} == {d: d for d in map(ours.data, shared)}
    strings = {ours.data(i) for i in ours.vocab.values()} & {theirs.data(i) for i in theirs.vocab.values()} - {b""}
    assert {ours.data(i) for i in shared} == strings
    assert b" 12" in strings
    assert len(set(shared.values())) == len(shared)


@DIRECTIONS
def test_other_tokens_are_spelled(target: str, draft: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Any token says the same in the draft's tokens, parts of characters too."""
    ours, theirs = tokenizers[target], tokenizers[draft]
    translation = Translation(words(ours), words(theirs))
    spelled = [i for i in words(ours).data if i not in translation.shared]
    assert len(spelled) > 20
    for i in spelled:
        assert b"".join(map(theirs.data, translation.read_as(i))) == ours.data(i)


def test_a_token_is_read_in_the_fewest_longest_pieces() -> None:
    pieces = Spellings({3: b"a", 4: b"b", 5: b"abc", 6: b"d"}, {})
    translation = Translation(Spellings({0: b"abcd", 1: b"a"}, {}), pieces)
    assert translation.read_as(0) == (5, 6)
    assert translation.read_as(1) == (3,)


@DIRECTIONS
def test_special_tokens_are_read_and_never_shared(target: str, draft: str, tokenizers: dict[str, Tokenizer]) -> None:
    ours, theirs = tokenizers[target], tokenizers[draft]
    translation = Translation(words(ours), words(theirs))
    assert not ours.special_ids & translation.shared.keys()
    assert not theirs.special_ids & set(translation.shared.values())
    for i in ours.special_ids:
        name = ours.name(i)
        assert name is not None
        if name in theirs.vocab:
            assert translation.read_as(i) == (theirs.vocab[name],)
        else:
            assert b"".join(map(theirs.data, translation.read_as(i))) == name.encode()


def test_the_beginning_of_a_text(tokenizers: dict[str, Tokenizer]) -> None:
    """A draft whose texts begin with a special token reads one, also if the target reads none."""
    with_start = words(tokenizers["sentencepiece"])
    (bos,) = with_start.start
    without = words(tokenizers["byte-level"])
    assert without.start == ()
    shared = next(iter(Translation(without, with_start).shared))
    ids = DraftText(Translation(without, with_start)).sync([shared])
    assert (ids[0], len(ids)) == (bos, 2)
    other = Spellings(without.data, {900: "<|begin|>"}, (900,))
    assert DraftText(Translation(other, with_start)).sync([900]) == [bos]
    assert DraftText(Translation(with_start, without)).sync([bos]) == [tokenizers["byte-level"].vocab["<s>"]]


def test_what_cannot_be_said_is_read_as_one_token() -> None:
    """A row of the embedding without a token, and bytes that the draft has no token for."""
    translation = Translation(Spellings({0: b"a", 1: "λ".encode()}, {}), Spellings({7: b"a", 5: b" "}, {}))
    assert translation.read_as(1) == translation.read_as(99) == (5,)
    with pytest.raises(ValueError, match="share no token"):
        Translation(Spellings({0: b"a"}, {}), Spellings({0: b"b"}, {}))


def test_rows_that_an_embedding_does_not_have_are_not_used(tokenizers: dict[str, Tokenizer]) -> None:
    ours, theirs = tokenizers["byte-level"], tokenizers["sentencepiece"]
    translation = Translation(words(ours, 300), words(theirs, 280))
    assert max(translation.shared) < 300
    assert max(chain.from_iterable(map(translation.read_as, range(500)))) < 280


def test_a_character_and_its_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is shared, not the byte, wherever the bytes stand in the vocabulary."""
    backend = sentencepiece(SP, normalizer=PREPEND, pre_tokenizer=None, strip=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(str(tmp_path))
    a, byte = tokenizer.vocab["a"], tokenizer.vocab["<0x61>"]
    assert byte < a
    for swapped in (False, True):
        if swapped:  # as gemma's
            tokenizer.vocab |= {"a": byte, "<0x61>": a}
            names = {i: name for name, i in tokenizer.vocab.items()}
            monkeypatch.setattr(tokenizer, "name", names.get)
        shared = Translation(words(tokenizer), Spellings({3: b"a"}, {})).shared
        assert shared == {tokenizer.vocab["a"]: 3}


def test_a_text_is_read_alike_in_whatever_pieces_it_comes(tokenizers: dict[str, Tokenizer]) -> None:
    ours = tokenizers["byte-level"]
    translation = Translation(words(ours), words(tokenizers["sentencepiece"]))
    rng = random.Random(0)
    tokens = [rng.randrange(len(ours.vocab) + 5) for _ in range(200)]
    text = DraftText(translation)
    whole = list(DraftText(translation).sync(tokens))
    lengths = [len(translation.read_as(token)) for token in tokens]
    assert len(whole) == 1 + sum(lengths) > 220
    for end in (0, 1, 2, 50, 50, 199, 200):
        read = text.sync(tokens[:end])
        assert read == whole[: 1 + sum(lengths[:end])]


def test_drafts_after_the_first_that_is_not_shared_do_not_count_as_read() -> None:
    assert [TABLE_TRANSLATION.num_fed(drafts) for drafts in ([], [0, 1, 0], [0, 2, 1], [2])] == [0, 3, 1, 0]


# What a draft model proposes


def test_logits_of_the_shared_tokens() -> None:
    tables = SharedTokens(TABLE_TRANSLATION, VOCAB, CPU)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, float("nan")]])
    inf = torch.inf
    assert tables.restrict(logits).tolist() == [[3.0, 1.0, -inf, -inf], [7.0, 5.0, -inf, -inf]]
    assert tables.to_draft(torch.tensor([1, 0])).tolist() == [0, 2]


@pytest.mark.parametrize("verifier", ["match", "rejection", "block"])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_q_is_the_law_of_the_shared_tokens(verifier: Verifier, top_p: float) -> None:
    """What each draft was drawn from, computed from the table by hand: restricted, renormalised, then cut."""
    drafter = model_drafter(table_engine(translation=TABLE_TRANSLATION))
    params = SamplingParams(temperature=0.7, top_p=top_p)
    sequences = [make_sequence(n, [n % 3, n // 3 % 3, n // 9], params, key=n * 7919) for n in range(27)]
    for sequence in sequences:
        sequence.verifier = verifier
    sampler = Sampler(sequences, [3] * 27, VOCAB, CPU)
    with torch.inference_mode():
        draft = drafter.propose(DraftBatch(tuple(sequences), sampler), [3] * 27)
    assert draft.tokens is not None
    assert set(draft.tokens.flatten().tolist()) == {0, 1}
    assert draft.read == sum(len(drafter.runner.tokens(s)) + 2 for s in sequences)
    if verifier == "match":
        assert draft.logq is None
        return
    assert draft.logq is not None
    for i, sequence in enumerate(sequences):
        tokens = draft.tokens[i].tolist()
        for j in range(3):
            read = chain.from_iterable(TABLE_TRANSLATION.read_as(t) for t in (*sequence.tokens, *tokens[:j]))
            row = DRAFT[row_of(tuple(read))]
            both = torch.stack([row[TABLE_TRANSLATION.shared[t]] for t in (0, 1)]) / 0.7
            law = both.softmax(0)
            law = torch.where(law.max() >= top_p, (law == law.max()).double(), law)  # one token alone is enough
            logq = draft.logq[draft.logq_rows[i], j].exp()
            assert torch.allclose(logq, torch.tensor([*law, 0, 0], dtype=torch.float64), atol=1e-12)


def test_the_tables_have_what_these_tests_need() -> None:
    """Other ids, a token without a counterpart on either side, and one that is read as two."""
    assert TABLE_TRANSLATION.shared == {0: 2, 1: 0}
    assert [TABLE_TRANSLATION.read_as(t) for t in range(4)] == [(2,), (0,), (2, 0), (3,)]
    assert set(OTHER_WORDS.data.values()) - set(TABLE_WORDS.data.values())
