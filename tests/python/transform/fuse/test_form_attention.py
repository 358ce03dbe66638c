"""FormAttention: graphs that become one op, graphs that stay, and reasons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import calls_of, check_pass, ir_module, ops_of
from relax_hetero.op.attention import ATTENTION
from relax_hetero.transform import FormAttention, collect_fusions
from relax_hetero.transform.ir.rewriting import walk_bindings
from seeds import fresh_rng

AVX512 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}


def placed(mod: tvm.IRModule, target: Any = AVX512) -> tvm.IRModule:
    mod = mod.clone()
    mod.update_global_info("vdevice", [rh.VDevice(target)])
    return rh.transform.RealizeVDevice()(mod)


def attention_of(mod: tvm.IRModule) -> relax.Call:
    (call,) = calls_of(ATTENTION, mod["main"])
    return call


def test_heads_of_three_tensors():
    @ir_module()
    def Before(
        x: R.Tensor((1, 5, 32), "float32"),
        y: R.Tensor((1, 7, 32), "float32"),
        z: R.Tensor((1, 7, 32), "float32"),
        mask: R.Tensor((1, 1, 1, 7), "float32"),
    ):
        with R.dataflow():
            q = R.permute_dims(R.reshape(x, R.shape([1, 5, 4, 8])), axes=[0, 2, 1, 3])
            k = R.permute_dims(R.reshape(y, R.shape([1, 7, 4, 8])), axes=[0, 2, 3, 1])
            v = R.permute_dims(R.reshape(z, R.shape([1, 7, 4, 8])), axes=[0, 2, 1, 3])
            scores = R.multiply(R.matmul(q, k), R.const(0.5, "float32"))
            p = R.nn.softmax(R.add(scores, mask), axis=-1)
            result = R.reshape(R.permute_dims(R.matmul(p, v), axes=[0, 2, 1, 3]), R.shape([1, 5, 32]))
            R.output(result)
        return result

    @ir_module()
    def Expected(
        x: R.Tensor((1, 5, 32), "float32"),
        y: R.Tensor((1, 7, 32), "float32"),
        z: R.Tensor((1, 7, 32), "float32"),
        mask: R.Tensor((1, 1, 1, 7), "float32"),
    ):
        with R.dataflow():
            result = R.hetero.attention(
                x,
                y,
                z,
                mask,
                heads="(1, m, h*d) * (1, n, g*d) * (1, n, g*e) -> (1, m, h*e); b=1, h=4, g=4, m=5, n=7, d=8, e=8",
                scores="add(multiply(x0, 0.5), x1)",
            )
            R.output(result)
        return result

    check_pass(FormAttention(), placed(relax.transform.Normalize()(Before)), placed(Expected))


def test_products_of_one_tensor_become_one():
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((1, 5, 16), "float32"))
    weights = [rng.standard_normal((16, 32)).astype("float32") for _ in range(3)]
    biases = [rng.standard_normal(32).astype("float32") for _ in range(3)]
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = []
            for weight, bias in zip(weights, biases, strict=True):
                product = builder.emit(relax.op.matmul(x, relax.const(weight)))
                part = builder.emit(
                    relax.op.reshape(builder.emit(relax.op.add(product, relax.const(bias))), (1, 5, 4, 8))
                )
                parts.append(builder.emit(relax.op.permute_dims(part, [0, 2, 1, 3])))
            q, k, v = parts
            scores = builder.emit(relax.op.matmul(q, builder.emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
            out = builder.emit_output(relax.op.matmul(builder.emit(relax.op.nn.softmax(scores)), v))
        builder.emit_func_output(out)
    formed = FormAttention()(placed(builder.get()))
    assert ops_of(formed["main"]) == ["relax.matmul", "relax.add", ATTENTION]
    call = attention_of(formed)
    assert str(call.attrs.heads).startswith("(1, m, h*d) * (1, n, g*d+32) * (1, n, g*e+64) -> (b, h, m, e)")
    product, added = (binding.value for binding in list(walk_bindings(formed["main"]))[:2])
    np.testing.assert_array_equal(product.args[1].value.numpy(), np.concatenate(weights, 1))
    np.testing.assert_array_equal(added.args[1].value.numpy(), np.concatenate(biases))


def test_a_value_with_another_user_stays():
    @ir_module()
    def Before(q: R.Tensor((2, 5, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 8), "float32")):
        with R.dataflow():
            p = R.nn.softmax(R.matmul(q, k), axis=-1)
            y = R.matmul(p, v)
            R.output(p, y)
        return (p, y)

    mod = placed(relax.transform.Normalize()(Before))
    assert FormAttention()(mod).same_as(mod)


@pytest.mark.parametrize(
    ("target", "is_formed"),
    [(AVX512, True), ({"kind": "llvm", "mcpu": "x86-64"}, True), ("c", True), ("vulkan", False)],
)
def test_only_where_the_device_has_a_kernel(target: Any, is_formed: bool):
    @ir_module()
    def Before(q: R.Tensor((2, 5, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 8), "float32")):
        with R.dataflow():
            y = R.matmul(R.nn.softmax(R.matmul(q, k), axis=-1), v)
            R.output(y)
        return y

    formed = FormAttention()(placed(relax.transform.Normalize()(Before), target))
    assert (ATTENTION in ops_of(formed["main"])) == is_formed


def test_reasons_are_reported():
    @ir_module()
    def Before(q: R.Tensor((2, 5, 8), "float16"), k: R.Tensor((2, 8, 7), "float16"), v: R.Tensor((2, 7, 8), "float16")):
        with R.dataflow():
            y = R.matmul(R.nn.softmax(R.matmul(q, k), axis=-1), v)
            R.output(y)
        return y

    with collect_fusions() as report:
        FormAttention()(placed(relax.transform.Normalize()(Before)))
    (entry,) = report.missed
    assert "found element types ['float16', 'float16', 'float16', 'float16', 'float16']" in entry.reason


@pytest.mark.parametrize(
    ("dtype", "arch", "width", "types"),
    [
        ("float16", "sm_90a", 256, None),
        ("bfloat16", "sm_80", 8, None),
        ("float32", "sm_90a", 8, "['bfloat16', 'float16', 'tfloat32']"),
        ("float16", "sm_60", 8, "[]"),
        ("float16", "sm_90a", 264, "[]"),
    ],
)
def test_gpus_form_what_their_tensor_cores_multiply(dtype: str, arch: str, width: int, types: str | None):
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((2, 5, width), dtype)) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            transposed = builder.emit(relax.op.permute_dims(params[1], [0, 2, 1]))
            scores = builder.emit(relax.op.matmul(params[0], transposed, out_dtype="float32"))
            powers = builder.emit(relax.op.nn.softmax(scores, -1))
            powers = powers if dtype == "float32" else builder.emit(relax.op.astype(powers, dtype))
            summed = builder.emit(relax.op.matmul(powers, params[2], out_dtype="float32"))
            out = builder.emit_output(summed if dtype == "float32" else relax.op.astype(summed, dtype))
        builder.emit_func_output(out)
    with collect_fusions() as report:
        formed = FormAttention()(placed(builder.get(), {"kind": "cuda", "arch": arch}))
    assert (ATTENTION in ops_of(formed["main"])) == (types is None)
    reasons = [entry.reason for entry in report.missed]
    message = f"found {dtype}, heads of {width}; expected one of {types}, for which the device has a kernel"
    assert reasons == ([] if types is None else [message])


def test_float32_is_formed_where_its_products_may_be_rounded():
    @ir_module()
    def Before(q: R.Tensor((2, 5, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 8), "float32")):
        with R.dataflow():
            scores = R.matmul(q, k)
            y = R.matmul(R.nn.softmax(scores, axis=-1), v)
            R.output(y)
        return y

    @ir_module()
    def Expected(
        q: R.Tensor((2, 5, 8), "float32"), k: R.Tensor((2, 8, 7), "float32"), v: R.Tensor((2, 7, 8), "float32")
    ):
        R.func_attr({"relax_hetero.tf32_kept": []})
        with R.dataflow():
            y = R.hetero.attention(
                q,
                k,
                v,
                heads="(h, m, d) * (g, d, n) * (g, n, e) -> (h, m, e); b=1, h=2, g=2, m=5, n=7, d=8, e=8",
                tf32=True,
            )
            R.output(y)
        return y

    hopper = {"kind": "cuda", "arch": "sm_90a"}
    before = relax.transform.Normalize()(Before)
    marked = rh.transform.ToMixedPrecision("tfloat32")(before)
    assert_structural_equal(FormAttention()(placed(marked, hopper)), placed(Expected, hopper))
    rounded = rh.transform.ToMixedPrecision("tfloat32", keep=["scores"])(before)
    assert ATTENTION not in ops_of(FormAttention()(placed(rounded, hopper))["main"])
    assert not attention_of(FormAttention()(placed(marked))).attrs.tf32  # CPUs do not round


def test_scores_of_16_bits_are_float32_on_gpus():
    @ir_module()
    def Before(
        x: R.Tensor((1, 5, 32), "float16"), mask: R.Tensor((1, 1, 5, 5), "float16"), keep: R.Tensor((5, 5), "bool")
    ):
        with R.dataflow():
            q = R.permute_dims(R.reshape(x, R.shape([1, 5, 4, 8])), axes=[0, 2, 1, 3])
            k = R.permute_dims(R.reshape(x, R.shape([1, 5, 4, 8])), axes=[0, 2, 3, 1])
            scores = R.add(R.multiply(R.matmul(q, k), R.const(0.5, "float16")), mask)
            hidden = R.where(keep, scores, R.const(-65504.0, "float16"))
            p = R.astype(R.nn.softmax(R.astype(hidden, "float32"), axis=-1), "float16")
            y = R.reshape(R.permute_dims(R.matmul(p, q), axes=[0, 2, 1, 3]), R.shape([1, 5, 32]))
            R.output(y)
        return y

    before = relax.transform.Normalize()(Before)
    call = attention_of(FormAttention()(placed(before, {"kind": "cuda", "arch": "sm_90a"})))
    assert str(call.attrs.scores) == "where(x2, add(multiply(x0, 0.5), cast(x1, 'float32')), -65504.0)"
    assert ATTENTION not in ops_of(FormAttention()(placed(before))["main"])  # on CPUs


def test_symbolic_sizes():
    @ir_module()
    def Before(q: R.Tensor(("b", 4, "m", 8), "float32"), kv: R.Tensor(("b", 4, "n", 8), "float32")):
        b, m = T.int64(), T.int64()
        with R.dataflow():
            p = R.nn.softmax(R.matmul(q, R.permute_dims(kv, axes=[0, 1, 3, 2])), axis=-1)
            y = R.reshape(R.permute_dims(R.matmul(p, kv), axes=[0, 2, 1, 3]), R.shape([b, m, 32]))
            R.output(y)
        return y

    call = attention_of(FormAttention()(placed(relax.transform.Normalize()(Before))))
    assert str(call.attrs.heads) == (
        "(b, h, m, d) * (b, g, n, d) * (b, g, n, e) -> (b, m, h*e); b=?, h=4, g=4, m=?, n=?, d=8, e=8"
    )


@pytest.mark.parametrize("causal", [None, "TopLeft", "BottomRight"])
@pytest.mark.parametrize("is_biased", [False, True])
def test_the_attention_op_of_relax(causal: str | None, is_biased: bool):
    shapes = [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 6)] + [(2, 3, 5, 7)] * is_biased
    params = [relax.Var(f"p{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            call = relax.op.nn.attention(*params, causal_mask=causal, scale=0.3 if is_biased else None)
            out = builder.emit_output(call)
        builder.emit_func_output(out)
    mod = builder.get()
    formed = FormAttention()(placed(mod))
    assert ops_of(formed["main"]) == [ATTENTION]
    arrays = [fresh_rng().standard_normal(shape).astype("float32") for shape in shapes]
    actual = rh.vm.VirtualMachine(rh.compile(mod))["main"](*arrays).numpy()
    query, key, value = (array.transpose(0, 2, 1, 3).astype("float64") for array in arrays[:3])
    scores = query @ key.swapaxes(-1, -2) * (0.3 if is_biased else 8**-0.5)
    scores = scores + arrays[3] if is_biased else scores
    if causal:
        scores = np.where(np.tril(np.ones((5, 7), bool), 0 if causal == "TopLeft" else 2), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    expected = (powers / powers.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_two_attentions_in_a_row():
    """Views between two of them are looked through from both sides."""

    @ir_module()
    def Before(x: R.Tensor((1, 5, 32), "float32"), kv: R.Tensor((1, 4, 7, 8), "float32")):
        with R.dataflow():
            k = R.permute_dims(kv, axes=[0, 1, 3, 2])
            q = R.permute_dims(R.reshape(x, R.shape([1, 5, 4, 8])), axes=[0, 2, 1, 3])
            a = R.permute_dims(R.matmul(R.nn.softmax(R.matmul(q, k)), kv), axes=[0, 2, 1, 3])
            b = R.permute_dims(R.reshape(R.reshape(a, R.shape([1, 5, 32])), R.shape([1, 5, 4, 8])), axes=[0, 2, 1, 3])
            y = R.matmul(R.nn.softmax(R.matmul(b, k)), kv)
            R.output(y)
        return y

    mod = relax.transform.Normalize()(Before)
    formed = FormAttention()(placed(mod))
    assert ops_of(formed["main"]) == [ATTENTION, ATTENTION]
    x, kv = (fresh_rng().standard_normal(shape).astype("float32") for shape in ((1, 5, 32), (1, 4, 7, 8)))
    actual = rh.vm.VirtualMachine(rh.compile(mod))["main"](x, kv).numpy()
    expected = x.reshape(1, 5, 4, 8).transpose(0, 2, 1, 3).astype("float64")
    for _ in range(2):
        powers = np.exp(expected @ kv.swapaxes(-1, -2))
        expected = powers / powers.sum(-1, keepdims=True) @ kv
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
