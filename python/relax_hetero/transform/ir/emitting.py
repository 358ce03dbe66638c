"""Bindings made in the place of one: temporaries of the right kind, types with their device."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax

from .rewriting import typed, with_vdevice


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
