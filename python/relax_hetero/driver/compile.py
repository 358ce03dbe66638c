"""`rh.compile` and `rh.get_pipeline`: checks of modules, the passes, linking, and versions for optional devices.

`compile` checks its arguments and asks the cache. `_compile` runs the passes, which `transform.pipeline` lists, and
then links. Three of the passes make functions: MaterializeEncodings asks the device's resolver for kernels of matrix
products, convolutions, row-wise ops and attention, FormDispatches has TVM legalize and fuse all other ops, and
FormCommandBuffers writes functions that call consecutive kernels. `memory_plan_of` plans memory for `explain`, without
linking.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import BaseCheckResult, type_base_check

from ..artifact.cache_folder import CacheFolder
from ..artifact.collectives import check_strategy
from ..artifact.file_hints import describe_value
from ..artifact.memory_plan import MemoryPlan
from ..artifact.messages import near_misses
from ..artifact.metadata import DeviceSpec, DispatchSpec, Metadata
from ..errors import BuildError, VDeviceError
from ..garbage_collection import paused_garbage_collection
from ..target.hosts import hosts_of, is_native
from ..target.native_target import native
from ..target.vdevice import (
    VDevice,
    VDeviceSpec,
    device_name,
    host_vdevice,
    is_cpu,
    lookup,
    vdevice_index,
    vdevices_of,
    with_vdevices,
)
from ..tir.cuda.all_reduce import ALL_REDUCE
from ..tir.cuda.nccl_kernels import AFTER_NCCL
from ..transform.dispatch.legalize import is_kept
from ..transform.encode.accuracies import with_accuracy
from ..transform.ir.kernels import bytes_of, call_vdevice, called_prim_func, operations_of, ops_of, precision_of
from ..transform.ir.module_attrs import COMMANDS, STRICT, is_lowered
from ..transform.ir.nesting import check_nesting
from ..transform.ir.op_names import CALL_TIR_INPLACE, CALL_TIR_OPS
from ..transform.ir.reasons import reason
from ..transform.ir.remarks import operand_text, remarks_of, type_text
from ..transform.ir.requirements import text_of
from ..transform.ir.rewriting import op_name, relax_functions, tensor_types, walk_bindings, with_distinct_sizes
from ..transform.lower.annotate_memory import memory_of
from ..transform.lower.lower_to_vm import LowerToVM
from ..transform.partition.form_schedules import schedules_of
from ..transform.pipeline import PipelineStep, pipeline_steps
from ..transform.placement.realize_vdevice import realize_targets
from ..transform.placement.update_vdevice import succeed_vdevices
from ..transform.record.donated import with_donated
from ..transform.record.region_attrs import kernels_of
from ..transform.shard.exchange_by_nccl import collectives_of, exchange_by_nccl
from ..transform.shard.partition_by_mesh import partition_by_mesh
from ..vm.file.executable import Executable
from . import guard_tvm_compile
from .bind_params import bind_params
from .commands.command_metadata import (
    graph_tables,
    linked_regions,
    region_dispatches,
    regions_as_linked,
    with_public_kernels,
)
from .compile_cache import load_or_build
from .link.address_table import by_address
from .link.entries import with_bodies
from .link.lift_constants import lift_constants
from .link.link import argument_alignment, link
from .link.parallel_codegen import Progress
from .link.repeated_calls import with_repeated_calls
from .signatures import function_signatures

# Versions of a module for computers that lack optional devices.
#
# Optional devices are listed by importance; each version omits one more of them, starting with the least important. The
# work of an omitted device moves to the module's host, its last CPU device, or to this CPU if the module lacks one.
# Each version is compiled separately, so that its layouts and kernels suit its devices.


def optional_indices(mod: tvm.IRModule, optional: VDeviceSpec | Iterable[VDeviceSpec] | None) -> tuple[int, ...]:
    """Indices of the optional devices in the module's list.

    Raises VDeviceError for a device that the module lacks, a repeated one, or a CPU, and BuildError if the module is
    lowered, and refers to devices in code.
    """
    if optional is None:
        return ()
    specs = list(optional) if isinstance(optional, Iterable) and not isinstance(optional, str) else [optional]
    vdevices = vdevices_of(mod)
    indices: list[int] = []
    for spec in specs:
        try:
            vdevice = lookup(spec, vdevices)  # type: ignore[arg-type]
        except VDeviceError as error:
            raise VDeviceError(f"rh.compile: optional: {error}") from error
        name, index = device_name(vdevice, vdevices), vdevice_index(vdevice, vdevices)
        if is_cpu(vdevice):
            raise VDeviceError(f"rh.compile: optional: {name} is a CPU, which every machine has; expected a GPU")
        if index in indices:
            raise VDeviceError(f"rh.compile: optional: {name} is given twice")
        indices.append(index)
    marks = (ALL_REDUCE, AFTER_NCCL)
    if indices and any(mark in (func.attrs or {}) for func in mod.functions.values() for mark in marks):
        raise BuildError(
            "rh.compile: optional: the module has a mesh of GPUs, whose kernels wait for each other; expected none"
        )
    if indices and is_lowered(mod):
        raise BuildError("rh.compile: optional devices need a module before LowerToVM, found one that is lowered")
    return tuple(indices)


def without_devices(mod: tvm.IRModule, omitted: Sequence[int]) -> tvm.IRModule:
    """Move the work of some devices to the fallback device.

    `omitted`: indices of these devices in the module's list.
    """
    vdevices = vdevices_of(mod)
    remaining = [vdevice for index, vdevice in enumerate(vdevices) if index not in omitted]
    fallback = host_vdevice(remaining)
    if fallback is None:
        fallback = VDevice(native("llvm"))
        remaining.append(fallback)
    successors = [fallback if index in omitted else vdevice for index, vdevice in enumerate(vdevices)]
    return succeed_vdevices(mod, successors, remaining)


# Checks of a module before its passes run, so that errors refer to the module's own names.
#
# TVM infers types while a module is built, but a module that was written by hand, changed by other passes or read from
# a file may be inconsistent, and passes would fail later with messages about intermediate code. The checks infer the
# result type of each op again, and compare calls of functions and kernels with the callees' parameters.


def check_module(mod: tvm.IRModule) -> None:
    """Refuse a module that cannot be compiled.

    Raises BuildError if the module is invalid; the message names the function, the op and the variable.
    """
    functions = relax_functions(mod)
    if not any(func.attrs and "global_symbol" in func.attrs for func in mod.functions.values()):
        raise BuildError(_no_functions_message(mod))
    names = [str(gv.name_hint) for gv in mod.get_global_vars()]
    for gv, func in functions:
        for callee in relax.analysis.all_global_vars(func):
            if callee not in mod.functions:
                hint = near_misses(callee.name_hint, names)
                raise BuildError(
                    f"function {gv.name_hint!r} refers to {callee.name_hint!r}, which the module lacks{hint}"
                )
        if not is_lowered(mod):
            _FunctionChecker(mod, gv.name_hint).check(func)


def _no_functions_message(mod: tvm.IRModule) -> str:
    functions = sorted(f"{type(func).__name__} {gv.name_hint!r}" for gv, func in mod.functions.items())
    return (
        f"rh.compile: the module has no function that could be called (found {', '.join(functions[:6]) or 'nothing'}); "
        "expected one with the attribute global_symbol, as func.with_attr('global_symbol', 'main') gives it"
    )


class _FunctionChecker:
    """Checks one function."""

    def __init__(self, mod: tvm.IRModule, name: str) -> None:
        self._mod, self._name = mod, name
        self._builder = relax.BlockBuilder()

    def check(self, func: relax.Function) -> None:
        """Check symbolic sizes, bindings and the result; BuildError for the first error."""
        free = relax.analysis.free_symbolic_vars(func)
        if free:
            names = ", ".join(sorted({repr(str(var.name)) for var in free}))
            raise BuildError(
                f"function {self._name!r}: the symbolic size{'s' * (len(free) > 1)} {names} is given by no argument; "
                "expected each as an extent of a parameter, or defined by R.match_cast"
            )
        bound: set[relax.Var] = set()
        for binding in walk_bindings(func):
            if binding.var in bound:
                raise self._error(binding, "is bound a second time; expected one binding for each variable")
            bound.add(binding.var)
            if isinstance(binding, relax.VarBinding):
                self._check_binding(binding)
        result = func.body.body.ty
        if self._is_incompatible(func.ret_ty, result):
            declared, given = self._type_texts(func.ret_ty, result)
            raise BuildError(f"function {self._name!r} is declared to return {declared}, and its body gives {given}")

    def _check_binding(self, binding: relax.VarBinding) -> None:
        value, ty = binding.value, None
        if isinstance(value, relax.If):
            self._check_if(binding, value)
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            ty = self._check_call(binding, value)
        elif op_name(value) in CALL_TIR_OPS:
            self._check_kernel(binding, value)
            ty = value.ty_args[0]
        elif op_name(value) is not None:
            ty = self._infer(binding, value)
        name = op_name(value)
        if isinstance(ty, relax.TensorType) and ty.dtype is None and name is not None and not is_kept(name):
            raise self._error(binding, "lacks a known element type; expected R.match_cast to one before")
        if ty is not None and self._is_incompatible(binding.var.ty, ty):
            declared, given = self._type_texts(binding.var.ty, ty)
            raise self._error(binding, f"is declared as {declared}, and its value is {given}")

    def _infer(self, binding: relax.VarBinding, call: relax.Call) -> tvm.ir.Type | None:
        infer = call.op.get_attr("FInferType")
        if infer is None:
            return None
        try:
            return infer(call, self._builder)
        except Exception:  # perhaps a conflict of devices, which placement reports better: infer without devices
            args = [_without_devices(arg) for arg in call.args]
        try:
            return infer(relax.Call(call.op, args, call.attrs, call.ty_args, call.span), self._builder)
        except Exception as error:
            raise self._error(binding, f"cannot be computed: {reason(error)}") from error

    def _check_if(self, binding: relax.VarBinding, value: relax.If) -> None:
        ty = value.cond.ty
        is_scalar = isinstance(ty, relax.TensorType) and ty.ndim <= 0 and ty.dtype in (None, "bool")
        if not is_scalar and not (isinstance(ty, tvm.ir.PrimType) and str(ty.dtype) == "bool"):
            raise self._error(binding, f"branches on {operand_text(value.cond)}; expected bool[]")
        for name, branch in (("then", value.true_branch), ("else", value.false_branch)):
            result = branch.body.ty
            if self._is_incompatible(binding.var.ty, result):
                raise self._error(
                    binding,
                    f"is declared as {type_text(binding.var.ty)}, and its {name} branch gives {type_text(result)}",
                )

    def _check_call(self, binding: relax.VarBinding, call: relax.Call) -> tvm.ir.Type | None:
        callee, name = self._mod[call.op], call.op.name_hint
        if isinstance(callee, tirx.PrimFunc) and type(call.op.ty) is tvm.ir.Type:
            what = f"calls the kernel {name!r}, whose variable has no type"
            raise self._error(binding, f"{what}; expected R.call_tir({name}, (...), out_ty=...)")
        if not isinstance(callee, relax.Function):
            return None
        if len(call.args) != len(callee.params):
            raise self._error(
                binding, f"gives function {name!r} {len(call.args)} arguments, and it takes {len(callee.params)}"
            )
        for arg, param in zip(call.args, callee.params, strict=True):
            if self._is_incompatible(param.ty, arg.ty):
                raise self._error(
                    binding,
                    f"gives {operand_text(arg)} for parameter {param.name!r} of function {name!r}, which takes "
                    f"{type_text(param.ty)}",
                )
        return callee.ret_ty

    def _check_kernel(self, binding: relax.VarBinding, call: relax.Call) -> None:
        """Compare the operands and results of a call with the buffers of its kernel."""
        kernel = self._mod[call.args[0]] if isinstance(call.args[0], tvm.ir.GlobalVar) else None
        name = operand_text(call.args[0])
        if isinstance(kernel, relax.Function):
            raise self._error(binding, f"calls {name} with call_tir, but it is a Relax function; expected a PrimFunc")
        if not isinstance(kernel, tirx.PrimFunc) or not isinstance(call.args[1], relax.Tuple):
            return
        operands = list(call.args[1].fields)
        results = list(tensor_types(call.ty_args[0]))
        if op_name(call) == CALL_TIR_INPLACE:
            results = [ty for ty, i in zip(results, call.attrs.inplace_indices, strict=False) if int(i) < 0]
        arguments = [(operand_text(arg), arg.ty) for arg in operands]
        arguments += [(f"result {number}: {type_text(ty)}", ty) for number, ty in enumerate(results)]
        num_sizes = len(call.args[2].values) if len(call.args) > 2 and isinstance(call.args[2], relax.ShapeExpr) else 0
        if len(arguments) + num_sizes != len(kernel.params):
            raise self._error(
                binding,
                f"gives kernel {name} {len(operands)} operands, {len(results)} results and {num_sizes} sizes, and it "
                f"takes {len(kernel.params)} parameters",
            )
        for (text, ty), buffer in zip(arguments, kernel.params, strict=False):
            if isinstance(buffer, tirx.Buffer) and isinstance(ty, relax.TensorType) and not _matches_buffer(ty, buffer):
                extents = ", ".join(map(text_of, buffer.shape))
                raise self._error(
                    binding, f"gives kernel {name} {text} for its buffer {buffer.name!r}, {buffer.dtype}[{extents}]"
                )

    @staticmethod
    def _is_incompatible(declared: tvm.ir.Type, value: tvm.ir.Type) -> bool:
        """Return whether no value can be of both types."""
        if tvm.ir.Type in (type(declared), type(value)):  # not inferred yet
            return False
        return bool(type_base_check(declared, value) == BaseCheckResult.FAIL_L0)

    def _type_texts(self, *types: tvm.ir.Type) -> list[str]:
        """Texts of types, with their devices if these alone differ."""
        texts, vdevices = [type_text(ty) for ty in types], vdevices_of(self._mod)
        if len(set(texts)) == len(texts):
            return texts
        placed = [getattr(ty, "vdevice", None) for ty in types]
        names = ["any device" if each is None else device_name(each, vdevices) for each in placed]
        return [f"{text} on {name}" for text, name in zip(texts, names, strict=True)]

    def _error(self, binding: relax.Binding, what: str) -> BuildError:
        value = binding.value
        op = op_name(value) or ("call" if isinstance(value, relax.Call) else type(value).__name__)
        operands = ""
        if isinstance(value, relax.Call) and op not in CALL_TIR_OPS and not isinstance(value.op, tvm.ir.GlobalVar):
            operands = f" of {', '.join(map(operand_text, value.args))}" if value.args else ""
        return BuildError(f"function {self._name!r}: {op} {binding.var.name!r}{operands} {what}")


def _matches_buffer(ty: relax.TensorType, buffer: tirx.Buffer) -> bool:
    """Return whether a tensor has the element type, rank and known extents of a buffer."""
    if ty.dtype is not None and str(ty.dtype) != str(buffer.dtype):
        return False
    if ty.ndim >= 0 and ty.ndim != len(buffer.shape):
        return False
    if not isinstance(ty.shape, relax.ShapeExpr):
        return True
    pairs = zip(ty.shape.values, buffer.shape, strict=True)
    constants = [(int(a), int(b)) for a, b in pairs if isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm)]
    return all(a == b for a, b in constants)


def _without_devices(arg: relax.Expr) -> relax.Expr:
    """A variable with the type of an operand except for the device; other expressions as they are."""
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_without_devices(field) for field in arg.fields])
    if isinstance(arg, (relax.Var, tvm.ir.GenericConst)) and isinstance(arg.ty, relax.TensorType):
        ty = relax.TensorType(arg.ty.shape, arg.ty.dtype, None, arg.ty.ndim if arg.ty.shape is None else -1)
        return relax.Var(arg.name if isinstance(arg, relax.Var) else "constant", ty)
    return arg


_log = logging.getLogger("relax_hetero")

CHECKS = ("default", "strict")  # levels of run-time checks; see `compile`


@paused_garbage_collection()
def compile(  # noqa: A001 (the contract's name)
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    command_buffers: bool = True,
    donate: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    cache: bool | str | os.PathLike[str] | None = None,
    checks: str = "default",
    optional: VDeviceSpec | Iterable[VDeviceSpec] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    allreduce_strategy: str = "auto",
) -> Executable:
    """Compile a Relax module for the devices it names.

    Parameters
    ----------
    mod : tvm.IRModule
        Module at any stage: free, annotated, placed or lowered. Without vdevices it is compiled for the native CPU.
    params : mapping of str to tensor, optional
        Weights by parameter name, bound as constants in every function with such a parameter, and stored once. Unbound
        parameters after a function's ``num_input`` are set later with ``VirtualMachine.set_params``.
    progress : callable, optional
        Called in this thread as ``progress(stage, done, total)``, where `stage` is ``"passes"``, then ``"kernels"``,
        and then ``"CUDA kernels"`` if there are any.
    command_buffers : bool
        Whether consecutive kernels on one device become command buffers, which cost less than a call for each kernel.
    donate : sequence of str, or mapping from function to sequence of str, optional
        Inputs that a function (by default ``main``) may overwrite, so that results can use their memory. Calls consume
        these arguments; other arguments are never written.
    cache : bool, str or path, optional
        On-disk cache of executables: a folder, True for the folder of the environment (``RELAX_HETERO_CACHE``, else the
        user's cache folder), False for none. By default the folder of the environment, for modules that take a second
        or more to compile.
    checks : str
        ``"default"``: out-of-range indices and integer divisions by 0 are errors on CPUs; on GPUs indices are clamped
        and a quotient by 0 is 0. ``"strict"``: they are errors on every device; a GPU's errors are raised by a fence's
        ``result``, or when the host next reads a tensor from that GPU.
    optional : str, VDevice, or sequence of them, optional
        Devices that a computer may lack, the most important first (``"cuda:0"``). If one is absent when the virtual
        machine is made, its work and the work of the devices after it runs on the module's last CPU device, or on this
        CPU if the module lacks one. The executable contains a version for each case, with layouts for its devices.
    accuracy : str, or mapping from names to str, optional
        Accuracy of float32 convolutions on CPUs. ``"default"``: 3x3 convolutions of stride 1 may use Winograd's
        F(2x2, 3x3) if that is faster, with errors no larger than the direct method's, and weights of 16/9 of the size.
        ``"exact"``: no Winograd. ``"fast"``: also F(4x4, 3x3), with about twice the error, and weights of four times
        the size. A mapping has patterns of the convolutions' variables, as ``explain`` shows them; the last match
        counts: ``{"*": "fast", "head_*": "exact"}``.
    allreduce_strategy : str, optional
        Sums over GPUs of a mesh, as in TensorRT-LLM. ``"custom"``: kernels that write to the memory of other GPUs.
        ``"nccl"``: NCCL, within the same CUDA graphs. ``"auto"``: NCCL if GPUs of this machine do not reach each
        other's memory.

    Returns
    -------
    rh.vm.Executable
        Executable, whose ``metadata.cache`` tells whether it came from the cache.

    Raises
    ------
    HeteroError
        An unknown value of `checks`, `accuracy` or `allreduce_strategy`, or a pattern of `accuracy` without a match;
        `optional` devices that are CPUs or not in the module; placement conflicts, ops without kernels, kernels that do
        not compile, unknown parameter names, inputs that cannot be donated; constant indices and divisors that are
        invalid.
    """
    mod = prepare_module(mod, params, donate, checks, accuracy, "rh.compile", allreduce_strategy)
    _check_one_host(mod)
    indices = optional_indices(mod, optional)

    def compile_version(version: tvm.IRModule) -> Executable:
        return load_or_build(
            version, cache, command_buffers, lambda folder: _compile(version, command_buffers, progress, folder)
        )

    executable = compile_version(mod)
    if indices:
        executable.metadata = replace(executable.metadata, optional=indices)
        executable.versions = tuple(
            compile_version(without_devices(mod, indices[first:])) for first in reversed(range(len(indices)))
        )
    return executable


def prepare_module(
    mod: tvm.IRModule,
    params: Mapping[str, Any] | None,
    donate: Sequence[str] | Mapping[str, Sequence[str]] | None,
    checks: str,
    accuracy: str | Mapping[str, str],
    caller: str,
    allreduce_strategy: str = "auto",
) -> tvm.IRModule:
    """Check a module, bind its weights, and store options of `compile` as attributes.

    Raises the errors of `compile`; messages begin with `caller`.
    """
    if not isinstance(mod, tvm.IRModule):
        raise BuildError(f"{caller}: {describe_value(mod, caller)}; expected a tvm.IRModule")
    if checks not in CHECKS:
        raise BuildError(f"{caller}: checks is {checks!r}, expected one of {', '.join(map(repr, CHECKS))}")
    check_strategy(allreduce_strategy, caller)
    check_nesting(mod)
    check_module(mod)
    mod = exchange_by_nccl(partition_by_mesh(mod), allreduce_strategy)
    mod = realize_targets(mod) if vdevices_of(mod) else with_vdevices(mod, [VDevice(native("llvm"))])
    if params is not None:
        mod = bind_params(mod, params)
    if donate:
        mod = with_donated(mod, donate)
    if checks == "strict":
        mod = mod.with_attr(STRICT, True)
    mod = with_distinct_sizes(with_accuracy(mod, accuracy, caller))
    _warn_if_generic(vdevices_of(mod))
    return mod


def _check_one_host(mod: tvm.IRModule) -> None:
    hosts = hosts_of(vdevices_of(mod))
    if hosts:
        raise BuildError(
            f"rh.compile: the module's vdevices are on hosts ({', '.join(map(repr, hosts))}), expected none: "
            "run the module with rh.cluster.Cluster, or replace these vdevices with rh.transform.UpdateVDevice"
        )


def _compile(
    mod: tvm.IRModule, command_buffers: bool, progress: Progress | None, folder: CacheFolder | None
) -> Executable:
    vdevices = vdevices_of(mod)
    writes, collectives = may_write_arguments(mod), collectives_of(mod)
    # Passes lower ops to calls of kernels, and then to calls of the virtual machine.
    mod = run_steps(mod, pipeline_steps(command_buffers), progress)
    remarks = remarks_of(mod)
    reports = remarks.to_data()
    devices = tuple(device_spec(vdevice, default=i == 0) for i, vdevice in enumerate(vdevices))
    # Command buffers recorded by hand can call public kernels, by address.
    mod, kernels = with_public_kernels(mod, devices)
    # Constants of CUDA graphs leave their functions: the virtual machine passes them when it captures a graph.
    mod, graphs = graph_tables(mod)
    # Command buffers on CPUs read addresses of constants and kernels from a table that the virtual machine fills.
    mod, tables = by_address(mod)
    # Other constants leave the code: a tuple of tensors on the devices that use them.
    lifted = lift_constants(mod, [*tables, *graphs])
    # Repeated calls with the same shapes get an entry point that skips checks.
    signatures = function_signatures(mod, lifted.takers, lifted.defaults)
    linkable, repeated = with_repeated_calls(lifted.mod, signatures)
    # Metadata that virtual machines, profiles and `explain` use without the compiler.
    host = host_vdevice(vdevices)
    metadata = Metadata(
        devices=devices,
        host_index=vdevice_index(host, vdevices) if host is not None else -1,
        signatures=signatures,
        constants=tuple(lifted.specs),
        placement=reports["placement"],
        placement_estimate=reports["placement_estimate"],
        dispatches=_dispatches(mod, vdevices),
        encodings=reports["encodings"],
        fusions=reports["fusions"],
        alignment=argument_alignment(mod),
        writes_arguments=writes,
        regions=linked_regions(lifted),
        kernels=kernels,
        single_calls=remarks.single_calls or (),
        schedules=tuple(schedule.with_takers(lifted.takers) for schedule in remarks.schedules or ()),
        memory=memory_of(mod),
        checks=remarks.checks or (),
        repeated=repeated,
        graph=remarks.graph,
        collectives=tuple(collectives),
    )
    # LLVM and CUDA compile the kernels of each target, and TVM links them with the bytecode.
    linked = link(with_bodies(linkable, signatures), signatures, progress, folder)
    metadata = replace(metadata, device_code=linked.device_code)
    return Executable(linked.module, metadata, lifted.tensors, machine_code=linked.machine_code)


def run_steps(mod: tvm.IRModule, steps: Sequence[PipelineStep], progress: Progress | None) -> tvm.IRModule:
    """Run steps of the pipeline."""
    for done, step in enumerate(steps, 1):
        mod = step.run(mod)
        if progress is not None:
            progress("passes", done, len(steps))
    return mod


def may_write_arguments(mod: tvm.IRModule) -> bool:
    """Return whether impure functions of a module may write to their arguments; True for lowered modules.

    Writes of in-place ops are known for each argument instead (`transform.partition.written_arguments`).
    """
    return is_lowered(mod) or not all(func.is_pure for _, func in relax_functions(mod))


def device_spec(vdevice: relax.VDevice, default: bool) -> DeviceSpec:
    """The manifest entry of a vdevice."""
    return DeviceSpec(str(vdevice.target), int(vdevice.vdevice_id), str(vdevice.memory_scope), default)


def _warn_if_generic(vdevices: list[relax.VDevice]) -> None:
    generic = [
        device_name(vdevice, vdevices)
        for vdevice in vdevices
        if vdevice.target.kind.name == "llvm" and "mcpu" not in vdevice.target.attrs and not is_native(vdevice.target)
    ]
    if generic:
        _log.warning(
            "%s: the target names no CPU, so code is for the oldest of its architecture, several times slower than for "
            "this CPU, which is rh.native('llvm'); name an mcpu (\"generic\" for the oldest) to avoid this warning",
            ", ".join(generic),
        )


def memory_plan_of(mod: tvm.IRModule) -> MemoryPlan:
    """The memory plan of a module, as `rh.compile` makes it.

    `mod`: module with dispatches, and optionally command buffers and schedules; lowered or not.
    """
    lowered, graphs = graph_tables(LowerToVM()(mod))
    vdevices = vdevices_of(lowered)
    host = host_vdevice(vdevices)
    metadata = Metadata(
        devices=tuple(device_spec(vdevice, default=i == 0) for i, vdevice in enumerate(vdevices)),
        host_index=vdevice_index(host, vdevices) if host is not None else -1,
        signatures=function_signatures(lowered, set()),
        constants=tuple(lift_constants(lowered, graphs).specs),
        regions=tuple(regions_as_linked(lowered)),
        kernels=kernels_of(lowered),
        schedules=tuple(schedules_of(lowered)),
        memory=memory_of(lowered),
    )
    return MemoryPlan(metadata)


def _dispatches(mod: tvm.IRModule, vdevices: list[relax.VDevice]) -> dict[str, DispatchSpec]:
    """The kernels that command buffers and functions call, with their devices."""
    dispatches = region_dispatches(mod)
    for _, func in relax_functions(mod):
        allocated: dict[relax.Var, int] = {}
        for binding in walk_bindings(func):
            call = binding.value
            if op_name(call) == "relax.vm.alloc_tensor":
                allocated[binding.var] = int(call.args[4].value)
            gv = called_prim_func(mod, call)
            if gv is None or COMMANDS in mod[gv].attrs:
                continue
            kernel = mod.functions[gv]
            device = _device_of(call, kernel, allocated, vdevices)
            spec = DispatchSpec(device, ops_of(kernel), operations_of(kernel), bytes_of(kernel), precision_of(kernel))
            dispatch = dispatches.setdefault(gv.name_hint, spec)
            if device not in dispatch.devices:
                dispatches[gv.name_hint] = replace(dispatch, other_devices=(*dispatch.other_devices, device))
    return dispatches


def _device_of(
    call: relax.Call, kernel: tirx.PrimFunc, allocated: Mapping[relax.Var, int], vdevices: list[relax.VDevice]
) -> int:
    """The manifest index of the device that runs a lowered call; -1 for kernels that TVM adds to compute shapes.

    Types of intermediate tensors lack a device, so it is read from their allocation.
    """
    vdevice = call_vdevice(call)
    if vdevice is not None:
        return vdevice_index(vdevice, vdevices)
    if not ops_of(kernel):
        return -1
    device = next((allocated[arg] for arg in call.args if arg in allocated), -1)
    if device < 0:  # not allocated by this function: the first device of the kernel's target
        targets = [str(vdevice.target) for vdevice in vdevices]
        target = str(kernel.attrs.get("target"))
        return targets.index(target) if target in targets else -1
    return device if device < len(vdevices) else -1


def get_pipeline(command_buffers: bool = True) -> tvm.transform.Pass:
    """The passes of ``rh.compile`` as one pass, for ``tvm.compile`` and for inspecting stages.

    Parameters
    ----------
    command_buffers : bool
        Whether consecutive kernels on one device become command buffers.

    Returns
    -------
    tvm.transform.Sequential
        Passes, each of which can run alone and is idempotent.
    """
    steps = pipeline_steps(command_buffers, stock=True)
    return tvm.transform.Sequential([step.run for step in steps], name="relax_hetero")


guard_tvm_compile.install()
