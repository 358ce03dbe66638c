"""A function that calls itself last becomes a loop of the bytecode: its stack does not grow with the trips.

Before, in a lowered module::

    def loop(i, n, v):
        if less(i, n):
            i1, v1 = step(i, v)
            r = loop(i1, n, v1)
        else:
            r = v
        return r

After, the module has one trip of it, and the bytecode repeats that trip::

    def loop_trip(i, n, v):
        if less(i, n):
            i1, v1 = step(i, v)
            r = (1, i1, v1)     # again, with these instead of i and v
        else:
            r = (0, v)          # the result
        return r

    loop: t = loop_trip(i, n, v)
          if t[0]: i, v = t[1], t[2]; go to loop
          return t[1]

TVM's virtual machine keeps a frame on the C++ stack for each call, so that some ten thousand trips would end the
process. Relax has no loop, and a tail call says the same; every pass before this one sees an ordinary function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm_ffi import structural_map

from ...transform.ir.rewriting import copy_module, op_name, relax_functions, typed, with_body

_CHECKS = ("vm.builtin.match_shape", "vm.builtin.check_tensor_info", "vm.builtin.check_tuple_info")
_STORE = 1
"""The code by which match_shape keeps an extent (MatchShapeCode::kStoreToHeap in TVM's sources)."""


@dataclass(frozen=True)
class Loop:
    """A function that is a loop of the bytecode.

    Attributes
    ----------
    name : str
        Name of the function.
    trip : str
        Name of the function of one trip.
    params : tuple of str
        Names of the parameters of both.
    state : tuple of int
        Positions of the parameters that a trip gives anew.
    """

    name: str
    trip: str
    params: tuple[str, ...]
    state: tuple[int, ...]


def with_trips(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[Loop]]:
    """A lowered module, its functions that call themselves last replaced by one trip of theirs, and these loops.

    The trips stand in the places of the functions, under other symbols: calls of the functions mean the loops, which
    `emit` adds to the bytecode.
    """
    functions, taken = dict(mod.functions.items()), {gv.name_hint for gv in mod.functions}
    loops: list[Loop] = []
    for gv, func in relax_functions(mod):
        calls = list(_tail_calls(func.body, gv))
        if not calls:
            continue
        carried = tuple(
            i for i, param in enumerate(func.params) if any(not call.args[i].same_as(param) for call in calls)
        )
        name = f"{gv.name_hint}_trip"
        while name in taken:
            name += "_"
        taken.add(name)
        body = _Trip(gv, carried).sequence(func.body, [], func.body.body)
        functions[gv] = with_body(func, body).with_attr("global_symbol", name)
        loops.append(Loop(gv.name_hint, name, tuple(param.name for param in func.params), carried))
    return (copy_module(mod, functions) if loops else mod), loops


def emit(builder: relax.ExecBuilder, loops: Sequence[Loop]) -> None:
    """Add loops to the bytecode, whose trips are there."""
    for loop in loops:
        count = len(loop.params)
        trip, is_again, result = (count + i for i in range(3))
        params = [builder.r(i) for i in range(count)]
        with builder.function(loop.name, count, list(loop.params)):
            builder.emit_call(loop.trip, params, trip)
            builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(0)], is_again)
            # The instructions of another trip: one for each carried value, the release of the tuple, the jump.
            builder.emit_if(builder.r(is_again), len(loop.state) + 3)
            for field, index in enumerate(loop.state, 1):
                builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(field)], index)
            builder.emit_call("vm.builtin.null_value", [], trip)
            builder.emit_goto(-(len(loop.state) + 4))
            builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(1)], result)
            builder.emit_ret(builder.r(result))


def _tail_calls(body: relax.Expr, own: tvm.ir.GlobalVar) -> Iterator[relax.Call]:
    """The calls of a function by itself whose result is its result."""
    last = _last(body)
    if last is None:
        return
    if isinstance(last.value, relax.If):
        for branch in (last.value.true_branch, last.value.false_branch):
            yield from _tail_calls(branch, own)
    elif isinstance(last.value, relax.Call) and own.same_as(last.value.op):
        yield last.value


