"""Random Relax programs for placement, and what they compute, symbolically.

Programs are built without TVM's inference, which refuses operands on several devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import GlobalVar, Op

import relax_hetero as rh
from relax_hetero.op import encode_hint
from relax_hetero.target.vdevice import with_vdevices

DEVICES = [rh.VDevice("llvm"), rh.VDevice("llvm", 1), rh.VDevice("c", 2)]
SHAPE = [2, 3]


def tensor(device: int | None = None) -> relax.TensorType:
    return relax.TensorType(SHAPE, "float32", None if device is None else DEVICES[device])


def flag() -> relax.TensorType:
    return relax.TensorType([], "bool")


def pair(first: relax.Type, second: relax.Type) -> tvm.ir.TupleType:
    return tvm.ir.TupleType([first, second])


def is_pair(var: relax.Var) -> bool:
    return isinstance(var.ty, tvm.ir.TupleType)


@dataclasses.dataclass
class Scope:
    """Variables in reach, and the blocks written so far."""

    tensors: list[relax.Var]
    pairs: list[relax.Var]
    bindings: list[relax.Binding] = dataclasses.field(default_factory=list)

    def inner(self) -> Scope:
        return Scope(list(self.tensors), list(self.pairs))

    def bind(self, name: str, value: relax.Expr, ty: relax.Type) -> relax.Var:
        var = relax.Var(name, ty)
        self.bindings.append(relax.VarBinding(var, value))
        (self.pairs if is_pair(var) else self.tensors).append(var)
        return var

    def close(self, body: relax.Expr) -> relax.SeqExpr:
        blocks = [relax.BindingBlock(self.bindings)] if self.bindings else []
        seq = relax.SeqExpr(blocks, body)
        relax.expr._update_type(seq, body.ty)
        return seq


class ProgramMaker:
    """Generator of one module: `functions` functions, each of which may call itself and those before it."""

    def __init__(self, draw: Callable[[Any], Any], functions: int, size: int, fixed: bool) -> None:
        self.draw = draw
        self.size = size
        self.fixed = fixed
        self.functions = functions
        self.count = 0
        self.made: dict[GlobalVar, relax.Function] = {}

    def module(self) -> tvm.IRModule:
        for index in range(self.functions):
            gvar, func = self._function("main" if index == self.functions - 1 else f"f{index}")
            self.made[gvar] = func
        return with_vdevices(tvm.IRModule(self.made), DEVICES)

    def _function(self, name: str) -> tuple[GlobalVar, relax.Function]:
        x, y = relax.Var(f"{name}_x", tensor(self._fix())), relax.Var(f"{name}_y", tensor(self._fix()))
        t = relax.Var(f"{name}_t", pair(tensor(self._fix()), tensor(self._fix())))
        c = relax.Var(f"{name}_c", flag())
        params = [x, y, t, c]
        gvar = GlobalVar(name)
        ret_ty = pair(tensor(self._fix()), tensor(self._fix()))
        relax.expr._update_type(gvar, relax.FuncType([p.ty for p in params], ret_ty, True))
        scope = Scope([x, y], [t])
        self._fill(scope, self.draw(st.integers(1, self.size)), gvar, c, depth=0)
        seq = scope.close(relax.Tuple([self._tensor(scope), self._tensor(scope)]))
        return gvar, relax.Function(params, seq, ret_ty, True)

    def _fix(self) -> int | None:
        """A fixed device, sometimes."""
        return self.draw(st.sampled_from([None, None, None, 0, 1, 2])) if self.fixed else None

    def _tensor(self, scope: Scope) -> relax.Var:
        return self.draw(st.sampled_from(scope.tensors))

    def _fill(self, scope: Scope, size: int, me: GlobalVar, c: relax.Var, depth: int) -> None:
        makers = [self._op, self._op, self._op, self._tuple, self._field, self._alias, self._crossing, self._constant]
        makers += [self._split, self._match, self._shape]
        for _ in range(size):
            self.count += 1
            name = f"v{self.count}"
            what = self.draw(st.sampled_from([*makers, "if", "call", "local"] if depth < 2 else makers))
            if what == "if":
                self._if(scope, name, me, c, depth)
            elif what == "call":
                self._call(scope, name, me, c)
            elif what == "local":
                self._local(scope, name, me, c, depth)
            else:
                what(scope, name)

    def _op(self, scope: Scope, name: str) -> None:
        op = self.draw(st.sampled_from(["relax.add", "relax.exp", "relax.ewise_fma"]))
        args = [self._operand(scope) for _ in range({"relax.add": 2, "relax.exp": 1, "relax.ewise_fma": 3}[op])]
        ty = tensor(self._fix())
        scope.bind(name, relax.Call(Op.get(op), args, ret_ty=ty), ty)

    def _operand(self, scope: Scope) -> relax.Expr:
        if self.draw(st.integers(0, 7)) == 0:
            return self._const()
        return self._tensor(scope)

    def _const(self) -> relax.Expr:
        return relax.const(np.full(SHAPE, self.draw(st.integers(0, 3)), "float32"))

    def _split(self, scope: Scope, name: str) -> None:
        ty = pair(tensor(self._fix()), tensor(self._fix()))
        args = [relax.ExternFunc("halves"), relax.Tuple([self._tensor(scope)])]
        scope.bind(name, relax.Call(Op.get("relax.call_dps_packed"), args, None, [ty], ret_ty=ty), ty)

    def _tuple(self, scope: Scope, name: str) -> None:
        fields = [self._operand(scope), self._operand(scope)]
        ty = pair(tensor(self._fix()), tensor(self._fix()))
        scope.bind(name, relax.Tuple(fields), ty)

    def _field(self, scope: Scope, name: str) -> None:
        pair = self.draw(st.sampled_from(scope.pairs))
        index = self.draw(st.integers(0, 1))
        scope.bind(name, relax.TupleGetItem(pair, index), tensor(self._fix()))

    def _alias(self, scope: Scope, name: str) -> None:
        source = self.draw(st.sampled_from([*scope.tensors, *scope.pairs]))
        ty = pair(tensor(), tensor()) if is_pair(source) else tensor()
        scope.bind(name, source, ty)

    def _match(self, scope: Scope, name: str) -> None:
        source, ty = self._tensor(scope), tensor(self._fix())
        var = relax.Var(name, ty)
        scope.bindings.append(relax.MatchCast(var, source, ty))
        scope.tensors.append(var)

    def _constant(self, scope: Scope, name: str) -> None:
        scope.bind(name, self._const(), tensor(self._fix()))

    def _crossing(self, scope: Scope, name: str) -> None:
        device = self.draw(st.integers(0, len(DEVICES) - 1))
        source = self._tensor(scope)
        if self.draw(st.booleans()):
            call = relax.op.to_vdevice(source, DEVICES[device])
        else:
            call = encode_hint(source, DEVICES[device], DEVICES)
        scope.bind(name, relax.Call(call.op, call.args, call.attrs, ret_ty=tensor()), tensor())

    def _shape(self, scope: Scope, name: str) -> None:
        """Through a tensor of the host and back; the tensor itself is used, too."""
        kind = relax.TensorType([2], "int64")
        value = relax.Var(f"{name}_s", kind)
        shape = relax.ShapeType(ndim=2)
        scope.bindings.append(
            relax.VarBinding(value, relax.Call(Op.get("relax.shape_to_tensor"), [relax.ShapeExpr(SHAPE)], ret_ty=kind))
        )
        read = relax.Call(Op.get("relax.tensor_to_shape"), [value], ret_ty=shape)
        var = relax.Var(f"{name}_r", shape)
        scope.bindings.append(relax.VarBinding(var, read))
        ty = tensor(self._fix())
        args = [relax.ExternFunc("mix"), value, self._tensor(scope)]
        scope.bind(name, relax.Call(Op.get("relax.call_pure_packed"), args, None, [ty], ret_ty=ty), ty)

    def _if(self, scope: Scope, name: str, me: GlobalVar, c: relax.Var, depth: int) -> None:
        branches = []
        for _ in range(2):
            inner = scope.inner()
            self._fill(inner, self.draw(st.integers(0, 3)), me, c, depth + 1)
            result = relax.Tuple([self._tensor(inner), self._tensor(inner)])
            branches.append(inner.close(result))
        ty = pair(tensor(self._fix()), tensor(self._fix()))
        value = relax.If(c, *branches)
        relax.expr._update_type(value, ty)
        scope.bind(name, value, ty)

    def _call(self, scope: Scope, name: str, me: GlobalVar, c: relax.Var) -> None:
        gvar = self.draw(st.sampled_from([*self.made, me]))
        args = [self._tensor(scope), self._tensor(scope), self.draw(st.sampled_from(scope.pairs)), c]
        ty = pair(tensor(self._fix()), tensor(self._fix()))
        scope.bind(name, relax.Call(gvar, args, ret_ty=ty), ty)

    def _local(self, scope: Scope, name: str, me: GlobalVar, c: relax.Var, depth: int) -> None:
        param = relax.Var(f"{name}_p", tensor(self._fix()))
        inner = scope.inner()
        inner.tensors.append(param)
        self._fill(inner, self.draw(st.integers(0, 2)), me, c, depth + 1)
        ret_ty = tensor(self._fix())
        func = relax.Function([param], inner.close(self._tensor(inner)), ret_ty, True)
        var = relax.Var(name, func.ty)
        scope.bindings.append(relax.VarBinding(var, func))
        for number in range(self.draw(st.integers(1, 2))):
            ty = tensor(self._fix())
            scope.bind(f"{name}_{number}", relax.Call(var, [self._tensor(scope)], ret_ty=ty), ty)


@st.composite
def modules(draw: Callable[[Any], Any], functions: int = 2, size: int = 8, fixed: bool = True) -> tvm.IRModule:
    """A module of up to `functions` functions; with `fixed` some of its types name devices."""
    return ProgramMaker(draw, draw(st.integers(1, functions)), size, fixed).module()


# --- what a program computes -----------------------------------------------------------------------------------------

Term = Any
_CROSSING = ("relax.to_vdevice", "relax.hint_on_device")


def meaning(mod: tvm.IRModule, name: str = "main", depth: int = 2) -> Term:
    """The result of a function as a term over its parameters; transfers mean nothing. Calls are opened to `depth`."""
    func = mod[name]
    env = {param: _symbol(f"p{index}", param.ty) for index, param in enumerate(func.params)}
    return _Evaluator(mod).sequence(func.body, env, depth)


def _symbol(name: str, ty: relax.Type) -> Term:
    if isinstance(ty, tvm.ir.TupleType):
        return tuple(_symbol(f"{name}.{index}", field) for index, field in enumerate(ty.fields))
    return name


class _Evaluator:
    """Terms are shared, so that equal ones compare by identity: programs that square their size stay small."""

    _known: dict[Any, int] = {}

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod

    def term(self, *parts: Any) -> int:
        return self._known.setdefault(parts, len(self._known))

    def sequence(self, seq: relax.SeqExpr, env: Mapping[relax.Var, Term], depth: int) -> Term:
        env = dict(env)
        for block in seq.blocks:
            for binding in block.bindings:
                env[binding.var] = self.value(binding.value, env, depth)
        return self.value(seq.body, env, depth)

    def value(self, expr: relax.Expr, env: dict[relax.Var, Term], depth: int) -> Term:
        if isinstance(expr, relax.Var):
            return env[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(self.value(field, env, depth) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.value(expr.tuple_value, env, depth)[int(expr.index)]
        if isinstance(expr, tvm.ir.GenericConst):
            return self.term("const", float(expr.value.numpy()[0, 0]))
        if isinstance(expr, (relax.ShapeExpr, relax.ExternFunc)):
            return str(expr)
        if isinstance(expr, relax.Function):
            return (expr, env)
        if isinstance(expr, relax.If):
            cond = self.value(expr.cond, env, depth)
            then = self.sequence(expr.true_branch, env, depth)
            return self._select(cond, then, self.sequence(expr.false_branch, env, depth))
        assert isinstance(expr, relax.Call), type(expr)
        args = [self.value(arg, env, depth) for arg in expr.args]
        if isinstance(expr.op, Op):
            if expr.op.name in _CROSSING:
                return args[0]
            if expr.op.name == "relax.call_dps_packed":
                return tuple(self.term("halves", index, *args) for index in range(2))
            return self.term(expr.op.name, *args)
        if isinstance(expr.op, GlobalVar):
            func, outer = self.mod[expr.op], {}
            if depth <= 0:
                kind = expr.op.name_hint.split("_")[0]  # clones mean what their original means
                return tuple(self.term(kind, index, *map(self._flat, args)) for index in range(2))
        else:
            func, outer = env[expr.op]
        return self.sequence(func.body, {**outer, **dict(zip(func.params, args, strict=True))}, depth - 1)

    def _select(self, cond: Term, then: Term, other: Term) -> Term:
        if isinstance(then, tuple):
            return tuple(self._select(cond, a, b) for a, b in zip(then, other, strict=True))
        return self.term("if", cond, then, other)

    def _flat(self, term: Term) -> Term:
        return self.term("tuple", *map(self._flat, term)) if isinstance(term, tuple) else term


def all_bindings(func: relax.Function) -> Iterator[relax.Binding]:
    """All bindings below a function."""
    pending: list[relax.Expr] = [func.body]
    while pending:
        seq = pending.pop()
        for block in seq.blocks:
            for binding in block.bindings:
                value = binding.value
                if isinstance(value, relax.If):
                    pending += [value.true_branch, value.false_branch]
                elif isinstance(value, relax.Function):
                    pending.append(value.body)
                yield binding


def calls(func: relax.Function, name: str) -> Iterator[relax.Binding]:
    """All bindings below a function to calls of one op."""
    for binding in all_bindings(func):
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, Op) and value.op.name == name:
            yield binding


def transfers(func: relax.Function) -> Iterator[relax.Binding]:
    """All transfers below a function."""
    return calls(func, "relax.to_vdevice")


def constants(func: relax.Function) -> Iterator[relax.Binding]:
    """All bindings below a function to constants."""
    return (binding for binding in all_bindings(func) if isinstance(binding.value, tvm.ir.GenericConst))


def hints(func: relax.Function) -> Iterator[relax.Binding]:
    """All hints below a function."""
    return calls(func, "relax.hint_on_device")


# --- taking annotations away -----------------------------------------------------------------------------------------


def erased(mod: tvm.IRModule, forget: Callable[[str], bool]) -> tvm.IRModule:
    """The module without the devices in the types of the variables whose names `forget` holds for, and in all calls."""
    eraser = _Eraser(forget)
    functions = {gvar: eraser.function(func) for gvar, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


class _Eraser:
    def __init__(self, forget: Callable[[str], bool]) -> None:
        self.forget = forget
        self.vars: dict[relax.Var, relax.Var] = {}

    def ty(self, ty: relax.Type) -> relax.Type:
        if isinstance(ty, relax.TensorType):
            return relax.TensorType(ty.shape, ty.dtype)
        if isinstance(ty, tvm.ir.TupleType):
            return tvm.ir.TupleType([self.ty(field) for field in ty.fields])
        if isinstance(ty, relax.FuncType):
            return relax.FuncType([self.ty(param) for param in ty.params], self.ty(ty.ret), ty.purity)
        return ty

    def define(self, var: relax.Var) -> relax.Var:
        ty = self.ty(var.ty) if self.forget(str(var.name)) else var.ty
        new = self.vars[var] = type(var)(var.name, ty)
        return new

    def function(self, func: relax.Function) -> relax.Function:
        params = [self.define(param) for param in func.params]
        ret_ty = self.ty(func.ret_ty) if self.forget("return") else func.ret_ty
        seq = self.sequence(func.body, ret_ty)
        return relax.Function(params, seq, ret_ty, func.is_pure, func.attrs)

    def sequence(self, seq: relax.SeqExpr, ty: relax.Type) -> relax.SeqExpr:
        blocks = []
        for block in seq.blocks:
            bindings = []
            for binding in block.bindings:
                if isinstance(binding.value, relax.Function):
                    var = self.define(binding.var)  # it may call itself
                    bindings.append(relax.VarBinding(var, self.value(binding.value)))
                    continue
                value = self.value(binding.value)
                var = self.define(binding.var)
                if isinstance(binding, relax.MatchCast):
                    bindings.append(relax.MatchCast(var, value, var.ty))
                else:
                    bindings.append(relax.VarBinding(var, value))
            blocks.append(type(block)(bindings))
        new = relax.SeqExpr(blocks, self.value(seq.body))
        relax.expr._update_type(new, ty)
        return new

    def value(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self.vars.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.value(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.value(expr.tuple_value), int(expr.index))
        if isinstance(expr, tvm.ir.GenericConst):
            return relax.expr._ffi_api.MakeTensorConst(expr.value, self.ty(expr.ty), None)
        if isinstance(expr, relax.Function):
            return self.function(expr)
        if isinstance(expr, relax.If):
            ty = self.ty(expr.ty)
            branches = [self.sequence(branch, ty) for branch in (expr.true_branch, expr.false_branch)]
            new = relax.If(self.value(expr.cond), *branches)
            relax.expr._update_type(new, ty)
            return new
        if isinstance(expr, relax.Call):
            args = [self.value(arg) for arg in expr.args]
            ty_args = [self.ty(ty) for ty in expr.ty_args]
            return relax.Call(self.value(expr.op), args, expr.attrs, ty_args, ret_ty=self.ty(expr.ty))
        return expr
