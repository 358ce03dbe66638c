"""MovePermutes: permutations move through what can be done in any order of dimensions, and cancel.

Before::

    y = R.permute_dims(conv1, axes=[0, 3, 1, 2])
    z = R.nn.max_pool2d(R.nn.relu(y), [2, 2], layout="NCHW")
    data = R.permute_dims(z, axes=[0, 2, 3, 1])
    conv2 = R.call_tir(cls.conv2d, (data, weight), ...)

After::

    conv2 = R.call_tir(cls.conv2d, (R.nn.max_pool2d(R.nn.relu(conv1), [2, 2], layout="NHWC"), weight), ...)

One walk from the first binding to the last. A permutation is not written where it stands: its variable is remembered
as its operand read in another order (`PermutedValues`). An op that has a rule (`permute_rules`) is then done on what
is at hand, and its result is again remembered in the order in which it came out; two permutations compose, and
nothing is left of those that cancel. An op without a rule, a result and whatever else needs the program's order has
it written, once, there. Among the orders that an op can be done in, the one is taken that moves the fewest bytes:
those of operands that are not at hand in it, and those of the result where its users prefer another one
(`permute_preferences`). The walk is repeated while the block's permutations move fewer bytes each time, so that no
program comes out worse or in need of another run.

Assumes a placed module (RealizeVDevice), at any stage before FormDispatches. Every permutation stays on the device of
its operand, but goes with it through a transfer. A second run changes nothing.
"""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax

from ..ir.axes import Axes, identity, inverse, is_order_preserving, permutation, permuted, then
from ..ir.blocks import Block, Emitter, Rewrite, renamed, rewrite_function, shape_of, tensor_type, used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import PERMUTE
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, typed, with_functions
from .permute_rules import Plan, data_operands, order_for, plan_for
from .permuted_values import PermutedValue, PermutedValues, size_of

# In which order the users of a value would like it: what decides between moves that cost the same so far.


def preferences_of(block: Block) -> dict[relax.Var, Axes]:
    """For each variable the order that most of its users want, found from the last binding to the first.

    A permutation wants what it is wanted as, permuted back; an op that can be done in any order wants what its result
    is wanted in; what leaves the block, and every other op, wants the order that the program says. Where as many want
    one as the other, it is the permuted one.
    """
    preferences: dict[relax.Var, Axes] = {}
    for binding in reversed(block.bindings):
        votes: Counter[Axes] = Counter()
        shape = shape_of(binding.var)
        if shape is None:
            continue
        plain = identity(len(shape))
        if not block.is_local(binding.var):
            votes[plain] += 1
        for index in block.users.get(binding.var, []):
            user = block.bindings[index]
            if binding.var in used_vars(user.value):
                vote = _vote(binding.var, user, preferences, plain)
                if vote is not None:
                    votes[vote] += 1
        if votes:
            preferences[binding.var] = max(votes, key=lambda axes: (votes[axes], axes != plain))
    return preferences


def _vote(var: relax.Var, user: relax.Binding, preferences: dict[relax.Var, Axes], plain: Axes) -> Axes | None:
    call = user.value
    if op_name(call) == PERMUTE:
        axes = tuple(permutation(call))
        return then(preferences.get(user.var, plain), inverse(axes))
    if isinstance(call, relax.Var):
        return preferences.get(user.var, plain)
    if not any(isinstance(operand, relax.Var) and operand.same_as(var) for operand in data_operands(call)):
        return plain
    preference = preferences.get(user.var)
    order = None if preference is None or isinstance(call.ty, tvm.ir.TupleType) else order_for(call, preference)
    plan = None if order is None else plan_for(call, order)
    return order if plan is not None and plan.results[0] == preference and plan.operands[0][1] == order else None


