"""SimplifyConvolutions: constants, norms, scales and padding go into weights; transposed becomes plain."""

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.relax import op
from tvm.script import relax as R

from modules import ir_module, ops_of
from relax_hetero.transform import RealizeVDevice, SimplifyConvolutions, collect_fusions
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng

pytestmark = pytest.mark.sampled(4)


def array(*shape):
    return fresh_rng().standard_normal(shape).astype("float32")


def constant(*shape):
    return relax.const(array(*shape))


def built(shape, compute):
    """A function ``main`` of one tensor."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(compute(builder, x))
        builder.emit_func_output(output)
    return builder.get()


def norm(builder, x, channels, axis=1):
    vectors = [constant(channels) for _ in range(3)]
    variance = relax.const(np.abs(array(channels)) + 0.1)
    call = op.nn.batch_norm(x, *vectors, variance, axis=axis, training=False)
    return builder.emit(relax.TupleGetItem(builder.emit(call), 0))


def short_names(mod):
    return [name.rpartition(".")[2] for name in ops_of(mod["main"]) if name]


def check(shape, compute, ops):
    """The pass leaves `ops`, and what they compute; a second run changes nothing."""
    before = built(shape, compute)
    after = SimplifyConvolutions()(before)
    assert short_names(after) == ops
    assert SimplifyConvolutions()(after).same_as(after)
    x = tvm.runtime.tensor(array(*shape))
    expected, actual = (
        relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](x).numpy() for mod in (before, after)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_batch_norm_becomes_the_weights_of_the_convolution_before_it():
    @ir_module("llvm")
    def Before(
        x: R.Tensor((1, 3, 6, 6), "float32", "llvm:0"),
        w: R.Tensor((4, 3, 3, 3), "float32", "llvm:0"),
        gamma: R.Tensor((4,), "float32", "llvm:0"),
        beta: R.Tensor((4,), "float32", "llvm:0"),
        mean: R.Tensor((4,), "float32", "llvm:0"),
        variance: R.Tensor((4,), "float32", "llvm:0"),
    ):
        with R.dataflow():
            y: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.nn.conv2d(x, w, out_dtype="float32")
            t: R.Tuple(
                R.Tensor((1, 4, 4, 4), "float32", "llvm:0"),
                R.Tensor((4,), "float32", "llvm:0"),
                R.Tensor((4,), "float32", "llvm:0"),
            ) = R.nn.batch_norm(y, gamma, beta, mean, variance, axis=1, epsilon=1e-3, training=False)
            gv: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = t[0]
            R.output(gv)
        return gv

    @ir_module("llvm")
    def Expected(
        x: R.Tensor((1, 3, 6, 6), "float32", "llvm:0"),
        w: R.Tensor((4, 3, 3, 3), "float32", "llvm:0"),
        b: R.Tensor((1, 4, 1, 1), "float32", "llvm:0"),
    ):
        with R.dataflow():
            y: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.nn.conv2d(x, w, out_dtype="float32")
            n: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = R.add(y, b)
            gv: R.Tensor((1, 4, 4, 4), "float32", "llvm:0") = n
            R.output(gv)
        return gv

    weights = {"w": array(4, 3, 3, 3), "gamma": array(4), "beta": array(4), "mean": array(4)}
    variance = np.abs(array(4)) + np.float32(0.5)
    exact = {name: value.astype("float64") for name, value in weights.items()}
    scale = exact["gamma"] / np.sqrt(variance.astype("float64") + 1e-3)
    shift = exact["beta"] - exact["mean"] * scale
    folded = {
        "w": (exact["w"] * scale[:, None, None, None]).astype("float32"),
        "b": shift.reshape(1, 4, 1, 1).astype("float32"),
    }
    before, expected = (
        RealizeVDevice()(relax.transform.BindParams("main", bound)(mod))
        for bound, mod in (({**weights, "variance": variance}, Before), (folded, Expected))
    )
    after = SimplifyConvolutions()(before)
    actual, want = ([b.value.args[1] for b in walk_bindings(m["main"]) if op_name(b.value)] for m in (after, expected))
    for ours, theirs in zip(actual, want, strict=True):
        np.testing.assert_allclose(ours.value.numpy(), theirs.value.numpy(), rtol=1e-6)
        assert_structural_equal(ours.ty, theirs.ty)
    assert short_names(after) == ["conv2d", "add"]


CHAINS = {
    "bias, norm and affine": (
        (1, 3, 6, 6),
        lambda b, x: op.subtract(
            constant(4, 1, 1),
            b.emit(
                op.multiply(
                    norm(b, b.emit(op.add(b.emit(op.nn.conv2d(x, constant(4, 3, 3, 3))), constant(1, 4, 1, 1))), 4),
                    constant(4, 1, 1),
                )
            ),
        ),
        ["conv2d", "add"],
    ),
    "groups": (
        (1, 4, 6, 6),
        lambda b, x: norm(b, b.emit(op.nn.conv2d(x, constant(8, 2, 3, 3), groups=2)), 8),
        ["conv2d", "add"],
    ),
    "scale alone": (
        (1, 4, 6),
        lambda b, x: op.divide(b.emit(op.nn.conv1d(x, constant(3, 4, 3))), constant(3, 1)),
        ["conv1d"],
    ),
    "matrix product": (
        (5, 4),
        lambda b, x: norm(b, b.emit(op.add(b.emit(op.matmul(x, constant(4, 3))), constant(3))), 3),
        ["matmul", "add"],
    ),
    "one number for a product": (
        (5, 4),
        lambda b, x: op.multiply(b.emit(op.matmul(x, constant(4, 3))), relax.const(0.5, "float32")),
        ["matmul", "multiply"],
    ),
    "nothing to take it": (
        (1, 4, 6, 6),
        lambda b, x: op.add(b.emit(op.multiply(norm(b, x, 4), constant(4, 1, 1))), constant(4, 1, 1)),
        ["multiply", "add"],
    ),
    "another user": (
        (1, 3, 6, 6),
        lambda b, x: (lambda y: op.add(y, b.emit(op.multiply(y, constant(4, 1, 1)))))(
            b.emit(op.nn.conv2d(x, constant(4, 3, 3, 3)))
        ),
        ["conv2d", "multiply", "add"],
    ),
    "not per channel": (
        (1, 3, 4, 4),
        lambda b, x: op.multiply(b.emit(op.nn.conv2d(x, constant(4, 3, 3, 3))), constant(2, 2)),
        ["conv2d", "multiply"],
    ),
    "weights computed": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.conv2d(
            x, b.emit(op.multiply(b.emit(op.reshape(constant(3, 36), (3, 4, 3, 3))), constant(3, 1, 1, 1)))
        ),
        ["conv2d"],
    ),
    "padding": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.conv2d(b.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 0, 2, 3])), constant(3, 4, 3, 3), padding=1),
        ["conv2d"],
    ),
    "padding of a mean": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.avg_pool2d(b.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 0, 1, 1])), 3),
        ["avg_pool2d"],
    ),
    "padding of a maximum": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.max_pool2d(
            b.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 0, 0, 1], "constant", float("-inf"))), 3, padding=1
        ),
        ["max_pool2d"],
    ),
    "zeros before a maximum": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.max_pool2d(b.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 0, 0, 1])), 3),
        ["pad", "max_pool2d"],
    ),
    "padding of channels": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.conv2d(b.emit(op.nn.pad(x, [0, 0, 1, 0, 1, 0, 1, 1])), constant(3, 5, 3, 3)),
        ["pad", "conv2d"],
    ),
    "padding with another number": (
        (1, 4, 6, 6),
        lambda b, x: op.nn.conv2d(
            b.emit(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "constant", 1.0)), constant(3, 4, 3, 3)
        ),
        ["pad", "conv2d"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_ops_that_are_folded_into_weights_and_others(name):
    check(*CHAINS[name])


def test_training_and_unknown_statistics_stay():
    @ir_module()
    def Module(x: R.Tensor((1, 4, 6, 6), "float32"), v: R.Tensor((4,), "float32")):
        with R.dataflow():
            t = R.nn.batch_norm(x, v, v, v, v, axis=1, training=False)
            gv = t[0]
            R.output(gv)
        return gv

    assert SimplifyConvolutions()(Module).same_as(Module)
    trained = built(
        (1, 4, 6, 6),
        lambda b, x: b.emit(
            relax.TupleGetItem(b.emit(op.nn.batch_norm(x, *[constant(4)] * 4, axis=1, training=True)), 0)
        ),
    )
    assert SimplifyConvolutions()(trained).same_as(trained)


_TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def transposed(rank, kernel, groups, **options):
    """A transposed convolution with the ops after it in a model, and the pass's result for `parts` phases."""

    def compute(builder, x):
        weight = constant(4, 3, *[kernel] * rank)
        y = builder.emit(_TRANSPOSED[rank](x, weight, groups=groups, **options))
        return op.nn.relu(builder.emit(op.add(y, constant(3 * groups, *[1] * rank))))

    return (2, 4, *(5, 4, 3)[:rank]), compute


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_window_as_large_as_its_stride_is_one_convolution(rank):
    behind = ["reshape", "permute_dims", "reshape"]
    check(*transposed(rank, 2, 1, strides=2), [f"conv{rank}d", "add", "relu", *behind])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_stride_one_is_a_convolution_with_weights_turned_around(rank):
    check(*transposed(rank, 3, 2, strides=1, padding=1, dilation=1), [f"conv{rank}d", "add", "relu"])


