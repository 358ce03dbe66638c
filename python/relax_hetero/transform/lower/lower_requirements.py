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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_map, structural_walk

from ...errors import BuildError
from ...op.require import is_requirement
from ..ir.declare import declare_pass
from ..ir.rewriting import copy_module, fresh_global_var, relax_functions, typed, walk_bindings, with_body

REFUSE = "relax_hetero.refuse_sizes"
_MOST = 2**62


@dataclass(frozen=True)
class Requirement:
    """A condition over sizes, and the text of the error for sizes that do not meet it."""

    condition: Any
    message: str

    @classmethod
    def of(cls, call: relax.Call) -> Requirement:
        """What a `requirement` call says."""
        return cls(call.args[0], str(call.attrs.message))

    @property
    def sizes(self) -> list[tirx.Var]:
        """The symbolic sizes that it is about, in order."""
        return symbols_in(self.condition)


def symbols_in(expr: Any) -> list[tirx.Var]:
    """The symbolic sizes of an expression, or of a type, each once, in order."""
    found: dict[tirx.Var, None] = {}
    structural_walk(expr, (tvm.ir.Var, lambda var: found.setdefault(var)))
    return list(found)


def lower_requirements(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    functions = dict(mod.functions.items())
    taken = {gv.name_hint for gv in functions}
    is_changed = False
    for gv, func in relax_functions(mod):
        if any(is_requirement(binding.value) for binding in walk_bindings(func)):
            writer = _Writer(gv.name_hint, "global_symbol" in func.attrs, taken)
            functions[gv] = writer.function(func)
            functions.update(writer.guards)
            is_changed = True
    return copy_module(mod, functions) if is_changed else mod


LowerRequirements = declare_pass("LowerRequirements", lower_requirements)


@dataclass
class _Writer:
    """Rewrites a function; `guards` are the PrimFuncs that check."""

    name: str
    is_public: bool
    taken: set[str]
    guards: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)

    def function(self, func: relax.Function, is_top: bool = True) -> relax.Function:
        return with_body(func, self._sequence(func.body, is_top))

    def _sequence(self, expr: relax.Expr, is_top: bool = False) -> relax.Expr:
        if not isinstance(expr, relax.SeqExpr):
            return expr
        blocks = [(type(block), *self._without(block)) for block in expr.blocks]
        required = [requirement for _, _, found in blocks for requirement in found]
        due = self._placed(required, [binding for _, bindings, _ in blocks for binding in bindings], is_top)
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

    def _without(self, block: relax.BindingBlock) -> tuple[list[relax.Binding], list[Requirement]]:
        """The bindings of a block less its requirements, and these."""
        kept: list[relax.Binding] = []
        found: list[Requirement] = []
        values: set[relax.Var] = set()
        for binding in block.bindings:
            value = binding.value
            if is_requirement(value):
                found.append(Requirement.of(value))
                values.add(binding.var)
            elif not (isinstance(value, relax.Var) and value in values):
                kept.append(self._nested(binding))
        return kept, found

    def _nested(self, binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if isinstance(value, relax.If):
            branches = [self._sequence(branch) for branch in (value.true_branch, value.false_branch)]
            return relax.VarBinding(binding.var, typed(relax.If(value.cond, *branches, value.span), value.ty))
        if isinstance(value, relax.Function):
            return relax.VarBinding(binding.var, self.function(value, is_top=False))
        return binding

    def _placed(
        self, required: Iterable[Requirement], bindings: Sequence[relax.Binding], is_top: bool
    ) -> dict[int, list[relax.Binding]]:
        """By the position that they follow, -1 for the beginning, the calls that check requirements."""
        defined: dict[tirx.Var, int] = {}
        for position, binding in enumerate(bindings):
            found = symbols_in(binding.ty) if isinstance(binding, relax.MatchCast) else []
            for symbol in [*found, binding.var]:
                defined.setdefault(symbol, position)
        due: dict[int, dict[Requirement, None]] = {}
        analyzers: dict[bool, tvm.sym.Analyzer] = {}
        for requirement in required:
            place = max((defined.get(symbol, -1) for symbol in requirement.sizes), default=-1)
            analyzer = analyzers.setdefault(place < 0, tvm.sym.Analyzer())
            if place < 0:
                for symbol in requirement.sizes:
                    analyzer.bind(symbol, tvm.ir.Range(0, _MOST), allow_override=True)
            if analyzer.can_prove(requirement.condition):
                continue
            if is_top and self.is_public and analyzer.can_prove(tirx.Not(requirement.condition)):
                raise BuildError(f"function {self.name!r}: {requirement.message}")
            due.setdefault(place, {}).setdefault(requirement)
        return {place: [self._check(list(found))] for place, found in due.items()}

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
