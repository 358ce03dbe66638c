"""Convolutions by tile registers (Intel AMX): emulated here, and as machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import ConvProblem, Epilogue, Window
from relax_hetero.target.amx_instructions import amx_instruction_for
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.conv import amx_conv, convolution
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.convolutions_of import assert_near, conv_problem, random_operands, reference, with_epilogue
from tir.kernel_runs import poisoned, runs_here
from tir.matmul.tile_emulator import emulated, emulator, products_so_far
from tir.products_of import AVX512

pytestmark = pytest.mark.skipif(not runs_here("avx512"), reason="emulated tiles stand beside vectors of AVX-512")

XEON = tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
CPU = cpu_target_of(XEON)
BF16, U8S8, S8S8 = ("bfloat16", "bfloat16", "float32"), ("uint8", "int8", "int32"), ("int8", "int8", "int32")
TYPES = {"bf16": BF16, "u8s8": U8S8, "s8s8": S8S8}
SAME, PLAIN = Window(3, before=1, after=1), Window(3)


def _compiled(problem: ConvProblem, with_vectors: bool = False) -> tvm.runtime.Executable:
    """The kernel; without its path by vectors, which takes most of the compile time, unless `with_vectors`."""
    emulator()
    with pytest.MonkeyPatch.context() as patch:
        if not with_vectors:
            patch.setattr(convolution, "amx_or_vectors", lambda with_amx, _: with_amx())
        kernel = emulated(conv_kernel(problem, CPU)).with_attr("global_symbol", "kernel")
    return tvm.compile(tvm.IRModule({"kernel": kernel}), target=AVX512)


def _call(
    executable: tvm.runtime.Executable, problem: ConvProblem, arrays: Sequence[np.ndarray], by_tiles: bool | None
) -> np.ndarray:
    """The result by emulated tiles; whether there were products of tiles must be `by_tiles` (None: either)."""
    tensors = [tvm.runtime.tensor(op.layout.pack(a)) for op, a in zip(problem.parameters[:-1], arrays, strict=True)]
    shape = (len(arrays[0]), *(int(extent) for extent in problem.result.shape[1:]))
    out = poisoned(problem.result.layout.packed_shape(shape), problem.result.dtype)
    before = products_so_far()
    executable["kernel"](*tensors, out)
    assert by_tiles in (None, products_so_far() > before)
    return problem.result.layout.unpack(out.numpy(), shape)


def _run(problem: ConvProblem, arrays: Sequence[np.ndarray], by_tiles: bool = True) -> np.ndarray:
    return _call(_compiled(problem, not by_tiles), problem, arrays, by_tiles)


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
    "three tiles of output channels": ((32, 45), (5, 17), (SAME, SAME), 1),
    "groups of 64": ((64, 128), (5, 17), (SAME, SAME), 2),
    "groups of 48": ((64, 192), (5, 17), (SAME, SAME), 4),
    "no whole group of channels": ((45, 33), (6, 17), (SAME, SAME), 1),
    "few channels": ((16, 16), (6, 20), (SAME, Window(5, 1, 1, 2, 2)), 1),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", CASES)
def test_windows_and_groups(case, types):
    channels, extents, windows, groups = CASES[case]
    _check(conv_problem(CPU, channels, extents, windows, groups, dtype=types))


side = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    groups=st.sampled_from([1, 1, 1, 2, 3]),
    ins=st.integers(4, 150),
    outs=st.integers(1, 70),
    sides=st.lists(side, min_size=1, max_size=3),
    types=st.sampled_from([*TYPES.values(), ("uint8", "uint8", "int32"), ("int8", "uint8", "int32")]),
    batch=st.integers(1, 2),
)
def test_any_convolution(groups, ins, outs, sides, types, batch):
    windows = tuple(Window(size, stride, dilation, pad, 1) for _, size, stride, dilation, pad in sides)
    max_extent = 40 if len(sides) < 3 else 12
    extents = [
        max(min(extent, max_extent), window.dilated_extent) for (extent, *_), window in zip(sides, windows, strict=True)
    ]
    outs = -(-outs // 16) * 16 if groups > 1 else outs
    problem = conv_problem(CPU, (groups * ins, groups * outs), extents, windows, groups, batch, types)
    arrays = random_operands(problem, fresh_rng(), batch)
    # Vectors compute what tiles do not pay for.
    got = _call(_compiled(problem), problem, arrays, by_tiles=None)
    assert_near(problem, got, reference(problem, arrays[0], arrays[1]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_first_layer(types):
    """Three channels, padded to whole groups: the places of a row of the window are one step."""
    window = Window(7, 2, 1, 3, 3)
    layout = PackedLayout((0, 2, 3, 1), (1,), (amx_instruction_for(CPU, *types).k0,))
    _check(conv_problem(CPU, (3, 64), (29, 45), (window, window), 1, 2, types, layout), 2)


def test_a_symbolic_batch():
    problem = conv_problem(CPU, (32, 40), (5, 15), (SAME, SAME), batch="s0", dtype=S8S8)
    executable = _compiled(problem, with_vectors=True)
    for batch in (0, 1, 3):
        arrays = random_operands(problem, fresh_rng(), batch)
        got = _call(executable, problem, arrays, by_tiles=batch > 0)
        assert_near(problem, got, reference(problem, arrays[0], arrays[1]))


@pytest.mark.parametrize(("extents", "types"), [((9, 1), BF16), ((9, 3), U8S8)], ids=["bf16", "u8s8"])
def test_few_places_are_left_to_vectors(extents, types):
    _check(conv_problem(CPU, (32, 32), extents, (SAME, SAME), dtype=types), by_tiles=False)


def test_without_permission_the_same_kernel_computes_by_vectors():
    permission = ctypes.c_int.in_dll(emulator(), "tiles_permission")
    permission.value = 0
    try:
        _check(conv_problem(CPU, (32, 40), (5, 15), (SAME, SAME), dtype=S8S8), by_tiles=False)
    finally:
        permission.value = 1


def test_requantized_between_steps():
    """Bias, scale, residual in bytes, bytes out; the last tile of a row and the last panel are partly there."""
    problem = conv_problem(CPU, (37, 70), (5, 35), (SAME, SAME), dtype=U8S8)
    problem = with_epilogue(problem, 'multiply(cast(add(x0, x1), "float32"), 0.00048828125)', "n")
    text = f'cast(clip(round(add({problem.epilogue.expression}, cast(x2, "float32"))), 0.0, 255.0), "uint8")'
    residual = replace(problem.result, dtype="uint8")
    epilogue = Epilogue(Expression.parse(text), (*problem.epilogue.operands, residual))
    problem = replace(problem, epilogue=epilogue, result=residual)
    arrays = random_operands(problem, fresh_rng())
    sums = (reference(problem, *arrays[:2]) + arrays[2]) * 0.00048828125
    np.testing.assert_array_equal(_run(problem, arrays), np.clip(np.round(sums + arrays[3]), 0, 255))


def test_places_that_two_tiles_share_are_finished_once():
    """A residual that is read in place of the result."""
    problem = conv_problem(CPU, (32, 40), (5, 19), (SAME, PLAIN), dtype=BF16)
    problem = with_epilogue(problem, "add(x0, x1)", "bny")
    arrays = random_operands(problem, fresh_rng())
    stored = [tvm.runtime.tensor(op.layout.pack(a)) for op, a in zip(problem.parameters[:-1], arrays, strict=True)]
    _compiled(problem)["kernel"](*stored, stored[2])
    got = problem.result.layout.unpack(stored[2].numpy(), arrays[2].shape)
    assert_near(problem, got, reference(problem, *arrays[:2]) + arrays[2])


def test_nan_of_another_group_and_beyond_the_image_is_not_read():
    problem = conv_problem(CPU, (46, 64), (4, 17), (SAME, SAME), 2, dtype=BF16)
    data, weight = random_operands(problem, fresh_rng())
    data[:, 23:] = np.nan
    got = _run(problem, [data, weight])
    assert np.isfinite(got[:, :32]).all() and np.isnan(got[:, 32:]).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shape", [(64, 64, 56), (3, 64, 112), (512, 512, 7)], ids=str)
def test_main_loop_multiplies_all_tiles_that_it_loads(types, shape):
    ins, outs, size = shape
    window = Window(7, 2, 1, 3, 3) if ins == 3 else SAME
    problem = conv_problem(CPU, (ins, outs), (size, size), (window, window), dtype=types)
    kernel = conv_kernel(problem, CPU).with_attr("global_symbol", "kernel")
    assembly = tvm.compile(tvm.IRModule({"kernel": kernel}), target=XEON).mod.inspect_source("asm")
    name = amx_instruction_for(CPU, *types).instruction.split(".")[-1]
    counts = [sum(word in line for line in assembly.splitlines()) for word in (name, "tileload", "tilestored")]
    products, loads, stores = counts
    # Counts of a pair of tiles, and of a single one that is left.
    assert products % 4 in (0, 2) and 4 <= products <= loads <= products * 3 // 2 and stores <= products
    assert not any(("tileload" in line or "tilestored" in line) and "(%rsp" in line for line in assembly.splitlines())


def test_blocks_of_a_row_copy_the_rows_that_the_window_meets(monkeypatch):
    monkeypatch.setattr(amx_conv, "BLOCK_BYTES", 1)
    monkeypatch.setattr(amx_conv, "MIN_BLOCK_PIXELS", 1)
    for outer in (Window(3, 2, 3, 3, 3), Window(2, 1, 1, 1, 0)):
        _check(conv_problem(CPU, (32, 40), (9, 18), (outer, SAME), dtype=U8S8))
