"""ToMixedPrecision: compiled, or interpreted, its result computes nearly the same."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module, ops_of
from relax_hetero.transform import ToMixedPrecision
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.quantize.to_mixed_precision import to_mixed_precision
from seeds import fresh_rng
from transform.interpreting import run as interpreted


def run(mod, *inputs):
    out = rh.vm.VirtualMachine(rh.compile(mod))["main"](*inputs)
    return out.numpy()


# Attention with scaled queries, a residual, a norm, a feed-forward network.
@ir_module()
def Encoder(
    x: R.Tensor((2, 19, 32), "float32"),
    mask: R.Tensor((2, 1, 1, 19), "float32"),
    wq: R.Tensor((32, 32), "float32"),
    wk: R.Tensor((32, 32), "float32"),
    wv: R.Tensor((32, 32), "float32"),
    wo: R.Tensor((32, 32), "float32"),
    gamma: R.Tensor((32,), "float32"),
    up: R.Tensor((32, 64), "float32"),
    down: R.Tensor((64, 32), "float32"),
):
    with R.dataflow():
        q = R.permute_dims(R.reshape(R.matmul(x, wq), R.shape([2, 19, 4, 8])), axes=[0, 2, 1, 3])
        k = R.permute_dims(R.reshape(R.matmul(x, wk), R.shape([2, 19, 4, 8])), axes=[0, 2, 3, 1])
        v = R.permute_dims(R.reshape(R.matmul(x, wv), R.shape([2, 19, 4, 8])), axes=[0, 2, 1, 3])
        scores = R.add(R.matmul(R.multiply(q, R.const(0.353553)), k), mask)
        heads = R.matmul(R.nn.softmax(scores, axis=-1), v)
        merged = R.reshape(R.permute_dims(heads, axes=[0, 2, 1, 3]), R.shape([2, 19, 32]))
        attended = R.nn.rms_norm(R.add(R.matmul(merged, wo), x), gamma, axes=[-1])
        y = R.nn.rms_norm(R.add(R.matmul(R.nn.gelu(R.matmul(attended, up)), down), attended), gamma, axes=[-1])
        R.output(y)
    return y


def inputs_of(mod, rng):
    arrays = []
    for param in mod["main"].params:
        shape = [int(extent) for extent in param.ty.shape.values]
        arrays.append((rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) == 2 else 1)).astype("float32"))
    return arrays


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_an_encoder_computes_nearly_the_same(dtype, tolerance):
    mod = relax.transform.Normalize()(Encoder)
    inputs = inputs_of(mod, fresh_rng())
    expected = run(mod, *inputs)
    low = ToMixedPrecision(dtype)(mod)
    exe = rh.compile(low)
    actual = rh.vm.VirtualMachine(exe)["main"](*inputs).numpy()
    assert np.linalg.norm(actual - expected) < tolerance * np.linalg.norm(expected)
    assert not np.array_equal(actual, expected)
    dispatches = [call["ops"] for call in exe.metadata.fusions["dispatches"]]
    assert any(call.count("softmax") and call.count("matmul") == 2 for call in dispatches), dispatches


def test_weights_that_are_bound_later():
    mod = relax.transform.Normalize()(Encoder)
    names = [param.name for param in mod["main"].params]
    values = dict(zip(names, inputs_of(mod, fresh_rng()), strict=True))
    weights = {name: value for name, value in values.items() if name not in ("x", "mask")}
    rest = [values["x"], values["mask"]]
    low = ToMixedPrecision("bfloat16")
    later = rh.compile(low(mod), params=weights)
    before = rh.compile(low(relax.transform.BindParams("main", weights)(mod)))
    actual, expected = (rh.vm.VirtualMachine(exe)["main"](*rest).numpy() for exe in (later, before))
    np.testing.assert_array_equal(actual, expected)
    assert [call["ops"] for call in later.metadata.fusions["dispatches"]] == [
        call["ops"] for call in before.metadata.fusions["dispatches"]
    ]


_STEPS = ("relu", "exp", "reshape", "permute", "matmul", "add", "softmax")


def _grown(steps):
    """A function of one square matrix that goes through steps, and the same in numpy."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([16, 16], "float32"))
    w = relax.Var("w", relax.TensorType([16, 16], "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            values = [bb.emit(relax.op.multiply(x, relax.const(0.5)))]
            for step, back in steps:
                last = values[-1 - back % len(values)]
                values.append(_STEP[step](bb, last, values[-1], w))
            out = bb.emit_output(relax.op.add(values[-1], values[len(values) // 2]))
        bb.emit_func_output(out)
    return bb.get()


_STEP = {
    "relu": lambda bb, last, _other, _w: bb.emit(relax.op.nn.relu(last)),
    "exp": lambda bb, last, _other, _w: bb.emit(relax.op.tanh(last)),
    "reshape": lambda bb, last, _other, _w: bb.emit(relax.op.reshape(relax.op.reshape(last, (4, 64)), (16, 16))),
    "permute": lambda bb, last, _other, _w: bb.emit(relax.op.permute_dims(last)),
    "matmul": lambda bb, last, _other, w: bb.emit(relax.op.matmul(last, w)),
    "add": lambda bb, last, other, _w: bb.emit(relax.op.add(last, other)),
    "softmax": lambda bb, last, _other, _w: bb.emit(relax.op.nn.softmax(last)),
}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(_STEPS), st.integers(0, 3)), min_size=2, max_size=9),
    seed=st.integers(0, 1 << 30),
)
def test_any_graph_keeps_its_signature_and_its_numbers(steps, seed):
    mod = _grown(steps)
    low = ToMixedPrecision("bfloat16")(mod)
    assert relax.analysis.check_well_formed(low)
    assert_structural_equal(low["main"].ret_ty, mod["main"].ret_ty)
    assert to_mixed_precision(low, "bfloat16") is low
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal((16, 16)).astype("float32") / 2 for _ in range(2)]
    expected, actual = interpreted(mod, *inputs), interpreted(low, *inputs)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.1 * np.abs(expected).max() + 1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "stock"])
