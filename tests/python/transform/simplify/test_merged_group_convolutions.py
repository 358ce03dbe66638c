"""SimplifyConvolutions: groups of few channels join on GPUs whose tensor cores multiply them."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from modules import check_pass
from relax_hetero.transform import SimplifyConvolutions
from seeds import fresh_rng

H200, CPU = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "llvm"}


def convolution(weight, groups, channels, kernel_layout="OIHW"):
    """A function ``main`` of a map of 5 x 4."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, channels, 5, 4), str(weight.dtype)))
    with builder.function("main", [x]):
        with builder.dataflow():
            call = op.nn.conv2d(x, relax.const(weight), [2, 1], 1, 1, groups, kernel_layout=kernel_layout)
            output = builder.emit_output(call)
        builder.emit_func_output(output)
    return builder.get()


def weights(outs, channels, dtype="float16"):
    return fresh_rng().standard_normal((outs, channels, 3, 3)).astype(dtype)


def side_by_side(weight, groups, count):
    """Weights of `count` groups in one: zeros but for a group's own channels."""
    outs, channels = weight.shape[:2]
    each = outs // groups
    wide = np.zeros((outs, channels * count, *weight.shape[2:]), weight.dtype)
    for n in range(outs):
        first = n // each % count * channels
        wide[n, first : first + channels] = weight[n]
    return wide


def simplified(mod, target=H200):
    with tvm.target.Target(target):
        return SimplifyConvolutions()(mod)


@pytest.mark.parametrize(("outs", "channels", "groups", "count"), [(128, 4, 8, 4), (256, 32, 8, 2), (64, 3, 8, 8)])
def test_groups_join_up_to_the_columns_of_a_tile(outs, channels, groups, count):
    weight = weights(outs, channels)
    before = convolution(weight, groups, channels * groups)
    expected = convolution(side_by_side(weight, groups, count), groups // count, channels * groups)
    check_pass(simplified, before, expected, map_free_vars=True)


def test_the_numbers_stay():
    before = convolution(weights(128, 8), 8, 64)
    x = tvm.runtime.tensor(fresh_rng().standard_normal((2, 64, 5, 4)).astype("float16"))
    expected, actual = (
        relax.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())["main"](x).numpy().astype("float32")
        for mod in (before, simplified(before))
    )
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("weight", "groups", "channels", "target"),
    [
        ((128, 4), 8, 32, CPU),
        ((128, 4), 8, 32, {"kind": "cuda", "arch": "sm_61"}),
        ((64, 1), 64, 64, H200),
        ((128, 4), 32, 128, H200),
        ((96, 4), 8, 32, H200),
        ((128, 4), 1, 4, H200),
        ((48, 4), 3, 12, H200),
    ],
    ids=["a CPU", "no tensor cores", "depthwise", "too many zeros", "no divisor", "one group", "too few groups"],
)
def test_groups_that_stay(weight, groups, channels, target):
    before = convolution(weights(*weight), groups, channels)
    assert simplified(before, target).same_as(before)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_numbers_that_tensor_cores_do_not_round_stay(dtype):
    before = convolution(weights(128, 4, dtype), 8, 32)
    assert simplified(before).same_as(before)


def test_weights_that_come_with_a_call_stay():
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, "float16")) for n, s in (("x", (1, 32, 5, 4)), ("w", (128, 4, 3, 3))))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            output = builder.emit_output(op.nn.conv2d(x, w, groups=8))
        builder.emit_func_output(output)
    before = builder.get()
    assert simplified(before).same_as(before)
