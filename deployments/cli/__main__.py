"""The command `foretoken`: .venv/bin/foretoken, which `make setup` makes, runs this module.

Imports neither torch nor Ray, so that --help comes at once.
"""

import ast
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.options import serve_command
from deployments.settings import ROOT

URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="of the server")]
ApiKey = Annotated[str | None, typer.Option(help="an API key, where the server needs one")]

app = typer.Typer(
    help="Serves language models with speculative decoding, and talks to such a server.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})(serve_command())


@app.command()
def chat(
    url: Url = URL,
    key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="a system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="of one answer; none: as many as fit")] = None,
    temperature: Annotated[float | None, typer.Option(help="none: the server's default")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed repeats the answers")] = None,
) -> None:
    """Chat with a running server. On a terminal, accepted drafts are green."""
    from deployments.cli.chat import Conversation, converse

    parameters = {"max_completion_tokens": max_tokens, "temperature": temperature, "seed": seed}
    conversation = Conversation(url, key, system, {n: v for n, v in parameters.items() if v is not None})
    raise typer.Exit(converse(conversation, sys.stdin, sys.stdout))


@app.command()
def trace(
    request: Annotated[str, typer.Argument(metavar="ID", help="of a reply")] = "last",
    url: Url = URL,
    key: ApiKey = None,
) -> None:
    """Show the rounds of a recent request: what was drafted and accepted, and why k was as it was."""
    _become("scripts.trace", request, "--rounds", "--url", url, *(() if key is None else ("--key", key)))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context, name: Annotated[str, typer.Argument(help="a benchmark; none: list them")] = ""
) -> None:
    """Run a benchmark with its own options: foretoken bench decode --help."""
    known = benchmarks()
    if name in known:
        _become(f"benchmarks.{name}", *context.args)
    listed = "\n".join(f"  {other:<12}{about}" for other, about in known.items())
    wrong = name not in ("", "--help")
    if wrong:
        typer.echo(f"foretoken: there is no benchmark {name!r}", err=True)
    typer.echo(f"foretoken bench NAME [OPTIONS], where NAME --help shows the options:\n{listed}", err=wrong)
    raise typer.Exit(int(wrong))


def benchmarks() -> dict[str, str]:
    """The benchmarks by name, each with the first line of its docstring."""
    folder = ROOT / "benchmarks"
    files = {path.stem: path for path in folder.glob("*.py")} | {
        path.parent.name: path for path in folder.glob("*/__main__.py")
    }
    sources = {name: files[name].read_text("utf-8") for name in sorted(files)}
    programs = {name: ast.parse(text) for name, text in sources.items() if "__main__" in text}
    return {name: (ast.get_docstring(tree) or "").partition("\n")[0] for name, tree in programs.items()}


def _become(module: str, *arguments: str) -> None:
    """Run a module of the checkout in place of this process. Its package may not be imported from here."""
    command = [sys.executable, "-P", "-m", module, *arguments]
    os.execve(command[0], command, os.environ | {"PYTHONPATH": _path()})


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> None:
    os.environ["PYTHONPATH"] = _path()  # for the processes that Ray starts
    app(prog_name=Path(sys.argv[0]).name if sys.argv[0].endswith("foretoken") else "foretoken")


if __name__ == "__main__":
    main()
