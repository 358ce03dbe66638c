"""Code generation by target, and linking with the bytecode into one executable.

TVM builds all host kernels of a module for the first target that it finds, and CUDA kernels without a target as host
code. Here kernels are grouped into modules by their own target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import _ffi_api as relax_ffi
from tvm.relax import vm_build
from tvm_ffi import VisitInterrupt, structural_map, structural_walk
from tvm_ffi.registry import list_global_func_names

from ...artifact.cache_folder import CacheFolder
from ...artifact.device_code import DeviceCode
from ...artifact.metadata import RELEASE_RESULT
from ...artifact.signature import FunctionSignature
from ...errors import BuildError
from ...system import has_symbol
from ...target.backend import CPU, LinkedCode, backend_of
from ...target.native_target import native
from ...target.vdevice import host_vdevice, vdevices_of
from ...tir.core.walks import binds_threads
from ...transform.ir.module_attrs import COMMANDS
from ...transform.ir.reasons import reason
from ...transform.ir.rewriting import copy_module, op_name, relax_functions, sequence, typed, with_body
from ...vm.device.tensors import ALIGNMENT
from .address_table import with_address_functions
from .entries import emit_entries
from .llvm_kernels import ARGUMENT_ALIGNMENT, build_llvm
from .parallel_codegen import Progress, build_in_parallel, cut
from .threads.worker_threads import with_launch_setters, worker_threads

# Tail-recursive functions become loops of the bytecode, so that the stack does not grow with the number of iterations.
#
# Before, in a lowered module::
#
#     def loop(i, n, v):
#         if less(i, n):
#             i1, v1 = step(i, v)
#             r = loop(i1, n, v1)
#         else:
#             r = v
#         return r
#
# After, the module has a function of one iteration (a trip), and the bytecode repeats it::
#
#     def loop_trip(i, n, v):
#         if less(i, n):
#             i1, v1 = step(i, v)
#             r = (1, i1, v1)     # next trip, with these instead of i and v
#         else:
#             r = (0, v)          # the loop's result
#         return r
#
#     loop: t = loop_trip(i, n, v)
#           if t[0]: i, v = t[1], t[2]; go to loop
#           return t[1]
#
# TVM's virtual machine uses a frame of the C++ stack for each call, so that some ten thousand trips would crash the
# process. Relax lacks loops, so passes before this one see an ordinary recursive function.

_CHECK_BUILTINS = ("vm.builtin.match_shape", "vm.builtin.check_tensor_info", "vm.builtin.check_tuple_info")
_STORE_TO_HEAP = 1  # code of match_shape for an extent that it stores (MatchShapeCode::kStoreToHeap in TVM's sources)


@dataclass(frozen=True)
class Loop:
    """A function that becomes a loop of the bytecode."""

    name: str  # name of the function
    trip: str  # name of the function of one trip
    params: tuple[str, ...]  # names of the parameters of both
    carried: tuple[int, ...]  # indices of the parameters that a trip updates (loop-carried values)


def with_trips(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[Loop]]:
    """Replace tail-recursive functions of a lowered module by functions of one trip; returns also their loops.

    The function of a trip has another symbol: calls of the original symbol refer to the loop, which `emit` adds to the
    bytecode.
    """
    functions, names = dict(mod.functions.items()), {gv.name_hint for gv in mod.functions}
    loops: list[Loop] = []
    for gv, func in relax_functions(mod):
        calls = list(_tail_calls(func.body, gv))
        if not calls:
            continue
        carried = tuple(
            i for i, param in enumerate(func.params) if any(not call.args[i].same_as(param) for call in calls)
        )
        name = f"{gv.name_hint}_trip"
        while name in names:
            name += "_"
        names.add(name)
        body = _TripWriter(gv, carried).rewrite(func.body, [], func.body.body)
        functions[gv] = with_body(func, body).with_attr("global_symbol", name)
        loops.append(Loop(gv.name_hint, name, tuple(param.name for param in func.params), carried))
    return (copy_module(mod, functions) if loops else mod), loops


def emit(builder: relax.ExecBuilder, loops: Sequence[Loop]) -> None:
    """Add loops to bytecode that has their trips."""
    for loop in loops:
        count = len(loop.params)
        trip, repeats, result = (count + i for i in range(3))  # registers
        params = [builder.r(i) for i in range(count)]
        with builder.function(loop.name, count, list(loop.params)):
            builder.emit_call(loop.trip, params, trip)
            builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(0)], repeats)
            # Instructions to skip on the last trip: one for each carried value, the release of the tuple, the jump.
            builder.emit_if(builder.r(repeats), len(loop.carried) + 3)
            for field, index in enumerate(loop.carried, 1):
                builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(field)], index)
            builder.emit_call("vm.builtin.null_value", [], trip)
            builder.emit_goto(-(len(loop.carried) + 4))
            builder.emit_call("vm.builtin.tuple_getitem", [builder.r(trip), builder.imm(1)], result)
            builder.emit_ret(builder.r(result))


def _emit_release(builder: relax.ExecBuilder) -> None:
    """Add a function without a result: the machine keeps the result of its last function until another one ends."""
    with builder.function(RELEASE_RESULT, 0, []):
        builder.emit_call("vm.builtin.null_value", [], 0)
        builder.emit_ret(builder.r(0))


def _tail_calls(body: relax.Expr, function: tvm.ir.GlobalVar) -> Iterator[relax.Call]:
    """The tail calls of `function` in its body, or in a branch of it."""
    last = _result_binding(body)
    if last is None:
        return
    if isinstance(last.value, relax.If):
        for branch in (last.value.true_branch, last.value.false_branch):
            yield from _tail_calls(branch, function)
    elif isinstance(last.value, relax.Call) and function.same_as(last.value.op):
        yield last.value


def _result_binding(body: relax.Expr) -> relax.Binding | None:
    """The binding of a body's result, if only checks and releases of memory follow it."""
    if not isinstance(body, relax.SeqExpr) or not isinstance(body.body, relax.Var):
        return None
    result = body.body
    for block in reversed(body.blocks):
        for binding in reversed(block.bindings):
            if binding.var.same_as(result):
                if not isinstance(binding.value, relax.Var):
                    return binding
                result = binding.value  # an alias
            elif not _may_follow_tail_call(binding.value):
                return None
    return None


