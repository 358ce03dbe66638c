"""Modules over hosts, cut into steps: run step by step they give the bits of the same cut in one process."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from cluster.step_by_step import CPU, StepByStep, assert_same_bits, check_same, cut, hosted, in_one_process, plain
from modules import ir_module
from relax_hetero.cluster.call_plan import CALL, Program, Source
from relax_hetero.errors import BindingError, HeteroError

A = {"keys": ["cpu", "host:a"], **CPU}
B = {"keys": ["cpu", "host:b"], **CPU}


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def steps(program: Program, name: str = "main") -> list[tuple[str, int]]:
    """Host and number of results of each step."""
    return [(step.host, step.results) for step in program.functions[name].steps]


def test_a_straight_cut_is_a_step_of_each_host():
    @ir_module(A, B)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0")):
        y = R.exp(x)
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.negative(z)
        return w

    program = check_same(Module, [[floats(4)]])
    assert steps(program) == [("a", 1), ("b", 1)]
    assert program.functions["main"].result == Source(1, 0)


def test_there_and_back_is_three_steps():
    @ir_module(A, B)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0")):
        y = R.exp(x)
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.negative(z)
        v = R.to_vdevice(w, "a/llvm:0")
        beside = R.sin(x)  # waits for nobody, and for the last step all the same
        u = R.add(R.add(v, y), beside)
        return u

    assert steps(check_same(Module, [[floats(4)]])) == [("a", 2), ("b", 1), ("a", 1)]


def test_values_that_return_to_their_host_never_leave():
    @ir_module(A, B)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0")):
        y = R.to_vdevice(x, "b/llvm:0")
        z = R.to_vdevice(y, "a/llvm:0")
        w = R.add(z, x)
        v = R.to_vdevice(w, "b/llvm:0")
        u = R.to_vdevice(v, "a/llvm:0")
        t = R.exp(u)
        return (t, v, z)

    program = check_same(Module, [[floats(4)]])
    assert steps(program) == [("a", 2)]
    assert program.functions["main"].result == (Source(0, 1), Source(0, 0), Source(CALL, 0))


def test_values_that_return_to_another_device_of_their_host_are_copied_there():
    builder = relax.BlockBuilder()
    first, second = (rh.VDevice(CPU, number, host="a") for number in range(2))
    other = rh.VDevice(CPU, host="b")
    x = relax.Var("x", relax.TensorType((4,), "float32", first))
    with builder.function("main", [x]):
        y = builder.emit(relax.op.exp(x))
        z = builder.emit(relax.op.to_vdevice(builder.emit(relax.op.to_vdevice(y, other)), second))
        builder.emit_func_output(relax.Tuple([builder.emit(relax.op.negative(z)), y]))
    mod = builder.get()
    mod.update_global_info("vdevice", [first, second, other])
    assert steps(check_same(mod, [[floats(4)]])) == [("a", 2)]


def test_inputs_constants_shapes_and_numbers_are_results():
    @ir_module(A, B)
    def Module(x: R.Tensor(("n", 4), "float32", "a/llvm:0"), y: R.Tensor((4,), "float32", "b/llvm:0")):
        n = T.int64()
        z = R.to_vdevice(x, "b/llvm:0")
        w = R.add(z, y)
        out = (x, R.const(3.0, "float32"), R.shape([n, n + 1]), (w, y, z), R.shape_of(w), R.prim_value(n))
        return out

    program = check_same(Module, [[floats(3, 4), floats(4)], [floats(1, 4), floats(4)]])
    assert program.functions["main"].sizes == (("n",),)


def test_a_function_without_work_has_a_step_without_results():
    @ir_module(A, B)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0"), y: R.Tensor((4,), "float32", "b/llvm:0")):
        z = R.to_vdevice(x, "b/llvm:0")
        return (y, (z,))

    program = check_same(Module, [[floats(4), 2 * floats(4)]])
    assert steps(program) == [("a", 0)]
    assert program.functions["main"].result == (Source(CALL, 1), (Source(CALL, 0),))


def test_tuples_of_parameters_are_opened():
    @ir_module(A, B)
    def Module(
        p: R.Tuple(
            R.Tensor((4,), "float32", "a/llvm:0"), R.Tuple(R.Tensor((4,), "float32", "b/llvm:0"), R.Shape(["k"]))
        ),
        q: R.Shape(["k"]),
    ):
        k = T.int64()
        y = R.to_vdevice(p[0], "b/llvm:0")
        z = R.add(y, p[1][0])
        w = R.broadcast_to(R.reshape(z, R.shape([4, 1])), R.shape([4, k]))
        return (w, p[1][1], p, q)

    program = check_same(Module, [[(floats(4), (floats(4), (5,))), (5,)]])
    assert program.functions["main"].num_inputs == 5  # four of the caller's, and k
    with pytest.raises(BindingError):
        StepByStep(program)("main", (floats(4), (floats(4), (5,))), (6,))


def test_sizes_found_on_one_host_and_needed_on_another():
    @ir_module(A, B)
    def Module(x: R.Tensor((8,), "float32", "a/llvm:0"), y: R.Tensor((1,), "float32", "b/llvm:0")):
        k = T.int64()
        i = R.nonzero(x)
        j = R.match_cast(i, R.Tensor((1, k), "int64", "a/llvm:0"))
        z = R.broadcast_to(y, R.shape([k + 1]))
        w = R.to_vdevice(j, "b/llvm:0")
        return (z, w, R.shape([k]))

    check_same(Module, [[np.arange(8, dtype="float32") % 3, floats(1)], [np.zeros(8, "float32"), floats(1)]])


def test_a_tensor_read_as_a_shape_is_read_on_its_own_host():
    @ir_module(A, B)
    def Module(s: R.Tensor((2,), "int64", "b/llvm:0"), x: R.Tensor((1, 1), "float32", "a/llvm:0")):
        n = T.int64()
        m = T.int64()
        raw = R.tensor_to_shape(s)
        known: R.Shape([n, m]) = R.match_cast(raw, R.Shape([n, m]))
        y = R.broadcast_to(x, R.shape([n, m]))
        return (y, known)

    program = check_same(Module, [[np.array([3, 2]), floats(1, 1)]])
    assert [host for host, _ in steps(program)] == ["b", "a"]


def test_sizes_of_one_name_are_distinguished():
    sizes = [tvm.tirx.Var("n", "int64") for _ in range(2)]
    vdevices = hosted("a", "b")
    x, y = (
        relax.Var(name, relax.TensorType([size], "float32", vdevices[0]))
        for name, size in zip("xy", sizes, strict=True)
    )
    w = relax.Var("w", relax.TensorType([1, 1], "float32", vdevices[1]))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y, w]):
        builder.emit_func_output(builder.emit(relax.op.broadcast_to(w, sizes)))
    mod = builder.get()
    mod.update_global_info("vdevice", vdevices)
    program = check_same(mod, [[floats(2), floats(3), floats(1, 1)], [floats(3), floats(3), floats(1, 1)]])
    assert [spec.shape for spec in program.functions["main"].signature.inputs[:2]] == [("n",), ("n_1",)]


def test_several_functions_and_one_that_they_share():
    @ir_module(A, B)
    class Module:
        @R.function(private=True)
        def helper(x: R.Tensor(("n",), "float32", "b/llvm:0")):
            y = R.exp(x)
            return y

        @R.function
        def main(x: R.Tensor(("n",), "float32", "a/llvm:0")):
            n = T.int64()
            cls = Module
            y = R.to_vdevice(x, "b/llvm:0")
            z: R.Tensor((n,), "float32", "b/llvm:0") = cls.helper(y)
            return z

        @R.function
        def other(x: R.Tensor(("n",), "float32", "b/llvm:0")):
            n = T.int64()
            cls = Module
            z: R.Tensor((n,), "float32", "b/llvm:0") = cls.helper(x)
            y = R.to_vdevice(z, "a/llvm:0")
            w = R.add(y, y)
            return w

        @R.function
        def alone(x: R.Tensor(("n",), "float32", "a/llvm:0")):
            w = R.add(x, x)
            return w

    program = cut(Module)
    machines, reference = StepByStep(program), in_one_process(Module)
    for name, hosts in {"main": ["b"], "other": ["b", "a"], "alone": ["a"]}.items():
        assert [host for host, _ in steps(program, name)] == hosts
        assert_same_bits(machines(name, floats(5)), plain(reference[name](floats(5))))


def test_a_branch_of_one_host_whose_condition_comes_from_another():
    @ir_module(A, B)
    def Module(c: R.Tensor((), "float32", "a/llvm:0"), y: R.Tensor(("n",), "float32", "b/llvm:0")):
        n = T.int64()
        d = R.greater(c, R.const(0.0, "float32"))
        if d:
            z = R.exp(y)
        else:
            z = R.negative(y)
        w = R.to_vdevice(z, "a/llvm:0")
        v = R.multiply(w, w)
        return (v, z)

    program = check_same(Module, [[np.float32(1), floats(4)], [np.float32(-1), floats(3)]])
    assert [host for host, _ in steps(program)] == ["a", "b", "a"]


def test_hosts_that_exchange_inside_of_a_branch_run_their_parts_whole():
    @ir_module(A, B)
    def Module(c: R.Tensor((), "bool", "a/llvm:0"), x: R.Tensor((4,), "float32", "a/llvm:0")):
        if c:
            t = R.to_vdevice(x, "b/llvm:0")
            z = R.exp(t)
        else:
            s = R.to_vdevice(x, "b/llvm:0")
            z = R.negative(s)
        return z

    plan = cut(Module).functions["main"]
    assert not plan.steps and plan.result == Source(1, 0)
    assert [(run.host, run.arguments) for run in plan.runs] == [
        ("a", (Source(CALL, 0), Source(CALL, 1))),
        ("b", (None, None)),
    ]


def test_hosts_that_exchange_inside_of_a_called_function_run_their_parts_whole():
    @ir_module(A, B)
    class Module:
        @R.function(private=True)
        def both(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor((4,), "float32", "b/llvm:0"):
            z = R.exp(x)
            y = R.to_vdevice(z, "b/llvm:0")
            return y

        @R.function
        def main(x: R.Tensor((4,), "float32", "a/llvm:0")):
            cls = Module
            y: R.Tensor((4,), "float32", "b/llvm:0") = cls.both(x)
            return y

    plan = cut(Module).functions["main"]
    assert not plan.steps and plan.result == Source(1, 0)
    assert [(run.host, run.arguments) for run in plan.runs] == [("a", (Source(CALL, 0),)), ("b", (None,))]


def test_hosts_that_exchange_in_a_function_that_calls_itself_run_their_parts_whole():
    @ir_module(A, B)
    class Module:
        @R.function
        def main(n: R.Tensor((), "int64", "a/llvm:0"), x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor(
            (4,), "float32", "a/llvm:0"
        ):
            cls = Module
            left = R.subtract(n, R.const(1, "int64"))
            y = R.to_vdevice(R.negative(R.to_vdevice(x, "b/llvm:0")), "a/llvm:0")
            stop = R.less_equal(left, R.const(0, "int64"))
            if stop:
                out = R.exp(y)
            else:
                out = cls.main(left, y)
            return out

    program = cut(Module)
    assert [run.host for run in program.functions["main"].runs] == ["a", "b"]
    assert all(isinstance(rh.compile(part), rh.vm.Executable) for part in program.parts.values())


def test_a_loop_of_one_host_is_in_a_step():
    @ir_module(A, B)
    class Module:
        @R.function(private=True)
        def loop(i: R.Tensor((), "int64", "b/llvm:0"), x: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor(
            (4,), "float32", "b/llvm:0"
        ):
            cls = Module
            c = R.less(i, R.const(3, "int64"))
            if c:
                j = R.add(i, R.const(1, "int64"))
                y = R.add(x, x)
                r: R.Tensor((4,), "float32", "b/llvm:0") = cls.loop(j, y)
            else:
                r = x
            return r

        @R.function
        def main(i: R.Tensor((), "int64", "a/llvm:0"), x: R.Tensor((4,), "float32", "a/llvm:0")):
            cls = Module
            j = R.add(i, i)
            k = R.to_vdevice(j, "b/llvm:0")
            y = R.to_vdevice(x, "b/llvm:0")
            z: R.Tensor((4,), "float32", "b/llvm:0") = cls.loop(k, y)
            return z

    program = check_same(Module, [[np.array(turn), floats(4)] for turn in (0, 1, 5)])
    assert [host for host, _ in steps(program)] == ["a", "b"]


def test_effects_keep_their_order_and_a_failed_assertion_is_an_error():
    @ir_module(A, B, pure=False)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0"), c: R.Tensor((), "bool", "b/llvm:0")):
        y = R.add(x, x)
        _ = R.assert_op(c, format="c is false")
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.exp(z)
        v = R.to_vdevice(w, "a/llvm:0")
        u = R.add(v, y)
        return u

    program = check_same(Module, [[floats(4), np.array(True)]])
    assert [host for host, _ in steps(program)] == ["a", "b", "a"]
    with pytest.raises(HeteroError, match="c is false"):
        StepByStep(program)("main", floats(4), np.array(False))


def test_kernels_in_place_preserve_values_of_other_steps():
    @ir_module(A, B)
    class Module:
        @T.prim_func(private=True, s_tir=True)
        def bump(X: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("b"):
                    vi = T.axis.remap("S", [i])
                    X[vi] = X[vi] + T.float32(1)

        @R.function
        def main(x: R.Tensor((4,), "float32", "a/llvm:0")):
            cls = Module
            y = R.exp(x)
            z = R.to_vdevice(y, "b/llvm:0")
            w = R.call_tir_inplace(cls.bump, (z,), inplace_indices=[0], out_ty=R.Tensor((4,), "float32", "b/llvm:0"))
            v = R.to_vdevice(w, "a/llvm:0")
            u = R.add(v, y)
            return (u, y, w)

    check_same(Module, [[floats(4)]])


def test_a_branch_with_separate_work_on_both_hosts():
    @ir_module(A, B)
    def Module(
        c: R.Tensor((), "bool", "a/llvm:0"),
        x: R.Tensor((4,), "float32", "a/llvm:0"),
        y: R.Tensor((4,), "float32", "b/llvm:0"),
    ):
        if c:
            p = R.exp(x)
            q = R.exp(y)
            z = (p, q)
        else:
            z = (x, y)
        u = z[0]
        v = R.to_vdevice(u, "b/llvm:0")
        w = R.add(v, z[1])
        return (w, z)

    check_same(Module, [[np.array(flag), floats(4), 2 * floats(4)] for flag in (True, False)])


def test_donated_arguments_of_hosts_are_left_unchanged():
    @ir_module(A, B)
    def Module(x: R.Tensor((4,), "float32", "a/llvm:0"), y: R.Tensor(("n",), "float32", "b/llvm:0")):
        R.func_attr({"relax_hetero.donated": [0, 1]})
        z = R.add(x, x)
        w = R.to_vdevice(z, "b/llvm:0")
        v = R.exp(y)
        return (w, v)

    program = cut(Module)
    assert program.functions["main"].signature.donated == ()
    args = [floats(4), floats(5)]
    actual = StepByStep(program)("main", *args)
    assert_same_bits(actual[0], args[0] + args[0])
    assert_same_bits(tuple(args), (floats(4), floats(5)))


def test_parameters_after_num_input_stay_inputs():
    @ir_module(A, B)
    def Module(
        x: R.Tensor((2, 4), "float32", "a/llvm:0"),
        w: R.Tensor((4, 4), "float32", "a/llvm:0"),
        v: R.Tensor((4, 3), "float32", "b/llvm:0"),
    ):
        R.func_attr({"num_input": 1})
        y = R.matmul(x, w)
        z = R.to_vdevice(y, "b/llvm:0")
        u = R.matmul(z, v)
        return u

    args = [floats(2, 4), floats(4, 4), floats(4, 3)]
    check_same(Module, [args])
    program = cut(Module, {"w": args[1], "v": args[2]})
    assert [spec.name for spec in program.functions["main"].signature.inputs] == ["x"]
    assert_same_bits(StepByStep(program)("main", args[0]), StepByStep(cut(Module))("main", *args))


def test_each_host_holds_its_own_weights_alone():
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal((32, 32)).astype("float32") for name in "abc"}
    vdevices = hosted("a", "b", "c")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 32), "float32", vdevices[0]))
    with builder.function("main", [x]):
        value: relax.Expr = x
        for name, vdevice in zip("abc", vdevices, strict=True):
            value = builder.emit(relax.op.to_vdevice(value, vdevice))
            weight = relax.const(tvm.runtime.tensor(weights[name]), relax.TensorType((32, 32), "float32", vdevice))
            value = builder.emit(relax.op.matmul(value, weight))
        builder.emit_func_output(value)
    mod = builder.get()
    mod.update_global_info("vdevice", vdevices)
    program = check_same(mod, [[floats(4, 32)]])
    for name, part in program.parts.items():
        matrices = [each for each in constants(part) if each.size >= 32 * 32]
        assert len(matrices) == 1
        assert np.sort(matrices[0].ravel()).tobytes() == np.sort(weights[name].ravel()).tobytes()


def constants(mod: tvm.IRModule) -> list[np.ndarray]:
    """The tensors that a module's functions hold."""
    arrays = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            arrays.append(expr.value.numpy())

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return arrays
