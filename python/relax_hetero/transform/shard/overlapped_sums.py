"""Sums over GPUs that overlap products: a product's kernel sends what other GPUs add.

Before, on each GPU::

    part = R.call_tir(cls.matmul_2048x4096x7168_f16f16_cuda_0, (x, weight), ...)
    norm, rows = R.call_tir(cls.all_reduce_0_of_2, (part, addresses, before, residual, scale), ...)

After::

    part = R.call_tir(cls.matmul_2048x4096x7168_f16f16_cuda_0_sent, (x, weight, addresses), ...)
    norm, rows = R.call_tir(cls.all_reduce_0_of_2_sent, (part, addresses, before, residual, scale), ...)

A product of few rows sends the operand of a short sum in vectors, as it stores them. Other products send the operand
of a long sum in tiles: they compute those that other GPUs add first, and send each while they compute the next ones, so
that only the last tiles are left when the sum begins.

Products send parts that nothing but their sum reads.

A kernel may write to the slot of its sum when the sum before that has ended on its GPU (`tir.cuda.all_reduce`). So the
product must read something that follows from that sum. The products before the first sum of a GPU in the function
follow from those of the last call. Products also read the addresses, which must be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import tvm
from tvm import relax, tirx

from ...encoding.problem import SentSum
from ...tir.cuda.all_reduce import ALL_REDUCE, RankReduce, all_reduce_kernel
from ..ir.blocks import static_form, used_vars
from ..ir.kernels import called_prim_func, opaque_kernel
from ..ir.op_names import CALL_TIR
from ..ir.rewriting import map_bindings, op_name, typed, walk_bindings


class ProductKernels(Protocol):
    """Kernels of the module's products."""

    def sending(self, kernel: tvm.ir.GlobalVar, sent: SentSum) -> tuple[tvm.ir.GlobalVar, int] | None:
        """The kernel of a product that sends its result, and the index of its parameter of the GPUs' addresses.

        None if there is none, or sending saves no time.
        """

    def add(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel, once for each name."""


def overlap_sums(func: relax.Function, mod: tvm.IRModule, kernels: ProductKernels) -> relax.Function:
    """A function whose products send what other GPUs add, where they can.

    Parameters
    ----------
    func : relax.Function
    mod : tvm.IRModule
        Module with the kernels of its sums.
    kernels : ProductKernels
        Kernels of its products.
    """
    bindings = list(walk_bindings(func))
    writer = _Writer(mod, kernels, bindings)
    changed: dict[relax.Var, relax.Expr] = {}
    group: list[_RankSum] = []
    for binding in bindings:
        gv = called_prim_func(mod, binding.value)
        if gv is not None and ALL_REDUCE in mod.functions[gv].attrs:
            group.append(_RankSum(binding, gv, RankReduce.from_json(str(mod.functions[gv].attrs[ALL_REDUCE]))))
            if len(group) == group[0].own.reduce.ranks:
                # The products of all GPUs send, or none does.
                of_one_sum = [replace(item.own, rank=0, keeps_sum=False) for item in group]
                is_one = [item.own.rank for item in group] == [*range(len(group))] and len(set(of_one_sum)) == 1
                parts = [writer.overlapped(item) for item in group]
                for part in parts if all(parts) and is_one else ():
                    changed.update(part)
                group = []

    def change(binding: relax.Binding) -> relax.Binding:
        if binding.var not in changed:
            return binding
        return relax.VarBinding(binding.var, changed[binding.var], binding.span)

    return map_bindings(func, change) if changed else func


@dataclass(frozen=True)
class _RankSum:
    """The call of a GPU's kernel of a sum; those of all GPUs follow each other."""

    binding: relax.Binding
    kernel: tvm.ir.GlobalVar
    own: RankReduce


class _Writer:
    """Writer of the calls of products that send, and of their sums."""

    def __init__(self, mod: tvm.IRModule, kernels: ProductKernels, bindings: Sequence[relax.Binding]) -> None:
        self._mod, self._kernels = mod, kernels
        self._values = {binding.var: binding.value for binding in bindings}
        self._order = {binding.var: number for number, binding in enumerate(bindings)}
        self._readers = Counter(var for binding in bindings for var in set(used_vars(binding.value)))

    def overlapped(self, item: _RankSum) -> dict[relax.Var, relax.Expr]:
        """Values of the product's result and of the sum's; empty if the product cannot send."""
        own, call = item.own, item.binding.value
        part, addresses, before = call.args[1].fields[:3]
        product = self._values.get(part)
        if own.sent is None or product is None or op_name(product) != CALL_TIR or self._readers[part] > 1:
            return {}
        is_first = before.same_as(part)
        if self._order.get(addresses, -1) > self._order[part] or not (is_first or self._follows(part, before)):
            return {}
        sending = self._kernels.sending(product.args[0], own.sent)
        if sending is None:
            return {}
        sender, index = sending
        operands = list(product.args[1].fields)
        operands.insert(index, addresses)
        how = own.slot, own.slot_bytes, static_form(before), own.keeps_sum
        kernel = all_reduce_kernel(own.reduce, own.rank, *how, is_sent=True)
        gv = self._kernels.add(opaque_kernel(kernel), f"{item.kernel.name_hint}_sent")
        return {part: _call(sender, operands, product.ty), item.binding.var: _call(gv, call.args[1].fields, call.ty)}

    def _follows(self, var: relax.Var, before: relax.Var) -> bool:
        """Return whether a variable is computed from the call of a sum, one of whose results is `before`."""
        value = self._values.get(before)
        source = value.tuple_value if isinstance(value, relax.TupleGetItem) else before
        seen, stack = {var}, [var]
        while stack:
            for used in used_vars(self._values[stack.pop()]):
                if used.same_as(source):
                    return True
                if used in self._values and used not in seen:
                    seen.add(used)
                    stack.append(used)
        return False


def _call(kernel: tvm.ir.GlobalVar, operands: Sequence[relax.Expr], ty: tvm.ir.Type) -> relax.Call:
    out = list(ty.fields) if isinstance(ty, tvm.ir.TupleType) else ty
    return typed(relax.op.call_tir(kernel, relax.Tuple(operands), out), ty)
