"""Functions for calls whose arguments have the types and shapes of an earlier call: their parts, and who has them."""

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.driver.link.repeated_calls import with_repeated_calls
from relax_hetero.vm.device.memory_limit import PoolWatch

WEIGHT = np.arange(4, dtype="float32")


@I.ir_module
class Lowered:
    """A module as the passes leave it, constants lifted."""

    @T.prim_func
    def shape_func(heap: T.Buffer((3,), "int64")):
        T.func_attr({"tirx.is_host_func": True})
        heap[2] = heap[0] * T.int64(16)

    @T.prim_func
    def scale(x: T.handle, w: T.Buffer((4,), "float32"), y: T.handle):
        n = T.int64()
        X = T.match_buffer(x, (n, 4), "float32")
        Y = T.match_buffer(y, (n, 4), "float32")
        for i, j in T.grid(n, 4):
            Y[i, j] = X[i, j] * w[j]

    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), constants: R.Tuple(R.Tensor((4,), "float32"))) -> R.Tensor(
        ("n", 4), "float32"
    ):
        R.func_attr({"relax.force_pure": True, "global_symbol": "main"})
        cls = Lowered
        weight = R.call_packed("vm.builtin.tuple_getitem", constants, 0, ty_args=(R.Tensor((4,), "float32"),))
        heap = R.call_builtin_with_ctx("vm.builtin.alloc_shape_heap", (3,), ty_args=(R.Tensor(ndim=1, dtype="int64"),))
        R.call_packed("vm.builtin.check_tensor_info", x, 2, R.dtype("float32"), R.str(""), ty_args=(R.Tuple,))
        R.call_packed("vm.builtin.match_shape", x, heap, 2, 1, 0, 0, 4, R.str(""), ty_args=(R.Tuple,))
        _ = cls.shape_func(heap)
        size = R.call_packed("vm.builtin.make_shape", heap, 1, 1, 2, ty_args=(R.Shape(ndim=1),))
        storage = R.vm.alloc_storage(size, 0, R.dtype("uint8"), R.str("global"))
        shape = R.call_packed("vm.builtin.make_shape", heap, 2, 1, 0, 0, 4, ty_args=(R.Shape(ndim=2),))
        alloc = R.vm.alloc_tensor(storage, 0, shape, R.dtype("float32"), 0)
        _1 = cls.scale(x, weight, alloc)
        R.call_packed("vm.builtin.match_shape", alloc, heap, 2, 3, 0, 0, 4, R.str(""), ty_args=(R.Tuple,))
        return alloc


def test_shared_and_repeated_work_are_separate_functions():
    mod, functions = with_repeated_calls(Lowered, ["main"])
    (call,) = functions
    assert (call.function, call.repeated, call.shares) == ("main", "main_repeated", "main_shared")
    repeated, shared = mod["main_repeated"], mod["main_shared"]
    assert [var.name for var in repeated.params] == ["x", "weight", "size", "shape"]
    assert [var.name for var in shared.params] == ["x", "constants"]
    assert [var.name for var in shared.body.body.fields] == ["weight", "size", "shape"]
    names = [
        getattr(b.value.op, "name_hint", getattr(b.value.op, "name", "")) for b in repeated.body.blocks[0].bindings
    ]
    assert names == ["relax.vm.alloc_storage", "relax.vm.alloc_tensor", "scale"]
    assert mod["main"].same_as(Lowered["main"])
    assert str(repeated.attrs["global_symbol"]) == "main_repeated"


def test_functions_that_nobody_calls_have_none():
    mod, repeated = with_repeated_calls(Lowered, [])
    assert repeated == () and mod.same_as(Lowered)


@I.ir_module
class Symbolic:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("n", 4), "float32")):
        with R.dataflow():
            total = R.add(R.multiply(x, R.const(WEIGHT)), y)
            both = R.concat((total, y), axis=0)
            R.output(total, both)
        return total, both


@I.ir_module
class OfValues:
    """The size of the result depends on values: it is known only during the call."""

    @R.function
    def main(x: R.Tensor(("n",), "float32")):
        k = T.int64()
        found = R.nonzero(x)
        kept = R.match_cast(found, R.Tensor((1, k), "int64"))
        return R.add(kept, R.const(1, "int64"))


