"""Functions that are no packed ones may have temporaries in TVM's workspace: they say which device's.

TVM takes the device from the arguments of a packed function, and refuses temporaries in any other. Said in the source
of a kernel it is of no use: an earlier pass, StorageRewrite, moves temporaries to the top of the function.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ...vm.file.export import SYMBOL_PREFIX


def with_own_workspaces(mod: tvm.IRModule) -> tvm.IRModule:
    """Functions of a CPU, between TVM's two pipelines: those that are no packed ones use the first CPU's workspace."""
    functions = {gv: func if _is_packed(func) else _with_device(func) for gv, func in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _is_packed(func: tirx.PrimFunc) -> bool:
    return str(func.attrs.get("global_symbol", "")).startswith(SYMBOL_PREFIX)


def _with_device(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = func.body
    # Temporaries are given back where the scope ends, which must be before a return.
    if isinstance(body, tirx.SeqStmt) and isinstance(body.seq[-1], tirx.stmt.Return):
        return func.with_body(tirx.SeqStmt([_scope(tirx.SeqStmt(list(body.seq)[:-1])), body.seq[-1]]))
    return func.with_body(_scope(body))


def _scope(body: tirx.Stmt) -> tirx.Stmt:
    # CPUs have one workspace, whatever their numbers.
    return tirx.AttrStmt(tvm.ir.StringImm("default"), "device_id", tirx.const(0, "int32"), body)
