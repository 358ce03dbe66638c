"""NameKernelVariables: names in kernels become identifiers that every code generator can write.

Before::

    def matmul(x: T.Buffer((4, 4), "float32"), ...)      # x is called "/encoder/layer.0/Relu"

After::

    def matmul(_encoder_layer_0_Relu: T.Buffer((4, 4), "float32"), ...)

Kernels have the names of the Relax variables they were made for, which are names of ONNX nodes. LLVM takes
any name; the C and CUDA generators write names into source text as they are.

Assumes nothing. A second run changes nothing.
"""

from __future__ import annotations

import re

import tvm
from tvm import tirx
from tvm_ffi import structural_map

from ..ir.declare import declare_pass
from ..ir.rewriting import with_functions

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NOT_IN_IDENTIFIERS = re.compile(r"\W", re.ASCII)


def name_kernel_variables(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; returns the same module where nothing changes."""
    functions = {gv: _with_identifiers(func) for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}
    return with_functions(mod, functions)


NameKernelVariables = declare_pass("NameKernelVariables", name_kernel_variables)


def _with_identifiers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    renamed: dict[tvm.ir.Var, tvm.ir.Var] = {}

    def rename(var: tvm.ir.Var) -> tvm.ir.Var:
        if _IDENTIFIER.fullmatch(var.name):
            return var
        if var not in renamed:
            name = _NOT_IN_IDENTIFIERS.sub("_", var.name)
            renamed[var] = type(var)(name if _IDENTIFIER.fullmatch(name) else f"_{name}", var.ty)
        return renamed[var]

    return structural_map(func, (tvm.ir.Var, rename))