@I.ir_module
class OfShapes:
    @R.function
    def main(x: R.Tensor(("n",), "float32"), shape: R.Shape(["n"])):
        return R.reshape(x, shape)


@pytest.mark.parametrize(("mod", "has"), [(Symbolic, True), (OfValues, False), (OfShapes, False)])
def test_sizes_that_follow_from_arguments(mod, has):
    executable = rh.compile(mod)
    assert [call.function for call in executable.metadata.repeated] == ["main"] * has


@pytest.mark.parametrize("command_buffers", [True, False])
def test_repeated_calls_of_several_sizes(command_buffers, tmp_path):
    executable = rh.compile(Symbolic, command_buffers=command_buffers)
    path = tmp_path / "model.so"
    executable.export_library(str(path))
    for vm in (rh.vm.VirtualMachine(executable), rh.vm.VirtualMachine(rh.load(str(path)))):
        rng = np.random.default_rng(0)
        for n in (3, 5, 3, 3, 0, 5, 0, 1, 1):
            x, y = rng.integers(-9, 9, (2, n, 4)).astype("float32")
            total, both = vm["main"](x, y)
            np.testing.assert_array_equal(total.numpy(), x * WEIGHT + y)
            np.testing.assert_array_equal(both.numpy(), np.concatenate([total.numpy(), y]))


def test_repeated_calls_run_nothing_of_the_checks(monkeypatch):
    """TVM's checks are counted by an instrument, which sees each call of the bytecode."""
    vm = rh.vm.VirtualMachine(rh.compile(Symbolic))
    x = np.ones((3, 4), "float32")
    symbols = []

    def instrument(function, symbol, before, result, *args):
        if before:
            symbols.append(symbol)
        return 0

    vm._module["set_instrument"](instrument)
    counts = []
    for _ in range(4):
        symbols.clear()
        vm["main"](x, x)
        counts.append([symbol for symbol in symbols if "shape" in symbol or "check" in symbol])
    assert counts[0] and counts[1] and not counts[2] and not counts[3]


def test_arguments_that_look_otherwise_are_checked():
    vm = rh.vm.VirtualMachine(rh.compile(Symbolic))
    x = np.ones((3, 4), "float32")
    for _ in range(3):
        vm["main"](x, x)
    with pytest.raises(rh.BindingError, match="'y'"):
        vm["main"](x, x[:2])
    with pytest.raises(rh.BindingError, match="float64"):
        vm["main"](x, x.astype("float64"))
    total, _ = vm["main"](x, x)
    np.testing.assert_array_equal(total.numpy(), x * WEIGHT + x)


@I.ir_module
class OnlyChecked:
    """Its sizes are constants: calls share nothing but checks."""

    @R.function
    def main(x: R.Tensor(("n", "m"), "float32")):
        return R.reshape(x, (2, 6))


def test_sizes_are_checked_where_nothing_else_is_shared():
    vm = rh.vm.VirtualMachine(rh.compile(OnlyChecked))
    for shape in ((3, 4), (3, 4), (4, 3), (3, 4)):
        assert vm["main"](np.ones(shape, "float32")).shape == (2, 6)
    with pytest.raises(rh.HeteroError, match="^function 'main': "):
        vm["main"](np.ones((4, 4), "float32"))
    with pytest.raises(rh.HeteroError, match="^function 'main': "):
        vm["main"](np.ones((4, 4), "float32"))


def test_an_emptied_pool_is_notified_of_sizes_again(monkeypatch):
    noted = []
    original = PoolWatch.note
    monkeypatch.setattr(PoolWatch, "note", lambda self, *args: (noted.append(args[0]), original(self, *args)))
    vm = rh.vm.VirtualMachine(rh.compile(Symbolic))
    x = np.ones((3, 4), "float32")
    for _ in range(4):
        vm["main"](x, x)
    count = len(noted)
    for _ in range(4):
        vm["main"](x, x)
    assert len(noted) == count
    vm._pool_watch.epoch += 1
    for _ in range(4):
        vm["main"](x, x)
    assert len(noted) == count + 1
