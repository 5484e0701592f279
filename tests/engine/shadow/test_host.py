"""The measurement of the host's part of a round times rounds of replays."""

from pathlib import Path
from unittest.mock import patch

from engine.device.graphs import Graphs
from tests.engine.pairs import save_pair
from tests.engine.shadow.host import round_seconds


def test_rounds_of_replays_are_timed(tmp_path: Path) -> None:
    with patch.object(Graphs, "run", autospec=True, side_effect=Graphs.run) as run:
        assert len(round_seconds(save_pair(tmp_path), 2, 1, rounds=3)) == 3
    assert run.call_count > 2 * 3  # a graph that drafts and one that verifies
