"""Calls whose arguments are checked once: the same tensors with new values."""

import numpy as np
import pytest
import tvm
from tvm import relax

import relax_hetero as rh


def machine(donate=None, returned=(), parts=(0, 1)):
    """``main(x, y)`` gives parts of ``(x + y, y * 2)``, and those of the arguments whose positions are `returned`.

    The result is a tuple expression, as in language models, so that prepared calls take the shortest way.
    """
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((4,), "float32")) for name in "xy")
    with builder.function("main", [x, y]):
        with builder.dataflow():
            values = [relax.op.add(x, y), relax.op.multiply(y, relax.const(2, "float32"))]
            results = [builder.emit_output(values[part]) for part in sorted(set(parts))]
        fields = [*(results[part] for part in parts), *((x, y)[position] for position in returned)]
        builder.emit_func_output(relax.Tuple(fields))
    vm = rh.vm.VirtualMachine(rh.compile(builder.finalize(), donate=donate))
    assert vm.executable.metadata.repeated
    return vm


def tensor(*values):
    return tvm.runtime.tensor(np.array(values, "float32"))


def test_values_are_read_anew():
    vm, x, y = machine(), tensor(1, 2, 3, 4), tensor(5, 6, 7, 8)
    run, first = vm.prepare("main", [x, y]), vm.prepare("main", [x, y], results=1)
    for shift in (0, 10):
        x.copyfrom(np.array([1, 2, 3, 4], "float32") + shift)
        total, twice = run()
        np.testing.assert_array_equal(total.numpy(), x.numpy() + y.numpy())
        np.testing.assert_array_equal(twice.numpy(), 2 * y.numpy())
        np.testing.assert_array_equal(first()[0].numpy(), x.numpy() + y.numpy())


def test_donated_memory_stays_the_callers():
    vm, x, y = machine(["y"]), tensor(1, 2, 3, 4), tensor(5, 6, 7, 8)
    run = vm.prepare("main", [x, y])
    for iteration in (1, 2, 3):
        _, twice = run()
        assert twice.data_ptr() == y.data_ptr()
        np.testing.assert_array_equal(twice.numpy(), np.array([5, 6, 7, 8]) * 2**iteration)


def test_no_run_returns_memory_of_arguments_that_are_not_donated():
    vm, x, y = machine(["y"], (0, 1)), tensor(1, 2, 3, 4), tensor(5, 6, 7, 8)
    runs = vm.prepare("main", [x, y], results=4), vm.prepare("main", [x, y])
    for run in (*runs, *runs, *runs):
        _, _, first, second = run()
        assert first.data_ptr() != x.data_ptr()
        np.testing.assert_array_equal([first.numpy(), x.numpy()], [[1, 2, 3, 4]] * 2)
        np.testing.assert_array_equal(second.numpy(), [5, 6, 7, 8])


def test_equal_results_have_memory_of_their_own():
    vm, arguments = machine(parts=(0, 0)), [tensor(1, 2, 3, 4)] * 2
    for run in [vm.prepare("main", arguments, results) for results in (None, 2)] * 3:
        first, second = run()
        assert first.data_ptr() != second.data_ptr()
        np.testing.assert_array_equal([first.numpy(), second.numpy()], [[2, 4, 6, 8]] * 2)


def test_prepared_calls_alongside_submitted_calls():
    vm, x, y = machine(), tensor(1, 2, 3, 4), tensor(5, 6, 7, 8)
    run = vm.prepare("main", [x, y], results=2)
    fences = [vm.submit("main", x, y) for _ in range(8)]
    np.testing.assert_array_equal(run()[1].numpy(), 2 * y.numpy())
    for fence in fences:
        np.testing.assert_array_equal(fence.result(60)[1].numpy(), 2 * y.numpy())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([tensor(1, 2, 3, 4)], "has 2 inputs, found 1"),
        ([tensor(1, 2, 3, 4), tensor(1, 2)], "'y'"),
        ([tensor(1, 2, 3, 4), np.ones((4, 2), "float32")[:, 0]], "would copy an argument"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(rh.HeteroError, match=message):
        machine().prepare("main", arguments)


@pytest.mark.parametrize("results", [-1, 3])
def test_results_that_a_function_lacks(results):
    with pytest.raises(rh.BindingError, match=f"results={results}: function 'main' returns 2 values"):
        machine().prepare("main", [tensor(1, 2, 3, 4)] * 2, results)
