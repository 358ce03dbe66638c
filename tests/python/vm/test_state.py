"""Parameters given once, and the set_input / invoke_stateful / get_output style."""

import threading

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from vm.queue_models import Gate, Pipeline, kernels

X, W, B = np.array([1, 2, 3], "float32"), np.array([4, 5, 6], "float32"), np.array([0.5], "float32")


def test_parameters_are_given_once(weighted):
    vm = rh.vm.VirtualMachine(weighted)
    vm.set_params({"w": W, "b": B})
    for _ in range(2):
        np.testing.assert_array_equal(vm["main"](X).numpy(), X * W + B)
    vm.set_params([W * 2, B])
    np.testing.assert_array_equal(vm["main"](X).numpy(), X * W * 2 + B)


def test_parameters_may_come_in_parts_and_be_replaced_for_a_call(weighted):
    vm = rh.vm.VirtualMachine(weighted)
    vm.set_params({"w": W})
    with pytest.raises(rh.BindingError, match="takes 1 input and 2 parameters, found 1: 'b' missing; 'b': parameters"):
        vm["main"](X)
    vm.set_params({"b": B})
    np.testing.assert_array_equal(vm["main"](X).numpy(), X * W + B)
    np.testing.assert_array_equal(vm["main"](X, b=B + 1).numpy(), X * W + B + 1)
    np.testing.assert_array_equal(vm["main"](X).numpy(), X * W + B)


def test_parameters_belong_to_the_machine(weighted):
    vm = rh.vm.VirtualMachine(weighted)
    w = W.copy()
    vm.set_params({"w": w, "b": B})
    w[:] = 0
    np.testing.assert_array_equal(vm["main"](X).numpy(), X * W + B)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"W": W}, "function 'main' has no parameter 'W'; it has 'w', 'b'; did you mean 'w'"),
        ({"x": X}, "function 'main' has no parameter 'x'"),
        ([W], "'main' takes 2 parameters, found 1"),
        ({"b": np.zeros(2, "float32")}, "parameter 'b' of 'main' dimension 0 is 2, expected 1"),
        ({"w": W.astype("int32")}, "parameter 'w' of 'main' has dtype int32"),
    ],
)
def test_wrong_parameters_change_nothing(weighted, params, message):
    vm = rh.vm.VirtualMachine(weighted)
    vm.set_params({"w": W, "b": B})
    with pytest.raises(rh.BindingError, match=message):
        vm.set_params(params)
    np.testing.assert_array_equal(vm["main"](X).numpy(), X * W + B)


def test_symbols_of_parameters_bind_arguments(weighted):
    vm = rh.vm.VirtualMachine(weighted)
    vm.set_params({"w": W, "b": B})
    with pytest.raises(
        rh.BindingError, match="argument 'x' of 'main' dimension 0 is 2, expected 3: n is 3 by parameter"
    ):
        vm["main"](X[:2])
    vm.set_params({"w": W[:2]})
    np.testing.assert_array_equal(vm["main"](X[:2]).numpy(), X[:2] * W[:2] + B)


def test_a_function_without_parameters(chain):
    vm = rh.vm.VirtualMachine(chain)
    vm.set_params({})
    with pytest.raises(rh.BindingError, match="no function 'mein'"):
        vm.set_params({}, "mein")


def test_stateful_calls(chain):
    vm = rh.vm.VirtualMachine(chain)
    x, w = np.zeros((2, 4), "float32"), np.ones(4, "float32")
    vm.set_input("main", x, w=w)
    x[:] = 9  # what was set stays
    vm.invoke_stateful("main")
    z, y = vm.get_outputs("main")
    np.testing.assert_array_equal(z.numpy(), np.full((2, 4), 2))
    np.testing.assert_array_equal(vm.get_output("main", 1).numpy(), y.numpy())
    vm.set_input("twice", w)
    vm.invoke_stateful("twice")
    vm.invoke_stateful("twice")
    np.testing.assert_array_equal(vm.get_output("twice").numpy(), w * 2)
    assert vm.get_outputs("main")[0].same_as(z)


def test_stateful_calls_out_of_order(chain):
    vm = rh.vm.VirtualMachine(chain)
    with pytest.raises(rh.BindingError, match=r"'main' has no inputs set; expected set_input\('main', ...\) first"):
        vm.invoke_stateful("main")
    with pytest.raises(rh.BindingError, match="'main' has no outputs"):
        vm.get_outputs("main")
    with pytest.raises(rh.BindingError, match="'w' missing"):
        vm.set_input("main", np.zeros((2, 4), "float32"))
    vm.set_input("twice", tvm.runtime.tensor(np.ones(4, "float32")))
    vm.invoke_stateful("twice")
    with pytest.raises(rh.BindingError, match="'twice' has 1 outputs, found index 1"):
        vm.get_output("twice", 1)
    with pytest.raises(rh.BindingError, match="no function 'thrice'"):
        vm.set_input("thrice")


def test_runs_of_inputs_set_before_wait_for_gpus(monkeypatch):
    """Graphs of a GPU have one arena each, which a call in flight may be using."""
    vm = rh.vm.VirtualMachine(rh.compile(Pipeline))
    monkeypatch.setattr(vm._submitter, "is_cpu_only", False)
    x, gate = np.arange(5, dtype="float32"), Gate()
    vm.set_input("one", x)
    with kernels(gate):
        fence = vm.submit("main", x)
        run = threading.Thread(target=vm.invoke_stateful, args=("one",))
        run.start()
        gate.wait()
        run.join(0.05)
        assert run.is_alive()
        gate.open()
        run.join(30)
        assert fence.done()
    np.testing.assert_array_equal(vm.get_output("one").numpy(), x * x)