@pytest.mark.parametrize(
    "kernel, groups, options, slices",
    [
        (4, 1, {"strides": 2, "padding": 1}, 0),
        (3, 1, {"strides": 2, "padding": 1, "output_padding": 1}, 0),
        (3, 2, {"strides": 3}, 0),
        (3, 2, {"strides": 2, "padding": 1, "dilation": 2}, 1),
        (5, 1, {"strides": 3, "padding": 2, "output_padding": 1}, 1),
        (1, 1, {"strides": 2, "output_padding": 1}, 0),
        (2, 4, {"strides": 3, "output_padding": 2}, 1),
    ],
)
def test_a_convolution_for_each_phase_of_the_stride(kernel, groups, options, slices):
    parts = ["conv2d", "add", "relu"] * options["strides"] ** 2
    cut = ["strided_slice"] * slices
    check(*transposed(2, kernel, groups, **options), [*parts, "concat", "reshape", "permute_dims", "reshape", *cut])


def test_weights_that_are_not_known_stay_transposed():
    @ir_module()
    def Module(x: R.Tensor((1, 4, 6, 6), "float32"), w: R.Tensor((4, 3, 2, 2), "float32")):
        with R.dataflow():
            y = R.nn.conv2d_transpose(x, w, strides=[2, 2])
            R.output(y)
        return y

    with collect_fusions() as report:
        assert SimplifyConvolutions()(Module).same_as(Module)
    assert [(each.variable, each.op) for each in report.missed] == [("y", "nn.conv2d_transpose")]


