"""`foretoken serve`: one option for each field of Settings."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from deployments.config_file import BUILDER
from deployments.settings import NOTHING, ROOT, Settings
from engine.loading.hub_id import parse_hub_id
from engine.profiling.machine_cpus import usable_cpus

PATHS = ("target", "draft", "api_key_file", "chat_template")  # settings that may name a file or directory
METAVARS = {bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT", tuple: "TEXT"}


def serve_command() -> Callable[..., None]:
    """A function whose parameters are the options. A value is read as in `serve run`: a text that Settings checks."""

    def command(target: str | None, host: str, port: int, dry_run: bool, **given: str | None) -> None:
        from deployments.launch import serve  # its imports would delay --help

        settings = {"target": target, **given}
        args = {name: _read(name, value) for name, value in settings.items() if value is not None}
        args.setdefault("num_cpus", str(usable_cpus()))  # for the only replica on this machine
        os.chdir(ROOT)  # Ray's processes work where this one does
        source = "the embedded pair" if target is None else target
        raise typer.Exit(serve(lambda: document(host, port, args), source, dry_run=dry_run))

    command.__doc__ = (
        "Serve TARGET on this machine alone: a checkpoint's directory or a hub id, else the embedded pair."
    )
    command.__signature__ = inspect.Signature([*_own_parameters(), *map(_parameter, _options())])  # type: ignore[attr-defined]
    return command


def document(host: str, port: int, args: dict[str, Any]) -> dict[str, Any]:
    """The configuration file that would serve the same."""
    application = {"name": "foretoken", "route_prefix": "/", "import_path": BUILDER, "args": args}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": host, "port": port},
        "applications": [application],
    }


def _read(name: str, given: str) -> str | list[str]:
    """A setting's text, with paths in full. `drafts` becomes a list: the working directory may have spaces in it."""
    if name == "drafts" and given.lower() not in NOTHING:
        return list(map(_path, given.split()))
    return _path(given) if name in PATHS else given


def _path(given: str) -> str:
    """A path in the working directory in full. What is not there may be below the repository's root or at a hub."""
    here = Path(given).expanduser()
    elsewhere = (ROOT / here).exists() or parse_hub_id(given) or given.lower() in NOTHING
    return str(here.absolute()) if here.exists() or (not elsewhere and "/" in given) else given


def _own_parameters() -> list[inspect.Parameter]:
    about = "checkpoint directory, or hub id: owner/name[@revision]"
    return [
        _keyword("target", Annotated[str | None, typer.Argument(metavar="TARGET", help=about)], None),
        _keyword("host", Annotated[str, typer.Option(help="address to listen at")], "127.0.0.1"),
        _keyword("port", Annotated[int, typer.Option(help="port to listen at")], 8000),
        _keyword(
            "dry_run", Annotated[bool, typer.Option("--dry-run", help="print the memory that it would take")], False
        ),
    ]


def _options() -> list[tuple[str, FieldInfo]]:
    return [(name, field) for name, field in Settings.model_fields.items() if name != "target"]


def _parameter(option: tuple[str, FieldInfo]) -> inspect.Parameter:
    name, field = option
    about = " ".join((field.description or "").split())
    if field.default is not None:
        about += f" [default: {str(field.default).lower()}]"
    kind = typer.Option(f"--{name.replace('_', '-')}", help=about, metavar=metavar(field.annotation))
    return _keyword(name, Annotated[str | None, kind], None)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def metavar(annotation: Any) -> str:
    """How the help writes a type: the choices of a Literal, else a word for it."""
    if get_origin(annotation) is Annotated:
        return metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        return metavar(next(part for part in get_args(annotation) if part is not type(None)))
    return METAVARS[get_origin(annotation) or annotation]
