"""Worker threads for parallel loops of llvm kernels, as code in every executable.

TVM's pool splits a loop into a task for each thread, and the caller spins until all have ended. On a busy computer it
spins for threads that are not scheduled: milliseconds for microseconds of work. Here

- the caller does tasks that their workers have not begun, so that a descheduled worker costs nothing;
- waiting threads spin for tens of microseconds, and then sleep in the kernel.

Task i belongs to worker i unless the caller takes it, so a worker finds its share of the weights in its core's cache.

TIR lacks atomics and threads, so the code is C (``workers.c``), shipped as LLVM IR (``workers.x86_64-linux.ll``,
``workers.aarch64-linux.ll``; `generate`). TVM inlines functions of LLVM IR into PrimFuncs and drops them, so functions
whose address is needed are PrimFuncs that call one.

TVM's code of a parallel loop calls a launch function through a pointer, ``__TVMBackendParallelLaunch``.
`with_launch_setters` adds a function that sets the pointer, and `vm.device.workers` calls it. Otherwise, as with plain
TVM, the code runs on TVM's pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import tvm
from tvm import tirx
from tvm.ir import CallingConv
from tvm.script.ir_builder import tirx as T
from tvm.target import codegen
from tvm_ffi import VisitInterrupt, structural_walk

from ....artifact import worker_threads as names
from ....target.backend import backend_of
from ....tir.core.builder import Function
from ..llvm_kernels import TRUSTED, build_llvm
from .generate import ARCHITECTURES, ir_path

_SHELL = "relax_hetero_workers"
_BARRIER = "pragma_parallel_barrier_when_finish"
_INT = "int64"

# Functions that C calls, with the kinds of their parameters ("p": pointer, "i": int32). They return a status.
_SHELLS = {"launch": "ppi", "work": "p", "end": "p", "stage": "ppp", "help": "pp"}
# Functions that Python calls, with their number of integer parameters. They return an integer.
_PACKED = {
    names.START: 8,
    names.CONFIGURE: 3,
    names.SPIN: 1,
    names.FORGET: 0,
    names.WIDTH: 0,
    names.LAUNCH: 0,
    names.STAGE: 0,
    names.HELP: 0,
}

Part = tuple[tvm.target.Target, tvm.IRModule]


def with_launch_setters(parts: Sequence[Part]) -> list[Part]:
    """Add a function that sets the launch pointer to modules of llvm targets with parallel loops.

    Nothing changes if a target lacks worker threads (`llvm_ir`), or if a kernel has a barrier in a parallel loop: a
    caller that does another thread's task would wait for itself.
    """
    llvm = [(target, part) for target, part in parts if target.kind.name == "llvm"]
    if any(llvm_ir(_triple(target)) is None or _any_has(part, _is_barrier) for target, part in llvm):
        return list(parts)
    changed: list[Part] = []
    number = 0
    for target, part in parts:
        if target.kind.name == "llvm" and _any_has(part, _is_parallel):
            name = names.launch_setter(number)
            part = tvm.IRModule({**dict(part.functions.items()), tvm.ir.GlobalVar(name): _setter(name, target)})
            number += 1
        changed.append((target, part))
    return changed


def worker_threads(parts: Sequence[Part], host: tvm.target.Target) -> list[tvm.runtime.Module]:
    """The compiled worker threads for modules of `with_launch_setters`; empty if no pointer is set.

    Modules of CUDA kernels get them, too, for the loop of staged copies.
    """
    first = names.launch_setter(0)
    targets = [target for target, part in parts if any(gv.name_hint == first for gv in part.get_global_vars())]
    if not targets and any(backend_of(target).needs_workers for target, _ in parts):
        targets = [host]
    return [_compile(_triple(target)) for target in targets if llvm_ir(_triple(target)) is not None]


@cache
def llvm_ir(triple: str) -> str | None:
    """The LLVM IR of the worker threads for a target; None for unsupported systems and architectures."""
    architecture, _, system = triple.partition("-")
    return ir_path(architecture).read_text() if architecture in ARCHITECTURES and "linux" in system else None


@cache  # the same for every executable
def _compile(triple: str) -> tvm.runtime.Module:
    # clang has already optimized the code; LLVM's passes would cost 40 ms.
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "opt-level": 0})
    return build_llvm(target, _module(target))


def _triple(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple") or codegen.llvm_get_system_triple())


def _module(target: tvm.target.Target) -> tvm.IRModule:
    text = llvm_ir(_triple(target))
    assert text is not None
    functions = {tvm.ir.GlobalVar(f"{_SHELL}_{name}"): _shell(name, kinds) for name, kinds in _SHELLS.items()}
    for name, count in _PACKED.items():
        with Function(name) as function:
            T.func_ret(tvm.ir.PrimType(_INT))
            params = [T.arg(f"a{i}", tirx.Var(f"a{i}", _INT)) for i in range(count)]
            with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
                T.add_to_parent(tirx.stmt.Return(tirx.call_extern(_INT, _body(name.rpartition(".")[2]), *params)))
        functions[tvm.ir.GlobalVar(name)] = function.result.with_attr(TRUSTED, True)
        text = ";"  # one import serves the whole module
    return tvm.IRModule({gv: func.with_attr("target", target) for gv, func in functions.items()})


def _shell(name: str, kinds: str) -> tirx.PrimFunc:
    """A PrimFunc, which has an address, that calls a function of the LLVM IR and fails if that does not return 0."""
    pointer = tvm.ir.PointerType(tvm.ir.PrimType("void"))
    params = [tirx.Var(f"a{i}", pointer if kind == "p" else "int32") for i, kind in enumerate(kinds)]
    status = tirx.call_extern("int32", _body(name), *params)
    fail = tirx.Evaluate(tvm.ir.Call("tirx.tvm_throw_last_error", [], ret_ty="int32"))
    body = tirx.IfThenElse(tirx.NE(status, tirx.const(0, "int32")), fail, None)
    func = tirx.PrimFunc(params, body, tvm.ir.PrimType("int32"))
    return func.with_attr({"global_symbol": f"{_SHELL}_{name}", "calling_conv": int(CallingConv.C_PACKED_FUNC)})


def _body(name: str) -> str:
    return f"{name}_body"


def _setter(name: str, target: tvm.target.Target) -> tirx.PrimFunc:
    use = f"{_SHELL}_use"
    text = (
        "@__TVMBackendParallelLaunch = external global ptr\n"
        f"define linkonce_odr hidden i64 @{use}(i64 %launch) alwaysinline {{\n"
        "  %function = inttoptr i64 %launch to ptr\n"
        "  store ptr %function, ptr @__TVMBackendParallelLaunch\n  ret i64 0\n}\n"
    )
    with Function(name) as function:
        T.func_ret(tvm.ir.PrimType(_INT))
        launch = T.arg("launch", tirx.Var("launch", _INT))
        with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
            T.add_to_parent(tirx.stmt.Return(tirx.call_extern(_INT, use, launch)))
    return function.result.with_attr("target", target)


def _any_has(part: tvm.IRModule, kind: tuple[type, object]) -> bool:
    bodies = [func.body for func in part.functions.values() if isinstance(func, tirx.PrimFunc)]
    return any(structural_walk(body, kind) is not None for body in bodies)


def _on_loop(loop: tirx.For) -> VisitInterrupt | None:
    return VisitInterrupt(loop) if loop.kind == tirx.ForKind.PARALLEL else None


def _on_attribute(statement: tirx.AttrStmt) -> VisitInterrupt | None:
    return VisitInterrupt(statement) if statement.attr_key == _BARRIER else None


_is_parallel = (tirx.For, _on_loop)
_is_barrier = (tirx.AttrStmt, _on_attribute)
