"""Kernels that find tensors in a table: what becomes of their parameters, and the CUDA code."""

import pytest
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as B

from relax_hetero.tir.commands.graph_functions import fetch_kernel
from relax_hetero.tir.commands.table_kernel import (
    fetching_kernel,
    is_one_launch,
    table_kernel,
    threads_of_one_block,
    waits_before_use,
)
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.core.raw_kernel import raw_kernel, raw_signature
from relax_hetero.tir.cuda.core import ptx
from relax_hetero.tir.cuda.core.launch import launch

CUDA = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})


@T.prim_func(s_tir=True)
def add(A: T.Buffer((64,), "float32"), C: T.Buffer((64,), "float32"), D: T.Buffer((64,), "float32")):
    with T.sblock("root"):
        S = T.sblock_alloc_buffer((64,), "float32", scope="shared")
        for b in T.thread_binding(2, thread="blockIdx.x"):
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("S"):
                    i = T.axis.spatial(64, b * 32 + t)
                    S[i] = A[i] + C[i]
            for t in T.thread_binding(32, thread="threadIdx.x"):
                with T.sblock("D"):
                    i = T.axis.spatial(64, b * 32 + t)
                    D[i] = S[i] * T.float32(2)


@T.prim_func(s_tir=True)
def two_launches(A: T.Buffer((64,), "float32"), C: T.Buffer((64,), "float32"), D: T.Buffer((64,), "float32")):
    with T.sblock("root"):
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("C"):
                i = T.axis.spatial(64, t)
                C[i] = A[i]
        for t in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("D"):
                i = T.axis.spatial(64, t)
                D[i] = C[i]


@T.prim_func(s_tir=True)
def host_loop(A: T.Buffer((64,), "float32"), C: T.Buffer((64,), "float32"), D: T.Buffer((64,), "float32")):
    with T.sblock("root"):
        for t in range(64):
            with T.sblock("C"):
                i = T.axis.spatial(64, t)
                D[i] = A[i] + C[i]


def raw(kernel):
    return raw_kernel(kernel, raw_signature(kernel)).with_attr("target", CUDA)


def cuda_code(kernel):
    """The CUDA code of a kernel as a host function would launch it."""
    gv = tvm.ir.GlobalVar("add_table")
    with Function("launch") as function:
        params = [B.arg(f"p{i}", B.handle(p.ty.element_type.dtype)) if is_pointer(p) else B.arg(f"p{i}", B.int32())
                  for i, p in enumerate(kernel.params)]  # fmt: skip
        with function.body():
            B.evaluate(tvm.ir.Call(gv, params, ret_ty="int32"))
    mod = tvm.IRModule({gv: kernel, "launch": function.result.with_attr("target", CUDA)})
    return tvm.tirx.build(mod, target=CUDA.with_host("llvm")).imports[0].inspect_source()


def is_pointer(param):
    return isinstance(param.ty, tvm.ir.PointerType)


@pytest.mark.parametrize("form", [lambda kernel: kernel, raw])
def test_is_one_launch(form):
    assert is_one_launch(form(add))
    assert not is_one_launch(form(two_launches))
    assert not is_one_launch(form(host_loop))


@pytest.mark.parametrize("entries", [(0,), (2,), (0, 1, 2), (0, 2)])
def test_entries_stand_for_pointers(entries):
    kernel = table_kernel(raw(add), entries)
    names = [f"{name}_entry" if i in entries else f"{name}_data" for i, name in enumerate("ACD")]
    assert [p.name for p in kernel.params] == ["table", *names]
    assert [is_pointer(p) for p in kernel.params] == [True, *(i not in entries for i in range(3))]
    code = cuda_code(kernel)
    body = code[code.rindex("__global__") :]
    for i, name in enumerate("ACD"):
        assert (f"float* {name} = ((float*)((float*)table[{name}_entry]));" in body) == (i in entries)
        assert (f"float* {name}_data" in body) == (i not in entries)


