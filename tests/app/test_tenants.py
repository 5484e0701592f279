"""Which requests share prefixes: the engine's salt depends on API key and cache_salt, and neither is revealed."""

import json
import logging
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.tenants import cache_salt
from engine.types import Output
from tests.app.harness import PROMPT, call
from tests.examples import examples

KEY = "sk-0123456789"


def reaches(authorization: str | None = None, asked: str | None = None, *, n: int = 1) -> list[str]:
    """The salt of each engine request."""
    client = FakeEngineClient()
    headers = {} if authorization is None else {"authorization": authorization}
    fields = {"n": n} if asked is None else {"n": n, "cache_salt": asked}
    assert call(create_app(client), PROMPT | fields, headers=headers).status == 200
    return [request.cache_salt for request in client.submitted]


def test_without_a_key_and_a_salt_all_share() -> None:
    for authorization in (None, "", " ", "Bearer", "Bearer ", "bearer  "):
        assert reaches(authorization) == [""]


def test_every_pair_of_key_and_salt_is_on_its_own() -> None:
    """Joined without separators, the last two pairs would be the same text, and so would a salt and a key."""
    pairs = [
        (None, None),
        ("Bearer ab", None),
        ("Bearer AB", None),
        ("Basic ab", None),
        ("ab cd", None),
        (None, "ab"),
        (None, "null"),
        ("Bearer null", None),
        ("Bearer ab", "c"),
        ("Bearer a", "bc"),
    ]
    salts = [reaches(*pair)[0] for pair in pairs]
    assert [(a, b) for (a, s), (b, t) in combinations(zip(pairs, salts, strict=True), 2) if s == t] == []


def test_one_key_and_salt_share_however_the_header_is_spelt() -> None:
    assert {s for a in ("Bearer k", "bearer k", "BEARER   k ") for s in reaches(a, "x")} == set(
        reaches("Bearer k", "x")
    )
    assert len(reaches("Bearer k", "x")[0]) == 64


def test_the_choices_of_a_request_share() -> None:
    salts = reaches("Bearer k", n=3)
    assert len(salts) == 3
    assert len(set(salts)) == 1


@given(*[st.tuples(st.text(st.characters(min_codepoint=33, max_codepoint=126)), st.none() | st.text(min_size=1))] * 2)
@examples(60)
def test_salts_are_equal_only_for_equal_key_and_salt(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    salts = [cache_salt(f"Bearer {key}", asked) for key, asked in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_repeats_the_key_or_keeps_it(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the request fails and is logged."""
    client = FakeEngineClient(lambda request: [Output(request.id, (1,), "a"), Output(request.id, (), "", "error")])
    with caplog.at_level(logging.DEBUG):
        done = call(
            create_app(client),
            PROMPT | {"stream": stream, "cache_salt": "of my own"},
            headers={"authorization": f"Bearer {KEY}"},
        )
    assert b'"engine_error"' in done.reply
    for words in (caplog.text, done.reply.decode(), repr(client.submitted)):
        assert KEY not in words
        assert "of my own" not in words


@pytest.mark.parametrize(("length", "status"), [(0, 400), (1, 200), (256, 200), (257, 400)])
def test_a_salt_has_1_to_256_characters(length: int, status: int) -> None:
    done = call(create_app(FakeEngineClient()), PROMPT | {"cache_salt": "é" * length})
    assert done.status == status
    if status == 400:
        assert json.loads(done.reply)["error"]["param"] == "cache_salt"
