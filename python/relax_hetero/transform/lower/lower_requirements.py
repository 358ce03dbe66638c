"""LowerRequirements: what a function requires of its sizes is checked by one call, before anything is allocated.

Before::

    lv = R.call_tir(cls.exp, (x,), ...)
    _: R.Shape([1]) = R.match_cast(R.hetero.requirement(a == b, message="Add node 'sum': ..."), R.Shape([1]))
    _: R.Shape([1]) = R.match_cast(R.hetero.requirement(a <= 512, message="..."), R.Shape([1]))

After::

    _ = cls.main_sizes(a, b)
    lv = R.call_tir(cls.exp, (x,), ...)

with a PrimFunc of the host that calls ``relax_hetero.refuse_sizes`` with the message, and the names and values of the
sizes, where a condition does not hold. Requirements on sizes of parameters are checked where the function begins,
others directly behind the ``match_cast`` that finds the last of their sizes; those of a branch stay in the branch. A
requirement that is provably met vanishes.

Assumes no dataflow blocks, and memory that is not allocated yet. A second run changes nothing.

Raises
------
BuildError
    When it runs: a function that callers may use requires something that its sizes cannot meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_map

from ...errors import BuildError
from ...op.require import is_requirement
from ..ir.declare import declare_pass
from ..ir.requirements import MOST, Requirement, by_place, in_requirements, sizes_made, sizes_of_parameters
from ..ir.rewriting import copy_module, fresh_global_var, relax_functions, typed, walk_bindings, with_body

REFUSE = "relax_hetero.refuse_sizes"


def lower_requirements(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    taken = {gv.name_hint for gv in functions}
    is_changed = False
    for gv, func in relax_functions(mod):
        if any(is_requirement(binding.value) for binding in walk_bindings(func)):
            writer = _Writer(gv.name_hint, "global_symbol" in func.attrs, taken)
            functions[gv] = without_division_by_zero(writer.function(func))
            functions.update(writer.guards)
            is_changed = True
    return copy_module(mod, functions) if is_changed else mod


LowerRequirements = declare_pass("LowerRequirements", lower_requirements)


def without_division_by_zero(func: relax.Function) -> relax.Function:
    """Sizes that are quotients of sizes divide by 1 at least.

    VMShapeLower computes all sizes where a function begins, before the call that refuses those that cannot be.
    """

    def change(quotient: Any) -> Any:
        if isinstance(quotient.b, tirx.IntImm):
            return quotient
        return type(quotient)(quotient.a, tirx.Max(quotient.b, tirx.IntImm(str(quotient.b.ty), 1)))

    return structural_map(func, [(kind, change) for kind in (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)])


@dataclass
class _Writer:
    """Rewrites a function; `guards` are the PrimFuncs that check."""

    name: str
    is_public: bool
    taken: set[str]
    guards: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)

    def function(self, func: relax.Function, known: Set[tirx.Var] = frozenset(), is_top: bool = True) -> relax.Function:
        return with_body(func, self._sequence(func.body, known | sizes_of_parameters(func), is_top))

    def _sequence(self, expr: relax.Expr, known: Set[tirx.Var], is_top: bool = False) -> relax.Expr:
        if not isinstance(expr, relax.SeqExpr):
            return expr
        inside = known | set(sizes_made(list(walk_bindings(expr, nested=False)), known))
        blocks = [(type(block), *self._without(block, inside)) for block in expr.blocks]
        required = [requirement for _, _, found in blocks for requirement in found]
        bindings = [binding for _, bindings, _ in blocks for binding in bindings]
        places = by_place(required, bindings, known)
        due = {place: self._checks(found, place < 0, is_top) for place, found in places.items()}
        position, new = 0, []
        first = due.get(-1, [])
        if not blocks and first:
            new.append(relax.BindingBlock(first))
        for kind, bindings, _ in blocks:
            written: list[relax.Binding] = [] if new else [*first]
            for binding in bindings:
                written.append(binding)
                written += due.get(position, [])
                position += 1
            new.append(kind(written))
        return typed(relax.SeqExpr(new, expr.body, expr.span), expr.ty)

    def _without(
        self, block: relax.BindingBlock, known: Set[tirx.Var]
    ) -> tuple[list[relax.Binding], list[Requirement]]:
        """The bindings of a block less its requirements, and these."""
        kept: list[relax.Binding] = []
        found: list[Requirement] = []
        required = in_requirements(block.bindings)
        for position, binding in enumerate(block.bindings):
            if is_requirement(binding.value):
                found.append(Requirement.of(binding.value))
            elif position not in required:
                kept.append(self._nested(binding, known))
        return kept, found

    def _nested(self, binding: relax.Binding, known: Set[tirx.Var]) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.If):
            branches = [self._sequence(branch, known) for branch in (value.true_branch, value.false_branch)]
            return relax.VarBinding(binding.var, typed(relax.If(value.cond, *branches, value.span), value.ty))
        if isinstance(value, relax.Function):
            return relax.VarBinding(binding.var, self.function(value, known, is_top=False))
        return binding

    def _checks(self, required: Iterable[Requirement], is_given: bool, is_top: bool) -> list[relax.Binding]:
        """The call that checks what is not proven, if there is such; `is_given` says that callers give the sizes."""
        analyzer = tvm.sym.Analyzer()
        left: dict[tuple[StructuralKey, str], Requirement] = {}
        for requirement in required:
            for symbol in requirement.sizes if is_given else ():
                analyzer.bind(symbol, tvm.ir.Range(0, MOST), allow_override=True)
            if analyzer.can_prove(requirement.condition):
                continue
            if is_top and self.is_public and analyzer.can_prove(tirx.Not(requirement.condition)):
                raise BuildError(f"function {self.name!r}: {requirement.message}")
            left.setdefault((StructuralKey(requirement.condition), requirement.message), requirement)
        return [self._check(list(left.values()))] if left else []

    def _check(self, required: Sequence[Requirement]) -> relax.Binding:
        """A call that checks requirements."""
        sizes = list(dict.fromkeys(symbol for requirement in required for symbol in requirement.sizes))
        guard = guard_function(self.name, required, sizes)
        nothing = tvm.ir.TupleType([])
        ty = relax.FuncType([tvm.ir.PrimType(str(size.ty)) for size in sizes], nothing, False)
        gv = fresh_global_var(f"{self.name}_sizes", ty, self.taken)
        self.guards[gv] = guard.with_attr("global_symbol", gv.name_hint)
        return relax.VarBinding(relax.Var("_", nothing), typed(relax.Call(gv, list(sizes)), nothing))


def guard_function(function: str, required: Iterable[Requirement], sizes: Sequence[tirx.Var]) -> tirx.PrimFunc:
    """A function of sizes that ends in an error at the first requirement that is not met."""
    params = {size: tirx.Var(size.name, str(size.ty)) for size in sizes}
    checks: list[tirx.Stmt] = []
    for requirement in required:
        values: list[Any] = []
        for size in requirement.sizes:
            values += [tvm.ir.StringImm(str(size.name)), params[size]]
        refuse = tirx.call_packed(REFUSE, tvm.ir.StringImm(function), tvm.ir.StringImm(requirement.message), *values)
        condition = structural_map(requirement.condition, (tvm.ir.Var, lambda var: params.get(var, var)))
        checks += _unless(condition, tirx.Evaluate(refuse))
    return tirx.PrimFunc([params[size] for size in sizes], tirx.SeqStmt(checks) if len(checks) != 1 else checks[0])


def _unless(condition: Any, refuse: tirx.Stmt) -> list[tirx.Stmt]:
    """Statements that refuse where a condition does not hold; a division behind an ``and`` is not reached before it."""
    if isinstance(condition, tirx.And):
        return [*_unless(condition.a, refuse), *_unless(condition.b, refuse)]
    if isinstance(condition, tirx.Or):
        inner = _unless(condition.b, refuse)
        body = tirx.SeqStmt(inner) if len(inner) != 1 else inner[0]
        return [tirx.IfThenElse(tirx.Not(condition.a), body, None)]
    return [tirx.IfThenElse(tirx.Not(condition), refuse, None)]
