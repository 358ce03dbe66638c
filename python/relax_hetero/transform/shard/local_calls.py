"""`LocalCall`: a call as the devices of a mesh compute it, each on its parts of the operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ..ir.blocks import shape_of
from ..ir.rewriting import is_tensor_constant
from .local_bindings import Make
from .sharding import Sharding, Shardings
from .sharding_rules import Local


class LocalCall:
    """A call that becomes smaller along one axis of a mesh after the other."""

    def __init__(
        self,
        call: relax.Call,
        leaves: Sequence[relax.Expr],  # tensors and other variables among its arguments, in order
        rebuilt: Callable[[relax.Call, Sequence[relax.Expr]], relax.Call],  # returns a call with other leaves
        normalized: Callable[[relax.Expr], relax.Expr],  # returns a call with its type
    ) -> None:
        self._call, self._leaves, self._given = call, list(leaves), list(leaves)
        self._rebuilt, self._normalized = rebuilt, normalized
        self._local: Local | None = None
        self._is_current, self._count = True, 1
        # Shape of each tensor operand, on the devices along the axes so far.
        self.shapes: list[list[Any]] = [shape_of(leaf) or [] for leaf in leaves if _is_tensor(leaf)]

    @property
    def call(self) -> relax.Call:
        """The call of a device along the axes so far; its operands are variables of the right types."""
        self._make_current()
        return self._call

    def _make_current(self) -> None:
        """Make the call that the last split left to be made: that along the last axis of a mesh is not needed."""
        if not self._is_current:
            shapes = iter(self.shapes)
            args = [
                relax.Var("part", relax.TensorType(next(shapes), leaf.ty.dtype)) if _is_tensor(leaf) else leaf
                for leaf in self._given
            ]
            self._call = self._normalized(self.make(args))
            self._leaves, self._local, self._is_current = _leaves(self._call.args), None, True

    def split(self, shardings: Sequence[Sharding], local: Local | None, count: int) -> None:
        """Continue to what `count` devices compute.

        `shardings`: sharding of each tensor operand. `local`: maker of a device's call; None: the same call of its
        operands.
        """
        if local is None and not any(sharding.is_split for sharding in shardings):
            return
        self._make_current()
        self.shapes = [each.local_shape(shape, count) for each, shape in zip(shardings, self.shapes, strict=True)]
        self._local, self._count, self._is_current = local, count, False

    def make(self, args: Sequence[relax.Expr]) -> relax.Expr:
        """Make the call of a device, given its values of the leaves of the whole call."""
        pairs = list(zip(self._given, args, strict=True))
        tensors = iter([arg for leaf, arg in pairs if _is_tensor(leaf)])
        others = {leaf: arg for leaf, arg in pairs if not _is_tensor(leaf)}
        own = [next(tensors) if _is_tensor(leaf) else others[leaf] for leaf in self._leaves]
        return self._rebuilt(self._call, own) if self._local is None else self._local(own, self._count)


def _is_tensor(expr: relax.Expr) -> bool:
    return isinstance(expr.ty, relax.TensorType)


def _leaves(args: Sequence[relax.Expr]) -> list[relax.Expr]:
    leaves: list[relax.Expr] = []
    for arg in args:
        if isinstance(arg, relax.Tuple):
            leaves += _leaves(arg.fields)
        elif is_tensor_constant(arg) or isinstance(arg, relax.Var):
            leaves.append(arg)
    return leaves


@dataclass(frozen=True)
class CallPlan:
    """Plan of a call on all devices of a mesh.

    Attributes
    ----------
    operands, results : list of Shardings
        Shardings of each tensor.
    make : callable
        Maker of what a device computes from its operands.
    factor : float
        Factor of a device's result.
    """

    operands: list[Shardings]
    results: list[Shardings]
    make: Make
    factor: float = 1.0
