"""Repeated calls: any change between two of them is noticed, and nothing is copied that could be borrowed."""

import gc
import weakref

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.vm.args.argument_binding import MAX_CACHED_CALLS, CallCache
from relax_hetero.vm.device.tensors import from_array

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
W = np.array([1, 2, 3, 4], "float32")


@pytest.fixture
def vm(chain):
    return rh.vm.VirtualMachine(chain)


@pytest.fixture
def plumber(plumbing):
    return rh.vm.VirtualMachine(plumbing)


def array_at(address, data):
    """A copy of `data` that begins `address` bytes after a multiple of 64."""
    memory = np.empty(data.nbytes + 128, "uint8")
    begin = -memory.ctypes.data % 64 + address
    array = memory[begin : begin + data.nbytes].view(data.dtype).reshape(data.shape)
    array[...] = data
    return array


@pytest.mark.parametrize("convert", [lambda a: a, tvm.runtime.tensor, from_array], ids=["numpy", "tvm", "dlpack"])
def test_a_cached_call_reads_current_values(plumber, convert):
    for value in range(3):
        a, b = np.full(5, value, "float32"), np.full(5, 10, "float32")
        np.testing.assert_array_equal(plumber["same_extent"](convert(a), convert(b)).numpy(), a + b)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (X.astype("float64"), W, "'x' of 'main' has dtype float64, expected float32"),
        (X.view("int32"), W, "'x' of 'main' has dtype int32, expected float32"),
        (X[:, :3], W, "'x' of 'main' dimension 1 is 3, expected 4"),
        (X[0], W, "'x' of 'main' has 1 dimensions"),
        (X, W[:2], "'w' of 'main' dimension 0 is 2, expected 4"),
        (X, None, "'w' of 'main' is a NoneType"),
        (np.ma.masked_array(X, mask=X > 0), W, "is a masked array"),
        (X.astype("datetime64[s]"), W, "numpy dtype datetime64"),
    ],
)
@pytest.mark.parametrize("convert", [lambda a: a, tvm.runtime.tensor], ids=["numpy", "tvm"])
def test_errors_stay_after_calls_that_fit(vm, convert, x, w, message):
    for _ in range(2):
        vm["main"](X, W)
        vm["main"](tvm.runtime.tensor(X), tvm.runtime.tensor(W))
    plain = isinstance(x, np.ma.MaskedArray) or x.dtype.kind == "M"
    with pytest.raises(rh.BindingError, match=message):
        vm["main"](x if plain else convert(np.ascontiguousarray(x)), w if w is None else convert(w))
    with pytest.raises(rh.BindingError, match="takes 2 inputs, found 1"):
        vm["main"](convert(X))
    np.testing.assert_allclose(vm["main"](X, W)[1].numpy(), np.exp(X), rtol=1e-6)


@pytest.mark.parametrize("address", [0, 4, 16, 48, 60])
def test_arrays_at_any_address_in_any_layout(vm, address):
    for x in (array_at(address, X), X, array_at(address, X.T.copy()).T, array_at(address, X.repeat(2, 0))[::2]):
        for _ in range(2):
            z, y = vm["main"](x, W)
            np.testing.assert_allclose(z.numpy(), np.exp(x) + W, rtol=1e-6)
            np.testing.assert_allclose(y.numpy(), np.exp(x), rtol=1e-6)


def test_read_only_arrays(vm):
    x = X.copy()
    x.flags.writeable = False
    for _ in range(2):
        np.testing.assert_allclose(vm["main"](x, np.broadcast_to(W, (4,)))[1].numpy(), np.exp(x), rtol=1e-6)
    assert not x.flags.writeable


def test_known_results_never_share_memory_with_arguments_or_weights(plumber, lifted):
    for x in (np.zeros(16, "float32"), tvm.runtime.tensor(np.zeros(16, "float32"))):
        address = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
        assert {plumber["identity"](x).data_ptr() == address for _ in range(3)} == {False}
    machine, x = rh.vm.VirtualMachine(lifted), tvm.runtime.tensor(np.zeros(1024, "float32"))
    for _ in range(3):
        _, weight = machine["main"](x)
        weight.copyfrom(np.full(1024, -1, "float32"))
    np.testing.assert_array_equal(machine["main"](x)[0].numpy(), np.arange(1024))


def test_arrays_are_released_after_the_call(vm):
    class Array(np.ndarray):  # numpy's own cannot be referred to weakly
        pass

    for _ in range(2):
        owner = X.copy().view(Array)
        vm["main"](np.asarray(owner), W)
    watch = weakref.ref(owner)
    del owner
    gc.collect()
    assert watch() is None


