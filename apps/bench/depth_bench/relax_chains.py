"""Relax modules of any number of nodes; each kind stresses another traversal of the compiler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tvm
from command_buffer_bench.chains import Chain
from tvm import relax, tirx
from tvm.relax.op import nn

import relax_hetero as rh

ROWS, WIDTH = 4, 8
TYPE = relax.TensorType((ROWS, WIDTH), "float32")
Step = Callable[[relax.BlockBuilder, relax.Expr, int], relax.Expr]


def _const(array: np.ndarray, dtype: str = "float32") -> relax.Expr:
    return relax.const(array.astype(dtype))


def _chain(step: Step, count: int, ty: relax.TensorType = TYPE) -> tvm.IRModule:
    """Apply `step` to a value repeatedly."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", ty)
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = x
            for index in range(count):
                value = builder.emit(step(builder, value, index))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def elementwise_one_kind(count: int) -> tvm.IRModule:
    """Additions of one tensor to itself, which are fused."""
    one = relax.const(1.0, "float32")
    return _chain(lambda _b, value, _i: relax.op.add(value, one), count)


def elementwise_alternating(count: int) -> tvm.IRModule:
    """Ops of four kinds in turn, which are fused."""
    ops = (relax.op.tanh, nn.relu, relax.op.negative, relax.op.exp)
    return _chain(lambda _b, value, i: ops[i % 4](value), count)


def doubling(count: int) -> tvm.IRModule:
    """``x = x + x``: one diamond after the other."""
    return _chain(lambda _b, value, _i: relax.op.add(value, value), count)


def user_kernels(count: int) -> tvm.IRModule:
    """Calls of four kernels that are not fused."""
    return Chain(count).module()


def user_kernels_of_any_size(count: int) -> tvm.IRModule:
    """The same as `user_kernels`, with a symbolic extent."""
    return Chain(count, symbolic=True).module()


def user_kernels_in_place(count: int) -> tvm.IRModule:
    """Calls that overwrite their operand."""
    builder = relax.BlockBuilder()
    ty = relax.TensorType((16,), "float32")
    x = relax.Var("x", ty)
    step = builder.add_func(_increment(), "step")
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = builder.emit(nn.relu(x))
            for _ in range(count):
                value = builder.emit(relax.op.call_tir_inplace(step, [value], [0], [ty]))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def _increment() -> tirx.PrimFunc:
    """A kernel that adds 1 to a tensor."""
    from tvm.script import tirx as T  # noqa: PLC0415

    @T.prim_func(private=True, s_tir=True)
    def increment(x: T.Buffer((16,), "float32")):
        T.func_attr({"op_pattern": 8})
        for i in range(16):
            with T.sblock("x"):
                vi = T.axis.spatial(16, i)
                x[vi] = x[vi] + T.float32(1)

    return increment


def products(count: int) -> tvm.IRModule:
    """Products with one constant weight."""
    weight = _const(np.eye(WIDTH))
    return _chain(lambda _b, value, _i: relax.op.matmul(value, weight), count)


def products_of_weights(count: int) -> tvm.IRModule:
    """Products, each with a weight of its own, and a ReLU."""
    return _chain(
        lambda b, value, i: nn.relu(b.emit(relax.op.matmul(value, _const(np.eye(WIDTH) * (1 + i % 3))))), count
    )


def convolutions(count: int) -> tvm.IRModule:
    """1x1 convolutions with a ReLU."""
    weight = _const(np.eye(WIDTH).reshape(WIDTH, WIDTH, 1, 1))
    ty = relax.TensorType((1, WIDTH, 4, 4), "float32")
    return _chain(lambda b, value, _i: nn.relu(b.emit(nn.conv2d(value, weight))), count, ty)