def waiting():
    """A kernel of two tensors and a constant that reads the constant before it waits."""
    with Function("waiting", registers="local") as function:
        a, c, d = (function.argument(name, [32], "float32") for name in "ACD")
        with function.body():
            views = [B.decl_buffer((32,), "float32", data=x.data) for x in (a, d)]
            with launch(1, 32) as place:
                held = B.alloc_buffer((1,), "float32", scope="local")
                ptx.launch_dependents()
                B.buffer_store(held, c[place.thread], [0])
                ptx.griddepcontrol_wait()
                B.buffer_store(views[1], held[0] + views[0][place.thread], [place.thread])
    return raw(function.result)


def test_the_table_is_read_after_the_wait():
    kernel = waiting()
    assert waits_before_use(kernel, (0, 2)) and not waits_before_use(kernel, (0, 1)), "C is used before"
    assert not waits_before_use(raw(add), (0,)), "it does not wait"
    for behind in (False, True):
        code = cuda_code(table_kernel(kernel, (0, 2), behind))
        body = code[code.rindex("__global__") :]
        places = [body.index(f"table[{name}_entry]") for name in "AD"]
        wait, let = body.index("griddepcontrol_wait"), body.index("griddepcontrol_launch_dependents")
        assert [place > wait for place in places] == [behind] * 2 and (let > wait) == behind
        assert body.count("launch_dependents") == 1


def test_blocks_that_share_a_multiprocessor_are_known_to_the_compiler():
    """Without the number threads get other registers, and `setmaxnreg` is dropped."""
    with Function("bounded", registers="local") as function:
        a, c = (function.argument(name, [32], "float32") for name in "AC")
        with function.body(), launch(1, 32, min_blocks_per_sm=3) as place:
            B.buffer_store(c, a[place.thread], [place.thread])
    kernel = function.result.with_attr("target", CUDA)
    kernel = raw_kernel(kernel, raw_signature(kernel))
    for form in (kernel, table_kernel(kernel, (0,))):
        assert "__launch_bounds__(32, 3)" in cuda_code(form)


def test_the_raw_kernel_stays_as_it_is():
    kernel = raw(add)
    text = kernel.script()
    table_kernel(kernel, (0, 2))
    assert kernel.script() == text
    assert "table" not in cuda_code(kernel).replace("add_table", "")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_kernel_that_fetches_the_table_counts_its_threads_in_one_type(dtype):
    """Loops over the same threads become one; TVM does not compile code that compares both types."""
    extent = tvm.tirx.IntImm(dtype, 32)

    @T.prim_func(s_tir=True)
    def one_block(A: T.Buffer((44,), "float32"), C: T.Buffer((44,), "float32")):
        with T.sblock("root"):
            S = T.sblock_alloc_buffer((4,), "float32", scope="local")
            for b in T.thread_binding(T.int64(1), thread="blockIdx.x"):
                for t in T.thread_binding(extent, thread="threadIdx.x"):
                    S[0] = A[t]
                    if b + T.int64(t // 8) < T.int64(1) and t % 8 < 3:
                        C[t] = S[0]

    kernel = raw(one_block)
    threads = threads_of_one_block(kernel)
    assert threads.value == 32 and threads.ty.dtype == dtype
    fetching = fetching_kernel(kernel, (0,), fetch_kernel("fetch", 3, CUDA, threads))
    assert [p.name for p in fetching.params][1:2] == ["table"]
    assert "A_entry" in cuda_code(fetching)


def test_scalars_stay():
    @T.prim_func(s_tir=True)
    def scale(a: T.handle, c: T.handle):
        m = T.int64()
        A = T.match_buffer(a, (m,), "float32")
        C = T.match_buffer(c, (m,), "float32")
        with T.sblock("root"):
            for b in T.thread_binding(m, thread="blockIdx.x"):
                with T.sblock("C"):
                    i = T.axis.spatial(m, b)
                    C[i] = A[i]

    kernel = table_kernel(raw(scale), (1,))
    assert [p.name for p in kernel.params] == ["table", "A_data", "C_entry", "m"]
