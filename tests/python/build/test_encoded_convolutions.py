"""Models whose convolutions are encoded: numbers on every kind of CPU and with layouts of others."""

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.encoding import PackedLayout
from transform.numpy_convolution import convolve
from transform.reference_convolution import NHWC, OHWI16O, reference_resolver

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
V3 = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
TARGETS = {"avx512": V4, "avx2": V3, "sse": {"kind": "llvm", "mcpu": "x86-64-v2"}, "c": "c"}
ONES = (1, 1)


@I.ir_module
class Block:
    """A residual block: two convolutions, a bias, an addition and an activation."""

    @R.function
    def main(
        x: R.Tensor((1, 20, 9, 7), "float32"),
        w: R.Tensor((24, 20, 3, 3), "float32"),
        v: R.Tensor((20, 24, 1, 1), "float32"),
        bias: R.Tensor((1, 24, 1, 1), "float32"),
    ):
        with R.dataflow():
            a = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
            b = R.nn.relu(R.add(a, bias))
            c = R.nn.conv2d(b, v)
            d = R.nn.relu(R.add(x, c))
            R.output(d)
        return d


def inputs_of(mod, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [[int(extent) for extent in param.ty.shape.values] for param in mod["main"].params]
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


def block_of(x, w, v, bias):
    a = np.maximum(convolve(x, w, ONES, (1, 1, 1, 1), ONES) + bias, 0)
    return np.maximum(convolve(a, v, ONES, (0,) * 4, ONES) + x, 0)


def run(exe, *args):
    return rh.vm.VirtualMachine(exe)["main"](*args).numpy()


def on(mod, *targets):
    return rh.vdevice.with_vdevices(mod, [rh.VDevice(target) for target in targets])


def ops_of(exe):
    """What each dispatch computes, in order of names; those of shapes left out."""
    return sorted(dispatch.ops for dispatch in exe.metadata.dispatches.values() if dispatch.ops)


def check(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_a_residual_block(name):
    inputs = inputs_of(Block)
    exe = rh.compile(on(Block, TARGETS[name]), params=dict(zip("wv", inputs[1:3], strict=True)))
    check(run(exe, inputs[0], inputs[3]), block_of(*inputs))


LAYOUTS = {
    "NCHW16c": {},
    "NHWC": {"data": NHWC, "result": NHWC},
    "to NCHW": {"data": NHWC, "result": PackedLayout.identity(4)},
    "all plain": {side: PackedLayout.identity(4) for side in ("data", "weight", "result")},
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_another_resolver(name, bound):
    inputs = inputs_of(Block)
    params = dict(zip("wv", inputs[1:3], strict=True)) if bound else None
    with reference_resolver(**LAYOUTS[name]) as resolver:
        exe = rh.compile(on(Block, V4), params=params)
    check(run(exe, *(inputs[::3] if bound else inputs)), block_of(*inputs))
    assert len({problem.weight for problem in resolver.problems}) == 2
    assert ("conv2d", "add", "relu") in ops_of(exe)
