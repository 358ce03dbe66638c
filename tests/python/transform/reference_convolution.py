"""A resolver for convolutions with any layouts, and a kernel for them that computes one element after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from relax_hetero.encoding import ConvProblem, Encoding, EncodingResolver, PackedLayout, register_resolver
from relax_hetero.encoding.problem import ElementwiseProblem, MatmulProblem, Operand
from relax_hetero.resolvers import CpuResolver
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.core.builder import Function, Registers, loop
from relax_hetero.tir.core.packed_storage import PackedStorage
from relax_hetero.tir.elementwise.elementwise import elementwise_kernel

NCHW16C = PackedLayout((0, 1, 2, 3), (1,), (16,))
NHWC = PackedLayout((0, 2, 3, 1))
OHWI16O = PackedLayout((0, 2, 3, 1), (0,), (16,))


class Reference(EncodingResolver):
    """Answers for conv2d with the layouts given; products are the CPU resolver's."""

    name = "reference"

    def __init__(self, data: PackedLayout, weight: PackedLayout, result: PackedLayout) -> None:
        self._layouts = (data, weight, result)
        self._solved: list[Any] = []

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        if encoding.op_type == "conv2d":
            return self._layouts[encoding.operand_index]
        return None if encoding.conv is not None else CpuResolver().resolve(encoding, target)

    def kernel(
        self, problem: ConvProblem | MatmulProblem | ElementwiseProblem, target: tvm.target.Target
    ) -> tirx.PrimFunc:
        self._solved.append(problem)
        if isinstance(problem, ConvProblem):
            return convolution(problem)
        if isinstance(problem, ElementwiseProblem):
            return elementwise_kernel(problem, cpu_target_of(target))
        return CpuResolver().kernel(problem, target)


@contextmanager
def reference_resolver(
    data: PackedLayout = NCHW16C,
    weight: PackedLayout = OHWI16O,
    result: PackedLayout = NCHW16C,
    features: Sequence[str] = (),
) -> Iterator[Reference]:
    """All llvm targets with `features` store convolutions in these layouts."""
    resolver = Reference(data, weight, result)
    undo = register_resolver(resolver, "llvm", features, priority=100)
    try:
        yield resolver
    finally:
        undo()


def convolution(problem: ConvProblem) -> tirx.PrimFunc:
    """Six loops and more; what lies in padding of the result is written as zeros."""
    function = Function("reference")
    extra = problem.epilogue.operands if problem.epilogue else ()
    with function:
        bound: set[str] = set()
        operands = [problem.data, problem.weight, *extra, problem.result]
        stores = [
            PackedStorage(function, f"p{i}", operand.shape, operand.dtype, operand.layout, bound)
            for i, operand in enumerate(operands)
        ]
        with function.body():
            for store in stores:
                store.open()
            _body(problem, operands, stores)
    return function.result


def _body(problem: ConvProblem, operands: Sequence[Operand], stores: Sequence[PackedStorage]) -> None:
    data, weight, *extra, result = stores
    names = problem.result.index_map

    def nest(extents: Sequence[Any], body: Any, index: tuple[Any, ...] = ()) -> None:
        if len(index) == len(extents):
            body(index)
            return
        with loop(extents[len(index)]) as position:
            nest(extents, body, (*index, position))

    def element(index: Sequence[Any]) -> None:
        total = Registers(1, problem.acc_dtype, 1)
        total[0] = tirx.const(0, problem.acc_dtype)
        each = problem.weight.shape[1]
        outputs = int(problem.weight.shape[0]) // problem.groups
        sizes = [each, *(window.size for window in problem.windows)]

        def step(place: Sequence[Any]) -> None:
            k, *window = place
            c = tirx.floordiv(index[1], outputs) * each + k
            image = [
                y * w.stride + p * w.dilation - w.before
                for y, p, w in zip(index[2:], window, problem.windows, strict=True)
            ]
            inside = tirx.all(*[tirx.all(x >= 0, x < e) for x, e in zip(image, data.extents[2:], strict=True)])
            value = T.if_then_else(inside, load(data, [index[0], c, *image]), tirx.const(0, problem.acc_dtype))
            total[0] = total[0] + value * load(weight, [index[1], k, *window])

        nest(sizes, step)
        values = [total[0]]
        for operand, store in zip(operands[2:-1], extra, strict=True):
            values.append(load(store, [0 if n == "1" else index[names.index(n)] for n in operand.index_map]))
        value = total[0] if problem.epilogue is None else problem.epilogue.expression.fold(values, _apply)
        T.buffer_store(result.data, value, [position(result, index)])

    T.evaluate(0)
    nest([result.tiles[d] for d in range(len(names))], lambda tiles: _zero(result, tiles))
    nest(result.extents, element)


def _zero(result: PackedStorage, tiles: Sequence[Any]) -> None:
    inner = result.layout.inner_dims
    size = 1
    for tile in result.layout.inner_tiles:
        size *= tile
    assert len(inner) < 2
    with loop(size) as lane:
        offset = result.offset(dict(enumerate(tiles)), dict.fromkeys(inner, lane))
        T.buffer_store(result.data, tirx.const(0, result.dtype), [offset])


def position(store: PackedStorage, element: Sequence[Any]) -> Any:
    """Offset of the element `at` in storage."""
    outer, inner = {}, {}
    for d, index in enumerate(element):
        tile = store.layout.tile(d)
        outer[d] = index if tile == 1 else tirx.floordiv(index, tile)
        inner[d] = 0 if tile == 1 else tirx.floormod(index, tile)
    return store.offset(outer, inner)


def load(store: PackedStorage, element: Sequence[Any]) -> Any:
    return store.data[position(store, element)]


_BINARY = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b, "maximum": T.max, "minimum": T.min}


def _apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
    if op == "number":
        return tirx.const(params[0], "float32")
    if op == "relu":
        return T.max(args[0], tirx.const(0, "float32"))
    if op == "sigmoid":
        return tirx.const(1, "float32") / (tirx.const(1, "float32") + T.exp(tirx.const(0, "float32") - args[0]))
    if op == "leaky_relu":
        return T.if_then_else(args[0] > 0, args[0], args[0] * tirx.const(params[0], "float32"))
    if op == "clip":
        low, high = (tirx.const(p, "float32") for p in params)
        return T.min(T.max(args[0], low), high)
    return _BINARY[op](*args)
