"""Requirements of each op on the sizes of its operands, beyond what TVM's type inference proves.

Inference accepts a call unless its sizes provably contradict each other: ``(n, a)`` times ``(b, 2)`` is ``(n, 2)``. The
kernel then reads ``a`` elements of a column that has ``b``. `conditions` lists what has to hold, by the rule that
`op.traits` names for the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from ...encoding.heads import Heads
from ...op.attention import attention_sizes
from ...op.traits import traits_of
from ..ir.blocks import is_one
from ..ir.op_names import CALL_TIR_OPS
from ..ir.requirements import Monomial, factors_of, monomial, symbols_in
from ..ir.rewriting import op_name, tensor_types

Extent: TypeAlias = Any
Shape: TypeAlias = "Sequence[Extent]"
Conditions: TypeAlias = "Iterator[Any]"


def conditions(mod: tvm.IRModule, value: relax.Expr, ty: tvm.ir.Type) -> list[Any]:
    """Conditions of a call: boolean expressions over sizes, some of which may be proven already.

    Parameters
    ----------
    mod : tvm.IRModule
        Module of the function in which the call stands.
    value : relax.Expr
        Value that a variable is bound to.
    ty : tvm.ir.Type
        Type of the variable.
    """
    if not isinstance(value, relax.Call):
        return []
    name = op_name(value)
    if name is None:
        callee = value.op
        function = mod.functions.get(callee) if isinstance(callee, tvm.ir.GlobalVar) else None
        return list(_function(function, value.args)) if isinstance(function, relax.Function) else []
    if name in CALL_TIR_OPS:
        return list(_call_tir(mod, value))
    rule = RULES.get(traits_of(name).sizes)
    if rule is None:
        return []
    shapes = [(*_shapes_in(arg.ty), None)[0] for arg in value.args]
    return list(rule(value, shapes, (*_shapes_in(ty), None)[0]))


def _same(a: Extent, b: Extent) -> Conditions:
    """Two extents are one."""
    if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm):
        if int(a) != int(b):
            yield tirx.IntImm("bool", 0)
        return
    if not (a is b or a.same_as(b)):
        yield a == b


def _all_same(first: Iterable[Extent], second: Iterable[Extent]) -> Conditions:
    for a, b in zip(first, second, strict=False):
        yield from _same(a, b)


def _fits_into(shape: Shape, whole: Shape) -> Conditions:
    """A tensor that TVM's kernels repeat along the dimensions in which its extent is written as 1."""
    for a, b in zip(reversed(shape), reversed(whole), strict=False):
        if not is_one(a):
            yield from _same(a, b)


def _multiple(extent: Extent, of: int) -> Conditions:
    if of > 1:
        yield tirx.floormod(extent, tirx.IntImm("int64", of)) == 0


def product(shape: Iterable[Extent]) -> Extent:
    """How many elements a tensor has, as int64."""
    result: Extent = tirx.IntImm("int64", 1)
    for extent in shape:
        result = result * extent
    return tvm.sym.Analyzer().simplify(result)


Rule: TypeAlias = "Callable[[relax.Call, list[Any], Shape | None], Conditions]"


