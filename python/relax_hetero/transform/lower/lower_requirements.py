"""LowerRequirements: one call checks a function's requirements on sizes, before anything is allocated.

Before::

    lv = R.call_tir(cls.exp, (x,), ...)
    _: R.Shape([1]) = R.match_cast(R.hetero.requirement(a == b, message="Add node 'sum': ..."), R.Shape([1]))
    _: R.Shape([1]) = R.match_cast(R.hetero.requirement(a <= 512, message="..."), R.Shape([1]))

After::

    _ = cls.main_sizes(a, b)
    lv = R.call_tir(cls.exp, (x,), ...)

with a PrimFunc of the host that calls ``relax_hetero.refuse_sizes`` if a condition does not hold, with the message,
the names and values of the sizes, and the dimensions of arguments that they are. Requirements on sizes of
parameters are checked where the function begins, others directly after the ``match_cast`` that defines the last of
their sizes; those of a branch stay in the branch. A requirement that is provably met vanishes.

The same call compares results and memory of command buffers of more than a gigabyte with the memory of the host, by
``relax_hetero.refuse_bytes``; on a GPU the driver refuses allocations that do not fit.

Assumes no dataflow blocks, and memory that is not allocated yet. A second run changes nothing.

Raises
------
BuildError
    When it runs: a public function has a requirement that its sizes cannot meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_map

from ...errors import BuildError
from ...op.require import is_requirement
from ...target.vdevice import is_cpu
from ...tir.core.walks import replaced
from ..ir.declare import declare_pass
from ..ir.module_attrs import DIVISORS_CHECKED
from ..ir.requirements import (
    DIVISIONS,
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
    text_of,
)
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    map_nested,
    op_name,
    relax_functions,
    tensor_types,
    typed,
    walk_bindings,
    with_body,
)

REFUSE, REFUSE_BYTES = "relax_hetero.refuse_sizes", "relax_hetero.refuse_bytes"
MIN_CHECKED_BYTES = 2**30
"""Smaller allocations are not compared with the memory of the host: TVM's own error is as good for them."""
_CALLS = ("relax.call_tir", "relax.call_dps_packed")


@dataclass(frozen=True, eq=False)
class Allocation(Requirement):
    """Bytes, as float64, that must fit into the memory of the host unless the condition (they are few) holds."""

    nbytes: Any


