"""Costs of types: how fast each device multiplies one, against float32 on the same device; a table.

Rates are of whole products and convolutions of many rows, whose operands are rounded in the kernels before: half the
bytes of few rows, which memory bounds, are worth more than any of them.
"""

from __future__ import annotations

import tvm

from .amx_instructions import amx_instruction_for
from .backend import backend_of
from .cpu_target import cpu_target_of
from .dot_instructions import dot_instruction_for
from .element_types import HALF_TYPES, TF32
from .gpu_target import gpu_target_of

# By instruction set and `DotInstruction.name`. Measured on AVX-512: "dpbf16" on a Zen 5, "bf16" and "fmaph" on a Xeon,
# whose own instruction for pairs of bfloat16 is slower still. "bfmmla" multiplies four times the numbers of an "fma"
# (Arm's optimization guides; not measured).
_CPU_RATES = {
    ("avx512", "dpbf16"): 2.0,
    ("avx512", "bf16"): 0.6,
    ("avx512", "cvtph"): 0.6,
    ("avx512", "fmaph"): 1.8,
    ("neon", "bfmmla"): 4.0,
}

# Dense products by tensor cores and by the other units (data sheets of A100, L40, H100): at least so many times.
_TENSOR_RATES = {**dict.fromkeys(HALF_TYPES, 8.0), TF32: 4.0}


def product_rate(target: tvm.target.Target, dtype: str) -> float:
    """Multiply-adds of operands of `dtype`, with sums in float32, in the time of one of float32.

    1.0 for float32, and where nothing is known.
    """
    if dtype == "float32":
        return 1.0
    return backend_of(target).product_rate(target, dtype)


def gpu_product_rate(target: tvm.target.Target, dtype: str) -> float:
    """The rate of an NVIDIA GPU's tensor cores."""
    is_known = gpu_target_of(target).multiplies(dtype, dtype, "float32")
    return _TENSOR_RATES.get(dtype, 1.0) if is_known else 1.0


def cpu_product_rate(target: tvm.target.Target, dtype: str) -> float:
    """The rate of a CPU's instructions for `dtype`."""
    if dtype == TF32:
        return 1.0
    cpu = cpu_target_of(target)
    tiles = amx_instruction_for(cpu, dtype, dtype, "float32")
    if tiles is not None:
        return float(tiles.rate)
    dot = dot_instruction_for(cpu, dtype, dtype, "float32")
    return 1.0 if dot is None else _CPU_RATES.get((cpu.isa.name, dot.name), 1.0)
