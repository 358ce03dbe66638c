"""Kernels that write a result over a tied operand: bit-equal results, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from marks import slow_but_for
from relax_hetero.encoding import Expression, PackedLayout
from relax_hetero.encoding.problem import ElementwiseProblem, Epilogue, Operand, Window
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.conv.convolution import conv_kernel
from relax_hetero.tir.core.ties import in_place, ties_of, with_ties
from relax_hetero.tir.elementwise.elementwise import elementwise_kernel
from relax_hetero.tir.matmul.matmul import matmul_kernel
from relax_hetero.tir.rows.rows import rows_kernel
from seeds import fresh_rng
from tir import convolutions_of, products_of
from tir.kernel_runs import NAMES, built, cpu_named, poisoned, same_bits, stored, target_of
from tir.rows import test_rows

pytestmark = pytest.mark.sampled(6)

# Products of SSE are those of AVX2, narrower; each of these takes seconds to compile.
WITH_TILES = [name for name in NAMES if name != "sse"]


def check_ties(cases: Sequence[tuple[tvm.tirx.PrimFunc, Sequence[np.ndarray], Sequence[int]]], name: str, folder: Path):
    """Run kernels out of place and over each tied operand; (kernel, operands as stored, shape of the result)."""
    functions = {}
    for i, (func, _, _) in enumerate(cases):
        functions[f"apart{i}"] = func.with_attr("tirx.noalias", True)
        functions.update({f"tied{i}_{tie[0]}": in_place(func, tie) for tie in ties_of(func)})
    module = built(functions, name, folder)
    for i, (func, arrays, shape) in enumerate(cases):
        out = poisoned(shape, str(func.params[-1].dtype))
        module[f"apart{i}"](*map(tvm.runtime.tensor, arrays), out)
        for operand, _ in ties_of(func):
            tensors = [tvm.runtime.tensor(array) for array in arrays]
            module[f"tied{i}_{operand}"](*tensors)
            assert same_bits(tensors[operand].numpy(), out.numpy()), (i, operand)
            others = [j for j in range(len(arrays)) if j != operand]
            assert all(same_bits(tensors[j].numpy(), arrays[j]) for j in others)


def plain(shape, dtype, index_map, layout=None, symbols=False):
    dims = tuple(f"s{name}" if symbols and name != "1" else size for size, name in zip(shape, index_map, strict=True))
    return Operand(dims, dtype, tuple(index_map), layout or PackedLayout.identity(len(shape)))


@pytest.mark.parametrize("name", NAMES)
def test_elementwise(name, tmp_path):
    rng = fresh_rng()
    cases = []
    for shape in ((1, 1), (37, 70)):
        x, y, bias = (rng.standard_normal(s).astype("float32") for s in (shape, shape, shape[1:]))
        for symbols in (False, True):
            full, row = plain(shape, "float32", "de", symbols=symbols), plain(shape[1:], "float32", "e", None, symbols)
            for text, operands, arrays in (
                ("add(multiply(x0, x0), exp(x1))", (full, full), (x, y)),
                ("maximum(add(x0, x1), x2)", (full, row, full), (x, bias, y)),
            ):
                problem = ElementwiseProblem(Expression.parse(text), operands, full)
                func = elementwise_kernel(problem, cpu_named(name))
                assert ties_of(func) == [(i, len(operands)) for i, o in enumerate(operands) if o is full]
                cases.append((func, arrays, shape))
    tiles = PackedLayout.parse("pack<outer=[0, 1] inner=[0:4, 1:32]>")
    x, y = (rng.standard_normal((37, 70)).astype("float32") for _ in range(2))
    packed = plain((37, 70), "float32", "de", tiles)
    problem = ElementwiseProblem(Expression.parse("add(x0, x1)"), (packed, plain((37, 70), "float32", "de")), packed)
    func = elementwise_kernel(problem, cpu_named(name))
    assert ties_of(func) == [(0, 2)]  # the other operand is stored otherwise
    cases.append((func, (stored(x, tiles, 0), y), tiles.packed_shape((37, 70))))
    check_ties(cases, name, tmp_path)


def test_another_element_type_is_not_tied():
    problem = ElementwiseProblem(
        Expression.parse('cast(x0, "float16")'), (plain((5,), "float32", "d"),), plain((5,), "float16", "d")
    )
    assert ties_of(elementwise_kernel(problem, cpu_named("avx2"))) == []


@pytest.mark.parametrize("name", WITH_TILES)
@pytest.mark.parametrize("symbolic", ["", "m"])
def test_residuals_of_products(name, symbolic, tmp_path):
    rng, target = fresh_rng(), target_of(name)
    residual = Expression.parse("relu(add(add(x0, x1), x2))")
    cases = []
    for m, k, n in ((1, 8, 16), (13, 19, 35), (30, 5, 97)):
        base = products_of.plain_problem(target, (m, k, n), symbolic=symbolic)
        epilogue = Epilogue(residual, (plain((base.rhs.shape[1],), "float32", "n"), base.result))
        problem = products_of.plain_problem(target, (m, k, n), symbolic=symbolic, epilogue=epilogue)
        func = matmul_kernel(problem, cpu_target_of(target))
        shapes = ((m, k), (k, n), (n,), (m, n))
        x, w, bias, more = (rng.standard_normal(shape).astype("float32") for shape in shapes)
        assert ties_of(func) == [(3, 4)]
        cases.append((func, (x, stored(w, problem.rhs.layout, 0), bias, more), (m, n)))
    check_ties(cases, name, tmp_path)


def test_residuals_of_products_in_blocks_of_k_are_not_tied():
    target = target_of("avx2")
    base = products_of.plain_problem(target, (16, 4096, 32))
    epilogue = Epilogue(Expression.parse("add(x0, x1)"), (base.result,))
    problem = products_of.plain_problem(target, (16, 4096, 32), epilogue=epilogue)
    assert ties_of(matmul_kernel(problem, cpu_target_of(target))) == []
    epilogue = Epilogue(Expression.parse("add(x0, x1)"), (plain((16, 32), "float32", "mn"),))
    of_any_k = products_of.plain_problem(target, (16, 64, 32), symbolic="k", epilogue=epilogue)
    assert ties_of(matmul_kernel(of_any_k, cpu_target_of(target))) == []


@pytest.mark.parametrize("name", WITH_TILES)
def test_residuals_of_convolutions(name, tmp_path):
    rng = fresh_rng()
    cases = []
    for channels, extents, groups, size in (
        ((3, 40), (9, 11), 1, 3),
        ((32, 64), (7, 5), 1, 1),
        ((24, 24), (6, 13), 24, 3),
        ((16, 32), (5, 7), 4, 3),
    ):
        window = Window(size, before=size // 2, after=size // 2)
        plain_problem = convolutions_of.conv_problem(name, channels, extents, [window, window], groups)
        problem = convolutions_of.with_epilogue(plain_problem, "relu(add(add(x0, x1), x2))", "n", "bny")
        func = conv_kernel(problem, cpu_named(name))
        assert ties_of(func) == [(3, 4)]
        arrays = convolutions_of.random_operands(problem, rng)
        operands = problem.parameters[:-1]
        inputs = [stored(array, operand.layout, 0) for array, operand in zip(arrays, operands, strict=True)]
        shape = problem.result.layout.packed_shape([int(extent) for extent in problem.result.shape])
        cases.append((func, inputs, shape))
    check_ties(cases, name, tmp_path)


@pytest.mark.parametrize("name", slow_but_for(NAMES, NAMES[:1]))
def test_kernels_of_rows(name, tmp_path):
    rng = fresh_rng()
    residual = test_rows.NORM.replace("x2", "x3").replace("x1", "x2").replace("x0", "add(x0, x1)")
    again = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); add(exp(subtract(x0, r0)), multiply(r1, x0))"
    cases = []
    for rows, n in ((3, 17), (4, 257)):
        x, y, scale, shift = (rng.standard_normal(s).astype("float32") for s in ((rows, n), (rows, n), (n,), (n,)))
        for text, arrays, maps, tied in (
            (test_rows.SOFTMAX, (x,), ("dn",), [0]),
            (test_rows.NORM, (x, scale, shift), ("dn", "n", "n"), [0]),
            (residual, (x, y, scale, shift), ("dn", "dn", "n", "n"), [0, 1]),
            (again, (x,), ("dn",), []),  # exponentials wait in the result while it is read again
        ):
            maps = [["d0" if c == "d" else c for c in m] for m in maps]
            for symbols in ({}, {"d0": "s0", "n": "s1"}):
                case = test_rows.problem(text, arrays, maps, (rows, n), ["d0", "n"], "float32", symbols)
                func = rows_kernel(case, cpu_named(name))
                assert ties_of(func) == [(i, len(arrays)) for i in tied]
                cases.append((func, arrays, (rows, n)))
    check_ties(cases, name, tmp_path)


@T.prim_func(s_tir=True)
def copies_first(
    data: T.Buffer((8, 4), "float32"), row: T.Buffer((4,), "float32"), result: T.Buffer((8, 4), "float32")
):
    T.func_attr({"tirx.noalias": True, "global_symbol": "copies_first"})
    with T.sblock("root"):
        T.reads()
        T.writes()
        for i in T.parallel(8):
            for j in range(4):
                result[i, j] = data[i, j]
        for j in range(4):
            result[3, j] = row[j]


@T.prim_func(s_tir=True)
def expected(data: T.Buffer((8, 4), "float32"), row: T.Buffer((4,), "float32")):
    T.func_attr({"tirx.noalias": False})
    with T.sblock("root"):
        T.reads()
        T.writes()
        T.evaluate(0)
        for j in range(4):
            data[3, j] = row[j]


def test_copies_fall_away():
    func = with_ties(copies_first, [(0, 2)])
    assert ties_of(func) == [(0, 2)]
    tvm.ir.assert_structural_equal(in_place(func, (0, 2)), expected.without_attr("global_symbol"))
    row = np.ones(4, "float32")
    data = tvm.runtime.tensor(np.zeros((8, 4), "float32"))
    tvm.compile(tvm.IRModule({"kernel": in_place(func, (0, 2)).with_attr("global_symbol", "kernel")}))["kernel"](
        data, tvm.runtime.tensor(row)
    )
    np.testing.assert_array_equal(data.numpy(), np.eye(8, dtype="float32")[3][:, None] * row)


def test_operands_of_other_types_or_shapes_are_not_tied():
    assert ties_of(with_ties(copies_first, [(1, 2)])) == []


def test_accesses_of_tied_memory_are_not_noalias():
    problem = ElementwiseProblem(
        Expression.parse("exp(x0)"), (plain((64,), "float32", "d"),), plain((64,), "float32", "d")
    )
    target = target_of("avx2")
    func = in_place(elementwise_kernel(problem, cpu_target_of(target)), (0, 1))
    module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
    text = tvm.compile(module, target=target).mod.inspect_source("ll")
    body = text[text.index("kernel_compute_") :] if "kernel_compute_" in text else text
    tags = {
        line.rpartition("!tbaa ")[2] for line in body.splitlines() if "<8 x float>, ptr" in line and "!tbaa" in line
    }
    assert "noalias" not in body.partition("{")[0]
    assert len(tags) <= 1
