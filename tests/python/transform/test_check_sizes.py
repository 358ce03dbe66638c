"""CheckSizes: what ops need of sizes that only a call knows becomes requirements."""

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import BuildError, HeteroError
from relax_hetero.transform import CheckSizes


def test_requirements_stand_where_sizes_are_known():
    @ir_module()
    def Before(x: R.Tensor(("n", "a"), "float32"), w: R.Tensor(("b", 2), "float32")):
        n = T.int64()
        found = T.int64()
        with R.dataflow():
            y = R.matmul(x, w)
            places = R.match_cast(R.nonzero(y), R.Tensor((2, found), "int64"))
            z = R.reshape(places, (n, 4))
            R.output(z)
        return z

    @ir_module()
    def Expected(x: R.Tensor(("n", "a"), "float32"), w: R.Tensor(("b", 2), "float32")):
        n = T.int64()
        a = T.int64()
        b = T.int64()
        found = T.int64()
        with R.dataflow():
            R.hetero.require(
                T.float64(32.0) * T.Cast("float64", n) <= T.float64(2.0**47),
                "reshape 'z' of places (2, found) and (n, 4): expected a result of 2**47 bytes at most, (n, 4) of "
                "int64",
            )
            R.hetero.require(a == b, "matmul 'y' of x (n, a) and w (b, 2): expected a == b")
            y = R.matmul(x, w)
            places = R.match_cast(R.nonzero(y), R.Tensor((2, found), "int64"))
            R.hetero.require(
                found * 2 == n * 4, "reshape 'z' of places (2, found) and (n, 4): expected found * 2 == n * 4"
            )
            z = R.reshape(places, (n, 4))
            R.output(z)
        return z

    after = CheckSizes()(Before)
    assert_structural_equal(after, Expected)
    assert_structural_equal(CheckSizes()(after), Expected)


def test_nothing_to_do():
    @ir_module()
    def Before(x: R.Tensor(("n", 4), "float32"), w: R.Tensor((4, 2), "float32")):
        with R.dataflow():
            y = R.exp(R.matmul(x, w))
            z = R.reshape(y, (-1,))
            R.output(z)
        return z

    assert CheckSizes()(Before).same_as(Before)


SIZES = {name: tirx.Var(name, "int64") for name in "abcdhkmnpqst"}
a, b, m, n = (SIZES[name] for name in "abmn")


def tensor(*shape, dtype="float32"):
    return relax.TensorType([SIZES[extent] if isinstance(extent, str) else extent for extent in shape], dtype)


def build(make, types):
    """A module of one op; its parameters are x0, x1, ..."""
    params = [relax.Var(f"x{index}", ty) for index, ty in enumerate(types)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(*params)))
        builder.emit_func_output(result)
    return builder.get()


def einsum(x, y):
    return relax.op.einsum([x, y], "ij,jk->ik")


def quotient(x, y):
    return relax.op.reshape(x, (m, -1))


