"""Kernels of CPUs take tensors at any address that a caller may have, so that these need no copy.

TVM's code relies on tensors that begin at multiples of 64 bytes, as its own allocations do. Numpy's begin where the
C library's do, at multiples of 16. The x86 instructions that fault on other addresses are no faster at these than
those that do not; only SSE, which folds loads of aligned memory into arithmetic, gains, and it asks for 16 bytes.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_map

# Bytes at whose multiples malloc of 64-bit systems, and so numpy, puts arrays (max_align_t).
ARGUMENT_ALIGNMENT = 16


def loosen_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with parameters that may begin at any multiple of `ARGUMENT_ALIGNMENT` bytes."""
    loosened = {
        param: _loosened(param)
        for param in func.params
        if is_buffer_var(param) and int(param.ty.data_alignment) > ARGUMENT_ALIGNMENT
    }
    return structural_map(func, (tvm.ir.Var, lambda var: loosened.get(var, var))) if loosened else func


def _loosened(buffer: tvm.ir.Var) -> tvm.ir.Var:
    ty = buffer.ty
    return tirx.decl_buffer(
        ty.shape,
        ty.dtype,
        buffer.name,
        strides=ty.strides,
        elem_offset=ty.elem_offset,
        scope=ty.storage_scope,
        data_alignment=ARGUMENT_ALIGNMENT,
        offset_factor=ty.offset_factor,
        layout=ty.layout,
        span=buffer.span,
    )
