"""Refusals while a command buffer is recorded: commands that cannot be right, and calls in the wrong state."""

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from vm.command_kernels import Kernels


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Kernels))


@pytest.fixture
def recording(vm):
    cb = rh.vm.CommandBuffer(vm, slots=4, parameters=1)
    cb.begin()
    return cb


def read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda cb, a, b: cb.slot(4), "slot 4 is not among the 4 slots"),
        (lambda cb, a, b: cb.slot(True), "slot True is not among"),
        (lambda cb, a, b: cb.parameter(1), "parameter 1 is not among the 1 parameters"),
        (
            lambda cb, a, b: cb.slot(0, offset=1.5),
            "the offset in slot 0 is 1.5 .float., expected an integer or a parameter",
        ),
        (lambda cb, a, b: cb.fill(cb.slot(0, offset=-4), 0), "the offset of the target of fill in slot 0 is -4"),
        (
            lambda cb, a, b: cb.fill(cb.slot(0, length=6), np.float32(1)),
            "the length of fill in slot 0 is 6, expected a multiple of 4",
        ),
        (
            lambda cb, a, b: cb.fill(cb.slot(0, offset=2), np.float32(1)),
            "offset of the target of fill in slot 0 is 2, expected a mul",
        ),
        (lambda cb, a, b: cb.fill(cb.slot(0), b"abc"), "the pattern of fill has 3 bytes, expected 1, 2, 4 or 8"),
        (lambda cb, a, b: cb.fill(cb.slot(0), 1.5), "fill with the number 1.5 needs dtype="),
        (lambda cb, a, b: cb.fill(cb.slot(0), 300, "uint8"), "pattern of fill, 300, is not an element of uint8"),
        (
            lambda cb, a, b: cb.fill(cb.slot(0), 1e300, "float32"),
            "pattern of fill, 1e[+]300, is not an element of float32",
        ),
        (lambda cb, a, b: cb.fill(cb.slot(0), 1, "text"), "pattern of fill, 1, is not an element of text"),
        (lambda cb, a, b: cb.fill(np.zeros(4), 0), "the target of fill is a ndarray, expected slot"),
        (
            lambda cb, a, b: cb.copy(cb.slot(0, length=4), cb.slot(1, length=8)),
            "4 and 8 bytes, expected the same length",
        ),
        (
            lambda cb, a, b: cb.copy(cb.slot(0, length=8), cb.slot(0, 4, 8)),
            "the source and the target share bytes of slot 0",
        ),
        (
            lambda cb, a, b: cb.copy(cb.slot(0), cb.buffer(read_only(np.zeros(4)), length=8)),
            "buffer 0, which is read-only",
        ),
        (
            lambda cb, a, b: cb.fill(cb.buffer(np.zeros(4), 8, 32), 0),
            "the end of the target of fill in buffer 0 is 40, expected at most 32",
        ),
        (lambda cb, a, b: cb.buffer(np.zeros((4, 4)).T), "the buffer has strides"),
        (
            lambda cb, a, b: cb.buffer(tvm.runtime.empty((4,), "int8", tvm.cpu(3))),
            "the buffer is on the device cpu:3, expected cpu:0",
        ),
        (lambda cb, a, b: cb.dispatch("no", 1, []), "the executable has no kernel 'no'; it has "),
        (lambda cb, a, b: cb.dispatch("shft", 1, []), "did you mean 'shift'"),
        (lambda cb, a, b: cb.dispatch(3, 1, []), "a kernel is a int, expected its name"),
        (lambda cb, a, b: cb.dispatch("shift", 1, [a]), "kernel 'shift' is given 1 operands, expected 2: A, B"),
        (lambda cb, a, b: cb.dispatch("shift", -1, [a, b]), "workgroup count of kernel 'shift' along x is -1"),
        (lambda cb, a, b: cb.dispatch("shift", (), [a, b]), "the grid has 0 workgroup counts"),
        (lambda cb, a, b: cb.dispatch("shift", (1, 1, 1, 1), [a, b]), "the grid has 4 workgroup counts"),
        (
            lambda cb, a, b: cb.dispatch("shift", 1, [cb.slot(0), cb.slot(1, length=60)]),
            "length that tensor 'B' of kernel 'shift' has in slot 1",
        ),
        (
            lambda cb, a, b: cb.dispatch("shift", 1, [cb.slot(0), cb.slot(1, offset=2)]),
            "offset of tensor 'B' of kernel 'shift' in slot 1 is 2, expected a multiple",
        ),
        (
            lambda cb, a, b: cb.dispatch("shift", 1, [cb.slot(0), cb.buffer(np.zeros(15, "float32"))]),
            "the end of tensor 'B' .* is 64, expected at most 60",
        ),
        (
            lambda cb, a, b: cb.dispatch("scale", 1, [a, b]),
            "kernel 'scale' is given 0 scalars, expected n: int64, factor: float32",
        ),
        (lambda cb, a, b: cb.dispatch("scale", 1, [a, b], {"n": 1}), "is given the scalars n, expected n: int64"),
        (lambda cb, a, b: cb.dispatch("scale", 1, [a, b], [1.5, 2]), "scalar 'n' of kernel 'scale' is 1.5"),
        (lambda cb, a, b: cb.dispatch("scale", 1, [a, b], [1, "x"]), "scalar 'factor' of kernel 'scale' is 'x'"),
        (lambda cb, a, b: cb.dispatch("scale", 1, [a, b], [-1, 2]), "extent of tensor 'A' .* along axis 0 is -1"),
        (
            lambda cb, a, b: cb.dispatch("above", 1, [a, b], [2**31]),
            "scalar 'limit' .* is 2147483648, expected at most 2147483647",
        ),
        (
            lambda cb, a, b: cb.dispatch_indirect("mark", cb.slot(0, length=16), [b]),
            "count of kernel 'mark' has 16 bytes",
        ),
        (
            lambda cb, a, b: cb.dispatch_indirect("mark", cb.slot(0, offset=2), [b]),
            "offset of the count of kernel 'mark' in slot 0 is 2",
        ),
        (lambda cb, a, b: cb.dispatch("shift", 1, [a, b], when=5), "when of kernel 'shift' is a int"),
        (lambda cb, a, b: cb.parameter(0) // 0, "a parameter is divided by 0"),
        (lambda cb, a, b: cb.parameter(0) * 1.5, "1.5 .float. in arithmetic of parameters"),
        (
            lambda cb, a, b: cb.dispatch("shift", 1, [cb.buffer(np.zeros(16)), b]),
            "tensor 'A' of kernel 'shift' has dtype float64 in buffer 0, expected float32",
        ),
    ],
)
def test_commands_that_cannot_be_recorded(recording, record, message):
    with pytest.raises(rh.BindingError, match=message):
        record(recording, recording.slot(0), recording.slot(1))


