"""Small executables on one and two CPU devices, compiled once a session."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh


@I.ir_module
class Chain:
    """exp on llvm:0, a transfer, addition on llvm:1; both intermediate values are returned."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(x: R.Tensor(("n", 4), "float32", "llvm:0"), w: R.Tensor((4,), "float32", "llvm:1")):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 4), "float32", "llvm:0") = R.exp(x)
            moved: R.Tensor((n, 4), "float32", "llvm:1") = R.to_vdevice(y, "llvm:1")
            z: R.Tensor((n, 4), "float32", "llvm:1") = R.add(moved, w)
            R.output(y, z)
        return (z, y)

    @R.function
    def twice(x: R.Tensor((4,), "float32", "llvm:1")):
        with R.dataflow():
            y: R.Tensor((4,), "float32", "llvm:1") = R.add(x, x)
            R.output(y)
        return y


@I.ir_module
class Plumbing:
    """Functions that return their arguments."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0)]})

    @R.function
    def identity(x: R.Tensor(("n",), "float32", "llvm:0")):
        return x

    @R.function
    def reshape(x: R.Tensor((2, 3), "float32", "llvm:0")):
        with R.dataflow():
            y: R.Tensor((6,), "float32", "llvm:0") = R.reshape(x, R.shape([6]))
            R.output(y)
        return y

    @R.function
    def nested(
        t: R.Tuple(R.Tensor(("n",), "float32", "llvm:0"), R.Tuple(R.Tensor(("n",), "int64", "llvm:0"))),
        s: R.Shape(["n", 2]),
        k: R.Prim("int64"),
    ):
        return (t[1][0], (t[0], s))

    @R.function
    def scalar(x: R.Tensor((), "float32", "llvm:0")):
        with R.dataflow():
            y: R.Tensor((), "float32", "llvm:0") = R.add(x, x)
            R.output(y)
        return y

    @R.function
    def same_extent(a: R.Tensor(("n",), "float32", "llvm:0"), b: R.Tensor(("n",), "float32", "llvm:0")):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n,), "float32", "llvm:0") = R.add(a, b)
            R.output(y)
        return y


@I.ir_module
class Weighted:
    """One input and two parameters that `set_params` gives."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(
        x: R.Tensor(("n",), "float32", "llvm:1"),
        w: R.Tensor(("n",), "float32", "llvm:1"),
        b: R.Tensor((1,), "float32", "llvm:1"),
    ):
        R.func_attr({"num_input": 1})
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n,), "float32", "llvm:1") = R.multiply(x, w)
            z: R.Tensor((n,), "float32", "llvm:1") = R.add(y, b)
            R.output(z)
        return z


@I.ir_module
class Failing:
    """A kernel written in Python that raises for negative numbers."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0)]})

    @R.function(pure=False)
    def main(x: R.Tensor((2,), "float32", "llvm:0")):
        y: R.Tensor((2,), "float32", "llvm:0") = R.call_packed(
            "relax_hetero.test.refuse_negative", x, ty_args=[R.Tensor((2,), "float32", "llvm:0")]
        )
        return y


# Constants as lowering leaves them: one tuple, the last parameter. Here it is written by hand.
@I.ir_module
class Lifted:
    """x + constant on llvm:0, the same constant's twin on llvm:1 returned as it is."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

    @R.function
    def main(
        x: R.Tensor((1024,), "float32", "llvm:0"),
        constants: R.Tuple(R.Tensor((1024,), "float32", "llvm:0"), R.Tensor((1024,), "float32", "llvm:1")),
    ):
        c: R.Tensor((1024,), "float32", "llvm:0") = constants[0]
        d: R.Tensor((1024,), "float32", "llvm:1") = constants[1]
        y: R.Tensor((1024,), "float32", "llvm:0") = R.add(x, c)
        return (y, d)


@tvm.register_global_func("relax_hetero.test.refuse_negative", override=True)
def refuse_negative(x):
    if (x.numpy() < 0).any():
        raise ArithmeticError("negative input")
    return x


def with_constants(exe: rh.vm.Executable, constants: list[np.ndarray]) -> rh.vm.Executable:
    """`exe` with the last parameter of ``main`` taken for the tuple of constants."""
    old = exe.signature("main")
    specs = [
        rh.vm.ConstantSpec(f"c{i}", tuple(spec.shape), spec.dtype, spec.device)
        for i, spec in enumerate(old.inputs[-1].fields)
    ]
    new = dataclasses.replace(old, inputs=old.inputs[:-1], num_input=-1, takes_constants=True)
    metadata = dataclasses.replace(exe.metadata, signatures={"main": new}, constants=tuple(specs))
    distinct = {id(c): tvm.runtime.tensor(c) for c in constants}
    return rh.vm.Executable(exe.module, metadata, [distinct[id(c)] for c in constants])


@pytest.fixture(scope="session")
def chain() -> rh.vm.Executable:
    return rh.compile(Chain)


@pytest.fixture(scope="session")
def plumbing() -> rh.vm.Executable:
    return rh.compile(Plumbing)


@pytest.fixture(scope="session")
def weighted() -> rh.vm.Executable:
    return rh.compile(Weighted)


@pytest.fixture(scope="session")
def failing() -> rh.vm.Executable:
    return rh.compile(Failing)


@pytest.fixture(scope="session")
def lifted() -> rh.vm.Executable:
    data = np.arange(1024, dtype="float32")
    return with_constants(rh.compile(Lifted), [data, data])
