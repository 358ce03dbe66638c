"""CheckSizes: what ops need of sizes that only a call knows becomes requirements, which calls check first.

Before::

    def main(x: R.Tensor(("n", "a")), w: R.Tensor(("b", 2))):
        lv = R.matmul(x, w)

After::

    def main(x: R.Tensor(("n", "a")), w: R.Tensor(("b", 2))):
        R.hetero.require(T.Cast("float64", n) * 8.0 <= 2.0**47, "matmul 'lv' of x (n, a) and w (b, 2): ...")
        R.hetero.require(a == b, "matmul 'lv' of x (n, a) and w (b, 2): expected a == b")
        lv = R.matmul(x, w)

Three kinds of conditions are required unless types prove them: what an op needs of the sizes of its operands
(`op_sizes`), that no extent is negative, and that no tensor takes more bytes than a process can address, reckoned in
float64, which does not wrap around. They stand at the beginning of the function, or directly behind the ``match_cast``
that finds the last of their sizes; those of a branch stand in the branch.

Assumes a placed module (RealizeVDevice). A lowered module is returned as it is; a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_map

from ...errors import BuildError
from ...op.require import as_condition, is_requirement, require_binding
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.requirements import (
    Monomial,
    Requirement,
    bind_extents,
    by_place,
    divisors_in,
    factors_of,
    in_requirements,
    monomial,
    sizes_made,
    sizes_of_parameters,
    symbols_in,
    text_of,
)
from ..ir.rewriting import copy_module, op_name, relax_functions, tensor_types, typed, walk_bindings, with_body
from .op_sizes import conditions

MAX_BYTES = 2**47
"""More than a process can address: 128 TiB."""


def check_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        When it runs: a function that callers may use needs sizes that contradict each other, or a tensor of more bytes
        than a process can address. Names op and variable.
    """
    if is_lowered(mod):
        return mod
    functions = dict(mod.functions.items())
    is_changed = False
    for gv, func in relax_functions(mod):
        body = _Function(mod, gv.name_hint, "global_symbol" in func.attrs).body(func)
        if not body.same_as(func.body):
            functions[gv], is_changed = with_body(func, body), True
    return copy_module(mod, functions) if is_changed else mod


CheckSizes = declare_pass("CheckSizes", check_sizes)


@dataclass
class _Scope:
    """Facts that hold where a scope begins: sizes, and requirements."""

    known: Set[tirx.Var]
    required: set[StructuralKey]
    is_top: bool