def _may_follow_tail_call(value: relax.Expr) -> bool:
    """Return whether an expression only frees memory or checks types, which the last trip does for the result."""
    if op_name(value) == "relax.vm.kill_object" or isinstance(value, (relax.Var, relax.TupleGetItem)):
        return True
    if not isinstance(value, relax.Call) or not isinstance(value.op, relax.ExternFunc):
        return False
    callee = str(value.op.global_symbol)
    return callee in _CHECK_BUILTINS and not (callee == _CHECK_BUILTINS[0] and stores_extents(value))


def stores_extents(match: relax.Call) -> bool:
    """Return whether a call of match_shape (tensor, heap, rank, pairs of code and number) stores an extent."""
    rank = int(match.args[2].value)
    return any(int(code.value) == _STORE_TO_HEAP for code in match.args[3 : 3 + 2 * rank : 2])


@dataclass(frozen=True)
class _TripWriter:
    """Writes the function of one trip of a tail-recursive function."""

    function: tvm.ir.GlobalVar
    carried: tuple[int, ...]

    def rewrite(self, body: relax.Expr, rest: list[relax.Binding], result: relax.Expr) -> relax.SeqExpr:
        """Rewrite a body; `rest` has the bindings of enclosing bodies after it, `result` is the function's result."""
        assert isinstance(body, relax.SeqExpr)
        last: Any = _result_binding(body)
        bindings = [binding for block in body.blocks for binding in block.bindings]
        calls = list(_tail_calls(body, self.function))
        if calls and isinstance(last.value, relax.If):
            index = next(i for i, binding in enumerate(bindings) if binding.same_as(last))
            following = [*bindings[index + 1 :], *rest]
            branches = (
                self.rewrite(
                    branch, *_with_new_variables([relax.VarBinding(last.var, branch.body), *following], result)
                )
                for branch in (last.value.true_branch, last.value.false_branch)
            )
            output = relax.Var(last.var.name, relax.AnyType())
            conditional = typed(relax.If(last.value.cond, *branches, last.value.span), output.ty)
            return sequence([*bindings[:index], relax.VarBinding(output, conditional, last.span)], output)
        if calls:
            index = next(i for i, binding in enumerate(bindings) if binding.same_as(last))
            output = relax.Var(last.var.name, relax.AnyType())
            next_trip = relax.VarBinding(output, _tuple(1, [last.value.args[i] for i in self.carried]), last.span)
            return sequence([*bindings[:index], next_trip], output)
        output = relax.Var("result", relax.AnyType())
        return sequence([*bindings, *rest, relax.VarBinding(output, _tuple(0, [result]))], output)