def _matmul(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    lhs, rhs = shapes[:2]
    if lhs and rhs:
        yield from _same(lhs[-1], rhs[-2] if len(rhs) > 1 else rhs[0])


def _convolution(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, weight = shapes[:2]
    if not data or not weight:
        return
    groups = int(call.attrs.groups)
    layout, kernel = str(call.attrs.data_layout), str(call.attrs.kernel_layout)
    if not (layout.isupper() and kernel.isupper()):
        return
    channels, given = data[layout.index("C")], weight[kernel.index("I")]
    if "transpose" in call.op.name:
        yield from _same(channels, given)
        yield from _multiple(channels, groups)
    else:
        yield from _same(channels, given * groups if groups > 1 else given)
        yield from _multiple(weight[kernel.index("O")], groups)


def _channel_norm(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, *others = shapes
    axis = int(getattr(call.attrs, "channel_axis", getattr(call.attrs, "axis", 0)))
    if not data:
        return
    for other in others:
        if other:
            yield from _same(other[0], data[axis])
    yield from _multiple(data[axis], int(getattr(call.attrs, "num_groups", 1)))


def _last_norm(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, *others = shapes
    if not data:
        return
    normed = [data[int(axis)] for axis in call.attrs.axes]
    for other in others:
        if other:
            yield from _all_same(other, normed)


def _attention(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    query, key, value, *masks = shapes
    if not (query and key and value) or len(call.args) > 4:
        return
    for other in (key, value):
        yield from _same(query[0], other[0])
        yield from _same(query[2], other[2])
    yield from _same(query[3], key[3])
    yield from _same(key[1], value[1])
    for mask in masks:
        if mask:
            yield from _fits_into(mask, [query[0], query[2], query[1], key[1]])


def _own_attention(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    sizes = attention_sizes(call)
    for index, found in enumerate(Heads.parse(call.attrs.heads).operands):
        for extent, names, start in zip(shapes[index], found.dims, found.starts, strict=True):
            needed = product(sizes[name] for name in names) + start
            if not isinstance(tvm.sym.Analyzer().simplify(needed - extent), tirx.IntImm):
                yield needed <= extent if start else needed == extent
    for mask in shapes[3:]:
        yield from _fits_into(mask, [sizes[name] for name in "bhmn"])


def _einsum(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    fields = call.args[0].ty.fields if isinstance(call.args[0].ty, tvm.ir.TupleType) else []
    operands = [list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None for ty in fields]
    inputs = str(call.attrs.subscripts).replace(" ", "").partition("->")[0].split(",")
    known: dict[str, Extent] = {}
    for labels, extents in zip(inputs, operands, strict=False):
        if extents is None or "." in labels or len(labels) != len(extents):
            continue
        for label, extent in zip(labels, extents, strict=True):
            if is_one(extent):
                continue
            yield from _same(known.setdefault(label, extent), extent)


def _reshape(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data = shapes[0]
    if data is None or result is None:
        return
    if _factors(data) != _factors(result):
        yield from _same(product(data), product(result))


def _factors(shape: Shape) -> tuple[int, Monomial]:
    """A number of elements as a number, times symbols in an order of their own."""
    number, symbolic = factors_of(relax.TensorType(shape, "uint8"))
    return number, monomial(symbolic)


def _broadcast_to(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data = shapes[0]
    if data is not None and result is not None:
        yield from _fits_into(data, result)


def _gather_elements(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, indices = shapes[:2]
    if data and indices:
        for axis, (extent, found) in enumerate(zip(data, indices, strict=False)):
            if axis != int(call.attrs.axis) % len(data):
                yield found <= extent


def _gather_nd(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, indices = shapes[:2]
    if data and indices:
        yield from _all_same(data[: int(call.attrs.batch_dims)], indices[: int(call.attrs.batch_dims)])


def _scatter_elements(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    yield from _gather_elements(call, shapes, result)
    if shapes[1] and shapes[2]:
        yield from _all_same(shapes[1], shapes[2])


def _scatter_nd(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, indices, updates = shapes[:3]
    if data and indices and updates and isinstance(indices[-1], tirx.IntImm):
        yield from _all_same(updates, [*indices[:-1], *data[int(indices[-1]) :]])


def _topk(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0]:
        yield shapes[0][int(call.attrs.axis)] >= int(call.attrs.k)


def _pad(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    """Padding by what is there reaches no further than what is there."""
    margin = {"reflect": 1, "symmetric": 0, "circular": 0, "edge": None, "replicate": None}
    mode = str(call.attrs.pad_mode)
    if mode not in margin or not shapes[0]:
        return
    widths = [int(width) for width in call.attrs.pad_width]
    for axis, extent in enumerate(shapes[0]):
        max_width = max(widths[2 * axis : 2 * axis + 2])
        if max_width > 0:
            spare = margin[mode]
            yield extent >= (1 if spare is None else max_width + spare)


def _pixel_shuffle(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0]:
        yield from _multiple(shapes[0][-3], int(call.attrs.upscale_factor) ** 2)


def _per_axis(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    """Vectors along one axis of the first operand."""
    data, *others = shapes
    for other in others:
        if data and other and not is_one(other[0]):
            yield from _same(other[0], data[int(call.attrs.axis)])


def _reverse_sequence(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0] and shapes[1]:
        yield from _same(shapes[1][0], shapes[0][int(call.attrs.batch_axis)])


def _equal_shapes(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    for other in shapes[1:]:
        if shapes[0] is not None and other is not None:
            yield from _all_same(shapes[0], other)


def _nll_loss(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    predictions, targets, *weights = shapes
    if predictions and targets is not None:
        rest = [extent for axis, extent in enumerate(predictions) if axis != (1 if len(predictions) > 1 else 0)]
        yield from _all_same(rest, targets)
    for weight in weights:
        if predictions and weight:
            yield from _same(weight[0], predictions[1 if len(predictions) > 1 else 0])


def _batch_only(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0] and shapes[1]:
        yield from _same(shapes[0][0], shapes[1][0])


def _function(callee: relax.Function, args: Sequence[relax.Expr]) -> Conditions:
    """Arguments fit the parameters of a function, whose own symbols mean the sizes that it is given."""
    yield from _bound([param.ty for param in callee.params], [arg.ty for arg in args])


def _call_tir(mod: tvm.IRModule, call: relax.Call) -> Conditions:
    """Operands and results fit the buffers of a kernel."""
    kernel = mod.functions.get(call.args[0]) if isinstance(call.args[0], tvm.ir.GlobalVar) else None
    if not isinstance(kernel, tirx.PrimFunc) or not isinstance(call.args[1], relax.Tuple):
        return
    results = [ty for out in call.ty_args for ty in tensor_types(out)]
    given = [field.ty for field in call.args[1].fields]
    if op_name(call) == "relax.call_tir_inplace":
        given = [*given, *(ty for ty, at in zip(results, call.attrs.inplace_indices, strict=False) if int(at) < 0)]
    else:
        given = [*given, *results]
    own = [param for param in kernel.params if is_buffer_var(param)]
    pairs = [
        (list(buffer.shape), list(ty.shape.values))
        for buffer, ty in zip(own, given, strict=False)
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    ]
    yield from _substituted(pairs)


def _bound(own: Sequence[tvm.ir.Type], given: Sequence[tvm.ir.Type]) -> Conditions:
    pairs = []
    for mine, other in zip(own, given, strict=False):
        for a, b in zip(_shapes_in(mine), _shapes_in(other), strict=False):
            if a is not None and b is not None:
                pairs.append((a, b))
    yield from _substituted(pairs)


def _shapes_in(ty: tvm.ir.Type) -> list[Shape | None]:
    if isinstance(ty, tvm.ir.TupleType):
        return [shape for field in ty.fields for shape in _shapes_in(field)]
    if isinstance(ty, relax.ShapeType):
        return [None if ty.values is None else list(ty.values)]
    if isinstance(ty, relax.TensorType):
        return [list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None]
    return [None]


def _substituted(pairs: Sequence[tuple[Shape, Shape]]) -> Conditions:
    """Equations between shapes with symbols of a callee's and those that it is given, in terms of the latter."""
    meaning: dict[Any, Extent] = {}
    for own, given in pairs:
        for a, b in zip(own, given, strict=False):
            if isinstance(a, tvm.ir.Var):
                meaning.setdefault(a, b)
    for own, given in pairs:
        if len(own) != len(given):
            continue
        for a, b in zip(own, given, strict=True):
            if isinstance(a, tirx.IntImm):
                yield from _same(tirx.IntImm("int64", int(a)), _as_int64(b))
                continue
            if all(symbol in meaning for symbol in symbols_in(a)):
                yield from _same(_replaced(a, meaning), _as_int64(b))


def _replaced(expr: Any, meaning: dict[Any, Extent]) -> Extent:
    """An expression of a kernel, which may count in 32 bits, over sizes, which are of 64."""
    if isinstance(expr, tvm.ir.Var):
        return _as_int64(meaning[expr])
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm("int64", int(expr))
    if isinstance(expr, tirx.Cast):
        return _replaced(expr.value, meaning)
    for kind in (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max):
        if isinstance(expr, kind):
            return kind(_replaced(expr.a, meaning), _replaced(expr.b, meaning))
    return _as_int64(structural_map(expr, (tvm.ir.Var, lambda var: meaning.get(var, var))))


def _as_int64(extent: Extent) -> Extent:
    return extent if str(extent.ty) == "int64" else tirx.Cast("int64", extent)


RULES: dict[str, Rule] = {
    rule.__name__[1:]: rule
    for rule in (
        _matmul, _convolution, _channel_norm, _last_norm, _attention, _own_attention, _einsum, _reshape, _broadcast_to,
        _gather_elements, _gather_nd, _scatter_elements, _scatter_nd, _topk, _pad, _pixel_shuffle, _per_axis,
        _reverse_sequence, _equal_shapes, _nll_loss, _batch_only,
    )
}  # fmt: skip
