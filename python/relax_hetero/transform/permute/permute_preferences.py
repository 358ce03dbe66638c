"""In which order the users of a value would like it: what decides between moves that cost the same so far."""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax

from ..ir.axes import Axes, identity, inverse, permutation, then
from ..ir.blocks import Block, shape_of, used_vars
from ..ir.op_names import PERMUTE
from ..ir.rewriting import op_name
from .permute_rules import data_operands, order_for, plan_for


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
        if not block.is_used_later(binding.var):
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
