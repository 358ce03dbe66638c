"""Convolutions by tile registers (Intel AMX): emulated here, and as machine code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Epilogue, Window
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.target.tile_instructions import tile_instruction_for
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.convolutions_of import assert_near, conv_problem, random_operands, reference, with_epilogue
from tir.kernel_runs import poisoned, runs_here
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512
from tir.test_assembly import innermost_loops

pytestmark = pytest.mark.skipif(not runs_here("avx512"), reason="emulated tiles stand beside vectors of AVX-512")

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
CPU = cpu_target_of(XEON)
BF16, U8S8, S8S8 = ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"), ("int8", "int8", "int32")
TYPES = {"bf16": BF16, "u8s8": U8S8, "s8s8": S8S8}
SAME, PLAIN = Window(3, before=1, after=1), Window(3)


def _run(problem: ConvProblem, arrays: Sequence[np.ndarray], by_tiles: bool = True) -> np.ndarray:
    """The result by emulated tiles; whether there were products of tiles must be `by_tiles`."""
    emulator()
    kernel = emulated(conv_kernel(problem, CPU)).with_attr("global_symbol", "kernel")
    executable = tvm.compile(tvm.IRModule({"kernel": kernel}), target=AVX512)
    tensors = [tvm.runtime.tensor(op.layout.pack(a)) for op, a in zip(problem.parameters[:-1], arrays, strict=True)]
    shape = (len(arrays[0]), *(int(extent) for extent in problem.result.shape[1:]))
    out = poisoned(problem.result.layout.packed_shape(shape), problem.result.dtype)
    before = products_so_far()
    executable["kernel"](*tensors, out)
    assert (products_so_far() > before) == by_tiles
    return problem.result.layout.unpack(out.numpy(), shape)


def _check(problem: ConvProblem, batch: int = 1, by_tiles: bool = True) -> None:
    arrays = random_operands(problem, fresh_rng(), batch)
    assert_near(problem, _run(problem, arrays, by_tiles), reference(problem, arrays[0], arrays[1]))


CASES = {
    "same": ((32, 70), (9, 14), (SAME, SAME), 1),
    "same, ragged": ((40, 33), (5, 37), (SAME, SAME), 1),
    "inside": ((64, 32), (9, 19), (PLAIN, PLAIN), 1),
    "strided": ((32, 48), (11, 35), (Window(3, 2, 1, 1, 1), Window(3, 2, 1, 1, 1)), 1),
    "pointwise": ((30, 50), (3, 25), (Window(1), Window(1)), 1),
    "pointwise, some skipped": ((32, 50), (7, 39), (Window(1, 2), Window(1, 3)), 1),
    "dilated": ((32, 20), (12, 40), (Window(3, 1, 4, 4, 4), Window(3, 2, 3, 3, 3)), 1),
    "more padding than data": ((32, 40), (3, 12), (Window(7, 1, 1, 6, 2), Window(4, 1, 1, 3, 5)), 1),
    "sequence": ((32, 21), (70,), (Window(5, 2, 1, 2, 2),), 1),
    "short sequence": ((32, 21), (11,), (Window(5, 1, 1, 2, 2),), 1),
    "volume": ((16, 32), (4, 5, 18), (SAME, PLAIN, SAME), 1),
    "groups of 32": ((64, 64), (5, 17), (SAME, SAME), 2),
    "groups of 48": ((64, 192), (5, 17), (SAME, SAME), 4),
    "no whole group of channels": ((45, 33), (6, 17), (SAME, SAME), 1),
    "few channels": ((16, 16), (6, 20), (SAME, Window(5, 1, 1, 2, 2)), 1),
}


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", CASES)
def test_windows_and_groups(case, types):
    channels, extents, windows, groups = CASES[case]
    _check(conv_problem(CPU, channels, extents, windows, groups, dtype=types))


@pytest.mark.parametrize("types", [BF16, U8S8], ids=["bf16", "u8s8"])
def test_first_layer(types):
    window = Window(7, 2, 1, 3, 3)
    k0 = tile_instruction_for(CPU, *types).k0
    layout = PackedLayout((0, 2, 3, 1), (1,), (k0,))
    _check(conv_problem(CPU, (3, 64), (29, 45), (window, window), 1, 2, types, layout), 2)