def lower_requirements(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    used_names = {gv.name_hint for gv in functions}
    is_changed = False
    for gv, func in relax_functions(mod):
        bindings = list(walk_bindings(func))
        if any(is_requirement(binding.value) for binding in bindings) or any(map(_may_be_large, bindings)):
            writer = _Writer(gv.name_hint, "global_symbol" in func.attrs, used_names)
            functions[gv] = without_division_by_zero(writer.function(func))
            functions.update(writer.guards)
            is_changed = True
    return copy_module(mod, functions) if is_changed else mod


LowerRequirements = declare_pass("LowerRequirements", lower_requirements)


def without_division_by_zero(func: relax.Function) -> relax.Function:
    """Replace divisors of sizes by ``max(divisor, 1)``.

    VMShapeLower computes all sizes where a function begins, before the call that checks them.
    """

    def change(quotient: Any) -> Any:
        if isinstance(quotient.b, tirx.IntImm):
            return quotient
        return type(quotient)(quotient.a, tirx.Max(quotient.b, tirx.IntImm(str(quotient.b.ty), 1)))

    return structural_map(func, [(kind, change) for kind in DIVISIONS])


@dataclass
class _Writer:
    """Rewrites a function."""

    name: str
    is_public: bool
    used_names: set[str]
    guards: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)  # the PrimFuncs that check sizes
    # Knows that extents of argument tensors are not negative; numbers of a shape may be.
    analyzer: tvm.sym.Analyzer = field(default_factory=tvm.sym.Analyzer)
    # Symbolic size -> text of the dimension of an argument that defines it.
    origins: dict[tirx.Var, str] = field(default_factory=dict)

    def function(self, func: relax.Function, known: Set[tirx.Var] = frozenset(), is_top: bool = True) -> relax.Function:
        for param in func.params:
            bind_extents(self.analyzer, param.ty)
            if is_top and self.is_public and isinstance(getattr(param.ty, "shape", None), relax.ShapeExpr):
                for axis, extent in enumerate(param.ty.shape.values):
                    if isinstance(extent, tirx.Var):
                        self.origins.setdefault(extent, f"dimension {axis} of argument {param.name!r}")
        return with_body(func, self._sequence(func.body, known | sizes_of_parameters(func), is_top))

    def _sequence(self, expr: relax.Expr, known: Set[tirx.Var], is_top: bool = False) -> relax.Expr:
        if not isinstance(expr, relax.SeqExpr):
            return expr
        inside = known | set(defined_sizes(list(walk_bindings(expr, nested=False)), known))
        blocks = [(type(block), *self._split(block, inside)) for block in expr.blocks]
        bindings = [binding for _, bindings, _ in blocks for binding in bindings]
        required = [requirement for _, _, requirements in blocks for requirement in requirements]
        required += allocations(bindings)
        checks = {
            position: self._checks(requirements, is_top)
            for position, requirements in by_position(required, bindings, known).items()
        }
        position, new = 0, []
        first = checks.get(-1, [])
        if not blocks and first:
            new.append(relax.BindingBlock(first))
        for kind, bindings, _ in blocks:
            block_bindings: list[relax.Binding] = [] if new else [*first]
            for binding in bindings:
                block_bindings += [binding, *checks.get(position, [])]
                position += 1
            new.append(kind(block_bindings))
        return typed(relax.SeqExpr(new, expr.body, expr.span), expr.ty)

    def _split(self, block: relax.BindingBlock, known: Set[tirx.Var]) -> tuple[list[relax.Binding], list[Requirement]]:
        """The bindings of a block without its requirements, and the requirements."""
        bindings: list[relax.Binding] = []
        requirements: list[Requirement] = []
        positions = requirement_positions(block.bindings)
        for position, binding in enumerate(block.bindings):
            if is_requirement(binding.value):
                requirements.append(Requirement.of(binding.value))
            elif position not in positions:
                bindings.append(self._nested(binding, known))
        return bindings, requirements

    def _nested(self, binding: relax.Binding, known: Set[tirx.Var]) -> relax.Binding:
        if isinstance(binding.value, relax.Function):
            return relax.VarBinding(binding.var, self.function(binding.value, known, is_top=False))
        return map_nested(binding, lambda branch: self._sequence(branch, known))

    def _checks(self, required: Iterable[Requirement], is_top: bool) -> list[relax.Binding]:
        """The call that checks requirements which are not proven, if there are any."""
        analyzer = self.analyzer
        unproven: dict[tuple[StructuralKey, str], Requirement] = {}
        for requirement in required:
            is_allocation = isinstance(requirement, Allocation)
            if not is_allocation and analyzer.can_prove(requirement.condition):
                continue
            if not is_allocation and is_top and self.is_public and analyzer.can_prove(tirx.Not(requirement.condition)):
                raise BuildError(f"function {self.name!r}: {requirement.message}")
            unproven.setdefault((StructuralKey(requirement.condition), requirement.message), requirement)
        return [self._check(list(unproven.values()))] if unproven else []

    def _check(self, required: Sequence[Requirement]) -> relax.Binding:
        """A call that checks requirements."""
        sizes = list(dict.fromkeys(symbol for requirement in required for symbol in requirement.sizes))
        guard = guard_function(self.name, required, sizes, self.origins)
        empty = tvm.ir.TupleType([])
        ty = relax.FuncType([tvm.ir.PrimType(str(size.ty)) for size in sizes], empty, False)
        gv = fresh_global_var(f"{self.name}_sizes", ty, self.used_names)
        # The guard checks its own divisors (`guard_function`).
        self.guards[gv] = guard.with_attr({"global_symbol": gv.name_hint, DIVISORS_CHECKED: True})
        return relax.VarBinding(relax.Var("_", empty), typed(relax.Call(gv, list(sizes)), empty))


def _may_be_large(binding: relax.Binding) -> bool:
    if op_name(binding.value) not in _CALLS:
        return False
    for ty in _host_allocations(binding):
        number, symbolic = factors_of(ty)
        if symbolic or number > MIN_CHECKED_BYTES:
            return True
    return False


