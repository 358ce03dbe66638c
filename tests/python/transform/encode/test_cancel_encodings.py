"""Cancelled encodings: stock ops again, in every form that SetEncoding takes, with the same numbers."""

import math

import numpy as np
import pytest
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.encoding import register_resolver
from relax_hetero.transform import PropagateEncodings, RealizeVDevice, SetEncoding, SpecializeEncodings
from relax_hetero.transform.ir.rewriting import walk_bindings
from transform.toy_resolvers import Toy

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}


@pytest.fixture(autouse=True)
def no_layouts():
    take_back = register_resolver(Toy("none", (None, None, None)), "llvm", [], 300)
    yield
    take_back()


@ir_module(V4)
def Forms(
    x: R.Tensor(("b", "s", 20), "float32"),
    w: R.Tensor((33, 20), "float32"),
    bias: R.Tensor((33,), "float32"),
    residual: R.Tensor(("b", "s", 33), "float32"),
    one: R.Tensor((1, 20, 5), "float32"),
    half: R.Tensor(("b", 1, 20), "float16"),
    half_w: R.Tensor((20, 4), "float16"),
    v: R.Tensor((20,), "float32"),
    q: R.Tensor((4, 3, 2, 7), "float32"),
    k: R.Tensor((3, 7, 6), "float32"),
    i8: R.Tensor((5, 6), "int8"),
    u8: R.Tensor((3, 5), "uint8"),
):
    b = T.int64()
    s = T.int64()
    with R.dataflow():
        linear = R.add(R.nn.gelu(R.add(R.matmul(x, R.permute_dims(w)), bias)), residual)
        broadcast = R.matmul(x, one)
        single = R.matmul(half, half_w, out_dtype="float32")
        halves = R.matmul(half, half_w)
        vector = R.matmul(x, v)
        dot = R.matmul(v, v)
        batches = R.matmul(q, k)
        integers = R.matmul(R.astype(u8, "int32"), R.astype(i8, "int32"))
        left = R.permute_dims(R.reshape(x, (b, s, 4, 5)), [0, 2, 1, 3])
        right = R.permute_dims(R.reshape(x, (b, s, 4, 5)), [0, 2, 3, 1])
        heads = R.permute_dims(R.matmul(left, right), [0, 2, 1, 3])
        R.output(linear, broadcast, single, halves, vector, dot, batches, integers, heads)
    return linear, broadcast, single, halves, vector, dot, batches, integers, heads


def specialized():
    mod = Forms
    for step in (RealizeVDevice, SetEncoding, PropagateEncodings, SpecializeEncodings):
        mod = step()(mod)
    return mod


def test_only_stock_ops_are_left():
    names = ops_of(specialized()["main"])
    assert not [name for name in names if name.startswith("relax.hetero")]
    assert names.count("relax.matmul") == 9
    assert names.count("relax.permute_dims") == 4  # those that were absorbed, and no others
    assert names.count("relax.nn.gelu") == 1


def test_types_and_devices_are_written():
    for binding in walk_bindings(specialized()["main"]):
        ty = binding.var.ty
        assert ty.vdevice is not None and ty.shape is not None, binding.var.name


@pytest.mark.parametrize(("b", "s"), [(2, 3), (1, 1), (3, 17)])
def test_numbers(b, s):
    rng = np.random.default_rng([b, s])

    def normal(*shape, dtype="float32"):
        return rng.standard_normal(shape).astype(dtype)

    x, w, bias, residual = normal(b, s, 20), normal(33, 20), normal(33), normal(b, s, 33)
    one, half, half_w, v = (
        normal(1, 20, 5),
        normal(b, 1, 20, dtype="float16"),
        normal(20, 4, dtype="float16"),
        normal(20),
    )
    q, k = normal(4, 3, 2, 7), normal(3, 7, 6)
    i8, u8 = rng.integers(-128, 128, (5, 6)).astype("int8"), rng.integers(0, 256, (3, 5)).astype("uint8")
    z = x @ w.T + bias
    single = half.astype("float32") @ half_w.astype("float32")
    split = x.reshape(b, s, 4, 5)
    expected = {
        "linear": 0.5 * z * (1 + np.vectorize(math.erf)(z / 2**0.5)) + residual,
        "broadcast": x @ one,
        "single": single,
        "halves": single,
        "vector": x @ v,
        "dot": v @ v,
        "batches": q @ k,
        "integers": u8.astype("int32") @ i8.astype("int32"),
        "heads": (split.transpose(0, 2, 1, 3) @ split.transpose(0, 2, 3, 1)).transpose(0, 2, 1, 3),
    }
    vm = rh.vm.VirtualMachine(rh.compile(Forms))
    results = vm["main"](x, w, bias, residual, one, half, half_w, v, q, k, i8, u8)
    for (name, want), got in zip(expected.items(), results, strict=True):
        assert got.dtype == {"halves": "float16", "integers": "int32"}.get(name, "float32")
        tolerance = {"halves": 1e-2, "integers": 0}.get(name, 1e-4)
        np.testing.assert_allclose(got.numpy(), want, rtol=tolerance, atol=tolerance, err_msg=name)