def _with_new_variables(bindings: list[relax.Binding], result: relax.Expr) -> tuple[list[relax.Binding], relax.Expr]:
    """Copy bindings and a result with new variables, because bytecode has one register per variable."""
    new: dict[relax.Var, relax.Var] = {}

    def rename(expr: relax.Expr) -> relax.Expr:
        return structural_map(expr, (relax.Var, lambda var: new.get(var, var)))

    copies: list[relax.Binding] = []
    for binding in bindings:
        value = rename(binding.value)
        new[binding.var] = relax.Var(binding.var.name, binding.var.ty)
        copies.append(relax.VarBinding(new[binding.var], value, binding.span))
    return copies, rename(result)


def _tuple(repeats: int, values: list[relax.Expr]) -> relax.Call:
    make = relax.ExternFunc("vm.builtin.make_tuple")
    return relax.Call(make, [relax.prim_value(repeats), *values], None, [relax.AnyType()], ret_ty=relax.AnyType())


_EXTERNAL_CALLS = ("tirx.call_extern", "tirx.call_pure_extern")


@dataclass(frozen=True)
class Linked:
    """Compiled code."""

    module: tvm.runtime.Module  # module of kind ``relax.VMExecutable``
    # Machine code, by `vm.file.cuda_modules.source_key`, of CUDA kernels that the module contains as source because
    # TVM's CUDA runtime is absent.
    machine_code: dict[str, bytes]
    device_code: tuple[DeviceCode, ...]  # kernels that back ends build when a machine is made


def link(
    # Lowered module (LowerToVM) with lifted constants and bodies (`entries`); PrimFuncs without a target compute shapes
    # on the host.
    mod: tvm.IRModule,
    signatures: Mapping[str, FunctionSignature],  # functions that users call, by name
    progress: Progress | None = None,  # function that gets the number of compiled kernels
    folder: CacheFolder | None = None,  # folder of the compile cache, which also stores machine code of CUDA kernels
) -> Linked:
    """Compile and link a lowered module without constants.

    Raises BuildError if a kernel does not compile, is written for another kind of device or calls an undefined symbol,
    TVM lacks a code generator for its target, or there is no CUDA compiler.
    """
    host = host_vdevice(vdevices_of(mod))
    host_target = host.target if host is not None else any_host()
    external = external_modules(mod)
    builder = relax.ExecBuilder()
    try:
        mod, loops = with_trips(mod)
        prim_funcs = vm_build._vmcodegen(builder, mod)
        emit(builder, loops)
        _emit_release(builder)
        emit_entries(builder, signatures, len(vdevices_of(mod)) + (host is None))
    except Exception as error:  # TVM's exceptions here have no common class
        raise BuildError(f"no bytecode can be made of this module: {reason(error)}") from error
    groups = group_by_target(prim_funcs, host_target)
    for target, group in groups:
        if target.kind.name == "llvm" and not external:
            check_external_symbols(group)
    units = [(target, with_address_functions(unit)) for target, group in groups for unit in cut(target, group)]
    if not external:  # external code runs on TVM's threads, which would compete with workers
        units = with_launch_setters(units)
    built = build_in_parallel(units, lambda target, unit: _check_and_build(target, unit, host_target), progress)
    code = _link_by_backend([target for target, _ in units], built, progress, folder)
    libraries = code.modules + worker_threads(units, host_target)
    if not libraries and not external and host_target.kind.name == "llvm":
        # Otherwise TVM adds an empty C module, which needs a C compiler to link.
        libraries = [build_llvm(host_target, tvm.IRModule())]
    main_library = libraries[0] if libraries else None
    module = relax_ffi.VMLink(builder, host_target, main_library, libraries[1:] + external, {})
    return Linked(module, code.machine_code, code.device_code)


