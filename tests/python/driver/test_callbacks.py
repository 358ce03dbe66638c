"""Functions that callers give: their tensors and results, errors, several devices, other functions."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module

X = np.arange(4, dtype="float32")


@tvm.register_global_func("test.callbacks.nothing", override=True)
def nothing(*values):
    pass


@ir_module("llvm", "llvm:1")
class Calls:
    @R.function(private=True, pure=False)
    def inner(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]), False)) -> R.Tuple(
        []
    ):
        _ = f(x)
        return R.tuple()

    @R.function
    def results(
        x: R.Tensor((4,), "float32", "llvm:1"),
        f: R.Callable([R.Tensor((4,), "float32")], R.Tuple(R.Tensor((4,), "float32"), R.Shape(ndim=2))),
        g: R.Callable([R.Tensor((4,), "float32")], R.Tensor((4,), "float32")),
    ):
        with R.dataflow():
            y = R.add(x, x)
            pair = f(y)
            z = g(pair[0])
            w = R.add(z, y)
            R.output(pair, w)
        return R.reshape(w, pair[1])

    @R.function
    def both_devices(
        x: R.Tensor((4,), "float32", "llvm:0"), g: R.Callable([R.Tensor((4,), "float32")], R.Tensor((4,), "float32"))
    ):
        with R.dataflow():
            here = g(R.negative(x))
            there = g(R.negative(R.to_vdevice(x, "llvm:1")))
            a = R.exp(here)
            b = R.exp(there)
            R.output(a, b)
        return (a, b)

    @R.function(pure=False)
    def branches(
        x: R.Tensor((4,), "float32", "llvm:0"),
        f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]), False),
        p: R.Tensor((), "bool", "llvm:0"),
    ):
        cls = Calls
        if p:
            _ = f(x)
            y = R.add(x, x)
        else:
            _1 = cls.inner(x, f)
            y = x
        _2 = R.call_packed("test.callbacks.nothing", y, ty_args=R.Tensor((4,), "float32"))
        return y

    @R.function
    def reads_nothing(x: R.Tensor((4,), "float32", "llvm:0")):
        y = R.call_pure_packed("test.callbacks.nothing", x, ty_args=R.Tensor((4,), "float32", "llvm:0"))
        return R.add(y, x)


@pytest.fixture(scope="module")
def executable():
    return rh.compile(Calls)


@pytest.fixture(params=["called", "submitted"])
def call(executable, request):
    machine = rh.vm.VirtualMachine(executable)
    if request.param == "called":
        return machine.call
    return lambda name, args: machine.submit(name, *args).result(60)


def test_results_come_to_where_they_are_read(call):
    result = call(
        "results", (X, lambda y: (y.numpy() - 1, tvm_ffi.Shape((2, 2))), lambda a: tvm.runtime.tensor(a.numpy() * 10))
    )
    np.testing.assert_allclose(result.numpy(), ((2 * X - 1) * 10 + 2 * X).reshape(2, 2))
    assert result.device == tvm.cpu(1)


def test_tensors_come_from_where_they_are(call):
    devices = []
    results = call("both_devices", (X, lambda y: devices.append(y.device) or y))
    assert sorted(map(str, devices)) == ["cpu:0", "cpu:1"]
    assert [part.device for part in results] == [tvm.cpu(0), tvm.cpu(1)]
    for part in results:
        np.testing.assert_allclose(part.numpy(), np.exp(-X), rtol=1e-6)


@pytest.mark.parametrize("condition", [True, False])
def test_each_branch_calls(call, condition):
    heard = []
    result = call("branches", (X, lambda x: heard.append(x.numpy().tolist()), np.array(condition)))
    assert heard == [X.tolist()]
    np.testing.assert_array_equal(result.numpy(), X * (1 + condition))


def test_a_callback_may_call_the_machine(executable):
    machine, heard = rh.vm.VirtualMachine(executable), []

    def again(x):
        heard.append(machine["branches"](x, nothing, np.array(True)).numpy().tolist())

    np.testing.assert_array_equal(machine["branches"](X, again, np.array(False)).numpy(), X)
    assert heard == [(2 * X).tolist()]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"callback 'g' returned nothing, expected a tensor float32\[4\]"),
        (np.ones(3, "float32"), r"callback 'g' returned a tensor float32\[3\], expected a tensor float32\[4\]"),
        (np.ones(4, "int32"), r"callback 'g' returned a tensor int32\[4\]"),
        (KeyError("lost"), "KeyError: .*lost"),
    ],
)
def test_mistakes_of_a_callback_are_errors(call, value, message):
    def callback(_):
        if isinstance(value, Exception):
            raise value
        return None if value is None else tvm.runtime.tensor(value)

    with pytest.raises(rh.HeteroError, match=message):
        call("both_devices", (X, callback))
    call("both_devices", (X, lambda y: y))  # the machine is usable


def test_a_packed_function_that_returns_nothing_is_named(call):
    with pytest.raises(rh.HeteroError, match="packed function 'test.callbacks.nothing' returned nothing"):
        call("reads_nothing", (X,))


@pytest.mark.parametrize("value", [None, 3, "f"])
def test_an_argument_that_is_not_a_function_is_refused(call, value):
    with pytest.raises(rh.BindingError, match=f"argument 'g' of 'both_devices' is {value!r}.* expected a function"):
        call("both_devices", (X, value))


def test_signatures_say_that_they_are_functions(executable, tmp_path):
    executable.export_library(str(tmp_path / "calls.so"))
    assert "g: function" in str(rh.load(str(tmp_path / "calls.so")).signature("both_devices"))
