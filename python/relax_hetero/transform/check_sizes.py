"""CheckSizes: conditions on sizes that only a call knows become requirements, which calls check first.

Before::

    def main(x: R.Tensor(("n", "a")), w: R.Tensor(("b", 2))):
        lv = R.matmul(x, w)

After::

    def main(x: R.Tensor(("n", "a")), w: R.Tensor(("b", 2))):
        R.hetero.require(T.Cast("float64", n) * 8.0 <= 2.0**47, "matmul 'lv' of x (n, a) and w (b, 2): ...")
        R.hetero.require(a == b, "matmul 'lv' of x (n, a) and w (b, 2): expected a == b")
        lv = R.matmul(x, w)

Three kinds of conditions are required unless types prove them: an op's conditions on the sizes of its operands
(`conditions`); no extent is negative; and no tensor takes more bytes than a process can address, computed in
float64, which does not wrap around. They stand at the beginning of the function, or directly after the ``match_cast``
that defines the last of their sizes; those of a branch stand in the branch.

Assumes a placed module (RealizeVDevice). A lowered module is returned as it is; a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import StructuralKey

from ..encoding.heads import Heads
from ..errors import BuildError
from ..op.attention import attention_sizes
from ..op.require import as_condition, is_requirement, require_binding
from ..op.traits import traits_of
from ..tir.core.walks import replaced
from .ir.blocks import is_one
from .ir.declare import declare_pass
from .ir.module_attrs import is_lowered
from .ir.op_names import CALL_TIR_OPS
from .ir.requirements import (
    Monomial,
    Requirement,
    bind_extents,
    by_position,
    defined_sizes,
    divisors_in,
    factors_of,
    monomial,
    requirement_positions,
    sizes_of_parameters,
    symbols_in,
    text_of,
)
from .ir.rewriting import (
    copy_module,
    map_nested,
    op_name,
    relax_functions,
    tensor_types,
    typed,
    walk_bindings,
    with_body,
)

# Conditions of each op on the sizes of its operands, beyond those that TVM's type inference proves.
#
# Inference accepts a call unless its sizes provably contradict each other: ``(n, a)`` times ``(b, 2)`` is ``(n, 2)``.
# The kernel then reads ``a`` elements of a column that has ``b``. `conditions` applies the rule that `op.traits` names
# for the op.

Extent: TypeAlias = Any
Shape: TypeAlias = "Sequence[Extent]"
Conditions: TypeAlias = "Iterator[Any]"


def conditions(mod: tvm.IRModule, value: relax.Expr, ty: tvm.ir.Type) -> list[Any]:
    """Conditions of a call: boolean expressions over sizes, some of them perhaps proven already.

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
    """The condition that two extents are equal."""
    if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm):
        if int(a) != int(b):
            yield tirx.IntImm("bool", 0)
        return
    if not (a is b or a.same_as(b)):
        yield a == b


def _all_same(first: Iterable[Extent], second: Iterable[Extent]) -> Conditions:
    for a, b in zip(first, second, strict=False):
        yield from _same(a, b)


def _fits_into(shape: Shape, target: Shape) -> Conditions:
    """Conditions for broadcasting `shape` to `target`: TVM's kernels repeat along dimensions written as 1 only."""
    for a, b in zip(reversed(shape), reversed(target), strict=False):
        if not is_one(a):
            yield from _same(a, b)


def _multiple(extent: Extent, factor: int) -> Conditions:
    if factor > 1:
        yield tirx.floormod(extent, tirx.IntImm("int64", factor)) == 0


def product(shape: Iterable[Extent]) -> Extent:
    """Number of elements of a tensor, as int64."""
    return tvm.sym.Analyzer().simplify(prod(shape, start=tirx.IntImm("int64", 1)))


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
    channels, input_channels = data[layout.index("C")], weight[kernel.index("I")]
    if "transpose" in call.op.name:
        yield from _same(channels, input_channels)
        yield from _multiple(channels, groups)
    else:
        yield from _same(channels, input_channels * groups if groups > 1 else input_channels)
        yield from _multiple(weight[kernel.index("O")], groups)


