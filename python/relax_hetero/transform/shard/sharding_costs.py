"""Estimates that decide whether devices of a mesh share a product: the time that it saves, against its exchanges.

A product of a whole operand may split the columns of its weight. The split lasts until a product adds its parts, or an
op needs the whole, so that the products up to there save time, and the exchanges there cost it. A product of an operand
that is split along the depth may split the rows of its weight, and add the parts; or the operand is gathered.

Figures of devices and links are those of ``placement="auto"``, measured ones if there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import tvm
from tvm import relax

from ...display.text import time_text
from ...op.sharding import SHARD
from ...op.traits import traits_of
from ...providers import provided
from ...target.backend import backend_of
from ...tir.cuda.all_reduce import AllReduce, all_reduce_seconds
from ..ir.blocks import used_vars
from ..ir.rewriting import op_name, tensor_types
from .sharding import known
from .sharding_rules import PRODUCTS, Operand, has_rule, passes_on

_SYMBOLIC_EXTENT = 64  # assumed size of symbolic dimensions


class DeviceCosts(Protocol):
    """Figures of devices and links."""

    def product_seconds(self, flops: float, nbytes: float, dtype: str, device: int) -> float:
        """Time of a product of operands of a type, given its operations and bytes, without a launch."""

    def transfer_seconds(self, size: float, source: int, destination: int) -> float:
        """Time of a transfer of `size` bytes."""


class ShardingCosts:
    """Times of products and exchanges. `vdevices`: devices of the module."""

    def __init__(self, vdevices: Sequence[relax.VDevice]) -> None:
        self._vdevices = vdevices

    @cached_property
    def _costs(self) -> DeviceCosts:
        return provided("device_costs")(self._vdevices)  # type: ignore[no-any-return]

    def product_seconds(self, call: relax.Call, operand_bytes: float, device: int) -> float:
        """Time of a product on one device."""
        shapes = [_extents(arg.ty) for arg in call.args if isinstance(arg.ty, relax.TensorType)]
        depth = shapes[0][-1] if shapes[0] else 1
        if traits_of(op_name(call)).kind == "conv":
            depth = math.prod(shapes[1]) // shapes[1][str(call.attrs.kernel_layout).index("O")]
        flops, nbytes = 2.0 * math.prod(_extents(call.ty)) * depth, operand_bytes + nbytes_of(call.ty)
        return self._costs.product_seconds(flops, nbytes, str(call.args[0].ty.dtype), device)

    def all_reduce_seconds(self, call: relax.Call, group: Sequence[int]) -> float:
        """Time of an all-reduce of a product's result within a group of devices, given their positions.

        Between products of float16, GPUs send the rows of long sums as float16 (`gpu_sums`).
        """
        nbytes = nbytes_of(call.ty)
        if not self._has_kernels(call.ty, group):
            return self._costs.transfer_seconds(nbytes * (len(group) - 1), group[0], group[1])
        is_short = AllReduce(tuple(_extents(call.ty)), len(group)).is_short
        is_half = str(call.args[0].ty.dtype) == "float16" and not is_short
        return self._kernel_seconds(nbytes / 2 if is_half else nbytes, group, is_short)

    def gather_seconds(self, nbytes: float, group: Sequence[int]) -> float:
        """Time of a gather of a value on one device of a group."""
        share = nbytes * (len(group) - 1) / len(group)
        return self._costs.transfer_seconds(share, group[0], group[1])

    def all_gather_seconds(self, ty: tvm.ir.Type, nbytes: float, group: Sequence[int]) -> float:
        """Time of an all-gather of `nbytes` of a type within a group of devices; GPUs gather small values as a sum."""
        copied = self.gather_seconds(nbytes, group)
        return min(copied, self._kernel_seconds(nbytes, group, True)) if self._has_kernels(ty, group) else copied

    def _has_kernels(self, ty: tvm.ir.Type, group: Sequence[int]) -> bool:
        return _is_float32(ty) and bool(backend_of(self._vdevices[group[0]].target).records_graphs)

    def _kernel_seconds(self, nbytes: float, group: Sequence[int], is_short: bool) -> float:
        """Time of an all-reduce by kernels of GPUs."""
        latency = self._costs.transfer_seconds(0, group[0], group[1])
        seconds = self._costs.transfer_seconds(nbytes, group[0], group[1]) - latency
        return all_reduce_seconds(len(group), seconds, is_short)


@dataclass(frozen=True)
class Readers:
    """Uses of the values of a function."""

    of: Mapping[relax.Var, Sequence[relax.Binding]]  # bindings that read each value
    outputs: Sequence[relax.Var]
    # Bytes of an operand that follows from constants; None for others.
    weight_bytes: Callable[[relax.Expr], float | None]

    def has_weights(self, call: relax.Call) -> bool:
        """Return whether some operands follow from constants."""
        return any(self.weight_bytes(arg) is not None for arg in call.args)

    def operand_bytes(self, call: relax.Call) -> float:
        """Bytes of a call's operands; those of weights are as they are stored."""
        sizes = [(self.weight_bytes(arg), arg.ty) for arg in call.args]
        return sum(nbytes_of(ty) if stored is None else stored for stored, ty in sizes)


