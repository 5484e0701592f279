"""The largest round that an engine runs, and how many numbers of the host such a round has."""

from dataclasses import dataclass
from math import ceil

from cache.layout import Layout
from engine.config import EngineConfig

NUMBERS_PER_SEQUENCE = 24  # 64-bit numbers in a pass, beside the table of blocks and the rows' numbers
NUMBERS_PER_ROW = 32  # 64-bit numbers of a row, beside the drafts that a penalised row sees
BANS_PER_ROW = 16  # bans by bad words and end tokens; each ban also has a number for each draft
EXACT_SEQUENCES = 4  # up to this many sequences are rounded up to a power of two, more to a multiple of 8


@dataclass(frozen=True, slots=True)
class RoundLimits:
    sequences: int  # max_running
    drafts: int  # max_spec_length
    numbers: int = 0  # the most 64-bit numbers that a captured round sends; 0: nothing is captured

    @classmethod
    def of(cls, config: EngineConfig, layout: Layout) -> "RoundLimits":
        """layout: the target's. A draft's layout has no more blocks in a table, even if the draft joins later."""
        sequences, drafts = config.max_running, config.max_spec_length
        if not config.graphs:
            return cls(sequences, drafts)
        models = 1 + max(1, len(config.draft_models))
        width = table_width(ceil(layout.max_len / layout.block_size))
        of_row = NUMBERS_PER_ROW + drafts + BANS_PER_ROW * (3 + drafts)
        of_sequence = width / 2 + NUMBERS_PER_SEQUENCE + (1 + drafts) * of_row
        return cls(sequences, drafts, ceil(models * sequences * of_sequence))

    def padded(self, sequences: int) -> int:
        """The number of sequences of a captured round: `sequences` rounded up, but never more than an engine runs.
        Rounds of few kinds need few graphs."""
        up = 1 << (sequences - 1).bit_length() if sequences <= EXACT_SEQUENCES else ceil(sequences / 8) * 8
        return min(up, self.sequences)

    @property
    def new_tokens(self) -> int:
        """The most tokens that one round commits for one sequence."""
        return 1 + self.drafts


NO_LIMITS = RoundLimits(0, 0)  # nobody has to know them: nothing is captured


def fixed_bytes(config: EngineConfig, block_size: int, max_len: int, vocab: int, law_bytes: int) -> int:
    """Bytes of the memory that captured rounds keep beside their graphs: for numbers of the host, and for each draft
    model's laws. vocab: the target's. law_bytes: the size of one number of a law."""
    if not config.graphs:
        return 0
    limits = RoundLimits.of(config, Layout(config.max_running, max_len, block_size))
    laws = max(1, len(config.draft_models)) * limits.sequences * limits.drafts * vocab
    return 8 * limits.numbers + law_bytes * laws


def table_width(blocks: int) -> int:
    """The width of a table of so many blocks in a captured round: a power of two."""
    return 1 << max(0, blocks - 1).bit_length()
