"""Files that are kept from one start to the next, below the user's cache folder."""

import hashlib
import os
import tempfile
from functools import cache
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


@cache
def code_digest(root: Path = Path(__file__).parents[2]) -> str:
    """Another one for any change of the code that is measured: what was kept before does not hold for it."""
    digest = hashlib.sha256()
    for package in ("cache", "engine"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


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
