"""A Serve configuration file, as far as it is read without Ray."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

BUILDER = "deployments.build:build"
DEPLOYMENT = "Replica"


class OurApplication(NamedTuple):
    """An application of a configuration that our builder makes."""

    name: str
    route_prefix: str
    args: dict[str, Any]
    user_config: Any  # None: the file has none


def read_document(path: Path) -> Any:
    """The YAML of a file. Raises OSError if it cannot be read, ValueError if it is no YAML."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{where}no YAML: {getattr(error, 'problem', None) or error}") from None


def our_applications(document: Any) -> list[OurApplication]:
    """The applications that our builder makes. What is malformed is left out: Serve's schema refuses it later.

    Raises ValueError for a document without an application.
    """
    if not isinstance(document, dict) or not document.get("applications"):
        raise ValueError("the file names no application; add one under `applications`")
    applications = document["applications"]
    entries = [a for a in applications if isinstance(a, dict)] if isinstance(applications, list) else []
    return [_ours(entry) for entry in entries if entry.get("import_path") == BUILDER]


def _ours(entry: dict[str, Any]) -> OurApplication:
    deployments = entry.get("deployments")
    listed = deployments if isinstance(deployments, list) else []
    replicas = [d for d in listed if isinstance(d, dict) and d.get("name") == DEPLOYMENT]
    user_config = replicas[0].get("user_config") if replicas else None
    args = entry.get("args") or {}
    if not isinstance(args, dict):
        raise ValueError(f"args must be names and values, not {type(args).__name__}")
    return OurApplication(str(entry.get("name", "default")), str(entry.get("route_prefix", "/")), args, user_config)


def listen_address(document: dict[str, Any]) -> tuple[str, int | None]:
    """Host and port of the server; the defaults are those of Serve's configuration files. None: not a port number, so
    there is nothing to try."""
    options = document.get("http_options") or {}
    options = options if isinstance(options, dict) else {}
    host, port = str(options.get("host", "0.0.0.0")), str(options.get("port", 8000))
    return host, int(port) if port.isdecimal() else None
