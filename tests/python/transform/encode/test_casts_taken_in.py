"""Low-precision casts around attention and after products: kernels that absorb them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from modules import calls_of, ir_module, ops_of
from relax_hetero.op.attention import ATTENTION
from relax_hetero.transform import FormAttention, PropagateEncodings, collect_fusions
from relax_hetero.transform.encode.propagate_encodings import propagate_encodings
from relax_hetero.transform.ir.rewriting import walk_bindings
from seeds import fresh_rng

AVX512 = {"kind": "llvm", "mcpu": "znver5", "num-cores": 2}
ENC = "<bfloat16 * bfloat16 -> float32; (m, k) * (k, n) -> (m, n); m=2, n=4, k=8>"


def placed(mod: tvm.IRModule) -> tvm.IRModule:
    mod = mod.clone()
    mod.update_global_info("vdevice", [rh.VDevice(AVX512)])
    return rh.transform.RealizeVDevice()(mod)


def test_attention_between_casts():
    """Queries scaled in float32 are read unscaled; softmax is rounded inside, the result where it is written."""

    @ir_module()
    def Before(
        x: R.Tensor((1, 5, 32), "bfloat16"), y: R.Tensor((1, 7, 32), "bfloat16"), z: R.Tensor((1, 7, 32), "bfloat16")
    ):
        with R.dataflow():
            heads = R.permute_dims(R.reshape(x, R.shape([1, 5, 4, 8])), axes=[0, 2, 1, 3])
            q = R.astype(R.multiply(R.astype(heads, "float32"), R.const(0.5, "float32")), "bfloat16")
            k = R.permute_dims(R.reshape(y, R.shape([1, 7, 4, 8])), axes=[0, 2, 3, 1])
            v = R.permute_dims(R.reshape(z, R.shape([1, 7, 4, 8])), axes=[0, 2, 1, 3])
            p = R.astype(R.nn.softmax(R.matmul(q, k, out_dtype="float32"), axis=-1), "bfloat16")
            o = R.astype(R.matmul(p, v, out_dtype="float32"), "bfloat16")
            result = R.reshape(R.permute_dims(o, axes=[0, 2, 1, 3]), R.shape([1, 5, 32]))
            R.output(result)
        return result

    @ir_module()
    def Expected(
        x: R.Tensor((1, 5, 32), "bfloat16"), y: R.Tensor((1, 7, 32), "bfloat16"), z: R.Tensor((1, 7, 32), "bfloat16")
    ):
        with R.dataflow():
            result = R.hetero.attention(
                x,
                y,
                z,
                heads="(1, m, h*d) * (1, n, g*d) * (1, n, g*e) -> (1, m, h*e); b=1, h=4, g=4, m=5, n=7, d=8, e=8",
                scores="multiply(x0, 0.5)",
            )
            R.output(result)
        return result

    formed = FormAttention()(placed(relax.transform.Normalize()(Before)))
    assert_structural_equal(formed, placed(Expected))


def test_attention_whose_result_stays_in_float32_is_declined():
    @ir_module()
    def Before(
        q: R.Tensor((4, 5, 8), "bfloat16"), k: R.Tensor((4, 8, 7), "bfloat16"), v: R.Tensor((4, 7, 8), "bfloat16")
    ):
        with R.dataflow():
            p = R.astype(R.nn.softmax(R.matmul(q, k, out_dtype="float32"), axis=-1), "bfloat16")
            result = R.matmul(p, v, out_dtype="float32")
            R.output(result)
        return result

    with collect_fusions() as report:
        mod = placed(relax.transform.Normalize()(Before))
        assert FormAttention()(mod).same_as(mod)
    assert [entry.reason for entry in report.missed] == [
        "operands of bfloat16 and a result of float32, expected one type"
    ]


def test_products_before_casts_become_one():
    rng = fresh_rng()
    x = relax.Var("x", relax.TensorType((1, 9, 16), "float32"))
    builder = relax.BlockBuilder()
    weights = [rng.standard_normal((16, 32)).astype("float32") for _ in range(3)]
    with builder.function("main", [x]):
        with builder.dataflow():
            parts = []
            for weight in weights:
                product = builder.emit(relax.op.matmul(x, relax.const(weight)))
                biased = builder.emit(relax.op.add(product, relax.const(np.ones(32, "float32"))))
                parts.append(builder.emit(relax.op.permute_dims(relax.op.reshape(biased, (1, 9, 4, 8)), [0, 2, 1, 3])))
            q, k, v = parts
            scores = builder.emit(relax.op.matmul(q, builder.emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
            heads = builder.emit(relax.op.matmul(builder.emit(relax.op.nn.softmax(scores)), v))
            merged = relax.op.reshape(relax.op.permute_dims(heads, [0, 2, 1, 3]), (1, 9, 32))
            out = builder.emit_output(relax.op.matmul(merged, relax.const(np.ones((32, 8), "float32"))))
        builder.emit_func_output(out)
    low = rh.transform.ToMixedPrecision("bfloat16")(placed(builder.get()))
    with collect_fusions() as fusions:
        formed = FormAttention()(low)
    assert not fusions.missed
    ops = ops_of(formed["main"])
    product = ["relax.matmul", "relax.add", "relax.astype"]
    assert ops == ["relax.astype", *product, ATTENTION, "relax.matmul"]
    values = [binding.value for binding in walk_bindings(formed["main"])]
    assert [str(value.ty.dtype) for value in values[1:4]] == ["float32", "float32", "bfloat16"]
    assert [int(extent) for extent in values[3].ty.shape.values] == [1, 9, 96]


def test_a_residual_is_read_rounded():
    @ir_module()
    def Before(x: R.Tensor((2, 8), "bfloat16"), w: R.Tensor((8, 4), "bfloat16"), r: R.Tensor((2, 4), "bfloat16")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
            y = R.hetero.unset_encoding(out, "matmul[2]" + ENC)
            wide = R.astype(r, "float32")
            z = R.astype(R.add(y, wide), "bfloat16")
            R.output(z)
        return z

    @ir_module()
    def Expected(x: R.Tensor((2, 8), "bfloat16"), w: R.Tensor((8, 4), "bfloat16"), r: R.Tensor((2, 4), "bfloat16")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
            residual = R.hetero.set_encoding(r, "matmul[2]" + ENC)
            e = R.hetero.elementwise(
                out,
                residual,
                expression="cast(add(x0, cast(x1, 'float32')), 'bfloat16')",
                encoding="matmul[2]" + ENC,
            )
            z = R.hetero.unset_encoding(e, "matmul[2]" + ENC)
            R.output(z)
        return z

    after = PropagateEncodings()(relax.transform.Normalize()(Before))
    assert_structural_equal(after, Expected)
    assert propagate_encodings(after) is after


# A sum that is rounded, permuted and read by a norm in single precision; and one that a pooling reads.
@ir_module()
def StoredNarrow(x: R.Tensor((6, 16), "float16"), w: R.Tensor((16, 4), "float16"), g: R.Tensor((6,), "float32")):
    with R.dataflow():
        a = R.matmul(x, w, out_dtype="float32")
        b = R.astype(R.add(a, R.const(1.0)), "float16")
        y = R.nn.rms_norm(R.astype(R.permute_dims(b), "float32"), g, axes=[-1])
        c = R.matmul(x, w, out_dtype="float32")
        d = R.reshape(R.astype(R.astype(R.nn.relu(c), "float16"), "float32"), R.shape([1, 6, 4]))
        z = R.nn.avg_pool1d(d, pool_size=2, layout="NCW")
        R.output(y, z)
    return (y, z)


def stored(target) -> list[str]:
    mod = relax.transform.Normalize()(StoredNarrow)
    mod.update_global_info("vdevice", [rh.VDevice(target)])
    mod = PropagateEncodings()(rh.transform.SetEncoding()(rh.transform.RealizeVDevice()(mod)))
    calls = calls_of("relax.hetero.elementwise", mod["main"])
    return [str(call.ty.dtype) for call in calls]


def test_values_rounded_and_widened_are_stored_in_16_bits_on_gpus():
    assert stored({"kind": "cuda", "arch": "sm_90a"}) == ["float16", "float32"]
    assert stored(AVX512) == ["float32", "float32"]


def test_numbers_of_values_stored_in_16_bits():
    mod = relax.transform.Normalize()(StoredNarrow)
    mod.update_global_info("vdevice", [rh.VDevice({"kind": "cuda", "arch": "sm_90a"})])
    rng = fresh_rng()
    x, w = (rng.standard_normal(shape).astype("float16") for shape in ((6, 16), (16, 4)))
    g = np.ones(6, "float32")
    y, _ = InterpretedModel(mod)(x, w, g)
    b = (x.astype("float32") @ w.astype("float32") + 1).astype("float16").T.astype("float32")
    np.testing.assert_allclose(y, b / np.sqrt((b * b).mean(-1, keepdims=True) + 1e-5), rtol=2e-3, atol=1e-3)
