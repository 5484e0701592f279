"""What changes from round to round never lets Triton compile a kernel again: that takes a second in the middle of
serving.

Triton compiles anew for a number that becomes 1 or a multiple of 16, and for an address that begins or ceases to be a
multiple of 16 bytes. The numbers of a round lie one behind the other, so their addresses are any multiples of 8.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

# Triton decides at import whether it interprets kernels.
LAUNCH = """
import sys
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.compiled_kernels import recorded
from engine.kernels import decide_kernel, decide_trees_kernel, laws_kernel, path_rows_kernel, penalise_kernel
from engine.kernels import race_kernel, truncate_kernel, verdict_kernel

VOCAB = 5003
KERNELS = {
    race_kernel: ("part_kernel", "join_kernel"),
    truncate_kernel: ("top_kernel", "search_kernel", "write_kernel"),
    verdict_kernel: ("verdict_kernel",),
    penalise_kernel: ("record_kernel", "penalise_kernel"),
    laws_kernel: ("mass_kernel", "law_kernel", "draft_kernel", "mark_kernel"),
    decide_kernel: ("mass_kernel", "coin_kernel", "weight_kernel", "fallback_kernel"),
    decide_trees_kernel: ("sibling_kernel", "walk_kernel", "weight_kernel"),
    path_rows_kernel: ("path_kernel",),
}


def sent(*shape, dtype=torch.int64, odd):
    # As a part of a round's copy, at an even or odd place of it.
    size = torch.Size(shape).numel()
    return torch.zeros(size + odd, dtype=dtype)[odd:].view(shape)


def launch(sequences, depth, odd):
    rows = sequences * (depth + 1)
    number, real = sent(rows, odd=odd), sent(rows, dtype=torch.float64, odd=odd)
    of_sequence, scores = sent(sequences, odd=odd), torch.zeros(rows, VOCAB)
    drafts = torch.zeros(depth, sequences, dtype=torch.int64).t()
    race_kernel.race(scores, number, number, real, False)
    truncate_kernel.truncate(scores, real, number, real, real)
    starts, finite = sent(sequences + 1, odd=odd), torch.zeros(rows, dtype=torch.bool)
    verdict_kernel.match_verdict(torch.zeros(rows, dtype=torch.int64), finite, drafts, starts)
    uses, index = torch.zeros(sequences, VOCAB, dtype=torch.int32), sent(rows, 2 + depth, odd=odd)
    penalise_kernel.penalise(scores, uses, index, sent(3, rows, dtype=torch.float64, odd=odd), drafts)
    penalise_kernel.record(uses, sent(3 * rows, odd=odd))
    laws_kernel.log_law(scores, real)
    laws_kernel.mark_non_finite(torch.zeros(rows, dtype=torch.int64)[:, None], scores, -1)
    logp = torch.zeros(sequences, depth + 1, VOCAB)
    logq = laws_kernel.draft_laws(torch.zeros(sequences, depth, VOCAB), of_sequence, drafts, logp)
    lenience = sent(sequences, dtype=torch.float64, odd=odd)
    decide_kernel.decide(logp, logq, drafts, of_sequence, lenience, of_sequence, of_sequence)
    nodes = sent(sequences, depth, odd=odd)
    decide_trees_kernel.decide(logp, logq, drafts, nodes, lenience, nodes, nodes, depth)
    path_rows_kernel.path_rows(nodes[:, 0], of_sequence, nodes, nodes, nodes)


def specialised(parameter, value):
    if parameter.is_constexpr or value is None:
        return None
    if isinstance(value, Tensor):
        return not parameter.do_not_specialize_on_alignment and value.data_ptr() % 16
    return not parameter.do_not_specialize and (value == 1, value % 16 == 0)


found = {}
for sequences, depth, odd in ((1, 1, 0), (1, 4, 1), (3, 1, 1), (8, 5, 0), (16, 1, 1), (16, 16, 0), (5, 17, 1)):
    with ExitStack() as stack:
        made = [stack.enter_context(recorded(module, *names)) for module, names in KERNELS.items()]
        launch(sequences, depth, odd)
    for one in [one for launches in made for one in launches]:
        for parameter in one.kernel.params:
            name = one.kernel.module, one.kernel.__name__, parameter.name
            found.setdefault(name, set()).add(specialised(parameter, one.arguments[parameter.name]))
assert {module.__name__ for module in KERNELS} == {module for module, *_ in found}
print(*sorted(" ".join(name) for name, seen in found.items() if len(seen) > 1), sep="\\n", end="")
"""


def test_no_kernel_of_sampling_is_compiled_again_for_another_round() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == []
