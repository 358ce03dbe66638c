"""FormRows: fuse softmax, norms and other row reductions into one op where the device has a kernel for it.

Before::

    m = R.mean(x, axis=[-1], keepdims=True)
    c = R.subtract(x, m)
    v = R.mean(R.multiply(c, c), axis=[-1], keepdims=True)
    y = R.divide(c, R.sqrt(R.add(v, R.const(1e-5))))

After::

    y = R.hetero.rows(x, program="r0 = mean(x0); r1 = mean(multiply(subtract(x0, r0), subtract(x0, r0))); divide(...)")

A region includes reductions along the last axes, softmax, layer and RMS norms, and the elementwise ops before and after
them on the same rows. Ops that PropagateEncodings fused into the kernels of products stay there. Reductions over
several axes are fused only if they normalize complete rows: images are stored channels-last, and their means over
height and width are not means of rows.

Kernels compute in single precision. Programs of half-precision ops cast where the results of those ops are rounded,
so that a model gets the same numbers as op by op.

Assumes a placed module (RealizeVDevice); a region has one device. A second run changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression, Term
from ...encoding.problem import RowsProblem
from ...encoding.resolver import resolver_or_default
from ...encoding.row_program import Reduction, RowProgram, operands_of, replaced
from ...op.encoded import UNSET
from ...op.rows import rows
from ...op.traits import traits_of
from ...target.element_types import HALF_TYPES
from ...target.vdevice import same_object
from ..ir.blocks import (
    Block,
    Emitter,
    broadcast,
    is_one,
    rewrite_function,
    same_shape,
    shape_of,
    tensor_type,
    with_regions,
)
from ..ir.callee_devices import target_of
from ..ir.declare import declare_pass
from ..ir.op_names import RESHAPE
from ..ir.relax_expressions import is_supported, scalar_of, to_expression
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, with_functions

# Terms of Relax ops on rows: norms and softmax as reductions and elementwise functions.

Reduce = Callable[[str, Term], Term]
"""Function that adds a reduction of a kind over a term, and returns the term of its result."""

_ROW_TO_ROW_KINDS = ("softmax", "row_norm")
_ROW_KINDS = (*_ROW_TO_ROW_KINDS, "reduction", "moment")


@dataclass(frozen=True)
class RowOp:
    """A call that reduces rows, to its result or in between."""

    call: relax.Call
    axes: int  # number of trailing axes that form a row

    @property
    def vectors(self) -> list[relax.Expr]:
        """Operands after the first, which have the shape of a row."""
        return list(self.call.args[1:])

    @property
    def is_row_to_row(self) -> bool:
        """True if the result has complete rows."""
        return is_row_to_row(self.call)


def is_row_to_row(call: relax.Expr) -> bool:
    """Return whether a call computes a row from a row, as softmax and norms do."""
    return traits_of(op_name(call)).kind in _ROW_TO_ROW_KINDS


def rounded(term: Term, value: relax.Expr) -> Term:
    """The term that users of `value` read, given the `term` that its op computes.

    Rows are computed in single precision, but every op on half precision rounds its result (softmax and norms do not
    round in between). Later ops may depend on that, such as a difference of nearly equal numbers.
    """
    dtype = str(value.ty.dtype)
    return term if dtype not in HALF_TYPES or traits_of(op_name(value)).is_exact else Term("cast", (term,), (dtype,))


def row_op(call: relax.Expr) -> RowOp | None:
    """The call as an op on rows; None for other ops, axes that are not the last ones, and unsupported element types."""
    kind = traits_of(op_name(call)).kind
    if kind not in _ROW_KINDS:
        return None
    ty = call.args[0].ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or ty.ndim < 1:
        return None
    dtype = str(ty.dtype)
    if dtype not in ("float16", "bfloat16", "float32", "float64") or (dtype == "float64" and kind == "softmax"):
        return None
    axes = _axes(call, kind, int(ty.ndim))
    return RowOp(call, axes) if axes else None


def _axes(call: relax.Call, kind: str, rank: int) -> int:
    """Number of trailing axes that are reduced; 0 if other axes are."""
    attr = call.attrs.axes if kind == "row_norm" else [call.attrs.axis] if kind == "softmax" else call.attrs.axis
    axes = range(rank) if attr is None else sorted(int(axis) % rank for axis in attr)
    return len(axes) if list(axes) == list(range(rank - len(axes), rank)) else 0


def row_term(op: RowOp, x: Term, vectors: list[Term], reduce: Reduce) -> Term:
    """The term of an op over the rows `x`; the variance is a separate reduction of the centred row."""
    call, name = op.call, op.call.op.name.rpartition(".")[2]
    if traits_of(call.op.name).kind == "reduction":
        return reduce(name, x)
    if name == "softmax":
        exponential = _call("exp", _call("subtract", x, reduce("max", x)))
        return _call("multiply", exponential, _call("divide", _number(1.0), reduce("sum", exponential)))
    if name == "log_softmax":
        shifted = _call("subtract", x, reduce("max", x))
        return _call("subtract", shifted, _call("log", reduce("sum", _call("exp", shifted))))
    if name == "rms_norm":
        square = reduce("mean", _call("multiply", x, x))
        return _call("multiply", _call("multiply", x, _inverse_root(square, call.attrs.epsilon)), vectors[0])
    centred = _call("subtract", x, reduce("mean", x))
    variance = reduce("mean", _call("multiply", centred, centred))
    if name in ("variance", "std"):
        return variance if name == "variance" else _call("sqrt", variance)
    result = _call("multiply", centred, _inverse_root(variance, call.attrs.epsilon))
    if call.attrs.scale:
        result = _call("multiply", result, vectors[0])
    return _call("add", result, vectors[1]) if call.attrs.center else result


def _inverse_root(x: Term, epsilon: float) -> Term:
    return _call("rsqrt", _call("add", x, _number(float(epsilon))))


def _call(op: str, *args: Term) -> Term:
    return Term(op, args)


def _number(value: float) -> Term:
    return Term("number", (), (value,))


# Regions: reductions along rows and the elementwise ops around them, which become one `R.hetero.rows`.
#
# A region grows from its first reduction over users that are elementwise on the same rows, or reduce them, and ends at
# its last post-dominator; then elementwise producers that only the region reads are added. Only the last value has
# users outside, so nothing is computed twice.


@dataclass(frozen=True)
class RowOperand:
    """A tensor that a region reads."""

    value: relax.Expr
    shape: tuple[Any, ...] | None  # shape that it is reshaped to first; None: its own


@dataclass(frozen=True)
class RowRegion:
    """Ops that become one `rows`."""

    end: int  # index of the last binding
    inside: tuple[int, ...]  # indices of the other bindings, which are removed
    program: RowProgram
    operands: tuple[RowOperand, ...]
    shape: list[Any]  # shape of the result of `rows`
    ops: tuple[str, ...]  # names of its ops


FULL, ROW, FLAT = "full", "row", "flat"
"""Forms of values in a region: complete rows; one value for each row, with extents of 1 for its axes or without."""

_VIEWS = (RESHAPE, "relax.expand_dims", "relax.squeeze", "relax.broadcast_to")
_FIRST_REDUCTION = 1 << 20  # operand index of the first reduction in terms
_MAX_TERMS = 400  # maximum number of terms in the text of a program, which repeats a term for each use


@dataclass(frozen=True)
class _Candidate:
    """A possible region: its last value, and the bindings before it."""

    end: int
    inside: tuple[int, ...]
    term: Term
    form: str


class _RegionBuilder:
    """Builder of the region that starts at the binding of an op on rows."""

    def __init__(self, block: Block, start: int, op: RowOp, claimed: set[int]) -> None:
        self.block, self.start, self.op, self.claimed = block, start, op, claimed
        self.device = block.bindings[start].var.ty.vdevice
        self.shape = shape_of(op.call.args[0]) or []
        self.outer = self.shape[: len(self.shape) - op.axes]
        self.terms: dict[relax.Var, Term] = {}
        self.forms: dict[relax.Var, str] = {}
        self.operands: list[RowOperand] = []
        self.reductions: list[tuple[str, Term]] = []

    def region(self) -> RowRegion | None:
        """The largest region; None if the op's operands do not fit."""
        block = self.block
        if not self._add(block.bindings[self.start]):
            return None
        candidate = self._candidate(self.start, ())
        inside: list[int] = [self.start]
        pending = self._users(block.bindings[self.start].var)
        heapq.heapify(pending)
        while pending:
            index = heapq.heappop(pending)
            if inside[-1] == index:
                continue
            if index in self.claimed or not self._add(block.bindings[index]):
                break
            if set(pending) <= {index} and op_name(block.bindings[index].value) not in _VIEWS:
                candidate = self._candidate(index, tuple(inside))
            inside.append(index)
            users = self._users(block.bindings[index].var)
            if not users:
                break
            for user in users:
                heapq.heappush(pending, user)
        return self._finish(self._with_prologue(candidate))

    def _candidate(self, index: int, inside: tuple[int, ...]) -> _Candidate:
        var = self.block.bindings[index].var
        return _Candidate(index, inside, self.terms[var], self.forms[var])

    def _users(self, var: relax.Var) -> list[int]:
        return list(self.block.users.get(var, [])) if self.block.is_local(var) else []

    def _add(self, binding: relax.Binding) -> bool:
        var, value = binding.var, binding.value
        shape = shape_of(var)
        if not isinstance(binding, relax.VarBinding) or shape is None or not self._is_on_device(var):
            return False
        form = self._form(shape)
        if form is None:
            return False
        term = self._term_of(value, form)
        if term is None or self._size(term) > _MAX_TERMS:
            return False
        self.terms[var], self.forms[var] = term, form
        return True

    def _term_of(self, value: relax.Expr, form: str) -> Term | None:
        name = op_name(value)
        if name in _VIEWS:
            return self._view(value.args[0], form)
        op = row_op(value)
        if op is not None:
            return self._row_op(op, form)
        if name == "relax.where":
            return self._where(value, form)
        parsed = to_expression(value)
        if parsed is None:
            return None
        expression, tensors = parsed
        terms = [self._term(tensor, form) for tensor in tensors]
        if any(term is None for term in terms):
            return None
        return expression.substitute([Expression(term) for term in terms if term is not None]).term

    def _where(self, value: relax.Call, form: str) -> Term | None:
        """The term of a ``where``, whose condition must be an operand: values of the region are floats."""
        if value.args[0] in self.forms or not is_supported("where", str(value.ty.dtype)):
            return None
        terms = [self._term(value.args[0], form)]
        for arg in value.args[1:]:
            number = scalar_of(arg)
            terms.append(self._term(arg, form) if number is None else Term("number", (), (number,)))
        args = [term for term in terms if term is not None]
        is_number = [term.op == "number" for term in args]
        return Term("where", tuple(args)) if len(args) == 3 and not all(is_number[1:]) else None

    def _view(self, source: relax.Expr, form: str) -> Term | None:
        """The term of a view: another shape of one value for each row, or that value broadcast along the row."""
        source_form = self.forms.get(source) if isinstance(source, relax.Var) else None
        return self._value(source) if source_form == form or source_form in (ROW, FLAT) else None

    def _row_op(self, op: RowOp, form: str) -> Term | None:
        x = self._term(op.call.args[0], FULL)
        same_rows = op.axes == self.op.axes and same_shape(shape_of(op.call.args[0]) or [], self.shape)
        vectors = [self._term(vector, FULL) for vector in op.vectors]
        if x is None or not same_rows or (form != FULL) == op.is_row_to_row or None in vectors:
            return None

        def reduce(kind: str, term: Term) -> Term:
            if (kind, term) not in self.reductions:
                self.reductions.append((kind, term))
            return _operand(_FIRST_REDUCTION + self.reductions.index((kind, term)))

        return row_term(op, x, [vector for vector in vectors if vector is not None], reduce)

    def _form(self, shape: list[Any]) -> str | None:
        ones = [tirx.IntImm("int64", 1)] * self.op.axes
        for form, expected in ((FULL, self.shape), (ROW, [*self.outer, *ones]), (FLAT, self.outer)):
            if same_shape(shape, expected):
                return form
        return None

    def _term(self, tensor: relax.Expr, form: str) -> Term | None:
        """The term of a value or operand of the region, for an op whose result has a form."""
        tensor_form = self.forms.get(tensor) if isinstance(tensor, relax.Var) else None
        if tensor_form is not None:
            # Without dimensions before the row, a scalar broadcasts along it too.
            fits = tensor_form == form or (form == FULL and (tensor_form == ROW or not self.outer))
            return self._value(tensor) if fits else None
        operand = self._operand(tensor, form)
        if operand is None:
            return None
        for index, existing in enumerate(self.operands):
            is_same_shape = (existing.shape is None) == (operand.shape is None) and same_shape(
                existing.shape or (), operand.shape or ()
            )
            if existing.value.same_as(tensor) and is_same_shape:
                return _operand(index)
        self.operands.append(operand)
        return _operand(len(self.operands) - 1)

    def _value(self, var: relax.Var) -> Term:
        """The term that reads a value of the region."""
        return rounded(self.terms[var], self.block.definition(var))

    def _operand(self, tensor: relax.Expr, form: str) -> RowOperand | None:
        """A tensor as an operand that broadcasts against the rows, with the row's axes merged into one."""
        shape = shape_of(tensor)
        if shape is None or not self._is_on_device(tensor):
            return None
        axes = self.op.axes
        full_shape = {FULL: self.shape, ROW: [*self.outer, *([tirx.IntImm("int64", 1)] * axes)], FLAT: self.outer}[form]
        broadcast_shape = broadcast(shape, full_shape)
        if broadcast_shape is None or not same_shape(broadcast_shape, full_shape):
            return None
        unit = tirx.IntImm("int64", 1)
        if form == FLAT:
            return RowOperand(tensor, (*shape, unit) if shape else None)
        if axes == 1 or not shape:
            return RowOperand(tensor, None)
        outer, inner = shape[:-axes], shape[-axes:]
        if all(map(is_one, inner)):
            return RowOperand(tensor, (*outer, unit))
        if len(inner) == axes and same_shape(inner, self.shape[-axes:]):
            return RowOperand(tensor, (*outer, self._length()))
        return None

    def _length(self) -> Any:
        length: Any = prod(self.shape[len(self.outer) :])
        return length if isinstance(length, tirx.Expr) else tirx.IntImm("int64", length)

    def _is_on_device(self, tensor: relax.Expr) -> bool:
        device = tensor.ty.vdevice
        return device is None or self.device is None or same_object(device, self.device)

    def _size(self, term: Term) -> int:
        """Number of terms in the text of a program with this result and the present reductions."""
        sizes: dict[Term, int] = {}

        def size(part: Term) -> int:
            if part not in sizes:
                sizes[part] = 1 + sum(map(size, part.args))
            return sizes[part]

        return size(term) + sum(size(part) for _, part in self.reductions)

    def _with_prologue(self, candidate: _Candidate) -> _Candidate:
        """The region with elementwise ops that only it uses: their terms replace operands."""
        block = self.block
        index = 0
        while index < len(self.operands):
            operand = self.operands[index]
            position = block.positions.get(operand.value) if isinstance(operand.value, relax.Var) else None
            region = {*candidate.inside, candidate.end}
            if position is None or position in self.claimed or not block.is_local(operand.value):
                index += 1
                continue
            form = self._form(shape_of(operand.value) or [])
            value = block.bindings[position].value
            joins = form in (FULL, ROW) and set(block.users.get(operand.value, [])) <= region
            num_operands = len(self.operands)
            term = self._term_of(value, form or "") if joins and row_op(value) is None else None
            table = {_operand(index): rounded(term, value)} if term is not None else {}
            if term is None or self._size_with(candidate.term, table) > _MAX_TERMS or op_name(value) in _VIEWS:
                del self.operands[num_operands:]
                index += 1
                continue
            self.reductions = [(kind, replaced(part, table)) for kind, part in self.reductions]
            candidate = replace(
                candidate, term=replaced(candidate.term, table), inside=tuple(sorted((*candidate.inside, position)))
            )
            index += 1
        return candidate

    def _size_with(self, term: Term, table: dict[Term, Term]) -> int:
        before, self.reductions = self.reductions, [(kind, replaced(part, table)) for kind, part in self.reductions]
        size = self._size(replaced(term, table))
        self.reductions = before
        return size

    def _finish(self, candidate: _Candidate) -> RowRegion:
        """The region, with used operands and reductions renumbered."""
        reductions = self._used_reductions(candidate.term)
        terms = [*(self.reductions[index][1] for index in reductions), candidate.term]
        used = [i for i in sorted({i for term in terms for i in operands_of(Expression(term))}) if i < _FIRST_REDUCTION]
        table = {_operand(old): _operand(new) for new, old in enumerate(used)}
        table.update(
            {_operand(_FIRST_REDUCTION + old): _operand(len(used) + new) for new, old in enumerate(reductions)}
        )
        renamed = [Expression(replaced(term, table)) for term in terms]
        kinds = [self.reductions[index][0] for index in reductions]
        program = RowProgram(len(used), tuple(map(Reduction, kinds, renamed)), renamed[-1])
        last = self._length() if candidate.form == FULL else tirx.IntImm("int64", 1)
        names = [op_name(self.block.bindings[index].value) or "" for index in (*candidate.inside, candidate.end)]
        ops = tuple(name.removeprefix("relax.").removeprefix("nn.") for name in names if name not in _VIEWS)
        operands = tuple(self.operands[index] for index in used)
        return RowRegion(candidate.end, candidate.inside, program, operands, [*self.outer, last], ops)

    def _used_reductions(self, result: Term) -> list[int]:
        used: set[int] = set()
        pending = [result]
        while pending:
            for index in operands_of(Expression(pending.pop())):
                if index >= _FIRST_REDUCTION and index - _FIRST_REDUCTION not in used:
                    used.add(index - _FIRST_REDUCTION)
                    pending.append(self.reductions[index - _FIRST_REDUCTION][1])
        return sorted(used)