def move_permutes(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    functions = relax_functions(mod)
    return with_functions(mod, {gv: rewrite_function(func, _in_function(gv.name_hint)) for gv, func in functions})


MovePermutes = declare_pass("MovePermutes", move_permutes)


def _in_function(name: str) -> Rewrite:
    return lambda block: _rewrite(block, name)


def _rewrite(block: Block, function: str) -> list[relax.Binding] | None:
    best, min_moved = None, _moved(block.bindings)
    while min_moved:
        mover = _Mover(block, function)
        for binding in block.bindings:
            mover.visit(binding)
        moved = _moved(mover.emitter.bindings)
        if moved >= min_moved:
            mover.report()
            break
        best, min_moved = mover.emitter.bindings, moved
        block = Block(best, block.is_dataflow, block.used_later)
    return best


def _moved(bindings: list[relax.Binding]) -> int:
    """Bytes that the permutations among `bindings` move; at least one each."""
    values = [binding.value for binding in bindings if op_name(binding.value) == PERMUTE]
    return sum(max(1, size_of(value.ty)) for value in values)


class _Mover:
    """The walk over one block."""

    def __init__(self, block: Block, function: str) -> None:
        self.block, self.function = block, function
        self.emitter = Emitter(block.is_dataflow)
        self.values = PermutedValues(block, self.emitter)
        self.preferences = preferences_of(block)
        self.missed: list[tuple[str, str, str]] = []
        self.tuples: dict[relax.Var, tuple[relax.Var, tuple[Axes, ...]]] = {}

    def visit(self, binding: relax.Binding) -> None:
        """Do one binding."""
        var, value = binding.var, _simple(binding.value)
        known = self.values.find(value) if isinstance(value, relax.Var) else None
        if isinstance(binding, relax.VarBinding) and known is not None:
            self.values.define(var, *known)
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.tuples:
            self._take_field(var, value)
        elif op_name(value) == PERMUTE and (operand := self.values.find(value.args[0])) is not None:
            self.values.define(var, operand[0], then(operand[1], tuple(permutation(value))))
        else:
            plan = self._best(binding, value) if isinstance(value, relax.Call) else None
            if plan is None:
                self._keep(binding)
            else:
                self._move(var, plan)

    def _best(self, binding: relax.Binding, call: relax.Call) -> Plan | None:
        """The cheapest way to do an op; None for that of the program."""
        data = data_operands(call)
        if not data or not all(self.values.find(operand) for operand in data):
            return None
        plain = identity(len(shape_of(data[0]) or []))
        at_hand = list(dict.fromkeys(axes for operand in data for axes in self.values.orders(operand)))
        preference = self.preferences.get(binding.var)
        preferred = None if preference is None else order_for(call, preference)
        orders = at_hand if preferred is None else [*at_hand, preferred]
        is_lazy = any(plain not in self.values.orders(operand) for operand in data)
        cost = sum(self.values.cost(operand, plain) for operand in data) + self._cost_after(binding.var, None)
        best: tuple[int, int, Plan | None] = (cost, 1, None)
        for axes in orders:
            plan = plan_for(call, axes) if axes != plain else None
            if plan is None or not self._is_possible(binding.var, plan):
                continue
            cost = sum(self.values.cost(*operand) for operand in plan.operands)
            cost += self._cost_after(binding.var, plan.results[0])
            # What costs the same goes on permuted, if it is: what comes may be cheaper that way.
            candidate = (cost, 0 if is_lazy and axes in at_hand else 2, plan)
            best = min(best, candidate, key=lambda each: each[:2])
        return best[2]

    def _cost_after(self, var: relax.Var, axes: Axes | None) -> int:
        """Bytes that users of `var` have to move where it lies in the order `axes`, as the program says if None."""
        shape, preference = shape_of(var), self.preferences.get(var)
        if shape is None or preference is None:
            return 0
        axes = identity(len(shape)) if axes is None else axes
        moved = then(axes, inverse(preference))
        return 0 if is_order_preserving(permuted(shape, axes), moved) else size_of(var.ty)

    def _is_possible(self, var: relax.Var, plan: Plan) -> bool:
        """Return whether the types of the results can be written, and a tuple is only taken apart."""
        if not isinstance(var.ty, tvm.ir.TupleType):
            return shape_of(var) is not None
        users = [self.block.bindings[index].value for index in self.block.users.get(var, [])]
        fields_known = all(isinstance(field, relax.TensorType) and field.shape is not None for field in var.ty.fields)
        return fields_known and self.block.is_local(var) and all(isinstance(user, relax.TupleGetItem) for user in users)

    def _keep(self, binding: relax.Binding) -> None:
        name = op_name(binding.value)
        if name is not None:
            self._note(binding, name)
        names = {var: self.values.at(var) for var in used_vars(binding.value)}
        names = {var: now for var, now in names.items() if not now.same_as(var)}
        self.emitter.bindings.append(renamed(binding, names))

    def _note(self, binding: relax.Binding, op: str) -> None:
        """Note that an op needs a tensor permuted that lies in another order."""
        for operand in used_vars(binding.value):
            shape = shape_of(operand)
            size = 0 if shape is None else self.values.cost(operand, identity(len(shape)))
            if size:
                known = "in this order only" if data_operands(binding.value) else "in the order of its dimensions"
                reason = f"takes {operand.name} {known}: {size} bytes are permuted for it"
                self.missed.append((binding.var.name, op.removeprefix("relax."), reason))

    def report(self) -> None:
        """Say what was noted; to be called when nothing moves any more."""
        for variable, op, reason in self.missed:
            record_missed(self.function, variable, op, reason)

    def _move(self, var: relax.Var, plan: Plan) -> None:
        call = plan.build([self.values.at(operand, axes) for operand, axes in plan.operands])
        if isinstance(var.ty, tvm.ir.TupleType):
            fields = [_permuted_type(ty, axes) for ty, axes in zip(var.ty.fields, plan.results, strict=True)]
            made = self.emitter.emit(call, tvm.ir.TupleType(fields), var.name)
            self.tuples[var] = made, plan.results
            return
        axes = plan.results[0]
        ty = _permuted_type(var.ty, axes)
        if axes == identity(len(axes)):
            self.emitter.bind(var, typed(call, ty))
            return
        made = self.emitter.emit(call, ty, var.name)
        self._define(var, made, axes)

    def _take_field(self, var: relax.Var, item: relax.TupleGetItem) -> None:
        made, orders = self.tuples[item.tuple_value]
        axes = orders[item.index]
        kind = relax.DataflowVar if self.block.is_dataflow else relax.Var
        field = kind(var.name, _permuted_type(var.ty, axes))
        self.emitter.bind(field, relax.TupleGetItem(made, item.index))
        self._define(var, field, axes)

    def _define(self, var: relax.Var, value: relax.Var, axes: Axes) -> None:
        self.values.define(var, PermutedValue(shape_of(value) or [], value.ty, {identity(len(axes)): value}), axes)


def _simple(value: relax.Expr) -> relax.Expr:
    """A field of a tuple that is written out is that field."""
    if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Tuple):
        return value.tuple_value.fields[value.index]
    return value


def _permuted_type(ty: relax.TensorType, axes: Axes) -> relax.TensorType:
    return tensor_type(permuted(list(ty.shape.values), axes), str(ty.dtype), ty)
