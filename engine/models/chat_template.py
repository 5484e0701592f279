"""Chat templates: Jinja programs of a checkpoint that turn messages into the text of a prompt.

A template runs in transformers' sandbox, with the names and filters that it gives to templates. A template is a program
of strangers, so its time is limited too. The thread that renders ends it at the limit and is free again.
"""

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment, nodes
from jinja2.exceptions import SecurityError, TemplateError

from engine.config import ConfigError
from engine.types import InvalidRequest

log = logging.getLogger(__name__)

TemplateMessage = Mapping[str, Any]  # role, content and what else the template may read

# For checkpoints without a template: a transcript. The checkpoint's tokenizer puts BOS in front of it.
TRANSCRIPT = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

RENDER_LIMIT_S = 5.0  # a template that takes longer is in a loop: a long chat takes milliseconds
MAX_LENGTH = 2**24  # characters or entries of a product
MAX_BITS = 1024  # of a number
MARK = "\ue000END OF THE FINAL MESSAGE\ue000 "  # where continue_final_message cuts the text; templates trim the space

# Names that a template reads and that chat_template_kwargs must not replace.
RESERVED = ("messages", "tools", "add_generation_prompt")


class RenderLimit:
    """The time that one rendering may take, from its start. Any thread may cancel it."""

    def __init__(self, seconds: float = RENDER_LIMIT_S) -> None:
        self._seconds = seconds
        self._ends = float("inf")
        self._cancelled = False

    def start(self) -> None:
        self._ends = time.monotonic() + self._seconds

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def reached(self) -> bool:
        return self._cancelled or time.monotonic() >= self._ends


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, whole: bool = True) -> None:
        """special_tokens: by their roles, such as bos_token. whole: whether the template writes the special tokens that
        a prompt begins with. Raises ConfigError for a template that cannot be compiled."""
        self.needs_special_tokens = not whole
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self._walks_over_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self._names_developer = "developer" in source

    def render(
        self,
        messages: Sequence[TemplateMessage],
        limit: RenderLimit,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """The prompt's text. variables: further names for the template, over those of the special tokens.

        continue_final_message: the text ends within the last message, so that the model continues it.
        Raises InvalidRequest for messages that the template refuses, and if the limit is reached.
        """
        if reserved := next((name for name in RESERVED if name in variables), None):
            message = f"chat_template_kwargs must not set {reserved!r}: the request has a field for it"
            raise InvalidRequest(message, "chat_template_kwargs")
        shown = [self._shown(message) for message in messages]
        if continue_final_message:
            shown[-1] = _marked(shown[-1])
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        text = self._run({**given, "messages": shown, "add_generation_prompt": add_generation_prompt}, limit)
        return _until_mark(text) if continue_final_message else text

    def _shown(self, message: TemplateMessage) -> dict[str, Any]:
        """The message as the template reads it: "developer" is OpenAI's newer name of "system", and most templates
        take only texts as content."""
        shown = dict(message)
        if shown.get("reasoning_content") is not None:
            shown = {"thinking": shown["reasoning_content"], **shown}  # as some templates call it
        if shown["role"] == "developer" and not self._names_developer:
            shown["role"] = "system"
        if isinstance(shown["content"], list) and not self._walks_over_parts:
            shown["content"] = "\n".join(part["text"] for part in shown["content"])
        return shown

    def _run(self, variables: dict[str, Any], limit: RenderLimit) -> str:
        limit.start()
        try:
            return self._watched(variables, limit)
        except _LimitReachedError:
            message = "the chat template did not finish in time: it may be in a loop, or the messages are too many"
            raise InvalidRequest(message, "messages", "chat_template_error") from None
        except Exception as error:  # a template is a program: it can fail in every way
            raise InvalidRequest(f"the chat template: {_reason(error)}", "messages", "chat_template_error") from None

    def _watched(self, variables: dict[str, Any], limit: RenderLimit) -> str:
        before = sys.gettrace()
        sys.settrace(_watch(limit))
        try:
            return self._template.render(variables)
        finally:
            sys.settrace(before)


class _LimitReachedError(BaseException):
    """It is no Exception, so that nothing within a template can catch it."""


def _watch(limit: RenderLimit) -> Any:
    """A trace function (sys.settrace) that ends a template at the limit: at a line of its own, or at a call of jinja's.

    Any other call may be one of the garbage collector's callbacks or a finaliser. Python ignores what is raised there,
    and takes the trace function away, so the template would go on without a limit.
    """

    def watch(frame: FrameType, event: str, value: Any) -> Any:
        own = frame.f_code.co_filename == "<template>"
        if limit.reached and (own or frame.f_globals.get("__name__", "").partition(".")[0] == "jinja2"):
            raise _LimitReachedError
        return watch if own else None

    return watch


def _reason(error: Exception) -> str:
    """The template's own message, or what went wrong in it."""
    if isinstance(error, TemplateError):
        return str(error.message)
    return f"{type(error).__name__}: {error}"


def _environment() -> Environment:
    """transformers' sandbox with limits on products and powers.

    A trace function cannot interrupt an operator, and Jinja computes constants while it compiles.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template  # takes a second to import

    environment: Any = _compile_jinja_template("").environment.overlay()
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table = {**environment.binop_table, "*": _times, "**": _power}
    return environment


def _times(left: Any, right: Any) -> Any:
    for value, factor in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(factor, int) and len(value) * factor > MAX_LENGTH:
            raise SecurityError(f"a product may have {MAX_LENGTH:,} characters or entries")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError(f"a number may have {MAX_BITS:,} bits")
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise SecurityError(f"a number may have {MAX_BITS:,} bits")
    return left**right


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is a message's content: message.content, message['content'] or a variable content."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a mark at the end of its content. Raises InvalidRequest for one without text."""
    content = message["content"]
    if isinstance(content, list) and content:
        last = {**content[-1], "text": content[-1]["text"] + MARK}
        return {**message, "content": [*content[:-1], last]}
    if isinstance(content, str) and content:
        return {**message, "content": content + MARK}
    raise InvalidRequest("continue_final_message needs a last message with a text", "continue_final_message")


def _until_mark(text: str) -> str:
    """The text before the mark. A template that trims contents has also trimmed the space that ends the mark."""
    head, mark, tail = text.rpartition(MARK.strip())
    if not mark:
        message = "continue_final_message: the chat template leaves out the end of the last message"
        raise InvalidRequest(message, "continue_final_message", "chat_template_error")
    return head if tail.startswith(" ") else head.rstrip()


def template_source(choice: str | None, named: Mapping[str, str]) -> str:
    """Return the Jinja source of a server's template. Raises ConfigError for a bad choice.

    choice: the operator's: a name of the checkpoint's templates or a file; None: the checkpoint's default, or
    TRANSCRIPT if it has none. named: the checkpoint's templates.
    """
    return named.get("default", TRANSCRIPT) if choice is None else _chosen(choice, named)


def open_template(choice: str | None, named: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate:
    """Compile the template of `template_source`. The first call in a process imports transformers: a second.

    The server also serves with a default that cannot be compiled, because completions need none; chats are then
    refused. Raises ConfigError for a bad choice.
    """
    source = template_source(choice, named)
    whole = choice is not None or "default" in named
    try:
        return ChatTemplate(source, special_tokens, whole=whole)
    except ConfigError as error:
        if choice is not None:
            raise
        log.warning("no chat requests can be served: %s", error)
        return ChatTemplate("{{ raise_exception(reason) }}", {"reason": str(error)})


def _chosen(choice: str, named: Mapping[str, str]) -> str:
    if choice in named:
        return named[choice]
    try:
        return Path(choice).read_text("utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(map(repr, sorted(named))) or "none"
        message = f"chat_template {choice!r} is neither a template of the checkpoint ({names}) nor a file: {error}"
        raise ConfigError(message) from error
