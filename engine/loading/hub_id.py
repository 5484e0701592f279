"""How a setting names a model of a Hugging Face hub: `owner/name` or `owner/name@revision`.

A directory of that name goes before the hub. A name that begins with / or . or ~ is always a path, and one that begins
with hf:// is always the hub's: so a launcher hands over what it found in its own working directory.
"""

import re
from pathlib import Path
from typing import NamedTuple

HUB_ID = re.compile(r"(?P<scheme>hf://)?(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s@]+))?")


class HubId(NamedTuple):
    """A model of the hub."""

    name: str  # owner/name
    revision: str | None  # branch, tag or commit; None: main

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def url(self) -> str:
        return f"hf://{self}"


def parse_hub_id(given: str) -> HubId | None:
    """The model of the hub that a setting names; None if it is a path."""
    found = HUB_ID.fullmatch(given)
    if found is None or (found["scheme"] is None and Path(given).is_dir()):
        return None
    return HubId(found["name"], found["revision"])
