"""All tests of benchmarks share a pair, engines that compile nothing, and built-in prompts, which are found once."""

import sysconfig
from collections.abc import Iterator

import pytest

from benchmarks import prompts
from tests.benchmarks.torch_alone import torch_alone
from tests.engine.pairs import Shape, save_pair


@pytest.fixture(scope="session", autouse=True)
def _held_out_sources_are_read_once() -> Iterator[None]:
    """They are files of the standard library, which take half a second to find."""
    read, found = prompts.held_out_sources, dict[str, list[tuple[str, str]]]()

    def once() -> Iterator[tuple[str, str]]:
        root = sysconfig.get_paths()["stdlib"]
        if not found.get(root):
            found[root] = list(read())
        return iter(found[root])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "held_out_sources", once)
        yield


@pytest.fixture(scope="module", autouse=True)
def _torch_alone() -> Iterator[None]:
    with torch_alone():
        yield


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a pair whose passes take a fifth of the demo pair's, with room for built-in prompts."""
    pair = save_pair(tmp_path_factory.mktemp("small"), Shape(max_positions=512))
    return [f"--target={pair.target}", f"--draft={pair.draft}", "--threads=1"]
