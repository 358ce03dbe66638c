"""ONNX models of any number of nodes; each kind stresses another traversal of the import."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROWS, WIDTH = 4, 8
OPSET = 17
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _model(
    nodes: Sequence[onnx.NodeProto],
    out: str,
    constants: dict[str, np.ndarray] | None = None,
    rows: int | str = ROWS,
    shape: Sequence[int | str | None] | None = (None, None),
    functions: Sequence[onnx.FunctionProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", FLOAT, (rows, WIDTH))
    y = helper.make_tensor_value_info(out, FLOAT, shape)
    stored = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "main", [x, *inputs], [y], stored)
    opsets = [helper.make_opsetid("", OPSET), *([helper.make_opsetid("local", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=list(functions))


Step = Callable[[str, str, int], "list[onnx.NodeProto]"]


def _chain(
    step: Step, count: int, constants: dict[str, np.ndarray] | None = None, rows: int | str = ROWS
) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    for index in range(count):
        nodes += step("x" if index == 0 else f"v{index - 1}", f"v{index}", index)
    return _model(nodes, f"v{count - 1}", constants, rows)


def _ops(*ops: str, **attributes: object) -> Step:
    return lambda a, b, i: [helper.make_node(ops[i % len(ops)], [a], [b], **attributes)]


def onnx_elementwise(count: int) -> onnx.ModelProto:
    """Four ops in turn."""
    return _chain(_ops("Relu", "Tanh", "Neg", "Abs"), count)


def onnx_products(count: int) -> onnx.ModelProto:
    """Products with one weight."""
    return _chain(lambda a, b, _i: [helper.make_node("MatMul", [a, "w"], [b])], count, {"w": np.eye(WIDTH, dtype="f4")})


def onnx_layer_norms(count: int) -> onnx.ModelProto:
    """Layer norms."""
    constants = {"s": np.ones(WIDTH, "f4"), "b": np.zeros(WIDTH, "f4")}
    return _chain(lambda a, b, _i: [helper.make_node("LayerNormalization", [a, "s", "b"], [b])], count, constants)


def onnx_transposes(count: int) -> onnx.ModelProto:
    """Transposes and reshapes."""

    def step(a: str, b: str, i: int) -> list[onnx.NodeProto]:
        if i % 2:
            return [helper.make_node("Reshape", [a, "shape"], [b])]
        return [helper.make_node("Transpose", [a], [b], perm=[1, 0])]

    return _chain(step, count // 2 * 2, {"shape": np.array([ROWS, WIDTH])})


def onnx_shape_arithmetic(count: int) -> onnx.ModelProto:
    """Shape, Gather, Unsqueeze, Concat and Reshape of a symbolic extent, followed by a Relu."""
    constants = {"zero": np.array(0), "axis": np.array([0]), "width": np.array([WIDTH])}

    def step(a: str, b: str, _i: int) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Shape", [a], [f"{b}_shape"]),
            helper.make_node("Gather", [f"{b}_shape", "zero"], [f"{b}_rows"]),
            helper.make_node("Unsqueeze", [f"{b}_rows", "axis"], [f"{b}_list"]),
            helper.make_node("Concat", [f"{b}_list", "width"], [f"{b}_target"], axis=0),
            helper.make_node("Reshape", [a, f"{b}_target"], [f"{b}_reshaped"]),
            helper.make_node("Relu", [f"{b}_reshaped"], [b]),
        ]

    return _chain(step, count // 6, constants, "n")


def onnx_growing_sizes(count: int) -> onnx.ModelProto:
    """One more row with each node: ``n + 1 + 1 + ...``."""
    row = {"row": np.ones((1, WIDTH), "f4")}
    return _chain(lambda a, b, _i: [helper.make_node("Concat", [a, "row"], [b], axis=0)], count, row, "n")


def onnx_halved_sizes(count: int) -> onnx.ModelProto:
    """Sizes through ``n * 2 // 2``, read by a Reshape at the end."""
    constants = {"zero": np.array([0]), "two": np.array([2]), "one": np.array([1]), "width": np.array([WIDTH])}
    nodes = [helper.make_node("Shape", ["x"], ["shape"]), helper.make_node("Gather", ["shape", "zero"], ["v0"])]
    for index in range(count - 4):
        op, operand = (("Mul", "two"), ("Add", "one"), ("Div", "two"))[index % 3]
        nodes.append(helper.make_node(op, [f"v{index}", operand], [f"v{index + 1}"]))
    nodes += [
        helper.make_node("Concat", [f"v{count - 4}", "width"], ["target"], axis=0),
        helper.make_node("Expand", ["one_row", "target"], ["y"]),
    ]
    return _model(nodes, "y", {**constants, "one_row": np.ones((1, WIDTH), "f4")}, "n")


