"""Where stock TVM builds a module, the kernels of its command buffers stay functions: LLVM must not inline them.

TVM writes on each access of memory which variable of its kernel it goes through, and LLVM takes accesses through two
variables for different memory. Within a kernel they are. In a host function with its kernels inlined, what one
stores is what the next one loads, and LLVM would load first. TIR has no word for a function that is not to be
inlined, LLVM's language has: the host function calls each kernel through a function of that language.

``rh.compile`` needs none of this: it compiles kernels apart from host functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import tirx
from tvm_ffi import structural_map

from .address_table import is_llvm_buffer, kernel_symbol, llvm_type, named_kernels


def with_kernels_out_of_line(mod: tvm.IRModule) -> tvm.IRModule:
    """A module of PrimFuncs whose command buffers of llvm devices never have kernels inlined."""
    buffers = {gv: func for gv, func in mod.functions.items() if is_llvm_buffer(func)}
    if not buffers:
        return mod
    functions = dict(mod.functions.items())
    functions.update(named_kernels(mod, buffers.values()))
    functions.update({gv: _calling_out(func) for gv, func in buffers.items()})
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _calling_out(buffer: tirx.PrimFunc) -> tirx.PrimFunc:
    texts: dict[str, str] = {}

    def on_call(call: tvm.ir.Call) -> tvm.ir.Expr:
        if not isinstance(call.op, tvm.ir.GlobalVar):
            return call
        symbol = kernel_symbol(call.op.name_hint)
        texts[symbol] = _trampoline(symbol, [llvm_type(arg) for arg in call.args])
        return tirx.call_extern("int32", f"{symbol}.call", *call.args)

    body = structural_map(buffer.body, (tvm.ir.Call, on_call))
    return buffer.with_body(tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", "".join(texts.values()), body))


def _trampoline(symbol: str, types: Sequence[str]) -> str:
    params = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(types))
    return (
        f"declare i32 @{symbol}({', '.join(types)})\n"
        f"define linkonce_odr hidden i32 @{symbol}.call({params}) noinline {{\n"
        f"  %status = call i32 @{symbol}({params})\n  ret i32 %status\n}}\n"
    )
