"""Rewriting bindings of encoded values: `Replacement` for one, `Merges` of equal variables, errors that name a binding.

A cancelled or identity ``y = R.hetero.unset_encoding(v)`` makes `y` and `v` one. The name of the program's own variable
stays, which is that of `y`; where both must stay (two results of one value), an alias ``y = v`` does.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax
from tvm_ffi import structural_map

from ...errors import EncodingError
from ..ir.rewriting import BindingMap, map_bindings, typed, walk_bindings, walk_scopes, with_vdevice


class Replacement:
    """Collects the bindings that replace the binding of `var`.

    Parameters
    ----------
    var : relax.Var
        Whose name temporaries take, with what they are for.
    is_local : bool
        Whether the binding is in a dataflow block, where temporaries are DataflowVars.
    """

    def __init__(self, var: relax.Var, is_local: bool) -> None:
        self.var = var
        self.kind = relax.DataflowVar if is_local else relax.Var
        self.bindings: list[relax.Binding] = []

    def bind(self, value: relax.Expr, ty: relax.TensorType, what: str) -> relax.Var:
        """A temporary for `value`."""
        var = self.kind(f"{self.var.name}_{what}", ty)
        self.bindings.append(relax.VarBinding(var, typed(value, ty)))
        return var

    def stock(self, call: relax.Call, vdevice: relax.VDevice | None, what: str) -> relax.Var:
        """A temporary for a call of a stock op; its type is inferred, on `vdevice`."""
        return self.bind(call, inferred(call, vdevice), what)

    def finish(self, value: relax.Expr) -> list[relax.Binding]:
        """All bindings, the last of them of `var` itself to `value`; a last temporary takes its place."""
        last = self.bindings[-1] if self.bindings else None
        if last is not None and last.var.same_as(value):
            call = last.value
            call = relax.Call(call.op, call.args, call.attrs, call.ty_args, call.span, ret_ty=self.var.ty)
            self.bindings[-1] = relax.VarBinding(self.var, call)
        else:
            self.bindings.append(relax.VarBinding(self.var, value))
        return self.bindings


def inferred(call: relax.Call, vdevice: relax.VDevice | None) -> relax.TensorType:
    """The type of a stock op's result on a device: stock inference refuses or loses devices, so it sees none."""
    args = [_placeholder(arg) for arg in call.args]
    plain = relax.Call(call.op, args, call.attrs, call.ty_args)
    return with_vdevice(relax.BlockBuilder().normalize(plain).ty, vdevice)


def _placeholder(arg: relax.Expr) -> relax.Expr:
    if isinstance(arg.ty, relax.TensorType) and arg.ty.vdevice is not None:
        return relax.Var("operand", with_vdevice(arg.ty, None))
    return arg


def dataflow_variables(func: relax.Function) -> set[relax.Var]:
    """Variables bound in the function's own dataflow blocks, those that leave them included."""
    found: set[relax.Var] = set()
    blocks: Iterable[relax.BindingBlock] = func.body.blocks if isinstance(func.body, relax.SeqExpr) else ()
    for block in blocks:
        if isinstance(block, relax.DataflowBlock):
            found.update(binding.var for binding in block.bindings)
    return found


class Merges:
    """Replacements of variables of one function, which a pass notes while it rewrites it."""

    def __init__(self) -> None:
        self._removed: dict[relax.Var, relax.Expr] = {}
        self._replacements: list[relax.Var] = []

    def drop(self, var: relax.Var, value: relax.Expr) -> list[relax.Binding]:
        """`var`, which no function returns, is `value`: its binding goes. Call `resolve` on operands from now on.

        It stays, as an alias, where it is what brings `value` out of a dataflow block.
        """
        value = self.resolve(value)
        if isinstance(value, relax.DataflowVar) and not isinstance(var, relax.DataflowVar):
            return [relax.VarBinding(var, value)]
        self._removed[var] = value
        return []

    def alias(self, var: relax.Var, value: relax.Expr) -> relax.Binding:
        """`var` is `value`; `apply` decides which of the two stays."""
        self._replacements.append(var)
        return relax.VarBinding(var, self.resolve(value))

    def resolve(self, expr: relax.Expr) -> relax.Expr:
        """Present form of an operand."""
        return self._removed.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def apply(self, func: relax.Function) -> relax.Function:
        """`func`, rewritten by the pass, with dropped variables replaced and aliases merged."""
        if not self._removed and not self._replacements:
            return func
        replaced = dict(self._removed)

        def now(expr: relax.Expr) -> relax.Expr:
            while isinstance(expr, relax.Var) and expr in replaced:
                expr = replaced[expr]
            return expr

        wanted = set(self._replacements)
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


def error_context(change: BindingMap, function: str) -> BindingMap:
    """`change`, whose EncodingErrors name the binding's variable and the function where they do not yet."""

    def named(binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        try:
            return change(binding)
        except EncodingError as error:
            where = f"variable {binding.var.name!r} in function {function!r}"
            if where in str(error):
                raise
            raise EncodingError(f"{where}: {error}") from error

    return named
