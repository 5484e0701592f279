"""What is checked before anything starts: settings, files, device, keys and port. Imports neither torch nor Ray.

Every error is a ValueError or OSError of one line that says what was given and what to do.
"""

import ctypes
import errno
import socket
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.settings import Device, PolicySettings, Settings
from engine.config import ConfigError
from engine.loading.checkpoint_files import CheckpointFiles, check_together
from engine.loading.hub_id import parse_hub_id

MAX_SHOWN = 60  # characters of a wrong value


def read_settings(args: Mapping[str, Any], user_config: Any = None) -> Settings:
    """Raises ConfigError for settings that cannot be served, alone or with the deployment's user_config."""
    try:
        settings = Settings.model_validate(dict(args))
    except ValidationError as error:
        raise ConfigError(explain(error, Settings)) from None
    if user_config is not None:
        try:
            given = PolicySettings.model_validate(user_config)
        except ValidationError as error:
            raise ConfigError(f"user_config: {explain(error, PolicySettings)}") from None
        settings.freeze("cpu").check_policy(given.freeze())
        given.draft_of(settings.freeze("cpu"))
    return settings


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the error on one line, with every wrong field and its value."""
    return "; ".join(_explain(item, model) for item in error.errors(include_url=False))


def _explain(error: ErrorDetails, model: type[BaseModel]) -> str:
    name, message = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        close = get_close_matches(name, model.model_fields, 1)
        return f"there is no setting {name!r}" + (f": did you mean {close[0]!r}?" if close else "")
    if not name:  # a conflict of several fields
        return message
    given = repr(error["input"])
    return f"{name}: {message}, not {given if len(given) <= MAX_SHOWN else given[:MAX_SHOWN] + '…'}"


def check_models(settings: Settings, device: Device, user_config: Any = None) -> None:
    """Check the files of all checkpoints; fetch those of a hub. Raises ConfigError, naming the setting.

    user_config: the deployment's, which is valid and may name another draft.
    """
    config = settings.freeze(device)
    name_of_drafts, models = "draft" if config.draft is not None else "drafts", []
    for name, given in (("target", config.target), *((name_of_drafts, draft) for draft in config.draft_models)):
        models.append(_files(name, given))
    check_together(config, models)
    if user_config is None:
        return
    draft = PolicySettings.model_validate(user_config).draft_of(config)
    if draft is not None and draft != config.draft:
        name = "user_config: draft"
        another = _files(name, draft)
        try:
            check_together(config.with_draft(draft), [models[0], another])
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None


def _files(name: str, given: str) -> CheckpointFiles:
    try:
        return CheckpointFiles.read(_directory(given))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _directory(given: str) -> Path:
    if parse_hub_id(given) is None:
        return Path(given)
    from engine.models.hub import checkpoint_directory  # its client takes half a second to import

    return Path(checkpoint_directory(given))


def check_edge(settings: Settings) -> None:
    """Check the files of the HTTP edge. Raises OSError or ValueError."""
    edge = settings.edge()
    if edge.api_key_file is not None:
        from app.keys import ApiKeys

        try:
            ApiKeys.read(Path(edge.api_key_file))
        except OSError as error:
            raise ConfigError(f"api_key_file: {edge.api_key_file} cannot be read: {error.strerror}") from None
    template = edge.chat.template
    if template is not None and "/" in template and not Path(template).is_file():
        raise ConfigError(f"chat_template: there is no file {template}")


def device_here(settings: Settings) -> Device:
    """The device of replicas on this machine. Raises ConfigError if CUDA is asked for and there is no GPU."""
    if settings.device == "cpu":
        return "cpu"
    found = has_gpu()
    if settings.device == "cuda" and not found:
        raise ConfigError(
            "device: cuda was asked for, and this machine has no GPU with a driver: set it to cpu or auto"
        )
    return "cuda" if found else "cpu"


def has_gpu() -> bool:
    """Whether this machine has a GPU that this process may use, as its driver says."""
    if Path("/dev/kfd").exists():  # ROCm
        return True
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if the server could not listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken: end what listens there, or choose another port"
            ) from None
        raise ConfigError(f"nobody can listen at port {port} of {host}: {error}") from None
