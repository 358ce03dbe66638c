"""FormRows: softmax, norms and other work on rows become one op where the device has a kernel for it.

Before::

    m = R.mean(x, axis=[-1], keepdims=True)
    c = R.subtract(x, m)
    v = R.mean(R.multiply(c, c), axis=[-1], keepdims=True)
    y = R.divide(c, R.sqrt(R.add(v, R.const(1e-5))))

After::

    y = R.hetero.rows(x, program="r0 = mean(x0); r1 = mean(multiply(subtract(x0, r0), subtract(x0, r0))); divide(...)")

What joins is said by `row_regions`: reductions along the last axes, softmax, layer and RMS norms, and the elementwise
ops before and behind them on the same rows. Work on the results of products that PropagateEncodings gave to their
kernels stays there. Reductions over several axes are left alone unless all of the row is normalized by them: images
lie channels last, and their means over height and width are not of rows.

Kernels compute in single precision. Programs of half-precision ops cast where the results of those ops are rounded,
so that a model gets the numbers that it gets op by op.

Assumes a placed module (RealizeVDevice); values of two devices never meet in a region. A second run changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx

from ...encoding.encoding import Encoding
from ...encoding.expression import Expression, Term
from ...encoding.problem import RowsProblem
from ...encoding.resolver import answers_of
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

# Relax ops on rows as terms over what they read: norms and softmax as reductions and elementwise work.

Reduce = Callable[[str, Term], Term]
"""Adds a reduction of a kind over a term, and gives the term that stands for it."""

_WHOLE_ROWS = ("softmax", "row_norm")
_ROWS = (*_WHOLE_ROWS, "reduction", "moment")


@dataclass(frozen=True)
class RowOp:
    """A call that reduces rows, for itself or on the way.

    Attributes
    ----------
    call : relax.Call
    axes : int
        How many trailing axes make a row.
    """

    call: relax.Call
    axes: int

    @property
    def vectors(self) -> list[relax.Expr]:
        """Operands beside the first: of the row's shape."""
        return list(self.call.args[1:])

    @property
    def is_wide(self) -> bool:
        """True if the result has all of the row."""
        return is_wide(self.call)


def is_wide(call: relax.Expr) -> bool:
    """Return whether a call computes all of a row from all of a row, as softmax and norms do."""
    return traits_of(op_name(call)).kind in _WHOLE_ROWS


def rounded(term: Term, value: relax.Expr) -> Term:
    """Term that users of a value read, where its op computes `term` of values that are rounded.

    Rows are computed in single precision, but every op on half precision rounds its result; softmax and norms only
    that, not what they compute on the way. A later op may be sensitive to that: a difference of what is nearly equal.
    """
    dtype = str(value.ty.dtype)
    return term if dtype not in HALF_TYPES or traits_of(op_name(value)).is_exact else Term("cast", (term,), (dtype,))


def row_op(call: relax.Expr) -> RowOp | None:
    """`call` as an op on rows; None for others, for axes that are not the last ones, and element types without."""
    kind = traits_of(op_name(call)).kind
    if kind not in _ROWS:
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
    """How many axes from the last on are reduced, 0 where it is not just those."""
    given = call.attrs.axes if kind == "row_norm" else [call.attrs.axis] if kind == "softmax" else call.attrs.axis
    axes = range(rank) if given is None else sorted(int(axis) % rank for axis in given)
    return len(axes) if list(axes) == list(range(rank - len(axes), rank)) else 0


def row_term(op: RowOp, x: Term, vectors: list[Term], reduce: Reduce) -> Term:
    """Term of an op over the rows `x`; the variance is that of the centred row, in a pass of its own."""
    call, name = op.call, op.call.op.name.rpartition(".")[2]
    if traits_of(call.op.name).kind == "reduction":
        return reduce(name, x)
    if name == "softmax":
        exponential = _call("exp", _call("subtract", x, reduce("max", x)))
        return _call("multiply", exponential, _call("divide", _number(1.0), reduce("sum", exponential)))
    if name == "log_softmax":
        moved = _call("subtract", x, reduce("max", x))
        return _call("subtract", moved, _call("log", reduce("sum", _call("exp", moved))))
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


# Which ops become one `R.hetero.rows`: reductions along rows and the elementwise work around them.
#
# A region grows from its first reduction over users as long as they are elementwise on the same rows, or reduce them,
# and ends at the last value through which every other use of it goes; then elementwise ops that only the region reads
# join from above. No value but the last is used elsewhere, so nothing is computed twice.


