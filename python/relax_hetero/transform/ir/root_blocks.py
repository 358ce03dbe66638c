"""Root blocks of kernels, which passes of stock TVM assert."""

from __future__ import annotations

import tvm
from tvm import s_tir, tirx

from ...tir.core.raw_kernel import in_root_block
from .rewriting import copy_module


def with_root_blocks(mod: tvm.IRModule) -> tvm.IRModule:
    """Kernels written without blocks get the root block that RewriteDataflowReshape asserts (it crashes otherwise)."""
    functions = dict(mod.functions.items())
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize):
            functions[gv] = func.with_body(in_root_block(func.body, lambda body: body))
    return copy_module(mod, functions)
