"""Convolutional networks for a GPU: channels-last between the ends, one kernel for a convolution and its neighbours."""

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform import ToMixedPrecision


@I.ir_module
class Network:
    """First layer, pooling, a residual block, a depthwise convolution, the mean of every channel."""

    @R.function
    def main(
        x: R.Tensor((2, 3, 17, 15), "float32"),
        w0: R.Tensor((16, 3, 5, 5), "float32"),
        b0: R.Tensor((1, 16, 1, 1), "float32"),
        w1: R.Tensor((16, 16, 3, 3), "float32"),
        b1: R.Tensor((1, 16, 1, 1), "float32"),
        w2: R.Tensor((16, 1, 3, 3), "float32"),
        w3: R.Tensor((24, 16, 1, 1), "float32"),
    ) -> R.Tensor((2, 24, 1, 1), "float32"):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            first = R.nn.relu(R.add(R.nn.conv2d(x, w0, strides=2, padding=2), b0))
            pooled = R.nn.max_pool2d(first, [3, 3], strides=[2, 2], padding=[1, 1, 1, 1])
            inner = R.add(R.nn.conv2d(pooled, w1, padding=1), b1)
            block = R.nn.relu(R.add(inner, pooled))
            deep = R.clip(R.nn.conv2d(block, w2, padding=1, groups=16), 0, 6)
            wide = R.nn.silu(R.nn.conv2d(deep, w3))
            y = R.nn.adaptive_avg_pool2d(wide, [1, 1])
            R.output(y)
        return y


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float16"])
@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_a_network_is_channels_last(dtype, arch):
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, param.ty.shape.values)) for param in Network["main"].params]
    x, *weights = ((rng.standard_normal(shape) * 0.3).astype("float32") for shape in shapes)
    names = [param.name for param in Network["main"].params]
    bound = relax.transform.BindParams("main", dict(zip(names[1:], weights, strict=True)))(Network)
    want = rh.vm.VirtualMachine(rh.compile(bound, cache=False))["main"](x).numpy()
    placed = with_vdevices(bound, [rh.VDevice({"kind": "cuda", "arch": arch})])
    model = InterpretedModel(placed if dtype == "float32" else ToMixedPrecision(dtype)(placed))
    np.testing.assert_allclose(model(x), want, atol=1e-5 if dtype == "float32" else 5e-3)
    assert sum("conv2d" in name for name in model.launched) == 4, model.launched
    # Only the image is laid out, for the last map lacks extents.
    assert sum("transpose" in name or "pack_" in name for name in model.launched) == 1, model.launched


H200 = {"kind": "cuda", "arch": "sm_90a"}


@I.ir_module
class Grouped:
    """Groups of few channels, as ResNeXt has them."""

    @R.function
    def main(x: R.Tensor((1, 64, 6, 5), "float32"), w: R.Tensor((128, 8, 3, 3), "float32")) -> R.Tensor(
        (1, 128, 3, 3), "float32"
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.nn.relu(R.nn.conv2d(x, w, strides=2, padding=1, groups=8))
            R.output(y)
        return y


def test_small_groups_join_on_tensor_cores():
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype("float32") * 0.3 for shape in ((1, 64, 6, 5), (128, 8, 3, 3)))
    bound = relax.transform.BindParams("main", {"w": w})(Grouped)
    want = rh.vm.VirtualMachine(rh.compile(bound, cache=False))["main"](x).numpy()
    model = InterpretedModel(ToMixedPrecision("float16")(with_vdevices(bound, [rh.VDevice(H200)])))
    np.testing.assert_allclose(model(x), want, atol=5e-3)
