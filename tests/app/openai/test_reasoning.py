"""Reasoning between tags is told apart from the answer, wherever the text is cut."""

import pytest

from app.openai.reasoning import ReasoningSplit

TAGS = ("<think>", "</think>")


def split(parts: list[str], *, inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplit(TAGS, inside=inside)
    fed = [splitter.feed(part, ended=i == len(parts) - 1) for i, part in enumerate(parts)]
    return "".join(reasoning for reasoning, _ in fed), "".join(answer for _, answer in fed)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>a<b</think>c", False, ("a<b", "c")),
        ("a<b</think>c", True, ("a<b", "c")),
        ("no tags <thin", False, ("", "no tags <thin")),
        ("<think>never ends </thin", False, ("never ends </thin", "")),
        ("x<think>a</think>y<think>b</think>z", False, ("ab", "xyz")),
        ("<<think>a<</think>", False, ("a<", "<")),
        ("</think>", False, ("", "</think>")),
    ],
)
def test_every_cut_gives_the_same(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split([text], inside=inside) == expected
    assert split(list(text), inside=inside) == expected
    for cut in range(len(text)):
        assert split([text[:cut], text[cut:]], inside=inside) == expected


def test_text_that_cannot_begin_a_tag_is_not_held_back() -> None:
    assert ReasoningSplit(TAGS, inside=False).feed("a<b", ended=False) == ("", "a<b")
    assert ReasoningSplit(TAGS, inside=False).feed("a<th", ended=False) == ("", "a")
