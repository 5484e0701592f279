"""An engine that measures its largest rounds and its rounds' costs on the shadow device, as it does at every start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.types import Request
from tests.engine.heads.eagles import save_eagle_pair
from tests.engine.heads.fitted import random_medusa, save_heads
from tests.engine.pairs import Pair
from tests.engine.shadow.both import run_both
from tests.engine.shadow.test_same_text import PARAMS, PROMPT, start
from tests.examples import in_proofs


def an_eagle_head(pair: Pair, folder: Path) -> Pair:
    return save_eagle_pair(folder)


def medusa_heads(pair: Pair, folder: Path) -> Pair:
    return Pair(pair.target, str(save_heads(folder / "medusa", random_medusa(), medusa_num_heads=2)))


def a_draft_model(pair: Pair, folder: Path) -> Pair:
    return pair


@pytest.mark.parametrize("kind", [a_draft_model, an_eagle_head, *in_proofs(medusa_heads)])
def test_an_engine_starts_and_serves(pair: Pair, kind: Callable[[Pair, Path], Pair], tmp_path: Path) -> None:
    """The longest context is shorter than max_step_tokens, so that the largest prompt fills it."""
    served = kind(pair, tmp_path)
    both = run_both(
        lambda device: start(served, device, max_running=4), [Request("r", PROMPT, replace(PARAMS, seed=1))]
    )
    both.check()
    assert both.shadow.run.drafted