def any_host() -> tvm.target.Target:
    """The target of host code in an executable without a CPU device: any CPU of this architecture.

    The file may run on other computers, and its manifest lists no CPU features that loading could check.
    """
    return tvm.target.Target({"kind": "llvm", "mtriple": str(native("llvm").attrs["mtriple"])})


def _link_by_backend(
    targets: Sequence[tvm.target.Target],
    built: Sequence[Any],
    progress: Progress | None = None,
    folder: CacheFolder | None = None,
) -> LinkedCode:
    """Link built modules with the back ends of their targets (`Backend.link`)."""
    modules, machine_code, device_code = list(built), dict[str, bytes](), dict[DeviceCode, None]()
    kinds = [target.kind.name for target in targets]
    for kind in dict.fromkeys(kinds):
        indices = [index for index, other in enumerate(kinds) if other == kind]
        linked = backend_of(kind).link([built[index] for index in indices], progress, folder)
        for index, module in zip(indices, linked.modules, strict=True):
            modules[index] = module
        machine_code.update(linked.machine_code)
        device_code.update(dict.fromkeys(linked.device_code))
    return LinkedCode(modules, machine_code, tuple(device_code))


def external_modules(mod: tvm.IRModule) -> list[tvm.runtime.Module]:
    """Compiled modules in a module's attributes (``external_mods``)."""
    return list(mod.attrs["external_mods"]) if mod.attrs and "external_mods" in mod.attrs else []


def argument_alignment(mod: tvm.IRModule) -> int:
    """The alignment in bytes that linked code requires of a host tensor's address."""
    return ALIGNMENT if external_modules(mod) else ARGUMENT_ALIGNMENT


def check_external_symbols(mod: tvm.IRModule) -> None:
    """Require that the module or this process defines all symbols that the module's CPU kernels call.

    LLVM's JIT aborts the process when a kernel calls an undefined symbol. Kernels that import code
    (``pragma_import_llvm``) are not checked. Raises BuildError for an undefined symbol; the message names the kernel.
    """
    for kernel, symbols in external_calls(mod).items():
        for symbol in symbols:
            if not has_symbol(symbol):
                raise BuildError(
                    f"kernel {kernel!r} calls the external function {symbol!r}, which this process does not "
                    "have: expected its library loaded first, with ctypes.CDLL(path, ctypes.RTLD_GLOBAL)"
                )


def external_calls(mod: tvm.IRModule) -> dict[str, list[str]]:
    """The symbols that each kernel of a module calls and the module lacks, by kernel in order of names."""
    kernels = [(gv, func) for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)]
    defined = {str(func.attrs["global_symbol"]) for _, func in kernels if "global_symbol" in func.attrs}
    return {
        gv.name_hint: [symbol for symbol in _external_symbols(func) if symbol not in defined]
        for gv, func in sorted(kernels, key=lambda pair: pair[0].name_hint)
    }