@dataclass
class _Function:
    """Writes the requirements of one function.

    Attributes
    ----------
    analyzer : tvm.sym.Analyzer
        Knows that extents of tensors which exist are not negative.
    given : dict
        Bytes per element of parameters, by their symbolic extents: these tensors fit, as they exist.
    equal : dict
        Symbolic size -> the expression that it is required to equal.
    """

    mod: tvm.IRModule
    name: str
    is_public: bool
    analyzer: tvm.sym.Analyzer = field(default_factory=tvm.sym.Analyzer)
    given: dict[Monomial, int] = field(default_factory=dict)
    equal: dict[tirx.Var, Any] = field(default_factory=dict)

    def body(self, func: relax.Function) -> relax.Expr:
        for param in func.params:
            bind_extents(self.analyzer, param.ty)
            for ty in tensor_types(param.ty):
                if isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None:
                    number, symbolic = factors_of(ty)
                    key = monomial(symbolic)
                    self.given[key] = max(number, self.given.get(key, 0))
        return self._sequence(func.body, _Scope(sizes_of_parameters(func), set(), is_top=True))

    def _sequence(self, expr: relax.Expr, scope: _Scope) -> relax.Expr:
        if not isinstance(expr, relax.SeqExpr):
            return expr
        bindings = list(walk_bindings(expr, nested=False))
        inside = _Scope(scope.known | set(sizes_made(bindings, scope.known)), set(scope.required), is_top=False)
        for binding in bindings:
            if is_requirement(binding.value):
                inside.required.add(StructuralKey(Requirement.of(binding.value).condition))
        found = list(self._required(bindings, inside, scope.known, scope.is_top))
        due = by_place(found, bindings, scope.known)
        is_changed, position = False, 0
        blocks: list[relax.BindingBlock] = []
        first = due.get(-1, [])
        if first and not expr.blocks:
            blocks.append(relax.BindingBlock(self._written(first, False)))
            first, is_changed = [], True
        for block in expr.blocks:
            is_dataflow = isinstance(block, relax.DataflowBlock)
            written = self._written(first, is_dataflow)
            first = []
            for old in block.bindings:
                binding = self._nested(old, inside)
                written += [binding, *self._written(due.get(position, []), is_dataflow)]
                position += 1
            is_same = len(written) == len(block.bindings) and all(
                new.same_as(old) for new, old in zip(written, block.bindings, strict=True)
            )
            blocks.append(block if is_same else type(block)(written, block.span))
            is_changed = is_changed or not is_same
        return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty) if is_changed else expr

    def _nested(self, binding: relax.Binding, scope: _Scope) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.If):
            then, other = (self._sequence(branch, scope) for branch in (value.true_branch, value.false_branch))
            if not (then.same_as(value.true_branch) and other.same_as(value.false_branch)):
                branches = typed(relax.If(value.cond, then, other, value.span), value.ty)
                return relax.VarBinding(binding.var, branches, binding.span)
        elif isinstance(value, relax.Function):
            bind_extents(self.analyzer, tvm.ir.TupleType([param.ty for param in value.params]))
            inner = _Scope(scope.known | sizes_of_parameters(value), set(scope.required), is_top=False)
            body = self._sequence(value.body, inner)
            if not body.same_as(value.body):
                return relax.VarBinding(binding.var, with_body(value, body), binding.span)
        return binding

    @staticmethod
    def _written(required: Iterable[Requirement], is_dataflow: bool) -> list[relax.Binding]:
        return [require_binding(each.condition, each.message, is_dataflow) for each in required]

    def _required(
        self, bindings: Iterable[relax.Binding], scope: _Scope, outside: Set[tirx.Var], is_top: bool
    ) -> Iterator[Requirement]:
        """The requirements of a scope, each condition once: extents and bytes first, so that the others do not wrap."""
        bounds: dict[Monomial, tuple[int, Requirement]] = {}
        others: list[Requirement] = []
        known = set(outside)
        bindings = list(bindings)
        required = in_requirements(bindings)
        for position, binding in enumerate(bindings):
            if position in required:
                self._note_equal(binding.value)
                continue
            title = _Title(binding)
            if isinstance(binding, relax.MatchCast):
                wanted = list(self._cast(binding, known))
                known.update(symbols_in(binding.ty))
                bind_extents(self.analyzer, binding.ty)
            else:
                wanted = conditions(self.mod, binding.value, binding.var.ty)
            for ty in tensor_types(binding.var.ty):
                if isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None and not _is_given(binding):
                    yield from self._extents(ty, title, scope, is_top)
                    self._bound(ty, title, bounds, is_top)
            for condition in wanted:
                others += self._open(condition, title, scope, is_top)
        for _, requirement in bounds.values():
            key = StructuralKey(requirement.condition)
            if key not in scope.required:
                scope.required.add(key)
                yield requirement
        yield from others

    def _note_equal(self, requirement: relax.Expr) -> None:
        """Note an equality of sizes from here on: conditions that follow from it are not required again."""
        condition = Requirement.of(requirement).condition if is_requirement(requirement) else None
        if isinstance(condition, tirx.EQ) and isinstance(condition.a, tirx.Var):
            self.equal[condition.a] = condition.b

    def _cast(self, binding: relax.MatchCast, known: Set[tirx.Var]) -> Iterator[Any]:
        """A cast between shapes that are both written: TVM replaces the sizes of one by those of the other, unseen."""
        for own, cast in zip(_shapes(binding.value.ty), _shapes(binding.ty), strict=False):
            if own is None or cast is None or len(own) != len(cast):
                continue
            for a, b in zip(own, cast, strict=True):
                if all(symbol in known for symbol in symbols_in(b)) and not (
                    isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm)
                ):
                    yield a == b

    def _open(
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
        if self.equal and self.analyzer.can_prove(
            structural_map(condition, (tirx.Var, lambda size: self.equal.get(size, size)))
        ):
            return
        if isinstance(condition, tirx.IntImm):  # TVM has folded it
            expected = expected or "operands whose sizes fit each other"
        requirement = Requirement(condition, f"{title}: expected {expected or text_of(condition)}")
        if is_top and self.is_public and self.analyzer.can_prove(tirx.Not(condition)):
            raise BuildError(f"function {self.name!r}: {requirement.message}")
        yield requirement

    def _extents(self, ty: relax.TensorType, title: _Title, scope: _Scope, is_top: bool) -> Iterator[Requirement]:
        for extent in ty.shape.values:
            if isinstance(extent, tirx.IntImm) and int(extent) >= 0:
                continue
            for divisor in divisors_in(extent):
                yield from self._open(divisor > 0, title, scope, is_top)
            yield from self._open(extent >= 0, title, scope, is_top, f"{text_of(extent)} >= 0")

    def _bound(
        self, ty: relax.TensorType, title: _Title, bounds: dict[Monomial, tuple[int, Requirement]], is_top: bool
    ) -> None:
        """Note that a tensor has to fit into memory, unless a larger one of these symbolic extents has to."""
        number, symbolic = factors_of(ty)
        if not symbolic and (number <= MAX_BYTES or not (is_top and self.is_public)):
            return
        expected = f"{title}: expected a result of 2**47 bytes at most, {text_of(ty.shape)} of {ty.dtype.dtype}"
        if not symbolic:
            raise BuildError(f"function {self.name!r}: {expected}")
        key = monomial(symbolic)
        if number > self.given.get(key, 0) and (key not in bounds or bounds[key][0] < number):
            size: Any = tirx.FloatImm("float64", float(number))
            for extent in symbolic:
                size = size * _at_least_one(extent, len(symbolic))
            bounds[key] = number, Requirement(size <= tirx.FloatImm("float64", float(MAX_BYTES)), expected)


def _is_given(binding: relax.Binding) -> bool:
    """Return whether a variable names what is there already: an alias, a field, a tuple."""
    return isinstance(binding, relax.MatchCast) or isinstance(
        binding.value, (relax.Var, relax.Tuple, relax.TupleGetItem, relax.Function, relax.If)
    )


def _shapes(ty: tvm.ir.Type) -> list[list[Any] | None]:
    if isinstance(ty, tvm.ir.TupleType):
        return [shape for each in ty.fields for shape in _shapes(each)]
    if isinstance(ty, relax.ShapeType):
        return [None if ty.values is None else list(ty.values)]
    if isinstance(ty, relax.TensorType):
        return [list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None]
    return [None]


class _Title:
    """How messages call a binding: its op, its variable, and the shapes that it works on. Made when it is asked for."""

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
                shapes = [shape for shape in _shapes(arg.ty) if shape is not None]
                if shapes:
                    label = f"{arg.name} " if isinstance(arg, relax.Var) else ""
                    operands.append(label + " ".join(map(text_of, map(relax.ShapeExpr, shapes))))
        elif isinstance(self._binding, relax.MatchCast):
            name = "match_cast"
        of = f" of {' and '.join(operands)}" if operands else ""
        return f"{name or 'value'} {self._binding.var.name!r}{of}"


def _at_least_one(extent: Any, count: int) -> Any:
    """An extent as a float64 factor of `count`: an extent of 0 does not let the others be what no array can have."""
    factor = tirx.Cast("float64", extent)
    return factor if count == 1 else tirx.max(factor, tirx.FloatImm("float64", 1.0))
