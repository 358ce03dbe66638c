"""Arguments of any kind: the right numbers, or an error that names the argument; never a crash."""

import ctypes
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from relax_hetero.vm.device.tensors import capsule_pointer

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
W = np.array([1, 2, 3, 4], "float32")


@pytest.fixture(scope="module")
def vm(chain):
    return rh.vm.VirtualMachine(chain)


@pytest.fixture(scope="module")
def plumber(plumbing):
    return rh.vm.VirtualMachine(plumbing)


class Producer:
    """An object with ``__dlpack__``, over an array or a capsule, that misbehaves as configured."""

    def __init__(self, array=None, capsule=None, error=None, device=(1, 0)):
        self.array, self.capsule, self.error, self.device = array, capsule, error, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **how):
        if self.error is not None:
            raise self.error
        return self.capsule if self.capsule is not None else self.array.__dlpack__(**how)


class Header(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def forged(shape=None, strides=None, **fields):
    """A TVM tensor over X with forged fields."""
    owner = tvm.runtime.tensor(X)
    capsule = owner._to_dlpack()
    header = Header.from_address(capsule_pointer(capsule, b"dltensor"))
    for name, value in fields.items():
        setattr(header, name, value)
    numbers = [(ctypes.c_int64 * len(some))(*some) if some is not None else None for some in (shape, strides)]
    if shape is not None:
        header.ndim, header.shape = len(shape), numbers[0]
    if shape is not None or strides is not None:
        header.strides = numbers[1]
    tensor = tvm_ffi.from_dlpack(capsule)
    _kept.append((owner, numbers))
    return tensor


_kept = []


@st.composite
def layouts(draw):
    """An array of shape (n, 4) somewhere in memory, by any strides, byte order and offset."""
    rows = draw(st.integers(0, 5))
    offset = draw(st.sampled_from([0, 0, 1, 2, 4, 12, 16, 64]))
    memory = np.frombuffer(bytearray(offset) + bytearray(np.arange(64, dtype="float32").tobytes()), "uint8")
    flat = memory[offset:].view(draw(st.sampled_from(["<f4", ">f4"])))
    strides = draw(st.sampled_from([(16, 4), (32, 8), (4, 4), (0, 4), (16, 0), (0, 0), (4, 20), (-16, 4), (-16, -4)]))
    begin = flat[63 if min(strides) < 0 else 0 :] if -4 not in strides else flat[63:]
    if min(strides) < 0 and -4 not in strides:
        begin = flat[60:]
    array = np.lib.stride_tricks.as_strided(begin, (rows, 4), strides)
    if draw(st.booleans()):
        array.flags.writeable = False
    return array


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(layouts(), layouts(), st.booleans())
def test_layouts_of_numpy(vm, array, buffer, is_submitted):
    with np.errstate(all="ignore"):
        expected = np.exp(array.astype("float32"))
    result = vm.submit("main", array, W).result() if is_submitted else vm["main"](array, W)
    np.testing.assert_allclose(result[1], expected, rtol=1e-5)
    out = (np.empty((len(array), 4), "float32"), np.zeros(64, "float32").reshape(16, 4)[: len(array)])
    vm["main"](array, W, out=out)
    np.testing.assert_allclose(out[1], expected, rtol=1e-5)
    if len(buffer) == len(array):
        try:
            vm["main"](array, W, out=(out[0], buffer))
        except rh.BindingError as error:
            assert "out" in str(error)
        else:
            np.testing.assert_allclose(buffer, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "value, message",
    [
        (X.tolist(), "is a list, expected a tensor"),
        (memoryview(X), "is a memoryview, expected a tensor"),
        (b"1234", "is a bytes"),
        (None, "is a NoneType"),
        (X.astype(object), "numpy dtype object"),
        (X.astype(str), "numpy dtype <U32"),
        (np.zeros((3, 4), "M8[s]"), "numpy dtype datetime64"),
        (np.zeros((3, 4), [("a", "f4")]), r"numpy dtype \[\('a'"),
        (np.zeros((3, 4), "V4"), "dtype |V4"),
        (X.astype("float64"), "dtype float64, expected float32"),
        (X.astype("complex64"), "dtype complex64, expected float32"),
        (X > 0, "dtype bool, expected float32"),
        (Producer(X, error=RuntimeError("gone")), "gives no DLPack tensor: gone"),
        (Producer(X, device=None), "gives no DLPack tensor"),
        (Producer(X, device=(99, 0), error=ValueError("far")), "gives no DLPack tensor: far"),
        (Producer(capsule=5), "gives no DLPack tensor"),
        (X.__dlpack__(), "is a PyCapsule"),
        (forged(device_type=99), "on device type 99:0, which this process does not have"),
        (forged(device_type=-1), "on device type -1:0"),
        (forged(device_type=8), "on metal:0, which this process does not have"),
        (forged(code=77), "an element type that TVM does not know"),
        (forged(code=2, bits=64), "dtype float64, expected float32"),
        (forged((-3, 4)), r"shape \(-3, 4\), expected extents of memory"),
        (forged((2**62, 4)), "expected extents of memory"),
        (forged((9, 4), data=None), "no memory: its address is 0"),
    ],
)
def test_refused(vm, value, message):
    with pytest.raises(rh.BindingError, match=f"argument 'x' of 'main'.*{message}"):
        vm["main"](value, W)
    with pytest.raises(rh.BindingError, match=f"argument 'x' of 'main'.*{message}"):
        vm.submit("main", value, W)
    np.testing.assert_allclose(vm["main"](X, W)[1], np.exp(X), rtol=1e-6)


@pytest.mark.parametrize(
    "value, expected",
    [
        (forged((2, 4), byte_offset=16), X[1:]),
        (forged((2, 4), byte_offset=4), X.reshape(-1)[1:9].reshape(2, 4)),
        (forged((2, 4), (1, 1)), np.lib.stride_tricks.as_strided(X, (2, 4), (4, 4))),
        (forged((3, 4), (0, 1)), np.broadcast_to(X[0], (3, 4))),
        (forged((2, 4), (-4, 1), byte_offset=16), X[1::-1]),
        (forged((1, 4), (99999, 1)), X[:1]),
        (forged((0, 4), data=None), X[:0]),
        (forged(device_type=1, device_id=7), X),
    ],
)
def test_tensors_of_any_layout(vm, value, expected):
    for _ in range(2):
        np.testing.assert_allclose(vm["main"](value, W)[1], np.exp(expected), rtol=1e-6)


def test_producers_of_read_only_memory(vm):
    frozen = X.copy()
    frozen.flags.writeable = False
    np.testing.assert_allclose(vm["main"](Producer(frozen), W)[1], np.exp(X), rtol=1e-6)
    with pytest.raises(rh.BindingError, match="gives no memory to write to"):
        vm["main"](X, W, out=(np.empty_like(X), Producer(frozen)))


def test_capsules_that_can_be_consumed_once(vm):
    np.testing.assert_allclose(vm["main"](Producer(capsule=X.copy().__dlpack__()), W)[1], np.exp(X), rtol=1e-6)
    used = Producer(capsule=X.copy().__dlpack__())
    vm["main"](used, W)
    with pytest.raises(rh.BindingError, match="can only be consumed once"):
        vm["main"](used, W)


class Torch(Producer):
    """Tensor like PyTorch's negated views, whose memory does not show the sign."""

    layout = "torch.strided"

    def is_neg(self):
        return True

    def resolve_conj(self):
        return self

    def resolve_neg(self):
        return Producer(-self.array)


def test_views_of_pytorch_that_memory_does_not_show(vm):
    np.testing.assert_allclose(vm["main"](Torch(X), W)[1], np.exp(-X), rtol=1e-6)
    sparse = Torch(X)
    sparse.layout = "torch.sparse_coo"
    with pytest.raises(rh.BindingError, match=r"layout torch.sparse_coo, expected torch.strided"):
        vm["main"](sparse, W)


@pytest.mark.parametrize(
    "out, message",
    [
        (np.lib.stride_tricks.as_strided(np.empty(4, "f4"), (3, 4), (0, 4)), "by which elements share memory"),
        (np.lib.stride_tricks.as_strided(np.empty(20, "f4"), (3, 4), (4, 4)), "by which elements share memory"),
        (np.ma.empty((3, 4), "f4"), "a masked array, whose mask would be stale"),
        (forged(device_type=8), "on metal:0"),
        (forged(data=None), "no memory"),
        (np.empty((4, 3), "f4"), "dimension 0 is 4, expected 3"),
        (5, "is a int"),
    ],
)
def test_buffers_for_results(vm, out, message):
    with pytest.raises(rh.BindingError, match=message):
        vm["main"](X, W, out=(np.empty_like(X), out))


def test_a_buffer_that_is_an_input(plumber):
    a = np.arange(4, dtype="float32")
    plumber["same_extent"](a, a, out=a)
    plumber["same_extent"].submit(a, a, out=a).result()
    assert a.tolist() == [0, 4, 8, 12]
    result = plumber["same_extent"](a, a)
    plumber["same_extent"](result, result, out=result)
    assert np.asarray(result).tolist() == [0, 16, 32, 48]


@pytest.mark.parametrize(
    "shape, number, message",
    [
        ((2**70, 2), 3, "dimension 0 is 1180591620717411303424, expected 2"),
        ((2, 2), 2**63, "is 9223372036854775808, expected"),
        ((2, 2), np.uint64(2**63), "is 9223372036854775808, expected"),
        ((2.0, 2), 3, "a sequence of integers"),
        ((2, 2), None, "is None"),
    ],
)
def test_shapes_and_scalars(plumber, shape, number, message):
    t = (np.ones(2, "f4"), (np.ones(2, "i8"),))
    with pytest.raises(rh.BindingError, match=message):
        plumber["nested"](t, shape, number)
    assert plumber["nested"](t, (2, 2), tvm.runtime.tensor(np.array(3)))[1][1] == (2, 2)


@pytest.mark.parametrize("args", [None, "ab", {"x": X}, (x for x in [X])])
def test_arguments_in_no_sequence(vm, args):
    with pytest.raises(rh.BindingError, match="the arguments of 'twice' are a"):
        vm.call("twice", args)
    with pytest.raises(rh.BindingError, match="by name are a list"):
        vm.call("twice", (), [("x", X)])


@pytest.mark.parametrize("name", [["main"], None, 0, ("main",)])
def test_names_that_are_not_text(vm, name):
    for refused in (lambda: vm[name], lambda: vm.call(name, (X, W)), lambda: vm.submit(name, X, W)):
        with pytest.raises(rh.BindingError, match="the executable has no function"):
            refused()


def test_impossible_amounts_of_memory(plumber):
    with pytest.raises(rh.BindingError, match=r"argument 'a' of 'same_extent' .*cannot be taken as float32\[n\]"):
        plumber["same_extent"](np.broadcast_to(np.float32(1), (2**52,)), np.ones(2, "f4"))


def test_submissions_in_a_signal_handler(chain):
    vm, met = rh.vm.VirtualMachine(chain), []

    def ring(*_):
        met.append(vm.submit("main", X, W))  # it must not wait: what it interrupts may hold the fence's lock
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            vm.submit("main", X, W).result(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert met and all(np.allclose(fence.result(10)[1], np.exp(X), rtol=1e-6) for fence in met)


def test_threads_with_arguments_of_many_shapes(vm):
    def some(seed):
        random = np.random.default_rng(seed)
        for _ in range(20):
            x = random.random((random.integers(0, 5), 4), dtype="float32")[:: random.choice([1, -1, 2])]
            np.testing.assert_allclose(vm["main"](x, W)[1], np.exp(x), rtol=1e-5)
        return threading.get_ident()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(some, range(4)))) == 4