@dataclass(frozen=True)
class RowOperand:
    """A tensor that a region reads.

    Attributes
    ----------
    value : relax.Expr
    shape : tuple or None
        Shape that it is reshaped to first.
    """

    value: relax.Expr
    shape: tuple[Any, ...] | None


@dataclass(frozen=True)
class RowRegion:
    """Work that one `rows` will do.

    Attributes
    ----------
    end : int
        Index of the binding that it ends at.
    inside : tuple of int
        Indices of bindings that vanish.
    program : RowProgram
    operands : tuple of RowOperand
    shape : list
        Shape of the result of `rows`.
    ops : tuple of str
        Names of what it is made of.
    """

    end: int
    inside: tuple[int, ...]
    program: RowProgram
    operands: tuple[RowOperand, ...]
    shape: list[Any]
    ops: tuple[str, ...]


FULL, ROW, FLAT = "full", "row", "flat"
"""Shapes of values in a region: all of the rows; one value a row with extents of 1 for its axes, or without them."""

_VIEWS = (RESHAPE, "relax.expand_dims", "relax.squeeze", "relax.broadcast_to")
_REDUCED = 1 << 20
"""Operands of terms from here on are reductions."""
_MAX_TERMS = 400
"""Maximum number of terms in the text of a program, in which a term stands as often as it is used."""


@dataclass(frozen=True)
class _Candidate:
    """A region so far: its last value, and the bindings before it."""

    end: int
    inside: tuple[int, ...]
    term: Term
    form: str


