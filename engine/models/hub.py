"""Finds a checkpoint: a directory, or a model of a Hugging Face hub that is downloaded into the hub's cache.

huggingface_hub is the client; it reads HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE from the environment.
"""

import errno
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine.config import ConfigError
from engine.loading.hub_id import HubId, parse_hub_id
from engine.models.weight_files import INDEX, WEIGHTS, pickle_reason, weight_files

SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")  # of the repository's root: configuration, tokenizer, templates
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
PROGRESS_S = 5.0  # seconds between two lines about a download

log = logging.getLogger(__name__)


def checkpoint_directory(given: str) -> str:
    """The directory of a checkpoint, downloaded first if `given` names a model of the hub.

    Raises ConfigError if the model cannot be had. Nothing is loaded from a download that is not complete.
    """
    hub_id = parse_hub_id(given)
    directory = Path(given) if hub_id is None else _from_hub(hub_id)
    _warn_of_custom_code(directory)
    return str(directory)


def _warn_of_custom_code(directory: Path) -> None:
    try:
        config = json.loads((directory / "config.json").read_text("utf-8"))
        custom = "auto_map" in config
    except (OSError, ValueError, TypeError, RecursionError):  # open_checkpoint says what is wrong with it
        return
    if custom:
        log.warning("%s names code of its own in config.json (auto_map); it is never run", directory)


def _from_hub(hub_id: HubId) -> Path:
    disable_progress_bars()  # the log has lines instead
    try:
        listing = _listing(hub_id)
    except _Unreachable as reason:
        return _from_cache(hub_id, str(reason))
    small = [name for name in listing.sizes if _is_small(name)]
    if "config.json" not in small:
        raise ConfigError(f"{hub_id} of {constants.ENDPOINT} holds no config.json: it is no transformers checkpoint")
    if not {WEIGHTS, INDEX} & listing.sizes.keys():
        raise ConfigError(f"{hub_id} of {constants.ENDPOINT} holds no {WEIGHTS}{pickle_reason(list(listing.sizes))}")
    directory = _download(hub_id, listing, hub_id.revision, small)  # the cache notes the commit of the revision
    return _download(hub_id, listing, listing.commit, _weights(directory))


def _is_small(name: str) -> bool:
    """Whether a file of the repository is needed beside the weights."""
    if "/" in name:
        return fnmatch(name, NAMED_TEMPLATES) and name.count("/") == 1
    return any(fnmatch(name, pattern) for pattern in SMALL_FILES)


def _weights(directory: Path) -> list[str]:
    index = directory / INDEX
    return sorted(set(weight_files(index).values())) if index.is_file() else [WEIGHTS]


class _Listing(NamedTuple):
    """What a model's repository holds at one commit."""

    commit: str
    sizes: dict[str, int]  # file name → bytes


class _Unreachable(Exception):
    """The hub cannot be asked at present. The message says why."""


def _listing(hub_id: HubId) -> _Listing:
    """Ask the hub. Raises ConfigError if it refuses, _Unreachable if it cannot answer."""
    try:
        info = huggingface_hub.HfApi().model_info(hub_id.name, revision=hub_id.revision, files_metadata=True)
    except errors.OfflineModeIsEnabled:
        raise _Unreachable("HF_HUB_OFFLINE is set") from None
    except Exception as error:  # also the errors of the client's HTTP library, which differs between its versions
        if reason := _refusal(hub_id, error):
            raise ConfigError(reason) from error
        raise _Unreachable(_trouble(error)) from error
    return _Listing(str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or []})


