"""`rh.compile(accuracy=...)`: forms of convolutions, their cost, and reports about them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import BuildError
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.ir.module_attrs import ACCURACY
from seeds import fresh_rng
from tir.kernel_runs import runs_here
from transform.numpy_convolution import convolve

V4 = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 2}
WEIGHTS = {"v": (64, 48, 3, 3), "w": (64, 64, 3, 3)}


@ir_module()
def Two(
    x: R.Tensor((1, 48, 27, 28), "float32"),
    v: R.Tensor((64, 48, 3, 3), "float32"),
    w: R.Tensor((64, 64, 3, 3), "float32"),
    bias: R.Tensor((1, 64, 1, 1), "float32"),
):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        first = R.nn.conv2d(x, v, padding=[1, 1, 1, 1])
        first_relu = R.nn.relu(R.add(first, bias))
        head = R.nn.conv2d(first_relu, w, padding=[1, 1, 1, 1])
        out = R.add(head, first_relu)
        R.output(out)
    return out


_rng = np.random.default_rng(7)
PARAMS = {
    name: _rng.standard_normal(shape).astype("float32") for name, shape in {**WEIGHTS, "bias": (1, 64, 1, 1)}.items()
}
_compiled: dict[str, rh.vm.Executable] = {}


def compiled(accuracy, target=V4, weights=PARAMS):
    key = f"{accuracy} {target} {list(weights)}"
    if key not in _compiled:
        mod = with_vdevices(Two, [rh.VDevice(target)])
        _compiled[key] = rh.compile(mod, weights, accuracy=accuracy, cache=False)
    return _compiled[key]


def forms(executable) -> list[str]:
    return [op["form"].partition(":")[0] for op in executable.metadata.encodings["ops"]]


DIRECT, F2, F4 = "direct", "F(2x2, 3x3)", "F(4x4, 3x3)"


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        ("exact", [DIRECT, DIRECT]),
        ("default", [F2, F2]),
        pytest.param({"head": "exact"}, [F2, DIRECT], marks=pytest.mark.slow),
        ({"*": "fast", "fir*": "default"}, [F2, F4]),
    ],
)
def test_results_of_every_form(accuracy, expected) -> None:
    executable = compiled(accuracy)
    assert forms(executable) == expected
    if not runs_here("avx512"):
        pytest.skip("needs AVX-512")
    x = fresh_rng().standard_normal((1, 48, 27, 28)).astype("float32")
    moves = {"strides": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1)}
    first = np.maximum(convolve(x, PARAMS["v"], **moves) + PARAMS["bias"], 0)
    want = convolve(first, PARAMS["w"], **moves) + first
    got = rh.vm.VirtualMachine(executable)["main"](x).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_memory_counts_transformed_weights() -> None:
    bytes_of = {}
    for accuracy in ("exact", "default"):
        bytes_of[accuracy] = compiled(accuracy).memory_plan.weights(0)
    windows = sum(int(np.prod(shape[:2])) for shape in WEIGHTS.values()) * 4
    assert bytes_of["default"] - bytes_of["exact"] == (16 - 9) * windows


def test_explain_says_which_form_and_why(capsys) -> None:
    compiled({"first": "exact"}).explain("encodings")
    shown = capsys.readouterr().out
    assert "Forms of convolutions" in shown
    assert "accuracy is 'exact'" in shown
    assert "of the direct form's time" in shown


def test_weights_of_a_call_and_other_cpus_keep_the_direct_form() -> None:
    forms = [op["form"] for op in compiled("fast", weights={}).metadata.encodings["ops"]]
    assert forms == ["direct: the weights are not known when the model is compiled"] * 2
    forms = [op["form"] for op in compiled("fast", V2).metadata.encodings["ops"]]
    assert forms == ["direct: not measured to be faster with sse"] * 2


@pytest.mark.parametrize(
    ("accuracy", "message"),
    [
        ("some", "rh.compile: accuracy is 'some', expected one of 'default', 'exact', 'fast'"),
        ({"head": 1}, "rh.compile: accuracy of 'head' is 1, expected one of"),
        ({"haed": "fast"}, "accuracy has 'haed', which names no convolution; near names: 'head'"),
        ({"typo": "default"}, "accuracy has 'typo', which names no convolution; and no name is near it"),
        ({"first_relu": "exact"}, "accuracy has 'first_relu', which names no convolution; near names: 'first'"),
        (None, "rh.compile: accuracy is None, expected one of"),
    ],
)
def test_unknown_accuracies_are_refused(accuracy, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        compiled(accuracy)


def test_the_default_leaves_no_mark() -> None:
    from relax_hetero.transform.encode.accuracies import with_accuracy

    assert with_accuracy(Two, {"*": "default"}, "test").same_as(Two)
    assert with_accuracy(Two, {"first": "fast"}, "test").attrs[ACCURACY][0][1] == "fast"
    assert isinstance(Two, tvm.IRModule)