@dataclass(frozen=True)
class Splits:
    """Decision about a product on a group of devices."""

    costs: ShardingCosts
    readers: Readers
    var: relax.Var  # result of the product
    call: relax.Call  # the product, as the devices along earlier axes of the mesh compute it
    operand_bytes: float
    group: tuple[int, ...]  # positions of devices along this axis of the mesh
    earlier: int  # number of devices along earlier axes, which share later products, too
    record: Callable[[str], None]  # takes the reason of a decision

    def columns_pay(self) -> bool:
        """Return whether a split of the weight's columns, or of its output channels, takes less time than none."""
        saved, exchanges = self._after_split()
        saved = (saved / self.earlier + self._seconds) * (1.0 - 1.0 / len(self.group))
        pays = saved > exchanges
        decision = "columns split: saves" if pays else "whole on each device: a split would save"
        self.record(f"{decision} about {time_text(saved)}, with exchanges of {time_text(exchanges)}")
        return pays

    def rows_pay(self, operand: Operand) -> bool:
        """Return whether a split of the weight's rows, with a sum, takes less time than a whole operand."""
        split = self._seconds / len(self.group)
        with_rows = split + self.costs.all_reduce_seconds(self.call, self.group)
        nbytes = math.prod(known(extent) or _SYMBOLIC_EXTENT for extent in operand.shape) * _itemsize(operand.expr.ty)
        gather, result_bytes = self.costs.all_gather_seconds, nbytes_of(self.call.ty)
        without_rows = gather(operand.expr.ty, nbytes, self.group) + min(
            self._seconds, split + gather(self.call.ty, result_bytes, self.group)
        )
        pays = with_rows <= without_rows
        self.record(
            f"rows split: about {time_text(with_rows)} with the sum, {time_text(without_rows)} with a whole operand"
            if pays
            else f"operand gathered: about {time_text(without_rows)}, a split of rows would take {time_text(with_rows)}"
        )
        return pays

    @property
    def _seconds(self) -> float:
        """Time of the product on one device."""
        return self.costs.product_seconds(self.call, self.operand_bytes, self.group[0])

    def _after_split(self) -> tuple[float, float]:
        """Time of the products that share a split of the result, and of the exchanges that end it."""
        seconds = exchanges = 0.0
        pending, seen = [self.var], {self.var}
        gathered: dict[relax.Var, float] = {}
        while pending:
            value = pending.pop()
            if value in self.readers.outputs:
                gathered.setdefault(value, self.costs.gather_seconds(nbytes_of(value.ty), self.group))
            for binding in self.readers.of.get(value, ()):
                call = binding.value
                if binding.var in seen or op_name(call) == SHARD:
                    continue
                is_product = op_name(call) in PRODUCTS and has_rule(call)
                if isinstance(call, relax.Call) and not is_product and not passes_on(call):
                    gathered[value] = self.costs.all_gather_seconds(value.ty, nbytes_of(value.ty), self.group)
                    continue
                if is_product:
                    seconds += self.costs.product_seconds(call, self.readers.operand_bytes(call), self.group[0])
                    if self.readers.has_weights(call):
                        exchanges += self.costs.all_reduce_seconds(call, self.group)
                        seen.add(binding.var)
                        continue
                seen.add(binding.var)
                pending.append(binding.var)
        return seconds, exchanges + sum(gathered.values())


def readers_of(bindings: Sequence[relax.Binding]) -> dict[relax.Var, list[relax.Binding]]:
    """Bindings that use each variable."""
    readers: dict[relax.Var, list[relax.Binding]] = {}
    for binding in bindings:
        for var in used_vars(binding.value):
            readers.setdefault(var, []).append(binding)
    return readers


def _extents(ty: tvm.ir.Type) -> list[int]:
    if not isinstance(ty, relax.TensorType):
        return [1]
    if not isinstance(ty.shape, relax.ShapeExpr):
        return [_SYMBOLIC_EXTENT] * max(int(ty.ndim), 1)
    return [known(extent) or _SYMBOLIC_EXTENT for extent in ty.shape.values]


def elements_of(ty: tvm.ir.Type) -> int:
    """Elements of all tensors in a type."""
    return sum(math.prod(_extents(tensor)) for tensor in tensor_types(ty))


def nbytes_of(ty: tvm.ir.Type) -> float:
    """Bytes of all tensors in a type."""
    return sum(math.prod(_extents(tensor)) * _itemsize(tensor) for tensor in tensor_types(ty))


def _itemsize(ty: relax.TensorType) -> float:
    return float(tvm.DataType(str(ty.dtype)).bits / 8)


def _is_float32(ty: tvm.ir.Type) -> bool:
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == "float32"