def _host_allocations(binding: relax.Binding) -> list[relax.TensorType]:
    """The results of known shapes that a call allocates in the memory of the host."""
    return [
        ty
        for out in binding.value.ty_args
        for ty in tensor_types(out)
        if isinstance(ty.shape, relax.ShapeExpr) and ty.dtype is not None and (ty.vdevice is None or is_cpu(ty.vdevice))
    ]


def allocations(bindings: Iterable[relax.Binding]) -> list[Allocation]:
    """Allocations of calls that may be large; of those with the same symbolic factors only the largest."""
    largest: dict[Monomial, tuple[int, Allocation]] = {}
    for binding in bindings:
        for ty in _host_allocations(binding) if op_name(binding.value) in _CALLS else ():
            number, symbolic = factors_of(ty)
            key = monomial(symbolic)
            if number <= largest[key][0] if key in largest else not symbolic and number <= MIN_CHECKED_BYTES:
                continue
            nbytes: Any = prod(map(as_float, symbolic), start=tirx.FloatImm("float64", float(number)))
            description = f"'{binding.var.name}' of {text_of(ty.shape)} {ty.dtype.dtype}"
            largest[key] = (
                number,
                Allocation(nbytes <= tirx.FloatImm("float64", float(MIN_CHECKED_BYTES)), description, nbytes),
            )
    return [allocation for _, allocation in largest.values()]


def _is_min_or_max(expr: Any) -> bool:
    """Return whether an expression consists of minima and maxima of sizes and numbers."""
    if isinstance(expr, (tirx.Min, tirx.Max)):
        return _is_min_or_max(expr.a) and _is_min_or_max(expr.b)
    return isinstance(expr, (tirx.Var, tirx.IntImm))


def as_float(expr: Any) -> Any:
    """An expression over sizes in float64, which does not wrap around."""
    if _is_min_or_max(expr):  # TVM's rules for these would make integers of float64
        return tirx.Cast("float64", expr)
    for kind in (tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max):
        if isinstance(expr, kind):
            return kind(as_float(expr.a), as_float(expr.b))
    if isinstance(expr, tirx.FloorDiv) and isinstance(expr.b, tirx.IntImm):
        return tirx.Div(as_float(expr.a), as_float(expr.b))
    return tirx.Cast("float64", expr)


def guard_function(
    function: str, required: Iterable[Requirement], sizes: Sequence[tirx.Var], origins: Mapping[tirx.Var, str]
) -> tirx.PrimFunc:
    """A function of sizes that raises an error for the first requirement that is not met."""
    params = {size: tirx.Var(size.name, str(size.ty)) for size in sizes}
    checks: list[tirx.Stmt] = []
    for requirement in required:
        values: list[Any] = []
        for size in requirement.sizes:
            origin = f" is {origins[size]}" if size in origins else ""
            values += [tvm.ir.StringImm(f"{size.name}{origin}"), params[size]]
        texts: list[Any] = [tvm.ir.StringImm(function), tvm.ir.StringImm(requirement.message)]
        if isinstance(requirement, Allocation):
            refuse = tirx.call_packed(REFUSE_BYTES, *texts, replaced(requirement.nbytes, params), *values)
        else:
            refuse = tirx.call_packed(REFUSE, *texts, *values)
        checks += _unless(replaced(requirement.condition, params), tirx.Evaluate(refuse))
    return tirx.PrimFunc([params[size] for size in sizes], tirx.SeqStmt(checks) if len(checks) != 1 else checks[0])


def _unless(condition: Any, refuse: tirx.Stmt) -> list[tirx.Stmt]:
    """Statements that refuse if a condition does not hold; operands of ``and`` and ``or`` are evaluated lazily."""
    if isinstance(condition, tirx.And):
        return [*_unless(condition.a, refuse), *_unless(condition.b, refuse)]
    if isinstance(condition, tirx.Or):
        inner = _unless(condition.b, refuse)
        body = tirx.SeqStmt(inner) if len(inner) != 1 else inner[0]
        return [tirx.IfThenElse(tirx.Not(condition.a), body, None)]
    check = tirx.IfThenElse(tirx.Not(condition), refuse, None)
    for divisor in divisors_in(condition):
        # The check is the else branch: TVM hoists common subexpressions before the statements that use them.
        check = tirx.IfThenElse(tirx.EQ(divisor, tirx.const(0, str(divisor.ty))), refuse, check)
    return [check]