def test_new_parameters_are_taken(weighted):
    machine, x = rh.vm.VirtualMachine(weighted), np.array([1, 2, 3], "float32")
    for scale in (1, 2, 3):
        w = np.array([4, 5, 6], "float32") * scale
        machine.set_params({"w": w, "b": np.ones(1, "float32")})
        for _ in range(2):
            np.testing.assert_array_equal(machine["main"](x).numpy(), x * w + 1)
        np.testing.assert_array_equal(machine["main"](x, w=x).numpy(), x * x + 1)
        np.testing.assert_array_equal(machine["main"](x, x, np.zeros(1, "float32")).numpy(), x * x)
    machine.set_params({"w": np.ones(2, "float32")})
    with pytest.raises(rh.BindingError, match="dimension 0 is 3, expected 2"):
        machine["main"](x)


def test_names_of_known_calls(vm):
    calls = [((), {"x": X, "w": W}), ((), {"w": W, "x": X}), ((X,), {"w": W}), ((X, W), {})]
    for args, kwargs in calls * 2:
        np.testing.assert_allclose(vm["main"](*args, **kwargs)[0].numpy(), np.exp(X) + W, rtol=1e-6)
    assert len(vm._arguments.caches["main"]._calls) == 1
    for args, kwargs, message in [
        ((X,), {"v": W}, "no input 'v'"),
        ((X,), {"x": X}, "'x' is given by position and by name"),
        ((X, W), {"w": W}, "'w' is given by position and by name"),
        ((), {"w": W}, "'x' missing"),
    ]:
        with pytest.raises(rh.BindingError, match=message):
            vm["main"](*args, **kwargs)


def test_out_of_known_calls(plumber):
    a, b = np.arange(4, dtype="float32"), np.ones(4, "float32")
    buffer, tensor = np.empty(4, "float32"), tvm.runtime.empty((4,), "float32", tvm.cpu(2))
    for value in range(3):
        assert plumber["same_extent"](a, b + value, out=buffer) is buffer
        np.testing.assert_array_equal(buffer, a + b + value)
        assert plumber["same_extent"](a, b - value, out=tensor) is tensor
        np.testing.assert_array_equal(tensor.numpy(), a + b - value)
    for wrong, message in [
        (np.empty(5, "float32"), "out dimension 0 is 5, expected 4"),
        (np.empty(4, "int32"), "out has dtype int32"),
        (np.broadcast_to(a, (4,)), "out is read-only"),
        ((np.empty(4, "float32"),), "out is a tuple"),
    ]:
        with pytest.raises(rh.BindingError, match=message):
            plumber["same_extent"](a, b, out=wrong)
    strided = np.zeros(8, "float32")[::2]
    for _ in range(2):
        plumber["same_extent"](a, b, out=strided)
    np.testing.assert_array_equal(strided, a + b)


def test_an_argument_may_be_the_result_buffer(plumber):
    a, b = np.arange(4, dtype="float32"), np.ones(4, "float32")
    for _ in range(3):
        plumber["same_extent"](a, b, out=a)
    np.testing.assert_array_equal(a, np.arange(4) + 3)


def test_few_calls_are_remembered(plumber):
    for extent in range(MAX_CACHED_CALLS + 20):
        a = np.full(extent, extent, "float32")
        np.testing.assert_array_equal(plumber["same_extent"](a, a).numpy(), a * 2)
    assert len(plumber._arguments.caches["same_extent"]._calls) <= MAX_CACHED_CALLS


def test_signatures_differ_by_device_element_type_and_shape():
    cache = CallCache(64, True)
    looks = [
        cache._fingerprint(tensor)
        for tensor in (
            tvm.runtime.tensor(np.zeros((2, 3), "float32")),
            tvm.runtime.tensor(np.zeros((3, 2), "float32")),
            tvm.runtime.tensor(np.zeros((6,), "float32")),
            tvm.runtime.tensor(np.zeros((2, 3), "int32")),
            tvm.runtime.tensor(np.zeros((2, 3), "float64")),
            tvm.runtime.tensor(np.zeros((2, 3), "float32"), tvm.cpu(1)),
        )
    ]
    assert None not in looks and len(set(looks)) == len(looks)
    array = tvm.runtime.tensor(np.zeros(64, "float32"))
    assert cache._fingerprint(array._create_view((3,), "float32", 64)) is None  # kernels refuse offsets
    assert cache._fingerprint(from_array(array_at(4, X))) is None
    assert cache._fingerprint(from_array(np.zeros((4, 4), "float32")[:, :2])) is None
