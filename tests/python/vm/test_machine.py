"""Calls: arguments in every form, results, `out=`, and refusals before anything runs."""

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
W = np.array([1, 2, 3, 4], "float32")


class OnlyDLPack:
    """Tensor of another library: DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.fixture
def vm(chain):
    return rh.vm.VirtualMachine(chain)


@pytest.fixture
def plumber(plumbing):
    return rh.vm.VirtualMachine(plumbing)


def check(outputs, x=X, w=W):
    z, y = outputs
    np.testing.assert_allclose(z.numpy(), np.exp(x) + w, rtol=1e-6)
    np.testing.assert_allclose(y.numpy(), np.exp(x), rtol=1e-6)


def test_results_are_tensors_on_the_devices_that_made_them(vm):
    outputs = vm["main"](X, W)
    assert type(outputs) is tuple
    assert [str(tensor.device) for tensor in outputs] == ["cpu:1", "cpu:0"]
    assert all(isinstance(tensor, tvm.runtime.Tensor) for tensor in outputs)
    check(outputs)
    assert isinstance(vm["twice"](W), tvm.runtime.Tensor)


@pytest.mark.parametrize("convert", [tvm.runtime.tensor, lambda a: tvm.runtime.tensor(a, tvm.cpu(5)), OnlyDLPack])
def test_tensors_and_dlpack_objects_from_any_device(vm, convert):
    check(vm["main"](convert(X), convert(W)))


def test_arguments_by_name_in_any_order(vm):
    check(vm["main"](w=W, x=X))
    check(vm["main"](X, w=W))
    check(vm["main"](**{"w": W, "x": X}))


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.ascontiguousarray(X.T).T, id="transposed"),
        pytest.param(np.repeat(X, 2, axis=0)[::2], id="strided"),
        pytest.param(X.astype(">f4"), id="big-endian"),
        pytest.param(np.broadcast_to(X[:1], (3, 4)), id="broadcast, read-only"),
        pytest.param(X[:0], id="empty"),
    ],
)
def test_numpy_arrays_of_any_memory_layout(vm, x):
    outputs = vm["main"](x, W)
    assert outputs[0].shape == x.shape
    check(outputs, x=x.astype("float32"))


def test_strided_and_unaligned_dlpack(vm):
    check(vm["main"](OnlyDLPack(np.repeat(X, 2, axis=0)[::2]), W))
    bytes_ = np.empty(X.nbytes + 65, "uint8")
    offset = -bytes_.ctypes.data % 64 + 4
    unaligned = bytes_[offset : offset + X.nbytes].view("float32").reshape(X.shape)
    unaligned[...] = X
    check(vm["main"](OnlyDLPack(unaligned), W))


def test_a_tensor_inside_an_allocation(vm):
    # Kernels refuse tensors with a byte offset; ours must not see one.
    storage = tvm.runtime.tensor(np.zeros(64, "float32"))
    for offset in (64, 4):
        view = storage._create_view((3, 4), "float32", offset)
        view.copyfrom(X)
        check(vm["main"](view, W))


@pytest.mark.parametrize("value", [2.5, 2, np.float32(2.5), np.array(2.5, "float32")])
def test_scalars_for_zero_dimensional_tensors(plumber, value):
    assert plumber["scalar"](value).numpy() == np.float32(value) * 2


@pytest.mark.parametrize("value", [True, "2.5", 1j, np.float64(2.5), [2.5], None])
def test_scalars_of_another_kind_are_refused(plumber, value):
    with pytest.raises(rh.BindingError, match=r"argument 'x' of 'scalar'"):
        plumber["scalar"](value)
    assert plumber["scalar"](1.0).numpy() == 2


def test_tuples_shapes_and_scalars(plumber):
    a, b = np.arange(5, dtype="float32"), np.arange(5)
    ints, (floats, shape) = plumber["nested"]((a, (b,)), (5, 2), 7)
    np.testing.assert_array_equal(ints.numpy(), b)
    np.testing.assert_array_equal(floats.numpy(), a)
    assert tuple(shape) == (5, 2)
    plumber["nested"]([a, [b]], np.array([5, 2]), np.int32(7))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((np.zeros(5, "float32"),), (5, 2), 7), "'t' of 'nested' has 1 fields, expected 2"),
        ((np.zeros(5, "float32"), (5, 2), 7), "'t' of 'nested' is a ndarray, expected a tuple"),
        (((np.zeros(5, "float32"), (np.zeros(4, "int64"),)), (5, 2), 7), r"'t' of 'nested'\[1\]\[0\] dimension 0 is 4"),
        (
            ((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (4, 2), 7),
            "'s' of 'nested' dimension 0 is 4, expected 5",
        ),
        (
            ((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (5, 3), 7),
            "'s' of 'nested' dimension 1 is 3, expected 2",
        ),
        (((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (5,), 7), "'s' of 'nested' has 1 dimensions"),
        (
            ((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (5, 2.0), 7),
            "'s' of 'nested' is .* sequence of integers",
        ),
        (((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (5, 2), 7.5), "'k' of 'nested' is 7.5"),
        (((np.zeros(5, "float32"), (np.zeros(5, "int64"),)), (5, 2), True), "'k' of 'nested' is True"),
    ],
)
def test_wrong_structures_are_refused(plumber, args, message):
    with pytest.raises(rh.BindingError, match=message):
        plumber["nested"](*args)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X,), {}, "takes 2 inputs, found 1: 'w' missing"),
        ((), {}, "'x', 'w' missing"),
        ((X, W, W), {}, "takes 2 inputs, found 3"),
        ((X, W), {"w": W}, "'w' is given by position and by name"),
        ((X,), {"v": W}, "no input 'v'; it has 'x', 'w'"),
        ((X.astype("float64"), W), {}, "'x' of 'main' has dtype float64, expected float32"),
        ((X > 0, W), {}, "has dtype bool, expected float32"),
        ((X[0], W), {}, "'x' of 'main' has 1 dimensions"),
        ((X[:, :3], W), {}, "'x' of 'main' dimension 1 is 3, expected 4"),
        ((tvm.runtime.tensor(X), tvm.runtime.tensor(W[:2])), {}, "'w' of 'main' dimension 0 is 2, expected 4"),
        ((X.tolist(), W), {}, "'x' of 'main' is a list, expected a tensor"),
        ((np.array([["a"]]), W), {}, "numpy dtype <U1"),
        ((np.array([[None]]), W), {}, "numpy dtype object"),
        ((X, None), {}, "'w' of 'main' is a NoneType"),
    ],
)
def test_bad_arguments_are_refused_and_the_next_call_works(vm, args, kwargs, message):
    with pytest.raises(rh.BindingError, match=message):
        vm["main"](*args, **kwargs)
    check(vm["main"](X, W))


def test_one_symbol_has_one_value(plumber):
    a, b = np.zeros(3, "float32"), np.zeros(4, "float32")
    with pytest.raises(
        rh.BindingError, match="'b' of 'same_extent' dimension 0 is 4, expected 3: n is 3 by argument 'a'"
    ):
        plumber["same_extent"](a, b)
    assert plumber["same_extent"](b, b).shape == (4,)


def test_unknown_function(vm):
    with pytest.raises(rh.BindingError, match="no function 'mian'; it has 'main', 'twice'; did you mean 'main'"):
        vm["mian"]


def test_results_never_share_memory_with_arguments_or_weights(plumber, lifted):
    x = tvm.runtime.tensor(np.zeros(16, "float32"))
    assert plumber["identity"](x).data_ptr() != x.data_ptr()
    x = tvm.runtime.tensor(np.zeros((2, 3), "float32"))
    assert plumber["reshape"](x).data_ptr() != x.data_ptr()
    machine = rh.vm.VirtualMachine(lifted)
    x = np.zeros(1024, "float32")
    _, weight = machine["main"](x)
    weight.copyfrom(np.full(1024, -1, "float32"))
    np.testing.assert_array_equal(machine["main"](x)[0].numpy(), np.arange(1024))
    np.testing.assert_array_equal(machine["main"](x)[1].numpy(), np.arange(1024))


def test_out_is_filled_and_returned(vm):
    expected = np.exp(X) + W, np.exp(X)
    z, y = np.empty((3, 4), "float32"), np.empty((4, 3), "float32").T
    result = vm["main"](X, W, out=(z, y))
    assert result[0] is z and result[1] is y
    np.testing.assert_allclose(z, expected[0], rtol=1e-6)
    np.testing.assert_allclose(y, expected[1], rtol=1e-6)
    buffers = tuple(tvm.runtime.empty((3, 4), "float32", tvm.cpu(device)) for device in (0, 3))
    vm["main"](X, W, out=buffers)
    for buffer, want in zip(buffers, expected, strict=True):
        np.testing.assert_allclose(buffer.numpy(), want, rtol=1e-6)
    single = np.empty(4, "float32")
    assert vm["twice"](W, out=single) is single
    np.testing.assert_array_equal(single, W * 2)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.empty((3, 4), "float32"), "out is a ndarray, expected a tuple of buffers"),
        ((np.empty((3, 4), "float32"),), "out has 1 buffers, expected 2"),
        ((np.empty((3, 4)), np.empty((3, 4), "float32")), r"out\[0\] .* has dtype float64"),
        (
            (np.empty((2, 4), "float32"), np.empty((3, 4), "float32")),
            r"out\[0\] .* dimension 0 is 2, expected 3: n is 3",
        ),
        ((np.broadcast_to(X, X.shape), np.empty((3, 4), "float32")), r"out\[0\] .* is read-only"),
        ((X.tolist(), np.empty((3, 4), "float32")), r"out\[0\] .* is a list"),
    ],
)
def test_wrong_out_is_refused(vm, out, message):
    with pytest.raises(rh.BindingError, match=message):
        vm["main"](X, W, out=out)
    check(vm["main"](X, W))


def test_the_memory_of_a_result_is_free_once_the_caller_drops_it(vm):
    addresses = set()
    for _ in range(4):
        results = vm["main"](X, W)
        addresses.add(tuple(tensor.data_ptr() for tensor in results))
        del results
    assert len(addresses) == 1


def test_a_failing_kernel_leaves_the_machine_usable(failing):
    machine = rh.vm.VirtualMachine(failing)
    good = np.ones(2, "float32")
    for _ in range(3):
        with pytest.raises(rh.HeteroError, match="function 'main' failed: .*negative input") as caught:
            machine["main"](-good)
        assert caught.value.__cause__ is not None
        np.testing.assert_array_equal(machine["main"](good).numpy(), good)


@ir_module("llvm", pure=False)
def Unknown(x: R.Tensor((2,), "float32", "llvm:0")):
    y: R.Tensor((2,), "float32", "llvm:0") = R.call_packed(
        "relax_hetero.test.nowhere", x, ty_args=[R.Tensor((2,), "float32", "llvm:0")]
    )
    return y


def test_functions_that_the_process_lacks_are_named():
    exe = rh.compile(Unknown)
    with pytest.raises(rh.HeteroError, match="the code calls 'relax_hetero.test.nowhere', which this process has not"):
        rh.vm.VirtualMachine(exe)


def test_out_takes_dlpack_objects(vm):
    z, y = np.empty((3, 4), "float32"), np.empty((3, 4), "float32")
    vm["main"](X, W, out=(OnlyDLPack(z), y))
    np.testing.assert_allclose(z, np.exp(X) + W, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "bool", "int8", "uint64"])
def test_every_element_type_passes(dtype):
    import ml_dtypes

    spec = rh.vm.TensorSpec("x", (3,), dtype, 0)
    from relax_hetero.vm.args.arguments import Placement, place

    array = np.array([0, 1, 1], getattr(ml_dtypes, dtype, dtype))
    tensor = place(array, spec, "x", Placement([tvm.cpu(1)], ["global"]))
    assert (str(tensor.dtype), str(tensor.device)) == (dtype, "cpu:1")
    from relax_hetero.vm.device.tensors import bytes_of

    np.testing.assert_array_equal(bytes_of(tensor), array.view("uint8"))


def test_the_machine_takes_executables_only(chain):
    with pytest.raises(
        rh.BindingError, match="found Module, code that stock TVM compiled: rh.compile .*; expected an Executable"
    ):
        rh.vm.VirtualMachine(chain.module)


def test_signature_and_repr(vm):
    assert str(vm["main"].signature).startswith("main(x: float32[n, 4], w: float32[4]) -> (")
    assert "cpu:0, cpu:1" in repr(vm["main"])
    assert repr(vm.executable) == "<Executable of main, twice for llvm:0, llvm:1>"
    assert [str(device) for device in vm.devices] == ["cpu:0", "cpu:1"]