def _channel_norm(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, *parameters = shapes
    axis = int(getattr(call.attrs, "channel_axis", getattr(call.attrs, "axis", 0)))
    if not data:
        return
    for parameter in parameters:
        if parameter:
            yield from _same(parameter[0], data[axis])
    yield from _multiple(data[axis], int(getattr(call.attrs, "num_groups", 1)))


def _last_norm(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, *parameters = shapes
    if not data:
        return
    normed = [data[int(axis)] for axis in call.attrs.axes]
    for parameter in parameters:
        if parameter:
            yield from _all_same(parameter, normed)


def _attention(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    query, key, value, *masks = shapes
    if not (query and key and value) or len(call.args) > 4:
        return
    for operand in (key, value):
        yield from _same(query[0], operand[0])
        yield from _same(query[2], operand[2])
    yield from _same(query[3], key[3])
    yield from _same(key[1], value[1])
    for mask in masks:
        if mask:
            yield from _fits_into(mask, [query[0], query[2], query[1], key[1]])


def _own_attention(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    sizes = attention_sizes(call)
    for index, operand in enumerate(Heads.parse(call.attrs.heads).operands):
        for extent, names, start in zip(shapes[index], operand.dims, operand.starts, strict=True):
            needed = product(sizes[name] for name in names) + start
            if not isinstance(tvm.sym.Analyzer().simplify(needed - extent), tirx.IntImm):
                yield needed <= extent if start else needed == extent
    for mask in shapes[3:]:
        yield from _fits_into(mask, [sizes[name] for name in "bhmn"])


def _einsum(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    fields = call.args[0].ty.fields if isinstance(call.args[0].ty, tvm.ir.TupleType) else []
    operands = [list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None for ty in fields]
    inputs = str(call.attrs.subscripts).replace(" ", "").partition("->")[0].split(",")
    label_extents: dict[str, Extent] = {}
    for labels, extents in zip(inputs, operands, strict=False):
        if extents is None or "." in labels or len(labels) != len(extents):
            continue
        for label, extent in zip(labels, extents, strict=True):
            if not is_one(extent):
                yield from _same(label_extents.setdefault(label, extent), extent)


def _reshape(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data = shapes[0]
    if data is None or result is None:
        return
    if _factors(data) != _factors(result):
        yield from _same(product(data), product(result))


def _factors(shape: Shape) -> tuple[int, Monomial]:
    """Number of elements of a shape as an int and symbolic factors in a canonical order."""
    number, symbolic = factors_of(relax.TensorType(shape, "uint8"))
    return number, monomial(symbolic)


def _broadcast_to(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data = shapes[0]
    if data is not None and result is not None:
        yield from _fits_into(data, result)


def _gather_elements(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    data, indices = shapes[:2]
    if data and indices:
        for axis, (extent, index_extent) in enumerate(zip(data, indices, strict=False)):
            if axis != int(call.attrs.axis) % len(data):
                yield index_extent <= extent


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
    """Padding with elements of the tensor reaches no further than the tensor."""
    margins = {"reflect": 1, "symmetric": 0, "circular": 0, "edge": None, "replicate": None}
    mode = str(call.attrs.pad_mode)
    if mode not in margins or not shapes[0]:
        return
    widths = [int(width) for width in call.attrs.pad_width]
    for axis, extent in enumerate(shapes[0]):
        max_width = max(widths[2 * axis : 2 * axis + 2])
        if max_width > 0:
            min_margin = margins[mode]
            yield extent >= (1 if min_margin is None else max_width + min_margin)


def _pixel_shuffle(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0]:
        yield from _multiple(shapes[0][-3], int(call.attrs.upscale_factor) ** 2)


def _per_axis(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    """Vectors along one axis of the first operand."""
    data, *vectors = shapes
    for vector in vectors:
        if data and vector and not is_one(vector[0]):
            yield from _same(vector[0], data[int(call.attrs.axis)])


def _reverse_sequence(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    if shapes[0] and shapes[1]:
        yield from _same(shapes[1][0], shapes[0][int(call.attrs.batch_axis)])


def _equal_shapes(call: relax.Call, shapes: list[Any], result: Shape | None) -> Conditions:
    for shape in shapes[1:]:
        if shapes[0] is not None and shape is not None:
            yield from _all_same(shapes[0], shape)


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
    """Arguments fit the parameters of a function, whose own symbols stand for the sizes of the arguments."""
    pairs = []
    for param, arg in zip(callee.params, args, strict=False):
        for shape, argument_shape in zip(_shapes_in(param.ty), _shapes_in(arg.ty), strict=False):
            if shape is not None and argument_shape is not None:
                pairs.append((shape, argument_shape))
    yield from _substituted(pairs)


def _call_tir(mod: tvm.IRModule, call: relax.Call) -> Conditions:
    """Operands and results fit the buffers of a kernel."""
    kernel = mod.functions.get(call.args[0]) if isinstance(call.args[0], tvm.ir.GlobalVar) else None
    if not isinstance(kernel, tirx.PrimFunc) or not isinstance(call.args[1], relax.Tuple):
        return
    results = [ty for out in call.ty_args for ty in tensor_types(out)]
    tensors = [field.ty for field in call.args[1].fields]
    if op_name(call) == "relax.call_tir_inplace":
        tensors = [
            *tensors,
            *(ty for ty, index in zip(results, call.attrs.inplace_indices, strict=False) if int(index) < 0),
        ]
    else:
        tensors = [*tensors, *results]
    buffers = [param for param in kernel.params if is_buffer_var(param)]
    pairs = [
        (list(buffer.shape), list(ty.shape.values))
        for buffer, ty in zip(buffers, tensors, strict=False)
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    ]
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
    """Equations between a callee's shapes and those of its arguments, in symbols of the caller."""
    sizes: dict[Any, Extent] = {}
    for shape, argument_shape in pairs:
        for a, b in zip(shape, argument_shape, strict=False):
            if isinstance(a, tvm.ir.Var):
                sizes.setdefault(a, b)
    for shape, argument_shape in pairs:
        if len(shape) != len(argument_shape):
            continue
        for a, b in zip(shape, argument_shape, strict=True):
            if isinstance(a, tirx.IntImm):
                yield from _same(tirx.IntImm("int64", int(a)), _as_int64(b))
            elif all(symbol in sizes for symbol in symbols_in(a)):
                yield from _same(_replaced(a, sizes), _as_int64(b))


def _replaced(expr: Any, sizes: dict[Any, Extent]) -> Extent:
    """A callee's expression, perhaps of 32 bits, over the caller's sizes, of 64 bits."""
    if isinstance(expr, tvm.ir.Var):
        return _as_int64(sizes[expr])
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm("int64", int(expr))
    if isinstance(expr, tirx.Cast):
        return _replaced(expr.value, sizes)
    for kind in (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max):
        if isinstance(expr, kind):
            return kind(_replaced(expr.a, sizes), _replaced(expr.b, sizes))
    return _as_int64(replaced(expr, sizes))


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


MAX_BYTES = 2**47  # address space of a process: 128 TiB


def check_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        When it runs: a public function needs sizes that contradict each other, or a tensor of more bytes than a
        process can address. Names op and variable.
    """
    if is_lowered(mod):
        return mod
    functions = dict(mod.functions.items())
    is_changed = False
    for gv, func in relax_functions(mod):
        body = _FunctionChecker(mod, gv.name_hint, "global_symbol" in func.attrs).body(func)
        if not body.same_as(func.body):
            functions[gv], is_changed = with_body(func, body), True
    return copy_module(mod, functions) if is_changed else mod


CheckSizes = declare_pass("CheckSizes", check_sizes)


@dataclass
class _Scope:
    """Sizes that are known where a scope begins, and conditions that are required there already."""

    known: Set[tirx.Var]
    required: set[StructuralKey]
    is_top: bool


@dataclass
class _FunctionChecker:
    """Writes the requirements of one function."""

    mod: tvm.IRModule
    name: str
    is_public: bool
    # Knows that extents of existing tensors are not negative.
    analyzer: tvm.sym.Analyzer = field(default_factory=tvm.sym.Analyzer)
    # Constant factor of the parameters' bytes, by their symbolic extents: these tensors fit, as they exist.
    parameter_bytes: dict[Monomial, int] = field(default_factory=dict)
    # Symbolic size -> the expression that it is required to equal.
    equal: dict[tirx.Var, Any] = field(default_factory=dict)

    def body(self, func: relax.Function) -> relax.Expr:
        for param in func.params:
            bind_extents(self.analyzer, param.ty)
            for ty in tensor_types(param.ty):
                if isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None:
                    number, symbolic = factors_of(ty)
                    key = monomial(symbolic)
                    self.parameter_bytes[key] = max(number, self.parameter_bytes.get(key, 0))
        return self._sequence(func.body, _Scope(sizes_of_parameters(func), set(), is_top=True))

    def _sequence(self, expr: relax.Expr, scope: _Scope) -> relax.Expr:
        if not isinstance(expr, relax.SeqExpr):
            return expr
        bindings = list(walk_bindings(expr, nested=False))
        inside = _Scope(scope.known | set(defined_sizes(bindings, scope.known)), set(scope.required), is_top=False)
        for binding in bindings:
            if is_requirement(binding.value):
                inside.required.add(StructuralKey(Requirement.of(binding.value).condition))
        required = list(self._required(bindings, inside, scope.known, scope.is_top))
        required_at = by_position(required, bindings, scope.known)
        is_changed, position = False, 0
        blocks: list[relax.BindingBlock] = []
        first = required_at.get(-1, [])
        if first and not expr.blocks:
            blocks.append(relax.BindingBlock(self._written(first, False)))
            first, is_changed = [], True
        for block in expr.blocks:
            is_dataflow = isinstance(block, relax.DataflowBlock)
            written = self._written(first, is_dataflow)
            first = []
            for old in block.bindings:
                written += [self._nested(old, inside), *self._written(required_at.get(position, []), is_dataflow)]
                position += 1
            is_same = len(written) == len(block.bindings) and all(
                new.same_as(old) for new, old in zip(written, block.bindings, strict=True)
            )
            blocks.append(block if is_same else type(block)(written, block.span))
            is_changed = is_changed or not is_same
        return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty) if is_changed else expr

    def _nested(self, binding: relax.Binding, scope: _Scope) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.Function):
            bind_extents(self.analyzer, tvm.ir.TupleType([param.ty for param in value.params]))
            scope = _Scope(scope.known | sizes_of_parameters(value), set(scope.required), is_top=False)
        return map_nested(binding, lambda body: self._sequence(body, scope))

    @staticmethod
    def _written(required: Iterable[Requirement], is_dataflow: bool) -> list[relax.Binding]:
        return [require_binding(requirement.condition, requirement.message, is_dataflow) for requirement in required]

    def _required(
        self, bindings: Iterable[relax.Binding], scope: _Scope, outside: Set[tirx.Var], is_top: bool
    ) -> Iterator[Requirement]:
        """Requirements of a scope, each condition once: extents and bytes first, so that the other ones do not wrap."""
        bounds: dict[Monomial, tuple[int, Requirement]] = {}
        of_ops: list[Requirement] = []
        known = set(outside)
        bindings = list(bindings)
        positions = requirement_positions(bindings)
        for position, binding in enumerate(bindings):
            if position in positions:
                self._learn_equality(binding.value)
                continue
            title = _Title(binding)
            if isinstance(binding, relax.MatchCast):
                needed = list(self._cast_conditions(binding, known))
                known.update(symbols_in(binding.ty))
                bind_extents(self.analyzer, binding.ty)
            else:
                needed = conditions(self.mod, binding.value, binding.var.ty)
            for ty in tensor_types(binding.var.ty):
                if isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None and not _is_existing(binding):
                    yield from self._extent_requirements(ty, title, scope, is_top)
                    self._bound_bytes(ty, title, bounds, is_top)
            for condition in needed:
                of_ops += self._unproven(condition, title, scope, is_top)
        for _, requirement in bounds.values():
            key = StructuralKey(requirement.condition)
            if key not in scope.required:
                scope.required.add(key)
                yield requirement
        yield from of_ops

    def _learn_equality(self, requirement: relax.Expr) -> None:
        """Remember an equality of sizes, so that conditions which follow from it are not required again."""
        condition = Requirement.of(requirement).condition if is_requirement(requirement) else None
        if isinstance(condition, tirx.EQ) and isinstance(condition.a, tirx.Var):
            self.equal[condition.a] = condition.b

    def _cast_conditions(self, binding: relax.MatchCast, known: Set[tirx.Var]) -> Iterator[Any]:
        """Equalities of a cast between two written shapes: TVM replaces one's sizes by the other's without a check."""
        for source, target in zip(_shapes_in(binding.value.ty), _shapes_in(binding.ty), strict=False):
            if source is None or target is None or len(source) != len(target):
                continue
            for a, b in zip(source, target, strict=True):
                if all(symbol in known for symbol in symbols_in(b)) and not (
                    isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm)
                ):
                    yield a == b

    def _unproven(
        self, condition: Any, title: _Title, scope: _Scope, is_top: bool, expected: str = ""
    ) -> Iterator[Requirement]:
        """The requirement of a condition (as `expected`, if given), unless it is proven or required already."""
        condition = as_condition(condition)
        key = StructuralKey(condition)
        if key in scope.required:
            return
        scope.required.add(key)
        if self.analyzer.can_prove(condition):
            return
        if self.equal and self.analyzer.can_prove(replaced(condition, self.equal)):
            return
        if isinstance(condition, tirx.IntImm):  # TVM has folded it
            expected = expected or "operands whose sizes fit each other"
        requirement = Requirement(condition, f"{title}: expected {expected or text_of(condition)}")
        if is_top and self.is_public and self.analyzer.can_prove(tirx.Not(condition)):
            raise BuildError(f"function {self.name!r}: {requirement.message}")
        yield requirement

    def _extent_requirements(
        self, ty: relax.TensorType, title: _Title, scope: _Scope, is_top: bool
    ) -> Iterator[Requirement]:
        for extent in ty.shape.values:
            if isinstance(extent, tirx.IntImm) and int(extent) >= 0:
                continue
            for divisor in divisors_in(extent):
                yield from self._unproven(divisor > 0, title, scope, is_top)
            yield from self._unproven(extent >= 0, title, scope, is_top, f"{text_of(extent)} >= 0")

    def _bound_bytes(
        self, ty: relax.TensorType, title: _Title, bounds: dict[Monomial, tuple[int, Requirement]], is_top: bool
    ) -> None:
        """Require that a tensor fits into memory, unless a larger one of the same symbolic extents does already."""
        number, symbolic = factors_of(ty)
        if not symbolic and (number <= MAX_BYTES or not (is_top and self.is_public)):
            return
        expected = f"{title}: expected a result of 2**47 bytes at most, {text_of(ty.shape)} of {ty.dtype.dtype}"
        if not symbolic:
            raise BuildError(f"function {self.name!r}: {expected}")
        key = monomial(symbolic)
        if number > self.parameter_bytes.get(key, 0) and (key not in bounds or bounds[key][0] < number):
            extents = [_at_least_one(extent, len(symbolic)) for extent in symbolic]
            size: Any = prod(extents, start=tirx.FloatImm("float64", float(number)))
            bounds[key] = number, Requirement(size <= tirx.FloatImm("float64", float(MAX_BYTES)), expected)


def _is_existing(binding: relax.Binding) -> bool:
    """Return whether a variable names an existing value: an alias, a field, a tuple."""
    return isinstance(binding, relax.MatchCast) or isinstance(
        binding.value, (relax.Var, relax.Tuple, relax.TupleGetItem, relax.Function, relax.If)
    )


class _Title:
    """A binding as messages call it: its op, its variable and the shapes of its operands. Computed by ``str``."""

    def __init__(self, binding: relax.Binding) -> None:
        self._binding = binding

    def __str__(self) -> str:
        value = self._binding.value
        name = (op_name(value) or "").removeprefix("relax.").removeprefix("nn.")
        operands: list[str] = []
        if isinstance(value, relax.Call):
            args = list(value.args)
            if name.startswith("call_tir"):
                name = f"kernel {args[0].name_hint}" if isinstance(args[0], tvm.ir.GlobalVar) else name
                args = list(args[1].fields) if isinstance(args[1], relax.Tuple) else []
            elif isinstance(value.op, tvm.ir.GlobalVar):
                name = f"call of {value.op.name_hint}"
            for arg in args:
                shapes = [shape for shape in _shapes_in(arg.ty) if shape is not None]
                if shapes:
                    label = f"{arg.name} " if isinstance(arg, relax.Var) else ""
                    operands.append(label + " ".join(map(text_of, map(relax.ShapeExpr, shapes))))
        elif isinstance(self._binding, relax.MatchCast):
            name = "match_cast"
        suffix = f" of {' and '.join(operands)}" if operands else ""
        return f"{name or 'value'} {self._binding.var.name!r}{suffix}"


def _at_least_one(extent: Any, count: int) -> Any:
    """An extent as one of `count` float64 factors: a 0 must not hide that the other ones exceed every array."""
    factor = tirx.Cast("float64", extent)
    return factor if count == 1 else tirx.max(factor, tirx.FloatImm("float64", 1.0))
