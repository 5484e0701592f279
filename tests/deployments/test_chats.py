"""Rendering on threads: limits, cancels and crowds."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.client import Chat
from app.main import create_app
from deployments import chats
from deployments.bridge import LocalClient
from deployments.chats import ChatRenderer
from deployments.settings import ChatConfig
from engine.config import ConfigError, EngineConfig
from engine.engine import Engine
from engine.models.chat_template import ChatTemplate, RenderLimit
from engine.types import EngineStopped, InvalidRequest, Overloaded

# Endless for the message "loop".
SLOW = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def asking(text: str) -> Chat:
    return Chat(({"role": "user", "content": text},))


def within(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def renderer() -> Iterator[ChatRenderer]:
    renderer = ChatRenderer(lambda: ChatTemplate(SLOW, {}), max_open=4)
    yield renderer
    renderer.close()


def test_slow_templates_cost_their_senders_a_refusal_and_no_thread(
    renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chats, "RenderLimit", lambda: RenderLimit(0.05))

    async def scenario() -> list[Any]:
        slow = [renderer.render(asking("loop")) for _ in range(chats.THREADS + 1)]
        return await asyncio.gather(*slow, renderer.render(asking("a")), return_exceptions=True)

    *refused, answered = within(scenario())
    assert [type(error) for error in refused] == [InvalidRequest] * (chats.THREADS + 1)
    assert answered.text == "a"


def test_callers_that_leave_free_their_threads(renderer: ChatRenderer) -> None:
    async def scenario() -> str:
        tasks = [asyncio.create_task(renderer.render(asking("loop"))) for _ in range(chats.THREADS + 1)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return (await asyncio.wait_for(renderer.render(asking("a")), 4)).text  # sooner than the limit

    assert within(scenario()) == "a"


def test_a_chat_after_the_end_is_told_of_it(renderer: ChatRenderer) -> None:
    renderer.close()
    with pytest.raises(EngineStopped, match="shutting down"):  # 503, as for completions
        within(renderer.render(asking("a")))


def test_a_crowd_is_turned_away(renderer: ChatRenderer) -> None:
    async def scenario() -> None:
        tasks = [asyncio.create_task(renderer.render(asking("loop"))) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="4 chats wait"):
            await renderer.render(asking("a"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await renderer.render(asking("a"))).text == "a"

    within(scenario())


def test_chats_wait_for_a_template_that_is_opened_once() -> None:
    may_open, opened = threading.Event(), list[str]()

    def open_template() -> ChatTemplate:
        assert may_open.wait(60)
        opened.append(threading.current_thread().name)
        return ChatTemplate(SLOW, {})

    renderer = ChatRenderer(open_template, max_open=4)

    async def scenario() -> list[str]:
        tasks = [asyncio.create_task(renderer.render(asking(text))) for text in "abc"]  # more than there are threads
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        assert renderer.prepare() is renderer.prepare()
        may_open.set()
        return [rendered.text for rendered in await asyncio.gather(*tasks)]

    try:
        assert within(scenario()) == ["a", "b", "c"]
        assert [name.rpartition("_")[0] for name in opened] == ["chat-template"]
    finally:
        may_open.set()
        renderer.close()


def test_a_template_that_could_not_be_opened_is_opened_again() -> None:
    """A want of memory or of file handles passes. A chat that met it fails alone."""
    opened = list[ChatTemplate | Exception]()

    def open_template() -> ChatTemplate:
        opened.append(OSError("too many open files") if not opened else ChatTemplate(SLOW, {}))
        if isinstance(opened[-1], Exception):
            raise opened[-1]
        return opened[-1]

    renderer = ChatRenderer(open_template, max_open=4)
    try:
        with pytest.raises(OSError, match="too many open files"):
            within(renderer.render(asking("a")))
        assert [within(renderer.render(asking(text))).text for text in "ab"] == ["a", "b"]
        assert len(opened) == 2
    finally:
        renderer.close()


@pytest.fixture(scope="module")
def client() -> Iterator[LocalClient]:
    config = EngineConfig("models/demo/target", "models/demo/draft", max_running=2, max_model_len=256, threads=1)
    client = LocalClient(Engine.from_config(config), "demo")
    yield client
    client.close()


def test_the_embedded_pair_answers_a_chat_as_the_same_prompt(client: LocalClient) -> None:
    async def post(path: str, **fields: Any) -> Any:
        transport = httpx.ASGITransport(app=create_app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reply = await http.post(path, json={"model": "demo", "max_tokens": 24, "temperature": 0} | fields)
            assert reply.status_code == 200, reply.content
            return json.loads(reply.content)

    async def scenario() -> None:
        messages = [
            {"role": "system", "content": "Python."},
            {"role": "user", "content": "Import os.\nThen read a file."},
        ]
        answer = await post("/v1/chat/completions", messages=messages)
        prompt = "# Python.\n# Import os.\n# Then read a file.\n"
        text = (await post("/v1/completions", prompt=prompt))["choices"][0]["text"]
        assert answer["choices"][0]["message"]["content"] == text != ""
        assert answer["usage"]["prompt_tokens"] == len(await client.tokenize(prompt, add_special_tokens=False))
        unlimited = await post("/v1/chat/completions", messages=messages, max_tokens=None, ignore_eos=True)
        assert unlimited["usage"]["total_tokens"] == 256

    within(scenario())


def test_the_operators_settings_are_used(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    engine = Engine.from_config(EngineConfig("models/demo/target", None, max_running=1, max_model_len=64, threads=1))
    client = LocalClient(engine, "demo", ChatConfig(str(tmp_path / "own.jinja"), ("<a>", "</a>")))
    try:
        rendered = within(client.render_chat(asking("x")))
        assert (rendered.text, rendered.add_special_tokens) == ("own x", False)
        assert client.model.reasoning_tags == ("<a>", "</a>")
    finally:
        client.close()
    (tmp_path / "own.jinja").write_text("{% nonsense %}")
    with pytest.raises(ConfigError, match="the chat template cannot be compiled"):
        LocalClient(engine, "demo", ChatConfig(str(tmp_path / "own.jinja")))
