"""Symbols that kernels call and nobody defines are refused: LLVM's JIT would end the process when they are called."""

from __future__ import annotations

import ctypes

import tvm
from tvm import tirx
from tvm_ffi import structural_walk

from ...errors import BuildError

_CALLS = ("tirx.call_extern", "tirx.call_pure_extern")


def check_external_symbols(mod: tvm.IRModule) -> None:
    """Check the symbols that the CPU kernels of a module call against its own and those of this process.

    Kernels that bring code along (``pragma_import_llvm``) are not looked into.

    Raises
    ------
    BuildError
        Names the kernel and the symbol.
    """
    process = ctypes.CDLL(None)
    for kernel, symbols in external_calls(mod).items():
        for symbol in symbols:
            if not hasattr(process, symbol):
                raise BuildError(
                    f"kernel {kernel!r} calls the external function {symbol!r}, which this process does not "
                    "have: expected its library loaded first, with ctypes.CDLL(path, ctypes.RTLD_GLOBAL)"
                )


def external_calls(mod: tvm.IRModule) -> dict[str, list[str]]:
    """The symbols that each kernel of a module calls and the module itself lacks; by the kernels' names, in order."""
    kernels = [(gv, func) for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)]
    own = {str(func.attrs["global_symbol"]) for _, func in kernels if "global_symbol" in func.attrs}
    return {
        gv.name_hint: [symbol for symbol in _called(func) if symbol not in own]
        for gv, func in sorted(kernels, key=lambda pair: pair[0].name_hint)
    }


def _called(func: tirx.PrimFunc) -> list[str]:
    found: list[str] = []
    imports: list[str] = []

    def on_call(call: tvm.ir.Call) -> None:
        if isinstance(call.op, tvm.ir.Op) and call.op.name in _CALLS:
            found.append(str(call.args[0].value))

    def on_attribute(statement: tirx.AttrStmt) -> None:
        if statement.attr_key.startswith("pragma_import"):
            imports.append(statement.attr_key)

    structural_walk(func.body, [(tvm.ir.Call, on_call), (tirx.AttrStmt, on_attribute)])
    return [] if imports else found