# An op, the types of its operands, sizes that fit, and for each of others the condition that they do not meet.
OPS = {
    "conv2d": (
        lambda x, w: relax.op.nn.conv2d(x, w, groups=2), [tensor("n", "c", "h", "h"), tensor(8, 3, 3, 3)],
        [(1, 6, 4, 4), (8, 3, 3, 3)],
        {"c == 6": [(1, 200_000, 4, 4), (8, 3, 3, 3)], "h - 2 >= 0": [(1, 6, 1, 1), (8, 3, 3, 3)]},
    ),
    "conv1d_transpose": (
        relax.op.nn.conv1d_transpose, [tensor("n", "c", "h"), tensor(3, 8, 3)], [(1, 3, 4), (3, 8, 3)],
        {"c == 3": [(1, 2, 4), (3, 8, 3)]},
    ),
    "attention": (
        relax.op.nn.attention, [tensor("b", s, "h", 8) for s in "mnp"], [(1, 2, 3, 8), (1, 5, 3, 8), (1, 5, 3, 8)],
        {"n == p": [(1, 2, 3, 8), (1, 5, 3, 8), (1, 3, 3, 8)]},
    ),
    "einsum": (einsum, [tensor("n", "a"), tensor("b", 2)], [(3, 4), (4, 2)], {"a == b": [(3, 4), (5, 2)]}),
    "reshape": (
        lambda x: relax.op.reshape(x, (2, 6)), [tensor("n", 4)], [(3, 4)],
        {"n * 4 == 12": [(1, 4)]},
    ),
    "reshape by a quotient": (
        quotient, [tensor("n", 4), tensor("m")], [(3, 4), (6,)],
        {"n * 4 == m * (n * 4 // m)": [(3, 4), (5,)], "m > 0": [(3, 4), (0,)]},
    ),
    "broadcast_to": (
        lambda x, y: relax.op.broadcast_to(x, (m, 5)), [tensor("n", 1), tensor("m")], [(3, 1), (3,)],
        {"n == m": [(2, 1), (3,)]},
    ),
    "gather_elements": (
        lambda x, y: relax.op.gather_elements(x, y, axis=0), [tensor("n", "a"), tensor("m", "b", dtype="int64")],
        [(3, 4), (7, 2)],
        {"b <= a": [(3, 4), (2, 5)]},
    ),
    "topk": (
        lambda x: relax.op.topk(x, 5, axis=0, ret_type="values"), [tensor("n", 2)], [(5, 2)], {"n >= 5": [(4, 2)]},
    ),
    "pad": (lambda x: relax.op.nn.pad(x, [0, -3]), [tensor("n")], [(3,)], {"n + -3 >= 0": [(2,)]}),
    "pad by reflection": (
        lambda x: relax.op.nn.pad(x, [2, 1], pad_mode="reflect"), [tensor("n")], [(3,)], {"n >= 3": [(2,)]},
    ),
    "arange": (lambda x: relax.op.arange(0, n - 3, 1), [tensor("n")], [(3,)], {"n - 3 >= 0": [(2,)]}),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_sizes_that_contradict_each_other(op):
    make, types, right, wrong = OPS[op]
    main = rh.vm.VirtualMachine(rh.compile(build(make, types), cache=False))["main"]

    def call(shapes):
        return main(*(np.zeros(shape, str(ty.dtype)) for shape, ty in zip(shapes, types, strict=True)))

    call(right)
    for condition, shapes in wrong.items():
        with pytest.raises(HeteroError) as info:
            call(shapes)
        message, _, sizes = str(info.value).rpartition(" (")
        assert message.endswith(f": expected {condition}") and message.startswith("function 'main': "), message
        assert " = " in sizes
        call(right)  # the machine remains usable


def test_bytes_beyond_what_can_be_addressed():
    """Nothing wraps: (2**31)**2 float32 elements would take 2**64 bytes, which is 0 in 64 bits."""

    def table(x):
        return relax.op.zeros((n, n), "float32")

    exe = rh.compile(build(table, [tensor("n", 0, dtype="int8")]), cache=False)
    main = rh.vm.VirtualMachine(exe)["main"]
    assert main(np.zeros((3, 0), "int8")).shape == (3, 3)
    for size in (2**31, 2**32, 2**40, 2**62):
        with pytest.raises(HeteroError, match=rf"expected a result of 2\*\*47 bytes at most.* \(n = {size}\)"):
            main(np.zeros((size, 0), "int8"))
    with pytest.raises(BuildError, match=r"function 'main': zeros 'lv' .* expected a result of 2\*\*47 bytes at most"):
        rh.compile(build(lambda x: relax.op.zeros((2**31, 2**31), "float32"), [tensor("n")]), cache=False)


def test_numbers_of_shapes_may_be_negative():
    """Extents of tensors that a caller gives are not; the numbers of a shape are what they are."""
    p, q = tirx.Var("p", "int64"), tirx.Var("q", "int64")
    shape, x = relax.Var("shape", relax.ShapeType([p, q])), relax.Var("x", tensor("n"))
    builder = relax.BlockBuilder()
    with builder.function("main", [shape, x]):
        builder.emit_func_output(builder.emit(relax.op.reshape(x, (p, q))))
    main = rh.vm.VirtualMachine(rh.compile(builder.get(), cache=False))["main"]
    assert main((2, 3), np.zeros(6, "float32")).shape == (2, 3)
    for sizes in ((-2, -3), (-1, 6), (2, -3)):  # refused before the function begins
        with pytest.raises(HeteroError, match="argument 'shape' of 'main' is .* extents from 0 to"):
            main(sizes, np.zeros(6, "float32"))
    with pytest.raises(HeteroError) as info:
        main((2, 4), np.zeros(6, "float32"))
    assert "reshape 'gv' of x (n,) and (p, q): expected n == p * q (" in str(info.value)
    with pytest.raises(HeteroError, match="bytes at most"):
        main((2**32, 2**32), np.zeros(0, "float32"))


def test_calls_of_functions_and_kernels():
    @I.ir_module
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def add(x: T.Buffer((T.int64(4),), "float32"), py: T.handle, pz: T.handle):
            k = T.int64()
            y = T.match_buffer(py, (k,), "float32")
            z = T.match_buffer(pz, (k,), "float32")
            for i in range(k):
                with T.sblock("add"):
                    v = T.axis.spatial(k, i)
                    z[v] = x[v] + y[v]

        @R.function(private=True)
        def square(x: R.Tensor(("side", "side"), "float32")) -> R.Tensor(("side", "side"), "float32"):
            y = R.exp(x)
            return y

        @R.function
        def main(x: R.Tensor(("n",), "float32"), y: R.Tensor(("p", "q"), "float32")):
            cls = Module
            n = T.int64()
            a = R.call_tir(cls.add, (x, x), out_ty=R.Tensor((n,), "float32"))
            b = cls.square(y)
            return (a, b)

    text = CheckSizes()(Module).script()
    assert "kernel add 'a' of x (n,) and x (n,): expected 4 == n" in text
    assert "call of square 'b' of y (p, q): expected p == q" in text


def test_branches_keep_their_own():
    @ir_module()
    def Module(x: R.Tensor(("n", 4), "float32"), flag: R.Tensor((), "bool")):
        if flag:
            y = R.reshape(x, (2, 6))
            r = R.sum(y)
        else:
            r = R.sum(x)
        return r

    main = rh.vm.VirtualMachine(rh.compile(Module, cache=False))["main"]
    assert main(np.ones((3, 4), "float32"), np.array(True)).numpy() == 12
    assert main(np.ones((5, 4), "float32"), np.array(False)).numpy() == 20
    with pytest.raises(HeteroError, match=r"reshape 'y' of x \(n, 4\) and \(2, 6\): expected n \* 4 == 12 \(n = 5\)"):
        main(np.ones((5, 4), "float32"), np.array(True))


def test_code_for_gpus_has_the_checks_too():
    vdevice = rh.VDevice({"kind": "cuda", "arch": "sm_90"})
    mod = rh.target.vdevice.with_vdevices(build(einsum, OPS["einsum"][1]), [vdevice])
    script = rh.get_pipeline()(mod).script()
    assert "relax_hetero.refuse_sizes" in script and "cls.main_sizes(" in script


def test_schedules_of_two_devices_check_in_their_first_steps():
    @ir_module("llvm", "llvm:1")
    def Module(x: R.Tensor(("n", 4), "float32", "llvm:0")):
        with R.dataflow():
            y = R.to_vdevice(R.exp(R.reshape(x, (2, 6))), "llvm:1")
            z = R.tanh(y)
            R.output(z)
        return z

    exe = rh.compile(Module, cache=False)
    (schedule,) = exe.metadata.schedules
    assert len(schedule.steps) > 1
    machine = rh.vm.VirtualMachine(exe, ["cpu:0", "cpu:1"])
    for call in (machine["main"], lambda *args: machine.submit("main", *args).result()):
        assert call(np.ones((3, 4), "float32")).shape == (2, 6)
        with pytest.raises(HeteroError, match=r"expected n \* 4 == 12 \(n = 2\)"):
            call(np.ones((2, 4), "float32"))


def test_a_cast_between_written_shapes_is_checked():
    """Stock CanonicalizeBindings takes one size for the other where a match_cast says so, and drops the cast."""

    @ir_module()
    def Module(x: R.Tensor(("n",), "float32"), y: R.Tensor(("m",), "float32")):
        m = T.int64()
        with R.dataflow():
            same = R.match_cast(x, R.Tensor((m,), "float32"))
            z = R.add(same, y)
            R.output(z)
        return z

    main = rh.vm.VirtualMachine(rh.compile(Module, cache=False))["main"]
    assert main(np.ones(3, "float32"), np.ones(3, "float32")).numpy().tolist() == [2, 2, 2]
    with pytest.raises(HeteroError, match=r"match_cast 'same'.*: expected n == m \(n = 3, m = 5\)"):
        main(np.ones(3, "float32"), np.ones(5, "float32"))


def test_stock_machines_check_too():
    executable = tvm.compile(build(*OPS["reshape"][:2]), target=rh.native("llvm"), relax_pipeline=rh.get_pipeline())
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    assert main(tvm.runtime.tensor(np.zeros((3, 4), "float32"))).shape == (2, 6)
    with pytest.raises(HeteroError, match="expected n \\* 4 == 12"):
        main(tvm.runtime.tensor(np.zeros((2, 4), "float32")))
