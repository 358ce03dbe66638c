"""KeepUnreadCalls: keep calls of callbacks and packed functions even if their results are unused.

Before::

    @R.function
    def main(x: R.Tensor((4,), "float32"), callback: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]))):
        _ = callback(x)
        y = R.call_pure_packed("log", x, ty_args=R.Tensor((4,), "float32"))
        return x

After::

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), callback: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]), False)):
        _ = callback(x)
        y = R.call_packed("log", x, ty_args=R.Tensor((4,), "float32"))
        return x

Calls of parameters, of packed functions and of closures may be declared pure, and then passes drop those whose
results are unread. TVM's own pipeline does not drop them, and most have side effects. They become impure, and so do
functions that make such calls; in dataflow they get blocks of their own. Calls whose results are read stay pure, so
that steps on several devices overlap.

Assumes A-normal form. A module without such calls is returned as it is; a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import tvm
from tvm import relax

from ...tir.core.walks import replaced
from .blocks import used_vars, with_split_blocks
from .callee_devices import with_callee_devices
from .declare import declare_pass
from .module_attrs import is_lowered
from .op_names import is_own_function
from .rewriting import copy_module, effect, map_bindings, op_name, relax_functions, walk_bindings, with_body

_PURE_PACKED_OPS = ("relax.call_pure_packed", "relax.call_inplace_packed")
_PURE_CLOSURE = "relax.invoke_pure_closure"
_CALL_DPS_PACKED = "relax.call_dps_packed"
KEEP = "relax_hetero.keep"


def keep_unread_calls(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if is_lowered(mod):
        return mod
    calls = _UnreadCalls(mod)
    if not calls.opaque:
        return mod
    calls.find()
    if not (calls.rewritten or calls.variables or any(mod[name].is_pure for name in calls.functions)):
        return mod
    functions = {**dict(mod.functions.items()), **{gv: calls.write(gv, func) for gv, func in relax_functions(mod)}}
    return with_callee_devices(copy_module(mod, functions))  # their types say whether they are pure


KeepUnreadCalls = declare_pass("KeepUnreadCalls", keep_unread_calls)


class _UnreadCalls:
    """The calls, variables and functions of a module that have to become impure."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        # Functions that are impure, or call code outside of the module, directly or indirectly.
        self.opaque = {gv.name_hint for gv, func in relax_functions(mod) if not func.is_pure}
        self.rewritten: set[relax.Var] = set()  # results of calls of packed functions and closures
        # The subset of `rewritten` whose packed function writes into memory that the caller passes.
        self.into_results: set[relax.Var] = set()
        self.variables: set[relax.Var] = set()  # parameters and other variables of function type
        self.functions: set[str] = set()  # names of functions of the module
        # Declared pure, whatever they call.
        self._forced = {gv.name_hint for gv, func in relax_functions(mod) if func.attrs.get("relax.force_pure")}
        self._values: dict[relax.Var, relax.Expr] = {}
        self._bindings = {gv.name_hint: list(walk_bindings(func)) for gv, func in relax_functions(mod)}
        for bindings in self._bindings.values():
            for binding in bindings:
                if isinstance(binding.value, (relax.Var, relax.Function)) or _closure_of(binding.value) is not None:
                    self._values[binding.var] = binding.value
        self._add_callers(self.opaque, self._is_opaque)

    def find(self) -> None:
        """Collect the calls, variables and functions up to a fixpoint."""
        count = -1
        while count != len(self.rewritten) + len(self.variables) + len(self.functions):
            count = len(self.rewritten) + len(self.variables) + len(self.functions)
            for gv, func in relax_functions(self.mod):
                if gv.name_hint in self.opaque:
                    self._sequence(func.body, set())
            self._add_callers(self.functions, self._has_effect, self._forced)

    def _add_callers(self, names: set[str], has: Callable[[relax.Binding], bool], but: Container[str] = ()) -> None:
        """Add the functions with a binding that meets `has`, which may read `names`, up to a fixpoint."""
        count = -1
        while count != len(names):
            count = len(names)
            names.update(n for n, bindings in self._bindings.items() if n not in but and any(map(has, bindings)))

    def _aliased(self, var: relax.Var) -> relax.Var:
        """The variable that a variable is an alias of."""
        while isinstance(self._values.get(var), relax.Var):
            var = self._values[var]
        return var

    def _is_opaque(self, binding: relax.Binding) -> bool:
        """Return whether a value comes from code outside of the module, by a call that is declared pure."""
        value = binding.value
        if isinstance(value, relax.If):
            return any(map(self._is_opaque, _inside(value)))
        if not isinstance(value, relax.Call):
            return False
        if isinstance(value.op, tvm.ir.GlobalVar):
            return value.op.name_hint in self.opaque
        if isinstance(value.op, relax.Var):
            local = self._values.get(self._aliased(value.op))
            return not isinstance(local, relax.Function) or any(map(self._is_opaque, walk_bindings(local.body)))
        if op_name(value) == _PURE_CLOSURE:
            callee = _closure_of(self._values.get(self._aliased(value.args[0])))
            return callee is None or callee in self.opaque
        callee = value.args[0] if op_name(value) in (*_PURE_PACKED_OPS, _CALL_DPS_PACKED) else None
        return isinstance(callee, relax.ExternFunc) and not is_own_function(callee.global_symbol)

    def _has_effect(self, binding: relax.Binding) -> bool:
        """Return whether a value is impure, or becomes so."""
        value = binding.value
        if isinstance(value, relax.If):
            return any(map(self._has_effect, _inside(value)))
        if not isinstance(value, relax.Call) or binding.var in self.rewritten:
            return isinstance(value, relax.Call)
        if isinstance(value.op, tvm.ir.GlobalVar):
            func = self.mod.functions.get(value.op)
            return value.op.name_hint in self.functions or (isinstance(func, relax.Function) and not func.is_pure)
        if isinstance(value.op, relax.Var):
            return self._aliased(value.op) in self.variables or not getattr(value.op.ty, "purity", True)
        purity = value.op.get_attr("FPurity") if isinstance(value.op, tvm.ir.Op) else False
        return purity is not None and not purity

    def _sequence(self, expr: relax.Expr, used: set[relax.Var]) -> None:
        """Find unread calls backwards from a result; `used` are the variables that are used after it."""
        if not isinstance(expr, relax.SeqExpr):
            used.update(used_vars(expr))
            return
        used.update(used_vars(expr.body))
        for block in reversed(expr.blocks):
            for binding in reversed(block.bindings):
                self._binding(binding, used)

    def _binding(self, binding: relax.Binding, used: set[relax.Var]) -> None:
        value = binding.value
        if binding.var not in used and not self._has_effect(binding):
            if not self._is_opaque(binding):
                return
            self._keep(binding)
        if isinstance(value, relax.If):
            used.update(used_vars(value.cond))
            for branch in (value.true_branch, value.false_branch):
                self._sequence(branch, used)
        elif isinstance(value, relax.Function):
            self._sequence(value.body, used)
            if any(map(self._has_effect, walk_bindings(value.body))):
                self.variables.add(binding.var)
        else:
            self._mark_parameters(value)
            used.update(used_vars(value))

    def _keep(self, binding: relax.Binding) -> None:
        """Mark a call, or all calls of a branch, as impure."""
        value = binding.value
        if isinstance(value, relax.If):
            for inner in filter(self._is_opaque, _inside(value)):
                self._keep(inner)
        elif isinstance(value.op, tvm.ir.GlobalVar):
            self.functions.add(value.op.name_hint)
        elif isinstance(value.op, relax.Var):
            self.variables.add(self._aliased(value.op))
        else:
            self.rewritten.add(binding.var)
            if op_name(value) == _CALL_DPS_PACKED:
                self.into_results.add(binding.var)

    def _mark_parameters(self, value: relax.Expr) -> None:
        """Mark parameters of a callee as impure if they get impure functions."""
        callee = self.mod.functions.get(value.op) if isinstance(value, relax.Call) else None
        if isinstance(callee, relax.Function):
            for arg, param in zip(value.args, callee.params, strict=False):
                if isinstance(arg, relax.Var) and self._aliased(arg) in self.variables:
                    self.variables.add(param)

    def write(self, gv: tvm.ir.GlobalVar, func: relax.Function) -> relax.Function:
        """Rewrite a function with impure calls."""
        impure = {var for var in _variables(func) if self._aliased(var) in self.variables}
        if not (impure or gv.name_hint in self.functions or any(map(self._has_effect, self._bindings[gv.name_hint]))):
            return func
        func = map_bindings(func, self._written)
        cut = {binding.var for binding in walk_bindings(func) if self._has_effect(binding)}
        func = with_body(func, with_split_blocks(func.body, cut - self.into_results))
        new = {var: type(var)(var.name, _impure(var.ty)) for var in impure}
        func = replaced(func, new)
        is_pure = func.is_pure and gv.name_hint not in self.functions
        return relax.Function(list(func.params), func.body, func.ret_ty, is_pure, func.attrs, func.span)

    def _written(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        var, value = binding.var, binding.value
        if var in self.into_results:  # such calls have no impure form
            return [binding, effect(KEEP, [var])]
        if isinstance(value, relax.Function) and var in self.variables:
            value = relax.Function(list(value.params), value.body, value.ret_ty, False, value.attrs, value.span)
        elif var in self.rewritten:
            is_closure = op_name(value) == _PURE_CLOSURE
            op = tvm.ir.Op.get("relax.invoke_closure") if is_closure else value.args[0]
            args = value.args if is_closure else value.args[1:]
            value = relax.Call(op, list(args), None, value.ty_args, value.span, ret_ty=value.ty)
        else:
            return binding
        return relax.VarBinding(var, value, binding.span)


def _inside(value: relax.If) -> list[relax.Binding]:
    return [binding for branch in (value.true_branch, value.false_branch) for binding in walk_bindings(branch, False)]


def _closure_of(value: relax.Expr | None) -> str | None:
    """Name of the module's function that a closure wraps; None for any other value."""
    if value is None or op_name(value) != "relax.make_closure" or not isinstance(value.args[0], tvm.ir.GlobalVar):
        return None
    return str(value.args[0].name_hint)


def _variables(func: relax.Function) -> list[relax.Var]:
    """The parameters and variables of function type of a function and its local functions."""
    bindings = list(walk_bindings(func))
    locals_ = [
        param for binding in bindings if isinstance(binding.value, relax.Function) for param in binding.value.params
    ]
    variables = [*func.params, *locals_, *(binding.var for binding in bindings)]
    return [var for var in variables if isinstance(var.ty, relax.FuncType)]


def _impure(ty: relax.FuncType) -> relax.FuncType:
    if ty.params is None:
        return relax.FuncType.opaque_func(ret=ty.ret, purity=False, span=ty.span)
    return relax.FuncType(ty.params, ty.ret, False, ty.span)
