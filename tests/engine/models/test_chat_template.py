"""Chat templates: the ids are those of transformers, and no template can hold a thread or leave its sandbox."""

import gc
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from engine.config import ConfigError
from engine.models.chat_template import TRANSCRIPT, ChatTemplate, RenderLimit, open_template
from engine.models.tokenizer import Tokenizer
from engine.types import InvalidRequest

BOS, EOS = "<s>", "</s>"
TOKENS = {"bos_token": BOS, "eos_token": EOS}

FORMS = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 2": "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content "
    "+ '\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
    "{% endif %}{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}"
    "{{ bos_token ~ '[INST] ' ~ (system if loop.first else '') ~ message.content | trim ~ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ message.content | trim ~ ' ' ~ eos_token }}{% endif %}{% endfor %}",
    "llama 3": "{{ bos_token }}{%- for message in messages %}\n{{- '<|start_header_id|>' + message.role "
    "+ '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}",
    "mistral": "{%- set ns = namespace(system='') -%}{{ bos_token }}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\n\n' -%}"
    "{%- elif message.role == 'user' -%}{{ '[INST] ' + (ns.system if loop.last else '') + message.content "
    "+ '[/INST]' }}{%- else -%}{{ ' ' + message.content + eos_token }}{%- endif -%}{%- endfor -%}",
    "gemma": "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + (message.content | trim) + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    "phi 3": "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "zephyr": "{% for message in messages %}\n{% if message.role in ['system', 'user', 'assistant'] %}\n"
    "{{ '<|' + message.role + '|>\n' + message.content + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "granite": "{%- if messages[0].role != 'system' %}{{- '<|start_of_role|>system<|end_of_role|>Be brief.' "
    "+ '<|end_of_text|>\n' }}{%- endif %}{%- for message in messages %}{%- generation %}"
    "{{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}"
    "{%- endgeneration %}{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}"
    "{%- if thinking is defined %}{{- ' ' + {'thinking': thinking} | tojson }}{%- endif %}"
    "{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}",
}

USER = {"role": "user", "content": "  def f(x):\n    return "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "many messages": [
        {"role": "system", "content": "Write é and 日本 — no <b>tags</b>."},
        USER,
        {"role": "assistant", "content": "x + 1 "},
        {"role": "user", "content": "and <s>now</s>?"},
        {"role": "assistant", "content": "y * 2 "},
    ],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded tokenizer with special tokens, BOS in front of every text."""
    path = tmp_path_factory.mktemp("tokenizer")
    shutil.copy("models/demo/target/tokenizer.json", path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        extra_special_tokens=["<|im_start|>", "<|im_end|>", "[INST]", "<|eot_id|>", "<|end|>"],
        **TOKENS,
    )
    tokenizer.save_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    return path


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", FORMS)
def test_the_ids_are_those_of_transformers(form: str, chat: str, directory: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **TOKENS)
    ours = Tokenizer(str(directory))
    template = open_template(None, {"default": FORMS[form]}, ours.special_tokens)
    ways: list[dict[str, Any]] = [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ]
    for asked in ways:
        expected = theirs.apply_chat_template(
            CHATS[chat], chat_template=FORMS[form], tokenize=True, return_dict=False, thinking=True, **asked
        )
        text = template.render(
            CHATS[chat], RenderLimit(), **{"add_generation_prompt": False, **asked}, variables={"thinking": True}
        )
        assert ours.encode(text, special=False) == expected
    assert not template.needs_special_tokens


def test_a_checkpoint_without_a_template_gets_a_transcript_with_its_own_bos(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    template = open_template(None, tokenizer.chat_templates, tokenizer.special_tokens)
    text = template.render(CHATS["many messages"][:2], RenderLimit())
    assert text == "System: Write é and 日本 — no <b>tags</b>.\n\nUser:   def f(x):\n    return \n\nAssistant:"
    assert template.needs_special_tokens
    assert tokenizer.encode(text, special=template.needs_special_tokens)[0] == tokenizer.vocab[BOS]


def test_the_operator_chooses_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("own", "utf-8")
    named = {"default": "d", "rag": "r"}
    chosen = [open_template(choice, named, {}).render([USER], RenderLimit()) for choice in (None, "rag", str(file))]
    assert chosen == ["d", "r", "own"]
    with pytest.raises(
        ConfigError, match=r"'nowhere' is neither a template of the checkpoint \('default', 'rag'\) nor"
    ):
        open_template("nowhere", named, {})
    file.write_text("{% if %}")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        open_template(str(file), named, {})


def test_a_checkpoints_broken_template_refuses_chats_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    template = open_template(None, {"default": "{% nonsense %}"}, {})
    with pytest.raises(InvalidRequest, match="cannot be compiled: Encountered unknown tag 'nonsense'"):
        template.render([USER], RenderLimit())
    assert "no chat requests can be served" in caplog.text


def test_further_templates_of_a_checkpoint_are_files_or_a_list(tmp_path: Path) -> None:
    shutil.copy("models/demo/target/tokenizer.json", tmp_path)
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert Tokenizer(str(tmp_path)).chat_templates == {"default": "d", "tool_use": "t", "rag": "r"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(str(tmp_path)).chat_templates["default"] == "file"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a\nb"),
        ("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "<a><b>"),
        ("{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}", "<a><b>"),
    ],
)
def test_text_parts_reach_a_template_that_walks_over_them(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render([{"role": "user", "content": PARTS}], RenderLimit()) == expected


def test_a_developer_is_the_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(messages, RenderLimit()) == "system"
    knows = "{{ messages[0].role }}{% if messages[0].role == 'developer' %}!{% endif %}"
    assert ChatTemplate(knows, {}).render(messages, RenderLimit()) == "developer!"


@pytest.mark.parametrize("content", ["", []])
def test_only_a_text_can_be_continued(content: Any) -> None:
    template = ChatTemplate(FORMS["chatml"], {})
    with pytest.raises(InvalidRequest, match="needs a last message with a text"):
        template.render([{"role": "user", "content": content}], RenderLimit(), continue_final_message=True)
    left_out = ChatTemplate("{{ messages[0].content[:3] }}", {})
    with pytest.raises(InvalidRequest, match="leaves out the end of the last message"):
        left_out.render([USER], RenderLimit(), continue_final_message=True)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_do_not_replace_what_the_request_says(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"must not set '{name}'") as refused:
        ChatTemplate(TRANSCRIPT, {}).render([USER], RenderLimit(), variables={name: []})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('no system role here') }}", "^the chat template: no system role here$"),
        ("{{ messages[7].content }}", "has no element 7|list object has no"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{{ 'a' * 10000000000 }}", "a product may have"),
        ("{{ [1] * 10000000000 }}", "a product may have"),
        ("{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
        ("{{ 10 ** (10 ** 10) }}", "a number may have"),
    ],
)
def test_a_template_that_fails_or_tries_to_escape_is_refused(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        ChatTemplate(source, {}).render([USER], RenderLimit())
    assert (refused.value.param, refused.value.code) == ("messages", "chat_template_error")


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("source", [LOOP, LOOP.replace("{% set x = i %}", "{{ range(99999) | map('upper') | list }}")])
def test_a_slow_template_ends_at_its_limit(source: str) -> None:
    before = sys.gettrace()
    with pytest.raises(InvalidRequest, match="did not finish in time"):
        ChatTemplate(source, {}).render([USER], RenderLimit(0.05))
    assert sys.gettrace() is before


def test_a_limit_that_is_reached_in_a_callback_of_the_garbage_collector_holds() -> None:
    """Python ignores what such a callback raises, and takes the trace function away."""
    limit, threshold, phases = RenderLimit(1000.0), gc.get_threshold(), list[str]()

    def collected(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)
        limit.cancel()  # so the collection's second call of this function finds the limit reached

    lists = "{% for i in range(999) %}{% set ns.x = [i, [ns.x]] %}{% endfor %}"
    template = ChatTemplate("{% set ns = namespace(x=0) %}" + lists, {})
    gc.callbacks.append(collected)
    gc.set_threshold(5)
    try:
        with pytest.raises(InvalidRequest, match="did not finish in time"):
            template.render([USER], limit)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(collected)
    assert phases[:2] == ["start", "stop"]


def test_another_thread_ends_a_template() -> None:
    limit, refused = RenderLimit(1000.0), []

    def render() -> None:
        try:
            ChatTemplate(LOOP, {}).render([USER], limit)
        except InvalidRequest as error:
            refused.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.01)
    limit.cancel()
    thread.join(30)
    assert refused
