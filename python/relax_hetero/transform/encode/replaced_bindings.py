"""Helpers for rewriting bindings of encoded values: `Replacement` for one, `Merges` of equal variables, error context.

A cancelled or identity ``y = R.hetero.unset_encoding(v)`` merges `y` and `v`. The merged variable is named after `y`,
the program's own variable; where both must stay (two results of one value), an alias ``y = v`` remains.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm_ffi import structural_map

from ...errors import EncodingError
from ..ir.rewriting import BindingMap, map_bindings, typed, walk_bindings, walk_scopes, with_args, with_vdevice


class Replacement:
    """Collector of the bindings that replace the binding of `var`.

    `var`: variable whose name, with a suffix, temporaries get. `is_local`: whether the binding is in a dataflow block,
    where temporaries are DataflowVars.
    """

    def __init__(self, var: relax.Var, is_local: bool) -> None:
        self.var = var
        self.kind = relax.DataflowVar if is_local else relax.Var
        self.bindings: list[relax.Binding] = []

    def bind(self, value: relax.Expr, ty: relax.TensorType, suffix: str) -> relax.Var:
        """Bind `value` to a temporary."""
        var = self.kind(f"{self.var.name}_{suffix}", ty)
        self.bindings.append(relax.VarBinding(var, typed(value, ty)))
        return var

    def stock(self, call: relax.Call, vdevice: relax.VDevice | None, suffix: str) -> relax.Var:
        """Bind a call of a stock op to a temporary, of its inferred type on `vdevice`."""
        return self.bind(call, inferred(call, vdevice), suffix)

    def finish(self, value: relax.Expr) -> list[relax.Binding]:
        """All bindings, with `var` bound to `value` at the end; `var` replaces a last temporary."""
        last = self.bindings[-1] if self.bindings else None
        if last is not None and last.var.same_as(value):
            call = typed(with_args(last.value, last.value.args), self.var.ty)
            self.bindings[-1] = relax.VarBinding(self.var, call)
        else:
            self.bindings.append(relax.VarBinding(self.var, value))
        return self.bindings


def inferred(call: relax.Call, vdevice: relax.VDevice | None) -> relax.TensorType:
    """The type of a stock op's result on a device; TVM's inference rejects or loses devices and runs without."""
    plain = with_args(call, [_placeholder(arg) for arg in call.args])
    return with_vdevice(relax.BlockBuilder().normalize(plain).ty, vdevice)


def _placeholder(arg: relax.Expr) -> relax.Expr:
    if isinstance(arg.ty, relax.TensorType) and arg.ty.vdevice is not None:
        return relax.Var("operand", with_vdevice(arg.ty, None))
    return arg


def dataflow_variables(func: relax.Function) -> set[relax.Var]:
    """Variables bound in the function's own dataflow blocks, including the blocks' outputs."""
    variables: set[relax.Var] = set()
    blocks: Iterable[relax.BindingBlock] = func.body.blocks if isinstance(func.body, relax.SeqExpr) else ()
    for block in blocks:
        if isinstance(block, relax.DataflowBlock):
            variables.update(binding.var for binding in block.bindings)
    return variables


class Merges:
    """Replacements of variables of one function, collected while a pass rewrites it."""

    def __init__(self) -> None:
        self._removed: dict[relax.Var, relax.Expr] = {}
        self._replacements: list[relax.Var] = []

    def drop(self, var: relax.Var, value: relax.Expr) -> list[relax.Binding]:
        """Replace `var`, which no function returns, by `value` and drop its binding; `resolve` later operands.

        The binding stays, as an alias, if it is the output of a dataflow block for `value`.
        """
        value = self.resolve(value)
        if isinstance(value, relax.DataflowVar) and not isinstance(var, relax.DataflowVar):
            return [relax.VarBinding(var, value)]
        self._removed[var] = value
        return []

    def alias(self, var: relax.Var, value: relax.Expr) -> relax.Binding:
        """Merge `var` and `value`; `apply` decides which of the two stays."""
        self._replacements.append(var)
        return relax.VarBinding(var, self.resolve(value))

    def resolve(self, expr: relax.Expr) -> relax.Expr:
        """The current replacement of an operand."""
        return self._removed.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def apply(self, func: relax.Function) -> relax.Function:
        """The function, as rewritten by the pass, with dropped variables replaced and aliases merged."""
        if not self._removed and not self._replacements:
            return func
        replaced = dict(self._removed)

        def latest(expr: relax.Expr) -> relax.Expr:
            while isinstance(expr, relax.Var) and expr in replaced:
                expr = replaced[expr]
            return expr

        aliases = set(self._replacements)
        scopes = _scopes(func)
        renamed: set[relax.Var] = set()
        for binding in walk_bindings(func):
            var, value = binding.var, latest(binding.value)
            if var not in aliases:
                continue
            is_inner = isinstance(var, relax.DataflowVar)
            is_local = scopes.get(value) == scopes[var] and value not in renamed
            if is_local and (isinstance(value, relax.DataflowVar) or not is_inner):
                replaced[value] = var
                renamed.add(var)
            elif is_inner or not isinstance(value, relax.DataflowVar):
                replaced[var] = value
        func = structural_map(func, (relax.Var, latest))
        return map_bindings(func, lambda binding: [] if _is_self(binding) else binding)


def _is_self(binding: relax.Binding) -> bool:
    return isinstance(binding.value, relax.Var) and binding.value.same_as(binding.var)


def _scopes(func: relax.Function) -> dict[relax.Var, int]:
    """The index of the branch that binds each variable; parameters are missing."""
    return {binding.var: index for index, scope in enumerate(walk_scopes(func)) for binding in scope}


def error_context(change: BindingMap, function: str) -> BindingMap:
    """Wrap `change` so that its EncodingErrors name the binding's variable and the function."""

    def named(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        try:
            return change(binding)
        except EncodingError as error:
            subject = f"variable {binding.var.name!r} in function {function!r}"
            if subject in str(error):
                raise
            raise EncodingError(f"{subject}: {error}") from error

    return named
