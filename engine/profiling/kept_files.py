"""Files that are kept from one start to the next, below the user's cache folder."""

import os
import tempfile
from pathlib import Path

# What a broken file may raise. A number of hundreds of digits overflows, and deep nesting exceeds the recursion limit.
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def cache_folder() -> Path:
    """foretoken's folder below XDG_CACHE_HOME, which is ~/.cache unless it is set.

    For a user without a home it cannot exist, so nothing is kept.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither HOME nor an entry for the user, as in some containers
        folder = Path(os.devnull)
    return folder / "foretoken"


def replace_file(path: Path, text: str) -> None:
    """Write the whole file, or nothing: nobody reads half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8")  # noqa: SIM115
    try:
        with file:
            file.write(text)
        os.replace(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)  # there is none after it was moved