def onnx_folded(count: int) -> onnx.ModelProto:
    """A chain of constants, which the import computes."""
    nodes = [helper.make_node("Add", ["c" if i == 0 else f"c{i - 1}", "c"], [f"c{i}"]) for i in range(count - 1)]
    nodes.append(helper.make_node("Add", ["x", f"c{count - 2}"], ["y"]))
    return _model(nodes, "y", {"c": np.ones((1, WIDTH), "f4")})


def onnx_functions(count: int) -> onnx.ModelProto:
    """Functions, each calling the one before."""
    functions = []
    for index in range(count // 2):
        inner = helper.make_node(f"F{index - 1}", ["h"], ["y"], domain="local") if index else None
        nodes = [helper.make_node("Relu", ["x"], ["h"]), inner or helper.make_node("Neg", ["h"], ["y"])]
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
        functions.append(helper.make_function("local", f"F{index}", ["x"], ["y"], nodes, opsets))
    return _model([helper.make_node(f"F{count // 2 - 1}", ["x"], ["y"], domain="local")], "y", functions=functions)


def onnx_calls(count: int) -> onnx.ModelProto:
    """One function, called again and again."""
    body = [helper.make_node("Relu", ["x"], ["y"])]
    function = helper.make_function("local", "F", ["x"], ["y"], body, [helper.make_opsetid("", OPSET)])
    nodes = [helper.make_node("F", ["x" if i == 0 else f"v{i - 1}"], [f"v{i}"], domain="local") for i in range(count)]
    return _model(nodes, f"v{count - 1}", functions=[function])


def _branch(nodes: Sequence[onnx.NodeProto], out: str) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), out, [], [helper.make_tensor_value_info(out, FLOAT, (ROWS, WIDTH))])


_FLAG = helper.make_tensor_value_info("flag", TensorProto.BOOL, ())


def onnx_conditions(count: int) -> onnx.ModelProto:
    """One `If` after the other."""
    nodes, value = [], "x"
    for index in range(count // 3):
        then = _branch([helper.make_node("Relu", [value], [f"t{index}"])], f"t{index}")
        other = _branch([helper.make_node("Neg", [value], [f"e{index}"])], f"e{index}")
        nodes.append(helper.make_node("If", ["flag"], [f"v{index}"], then_branch=then, else_branch=other))
        value = f"v{index}"
    return _model(nodes, value, inputs=[_FLAG], shape=(ROWS, WIDTH))


def onnx_constants(count: int) -> onnx.ModelProto:
    """Many initializers, added up."""
    constants = {f"c{index}": np.full((1, WIDTH), index, "f4") for index in range(count)}
    return _chain(lambda a, b, i: [helper.make_node("Add", [a, f"c{i}"], [b])], count, constants)


def onnx_fan_out(count: int) -> onnx.ModelProto:
    """Many values computed from one, in one Concat."""
    nodes = [helper.make_node(("Relu", "Neg")[i % 2], ["x"], [f"v{i}"]) for i in range(count - 1)]
    return _model([*nodes, helper.make_node("Concat", [f"v{i}" for i in range(count - 1)], ["y"], axis=0)], "y")


def onnx_quantized(count: int) -> onnx.ModelProto:
    """QuantizeLinear and DequantizeLinear, followed by a Relu."""
    constants = {"s": np.array(0.5, "f4"), "z": np.array(3, "i1")}

    def step(a: str, b: str, _i: int) -> list[onnx.NodeProto]:
        return [
            helper.make_node("QuantizeLinear", [a, "s", "z"], [f"{b}_q"]),
            helper.make_node("DequantizeLinear", [f"{b}_q", "s", "z"], [f"{b}_d"]),
            helper.make_node("Relu", [f"{b}_d"], [b]),
        ]

    return _chain(step, count // 3, constants)


def onnx_slices(count: int) -> onnx.ModelProto:
    """Two copies side by side, and one half of them."""
    constants = {"start": np.array([0]), "end": np.array([WIDTH]), "axis": np.array([1])}

    def step(a: str, b: str, _i: int) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Concat", [a, a], [f"{b}_c"], axis=1),
            helper.make_node("Slice", [f"{b}_c", "start", "end", "axis"], [b]),
        ]

    return _chain(step, count // 2, constants)


def onnx_dimension_text(count: int) -> onnx.ModelProto:
    """One Relu on a dimension whose text is a sum of many terms."""
    return _model([helper.make_node("Relu", ["x"], ["y"])], "y", rows="+".join(["n", *["1"] * (count - 1)]))


KINDS: dict[str, Callable[[int], onnx.ModelProto]] = {
    function.__name__.replace("_", " ").replace("onnx ", "ONNX "): function
    for function in (
        onnx_elementwise,
        onnx_products,
        onnx_layer_norms,
        onnx_transposes,
        onnx_shape_arithmetic,
        onnx_growing_sizes,
        onnx_halved_sizes,
        onnx_folded,
        onnx_functions,
        onnx_calls,
        onnx_conditions,
        onnx_constants,
        onnx_fan_out,
        onnx_quantized,
        onnx_slices,
        onnx_dimension_text,
    )
}