def _refusal(hub_id: HubId, error: BaseException) -> str | None:
    """What to tell the operator if the hub knows the model or the caller and refuses; None for any other error."""
    status = _status(error)
    has_token = huggingface_hub.get_token() is not None
    access = "the account of HF_TOKEN has no access" if has_token else "set HF_TOKEN to a token that may read it"
    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{hub_id} is gated at {hub}: accept its terms at {hub}/{hub_id.name}; {access}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{hub_id.name} has no revision {hub_id.revision!r} at {hub}"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return f"there is no directory {hub_id}, and {hub} has no model of that name, or it is private: {access}"
    if status == 401 and has_token:
        return f"{hub} answered 401 for {hub_id}: HF_TOKEN is not valid"
    return f"{hub} answered {status} for {hub_id}: {access}" if status in (401, 403) else None


def _status(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None


def _trouble(error: BaseException) -> str:
    if (status := _status(error)) is not None:
        return f"{constants.ENDPOINT} answered {status}"
    return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _from_cache(hub_id: HubId, reason: str) -> Path:
    """The model as it was downloaded before. Raises ConfigError if it was not, or not completely."""
    missing = f"{reason}, and {hub_id} is not in the cache {constants.HF_HUB_CACHE}"
    try:
        found = huggingface_hub.snapshot_download(
            hub_id.name, revision=hub_id.revision, allow_patterns=["config.json"], local_files_only=True
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(missing) from error
    directory = Path(found)
    if not (directory / "config.json").is_file() or not all(
        (directory / file).is_file() for file in _weights(directory)
    ):
        raise ConfigError(f"{missing} completely")
    log.warning("%s: serving %s from the cache, commit %s", reason, hub_id, directory.name)
    return directory


def _download(hub_id: HubId, listing: _Listing, revision: str | None, files: list[str]) -> Path:
    """Fetch the files that the cache does not hold yet. Returns the directory of the commit."""
    absent = {name for name in files if not _cached(hub_id, listing, name)}
    size = sum(listing.sizes.get(name, 0) for name in absent)
    try:
        with _progress(hub_id, size):
            found = huggingface_hub.snapshot_download(
                hub_id.name, revision=revision, allow_patterns=[_escaped(name) for name in files]
            )
    except Exception as error:  # see _listing; files are also written here
        raise ConfigError(_download_failure(hub_id, size, error)) from error
    directory = Path(found)
    if lost := [name for name in files if not (directory / name).is_file()]:
        raise ConfigError(f"{hub_id} of {constants.ENDPOINT} does not hold {', '.join(lost)}")
    return directory


def _download_failure(hub_id: HubId, size: int, error: BaseException) -> str:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        room = f"{_gib(size)} must be downloaded to {constants.HF_HUB_CACHE}, and its disk is full"
        return f"{hub_id}: {room}: free some of it, or set HF_HOME to a larger one"
    for cause in causes:
        if reason := _refusal(hub_id, cause):
            return reason
    again = "start again: complete files are kept"
    answered = next((cause for cause in causes if _status(cause) is not None), causes[-1])
    return f"the download of {hub_id} broke off: {_trouble(answered)}; {again}"


def _escaped(name: str) -> str:
    """A pattern that fits this file name only."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _cached(hub_id: HubId, listing: _Listing, name: str) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(hub_id.name, name, revision=listing.commit), str)


@contextmanager
def _progress(hub_id: HubId, size: int) -> Iterator[None]:
    """Log how much of `size` bytes has come, every PROGRESS_S seconds; nothing if there is nothing to download."""
    if not size:
        yield
        return
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.name.replace('/', '--')}" / "blobs"
    before, ended = _bytes_in(blobs), threading.Event()

    def tell() -> None:
        while not ended.wait(PROGRESS_S):
            come = max(0, _bytes_in(blobs) - before)
            log.info("%s: %s of %s downloaded (%.0f %%)", hub_id, _gib(come), _gib(size), 100 * come / size)

    log.info("%s: downloading %s from %s to %s", hub_id, _gib(size), constants.ENDPOINT, constants.HF_HUB_CACHE)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
        log.info("%s: downloaded", hub_id)
    finally:
        ended.set()
        teller.join()


def _bytes_in(directory: Path) -> int:
    """Bytes of the files in a directory. Files may come and go meanwhile."""
    total = 0
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
