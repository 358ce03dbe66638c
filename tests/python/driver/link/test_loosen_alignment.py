"""Kernels run on tensors at any multiple of 16 bytes, and compile to nothing that would fault there."""

import re

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from in_place import InPlace
from relax_hetero.driver.link.link import build_group
from relax_hetero.driver.link.llvm_kernels import ARGUMENT_ALIGNMENT, loosen_alignment

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "mtriple": "x86_64-unknown-linux-gnu"}


@I.ir_module
class Kernels:
    @T.prim_func(s_tir=True)
    def blocks(a: T.Buffer((1024,), "float32"), b_handle: T.handle):
        T.func_attr({"global_symbol": "blocks", "tirx.noalias": True})
        n = T.int64()
        b = T.match_buffer(b_handle, (n,), "float32")
        for i in T.vectorized(16):
            with T.sblock("scale"):
                vi = T.axis.spatial(16, i)
                b[vi] = a[vi] * T.float32(3)

    @T.prim_func
    def views(a: T.Buffer((1024,), "float32"), b: T.Buffer((1024,), "float32")):
        T.func_attr({"global_symbol": "views", "tirx.noalias": True})
        rows = T.decl_buffer((64, 16), "float32", data=a.data)
        for i in T.vectorized(16):
            b[i] = rows[0, i] * T.float32(3)


@I.ir_module
class Expected:
    @T.prim_func(s_tir=True)
    def blocks(a: T.Buffer((1024,), "float32", align=16), b_handle: T.handle):
        T.func_attr({"global_symbol": "blocks", "tirx.noalias": True})
        n = T.int64()
        b = T.match_buffer(b_handle, (n,), "float32", align=16)
        for i in T.vectorized(16):
            with T.sblock("scale"):
                vi = T.axis.spatial(16, i)
                b[vi] = a[vi] * T.float32(3)


def test_parameters_and_nothing_else_change():
    after = loosen_alignment(Kernels["blocks"])
    tvm.ir.assert_structural_equal(after, Expected["blocks"], map_free_vars=True)
    assert loosen_alignment(after).same_as(after)


def test_code_of_linked_kernels_takes_any_address():
    target = tvm.target.Target(V4)
    asm = build_group(target, Kernels, target).inspect_source("asm")
    moves = re.findall(r"(\w+)\s.*\((?:%r[ds]i)\), %zmm|(\w+)\s.*%zmm\d+, \(%r", asm)
    assert moves and not [m for pair in moves for m in pair if m.startswith("vmova")]


@I.ir_module
class Product:
    @R.function
    def main(x: R.Tensor(("n", 64), "float32"), w: R.Tensor((64, 100), "float32")):
        with R.dataflow():
            y = R.add(R.tanh(R.multiply(R.matmul(x, w), R.const(1 / 64, "float32"))), R.const(1.0, "float32"))
            R.output(y)
        return y


@pytest.fixture(scope="module")
def product():
    return rh.vm.VirtualMachine(rh.compile(Product))


@pytest.mark.parametrize("address", range(0, 64, 4))
def test_models_take_arrays_at_any_address(product, address):
    memory = np.random.default_rng(address).random(64 * 33 + 64, dtype="float32")
    begin = -memory.ctypes.data % 64 // 4 + address // 4
    x = memory[begin : begin + 64 * 33].reshape(33, 64)
    w = np.random.default_rng(1).random((64, 100), dtype="float32")
    for _ in range(2):
        result = product["main"](x, w).numpy()
        np.testing.assert_allclose(result, np.tanh(x.astype("float64") @ w / 64) + 1, rtol=1e-5)


def test_modules_that_may_write_to_arguments_say_so(product):
    about = product.executable.metadata
    assert (about.alignment, about.writes_arguments) == (ARGUMENT_ALIGNMENT, False)
    exe = rh.compile(InPlace)
    assert exe.signature("main").copied == ("x",)
    x = np.arange(4, dtype="float32")
    x.flags.writeable = False
    vm = rh.vm.VirtualMachine(exe)
    for _ in range(3):
        np.testing.assert_array_equal(vm["main"](x)[0].numpy(), np.arange(4) + 1)
    np.testing.assert_array_equal(x, np.arange(4))
