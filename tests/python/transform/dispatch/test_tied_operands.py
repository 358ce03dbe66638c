"""Kernels of ops tie what they read only where they store: run over the operand, they give the same bits."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import tirx as T

from marks import slow_but_for
from relax_hetero.driver.link.llvm_kernels import build_llvm
from relax_hetero.tir.core.ties import in_place, ties_of
from relax_hetero.transform.dispatch.schedule_cpu import schedule_cpu
from relax_hetero.transform.dispatch.tied_operands import annotate_ties
from relax_hetero.transform.ir.kernels import called_prim_func
from relax_hetero.transform.ir.rewriting import walk_bindings
from seeds import fresh_rng
from tir.kernel_runs import VECTOR_NAMES, poisoned, same_bits, target_of
from transform.dispatch.test_schedule_cpu_maps import CASES
from transform.scheduled_ops import formed, inputs

# Operands that some kernels tie on AVX-512, by the numbers of their parameters.
EXPECTED = {
    "a row": [(0, 1)],
    "a chain": [(0, 2), (1, 2)],
    "expensive and broadcast": [],  # rows of 40 elements are not whole vectors, so the last are computed twice
    "integers": [(0, 2), (1, 2)],
    "cast": [],
    "concat of a row": [],
}


def only_call(mod):
    """The kernel of a module's only call, and which of the function's parameters it reads; None for other modules."""
    bindings = [b for b in walk_bindings(mod["main"]) if called_prim_func(mod, b.value) is not None]
    params = list(mod["main"].params)
    if len(bindings) != 1 or not all(arg in params for arg in bindings[0].value.args[1]):
        return None
    kernel, args = bindings[0].value.args[0], bindings[0].value.args[1]
    return mod[kernel], [params.index(arg) for arg in args]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_scheduled", [True, False])
@pytest.mark.parametrize("target", slow_but_for(VECTOR_NAMES, VECTOR_NAMES[:1]))
def test_results_over_their_operands(target, is_scheduled):
    functions, runs, tied = {}, [], {}
    for i, (name, (build, operands)) in enumerate(CASES.items()):
        mod = formed(build, operands, target)
        call = only_call(schedule_cpu(mod) if is_scheduled else mod)
        if call is None:
            continue
        kernel, order = call
        tied[name] = sorted(ties_of(kernel))
        if tied[name]:
            functions[f"apart{i}"] = kernel.with_attr("tirx.noalias", True)
        for operand, result in tied[name]:
            functions[f"tied{i}_{operand}"] = in_place(kernel, (operand, result))
            runs.append((i, operand, [inputs(operands, fresh_rng())[number] for number in order]))
    assert len(runs) > 10
    if target == "avx512" and is_scheduled:
        assert {name: tied[name] for name in EXPECTED} == EXPECTED
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    module = build_llvm(target_of(target), tvm.IRModule(named))
    for i, operand, arrays in runs:
        out = poisoned(arrays[operand].shape, str(arrays[operand].dtype))
        module[f"apart{i}"](*map(tvm.runtime.tensor, arrays), out)
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        module[f"tied{i}_{operand}"](*tensors)
        assert same_bits(tensors[operand].numpy(), out.numpy()), (i, operand)
        assert all(same_bits(tensors[j].numpy(), array) for j, array in enumerate(arrays) if j != operand)


def test_only_reads_at_the_place_of_the_store_are_tied():
    @I.ir_module
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def here_and_there(
            A: T.Buffer((8, 8), "float32"),
            B: T.Buffer((8, 8), "float32"),
            row: T.Buffer((8,), "float32"),
            C: T.Buffer((8, 8), "float32"),
        ):
            for i, j in T.grid(8, 8):
                with T.sblock("add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj] + B[vj, vi] + row[vj]

        @T.prim_func(private=True, s_tir=True)
        def twice(A: T.Buffer((8,), "float32"), C: T.Buffer((8,), "float32")):
            for i in range(8):
                with T.sblock("add"):
                    vi = T.axis.spatial(8, i)
                    C[vi] = A[vi] + A[7 - vi]

        @T.prim_func(private=True, s_tir=True)
        def two_results(A: T.Buffer((8,), "float32"), C: T.Buffer((8,), "float32"), D: T.Buffer((8,), "float32")):
            for i in range(8):
                with T.sblock("first"):
                    vi = T.axis.spatial(8, i)
                    C[vi] = A[vi] + T.float32(1)
            for i in range(8):
                with T.sblock("second"):
                    vi = T.axis.spatial(8, i)
                    D[vi] = A[vi] + T.float32(2)

        @T.prim_func(private=True, s_tir=True)
        def total(A: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
            for i, j, k in T.grid(8, 8, 8):
                with T.sblock("sum"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + A[vi, vk]

    ties = {gv.name_hint: ties_of(func) for gv, func in annotate_ties(Before).functions.items()}
    assert ties == {"here_and_there": [(0, 3)], "twice": [], "two_results": [(0, 2)], "total": []}
