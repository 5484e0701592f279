"""/tokenize, /detokenize, /tokenizer_info and /version, with the names that vLLM and its clients use."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.fake_engine import FakeEngineClient
from app.main import create_app
from app.telemetry.names import VERSION
from tests.app.harness import call

ROOT = Path(__file__).resolve().parents[3]


def post(path: str, fields: Any, client: FakeEngineClient | None = None) -> tuple[int, Any]:
    done = call(create_app(client or FakeEngineClient()), fields, path=path)
    return done.status, json.loads(done.reply)


def get(path: str) -> Any:
    done = call(create_app(FakeEngineClient()), method="GET", path=path)
    assert done.status == 200
    return json.loads(done.reply)


def test_a_texts_ids_and_back() -> None:
    client = FakeEngineClient()
    client.bos = (7,)
    status, body = post("/tokenize", {"prompt": "añ"}, client)
    assert (status, body) == (
        200,
        {"count": 4, "max_model_len": 256, "tokens": [7, *"añ".encode()], "token_strs": None},
    )
    _, body = post("/tokenize", {"model": "fake", "prompt": "añ", "add_special_tokens": False}, client)
    assert body["tokens"] == [*"añ".encode()]
    assert post("/detokenize", {"tokens": body["tokens"]}, client) == (200, {"prompt": "añ"})


def test_a_text_beyond_the_context_is_counted() -> None:
    status, body = post("/tokenize", {"prompt": "a" * 1000})
    assert (status, body["count"], body["max_model_len"]) == (200, 1000, 256)
    assert post("/detokenize", {"tokens": [97] * 5000})[1]["prompt"] == "a" * 5000


def test_a_chats_ids_are_those_of_its_prompt() -> None:
    client = FakeEngineClient()
    chat = {"messages": [{"role": "user", "content": "ab"}], "chat_template_kwargs": {"x": 1}}
    assert post("/tokenize", chat | {"add_generation_prompt": False}, client)[1]["tokens"] == [97, 98]
    (told,) = client.chats
    assert (told.add_generation_prompt, told.variables) == (False, {"x": 1})


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", [], 400, None),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tokens": [1]}, 400, "tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 200}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, 400, "prompt"),
        ("/detokenize", {"tokens": [256]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 101}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model"),
    ],
    ids=str,
)
def test_refusals(path: str, fields: Any, status: int, param: str | None) -> None:
    found, body = post(path, fields, FakeEngineClient(max_prompt_tokens=100))
    assert (found, body["error"]["param"]) == (status, param)


def test_what_a_remote_tokenizer_reads() -> None:
    """lm-eval takes the special tokens and the chat template by these names."""
    info = get("/tokenizer_info")
    assert (info["tokenizer_class"], info["model_max_length"], info["vocab_size"]) == (
        "PreTrainedTokenizerFast",
        256,
        256,
    )
    assert info["eos_token"] == "\x00"
    assert "messages" in info["chat_template"]


def test_the_version_is_the_projects() -> None:
    assert get("/version") == {"version": VERSION}
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text("utf-8")
