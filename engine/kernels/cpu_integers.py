"""Products of 8-bit integers, whose sums are exact, for code that Numba compiles (cpu_panels.py).

Weights have 8 bits and a sign. Activations are stored as the CPU's instructions take them. VNNI takes 8 bits without a
sign, so OFFSET is added. Other instructions take 16 bits, and add pairs of products in 32. So nothing saturates.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from engine.kernels.cpu_code import declared, features, picked

BYTE, SUM = ir.IntType(8), ir.IntType(32)
HAS_VNNI = bool({"avx512vnni", "avxvnni"} & features())
AT_ONCE = 64 if "avx512vnni" in features() else 32 if HAS_VNNI or "avx512bw" in features() else 16  # products
NEIGHBOURS = 4 if HAS_VNNI else 2  # products that an instruction adds up to one sum: 32 bits of activations
OFFSET = 128 if HAS_VNNI else 0  # of activations
ACTIVATION = np.uint8 if HAS_VNNI else np.int16


def add_products(builder: Any, activations: Any, weights: Any, total: Any) -> Any:
    """total + activations · weights; each of its numbers gets the products of its neighbours."""
    if HAS_VNNI:
        name = f"llvm.x86.avx512.vpdpbusd.{AT_ONCE * 8}"
        function = declared(builder, name, total.type, [total.type, activations.type, weights.type])
        return builder.call(function, [total, activations, weights])
    wide = ir.VectorType(SUM, AT_ONCE)
    products = builder.mul(builder.sext(activations, wide), builder.sext(weights, wide))
    even, odd = (picked(builder, products, range(first, AT_ONCE, 2)) for first in (0, 1))
    return builder.add(total, builder.add(even, odd))
