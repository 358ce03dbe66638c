"""`Weights`: values that follow from constants, whose parts are cut when an op over a mesh asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax

from ...target.mesh import Mesh
from ...vm.device.tensor_arrays import host_array
from ...vm.device.tensors import share_or_copy
from ..ir.blocks import shape_of
from ..ir.rewriting import is_tensor_constant, with_args
from .local_bindings import LocalBindings, numbered
from .local_calls import CallPlan, LocalCall
from .sharding import REPLICATED, Sharding, Shardings, divide, extended
from .sharding_rules import Local, weight_operands

Cuts: TypeAlias = "dict[relax.Expr, dict[tuple[tuple[Sharding, int, int], ...], relax.Expr]]"
"""Parts of each constant on meshes, by the sharding, number and count of devices along each axis that splits it; the
constant itself, without any, where devices have the whole."""


class Weights:
    """Weights of a function. `cuts`: parts of constants, which functions share."""

    def __init__(self, bindings: LocalBindings, cuts: Cuts) -> None:
        self.values: dict[relax.Var, relax.Expr] = {}  # constants, and calls of constants and other weights
        self._bindings, self._cuts = bindings, cuts
        self._stored = {
            constant: {tuple((sharding, count) for sharding, _, count in key) for key in parts}
            for constant, parts in cuts.items()
        }
        self._parts: dict[tuple[relax.Expr, Mesh, Shardings], list[relax.Expr]] = {}

    def __contains__(self, expr: relax.Expr) -> bool:
        return is_tensor_constant(expr) or expr in self.values

    def nbytes(self, expr: relax.Expr) -> float | None:
        """Bytes of the constants that a weight follows from; None for other values."""
        if expr not in self:
            return None
        return sum(
            float(math.prod(constant.value.shape) * np.dtype(str(constant.ty.dtype)).itemsize)
            for constant, _ in self._needed(expr, (), ()) or ()
        )

    def can_cut(self, expr: relax.Expr, shardings: Shardings, counts: Sequence[int]) -> bool:
        """Return whether the devices of a mesh, `counts` along its first axes, can have parts of a weight."""
        return self._needed(expr, shardings, counts) is not None

    def is_stored(self, expr: relax.Expr, shardings: Shardings, counts: Sequence[int]) -> bool | None:
        """Return whether other functions store a weight's parts; None if their meshes do not use its constants.

        False means that these parts would be stored besides others. See `can_cut` for the arguments.
        """
        is_stored = []
        for constant, own in self._needed(expr, shardings, counts) or ():
            split = tuple((each, count) for each, count in zip(own, counts, strict=True) if each.is_split)
            if constant in self._stored:
                is_stored.append(any(stored[: len(split)] == split for stored in self._stored[constant]))
        return all(is_stored) if is_stored else None

    def _needed(
        self, expr: relax.Expr, shardings: Shardings, counts: Sequence[int]
    ) -> list[tuple[relax.Expr, Shardings]] | None:
        """Constants that a weight follows from, with their shardings; None if it cannot have these shardings."""
        value = self.values.get(expr, expr)
        if is_tensor_constant(value):
            return [(value, shardings)] if divide(shardings, shape_of(value) or [], counts) else None
        if isinstance(value, relax.Var):
            return self._needed(value, shardings, counts)
        plan = self._plan(value, shardings, counts)
        if plan is None:
            return None
        operands = zip(filter(_is_tensor, value.args), plan.operands, strict=True)
        needed = [self._needed(tensor, each, counts) for tensor, each in operands]
        return None if None in needed else [pair for pairs in needed for pair in pairs or ()]

    def parts(self, expr: relax.Expr, mesh: Mesh, shardings: Shardings) -> list[relax.Expr]:
        """The part of each device of a mesh."""
        key = expr, mesh, shardings
        if key not in self._parts:
            self._parts[key] = self._made_parts(expr, mesh, shardings)
        return self._parts[key]

    def _made_parts(self, expr: relax.Expr, mesh: Mesh, shardings: Shardings) -> list[relax.Expr]:
        value = self.values.get(expr, expr)
        if is_tensor_constant(value):
            return [self._cut(value, mesh, shardings, number) for number in range(len(mesh))]
        if isinstance(value, relax.Var):
            return self.parts(value, mesh, shardings)
        plan = self._plan(value, shardings, mesh.shape)
        assert plan is not None, "plans ask `can_cut` first"
        tensors = filter(_is_tensor, value.args)
        by_operand = [self.parts(arg, mesh, each) for arg, each in zip(tensors, plan.operands, strict=True)]
        by_device = list(zip(*by_operand, strict=True))
        return [
            self._bindings.emit(plan.make, list(by_device[number]), device, numbered(expr.name, number))
            for number, device in enumerate(mesh)
        ]

    def _plan(self, call: relax.Call, shardings: Shardings, counts: Sequence[int]) -> CallPlan | None:
        """Plan of a call of weights that gives its result a sharding; None if there is none."""
        tensors = list(filter(_is_tensor, call.args))
        local = LocalCall(call, tensors, _rebuilt, self._bindings.normalized)
        operands: list[Shardings] = [()] * len(tensors)
        for sharding, count in zip(shardings, counts, strict=True):
            along: tuple[list[Sharding], Local | None] | None = [REPLICATED] * len(tensors), None
            if sharding.is_split:
                along = weight_operands(local.call, local.shapes, sharding, count)
            if along is None:
                return None
            operands = extended(operands, along[0])
            local.split(*along, count)
        return CallPlan(operands, [shardings], local.make)

    def _cut(self, constant: relax.Expr, mesh: Mesh, shardings: Shardings, number: int) -> relax.Expr:
        """A device's part of a constant."""
        along = zip(shardings, mesh.coordinates(number), mesh.shape, strict=True)
        cuts = tuple((sharding, index, count) for sharding, index, count in along if sharding.is_split)
        parts = self._cuts.setdefault(constant, {}) if len(mesh) > 1 else {}
        if not cuts:
            parts[cuts] = constant
        elif cuts not in parts:
            part = host_array(constant.value)
            for sharding, index, count in cuts:
                part = sharding.part(part, index, count)
            ty = relax.TensorType(list(part.shape), constant.ty.dtype)
            parts[cuts] = tvm.ir.GenericConst(share_or_copy(part), ty)
        return parts[cuts]


def _is_tensor(expr: relax.Expr) -> bool:
    return is_tensor_constant(expr) or (isinstance(expr, relax.Var) and isinstance(expr.ty, relax.TensorType))


def _rebuilt(call: relax.Call, tensors: Sequence[relax.Expr]) -> relax.Call:
    """The call of other tensors."""
    rest = iter(tensors)
    args = [next(rest) if _is_tensor(arg) else arg for arg in call.args]
    return with_args(call, args)
