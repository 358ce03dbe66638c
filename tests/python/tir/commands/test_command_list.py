"""Host functions of command buffers, built and called: order, addresses, numbers and failures."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.driver.link.llvm_kernels import build_llvm
from relax_hetero.tir.commands.command_list import Address, Call, Tensor, host_function
from relax_hetero.tir.core.raw_kernel import raw_kernel, raw_signature


@T.prim_func(private=True, s_tir=True)
def scale(a: T.handle, k: T.float32, b: T.handle):
    n = T.int64()
    A = T.match_buffer(a, (n,), "float32")
    B = T.match_buffer(b, (n,), "float32")
    for i in range(n):
        B[i] = A[i] * k


@T.prim_func(private=True, s_tir=True)
def note(A: T.Buffer((1,), "float32"), B: T.Buffer((1,), "float32")):
    T.evaluate(T.call_packed("test.command_list.note", A[0]))
    B[0] = A[0]


SCALE, NOTE = tvm.ir.GlobalVar("scale"), tvm.ir.GlobalVar("note")


def built(kernels, params, calls):
    """The host function as a packed function."""
    target = rh.native("llvm")
    host = host_function("host", params, calls, target).with_attr("global_symbol", "host")
    functions = {gv: raw_kernel(func, raw_signature(func)).with_attr("target", target) for gv, func in kernels.items()}
    return build_llvm(target, tvm.IRModule({tvm.ir.GlobalVar("host"): host, **functions}))["host"]


def extent(value):
    return tirx.IntImm("int64", value)


def test_addresses_in_an_arena_and_numbers():
    """x -> arena + 64 n bytes -> arena -> y, with a number of the caller's and one of the buffer's."""
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "float32")
    x, y, arena = Tensor("x", [n], "float32"), Tensor("y", [n], "float32"), Tensor("arena", [n * 128], "uint8")
    far, near = Address(3, n * 64, "float32"), Address(3, 0, "float32")
    calls = [
        Call(SCALE, (Address(0, 0, "float32"), far), (n, k)),
        Call(SCALE, (far, near), (n, tirx.const(2.0, "float32"))),
        Call(SCALE, (near, Address(2, 0, "float32")), (n, k)),
    ]
    host = built({SCALE: scale}, [x, k, y, arena], calls)
    for count in (1, 7, 0):
        data = np.random.default_rng(count).standard_normal(count, "float32")
        out, memory = tvm.runtime.empty((count,), "float32"), tvm.runtime.empty((count * 128,), "uint8")
        host(tvm.runtime.tensor(data), 3.0, out, memory)
        np.testing.assert_allclose(out.numpy(), 18 * data, rtol=1e-6)
        np.testing.assert_allclose(memory.numpy()[count * 64 : count * 68].view("float32"), 3 * data, rtol=1e-6)


def test_nothing_runs_after_a_failure():
    values = []

    def noted(value):
        values.append(value)
        if len(values) == fails_at:
            raise KeyError("enough")

    tvm.register_global_func("test.command_list.note", noted, override=True)
    x, y = Tensor("x", [extent(1)], "float32"), Tensor("y", [extent(1)], "float32")
    call = Call(NOTE, (Address(0, 0, "float32"), Address(1, 0, "float32")), ())
    host = built({NOTE: note}, [x, y], [call] * 4)
    one, out = tvm.runtime.tensor(np.ones(1, "float32")), tvm.runtime.empty((1,), "float32")
    for fails_at in (1, 3, 4):
        values.clear()
        with pytest.raises(KeyError, match="enough"):
            host(one, out)
        assert len(values) == fails_at
    values.clear()
    fails_at = 9
    host(one, out)
    assert len(values) == 4


def test_parameters_are_checked_once_by_the_host_function():
    x, y = Tensor("x", [extent(4)], "float32"), Tensor("y", [extent(4)], "float32")
    call = Call(SCALE, (Address(0, 0, "float32"), Address(1, 0, "float32")), (extent(4), tirx.const(2.0, "float32")))
    host = built({SCALE: scale}, [x, y], [call])
    right = tvm.runtime.tensor(np.ones(4, "float32"))
    for wrong in (np.ones(5, "float32"), np.ones(4, "float64"), np.ones((2, 2), "float32")):
        with pytest.raises((TypeError, ValueError, RuntimeError), match="x"):
            host(tvm.runtime.tensor(wrong), right)
