"""What was tried to break command buffers with: numbers, names, kernels and memory that nobody should give."""

import gc

import numpy as np
import pytest
from tvm import relax, te
from tvm.ir import assert_structural_equal

import relax_hetero as rh
from vm.command_kernels import Kernels


def added(amount, negated=False):
    """A module with a kernel that adds to four numbers, and a function that calls it twice, on an input or minus it."""
    builder = relax.BlockBuilder()
    a = te.placeholder((4,), "float32", "a")
    kernel = te.create_prim_func([a, te.compute((4,), lambda i: a[i] + amount)]).with_attr("op_pattern", 8)
    step = builder.add_func(kernel, "step")
    ty = relax.TensorType((4,), "float32")
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        with builder.dataflow():
            first = builder.emit(relax.op.negative(x)) if negated else x
            y = builder.emit(relax.call_tir(step, [first], ty))
            z = builder.emit_output(relax.call_tir(step, [y], ty))
        builder.emit_func_output(z)
    return builder.get()


@pytest.fixture(scope="module")
def machine():
    return rh.vm.VirtualMachine(rh.compile(added(1.0)))


def recording(machine, **options):
    buffer = rh.vm.CommandBuffer(machine, **{"slots": 2, "parameters": 1, **options})
    buffer.begin()
    return buffer


def test_kernels_of_another_executable(machine):
    """Of the same name as one of its own, and gone from memory unless the kernel keeps them there."""
    other = rh.vm.VirtualMachine(rh.compile(added(10.0)))
    kernel, own = other.kernel("step"), machine.kernel("step")
    buffer = recording(machine)
    with pytest.raises(rh.BindingError, match="kernel 'step' is another executable's"):
        buffer.dispatch(kernel, 1, [buffer.slot(0), buffer.slot(1)])
    sibling = recording(rh.vm.VirtualMachine(machine.executable))
    sibling.dispatch(own, 1, [sibling.slot(0), sibling.slot(1)])
    sibling.end(compiled=False)
    result = np.zeros(4, "float32")
    sibling.submit([np.ones(4, "float32"), result], [0])
    assert (result == 2).all()
    del other
    gc.collect()
    x = np.ones(4, "float32")
    assert kernel.function(x.ctypes.data, result.ctypes.data) == 0 and (result == 11).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_numbers_that_commands_cannot_count_in(machine, compiled):
    buffer = recording(machine)
    number = buffer.parameter(0)
    for far in (lambda: buffer.slot(0, 2**63), lambda: number * 2**64, lambda: buffer.slot(0, 0, -(2**64))):
        with pytest.raises(rh.BindingError, match="expected a number of type int64"):
            far()
    with pytest.raises(rh.BindingError, match="the workgroup count along x is 0x1000000000000000000"):
        buffer.dispatch("step", 2**72, [buffer.slot(0), buffer.slot(1)])
    with pytest.raises(rh.BindingError, match="arithmetic of parameters takes 1001 characters, expected at most 1000"):
        for _ in range(250):
            number = number + 1
    buffer.fill(buffer.slot(0, 0, number), b"a")  # as deep as it goes
    buffer.end(compiled)
    given = np.zeros(1000, "int8")
    buffer.submit([given], [3])
    assert 0 < (given == ord("a")).sum() == 3 + (number.text.count("+"))
    with pytest.raises(rh.BindingError, match="parameter 0 is 0x8000000000000000, expected a number of type int64"):
        buffer.submit([given], [2**63])


@pytest.mark.parametrize("compiled", [True, False])
def test_floats_beyond_their_type(compiled):
    machine = rh.vm.VirtualMachine(rh.compile(Kernels))
    buffer = recording(machine)
    places = [buffer.slot(0), buffer.slot(1)]
    for far in (1e39, -(10**400)):
        with pytest.raises(rh.BindingError, match="scalar 'factor' of kernel 'scale' is beyond the numbers of float32"):
            buffer.dispatch("scale", 1, places, {"n": 4, "factor": far})
    buffer.dispatch("scale", 1, places, {"n": 4, "factor": float("-inf")})
    buffer.dispatch("scale", 1, places[::-1], {"n": 4, "factor": buffer.parameter(0)})
    buffer.end(compiled)
    x, y = np.ones(4, "float32"), np.zeros(4, "float32")
    with pytest.raises(rh.BindingError, match="parameter 0 is beyond the numbers of float64"):
        buffer.submit([x, y], [10**400])
    assert (x == 1).all() and (y == 0).all()
    buffer.submit([x, y], [-2.5])
    assert (x == np.inf).all() and (y == -np.inf).all()


def test_a_pass_that_comes_too_early_leaves_the_module_to_those_before_it():
    early = rh.transform.RealizeVDevice()(added(1.0, negated=True))
    formed = rh.transform.FormCommandBuffers()(early)
    assert_structural_equal(formed, early)
    exe = rh.compile(formed)
    assert len(exe.metadata.regions) == 1
    x = np.arange(4, dtype="float32")
    np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](x).numpy(), 2 - x)
