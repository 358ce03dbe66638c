"""Rounding to bfloat16: numpy's numbers on every machine, one instruction where there is one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import tirx as T

from relax_hetero.driver.link.link import build_group
from relax_hetero.tir.core.builder import Function, lane_indices, loop
from relax_hetero.tir.math.casts import bfloat16_bits
from seeds import fresh_rng
from tir.products_of import AVX2, AVX512, SSE

COUNT = 1 << 12
SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.3895e38, 1.00390625, 1.01171875, 1.5]
MACHINES = {
    "avx512": (AVX512, 16),
    "avx512 by eight": (AVX512, 8),
    "avx2": (AVX2, 8),
    "sse": (SSE, 4),
    "scalars": (AVX512, 1),
}


def kernel(lanes: int) -> tvm.tirx.PrimFunc:
    function = Function("rounded")
    with function:
        extent = [tvm.tirx.IntImm("int64", COUNT)]
        source, result = function.argument("source", extent, "float32"), function.argument("result", extent, "uint16")
        with function.body(), loop(COUNT // lanes) as i:
            index = lane_indices(i * lanes, lanes)
            T.buffer_store(result, bfloat16_bits(source[index]), [index])
    return function.result


@pytest.mark.parametrize(("target", "lanes"), MACHINES.values(), ids=MACHINES)
def test_numbers(target: tvm.target.Target, lanes: int) -> None:
    rng = fresh_rng()
    source = rng.standard_normal(COUNT).astype("float32") * np.float32(2.0) ** rng.integers(-100, 100, COUNT)
    source[: len(SPECIAL)] = SPECIAL
    # Halves between two neighbours, which go to the even one.
    source.view("uint32")[100:2000] = source.view("uint32")[100:2000] & 0xFFFF0000 | 0x8000
    source = source.astype("float32")
    built = build_group(target, tvm.IRModule({"rounded": kernel(lanes)}), target)
    result = tvm.runtime.tensor(np.full(COUNT, 0x5555, "uint16"))
    built["rounded"](tvm.runtime.tensor(source), result)
    actual, expected = (bits.view(ml_dtypes.bfloat16).astype("float32") for bits in (result.numpy(), _rounded(source)))
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def _rounded(source: np.ndarray) -> np.ndarray:
    return source.astype(ml_dtypes.bfloat16).view("uint16")


def test_one_instruction_where_the_machine_has_it() -> None:
    text = build_group(AVX512, tvm.IRModule({"rounded": kernel(16)}), AVX512).inspect_source("asm")
    assert "vcvtneps2bf16" in text
    assert "vpsrld" not in text


def test_no_library_is_called_where_it_has_none() -> None:
    text = build_group(AVX2, tvm.IRModule({"rounded": kernel(8)}), AVX2).inspect_source("asm")
    assert "truncsfbf2" not in text
