"""Makes the runner of each model, and connects a head to the target's states."""

from collections.abc import Sequence as Seq

import torch

from cache.layout import Layout
from engine.config import EngineConfig
from engine.device.graphs import Graphs
from engine.device.round_limits import RoundLimits
from engine.device.staging import Staging
from engine.heads.eagle import EagleHead
from engine.heads.eagle_runner import HeadRunner
from engine.heads.states import LATE_ROWS, TargetStates
from engine.models.decoder import LanguageModel
from engine.models.runner import Runner
from engine.types import DrafterName

Model = LanguageModel | EagleHead
HEAD_DRAFTERS: frozenset[DrafterName] = frozenset({"model", "cascade"})  # those that ask a head
KEPT_PER_SEQUENCE = 128  # positions whose states wait for a head, on average; beside them one pass of a prompt


def make_runners(
    config: EngineConfig,
    models: Seq[Model],
    layouts: Seq[Layout],
    device: torch.device,
    graph_room: int | None = None,
) -> list[Runner]:
    """A runner for each model, the target's first. The target's runner gives a head the states that the head reads.

    graph_room: bytes that captured graphs may take; None: there is no limit.
    """
    (first, *others), (layout, *of_others) = models, layouts
    assert not isinstance(first, EagleHead), "a head is no target"
    graphs = Graphs(device, graph_room) if config.graphs else None
    staging = Staging(device, graphs, RoundLimits.of(config, layout))
    target = Runner(first, layout, device, deterministic=config.deterministic, staging=staging)
    drafts = [draft_runner(config, *pair, staging) for pair in zip(others, of_others, strict=True)]
    target.reader = next(filter(None, map(reader_of, drafts)), None)
    if config.products == "auto":
        target.attention_plans.measure()
    return [target, *drafts]


def draft_runner(config: EngineConfig, model: Model, layout: Layout, staging: Staging) -> Runner:
    """A draft's runner. A head's gets states once its reader is the target's: see `reader_of`."""
    if not isinstance(model, EagleHead):
        runner = Runner(model, layout, staging.device, staging=staging)
    else:
        states = TargetStates(model.layers, HEAD_DRAFTERS, max_states(config), LATE_ROWS)
        runner = HeadRunner(model, layout, states, staging)
    if config.products == "auto":
        runner.attention_plans.measure()
    return runner


def reader_of(draft: Runner) -> TargetStates | None:
    """The table that must read the target's states for this draft, if it is a head. None: it needs no states."""
    return draft.states if isinstance(draft, HeadRunner) else None


def max_states(config: EngineConfig) -> int:
    """The most positions whose states are kept for a head, all sequences together."""
    return config.max_step_tokens + KEPT_PER_SEQUENCE * config.max_running


def states_bytes(config: EngineConfig, models: Seq[Model]) -> int:
    """The most bytes that the target's states take while they wait for heads. Models that are no heads need none."""
    return sum(table_bytes(config, m.state_width, m.dtype, LATE_ROWS) for m in models if isinstance(m, EagleHead))


def table_bytes(config: EngineConfig, width: int, dtype: torch.dtype, late_rows: int = 0) -> int:
    """The most bytes that the states for one head take, with one row that nobody reads. width: numbers of a position's
    states. late_rows: rows that wait for their copy into the table. While they are copied, they are there twice."""
    return (max_states(config) + 1 + 2 * late_rows) * width * dtype.itemsize