def test_attention_as_an_op(has_kernel, biased):
    # This CPU's own target, whichever it is: code for another one cannot run here.
    target = rh.native("llvm") if has_kernel else "llvm"
    shape = (2, 9, 4, 16)
    q, k, v = (relax.Var(name, relax.TensorType(shape, "float32")) for name in "qkv")
    bias = relax.Var("bias", relax.TensorType((2, 4, 9, 9), "float32"))
    params = [q, k, v, bias] if biased else [q, k, v]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.attention(q, k, v, bias if biased else None))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [rh.VDevice(target)])
    low = ToMixedPrecision("bfloat16")(mod)
    assert "relax.astype" in ops_of(low["main"])
    inputs = [fresh_rng().standard_normal([int(e) for e in p.ty.shape.values]).astype("float32") for p in params]
    expected, actual = run(mod, *inputs), run(low, *inputs)
    assert np.linalg.norm(actual - expected) < 2e-2 * np.linalg.norm(expected)


def test_rounded_values_cross_devices():
    @ir_module("llvm", "llvm:1")
    def Model(x: R.Tensor((8, 16), "float32", "llvm:0"), w: R.Tensor((16, 16), "float32", "llvm:1")):
        with R.dataflow():
            a: R.Tensor((8, 16), "float32", "llvm:0") = R.nn.relu(x)
            b: R.Tensor((8, 16), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            y: R.Tensor((8, 16), "float32", "llvm:1") = R.matmul(b, w)
            R.output(y)
        return y

    low = ToMixedPrecision("bfloat16")(Model)
    (moved,) = (b.var.ty for b in walk_bindings(low["main"]) if op_name(b.value) == "relax.to_vdevice")
    assert (str(moved.dtype), int(moved.vdevice.vdevice_id)) == ("bfloat16", 1)
    inputs = inputs_of(Model, fresh_rng())
    expected, actual = run(Model, *inputs), run(low, *inputs)
    assert np.linalg.norm(actual - expected) < 2e-2 * np.linalg.norm(expected)
