"""The worker threads that parallel loops of llvm kernels run on, as code that every executable brings along.

TVM's pool cuts a loop into a task for each thread, and the caller spins until all have ended. Beside other busy
processes it spins for threads that the scheduler has put away: milliseconds for microseconds of work. Here

- a task that its worker has not begun is done by the caller, so that a worker that does not run costs nothing;
- whoever waits spins for tens of microseconds, then sleeps in the kernel.

Task i is always worker i's, unless the caller takes it: a worker finds its part of the weights in its core's cache.

TIR has no atomics and no threads: the code is C (``workers.c``), shipped as the LLVM IR that clang made of it
(``workers.x86_64-linux.ll``, ``workers.aarch64-linux.ll``; `generate`). TVM inlines functions of LLVM IR into PrimFuncs
and drops them, so the functions that are needed by their address are PrimFuncs which call one.

TVM's code of a parallel loop calls a launch function through a pointer, ``__TVMBackendParallelLaunch``, that TVM sets.
`with_launch_setters` adds a function that sets it to the launch function here, and `vm.device.workers` calls it; where
nobody does, as with TVM's runtime alone, a library runs on TVM's pool.
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

# Functions that C calls: the kinds of their parameters, "p" for a pointer. They return a status.
_SHELLS = {"launch": "ppi", "work": "p", "end": "p", "stage": "ppp", "help": "pp"}
# Functions that Python calls: how many numbers they take. They return a number.
_PACKED = {
    names.START: 7,
    names.CONFIGURE: 2,
    names.SPIN: 1,
    names.FORGET: 0,
    names.WIDTH: 0,
    names.LAUNCH: 0,
    names.STAGE: 0,
    names.HELP: 0,
}

Part = tuple[tvm.target.Target, tvm.IRModule]


def with_launch_setters(parts: Sequence[Part]) -> list[Part]:
    """Modules to be compiled, those of llvm targets that have parallel loops with a function that sets their pointer.

    All stay as they are if a target has no threads here (`llvm_ir`), or a kernel waits for all threads within its
    loop: a caller that has taken over another's task would wait for itself.
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
    """The compiled code of the threads for modules that `with_launch_setters` gave; none where nothing is set.

    Modules of CUDA kernels have it too: copies between a GPU and the host are in it.
    """
    first = names.launch_setter(0)
    targets = [target for target, part in parts if any(gv.name_hint == first for gv in part.get_global_vars())]
    if not targets and any(backend_of(target).needs_workers for target, _ in parts):
        targets = [host]
    return [_compiled(_triple(target)) for target in targets if llvm_ir(_triple(target)) is not None]


@cache
def llvm_ir(triple: str) -> str | None:
    """The LLVM IR of the threads for a target; None for other operating systems and processors than it was made for."""
    architecture, _, system = triple.partition("-")
    return ir_path(architecture).read_text() if architecture in ARCHITECTURES and "linux" in system else None


@cache  # it is the same for every executable
def _compiled(triple: str) -> tvm.runtime.Module:
    # clang has optimized the code; passes over it would cost 40 ms.
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "opt-level": 0})
    return build_llvm(target, _module(target))


def _triple(target: tvm.target.Target) -> str:
    return str(target.attrs.get("mtriple") or codegen.llvm_get_system_triple())


def _module(target: tvm.target.Target) -> tvm.IRModule:
    text = llvm_ir(_triple(target))
    assert text is not None
    functions = {}
    for name, kinds in _SHELLS.items():
        functions[tvm.ir.GlobalVar(f"{_SHELL}_{name}")] = _shell(name, kinds)
    for name, count in _PACKED.items():
        with Function(name) as function:
            T.func_ret(tvm.ir.PrimType(_INT))
            params = [T.arg(f"a{i}", tirx.Var(f"a{i}", _INT)) for i in range(count)]
            with T.attr(tirx.const(0, "int32"), "pragma_import_llvm", text):
                T.add_to_parent(tirx.stmt.Return(tirx.call_extern(_INT, _body(name.rpartition(".")[2]), *params)))
        functions[tvm.ir.GlobalVar(name)] = function.result.with_attr(TRUSTED, True)
        text = ";"  # once is enough: the whole module sees it
    return tvm.IRModule({gv: func.with_attr("target", target) for gv, func in functions.items()})


def _shell(name: str, kinds: str) -> tirx.PrimFunc:
    """A function that has an address: it calls one of the LLVM IR, and fails where that returns no 0."""
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
