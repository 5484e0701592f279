"""The rounds that need the most memory, for the activation budget.

They are real rounds over throw-away sequences, through the same code as those of requests: a prompt's chunk at the end
of the longest context with log-probabilities after each of its tokens, and 1 + max_spec_length rows of every sequence,
once with each verifier and with every sampling parameter. Under rejection the drafts are trees, which need more than
chains. Contexts are not computed: their memory holds zeros.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil

import torch

from cache.layout import Layout
from engine.config import ConfigError, EngineConfig
from engine.drafters.base import Drafter
from engine.drafters.merged import MERGED, draft_models
from engine.drafters.model import ModelDrafter
from engine.heads.state_drafter import StateDrafter
from engine.kernels.paged_rows import MAX_NODES
from engine.loading.model_runners import Model, make_runners
from engine.memory.budget import measure_activations
from engine.memory.errors import out_of_memory
from engine.memory.machine import DeviceMemory
from engine.models.feeds import Feed
from engine.models.runner import Runner, kv_shape
from engine.profiling.round_profile import ConstantDrafter
from engine.round import run_round
from engine.scheduler import Plan, Slice
from engine.sequence import Sequence, scratch_sequence
from engine.trees import Parents, chain
from engine.types import MAX_LOGPROBS, VERIFIERS, DrafterName, SamplingParams, Verifier

BLOCK_SIZE = 32  # positions; any size would do

log = logging.getLogger(__name__)

# (target, drafts) → the draft models, or heads without memory, as drafters
MakeModels = Callable[[Runner, Seq[Runner]], list[ModelDrafter] | list[StateDrafter]]


def measure_largest_rounds(
    config: EngineConfig,
    decoders: Seq[Model],
    max_len: int,
    memory: DeviceMemory,
    device: torch.device,
    make_models: MakeModels,
) -> int:
    """The most bytes that a round allocates beside weights and KV memory. decoders: the target, then the drafts.

    `memory` is what is left beside the weights. Raises ConfigError if even these rounds do not fit into it.
    """
    rounds = LargestRounds(config, max_len, memory)
    try:
        measured = []
        measured.append(measure_activations(rounds.prompt(rounds.runners(decoders, device)), device))
        ways: list[tuple[Verifier, DrafterName]] = [(verifier, "model") for verifier in VERIFIERS]
        for verifier, drafter in [*ways, ("rejection", MERGED)] if len(decoders) > 2 else ways:
            # Heads without memory draft less than other drafters may, so rounds without them count too.
            for make in [make_models] if len(decoders) > 1 else [make_models, _no_models]:
                run = rounds.verification(rounds.runners(decoders, device), verifier, make, drafter)
                measured.append(measure_activations(run, device))
    except (RuntimeError, MemoryError, OSError) as error:
        if not out_of_memory(error) and not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"one round of max_step_tokens {config.max_step_tokens:,} at max_model_len {max_len:,} does not fit beside "
            f"the weights: lower them, or max_running, or max_spec_length ({error})"
        ) from error
    log.debug("bytes of the largest rounds: %s", measured)
    return max(measured)


def _no_models(target: Runner, drafts: Seq[Runner]) -> list[ModelDrafter]:
    return []


class LargestRounds:
    """Makes the rounds. Each gets runners of its own, because a round leaves its sequences in their caches."""

    def __init__(self, config: EngineConfig, max_len: int, memory: DeviceMemory) -> None:
        self._config = config
        self._max_len = max_len
        self._memory = memory

    def runners(self, decoders: Seq[Model], device: torch.device) -> list[Runner]:
        """Runners whose KV memory holds one sequence of max_len positions, which the others share, and all drafts."""
        slots = self._config.max_running
        sized = []
        for decoder in decoders:
            max_len = min(self._max_len, decoder.config.max_position_embeddings)
            # Blocks that a sequence does not share hold drafts and look-ahead tokens. It may have fewer of these.
            apart = ceil((self._rows + 1 + MAX_NODES) / BLOCK_SIZE) + 2
            blocks = ceil(max_len / BLOCK_SIZE) + 1 + slots * apart
            sized.append(Layout(slots, max_len, BLOCK_SIZE, blocks, mapped=False))
        # A captured round is no larger than these, and a first round of its kind would reset the peak that is measured.
        return make_runners(replace(self._config, graphs=False), decoders, sized, device)

    @property
    def _rows(self) -> int:
        """Rows of one sequence in a round that verifies its drafts."""
        return 1 + min(self._config.max_spec_length, self._max_len - 2)

    @property
    def _tree(self) -> Parents | None:
        """A chain with a second draft at its end. It has many first siblings, and the rest of the law behind each one
        is kept."""
        k = self._rows - 1
        return (*chain(k - 1), k - 3) if k > 1 and not self._config.deterministic else None

    def prompt(self, runners: Seq[Runner]) -> Callable[[], object]:
        """Each model reads max_step_tokens tokens at the end of its longest context but for the last token.

        All rows of the target give logits.
        """
        plans: list[tuple[Runner, Slice]] = []
        for runner in runners:
            length = runner.cache.max_len
            sequence = _sequence(0, [0] * length, "match")
            chunk = min(self._config.max_step_tokens, len(runner.tokens(sequence)) - 1)  # a head reads one less
            _hold(runner, sequence, 1 + chunk)
            plans.append((runner, Slice(sequence, chunk, 0, emits=False, prompt_rows=chunk)))
        target, *drafts = plans

        def run() -> None:
            run_round(Plan((target[1],)), target[0], ConstantDrafter(target[0].device))
            for draft, part in drafts:
                draft.run([Feed(part.sequence, part.committed)])

        return run

    def verification(
        self, runners: Seq[Runner], verifier: Verifier, make_models: MakeModels, name: DrafterName = "model"
    ) -> Callable[[], object]:
        """max_running sequences with max_spec_length drafts each, at the longest context that they can all have."""
        target, *drafts = runners
        models = make_models(target, drafts)
        drafter: Drafter = draft_models(models) if models else ConstantDrafter(target.device)
        translation = runners[-1].translation
        token = min(translation.shared) if translation else 0  # that each model reads as one token
        slices = []
        for i in range(self._config.max_running):
            length = max(1, min(self._context(runners), *(runner.cache.max_len - self._rows for runner in runners)))
            sequence = _sequence(i, [token] * (length + 1), verifier, name)
            sequence.tree = self._tree if verifier == "rejection" and name != MERGED else None
            for runner in runners:
                _hold(runner, sequence, 1)
            if isinstance(drafter, StateDrafter):
                drafter.imagine_inputs(sequence, target)
            ragged = 0 < i == self._config.max_running - 1  # rows of sequences with fewer drafts than others are padded
            k = max(0, self._rows - 1 - ragged)
            riding = target.look_ahead
            ahead = 0 if riding is None else riding.reserve(target.cache, sequence, k, sequence.tree)[0]
            if riding is not None and ahead and sequence.tree is None:
                k = min(k, riding.most)  # as the scheduler plans it
            slices.append(Slice(sequence, 1, k, emits=True, ahead=ahead))
        return lambda: run_round(Plan(tuple(slices)), target, drafter)

    def _context(self, runners: Seq[Runner]) -> int:
        """Positions of each of max_running sequences if the KV memory were all that is left beside the weights."""
        shapes = (kv_shape(r.decoder.config, r.decoder.dtype, r.device) for r in runners)
        return self._memory.available // (sum(shape.token_bytes for shape in shapes) * self._config.max_running)


def _hold(runner: Runner, sequence: Sequence, uncached: int) -> None:
    """Let the cache hold all but the last `uncached` of the sequence's tokens, all zero. Equal texts share their
    blocks."""
    cache, tokens = runner.cache, runner.tokens(sequence)
    length = len(tokens) - uncached
    found = cache.allocate(sequence.handle, tokens[:length])
    cache.reserve(sequence.handle, length - found)
    cache.extend(sequence.handle, length - found)
    cache.publish(sequence.handle, tokens)
    runner.imagine_inputs(sequence)


def _sequence(handle: int, tokens: list[int], verifier: Verifier, drafter: DrafterName = "model") -> Sequence:
    params = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        logit_bias=((0, 1.0),),
        bad_word_ids=((0, 0), (0,)),
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        min_tokens=1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    fields = {"end_ids": frozenset({0}), "verifier": verifier, "drafter": drafter}
    return scratch_sequence(f"largest-round-{handle}", handle, tokens, params, **fields)