def _operand(index: int) -> Term:
    return Term("operand", (), (index,))


MIN_COLUMNS = 4  # minimum length of rows: shorter rows would mostly fill vectors with padding


def form_rows(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
    return with_functions(
        mod, {gv: rewrite_function(func, _Rewriter(gv.name_hint).rewrite) for gv, func in relax_functions(mod)}
    )


FormRows = declare_pass("FormRows", form_rows)


class _Rewriter:
    """Rewriter of the blocks of one function."""

    def __init__(self, function: str) -> None:
        self.function = function

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        regions: dict[int, RowRegion] = {}
        claimed: set[int] = set()
        for index, binding in enumerate(block.bindings):
            op = row_op(binding.value) if index not in claimed else None
            if op is None:
                self._missed(binding)
                continue
            region = self._region(block, index, op, claimed)
            if region is not None:
                regions[region.end] = region
                claimed.update([*region.inside, region.end])
        return with_regions(block, regions, _write)

    def _region(self, block: Block, index: int, op: RowOp, claimed: set[int]) -> RowRegion | None:
        var = block.bindings[index].var
        reason = _unsupported_reason(op, var)
        if reason:
            self._remark(var, op.call.op.name, reason)
            return None
        if reason is None:
            return None
        region = _RegionBuilder(block, index, op, claimed).region()
        if region is None:
            self._remark(var, op.call.op.name, "its operands do not broadcast along the rows")
        elif op.axes > 1 and (is_one(region.shape[-1]) or _is_image(block, op)):
            self._remark(
                var,
                op.call.op.name,
                f"reduces {op.axes} axes, expected one, or a norm of a tensor that is not an image",
            )
            return None
        return region

    def _missed(self, binding: relax.Binding) -> None:
        if is_row_to_row(binding.value):
            reason = "its axes are not the last ones, or its type lacks a kernel"
            self._remark(binding.var, binding.value.op.name, reason)

    def _remark(self, var: relax.Var, op: str, reason: str) -> None:
        record_missed(self.function, var.name, op.removeprefix("relax."), reason)


def _unsupported_reason(op: RowOp, var: relax.Var) -> str | None:
    """The reason why no region starts at an op; empty if one may, None if the device lacks row kernels."""
    if RowsProblem not in resolver_or_default(target_of(var.ty.vdevice)).problems:
        return None
    shape = shape_of(op.call.args[0])
    if shape is None or shape_of(var) is None:
        return "its shape is not known"
    length = prod(shape[len(shape) - op.axes :])
    if isinstance(length, tirx.IntImm) and int(length) < MIN_COLUMNS:
        return f"its rows have {int(length)} elements, expected {MIN_COLUMNS} or more"
    if any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in shape):
        return "it is empty"
    return ""


def _is_image(block: Block, op: RowOp) -> bool:
    """Return whether the rows come from a convolution, which stores images channels-last."""
    value = block.definition(op.call.args[0])
    return op_name(value) == UNSET and Encoding.parse(value.attrs.encoding).conv is not None


def _write(emitter: Emitter, region: RowRegion, var: relax.Var) -> None:
    operands = []
    for index, operand in enumerate(region.operands):
        value = operand.value
        if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
            value = emitter.reshape(value, operand.shape, f"{var.name}_x{index}")
        operands.append(value)
    call = rows(*operands, program=region.program, ops=",".join(dict.fromkeys(region.ops)))
    if same_shape(region.shape, shape_of(var) or []):
        emitter.emit_as(var, call)
        return
    result = emitter.emit(call, tensor_type(region.shape, str(var.ty.dtype), var.ty), f"{var.name}_rows")
    emitter.emit_as(var, relax.op.reshape(result, shape_of(var)))
