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

from tests.engine.shadow.test_launches import LAUNCHED

# Triton decides at import whether it interprets kernels.
LAUNCH = """
import torch

from engine.kernels import coded_kernel, decide_kernel, decide_trees_kernel, laws_kernel, paged_launch
from engine.kernels import path_rows_kernel, penalise_kernel, race_kernel, row_kernel, row_product_kernel
from engine.kernels import truncate_kernel, verdict_kernel
from engine.kernels.paged_rows import PagedRows, max_split_rows
from tests.engine.shadow.launches import launched

VOCAB = 5003
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 14, 2, 64, 896  # of a model of 0.5B


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
    attend(sequences, 1, odd)
    attend(sequences, depth + 1, odd)
    codes, steps = torch.zeros(HIDDEN, 4864, dtype=torch.int8), torch.zeros(1, HIDDEN)
    coded_kernel.coded_product(torch.zeros(rows, 4864, dtype=torch.bfloat16), codes, steps, None, None)
    x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
    row_kernel.normalise(x, x[0], 1e-6, 0.0, x)
    product = torch.zeros(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    factors = torch.zeros(rows, product[0].numel() // 2, dtype=torch.complex64)
    stored, places = torch.zeros(512, 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16), sent(rows, odd=odd)
    row_kernel.rotate_and_store(product[:, :HEADS], product[:, HEADS:], factors, stored, places)
    row_kernel.silu_gate(x)
    for few in (1, min(rows, 64)):
        multiply(x[:few], factors[:few], stored, places[:few])


def multiply(x, factors, stored, places):
    weight, gain = torch.zeros(2 * factors.shape[1], HIDDEN, dtype=torch.bfloat16), x[0] if len(x) == 1 else None
    norm = gain, 1e-6, 0.0
    row_product_kernel.project_and_store(x, weight, weight[:, 0].clone(), factors, stored, places, HIDDEN, *norm)
    row_product_kernel.gated_product(x, weight, *norm)
    if len(x) == 1:
        row_product_kernel.add_product_(x, x, weight[:HIDDEN])
    else:
        row_kernel.add_parts_(x, row_product_kernel.product_parts(x, weight[:HIDDEN]))


def attend(sequences, count, odd):
    rows = sequences * count
    pool = torch.zeros(64, 16, 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    queries = torch.zeros(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)[:, :HEADS]
    sizes = sent(sequences, dtype=torch.int32, odd=odd)
    firsts, owners = (sent(n, dtype=torch.int32, odd=odd) for n in (sequences + 1, rows))
    number = sent(rows, odd=odd)
    for keys in (100, 500, 700, 1500, 4000):
        tables = sent(sequences, keys // 16 + 1, dtype=torch.int32, odd=odd)
        for paths in (None, number):
            fields = tables, firsts, sizes, owners, number, number, paths, None if paths is None else sizes
            read = PagedRows(*fields, count, max_split_rows([count]), keys)
            paged_launch.attend(queries, pool, read, 0.125, None, None, None)


found, names = {}, set()
with launched(names.add) as variants:
    for sequences, depth, odd in ((1, 1, 0), (1, 4, 1), (3, 1, 1), (8, 5, 0), (16, 1, 1), (16, 16, 0), (5, 17, 1)):
        launch(sequences, depth, odd)
for variant in variants:
    chosen, told = [variant.name], {}
    for number, parameter in enumerate(variant.kernel.params):
        value, attribute = variant.values.get((number,)), variant.attributes.get((number,))
        if parameter.is_constexpr or variant.signature[parameter.name] == "constexpr" and value is None:
            chosen.append(value)  # chosen by the kernel's caller, or absent
        else:
            told[parameter.name] = value, str(attribute)
    for name, seen in told.items():
        found.setdefault((str(chosen), variant.name, name), set()).add(seen)
print(len(names))
print(*sorted({f"{kernel} {name}" for (_, kernel, name), seen in found.items() if len(seen) > 1}), sep="\\n", end="")
"""


def test_no_kernel_is_compiled_again_for_another_round() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH], env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    count, *again = done.stdout.splitlines()
    assert int(count) == len(LAUNCHED)
    assert again == []