def transposes(count: int) -> tvm.IRModule:
    """Transposes and reshapes in turn, which cancel."""
    steps = (lambda v: relax.op.permute_dims(v, [1, 0]), lambda v: relax.op.reshape(v, (ROWS, WIDTH)))
    return _chain(lambda _b, value, i: steps[i % 2](value), count // 2 * 2)


def slices(count: int) -> tvm.IRModule:
    """Windows of an input, added up."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.strided_slice(x, [0], [0], [16]))
            for index in range(count // 2):
                part = builder.emit(relax.op.strided_slice(x, [0], [index % 48], [index % 48 + 16]))
                value = builder.emit(relax.op.add(value, part))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def concats(count: int) -> tvm.IRModule:
    """Two copies side by side, and the first half of them."""

    def step(b: relax.BlockBuilder, value: relax.Expr, _i: int) -> relax.Expr:
        return relax.op.strided_slice(b.emit(relax.op.concat([value, value], 1)), [1], [0], [WIDTH])

    return _chain(step, count // 2)


def one_concat(count: int) -> tvm.IRModule:
    """One concatenation of many values."""
    return _gathered(count, lambda values: relax.op.concat(values, 0))


def reductions(count: int) -> tvm.IRModule:
    """Subtractions of the mean."""
    return _chain(lambda b, v, _i: relax.op.subtract(v, b.emit(relax.op.mean(v, [1], True))), count // 2)


def softmaxes(count: int) -> tvm.IRModule:
    """Softmax over rows."""
    return _chain(lambda _b, value, _i: nn.softmax(value, -1), count)


def layer_norms(count: int) -> tvm.IRModule:
    """Layer norms over rows."""
    scale, bias = _const(np.ones(WIDTH)), _const(np.zeros(WIDTH))
    return _chain(lambda _b, value, _i: nn.layer_norm(value, scale, bias, [-1]), count)


def attentions(count: int) -> tvm.IRModule:
    """Scores, softmax, values, and a residual."""

    def step(b: relax.BlockBuilder, value: relax.Expr, _i: int) -> relax.Expr:
        keys = b.emit(relax.op.permute_dims(value, [0, 1, 3, 2]))
        scores = b.emit(nn.softmax(b.emit(relax.op.matmul(value, keys)), -1))
        return relax.op.add(b.emit(relax.op.matmul(scores, value)), value)

    return _chain(step, count // 5, relax.TensorType((1, 2, ROWS, WIDTH), "float32"))


def casts(count: int) -> tvm.IRModule:
    """Casts to half precision and back."""
    return _chain(lambda _b, value, i: relax.op.astype(value, ("float16", "float32")[i % 2]), count // 2 * 2)


def quantizations(count: int) -> tvm.IRModule:
    """Quantize and dequantize."""
    scale, zero = relax.const(0.5, "float32"), relax.const(3, "int8")

    def step(_b: relax.BlockBuilder, value: relax.Expr, i: int) -> relax.Expr:
        if i % 2:
            return relax.op.dequantize(value, scale, zero, -1, "float32")
        return relax.op.quantize(value, scale, zero, -1, "int8")

    return _chain(step, count // 2 * 2)


def masks(count: int) -> tvm.IRModule:
    """The absolute value, by `where`."""
    zero = relax.const(0.0, "float32")

    def step(b: relax.BlockBuilder, value: relax.Expr, _i: int) -> relax.Expr:
        return relax.op.where(b.emit(relax.op.greater(value, zero)), value, b.emit(relax.op.negative(value)))

    return _chain(step, count // 3)


def _on_two(mod: tvm.IRModule) -> tvm.IRModule:
    mod.update_global_info("vdevice", [rh.VDevice("llvm", 0), rh.VDevice("llvm", 1)])
    return mod


def transfers(count: int) -> tvm.IRModule:
    """Transfers to another device and back, with an op between."""

    def step(b: relax.BlockBuilder, value: relax.Expr, i: int) -> relax.Expr:
        return nn.relu(b.emit(relax.op.hint_on_device(value, tvm.cpu(i % 2))))

    return _on_two(_chain(step, count // 2))


def hints(count: int) -> tvm.IRModule:
    """A hint after each op, always of the same device."""

    def step(b: relax.BlockBuilder, value: relax.Expr, _i: int) -> relax.Expr:
        return relax.op.hint_on_device(b.emit(nn.relu(value)), tvm.cpu(1))

    return _on_two(_chain(step, count // 2))


def tuples(count: int) -> tvm.IRModule:
    """Tuples of two values, whose first field is read."""

    def step(b: relax.BlockBuilder, value: relax.Expr, _i: int) -> relax.Expr:
        pair = b.emit(relax.Tuple([b.emit(nn.relu(value)), value]))
        return relax.TupleGetItem(pair, 0)

    return _chain(step, count // 3)


def nested_tuples(count: int) -> tvm.IRModule:
    """A tuple in a tuple, as deep as half of the nodes."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", TYPE)
    with builder.function("main", [x]):
        with builder.dataflow():
            value: relax.Expr = builder.emit(nn.relu(x))
            for _ in range(count // 2):
                value = builder.emit(relax.Tuple([value]))
            for _ in range(count // 2):
                value = builder.emit(relax.TupleGetItem(value, 0))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def conditions(count: int) -> tvm.IRModule:
    """One `If` after the other."""
    builder = relax.BlockBuilder()
    x, flag = relax.Var("x", TYPE), relax.Var("flag", relax.TensorType((), "bool"))
    with builder.function("main", [flag, x]):
        value: relax.Expr = x
        for _ in range(count // 3):
            value = builder.emit(relax.If(flag, nn.relu(value), relax.op.negative(value)))
        builder.emit_func_output(value)
    return builder.get()


def nested_conditions(count: int) -> tvm.IRModule:
    """An `If` in an `If`."""
    builder = relax.BlockBuilder()
    x, flag = relax.Var("x", TYPE), relax.Var("flag", relax.TensorType((), "bool"))
    with builder.function("main", [flag, x]):
        value: relax.Expr = nn.relu(x)
        for _ in range(count // 3):
            value = relax.If(flag, value, relax.op.negative(x))
        builder.emit_func_output(builder.emit(value))
    return builder.get()


def functions(count: int) -> tvm.IRModule:
    """Functions, each calling the one before."""
    builder = relax.BlockBuilder()
    callee = None
    for index in range(count // 2):
        x = relax.Var("x", TYPE)
        last = index == count // 2 - 1
        with builder.function("main" if last else f"f{index}", [x], private=not last):
            value = builder.emit(nn.relu(x))
            builder.emit_func_output(value if callee is None else builder.emit(relax.Call(callee, [value])))
        callee = builder.get().get_global_var("main" if last else f"f{index}")
    return builder.get()


def calls(count: int) -> tvm.IRModule:
    """One function, called again and again."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", TYPE)
    with builder.function("f", [x], private=True):
        builder.emit_func_output(builder.emit(nn.relu(x)))
    callee = builder.get().get_global_var("f")
    x = relax.Var("x", TYPE)
    with builder.function("main", [x]):
        value: relax.Expr = x
        for _ in range(count):
            value = builder.emit(relax.Call(callee, [value]))
        builder.emit_func_output(value)
    return builder.get()


def parameters(count: int) -> tvm.IRModule:
    """Many parameters, added up."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{index}", TYPE) for index in range(count)]
    with builder.function("main", params):
        with builder.dataflow():
            value: relax.Expr = params[0]
            for param in params[1:]:
                value = builder.emit(relax.op.add(value, param))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def constants(count: int) -> tvm.IRModule:
    """Many constants, all different, added up."""
    return _chain(lambda _b, value, i: relax.op.add(value, _const(np.full((ROWS, WIDTH), i))), count)


def _gathered(count: int, gather: Callable[[list[relax.Expr]], relax.Expr]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", TYPE)
    ops = (relax.op.tanh, nn.relu, relax.op.negative, relax.op.exp)
    with builder.function("main", [x]):
        with builder.dataflow():
            values = [builder.emit(ops[index % 4](x)) for index in range(count)]
            value = builder.emit_output(gather(values))
        builder.emit_func_output(value)
    return builder.get()


def outputs(count: int) -> tvm.IRModule:
    """Many results."""
    return _gathered(count, relax.Tuple)


def tree(count: int) -> tvm.IRModule:
    """Wide fan-out, and pairs added up until one is left."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", TYPE)
    with builder.function("main", [x]):
        with builder.dataflow():
            values = [builder.emit(nn.softmax(x, -1)) for _ in range(count // 2)]
            while len(values) > 1:
                pairs = zip(values[::2], values[1::2], strict=False)
                values = [builder.emit(relax.op.add(a, b)) for a, b in pairs] + values[len(values) // 2 * 2 :]
            value = builder.emit_output(values[0])
        builder.emit_func_output(value)
    return builder.get()


def symbolic_sums(count: int) -> tvm.IRModule:
    """A value that grows by a row with each concatenation: ``n + 1 + 1 + ...``."""
    n = tirx.Var("n", "int64")
    row = _const(np.ones((1, WIDTH)))
    ty = relax.TensorType((n, WIDTH), "float32")
    return _chain(lambda _b, value, _i: relax.op.concat([value, row], 0), count, ty)


def symbolic_chain(count: int) -> tvm.IRModule:
    """Softmaxes and sums with a symbolic extent."""
    n = tirx.Var("n", "int64")

    def step(_b: relax.BlockBuilder, value: relax.Expr, i: int) -> relax.Expr:
        return nn.softmax(value, -1) if i % 2 else relax.op.add(value, value)

    return _chain(step, count, relax.TensorType((n, WIDTH), "float32"))


KINDS: dict[str, Callable[[int], tvm.IRModule]] = {
    function.__name__.replace("_", " "): function
    for function in (
        elementwise_one_kind,
        elementwise_alternating,
        doubling,
        user_kernels,
        user_kernels_of_any_size,
        user_kernels_in_place,
        products,
        products_of_weights,
        convolutions,
        transposes,
        slices,
        concats,
        one_concat,
        reductions,
        softmaxes,
        layer_norms,
        attentions,
        casts,
        quantizations,
        masks,
        transfers,
        hints,
        tuples,
        nested_tuples,
        conditions,
        nested_conditions,
        functions,
        calls,
        parameters,
        constants,
        outputs,
        tree,
        symbolic_sums,
        symbolic_chain,
    )
}
