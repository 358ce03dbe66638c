"""Raw kernels, which other PrimFuncs call: plain functions of pointers and numbers that return a status.

Before::

    def scale(A: T.Buffer((n, 16), "float32"), B: T.Buffer((n, 16), "float32")): ...

After::

    def scale_raw(A_data: T.handle("float32"), B_data: T.handle("float32"), n: T.int64) -> T.int32:
        A = T.decl_buffer((n, 16), "float32", data=A_data)
        B = T.decl_buffer((n, 16), "float32", data=B_data)
        ...
        return 0

TVM's own calling convention passes each tensor as a DLTensor, which the callee unpacks and checks in tens of
nanoseconds. Here the caller has checked all tensors once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

from .builder import Expr, plain_extent
from .walks import any_node, nodes

LAUNCH_BOUNDS = "tirx.launch_bounds_min_blocks_per_sm"
"""On a statement around a kernel's code, or on a raw kernel: minimum number of blocks per multiprocessor."""


@dataclass(frozen=True)
class RawSignature:
    """Signature of a raw kernel: its buffer parameters, then its scalars."""

    buffers: tuple[tirx.Var, ...]  # tensor parameters, in order
    # Variables in extents of tensors that are not parameters, in order of appearance, then `numbers`.
    scalars: tuple[tirx.Var, ...]
    numbers: tuple[tirx.Var, ...]  # number parameters, in order
    extents: tuple[tuple[Any, ...], ...]  # extents of each tensor: ints, or expressions over the scalars
    dtypes: tuple[str, ...]  # element type of each tensor


def raw_signature(kernel: tirx.PrimFunc) -> RawSignature | None:
    """The raw signature of a kernel.

    None if a parameter is a strided tensor, a part of a tensor or something else, or if the extents of tensors do not
    determine the variables in them.
    """
    buffers = tuple(param for param in kernel.params if is_buffer_var(param))
    numbers = [param for param in kernel.params if not is_buffer_var(param)]
    variables: list[tirx.Var] = []
    bound: set[tirx.Var] = set(numbers)
    extents = tuple(tuple(map(plain_extent, buffer.ty.shape)) for buffer in buffers)
    for buffer, shape in zip(buffers, extents, strict=True):
        ty = buffer.ty
        if len(ty.strides) or not _is_zero(ty.elem_offset) or ty.storage_scope not in ("", "global"):
            return None
        variables += [var for extent in shape if not isinstance(extent, int) for var in nodes(extent, tvm.ir.Var)]
        bound.update(extent for extent in shape if isinstance(extent, tirx.Var))
    if not all(map(_can_be_passed, numbers)) or not bound.issuperset(variables):
        return None
    scalars = (*(var for var in dict.fromkeys(variables) if var not in numbers), *numbers)
    return RawSignature(buffers, scalars, tuple(numbers), extents, tuple(str(buffer.ty.dtype) for buffer in buffers))


def _can_be_passed(param: tirx.Var) -> bool:
    # TVM passes bfloat16 numbers as integers, but only to packed functions.
    return isinstance(param.ty, tvm.ir.PrimType) and str(param.ty.dtype) != "bfloat16"


def raw_kernel(kernel: tirx.PrimFunc, signature: RawSignature) -> tirx.PrimFunc:
    """The kernel as a private function with `signature`; it returns an int32 status, 0 for success."""
    pointers = [tirx.Var(f"{b.name}_data", _pointer_type(b)) for b in signature.buffers]
    declarations = [tirx.DeclBuffer(b, data=p) for b, p in zip(signature.buffers, pointers, strict=True)]
    body = in_root_block(kernel.body, lambda inner: tirx.SeqStmt([*declarations, inner, tirx.stmt.Return(_ZERO)]))
    params = [*pointers, *signature.scalars]
    without_body = tirx.PrimFunc(params, tirx.Evaluate(_ZERO), tvm.ir.PrimType("int32"), kernel.attrs, kernel.span)
    # The body is inserted afterwards: the constructor searches it for effects, which takes longer than everything else
    # here and is useless for functions that only PrimFuncs call.
    raw = structural_map(without_body, (tirx.Evaluate, lambda _: body))
    raw = raw.without_attr("global_symbol").with_attr("tirx.noalias", kernel.attrs.get("tirx.noalias", False))
    return _with_launch_bounds(raw)


def _with_launch_bounds(raw: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with its minimum number of blocks per multiprocessor as an attribute.

    TVM reads it from the statement when it splits device code from a host function. A raw kernel is not split; without
    the attribute its threads get a different number of registers, and cannot exchange them.
    """
    target = raw.attrs.get("target")
    if target is None or "gpu" not in target.keys:
        return raw

    bounds = [each.value for each in nodes(raw.body, tirx.AttrStmt) if each.attr_key == LAUNCH_BOUNDS]
    return raw.with_attr(LAUNCH_BOUNDS, int(bounds[0])) if bounds else raw


def in_root_block(body: tirx.Stmt, change: Callable[[tirx.Stmt], tirx.Stmt]) -> tirx.Stmt:
    """`body` with `change` applied to the statements of its root block, which is added if missing."""
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
    """Return whether a kernel may have temporaries in TVM's workspace, which are those of at least a kilobyte."""

    def is_large(buffer: tirx.Var) -> bool:
        ty = buffer.ty
        bits: Any = tvm.DataType(str(ty.dtype)).bits
        for extent in ty.shape:
            if not isinstance(extent, tirx.IntImm):
                return True
            bits *= int(extent)
        return ty.storage_scope in ("", "global") and bits >= 8 * _MIN_WORKSPACE_BYTES

    buffers = [buffer for block in nodes(kernel.body, s_tir.SBlock) for buffer in block.alloc_buffers]
    return any(map(is_large, buffers)) or any_node(kernel.body, tirx.AllocBuffer, lambda alloc: is_large(alloc.buffer))


# Minimum bytes of a temporary in the workspace; smaller ones are on the stack (TVM's kMaxStackAlloca).
_MIN_WORKSPACE_BYTES = 1024