def test_a_command_that_is_refused_asks_for_nothing(recording):
    a, n = recording.slot(0, offset=128), recording.parameter(0)
    for refused in (
        lambda: recording.dispatch("scale", 1, [a, recording.slot(1)], [n, "x"]),
        lambda: recording.dispatch("add", n, [a, a, a]),
        lambda: recording.copy(a, recording.slot(0, offset=-1)),
        lambda: recording.fill(recording.slot(1, offset=n, length=3), b"ab"),
    ):
        with pytest.raises(rh.BindingError):
            refused()
    recording.fill(recording.slot(0, length=4), 0)
    recording.end()
    assert [(slot.nbytes, slot.access) for slot in recording.spec.slots] == [(4, "write"), (0, ""), (0, ""), (0, "")]
    recording.submit([np.zeros(1, "float32")], [-1])


def test_ranges_of_another_command_buffer(recording, vm):
    other = rh.vm.CommandBuffer(vm, slots=1)
    with pytest.raises(rh.BindingError, match="the target of fill is a range of another command buffer"):
        recording.fill(other.slot(0), 0)


def test_states(vm):
    cb = rh.vm.CommandBuffer(vm, slots=1)
    for use in (lambda: cb.fill(cb.slot(0), 0), cb.barrier, cb.end):
        with pytest.raises(rh.HeteroError, match="a command buffer is .* that is new, expected recording"):
            use()
    for use in (lambda: cb.bind([]), cb.submit, lambda: cb.spec):
        with pytest.raises(rh.HeteroError, match="that is new, expected ready"):
            use()
    cb.begin()
    with pytest.raises(rh.HeteroError, match="a command buffer is begun that is recording, expected new"):
        cb.begin()
    cb.fill(cb.slot(0), 0)
    with pytest.raises(rh.HeteroError, match="a command buffer is submitted that is recording, expected ready"):
        cb.submit([np.zeros(1)])
    cb.end()
    for use in (cb.begin, cb.end, cb.barrier, lambda: cb.copy(cb.slot(0), cb.slot(0))):
        with pytest.raises(rh.HeteroError, match="that is ready, expected"):
            use()
    cb.submit([np.zeros(1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:0"}, "no device 'cuda:0'"),
        ({"slots": -1}, "slots is -1"),
        ({"slots": 1.0}, "slots is 1.0"),
        ({"parameters": True}, "parameters is True"),
        ({"mode": "sometimes"}, "mode is 'sometimes', expected 'reusable' or 'one-shot'"),
        ({"slots": 2, "may_overlap": [(0, 2)]}, r"may_overlap has \(0, 2\), expected pairs of the 2 slots"),
        ({"slots": 2, "may_overlap": [1]}, "may_overlap has 1, expected pairs"),
        ({"slots": 2, "may_overlap": 1}, "may_overlap has 1, expected pairs"),
    ],
)
def test_command_buffers_that_cannot_be(vm, options, message):
    with pytest.raises(rh.BindingError, match=message):
        rh.vm.CommandBuffer(vm, **options)


def test_command_buffers_need_a_machine(vm):
    with pytest.raises(rh.BindingError, match="takes a VirtualMachine, found Executable"):
        rh.vm.CommandBuffer(vm.executable)


@ir_module("c")
class InC:
    @T.prim_func(s_tir=True)
    def shift(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("shift"):
                vi = T.axis.spatial(16, i)
                B[vi] = A[vi] + T.float32(1)


def test_kernels_of_c_devices_have_no_address():
    cb = rh.vm.CommandBuffer(rh.vm.VirtualMachine(rh.compile(InC)), "c:0", slots=2)
    cb.begin()
    with pytest.raises(
        rh.BindingError, match="kernel 'shift' is code of the kind 'c', expected one that has an address"
    ):
        cb.dispatch("shift", 1, [cb.slot(0), cb.slot(1)])
    cb.copy(cb.slot(0), cb.slot(1))
    cb.end()
    cb.submit([np.arange(4), out := np.zeros(4, "int64")])
    assert out.tolist() == [0, 1, 2, 3]
