"""Table of the throughput of products by element type, relative to float32 on the same device.

Rates are for products and convolutions of many rows, whose operands earlier kernels have rounded. Products of few rows
are memory-bound, where half the bytes gain more.
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
# whose vdpbf16ps is even slower; "vnni" with weights of 4 bits and of bytes on Zen 4 and 5; "avxvnni" (2.3)
# and "pmaddwd" (AVX2 1.7 to 1.9, SSE 2.0, AVX-512 0.9) with weights of 4 bits on one thread of a Zen 5. "bfmmla" does
# four times the work of an "fma" (Arm's optimization guides, unmeasured).
_CPU_RATES = {
    ("avx512", "dpbf16"): 2.0,
    ("avx512", "bf16"): 0.6,
    ("avx512", "cvtph"): 0.6,
    ("avx512", "fmaph"): 1.8,
    ("neon", "bfmmla"): 4.0,
    ("avx512", "vnni"): 2.5,
    ("avx2", "avxvnni"): 2.5,
    ("avx2", "pmaddwd"): 1.8,
    ("sse", "pmaddwd"): 2.0,
}

_DEQUANTIZED_TILES_RATE = 1.2
"""Rate of AMX with quantized weights, most of whose time is dequantization: measured on a Xeon with a mixture of 128
experts and 4,096 tokens; 512 tokens have half of it."""

QUANTIZED = "quantized"  # name of block-quantized weights among element types of products, on CPUs

# Minimum ratio of dense tensor-core throughput to float32 throughput (data sheets of A100, L40, H100).
_TENSOR_RATES = {**dict.fromkeys(HALF_TYPES, 8.0), TF32: 4.0}


def product_rate(target: tvm.target.Target, dtype: str) -> float:
    """Throughput of products of `dtype` with sums in float32, relative to float32; 1.0 if unknown."""
    return 1.0 if dtype == "float32" else backend_of(target).product_rate(target, dtype)


def gpu_product_rate(target: tvm.target.Target, dtype: str) -> float:
    """The rate of an NVIDIA GPU's tensor cores."""
    has_instruction = gpu_target_of(target).multiplies(dtype, dtype, "float32")
    return _TENSOR_RATES.get(dtype, 1.0) if has_instruction else 1.0


def cpu_product_rate(target: tvm.target.Target, dtype: str) -> float:
    """The rate of a CPU's instructions for `dtype`."""
    if dtype == TF32:
        return 1.0
    cpu = cpu_target_of(target)
    # AMX multiplies many rows by quantized weights, too.
    tile_type = "bfloat16" if dtype == QUANTIZED else dtype
    amx = amx_instruction_for(cpu, tile_type, tile_type, "float32")
    if amx is not None:
        return _DEQUANTIZED_TILES_RATE if dtype == QUANTIZED else float(amx.rate)
    types = ("uint8", "int8", "int32") if dtype == QUANTIZED else (dtype, dtype, "float32")
    dot = dot_instruction_for(cpu, *types)
    return 1.0 if dot is None else _CPU_RATES.get((cpu.isa.name, dot.name), 1.0)
