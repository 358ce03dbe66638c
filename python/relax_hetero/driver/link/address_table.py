"""Calls of kernels from command buffers on llvm devices: by address from a table, or by name in `tvm.compile`.

Command buffers read the addresses of constants and kernels from one table that the machine fills.

Before::

    def main_commands(x: T.Buffer, w: T.Buffer, y: T.Buffer):
        ... scale(x.data, w.data, y.data)

After::

    def main_commands(direct: T.Buffer((2,), "int64"), x: T.Buffer, y: T.Buffer):
        ... T.call_extern("int32", "relax_hetero.call.ppp", direct[1], x.data, T.reinterpret(ptr, direct[0]), y.data)

A constant is a *direct* reference: its address is fixed for the life of the machine, so passing hundreds of them with
each call would be waste. Kernels could be called by name only within one LLVM module, which LLVM compiles on one core;
instead they are compiled in modules of a few kernels (`parallel_codegen`). A call by address costs nanoseconds.

Each kernel that is called by address gets a packed function ``relax_hetero.address.NAME`` that returns its address.

``tvm.compile`` compiles kernels and command buffers together, and calls by name: see `with_noinline_kernels`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.ir import CallingConv
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map

from ...artifact.kernel_addresses import address_function
from ...target.backend import backend_of
from ...target.vdevice import vdevices_of
from ...tir.core.builder import Function
from ...tir.core.raw_kernel import raw_kernel, raw_signature
from ...transform.ir.module_attrs import COMMANDS
from ...transform.ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    is_tensor_constant,
    map_bindings,
    relax_functions,
)
from ...transform.record.region_attrs import regions_of
from .llvm_kernels import TRUSTED, types_are_true

_SYMBOL = "relax_hetero.kernel."
_THUNK = "relax_hetero.call."
_LLVM_TYPES = {"bool": "i1", "float16": "half", "bfloat16": "bfloat", "float32": "float", "float64": "double"}


@dataclass(frozen=True)
class AddressTable:
    """A placeholder constant that the machine fills with addresses of other constants, then of kernels."""

    tensor: tvm.ir.GenericConst  # placeholder in lowered code
    constants: list[tvm.ir.GenericConst]
    kernels: list[str]
    region: str = ""  # command buffer whose graph state it is (`form_cuda_graphs`); ``""`` for a plain table


def by_address(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[AddressTable]]:
    """Make command buffers on llvm devices of a lowered module take address tables; returns also the tables."""
    buffers = {gv: func for gv, func in mod.functions.items() if is_llvm_buffer(func)}
    if not buffers:
        return mod, []
    functions = dict(mod.functions.items())
    functions.update(named_kernels(mod, buffers.values()))
    is_trusted = types_are_true(mod)
    tables: list[AddressTable] = []
    vdevices = vdevices_of(mod)
    devices = {region.name: vdevices[region.device] for region in regions_of(mod)}
    rewritten: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}

    # Indices of the arguments that are constants in all calls of a buffer. A step of a schedule calls the same buffer
    # as its function, and may receive a value that is a constant there.
    constant_args: dict[tvm.ir.GlobalVar, list[int]] = {}

    def find_constants(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if isinstance(call, relax.Call) and call.op in buffers:
            candidates = constant_args.get(call.op, range(len(call.args)))
            constant_args[call.op] = [i for i in candidates if is_tensor_constant(call.args[i])]
        return binding

    for _, relax_func in relax_functions(mod):
        map_bindings(relax_func, find_constants)

    def change(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if not isinstance(call, relax.Call) or call.op not in buffers:
            return binding
        indices = constant_args[call.op]
        constants = [call.args[i] for i in indices]
        func = buffers[call.op]
        kernels = global_vars_in(func.body)
        table = _table(len(constants) + len(kernels), devices[call.op.name_hint])
        tables.append(AddressTable(table, constants, [kernel.name_hint for kernel in kernels]))
        buffer = _with_table(func, indices, kernels)
        rewritten[call.op] = buffer.with_attr(TRUSTED, True) if is_trusted else buffer
        args = [table, *(arg for i, arg in enumerate(call.args) if i not in indices)]
        new = relax.Call(call.op, args, call.attrs, call.ty_args, call.span, ret_ty=call.ty)
        return relax.VarBinding(binding.var, new, binding.span)

    for gv, relax_func in relax_functions(mod):
        functions[gv] = map_bindings(relax_func, change)
    return copy_module(mod, {**functions, **rewritten}), tables


def is_llvm_buffer(func: tvm.ir.BaseFunc) -> bool:
    """Return whether a function is a command buffer of an llvm device."""
    return isinstance(func, tirx.PrimFunc) and COMMANDS in func.attrs and func.attrs["target"].kind.name == "llvm"


def with_pointer_functions(mod: tvm.IRModule, kernels: Sequence[str]) -> tuple[tvm.IRModule, dict[str, str]]:
    """Add functions of pointers for kernels to a lowered module.

    For llvm devices these are plain functions, called by address; for cuda devices packed functions that launch. Names
    of `kernels` that cannot be called with raw pointers are left out. Returns the module, and the symbol of each
    kernel's function.
    """
    functions = dict(mod.functions.items())
    names = {gv.name_hint for gv in functions}
    symbols: dict[str, str] = {}
    for gv, func in mod.functions.items():
        if gv.name_hint not in kernels or not isinstance(func, tirx.PrimFunc):
            continue
        kind, signature = func.attrs["target"].kind.name, raw_signature(func)
        if signature is None or not backend_of(kind).callable_by_hand:
            continue
        # Names of GPU kernels derive from the function's, and must be C++ identifiers.
        name = gv.name_hint if kind == "llvm" else re.sub(r"\W", "_", gv.name_hint)
        raw = fresh_global_var(f"{name}_raw", gv.ty, names)
        pointer_func = raw_kernel(func, signature)
        functions[raw] = (
            named_kernel(raw, pointer_func)
            if kind == "llvm"
            else pointer_func.with_attr("global_symbol", raw.name_hint)
        )
        symbols[gv.name_hint] = raw.name_hint
    return (copy_module(mod, functions), symbols) if symbols else (mod, symbols)


def with_address_functions(part: tvm.IRModule) -> tvm.IRModule:
    """Add a function ``relax_hetero.address.NAME`` to a module for each kernel that is called by address."""
    functions = dict(part.functions.items())
    for gv, func in part.functions.items():
        if str(func.attrs.get("global_symbol", "")) == kernel_symbol(gv.name_hint):
            name = address_function(gv.name_hint)
            functions[tvm.ir.GlobalVar(name)] = _address_function(gv.name_hint, name, func.attrs["target"])
    return copy_module(part, functions)


def named_kernel(gv: tvm.ir.GlobalVar, raw: tirx.PrimFunc) -> tirx.PrimFunc:
    """A raw kernel with a symbol, and attributes by which TVM keeps its calling convention."""
    return raw.with_attr({"global_symbol": kernel_symbol(gv.name_hint), "calling_conv": int(CallingConv.C_PACKED_FUNC)})


def named_kernels(mod: tvm.IRModule, buffers: Iterable[tirx.PrimFunc]) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    """The kernels that command buffers call, as `named_kernel` makes them."""
    called = dict.fromkeys(gv for buffer in buffers for gv in global_vars_in(buffer.body))
    return {gv: named_kernel(gv, mod[gv]) for gv in called}


def _address_function(kernel: str, name: str, target: tvm.target.Target) -> tirx.PrimFunc:
    symbol = kernel_symbol(kernel)
    getter = f"{symbol}.address"
    text = (
        f"declare i32 @{symbol}()\n"
        f"define linkonce_odr hidden i64 @{getter}() alwaysinline {{\n"
        f"  ret i64 ptrtoint (ptr @{symbol} to i64)\n}}\n"
    )
    with Function(name) as function:
        T.func_ret(tvm.ir.PrimType("int64"))
        with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
            T.add_to_parent(tirx.stmt.Return(tirx.call_extern("int64", getter)))
    return function.result.with_attr("target", target)


def _table(length: int, device: relax.VDevice) -> tvm.ir.GenericConst:
    zeros = np.zeros(max(length, 1), "int64")
    return tvm.ir.GenericConst(tvm.runtime.tensor(zeros), relax.TensorType(zeros.shape, "int64", device))


def _with_table(func: tirx.PrimFunc, constants: Sequence[int], kernels: Sequence[tvm.ir.GlobalVar]) -> tirx.PrimFunc:
    """A command buffer that reads the addresses of some parameters and of kernels from its new first parameter."""
    direct = tirx.decl_buffer((max(len(constants) + len(kernels), 1),), "int64", "direct")
    entries: dict[Any, int] = {func.params[i]: entry for entry, i in enumerate(constants)}
    entries.update({kernel: len(constants) + entry for entry, kernel in enumerate(kernels)})
    thunks: dict[str, str] = {}

    def entry(key: Any) -> tirx.Expr:
        return direct[tirx.const(entries[key], "int64")]

    def on_call(call: tvm.ir.Call) -> tvm.ir.Expr:
        if call.op in entries:
            name, text = thunk([llvm_type(arg) for arg in call.args])
            thunks[name] = text
            return tirx.call_extern("int32", name, entry(call.op), *call.args)
        is_data = isinstance(call.op, tvm.ir.Op) and call.op.name == "tirx.buffer_data"
        return tirx.reinterpret(call.ty, entry(call.args[0])) if is_data and call.args[0] in entries else call

    body = structural_map(func.body, (tvm.ir.Call, on_call))
    body = tirx.AttrStmt(tirx.const(0, "int32"), "pragma_import_llvm", "".join(thunks.values()), body)
    params = [direct, *(param for i, param in enumerate(func.params) if i not in constants)]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs, func.span)


def llvm_type(arg: tvm.ir.Expr) -> str:
    """The LLVM type of an argument."""
    return "ptr" if isinstance(arg.ty, tvm.ir.PointerType) else llvm_scalar(str(arg.ty.dtype))


def llvm_scalar(dtype: str) -> str:
    """The LLVM type of a TVM element type."""
    return _LLVM_TYPES.get(dtype) or f"i{tvm.DataType(dtype).bits}"


def kernel_symbol(kernel: str) -> str:
    """The symbol of a kernel called by address: its name, escaped to an LLVM identifier."""
    return _SYMBOL + re.sub(r"[^A-Za-z0-9_.]", lambda match: f"${ord(match[0]):x}$", kernel)


def thunk(types: Sequence[str]) -> tuple[str, str]:
    """The name and the LLVM IR of a function that calls an address, which TIR cannot express.

    `types`: LLVM types of the arguments; the address comes before them, as an i64.
    """
    name = _THUNK + ".".join(types)
    params = "".join(f", {kind} %a{i}" for i, kind in enumerate(types))
    args = ", ".join(f"{kind} %a{i}" for i, kind in enumerate(types))
    text = (
        f"define linkonce_odr hidden i32 @{name}(i64 %kernel{params}) alwaysinline {{\n"
        f"  %address = inttoptr i64 %kernel to ptr\n  %status = call i32 %address({args})\n  ret i32 %status\n}}\n"
    )
    return name, text


def with_noinline_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    """Prevent LLVM from inlining kernels into command buffers on llvm devices, in a module of PrimFuncs.

    TVM emits TBAA metadata by which LLVM assumes that two variables of a kernel never alias. That holds within a
    kernel, but not in a host function with inlined kernels, where one kernel loads what another has stored, and LLVM
    could move the load before the store. TIR cannot mark functions as noinline, so the host function calls each kernel
    through a function in LLVM IR.

    ``rh.compile`` does not need this: it compiles kernels separately from host functions.
    """
    buffers = {gv: func for gv, func in mod.functions.items() if is_llvm_buffer(func)}
    if not buffers:
        return mod
    functions = dict(mod.functions.items())
    functions.update(named_kernels(mod, buffers.values()))
    functions.update({gv: _with_trampolines(func) for gv, func in buffers.items()})
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _with_trampolines(buffer: tirx.PrimFunc) -> tirx.PrimFunc:
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
