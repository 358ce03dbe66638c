"""PrimFuncs of one CPU target become an LLVM module: TVM's own steps, and vector functions lowered in between."""

from __future__ import annotations

import tvm
from tvm import tirx

from .loosen_alignment import loosen_alignment
from .lower_vector_math import LowerVectorMath
from .trusted_arguments import without_checks
from .workspace_device import with_own_workspaces


def build_llvm(target: tvm.target.Target, group: tvm.IRModule) -> tvm.runtime.Module:
    """Compile the PrimFuncs of a module.

    Parameters
    ----------
    target : tvm.target.Target
        Of the kind llvm.
    group : tvm.IRModule
        PrimFuncs only, of this target or none.

    Returns
    -------
    tvm.runtime.Module
        Of kind ``llvm``. What TVM raises for code that does not compile has no common class.
    """
    full = target if target.host is not None else target.with_host(target)
    pipeline, finalize, _ = tirx.get_default_tir_pipeline(full)
    functions = {gv: loosen_alignment(func) for gv, func in group.functions.items()}
    bound = tirx.transform.BindTarget(full)(tvm.IRModule(functions))
    packed = with_own_workspaces(without_checks(pipeline(bound)))
    lowered = finalize()(LowerVectorMath()(packed))
    return tvm.get_global_func("target.build.llvm")(lowered, full.host)
