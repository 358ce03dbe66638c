"""Refusals of command buffers: bindings that do not fit what commands require, and recordings that cannot be right."""

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from vm.command_kernels import Kernels, floats


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Kernels))


@pytest.fixture
def recording(vm):
    cb = rh.vm.CommandBuffer(vm, slots=4, parameters=1)
    cb.begin()
    return cb


@pytest.fixture(scope="module")
def adding(vm):
    """Slot 0 and slot 1 from byte 64 on, added into slot 3; slot 2 is not used."""
    cb = rh.vm.CommandBuffer(vm, slots=4)
    cb.begin()
    cb.dispatch("add", 1, [cb.slot(0), cb.slot(1, offset=64), cb.slot(3)])
    cb.end()
    return cb


def arrays():
    return [floats(16, 0), floats(32, 1), None, np.full(16, 3, "float32")]


def read_only(array):
    array.flags.writeable = False
    return array


class ReadOnlyDLPack:
    """An array that says, as DLPack 1.0 does, that it must not be written to."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None, max_version=None, **_):
        return (read_only(self.array) if max_version else self.array.copy()).__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_unused_slots_may_stay_empty(adding):
    x, y, _, out = arrays()
    adding.submit({0: x, 1: y, 3: out})
    np.testing.assert_array_equal(out, x + y[16:])
    adding.submit([x, y, np.zeros(1, "int8"), out])  # or hold anything
    adding.submit([x, (y, 0, 128), None, (out.view("uint8"), 0, 64)])


@pytest.mark.parametrize(
    ("slot", "binding", "message"),
    [
        (0, None, "slot 0 is empty, expected a buffer: commands read it"),
        (0, np.zeros(15, "float32"), "slot 0 is bound to 60 bytes, expected at least 64"),
        (1, np.zeros(31, "float32"), "slot 1 is bound to 124 bytes, expected at least 128"),
        (1, (np.zeros(33, "float32"), 8), "slot 1 is bound to 124 bytes, expected at least 128"),
        (1, (np.zeros(40, "float32"), 8, 64), "slot 1 is bound to 64 bytes, expected at least 128"),
        (1, (np.zeros(40, "float32"), 8, 160), "slot 1 takes 160 from byte 8 on of 160 bytes"),
        (1, (np.zeros(40, "float32"), -8), "slot 1 takes the rest from byte -8 on of 160 bytes"),
        (1, (np.zeros(40, "float32"), 0, 128, 1), "expected a buffer or .buffer, offset, length."),
        (0, np.zeros(16, "int32"), "slot 0 has dtype int32, expected float32"),
        (
            0,
            (np.zeros(70, "uint8"), 1),
            r"slot 0 has the address .*, expected an alignment of 4 bytes \(it is off by 1\)",
        ),
        (0, np.zeros((16, 2), "float32")[:, 0], r"slot 0 has strides \(8,\) for shape \(16,\), expected contiguous"),
        (0, np.zeros(16, ">f4"), "slot 0 has numpy dtype >f4"),
        (0, np.array(["text"] * 16), "slot 0 has numpy dtype <U4"),
        (0, np.ma.masked_array(np.zeros(16, "float32")), "slot 0 is a MaskedArray, expected memory"),
        (0, np.float32(1), "slot 0 is a float32, expected memory"),
        (0, [1.0] * 16, "slot 0 is a list, expected memory"),
        (
            3,
            read_only(np.zeros(16, "float32")),
            "slot 3 is bound to read-only memory, expected writable: commands write",
        ),
        (3, ReadOnlyDLPack(np.zeros(16, "float32")), "slot 3 is bound to read-only memory"),
    ],
)
def test_a_binding_that_does_not_fit(adding, slot, binding, message):
    bindings = arrays()
    out = bindings[3]
    bindings[slot] = binding
    for use in (adding.bind, adding.submit):
        with pytest.raises(rh.BindingError, match=message):
            use(bindings)
    assert (out == 3).all()


def test_tensors_of_another_device(adding):
    bindings = arrays()
    bindings[0] = tvm.runtime.empty((16,), "float32", tvm.cpu(1))
    with pytest.raises(rh.BindingError, match=r"slot 0 is on the device cpu:1, expected cpu:0 \(llvm:0\)"):
        adding.bind(bindings)


def test_read_only_memory_may_be_read(adding):
    x, y, _, out = arrays()
    adding.submit([read_only(x), ReadOnlyDLPack(y), None, out])
    np.testing.assert_array_equal(out, x + y[16:])


@pytest.mark.parametrize("bindings", [5, None, "abc", {7: np.zeros(3)}, {"0": np.zeros(3)}, [None] * 5])
def test_malformed_sets_of_bindings(adding, bindings):
    with pytest.raises(rh.BindingError, match="bindings (are a|name slot)"):
        adding.bind(bindings)


def test_tables_belong_to_their_command_buffer(adding, recording):
    recording.end()
    with pytest.raises(rh.BindingError, match="is another command buffer's"):
        recording.submit(adding.bind(arrays()), [1])


def test_overlapping_bindings_of_which_one_is_written(adding, vm):
    pool = np.zeros(100, "float32")
    with pytest.raises(
        rh.BindingError, match=r"slot 1 and slot 3 share bytes, and commands write slot 3; expected disjoint ranges"
    ):
        adding.bind([pool[:16], pool[16:48], None, pool[47:63]])
    adding.bind([pool[:16], pool[:32], None, pool[32:48]])  # both are read
    cb = rh.vm.CommandBuffer(vm, slots=2, may_overlap=[(1, 0)])
    cb.begin()
    cb.dispatch("shift", 1, [cb.slot(0), cb.slot(1)])
    cb.end()
    values = floats(16, 2)
    expected = values + 1
    cb.submit([values, values])
    np.testing.assert_array_equal(values, expected)


def test_bindings_over_memory_that_the_buffer_keeps(vm):
    array = np.zeros(16, "float32")
    for written in (True, False):
        cb = rh.vm.CommandBuffer(vm, slots=1)
        cb.begin()
        pair = [cb.slot(0), cb.buffer(array)]
        cb.dispatch("shift", 1, pair if written else pair[::-1])
        cb.end()
        name = "buffer 0" if written else "slot 0"
        with pytest.raises(rh.BindingError, match=f"slot 0 and buffer 0 share bytes, and commands write {name}"):
            cb.bind([array])


def test_one_slot_for_two_operands_of_which_one_is_written(vm, recording):
    with pytest.raises(rh.BindingError, match=r"A and B share bytes of slot 0, and one is written.*\(0, 0\)"):
        recording.dispatch("shift", 1, [recording.slot(0), recording.slot(0, offset=60)])
    recording.dispatch("shift", 1, [recording.slot(0), recording.slot(0, offset=64)])
    cb = rh.vm.CommandBuffer(vm, slots=1, may_overlap=[(0, 0)])
    cb.begin()
    cb.dispatch("shift", 1, [cb.slot(0), cb.slot(0)])
    cb.end()
    values = floats(16, 3)
    expected = values + 1
    cb.submit([values])
    np.testing.assert_array_equal(values, expected)


def test_a_kept_buffer_given_twice(recording):
    array = np.zeros(20, "float32")
    with pytest.raises(rh.BindingError, match="A and B share bytes of buffer 0 and buffer 1, and one is written"):
        recording.dispatch("shift", 1, [recording.buffer(array[4:]), recording.buffer(array[:16])])


def test_a_slot_that_kernels_use_as_two_element_types(vm):
    cb = rh.vm.CommandBuffer(vm, slots=2)
    cb.begin()
    cb.dispatch("count_positive", 1, [cb.slot(0), cb.slot(1)])
    cb.dispatch("shift", 1, [cb.slot(0), cb.slot(1)])
    cb.end()
    assert [slot.dtype for slot in cb.spec.slots] == ["float32", ""]
    cb.submit([np.ones(16, "float32"), np.zeros(8, "float64")])  # bytes are all that is asked for


@pytest.mark.parametrize("parameters", [[], [1, 2], [1.5], ["1"], [True], [None], [2**63]])
def test_parameters_that_do_not_fit(recording, parameters):
    recording.fill(recording.slot(0, length=recording.parameter(0)), 0)
    recording.end()
    with pytest.raises(rh.BindingError, match="parameter"):
        recording.submit([np.zeros(100)], parameters)
    recording.submit([np.zeros(100)], [np.int16(8)])


def test_numbers_of_a_submission_that_would_reach_beyond_memory(recording, vm):
    buffer = recording.buffer(np.zeros(8, "uint8"), offset=recording.parameter(0), length=4)
    recording.fill(buffer, np.int16(1))
    recording.end()
    recording.submit([], [4])
    with pytest.raises(
        rh.BindingError, match=r"the end of the target of fill in buffer 0 is 10, .*, expected at most 8"
    ):
        recording.submit([], [6])
    with pytest.raises(
        rh.BindingError, match="the offset of the target of fill in buffer 0 is -2, parameter_0, expected"
    ):
        recording.submit([], [-2])
    with pytest.raises(rh.BindingError, match="expected a multiple of 2"):
        recording.submit([], [3])


def test_scalars_narrower_than_parameters(recording):
    recording.dispatch("above", 1, [recording.slot(0), recording.slot(1)], [recording.parameter(0)])
    recording.end()
    bindings = [np.zeros(16, "float32"), np.zeros(1, "int32")]
    recording.submit(bindings, [2**31 - 1])
    with pytest.raises(
        rh.BindingError, match="scalar 'limit' of kernel 'above' is 2147483648, parameter_0, expected at m"
    ):
        recording.submit(bindings, [2**31])


def test_one_shot_buffers_are_submitted_once(vm):
    cb = rh.vm.CommandBuffer(vm, slots=1, mode="one-shot")
    cb.begin()
    cb.fill(cb.slot(0), np.int64(3))
    cb.end()
    with pytest.raises(rh.BindingError, match="slot 0 is empty"):
        cb.submit([])  # nothing has run
    cb.submit([out := np.zeros(2, "int64")])
    assert out.tolist() == [3, 3]
    with pytest.raises(rh.HeteroError, match="a command buffer is submitted that is submitted, expected ready"):
        cb.submit([out])
