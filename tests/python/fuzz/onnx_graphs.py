"""Random ONNX graphs, of symbolic sizes and of targets that only a call knows, against ONNX Runtime.

A graph grows by nodes that mostly fit what is there; sizes, axes and attributes are sometimes off on purpose. Shapes
are followed with concrete sizes, by running ONNX's own reference of one node on the values so far.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from .harness import Outcome, worst
from .reference import RefusedByReference, compared, run_reference

BATCH = 8
"""Examples that one seed stands for: Hypothesis draws the first of a batch as simple as it can."""

Draw = Callable[[st.SearchStrategy[Any]], Any]

NAMES = ("n", "m", "k")
SIZES = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 16, 17, 33])
FLOATS = ("float32", "float32", "float32", "float16", "float64")
INTS = ("int64", "int32", "uint8", "int8")
EXTREMES = (0, 1, -1, -2, 2, 3, 5, 2**31, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))


@dataclass
class Graph:
    """A graph under construction: its values with an example of each, inputs, constants and nodes."""

    draw: Draw
    sizes: dict[str, int]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, list[int | str]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def chance(self, percent: int) -> bool:
        """True in so many of a hundred draws; False is the simpler one."""
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options; the first is the simplest."""
        return self.draw(st.sampled_from(list(options)))

    def numbers(self, shape: Sequence[int], dtype: str) -> np.ndarray:
        """Small numbers, all of them from one drawn seed; sometimes with infinities and large ones among them."""
        rng = np.random.default_rng(self.draw(st.integers(0, 2**16)))
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if np.dtype(dtype).kind in "iu":
            return rng.integers(0 if dtype.startswith("u") else -4, 9, shape).astype(dtype)
        return rng.integers(-8, 9, shape).astype(dtype) / np.asarray(4, dtype)

    def dims(self, rank: int) -> list[int | str]:
        """Dimensions of an input: known or by name."""
        return [self.choice([*NAMES, None]) or self.draw(SIZES) for _ in range(rank)]

    def new(self, dtype: str, dims: Sequence[int | str]) -> str:
        """A new input, or a constant where no size is symbolic."""
        shape = [self.sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        return self.hold(self.numbers(shape, dtype), dims, 60)

    def hold(self, array: np.ndarray, dims: Sequence[int | str] | None = None, inputs: int = 50) -> str:
        """An array as an input, in so many of a hundred draws, or as a constant."""
        dims = list(array.shape) if dims is None else list(dims)
        if any(isinstance(dim, str) for dim in dims) or self.chance(inputs):
            name = f"x{len(self.inputs)}"
            self.inputs[name] = dims
        else:
            name = f"c{len(self.constants)}"
            self.constants[name] = array
        self.values[name] = array
        return name

    def some(self, kinds: str = "f", rank: int | None = None, least: int = 0) -> str:
        """A value of some kinds of elements (numpy's letters) and a rank, a new input if there is none."""
        fitting = [
            name
            for name, value in self.values.items()
            if value.dtype.kind in kinds and (value.ndim == rank if rank is not None else value.ndim >= least)
        ]
        if fitting and not self.chance(10):
            return str(self.choice(fitting[::-1]))
        dtype = self.choice({"f": FLOATS, "i": INTS[:2], "u": ("uint8",), "b": ("bool",)}[self.choice(kinds)])
        return self.new(dtype, self.dims(self.draw(st.integers(least, 4)) if rank is None else rank))

    def like(self, name: str) -> str:
        """A value of the same element type that broadcasts with another."""
        value = self.values[name]
        fitting = [
            other for other, o in self.values.items() if o.dtype == value.dtype and _broadcasts(o.shape, value.shape)
        ]
        if self.chance(40):
            return str(self.choice(fitting[::-1]))
        shape = [1 if self.chance(30) else size for size in value.shape[self.draw(st.integers(0, value.ndim)) :]]
        symbols = {size: symbol for symbol, size in self.sizes.items()}
        dims: list[int | str] = [symbols.get(size, size) if self.chance(30) else size for size in shape]
        if self.chance(4) and dims:
            dims[-1] = self.draw(SIZES)
        return self.new(str(value.dtype), dims)

    def axis(self, name: str) -> int:
        """An axis of a value, counted from either end; sometimes none."""
        rank = self.values[name].ndim
        if self.chance(2):
            return int(self.choice([rank, -rank - 1]))
        return int(self.draw(st.integers(-rank, rank - 1))) if rank else 0

    def vector(self, numbers: Sequence[int], dtype: str = "int64") -> str:
        """Sizes or indices, as a constant or an input; sometimes one of them is off."""
        array = np.array(numbers, dtype)
        if array.size and self.chance(8):
            array[self.draw(st.integers(0, array.size - 1))] = self.choice(
                [e for e in EXTREMES if np.iinfo(dtype).min <= e <= np.iinfo(dtype).max]
            )
        return self.hold(array)

    def node(self, op: str, *inputs: str, outs: int = 1, **attributes: Any) -> None:
        """Append a node, if the reference gives it a result; what the reference refuses ends the graph's growth."""
        names = [f"v{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outs)]
        node = helper.make_node(op, list(inputs), names, name=f"{op}_{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        arrays = {name: self.values[name] for name in inputs if name}
        model = self.model([node], arrays, {}, names)
        for name, value in zip(names, run_reference(model, arrays), strict=True):
            self.values[name] = value

    def model(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: dict[str, Any],
        constants: dict[str, np.ndarray],
        outs: Sequence[str],
    ) -> onnx.ModelProto:
        """Nodes as a model; `inputs` are arrays, or have their dimensions in `self.inputs`."""
        given_ = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(self.values[name].dtype),
                shape if isinstance(shape, list) else shape.shape,
            )
            for name, shape in inputs.items()
        ]
        outputs = [_untyped(name) for name in outs]
        stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
        graph = helper.make_graph(list(nodes), "g", given_, outputs, stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def whole_model(self) -> onnx.ModelProto:
        """The model so far; its outputs are what no node reads."""
        read = {name for node in self.nodes for name in node.input}
        outs = [name for node in self.nodes for name in node.output if name not in read]
        used_inputs = {name: dims for name, dims in self.inputs.items() if name in read}
        used = {name: array for name, array in self.constants.items() if name in read}
        model = self.model(self.nodes, used_inputs, used, outs)
        for info in model.graph.output:
            value = self.values.get(info.name)
            if value is not None:
                info.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
        return model


def _untyped(name: str) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto()
    info.name = name
    return info


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


Recipe = Callable[[Graph], None]

UNARY = (
    "Relu Abs Neg Exp Sigmoid Tanh Erf Floor Ceil Round Sign Softplus Softsign Elu Selu Celu LeakyRelu HardSigmoid "
    "HardSwish Mish Sin Cos Sqrt Log Reciprocal Identity ThresholdedRelu"
).split()


def unary(g: Graph) -> None:
    g.node(g.choice(UNARY), g.some("f"))


def binary(g: Graph) -> None:
    x = g.some("fi")
    g.node(
        g.choice(["Add", "Mul", "Sub", "Div", "Max", "Min"]),
        *g.choice([lambda a, b: (a, b), lambda a, b: (b, a)])(x, g.like(x)),
    )


def compare(g: Graph) -> None:
    x = g.some("fi")
    g.node(g.choice(["Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual"]), x, g.like(x))


def logic(g: Graph) -> None:
    x = g.some("b")
    g.node(g.choice(["And", "Or", "Xor"]), x, g.like(x))


def where(g: Graph) -> None:
    x = g.some("fi")
    condition = g.new("bool", [1 if g.chance(30) else size for size in g.values[x].shape])
    g.node("Where", condition, x, g.like(x))


def cast(g: Graph) -> None:
    to = g.choice(["float32", "int64", "int32", "float16", "bool", "float64"])
    g.node("Cast", g.some("fib"), to=helper.np_dtype_to_tensor_dtype(np.dtype(to)))


def clip(g: Graph) -> None:
    x = g.some("f")
    dtype = g.values[x].dtype
    g.node("Clip", x, g.hold(np.asarray(-0.5, dtype)), g.hold(np.asarray(0.75, dtype)))


def reduce(g: Graph) -> None:
    x = g.some("f", least=1)
    op = g.choice(
        ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare", "ReduceL1"]
    )
    axes = [g.axis(x)] if not g.chance(30) else []
    keep = int(g.chance(50))
    if axes or op == "ReduceSum":
        g.node(op, x, g.hold(np.array(axes, "int64"), inputs=0), keepdims=keep)
    else:
        g.node(op, x, keepdims=keep)


def arg(g: Graph) -> None:
    x = g.some("f", least=1)
    g.node(
        g.choice(["ArgMax", "ArgMin"]),
        x,
        axis=g.axis(x),
        keepdims=int(g.chance(50)),
        select_last_index=int(g.chance(20)),
    )


def rows(g: Graph) -> None:
    x = g.some("f", least=1)
    op = g.choice(["Softmax", "LogSoftmax", "LayerNormalization", "CumSum"])
    if op == "LayerNormalization":
        size = g.values[x].shape[-1]
        dtype = str(g.values[x].dtype)
        g.node(op, x, g.new(dtype, [size if not g.chance(5) else 3]), g.new(dtype, [size]), axis=-1)
    elif op == "CumSum":
        g.node(op, x, g.hold(np.array(g.axis(x), "int64")), exclusive=int(g.chance(30)), reverse=int(g.chance(30)))
    else:
        g.node(op, x, axis=g.axis(x))


def matmul(g: Graph) -> None:
    x = g.some("f", least=1)
    inner = g.values[x].shape[-1]
    symbols = [symbol for symbol, size in g.sizes.items() if size == inner]
    rows_: int | str = g.choice([inner, *symbols, *NAMES, g.draw(SIZES)] if g.chance(15) else [inner, *symbols])
    w = g.new(str(g.values[x].dtype), [rows_, g.choice([g.draw(SIZES), *NAMES])])
    g.node("MatMul", x, w)


def gemm(g: Graph) -> None:
    x = g.some("f", rank=2)
    inner = g.values[x].shape[1]
    dtype, columns = str(g.values[x].dtype), g.draw(SIZES)
    w = g.new(dtype, [columns, inner])
    g.node("Gemm", x, w, g.new(dtype, [columns if not g.chance(5) else 2]), transB=1, alpha=0.5)


def conv(g: Graph) -> None:
    x = g.some("f", rank=g.choice([4, 4, 3]))
    shape, dtype = g.values[x].shape, str(g.values[x].dtype)
    channels = shape[1]
    group = channels if channels and g.chance(20) else 1
    into = max(channels // group, 1) if not g.chance(5) else 3
    window = [g.draw(st.integers(1, 3)) for _ in shape[2:]]
    w = g.new(dtype, [group * g.draw(st.integers(1, 5)), into, *window])
    pads = [g.draw(st.integers(0, 2)) for _ in range(2 * len(window))]
    g.node(
        g.choice(["Conv", "Conv", "ConvTranspose"]),
        x,
        w,
        group=group,
        pads=pads,
        strides=[g.draw(st.integers(1, 2)) for _ in window],
    )


def pool(g: Graph) -> None:
    x = g.some("f", rank=4)
    op = g.choice(["MaxPool", "AveragePool", "GlobalAveragePool"])
    if op == "GlobalAveragePool":
        g.node(op, x)
        return
    window = [g.draw(st.integers(1, 3)) for _ in range(2)]
    g.node(
        op, x, kernel_shape=window, strides=[g.draw(st.integers(1, 2)) for _ in range(2)], ceil_mode=int(g.chance(30))
    )


def norm(g: Graph) -> None:
    x = g.some("f", rank=4)
    dtype, channels = str(g.values[x].dtype), g.values[x].shape[1]
    sizes = [channels if not g.chance(3) else 2 for _ in range(4)]
    if g.chance(50):
        scale, bias, mean = (g.new(dtype, [size]) for size in sizes[:3])
        g.node("BatchNormalization", x, scale, bias, mean, g.hold(np.full(sizes[3], 0.5, dtype)))
    else:
        g.node("InstanceNormalization", x, g.new(dtype, [sizes[0]]), g.new(dtype, [sizes[1]]))


def reshape(g: Graph) -> None:
    x = g.some("fib")
    shape = list(g.values[x].shape)
    count = int(np.prod(shape))
    targets = [[count], [-1], [1, count], [*shape, 1], shape[::-1], [0] * len(shape)]
    if count % 2 == 0:
        targets += [[2, count // 2], [2, -1], [-1, 2]]
    target = list(g.choice(targets))
    if target and g.chance(10):
        target[g.draw(st.integers(0, len(target) - 1))] = g.choice([-1, 0, 1, 2, 4])
    g.node("Reshape", x, g.vector(target))


def expand(g: Graph) -> None:
    x = g.some("fi")
    target = [g.draw(SIZES) if size == 1 else g.choice([size, 1]) for size in g.values[x].shape]
    if g.chance(30):
        target = [g.draw(st.integers(1, 3)), *target]
    g.node("Expand", x, g.vector(target))


def tile(g: Graph) -> None:
    x = g.some("fi")
    g.node("Tile", x, g.vector([g.draw(st.integers(0, 3)) for _ in range(g.values[x].ndim)]))


def filled(g: Graph) -> None:
    value = numpy_helper.from_array(np.array([2.5], "float32"))
    g.node("ConstantOfShape", g.vector([g.draw(SIZES) for _ in range(g.draw(st.integers(0, 3)))]), value=value)


def ranged(g: Graph) -> None:
    ends = (
        g.draw(st.integers(-5, 5)),
        g.draw(st.integers(-5, 30)),
        g.choice([1, 2, -1, 3, 0] if g.chance(20) else [1, 2, -1]),
    )
    g.node("Range", *(g.hold(np.array(end, "int64")) for end in ends))


def pad(g: Graph) -> None:
    x = g.some("f", least=1)
    mode = g.choice(["constant", "constant", "edge", "reflect"])
    pads = [g.draw(st.integers(0, 2)) for _ in range(2 * g.values[x].ndim)]
    if g.chance(15):
        pads[0] = g.choice([-1, -2])
    g.node("Pad", x, g.vector(pads), mode=mode)


def slice_(g: Graph) -> None:
    x = g.some("fi", least=1)
    axis = g.axis(x)
    start, stop = (g.draw(st.integers(-4, 9)) for _ in range(2))
    step = g.choice([1, 1, 2, -1, 3])
    g.node("Slice", x, g.vector([start]), g.vector([stop]), g.vector([axis]), g.vector([step]))


def split(g: Graph) -> None:
    x = g.some("f", least=1)
    axis = g.draw(st.integers(0, g.values[x].ndim - 1))
    first = g.draw(st.integers(0, g.values[x].shape[axis]))
    sizes = [first, g.values[x].shape[axis] - first + (1 if g.chance(5) else 0)]
    g.node("Split", x, g.vector(sizes), outs=2, axis=axis)


def concat(g: Graph) -> None:
    x = g.some("fi", least=1)
    axis = g.draw(st.integers(0, g.values[x].ndim - 1))
    dims: list[int | str] = list(g.values[x].shape)
    dims[axis] = g.choice([*NAMES, g.draw(SIZES)])
    if g.chance(5):
        dims[0] = g.draw(SIZES)
    g.node("Concat", x, g.new(str(g.values[x].dtype), dims), axis=axis)


def transpose(g: Graph) -> None:
    x = g.some("fib", least=1)
    g.node("Transpose", x, perm=g.draw(st.permutations(range(g.values[x].ndim))))


def squeeze(g: Graph) -> None:
    x = g.some("fi")
    if g.chance(50):
        g.node("Unsqueeze", x, g.vector([g.draw(st.integers(0, g.values[x].ndim))]))
    else:
        ones = [axis for axis, size in enumerate(g.values[x].shape) if size == 1]
        g.node("Squeeze", x, *([g.vector([g.choice(ones or [0])])] if g.chance(70) else []))


def gather(g: Graph) -> None:
    x = g.some("fi", least=1)
    axis = g.draw(st.integers(0, g.values[x].ndim - 1))
    size = g.values[x].shape[axis]
    if not size:
        return
    # Indices out of range are an attack of their own: here they would only be refused by one and clamped by the other.
    rng = np.random.default_rng(g.draw(st.integers(0, 99)))
    op = g.choice(["Gather", "GatherElements"])
    shape = (
        g.values[x].shape
        if op == "GatherElements"
        else [g.draw(st.integers(0, 4)) for _ in range(g.draw(st.integers(0, 2)))]
    )
    g.node(op, x, g.hold(rng.integers(-size, size, shape).astype(g.choice(["int64", "int32"]))), axis=axis)


def topk(g: Graph) -> None:
    x = g.some("f", least=1)
    axis = g.draw(st.integers(0, g.values[x].ndim - 1))
    count = g.draw(st.integers(0, g.values[x].shape[axis])) + (1 if g.chance(5) else 0)
    g.node("TopK", x, g.vector([count]), outs=2, axis=axis, largest=int(g.chance(50)))


def depth(g: Graph) -> None:
    x = g.some("f", rank=4)
    g.node(g.choice(["DepthToSpace", "SpaceToDepth"]), x, blocksize=2)


def shape_of(g: Graph) -> None:
    x = g.some("fi", least=1)
    g.node("Shape", x)


def trilu(g: Graph) -> None:
    g.node(
        "Trilu", g.some("f", least=2), g.hold(np.array(g.draw(st.integers(-3, 3)), "int64")), upper=int(g.chance(50))
    )


def nonzero(g: Graph) -> None:
    g.node("NonZero", g.some("fib", least=1))


def one_hot(g: Graph) -> None:
    x = g.some("i")
    g.node(
        "OneHot", x, g.hold(np.array(g.draw(st.integers(1, 5)), "int64")), g.hold(np.array([0, 1], "float32"), inputs=0)
    )


def resize(g: Graph) -> None:
    x = g.some("f", rank=4)
    sizes = [*g.values[x].shape[:2], g.draw(SIZES), g.draw(SIZES)]
    g.node("Resize", x, "", "", g.vector(sizes), mode=g.choice(["nearest", "linear"]))


def einsum(g: Graph) -> None:
    x = g.some("f", rank=2)
    inner = g.values[x].shape[1]
    y = g.new(str(g.values[x].dtype), [inner if not g.chance(5) else 2, g.draw(SIZES)])
    g.node("Einsum", x, y, equation=g.choice(["ab,bc->ac", "ab,bc->ca", "ab,bc->abc"]))


RECIPES: tuple[Recipe, ...] = (
    *(unary, binary, compare, logic, where, cast, clip, reduce, arg, rows, matmul, gemm, conv, pool, norm, reshape),
    *(reshape, expand, tile, filled, ranged, pad, slice_, split, concat, transpose, squeeze, gather, topk, depth),
    *(shape_of, trilu, nonzero, one_hot, resize, einsum, binary, unary, matmul),
)


@st.composite
def problems(draw: Draw) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A model, and inputs for one or two calls; the sizes of the second call are other ones."""
    graph = Graph(draw, {name: draw(SIZES) for name in NAMES})
    for _ in range(draw(st.integers(1, 7))):
        before = len(graph.nodes)
        try:
            draw(st.sampled_from(RECIPES))(graph)
        except RefusedByReference:
            break  # the last node is the attack
        if len(graph.nodes) == before:
            continue
        if any(value.size > 1 << 20 for value in graph.values.values()):
            break
    model = graph.whole_model()
    calls = [{info.name: graph.values[info.name] for info in model.graph.input}]
    if draw(st.booleans()):
        sizes = {name: draw(SIZES) for name in NAMES}
        calls.append({name: _resized(graph, value, graph.inputs[name], sizes) for name, value in calls[0].items()})
    return model, calls


def _resized(graph: Graph, value: np.ndarray, dims: Sequence[int | str], sizes: dict[str, int]) -> np.ndarray:
    if not any(isinstance(dim, str) for dim in dims):
        return value
    # Now and then one array has a size that contradicts the others'.
    shape = [(graph.draw(SIZES) if graph.chance(4) else sizes[dim]) if isinstance(dim, str) else dim for dim in dims]
    return graph.numbers(shape, str(value.dtype))


def attack(rng: np.random.Generator) -> Outcome:
    """A batch of graphs."""
    return _batch(rng, ["llvm"])


def attack_sanitized(rng: np.random.Generator) -> Outcome:
    """A batch of graphs whose kernels are C++ that checks its accesses."""
    return _batch(rng, ["c"])


def _batch(rng: np.random.Generator, vdevices: list[str]) -> Outcome:
    outcomes: list[Outcome] = []

    @seed(int(rng.integers(2**62)))
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(problems())
    def batch(problem: tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]) -> None:
        model, calls = problem
        if model.graph.node and all(info.type.tensor_type.elem_type for info in model.graph.output):
            text = onnx.printer.to_text(model)
            print(text, [{name: value.shape for name, value in call.items()} for call in calls], file=sys.stderr)
            try:
                outcomes.extend(compared(model, calls, vdevices))
            except Exception:
                outcomes.append(Outcome("foreign", f"{text}\n{traceback.format_exc()[-2500:]}"))

    batch()
    return worst(outcomes)
