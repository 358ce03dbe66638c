"""Kernels that other PrimFuncs call: plain functions of pointers and numbers, which say whether they failed.

Before::

    def scale(A: T.Buffer((n, 16), "float32"), B: T.Buffer((n, 16), "float32")): ...

After::

    def scale_raw(A_data: T.handle("float32"), B_data: T.handle("float32"), n: T.int64) -> T.int32:
        A = T.decl_buffer((n, 16), "float32", data=A_data)
        B = T.decl_buffer((n, 16), "float32", data=B_data)
        ...
        return 0

TVM's own calling convention passes each tensor as a description, which the callee takes apart and checks: tens of
nanoseconds. Here the caller has checked, once for all its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import VisitInterrupt, structural_map, structural_walk

from .builder import Expr, plain_extent

LAUNCH_BOUNDS = "tirx.launch_bounds_min_blocks_per_sm"
"""On a statement around a kernel's code, and on a function that is one: blocks that share a multiprocessor at least."""


@dataclass(frozen=True)
class RawSignature:
    """How a kernel is called raw: its buffer parameters, then its scalars.

    Attributes
    ----------
    buffers : tuple of tirx.Var
        The parameters that are tensors, in order.
    scalars : tuple of tirx.Var
        The variables of the tensors' extents that are no parameters, in order of appearance; then the parameters that
        are numbers.
    numbers : tuple of tirx.Var
        The parameters that are numbers, in order.
    extents : tuple of tuple
        Extents of each tensor: ints, or expressions over the scalars.
    dtypes : tuple of str
        Element type of each tensor.
    """

    buffers: tuple[tirx.Var, ...]
    scalars: tuple[tirx.Var, ...]
    numbers: tuple[tirx.Var, ...]
    extents: tuple[tuple[Any, ...], ...]
    dtypes: tuple[str, ...]


def raw_signature(kernel: tirx.PrimFunc) -> RawSignature | None:
    """How a kernel is called raw.

    None for one that cannot be: it takes strided tensors, parts of some or something else, or the extents of its
    tensors do not say what the variables in them are.
    """
    buffers = tuple(param for param in kernel.params if is_buffer_var(param))
    given = [param for param in kernel.params if not is_buffer_var(param)]
    found: dict[tirx.Var, None] = {}
    plain: set[tirx.Var] = set(given)
    extents = tuple(tuple(map(plain_extent, buffer.ty.shape)) for buffer in buffers)
    for buffer, shape in zip(buffers, extents, strict=True):
        ty = buffer.ty
        if len(ty.strides) or not _is_zero(ty.elem_offset) or ty.storage_scope not in ("", "global"):
            return None
        for extent in shape:
            if not isinstance(extent, int):
                structural_walk(extent, (tvm.ir.Var, lambda var: found.setdefault(var)))
        plain.update(extent for extent in shape if isinstance(extent, tirx.Var))
    if not all(map(_can_be_passed, given)) or not plain.issuperset(found):
        return None
    scalars = (*(var for var in found if var not in given), *given)
    return RawSignature(buffers, scalars, tuple(given), extents, tuple(str(buffer.ty.dtype) for buffer in buffers))


def _can_be_passed(param: tirx.Var) -> bool:
    # TVM passes bfloat16 numbers as integers, but only to packed functions.
    return isinstance(param.ty, tvm.ir.PrimType) and str(param.ty.dtype) != "bfloat16"


def raw_kernel(kernel: tirx.PrimFunc, signature: RawSignature) -> tirx.PrimFunc:
    """The kernel as a private function of `signature`: pointers and numbers in, an int32 out, 0 unless it failed."""
    pointers = [tirx.Var(f"{b.name}_data", _pointer_type(b)) for b in signature.buffers]
    declared = [tirx.DeclBuffer(b, data=p) for b, p in zip(signature.buffers, pointers, strict=True)]
    body = in_root_block(kernel.body, lambda inner: tirx.SeqStmt([*declared, inner, tirx.stmt.Return(_ZERO)]))
    params = [*pointers, *signature.scalars]
    empty = tirx.PrimFunc(params, tirx.Evaluate(_ZERO), tvm.ir.PrimType("int32"), kernel.attrs, kernel.span)
    # Put in afterwards: the constructor searches a body for effects, which takes longer than all else here, and of
    # functions that only PrimFuncs call nobody asks.
    raw = structural_map(empty, (tirx.Evaluate, lambda _: body))
    raw = raw.without_attr("global_symbol").with_attr("tirx.noalias", kernel.attrs.get("tirx.noalias", False))
    return _with_launch_bounds(raw)


def _with_launch_bounds(raw: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with its least number of blocks on a multiprocessor as an attribute.

    TVM takes it from the statement where it cuts the code of a device out of a host function. A raw kernel is not cut
    out of anything; without the attribute its threads get other registers, and do not give them to each other.
    """
    target = raw.attrs.get("target")
    if target is None or "gpu" not in target.keys:
        return raw

    def on_attr(statement: tirx.AttrStmt) -> VisitInterrupt | None:
        return VisitInterrupt(statement.value) if statement.attr_key == LAUNCH_BOUNDS else None

    found = structural_walk(raw.body, (tirx.AttrStmt, on_attr))
    return raw if found is None else raw.with_attr(LAUNCH_BOUNDS, int(found.value))


def in_root_block(body: tirx.Stmt, change: Callable[[tirx.Stmt], tirx.Stmt]) -> tirx.Stmt:
    """`body` with the statements of its root block replaced by what `change` makes of them; it gets one if needed."""
    if isinstance(body, s_tir.SBlockRealize):
        root = body.block
        inner = change(root.body)
        block = s_tir.SBlock(
            root.iter_vars, root.reads, root.writes, root.name_hint, inner, root.init, root.alloc_buffers,
            root.match_buffers, root.annotations, root.span,
        )  # fmt: skip
        return s_tir.SBlockRealize(body.iter_values, body.predicate, block, body.span)
    return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", change(body)))


_ZERO = tirx.IntImm("int32", 0)


def _pointer_type(buffer: tirx.Var) -> tvm.ir.Type:
    return tvm.ir.PointerType(tvm.ir.PrimType(str(buffer.ty.dtype)), "global")


def _is_zero(value: Expr) -> bool:
    return value is None or (isinstance(value, tirx.IntImm) and int(value.value) == 0)


def has_temporaries(kernel: tirx.PrimFunc) -> bool:
    """Return whether a kernel may have temporaries that TVM takes from a workspace: those of a kilobyte and more."""

    def large(buffer: tirx.Var) -> bool:
        ty = buffer.ty
        bits: Any = tvm.DataType(str(ty.dtype)).bits
        for extent in ty.shape:
            if not isinstance(extent, tirx.IntImm):
                return True
            bits *= int(extent)
        return ty.storage_scope in ("", "global") and bits >= 8 * _ON_STACK

    def in_block(block: s_tir.SBlock) -> VisitInterrupt | None:
        return VisitInterrupt(block) if any(map(large, block.alloc_buffers)) else None

    def at_statement(alloc: tirx.AllocBuffer) -> VisitInterrupt | None:
        return VisitInterrupt(alloc) if large(alloc.buffer) else None

    return structural_walk(kernel.body, [(s_tir.SBlock, in_block), (tirx.AllocBuffer, at_statement)]) is not None


# Bytes from which on a temporary is not on the stack (TVM's kMaxStackAlloca).
_ON_STACK = 1024
