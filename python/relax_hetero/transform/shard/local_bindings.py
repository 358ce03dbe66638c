"""Writer of what single devices compute, in place of the values of a function over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tvm
from tvm import relax, tirx

from ...target.backend import backend_of
from ...target.vdevice import vdevice_index
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name, typed
from .gpu_sums import Sum

Make: TypeAlias = "Callable[[Sequence[relax.Expr]], relax.Expr]"
"""Maker of what a device computes from its operands."""


class LocalBindings:
    """Bindings of single devices."""

    def __init__(
        self,
        builder: relax.BlockBuilder,  # builder of the module, which infers types
        vdevices: Sequence[relax.VDevice],  # devices of the module
        is_dataflow: bool,  # True if the function consists of dataflow blocks
        kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc],  # new kernels of the module
    ) -> None:
        self.items: list[relax.Binding | Sum] = []  # the new function in order
        self.vdevices = vdevices
        self.is_dataflow = is_dataflow
        self._builder, self._kernels = builder, kernels
        self._bare: dict[relax.Var, relax.Var] = {}
        self._transferred: dict[tuple[relax.Expr, int], relax.Expr] = {}
        self._transferred_before: dict[tuple[relax.Expr, int], relax.Expr] = {}

    def nested(self, is_dataflow: bool) -> LocalBindings:
        """Bindings of a branch, which uses transfers before it."""
        inner = LocalBindings(self._builder, self.vdevices, is_dataflow, self._kernels)
        inner._transferred_before = dict(self._transferred)
        inner.restart()
        return inner

    def records_graphs(self, device: int) -> bool:
        """Return whether a device's kernels are in graphs, as those of a GPU."""
        return bool(backend_of(self.vdevices[device].target).records_graphs)

    def normalized(self, call: relax.Expr) -> relax.Expr:
        """A call with its type, given operands without devices."""
        return self._builder.normalize(call)

    def emit(self, make: Make, args: Sequence[relax.Expr], device: int, name: str) -> relax.Var:
        """Bind what a device computes; its type is inferred from operands without devices."""
        var = self.new_var(name, self.normalized(make([self._bare_of(arg) for arg in args])).ty, device)
        self.add_binding(var, make(list(args)))
        return var

    def transfer(self, local: relax.Expr, device: int) -> relax.Expr:
        """A local value on another device; constants are where they are used."""
        vdevice = local.ty.vdevice if isinstance(local.ty, relax.TensorType) else None
        if vdevice is None or vdevice_index(vdevice, self.vdevices) == device:
            return local
        key = local, device
        if key not in self._transferred:
            var = self.new_var(f"{local.name}_sent", on_device(local.ty, None), device)
            self.add_binding(var, relax.op.to_vdevice(local, self.vdevices[device]))
            self._transferred[key] = var
        return self._transferred[key]

    def restart(self) -> None:
        """Write the function from its begin again: only transfers that are kept, or new, count."""
        self.items, self._transferred = [], dict(self._transferred_before)

    def keep(self, binding: relax.Binding) -> None:
        """Add a binding that was written before."""
        self.items.append(binding)
        if op_name(binding.value) == TRANSFER:
            device = vdevice_index(binding.value.attrs.dst_vdevice, self.vdevices)
            self._transferred.setdefault((binding.value.args[0], device), binding.var)

    def added(self, parts: Sequence[relax.Expr], device: int, name: str) -> relax.Expr:
        """The sum of values of a device."""
        total = parts[0]
        for part in parts[1:]:
            total = self.emit(lambda args: relax.op.add(*args), [total, part], device, f"{name}_sum")
        return total

    def new_var(self, name: str, ty: tvm.ir.Type, device: int) -> relax.Var:
        """Make a variable of a device, given its type without one."""
        var = self.new_local(name, on_device(ty, self.vdevices[device]))
        self._bare[var] = relax.Var(name, ty)
        return var

    def _bare_of(self, expr: relax.Expr) -> relax.Expr:
        if not isinstance(expr, relax.Var):
            return expr
        if expr not in self._bare:
            self._bare[expr] = relax.Var(expr.name, on_device(expr.ty, None))
        return self._bare[expr]

    def new_local(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        """Make a variable of the function."""
        return (relax.DataflowVar if self.is_dataflow else relax.Var)(name, ty)

    def add_binding(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind a value whose type is that of the variable."""
        self.items.append(relax.VarBinding(var, typed(value, var.ty) if isinstance(value, relax.Call) else value))

    def add_kernel(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel to the module, under a name of its own."""
        gv = self._builder.add_func(kernel, name)
        self._kernels[gv] = self._builder.get()[gv]
        return gv

    def new_addresses(self, function: str, numbers: Sequence[relax.Expr], count: int, device: int) -> relax.Var:
        """Bind addresses, (count,) of int64, that a function of the run time returns."""
        ty = relax.TensorType([count], "int64", self.vdevices[device])
        var = self.new_local("peer_memory", ty)
        self.add_binding(var, relax.op.call_pure_packed(function, *numbers, ty_args=[ty]))
        return var


def on_device(ty: tvm.ir.Type, vdevice: relax.VDevice | None) -> tvm.ir.Type:
    """A type with all tensors on a device."""
    if isinstance(ty, relax.TensorType):
        ndim = -1 if ty.shape is not None else ty.ndim
        return relax.TensorType(ty.shape, ty.dtype, vdevice, ndim)
    if isinstance(ty, tvm.ir.TupleType):
        return tvm.ir.TupleType([on_device(field, vdevice) for field in ty.fields])
    return ty


def numbered(name: str, number: int) -> str:
    """Name of a value on a device of a mesh, given its number."""
    return f"{name}@{number}" if number else name
