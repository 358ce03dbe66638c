"""``data_parallel=``: every device computes its rows of a batch, and values cross between devices only at the ends."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from models.running import expected_outputs
from modules import calls_of
from relax_hetero.frontend.parallel_devices import with_split_batches
from relax_hetero.target.vdevice import lookup, parse_vdevices, with_vdevices
from relax_hetero.transform.ir.blocks import renamed
from relax_hetero.transform.shard.partition_by_mesh import partition_by_mesh
from seeds import fresh_rng

CORE = {"kind": "llvm", "num-cores": 1}
MODEL = """
    <ir_version: 8, opset_import: ["" : 18]>
    net (float[{batch}, 4, 9, 9] image, int64[{batch}, 3] words) => (float[n, 3, 5] scores, int64[n, 3] best)
    <float[20, 5] table = {{{table}}}, float[8, 4, 3, 3] kernel = {{{kernel}}}, float[8, 5] weight = {{{weight}}},
     int64[1] one = {{1}}>
    {{
        c = Conv <kernel_shape = [3, 3], strides = [2, 2]> (image, kernel)
        r = Relu (c)
        p = GlobalAveragePool (r)
        f = Flatten (p)
        m = MatMul (f, weight)
        u = Unsqueeze (m, one)
        e = Gather (table, words)
        scores = Add (e, u)
        best = ArgMax <axis = 2, keepdims = 0> (scores)
    }}"""


def model(batch):
    numbers = {
        name: fresh_rng().standard_normal(size) for name, size in (("table", 100), ("kernel", 288), ("weight", 40))
    }
    return onnx.parser.parse_model(
        MODEL.format(
            batch=batch, **{name: ", ".join(f"{each:.4f}" for each in array) for name, array in numbers.items()}
        )
    )


def inputs(batch):
    generator = fresh_rng()
    return {
        "image": generator.standard_normal((batch, 4, 9, 9)).astype("float32"),
        "words": generator.integers(0, 20, (batch, 3)),
    }


@pytest.mark.parametrize(
    ("device", "count"),
    [
        (CORE, 3),
        pytest.param("cuda", 2, marks=[pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda(1).exist, reason="one GPU")]),
    ],
)
def test_each_device_computes_its_rows(device, count):
    whole = model(6)
    exe = rh.compile(rh.from_onnx(whole, device, data_parallel=count))
    assert {region.device for region in exe.metadata.regions} == set(range(count))
    vm = rh.vm.VirtualMachine(exe)
    batches = [inputs(6) for _ in range(4)]
    fences = [vm.submit("main", **batch) for batch in batches]  # several under way
    for batch, fence in zip(batches, fences, strict=True):
        scores, best = expected_outputs(whole, batch)
        actual = fence.result()
        np.testing.assert_allclose(actual[0].numpy(), scores, rtol=0, atol=1e-3 if device == "cuda" else 1e-5)
        np.testing.assert_array_equal(actual[1].numpy(), best)


def test_values_cross_only_at_the_ends():
    mod = rh.from_onnx(model(4), CORE, data_parallel=2)
    assert len(calls_of("relax.to_vdevice", mod)) == 4  # two arguments and two results
    assert {tuple(map(int, call.ty.shape.values)) for call in calls_of("relax.nn.conv2d", mod)} == {(2, 8, 4, 4)}


def test_any_batch_gets_its_size_from_shapes():
    symbolic = model("n")
    with pytest.raises(
        rh.FrontendError, match=r"expected a first input whose first extent is a multiple of 2, .*shapes"
    ):
        rh.from_onnx(symbolic, CORE, data_parallel=2)
    exe = rh.compile(rh.from_onnx(symbolic, CORE, data_parallel=2, shapes={"n": 2}))
    batch = inputs(2)
    scores, _ = rh.vm.VirtualMachine(exe)["main"](**batch)
    np.testing.assert_allclose(scores.numpy(), expected_outputs(symbolic, batch)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_parallel": 4, "vdevices": CORE}, "multiple of 4"),
        ({"data_parallel": 0}, "expected a number of devices, 1 or more"),
        ({"data_parallel": 2, "vdevices": ["llvm:0"]}, "vdevices has 1; expected so many"),
        ({"data_parallel": 2, "vdevices": "llvm", "placement": {"*": "llvm"}}, "data_parallel=2 and placement"),
        ({"data_parallel": 2, "cache": rh.PagedCache()}, "do not go with cache"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(rh.FrontendError, match=message):
        rh.from_onnx(model(6), **arguments)


def all_ops():
    """A function with each op that has a rule of its own along the first axis."""
    op, rng = relax.op, fresh_rng()
    x, ids = (
        relax.Var("x", relax.TensorType([4, 6, 8, 8], "float32")),
        relax.Var("ids", relax.TensorType([4, 3], "int64")),
    )

    def weight(*shape):
        return relax.const(rng.standard_normal(shape).astype("float32"))

    rows = [4, 8, 48]
    values = [
        lambda: op.nn.pad(x, [0, 0, 1, 0, 0, 2, 0, 0]),
        lambda: op.nn.conv2d_transpose(x, weight(6, 5, 2, 2), strides=(2, 2)),
        lambda: op.nn.adaptive_avg_pool2d(x, (2, 2)),
        lambda: op.image.resize2d(x, (4, 16)),
        lambda: op.nn.group_norm(x, weight(6), weight(6), 3, 1, [2, 3]),
        lambda: op.nn.instance_norm(x, weight(6), weight(6), 1, [2, 3]),
        lambda: op.nn.prelu(x, weight(6), 1),
        lambda: op.cumsum(x, 2),
        lambda: op.flip(x, 3),
        lambda: op.repeat(x, 2, 1),
        lambda: op.argmax(x, 3, True),
        lambda: op.argmin(op.reshape(x, rows), 1),
        lambda: op.variance(x, [-1, 1]),
        lambda: op.std(op.reshape(x, rows), 2, True),
        lambda: op.sort(op.reshape(x, rows), -1),
        lambda: op.argsort(op.reshape(x, rows), 1, True),
        lambda: op.split(op.reshape(x, rows), 1, 2),  # a tensor, not a tuple
        lambda: op.topk(op.reshape(x, rows), 3, 2, "values"),
        lambda: op.gather_elements(op.reshape(x, [4, 384]), ids, 1),
        lambda: op.take(weight(400, 7), ids, 0),
        lambda: op.nn.attention(x, x, x),
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", [x, ids]):
        with builder.dataflow():
            outputs = [builder.emit_output(builder.emit(make())) for make in values]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get(), len(values)


def test_ops_keep_a_split_first_axis():
    mod, count = all_ops()
    devices = parse_vdevices([CORE] * 2)
    mesh = lookup("llvm[0:2]", devices)
    args = [fresh_rng().standard_normal((4, 6, 8, 8)).astype("float32"), fresh_rng().integers(0, 384, (4, 3))]
    expected = rh.vm.VirtualMachine(rh.compile(mod))["main"](*args)
    main, mod = mod["main"], with_vdevices(mod, devices)
    params = [relax.Var(param.name, relax.TensorType(param.ty.shape, param.ty.dtype, mesh)) for param in main.params]
    names = dict(zip(main.params, params, strict=True))
    blocks = [relax.DataflowBlock([renamed(each, names) for each in block.bindings]) for block in main.body.blocks]
    mod["main"] = relax.Function(params, relax.SeqExpr(blocks, main.body.body), main.ret_ty, attrs=main.attrs)
    after = partition_by_mesh(with_split_batches(mod, 2))
    assert len(calls_of("relax.to_vdevice", after)) == 2 + count
    for actual, whole in zip(rh.vm.VirtualMachine(rh.compile(after))["main"](*args), expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), whole.numpy(), rtol=1e-5, atol=1e-5)
