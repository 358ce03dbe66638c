"""Raw kernels: plain functions of pointers and numbers, in place of TVM's calling convention."""

import pytest
import tvm
from tvm.ir import assert_structural_equal
from tvm.script import tirx as T

from relax_hetero.tir.core.raw_kernel import raw_kernel, raw_signature


@T.prim_func(s_tir=True)
def scale(a: T.handle, k: T.int32, b: T.handle):
    T.func_attr({"tirx.noalias": True})
    n = T.int64()
    A = T.match_buffer(a, (n, 16), "float32")
    B = T.match_buffer(b, (n * T.int64(2), 8), "float32")
    with T.sblock("root"):
        for i, j in T.grid(n, 16):
            B[i * T.int64(2) + T.Cast("int64", j // 8), j % 8] = A[i, j] * T.Cast("float32", k)


def test_before_and_after():
    signature = raw_signature(scale)
    assert [var.name for var in signature.buffers] == ["A", "B"]
    assert [var.name for var in signature.scalars] == ["n", "k"]
    assert [var.name for var in signature.numbers] == ["k"]
    assert signature.dtypes == ("float32", "float32")
    assert signature.extents[0][1] == 16 and signature.extents[1][1] == 8

    @T.prim_func(private=True, s_tir=True)
    def expected(A_data: T.handle("float32"), B_data: T.handle("float32"), n: T.int64, k: T.int32) -> T.int32:
        T.func_attr({"tirx.noalias": True})
        with T.sblock("root"):
            A = T.decl_buffer((n, 16), "float32", data=A_data)
            B = T.decl_buffer((n * T.int64(2), 8), "float32", data=B_data)
            for i, j in T.grid(n, 16):
                B[i * T.int64(2) + T.Cast("int64", j // 8), j % 8] = A[i, j] * T.Cast("float32", k)
            return 0

    assert_structural_equal(raw_kernel(scale, signature), expected)


def test_a_body_without_a_block_gets_one():
    """Relax passes crash on PrimFuncs without a block at the root."""

    @T.prim_func(private=True, s_tir=True)
    def fill(B: T.Buffer((4,), "int8")):
        for i in range(4):
            B[i] = T.int8(1)

    raw = raw_kernel(fill, raw_signature(fill))
    assert raw.body.block.name_hint == "root"
    assert str(raw.ret_type) == "int32"


@T.prim_func(private=True, s_tir=True)
def strided(a: T.handle, b: T.handle):
    s = T.int64()
    A = T.match_buffer(a, (4,), "float32", strides=(s,))
    B = T.match_buffer(b, (4,), "float32")
    B[0] = A[0]


@T.prim_func(private=True, s_tir=True)
def part(a: T.handle, b: T.handle):
    A = T.match_buffer(a, (4,), "float32", elem_offset=8)
    B = T.match_buffer(b, (4,), "float32")
    B[0] = A[0]


@T.prim_func(private=True, s_tir=True)
def hidden(a: T.handle, b: T.handle):
    n = T.int64()
    A = T.match_buffer(a, (n * 2,), "float32")
    B = T.match_buffer(b, (n + 1,), "float32")
    B[0] = A[0]


@T.prim_func(private=True, s_tir=True)
def pointer(a: T.handle("float32"), b: T.handle):
    B = T.match_buffer(b, (4,), "float32")
    B[0] = T.float32(1)


@pytest.mark.parametrize("kernel", [strided, part, hidden, pointer])
def test_signatures_that_raw_kernels_cannot_have(kernel):
    """Strides, parts of tensors, extents in expressions only, and memory that is not a tensor."""
    assert raw_signature(kernel) is None


def test_other_scopes_are_not_raw():
    buffer = tvm.tirx.decl_buffer((4,), "float32", "a", scope="shared")
    assert raw_signature(tvm.tirx.PrimFunc([buffer], tvm.tirx.Evaluate(0))) is None
