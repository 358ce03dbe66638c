"""Write devices into types."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from ..ir.rewriting import handle
from .graph import ConstLeaf, FuncTree, Tree

# The vdevice of one tensor.
Resolve = Callable[["int | ConstLeaf"], relax.VDevice]


def tensor_on(ty: relax.TensorType, vdevice: relax.VDevice) -> relax.TensorType:
    """The tensor type on that vdevice; itself if it names this very object."""
    old = ty.vdevice
    if old is not None and handle(old) == handle(vdevice):
        return ty
    shape = ty.shape
    if shape is not None:
        return relax.TensorType(shape, ty.dtype, vdevice, span=ty.span)
    return relax.TensorType(None, ty.dtype, vdevice, int(ty.ndim), ty.span)


def on_devices(ty: tvm.ir.Type, tree: Tree, resolve: Resolve) -> tvm.ir.Type:
    """A type with the device of every tensor in it, taken from a tree of its structure.

    Returns
    -------
    ty : Type
        The very argument if nothing changes.
    """
    if isinstance(ty, relax.TensorType):
        return tensor_on(ty, resolve(tree)) if isinstance(tree, (int, ConstLeaf)) else ty
    if isinstance(ty, tvm.ir.TupleType):
        if not isinstance(tree, tuple):
            return ty
        old = list(ty.fields)
        fields = [on_devices(field, sub, resolve) for field, sub in zip(old, tree, strict=True)]
        changed = any(new is not field for new, field in zip(fields, old, strict=True))
        return tvm.ir.TupleType(fields, ty.span) if changed else ty
    if isinstance(ty, relax.FuncType) and ty.params is not None and isinstance(tree, FuncTree):
        old = list(ty.params)
        params = [on_devices(param, sub, resolve) for param, sub in zip(old, tree.params, strict=True)]
        old_ret = ty.ret
        ret = on_devices(old_ret, tree.ret, resolve)
        if ret is old_ret and all(new is param for new, param in zip(params, old, strict=True)):
            return ty
        return relax.FuncType(params, ret, bool(ty.purity), ty.span)
    return ty


def same_devices(ty: tvm.ir.Type, other: tvm.ir.Type) -> bool:
    """Return whether two types of one structure name the same vdevice objects; a missing type has none."""
    if isinstance(ty, relax.TensorType) and isinstance(other, relax.TensorType):
        here, there = ty.vdevice, other.vdevice
        if here is None or there is None:
            return here is there
        return handle(here) == handle(there)
    if isinstance(ty, tvm.ir.TupleType) and isinstance(other, tvm.ir.TupleType):
        return all(same_devices(sub, other_sub) for sub, other_sub in zip(ty.fields, other.fields, strict=True))
    return type(ty) is type(other)