def _last(body: relax.Expr) -> relax.Binding | None:
    """The binding that makes what a body gives, if nothing but checks and the freeing of memory stand behind it."""
    if not isinstance(body, relax.SeqExpr) or not isinstance(body.body, relax.Var):
        return None
    result = body.body
    for block in reversed(body.blocks):
        for binding in reversed(block.bindings):
            if binding.var.same_as(result):
                if not isinstance(binding.value, relax.Var):
                    return binding
                result = binding.value  # a second name
            elif not _is_idle(binding.value):
                return None
    return None


def _is_idle(value: relax.Expr) -> bool:
    """Return whether something only frees memory or checks types: the last trip does that for the result."""
    if op_name(value) == "relax.vm.kill_object" or isinstance(value, (relax.Var, relax.TupleGetItem)):
        return True
    if not isinstance(value, relax.Call) or not isinstance(value.op, relax.ExternFunc):
        return False
    callee = str(value.op.global_symbol)
    if callee != _CHECKS[0]:
        return callee in _CHECKS
    rank = int(value.args[2].value)
    return all(int(code.value) != _STORE for code in value.args[3 : 3 + 2 * rank : 2])


@dataclass(frozen=True)
class _Trip:
    """Writes the body of one trip."""

    own: tvm.ir.GlobalVar
    state: tuple[int, ...]

    def sequence(self, body: relax.Expr, rest: list[relax.Binding], result: relax.Expr) -> relax.SeqExpr:
        """A body, what follows it in the bodies around it, and the function's result, as one body of a trip."""
        assert isinstance(body, relax.SeqExpr)
        last: Any = _last(body)
        before = [binding for block in body.blocks for binding in block.bindings]
        calls = list(_tail_calls(body, self.own))
        if calls and isinstance(last.value, relax.If):
            position = next(i for i, binding in enumerate(before) if binding.same_as(last))
            behind = [*before[position + 1 :], *rest]
            branches = (
                self.sequence(branch, *_renamed([relax.VarBinding(last.var, branch.body), *behind], result))
                for branch in (last.value.true_branch, last.value.false_branch)
            )
            answer = relax.Var(last.var.name, relax.AnyType())
            choice = typed(relax.If(last.value.cond, *branches, last.value.span), answer.ty)
            return _ending([*before[:position], relax.VarBinding(answer, choice, last.span)], answer)
        if calls:
            position = next(i for i, binding in enumerate(before) if binding.same_as(last))
            answer = relax.Var(last.var.name, relax.AnyType())
            again = relax.VarBinding(answer, _tuple(1, [last.value.args[i] for i in self.state]), last.span)
            return _ending([*before[:position], again], answer)
        answer = relax.Var("result", relax.AnyType())
        return _ending([*before, *rest, relax.VarBinding(answer, _tuple(0, [result]))], answer)


def _renamed(bindings: list[relax.Binding], result: relax.Expr) -> tuple[list[relax.Binding], relax.Expr]:
    """Bindings of variables of their own, and a result in terms of these: bytecode has one register a variable."""
    new: dict[relax.Var, relax.Var] = {}

    def of(expr: relax.Expr) -> relax.Expr:
        return structural_map(expr, (relax.Var, lambda var: new.get(var, var)))

    copies: list[relax.Binding] = []
    for binding in bindings:
        value = of(binding.value)
        new[binding.var] = relax.Var(binding.var.name, binding.var.ty)
        copies.append(relax.VarBinding(new[binding.var], value, binding.span))
    return copies, of(result)


def _tuple(is_again: int, values: list[relax.Expr]) -> relax.Call:
    make = relax.ExternFunc("vm.builtin.make_tuple")
    return relax.Call(make, [relax.prim_value(is_again), *values], None, [relax.AnyType()], ret_ty=relax.AnyType())


def _ending(bindings: list[relax.Binding], result: relax.Var) -> relax.SeqExpr:
    return typed(relax.SeqExpr([relax.BindingBlock(bindings)], result), result.ty)