def test_images_of_symbolic_sizes():
    """Only results that the stride divides: others would need a slice of symbolic size."""
    stock = {"odd": (3, 2, 0, 0), "cut": (1, 2, 1, 1)}
    cases = {"vocoder": (8, 4, 2, 0), "doubled": (2, 2, 0, 0), "turned": (3, 1, 1, 0), "longer": (3, 2, 1, 1), **stock}
    builder = relax.BlockBuilder()
    for name, (kernel, stride, padding, extra) in cases.items():
        x = relax.Var("x", relax.TensorType((1, 2, tirx.Var("s", "int64")), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                call = op.nn.conv1d_transpose(x, constant(2, 3, kernel), stride, padding, extra)
                output = builder.emit_output(builder.emit(call))
            builder.emit_func_output(output)
    before = builder.get()
    after = SimplifyConvolutions()(before)
    for name in cases:
        ops = set(ops_of(after[name]))
        assert ("relax.nn.conv1d_transpose" in ops) == (name in stock), name
    machines = [relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu()) for mod in (before, after)]
    for name, size in itertools.product(cases, (2, 5)):
        x = tvm.runtime.tensor(array(1, 2, size))
        expected, actual = (vm[name](x).numpy() for vm in machines)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)


# A fifth of the combinations by default; five shares no factor with any of their counts.
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_small_transposed_convolution_of_one_axis(step):
    """All of the combinations in one module: a function each."""
    cases = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1, 2), (0, 1), (1, 2)))[::step]
    builder = relax.BlockBuilder()
    names = []
    for kernel, stride, padding, extra, dilation in cases:
        size = (5 - 1) * stride - 2 * padding + (kernel - 1) * dilation + 1 + extra
        if extra >= stride or size < 1:
            continue
        name = f"k{kernel}s{stride}p{padding}e{extra}d{dilation}"
        x = relax.Var("x", relax.TensorType((1, 2, 5), "float32"))
        with builder.function(name, [x]):
            with builder.dataflow():
                call = op.nn.conv1d_transpose(x, constant(2, 3, kernel), stride, padding, extra, dilation)
                output = builder.emit_output(builder.emit(call))
            builder.emit_func_output(output)
        names.append(name)
    before = builder.get()
    after = SimplifyConvolutions()(before)
    left = {op for name in names for op in ops_of(after[name])}
    assert "relax.nn.conv1d_transpose" not in left
    machines = [relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu()) for mod in (before, after)]
    for name in names:
        x = tvm.runtime.tensor(array(1, 2, 5))
        expected, actual = (vm[name](x).numpy() for vm in machines)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)
