"""Variables that have become the same value: one of them stays.

A cancelled or identity ``y = R.hetero.unset_encoding(v)`` makes `y` and `v` one. The name of the program's own variable
stays, which is that of `y`; where both must stay (two results of one value), an alias ``y = v`` does.
"""

from __future__ import annotations

from tvm import relax
from tvm_ffi import structural_map

from .rewriting import map_bindings, walk_bindings, walk_scopes


class Merges:
    """What a pass found out about the variables of one function while it rewrote it."""

    def __init__(self) -> None:
        self._gone: dict[relax.Var, relax.Expr] = {}
        self._wanted: list[relax.Var] = []

    def drop(self, var: relax.Var, value: relax.Expr) -> list[relax.Binding]:
        """`var`, which no function returns, is `value`: its binding goes. Call `resolve` on operands from now on.

        It stays, as an alias, where it is what brings `value` out of a dataflow block.
        """
        value = self.resolve(value)
        if isinstance(value, relax.DataflowVar) and not isinstance(var, relax.DataflowVar):
            return [relax.VarBinding(var, value)]
        self._gone[var] = value
        return []

    def alias(self, var: relax.Var, value: relax.Expr) -> relax.Binding:
        """`var` is `value`; `apply` decides which of the two stays."""
        self._wanted.append(var)
        return relax.VarBinding(var, self.resolve(value))

    def resolve(self, expr: relax.Expr) -> relax.Expr:
        """What an operand is now."""
        return self._gone.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def apply(self, func: relax.Function) -> relax.Function:
        """`func`, rewritten by the pass, with dropped variables replaced and aliases merged."""
        if not self._gone and not self._wanted:
            return func
        replaced = dict(self._gone)

        def now(expr: relax.Expr) -> relax.Expr:
            while isinstance(expr, relax.Var) and expr in replaced:
                expr = replaced[expr]
            return expr

        wanted = set(self._wanted)
        scopes = _scopes(func)
        kept: set[relax.Var] = set()
        for binding in walk_bindings(func):
            var, value = binding.var, now(binding.value)
            if var not in wanted:
                continue
            inner = isinstance(var, relax.DataflowVar)
            is_local = scopes.get(value) == scopes[var] and value not in kept
            if is_local and (isinstance(value, relax.DataflowVar) or not inner):
                replaced[value] = var
                kept.add(var)
            elif inner or not isinstance(value, relax.DataflowVar):
                replaced[var] = value
        func = structural_map(func, (relax.Var, now))
        return map_bindings(func, lambda binding: [] if _is_self(binding) else binding)


def _is_self(binding: relax.Binding) -> bool:
    return isinstance(binding.value, relax.Var) and binding.value.same_as(binding.var)


def _scopes(func: relax.Function) -> dict[relax.Var, int]:
    """The number of the branch that each bound variable is bound in; parameters have none."""
    return {binding.var: number for number, scope in enumerate(walk_scopes(func)) for binding in scope}