class RowGrowth:
    """A region while it grows from the binding of an op on rows."""

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
        """The largest region; None where the op's operands do not fit."""
        block = self.block
        if not self._take(block.bindings[self.start]):
            return None
        found = self._candidate(self.start, ())
        inside: list[int] = [self.start]
        pending = self._users(block.bindings[self.start].var)
        heapq.heapify(pending)
        while pending:
            index = heapq.heappop(pending)
            if inside[-1] == index:
                continue
            if index in self.claimed or not self._take(block.bindings[index]):
                break
            if set(pending) <= {index} and op_name(block.bindings[index].value) not in _VIEWS:
                found = self._candidate(index, tuple(inside))
            inside.append(index)
            users = self._users(block.bindings[index].var)
            if not users:
                break
            for user in users:
                heapq.heappush(pending, user)
        return self._finish(self._with_prologue(found))

    def _candidate(self, index: int, inside: tuple[int, ...]) -> _Candidate:
        var = self.block.bindings[index].var
        return _Candidate(index, inside, self.terms[var], self.forms[var])

    def _users(self, var: relax.Var) -> list[int]:
        return list(self.block.users.get(var, [])) if self.block.is_local(var) else []

    def _take(self, binding: relax.Binding) -> bool:
        var, value = binding.var, binding.value
        shape = shape_of(var)
        if not isinstance(binding, relax.VarBinding) or shape is None or not self._is_here(var):
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
            return self._choice(value, form)
        found = to_expression(value)
        if found is None:
            return None
        expression, tensors = found
        terms = [self._term(tensor, form) for tensor in tensors]
        if any(term is None for term in terms):
            return None
        return expression.substitute([Expression(term) for term in terms if term is not None]).term

    def _choice(self, value: relax.Call, form: str) -> Term | None:
        """``where`` of a condition from outside the region: what is computed inside is of floats."""
        if value.args[0] in self.forms or not is_supported("where", str(value.ty.dtype)):
            return None
        terms = [self._term(value.args[0], form)]
        for arg in value.args[1:]:
            number = scalar_of(arg)
            terms.append(self._term(arg, form) if number is None else Term("number", (), (number,)))
        known = [term for term in terms if term is not None]
        is_number = [term.op == "number" for term in known]
        return Term("where", tuple(known)) if len(known) == 3 and not all(is_number[1:]) else None

    def _view(self, source: relax.Expr, form: str) -> Term | None:
        """Another shape for one value a row, or that value all along the row."""
        known = self.forms.get(source) if isinstance(source, relax.Var) else None
        return self._value(source) if known == form or (known in (ROW, FLAT)) else None

    def _row_op(self, op: RowOp, form: str) -> Term | None:
        x = self._term(op.call.args[0], FULL)
        same_rows = op.axes == self.op.axes and same_shape(shape_of(op.call.args[0]) or [], self.shape)
        vectors = [self._term(vector, FULL) for vector in op.vectors]
        if x is None or not same_rows or (form != FULL) == op.is_wide or None in vectors:
            return None

        def reduce(kind: str, term: Term) -> Term:
            if (kind, term) not in self.reductions:
                self.reductions.append((kind, term))
            return _operand(_REDUCED + self.reductions.index((kind, term)))

        return row_term(op, x, [vector for vector in vectors if vector is not None], reduce)

    def _form(self, shape: list[Any]) -> str | None:
        ones = [tirx.IntImm("int64", 1)] * self.op.axes
        for form, wanted in ((FULL, self.shape), (ROW, [*self.outer, *ones]), (FLAT, self.outer)):
            if same_shape(shape, wanted):
                return form
        return None

    def _term(self, tensor: relax.Expr, form: str) -> Term | None:
        """A value of the region, or an operand, in an op whose result has a form."""
        known = self.forms.get(tensor) if isinstance(tensor, relax.Var) else None
        if known is not None:
            # Without dimensions before the row, a scalar broadcasts along it too.
            fits = known == form or (form == FULL and (known == ROW or not self.outer))
            return self._value(tensor) if fits else None
        operand = self._operand(tensor, form)
        if operand is None:
            return None
        for index, other in enumerate(self.operands):
            same = (other.shape is None) == (operand.shape is None) and same_shape(
                other.shape or (), operand.shape or ()
            )
            if other.value.same_as(tensor) and same:
                return _operand(index)
        self.operands.append(operand)
        return _operand(len(self.operands) - 1)

    def _value(self, var: relax.Var) -> Term:
        """Term that reads a value of the region."""
        return rounded(self.terms[var], self.block.definition(var))

    def _operand(self, tensor: relax.Expr, form: str) -> RowOperand | None:
        """A tensor as an operand: broadcast against the rows, their axes merged into one."""
        shape = shape_of(tensor)
        if shape is None or not self._is_here(tensor):
            return None
        axes = self.op.axes
        whole = {FULL: self.shape, ROW: [*self.outer, *([tirx.IntImm("int64", 1)] * axes)], FLAT: self.outer}[form]
        together = broadcast(shape, whole)
        if together is None or not same_shape(together, whole):
            return None
        one = tirx.IntImm("int64", 1)
        if form == FLAT:
            return RowOperand(tensor, (*shape, one) if shape else None)
        if axes == 1 or not shape:
            return RowOperand(tensor, None)
        outer, inner = shape[:-axes], shape[-axes:]
        if all(map(is_one, inner)):
            return RowOperand(tensor, (*outer, one))
        if len(inner) == axes and same_shape(inner, self.shape[-axes:]):
            return RowOperand(tensor, (*outer, self._length()))
        return None

    def _length(self) -> Any:
        length: Any = 1
        for extent in self.shape[len(self.outer) :]:
            length = length * extent
        return length if isinstance(length, tirx.Expr) else tirx.IntImm("int64", length)

    def _is_here(self, tensor: relax.Expr) -> bool:
        own = tensor.ty.vdevice
        return own is None or self.device is None or same_object(own, self.device)

    def _size(self, term: Term) -> int:
        """Terms of the text of a program with this result, and all its reductions."""
        sizes: dict[Term, int] = {}

        def size(part: Term) -> int:
            if part not in sizes:
                sizes[part] = 1 + sum(map(size, part.args))
            return sizes[part]

        return size(term) + sum(size(part) for _, part in self.reductions)

    def _with_prologue(self, candidate: _Candidate) -> _Candidate:
        """With elementwise ops that only the region uses; operands are replaced by what computes them."""
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
            known = len(self.operands)
            term = self._term_of(value, form or "") if joins and row_op(value) is None else None
            table = {_operand(index): rounded(term, value)} if term is not None else {}
            if term is None or self._size_with(candidate.term, table) > _MAX_TERMS or op_name(value) in _VIEWS:
                del self.operands[known:]
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
        """Operands and reductions that are used, numbered anew."""
        reductions = self._used_reductions(candidate.term)
        terms = [*(self.reductions[number][1] for number in reductions), candidate.term]
        used = [i for i in sorted({i for term in terms for i in operands_of(Expression(term))}) if i < _REDUCED]
        table = {_operand(old): _operand(new) for new, old in enumerate(used)}
        table.update({_operand(_REDUCED + old): _operand(len(used) + new) for new, old in enumerate(reductions)})
        renamed = [Expression(replaced(term, table)) for term in terms]
        kinds = [self.reductions[number][0] for number in reductions]
        program = RowProgram(len(used), tuple(map(Reduction, kinds, renamed)), renamed[-1])
        last = self._length() if candidate.form == FULL else tirx.IntImm("int64", 1)
        names = [op_name(self.block.bindings[index].value) or "" for index in (*candidate.inside, candidate.end)]
        ops = tuple(name.removeprefix("relax.").removeprefix("nn.") for name in names if name not in _VIEWS)
        operands = tuple(self.operands[number] for number in used)
        return RowRegion(candidate.end, candidate.inside, program, operands, [*self.outer, last], ops)

    def _used_reductions(self, result: Term) -> list[int]:
        used: set[int] = set()
        pending = [result]
        while pending:
            for index in operands_of(Expression(pending.pop())):
                if index >= _REDUCED and index - _REDUCED not in used:
                    used.add(index - _REDUCED)
                    pending.append(self.reductions[index - _REDUCED][1])
        return sorted(used)


