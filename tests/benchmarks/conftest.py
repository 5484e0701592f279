"""The built-in prompts come from files of the standard library, which take half a second to find."""

import sysconfig
from collections.abc import Iterator

import pytest

from benchmarks import prompts


@pytest.fixture(scope="session", autouse=True)
def _held_out_sources_are_read_once() -> Iterator[None]:
    read, found = prompts.held_out_sources, dict[str, list[tuple[str, str]]]()

    def once() -> Iterator[tuple[str, str]]:
        root = sysconfig.get_paths()["stdlib"]
        if not found.get(root):
            found[root] = list(read())
        return iter(found[root])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "held_out_sources", once)
        yield