def _external_symbols(func: tirx.PrimFunc) -> list[str]:
    symbols: list[str] = []
    imports: list[str] = []

    def on_call(call: tvm.ir.Call) -> None:
        if isinstance(call.op, tvm.ir.Op) and call.op.name in _EXTERNAL_CALLS:
            symbols.append(str(call.args[0].value))

    def on_attribute(statement: tirx.AttrStmt) -> None:
        if statement.attr_key.startswith("pragma_import"):
            imports.append(statement.attr_key)

    structural_walk(func.body, [(tvm.ir.Call, on_call), (tirx.AttrStmt, on_attribute)])
    return [] if imports else symbols


def group_by_target(mod: tvm.IRModule, host: tvm.target.Target) -> list[tuple[tvm.target.Target, tvm.IRModule]]:
    """Split a module's PrimFuncs into a module for each target, in order of the targets' text."""
    groups: dict[str, tuple[tvm.target.Target, dict[tvm.ir.GlobalVar, tirx.PrimFunc]]] = {}
    for gv, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc):
            target = func.attrs.get("target") or host
            groups.setdefault(str(target), (target, {}))[1][gv] = func
    return [(target, tvm.IRModule(functions)) for _, (target, functions) in sorted(groups.items())]


def build_group(target: tvm.target.Target, group: tvm.IRModule, host: tvm.target.Target) -> tvm.runtime.Module:
    """Compile and link kernels of one target; the BuildError names the first that does not compile."""
    return _link_by_backend([target], [_check_and_build(target, group, host)]).modules[0]


def _check_and_build(target: tvm.target.Target, group: tvm.IRModule, host: tvm.target.Target) -> Any:
    """Check and compile kernels of one target (`Backend.build`)."""
    kind = target.kind.name
    if not backend_of(target).can_build():
        names = ", ".join(sorted(gv.name_hint for gv in group.get_global_vars())[:3])
        raise BuildError(
            f"kernels for target kind {kind!r} ({names}, ...) cannot be built: this TVM has no code generator for it; "
            f"expected one of {', '.join(_code_generators())}"
        )
    for gv, func in group.functions.items():
        if "global_symbol" in func.attrs and not runs_commands(func) and binds_threads(func) != ("gpu" in target.keys):
            fault = "binds GPU threads" if binds_threads(func) else "binds no GPU threads, so it would run on the host"
            raise BuildError(f"kernel {gv.name_hint!r} for target kind {kind!r} {fault}")
    try:
        return _build(target, group, host)
    except Exception as error:  # TVM's exceptions here have no common class
        raise _kernel_error(target, group, host, error) from error


def runs_commands(func: tirx.PrimFunc) -> bool:
    """Return whether a function is host code for a device: a command buffer, or a function that calls others."""
    on_global = (tvm.ir.GlobalVar, VisitInterrupt)
    return COMMANDS in func.attrs or structural_walk(func.body, on_global) is not None


def _build(target: tvm.target.Target, group: tvm.IRModule, host: tvm.target.Target) -> Any:
    backend = backend_of(target)
    if target.host is None:
        target = target.with_host(target if backend.device_type == CPU else host)
    return backend.build(group, target)


def _code_generators() -> list[str]:
    prefix = "target.build."
    return sorted(n[len(prefix) :] for n in list_global_func_names() if n.startswith(prefix))


def _kernel_error(
    target: tvm.target.Target, group: tvm.IRModule, host: tvm.target.Target, error: Exception
) -> BuildError:
    for gv, func in sorted(group.functions.items(), key=lambda pair: pair[0].name_hint):
        if runs_commands(func):
            continue  # its callees would be missing
        public = func.with_attr("global_symbol", gv.name_hint)
        try:
            _build(target, tvm.IRModule({gv: public}), host)
        except Exception as kernel_error:  # the same errors as above
            return BuildError(f"kernel {gv.name_hint!r} does not compile for target {target}: {reason(kernel_error)}")
    return BuildError(f"kernels {sorted(g.name_hint for g in group.get_global_vars())} for {target}: {error}")
