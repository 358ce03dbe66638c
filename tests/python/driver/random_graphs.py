"""Random small graphs over several devices, of kernels that nothing fuses with."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_hetero.target.vdevice import same_object

SHAPES = ((), (1,), (6,), (2, 3), (40,), (5, 8), (0,))


def kernel(shapes, results, write):
    """A PrimFunc of float32 tensors that nothing fuses with; `write` makes its body of the buffers."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("kernel")
            T.func_attr({"op_pattern": 8, "tirx.noalias": True})
            shapes = [[tirx.const(extent, "int64") for extent in shape] for shape in (*shapes, *results)]
            buffers = [
                T.arg(f"p{i}", T.buffer(shape, "float32", buffer_name=f"p{i}")) for i, shape in enumerate(shapes)
            ]
            with T.sblock("root"):
                T.reads()
                T.writes()
                write(*buffers)
    return builder.get()


def each(shape, write):
    """Loops over a shape."""
    if not shape:
        write([])
        return
    with T.grid(*(tirx.const(extent, "int64") for extent in shape)) as indices:
        write([indices] if isinstance(indices, tirx.Var) else list(indices))


def at(buffer, indices):
    return tirx.BufferLoad(buffer, indices)


def binary(shape):
    return kernel(
        [shape] * 2, [shape], lambda a, b, c: each(shape, lambda i: T.buffer_store(c, at(a, i) - at(b, i) * 0.5, i))
    )


def two_results(shape):
    def write(a, b, c):
        each(shape, lambda i: (T.buffer_store(b, at(a, i) * 0.75, i), T.buffer_store(c, at(a, i) + 1.0, i)))

    return kernel([shape], [shape] * 2, write)


def total(shape):
    def write(a, b):
        T.buffer_store(b, tirx.const(0, "float32"), [])
        each(shape, lambda i: T.buffer_store(b, at(b, []) * 0.5 + at(a, i), []))

    return kernel([shape], [()], write)


@dataclass
class Graph:
    """A `main` under construction: its values in order of creation, all float32 tensors."""

    devices: Sequence[relax.VDevice]
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)
    values: list[relax.Var] = field(default_factory=list)

    def call(self, name, make, operands, results):
        """A kernel for the shape of its first operand, one function for each."""
        shape, device = extents(operands[0]), operands[0].ty.vdevice
        label = f"{name}_{'_'.join(map(str, shape))}"
        gv = self.builder.add_func(make(shape), label)
        types = [relax.TensorType(result, "float32", device) for result in results]
        return self.builder.emit(relax.call_tir(gv, operands, types if len(types) > 1 else types[0]))


def extents(value):
    return tuple(int(extent) for extent in value.ty.shape.values)


@st.composite
def modules(draw, devices):
    """A module, and the shapes of its parameters."""
    graph = Graph(devices)
    builder, values = graph.builder, graph.values
    params = [
        relax.Var(f"x{i}", relax.TensorType(draw(st.sampled_from(SHAPES)), "float32", draw(st.sampled_from(devices))))
        for i in range(draw(st.integers(1, 3)))
    ]
    with builder.function("main", params):
        with builder.dataflow():
            values += params
            for _ in range(draw(st.integers(2, 14))):
                step(draw, graph)
            outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
            out = builder.emit_output(relax.Tuple(outputs + [values[-1]]))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", list(devices))
    return mod, [extents(param) for param in params]


def step(draw, graph):
    """One more binding."""
    value = draw(st.sampled_from(graph.values[-4:]))
    shape = extents(value)
    kind = draw(st.sampled_from(["binary", "binary", "two", "total", "reshape", "alias", "transfer", "constant"]))
    if kind == "binary":
        same_type = [v for v in graph.values if extents(v) == shape and same_object(v.ty.vdevice, value.ty.vdevice)]
        graph.values.append(graph.call("binary", binary, [value, draw(st.sampled_from(same_type))], [shape]))
    elif kind == "two":
        both = graph.call("two", two_results, [value], [shape, shape])
        graph.values += [
            graph.builder.emit(relax.TupleGetItem(both, i)) for i in draw(st.sampled_from([[0], [1], [0, 1]]))
        ]
    elif kind == "total":
        graph.values.append(graph.call("total", total, [value], [()]))
    elif kind == "reshape":
        same = [other for other in SHAPES if np.prod(other) == np.prod(shape)]
        graph.values.append(graph.builder.emit(relax.op.reshape(value, draw(st.sampled_from(same)))))
    elif kind == "alias":
        graph.values.append(graph.builder.emit(value))
    elif kind == "transfer":
        graph.values.append(graph.builder.emit(relax.op.to_vdevice(value, draw(st.sampled_from(graph.devices)))))
    else:
        array = tvm.runtime.tensor(np.full(shape, draw(st.integers(-2, 2)), "float32"))
        constant = relax.const(array, relax.TensorType(shape, "float32", value.ty.vdevice))
        graph.values.append(graph.call("binary", binary, [value, constant], [shape]))