def _operand(index: int) -> Term:
    return Term("operand", (), (index,))


MIN_COLUMNS = 4
"""Shorter rows would fill a vector with little but padding."""


def form_rows(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    return with_functions(
        mod, {gv: rewrite_function(func, _Former(gv.name_hint).rewrite) for gv, func in relax_functions(mod)}
    )


FormRows = declare_pass("FormRows", form_rows)


class _Former:
    """The regions of one function."""

    def __init__(self, function: str) -> None:
        self.function = function

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        regions: dict[int, RowRegion] = {}
        taken: set[int] = set()
        for index, binding in enumerate(block.bindings):
            op = row_op(binding.value) if index not in taken else None
            if op is None:
                self._missed(binding)
                continue
            region = self._region(block, index, op, taken)
            if region is not None:
                regions[region.end] = region
                taken.update([*region.inside, region.end])
        return with_regions(block, regions, _write)

    def _region(self, block: Block, index: int, op: RowOp, claimed: set[int]) -> RowRegion | None:
        var = block.bindings[index].var
        reason = _why_not(op, var)
        if reason:
            self._remark(var, op.call.op.name, reason)
            return None
        if reason is None:
            return None
        region = RowGrowth(block, index, op, claimed).region()
        if region is None:
            self._remark(var, op.call.op.name, "its operands do not broadcast along the rows")
        elif op.axes > 1 and (is_one(region.shape[-1]) or _is_image(block, op)):
            self._remark(var, op.call.op.name, f"reduces {op.axes} axes, expected one, or a norm of what is no image")
            return None
        return region

    def _missed(self, binding: relax.Binding) -> None:
        if is_wide(binding.value):
            self._remark(
                binding.var, binding.value.op.name, "its axes are not the last ones, or its type has no kernel"
            )

    def _remark(self, var: relax.Var, op: str, reason: str) -> None:
        record_missed(self.function, var.name, op.removeprefix("relax."), reason)


def _why_not(op: RowOp, var: relax.Var) -> str | None:
    """Why no region starts at an op; empty where one may, None where the device makes that clear."""
    if RowsProblem not in answers_of(target_of(var.ty.vdevice)).problems:
        return None
    shape = shape_of(op.call.args[0])
    if shape is None or shape_of(var) is None:
        return "its shape is not known"
    length = 1
    for extent in shape[len(shape) - op.axes :]:
        length = length * extent
    if isinstance(length, tirx.IntImm) and int(length) < MIN_COLUMNS:
        return f"its rows have {int(length)} elements, expected {MIN_COLUMNS} or more"
    if any(isinstance(extent, tirx.IntImm) and int(extent) == 0 for extent in shape):
        return "it has no elements"
    return ""


def _is_image(block: Block, op: RowOp) -> bool:
    """Return whether the rows come from a convolution, which stores them otherwise."""
    value = block.definition(op.call.args[0])
    return op_name(value) == UNSET and Encoding.parse(value.attrs.encoding).moves is not None


def _write(emitter: Emitter, region: RowRegion, var: relax.Var) -> None:
    operands = []
    for number, operand in enumerate(region.operands):
        value = operand.value
        if operand.shape is not None and not same_shape(operand.shape, shape_of(value) or []):
            ty = tensor_type(operand.shape, str(value.ty.dtype), value.ty)
            value = emitter.emit(relax.op.reshape(value, list(operand.shape)), ty, f"{var.name}_x{number}")
        operands.append(value)
    call = rows(*operands, program=region.program, ops=",".join(dict.fromkeys(region.ops)))
    if same_shape(region.shape, shape_of(var) or []):
        emitter.bind(var, relax.Call(call.op, list(call.args), call.attrs, ret_ty=var.ty))
        return
    result = emitter.emit(call, tensor_type(region.shape, str(var.ty.dtype), var.ty), f"{var.name}_rows")
    reshape = relax.op.reshape(result, shape_of(var))
    emitter.bind(var, relax.Call(reshape.op, list(reshape.args), reshape.attrs, ret_ty=var.ty))
