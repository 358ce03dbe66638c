"""FormCudaGraphs: command buffers of GPUs become CUDA graphs, recorded once and launched with a table of bindings.

Before::

    buffer = R.call_tir(cls.main_commands, (x, w), out_ty=[R.Tensor((16,), "float32"), R.Tensor((64,), "uint8")])

After::

    buffer = R.call_tir(cls.main_commands, (x, state), out_ty=[R.Tensor((16,), "float32")])

`main_commands` now submits the graph that `main_commands_record` records. Constants and the arena, which the machine
owns, are arguments of the recorded launches; kernels that work on bindings, inputs and results, read where these are
in a table in device memory (`tir.commands.table_kernel`). `state` is a constant that each machine replaces by memory
of its own (`vm.region.cuda_graph`), and which constants the graph reads stands on `main_commands` (`GRAPH_CONSTANTS`).

A kernel that asks for constants before it needs what others compute (`tir.cuda.core.launch.may_begin_early`) is
launched so that it begins while the kernel before it ends; also behind the one that brings the table, if it uses
bindings only when it has waited for that.

Extents that are symbolic decide how many blocks a launch has, which a graph keeps: such a command buffer has a graph
for each set of extents that it meets (`vm.region.cuda_graph`). TVM's RewriteCUDAGraph captures what a function does
with memory of its own, with inputs and outputs outside of the graph, and weights as they were at the first call.

Assumes FormCommandBuffers. A lowered module is returned as it is; a second run changes nothing. The result needs a
machine that records graphs, so `rh.compile` runs this pass and `rh.get_pipeline` leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...artifact.commands import ARENA, DIRECT, GRAPH, SLOT, WRITE, Dispatch, Reference, RegionSpec, kernel_from_json
from ...artifact.graph_layout import ENTRIES, ROWS, TABLE, Layout
from ...target.vdevice import vdevices_of
from ...tir.commands.command_list import Tensor
from ...tir.commands.graph_functions import Launch, fetch_kernel, fill_kernel, record_function, submit_function
from ...tir.commands.table_kernel import fetching_kernel, table_kernel, threads_of_one_block, waits_before_use
from ...tir.cuda.core.launch import READS_EARLY, launched_early
from ..ir.blocks import renamed
from ..ir.declare import declare_pass
from ..ir.module_attrs import COMMANDS, KERNEL, is_lowered
from ..ir.rewriting import copy_module, fresh_global_var, map_bindings, op_name, relax_functions, typed
from .region_attrs import regions_of, with_region

_MOST_ROUNDS = 8
"""In which one block of few threads fetches a table; more are left to a kernel of its own."""


GRAPH_CONSTANTS = "relax_hetero.graph_constants"
"""On the function that submits a graph: the constants that its launches read."""


def form_cuda_graphs(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if is_lowered(mod):
        return mod
    regions = {region.name: region for region in regions_of(mod)}
    buffers = {gv: regions[gv.name_hint] for gv, func in mod.functions.items() if COMMANDS in func.attrs}
    chosen = {gv: region for gv, region in buffers.items() if _can_be_graph(mod.functions[gv], region)}
    if not chosen:
        return mod
    writer = _Writer(mod)
    rewritten = {gv.name_hint: writer.write(gv, region) for gv, region in chosen.items()}
    calls = _Calls(rewritten, chosen, vdevices_of(mod))
    for gv, func in relax_functions(mod):
        writer.functions[gv] = map_bindings(func, calls.change)
    for name, constants in calls.constants.items():
        submit = rewritten[name]
        writer.functions[submit] = writer.functions[submit].with_attr(GRAPH_CONSTANTS, constants)
    return copy_module(mod, writer.without_unused_kernels())


FormCudaGraphs = declare_pass("FormCudaGraphs", form_cuda_graphs)


def _can_be_graph(func: tirx.PrimFunc, region: RegionSpec) -> bool:
    return func.attrs["target"].kind.name == "cuda" and region.runs != GRAPH


class _Writer:
    """Writes the functions of graphs.

    Attributes
    ----------
    functions : dict
        Those of the module, without the command buffers' host functions, and with those of their graphs.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = dict(mod.functions.items())
        self._taken = {gv.name_hint for gv in self.functions}
        self._kernels = {
            kernel_from_json(json.loads(str(func.attrs[KERNEL]))).name: gv
            for gv, func in mod.functions.items()
            if KERNEL in func.attrs
        }
        self._variants: dict[tuple[Any, ...], tvm.ir.GlobalVar] = {}

    def write(self, gv: tvm.ir.GlobalVar, region: RegionSpec) -> tvm.ir.GlobalVar:
        """Replace a host function by those of a graph; the one that submits it is returned."""
        old = self.functions.pop(gv)
        target, count = old.attrs["target"], len(region.slots)
        numbers = [param for param in old.params if not isinstance(param.ty, tirx.BufferType)]
        tensors = [
            Tensor(str(p.name), list(p.ty.shape), str(p.ty.dtype))
            for p in old.params
            if isinstance(p.ty, tirx.BufferType)
        ]
        arena = 0 if region.arena == 0 else tensors[-1].shape[0]
        inputs = sum(slot.access != WRITE for slot in region.slots)
        results = tensors[inputs + len(region.directs) :][: count - inputs]
        parameters = _symbols(tensors, numbers)
        commands = [command for command in region.commands if isinstance(command, Dispatch)]
        calls = _calls_of_kernels(old)
        launches = [self._launch(command, call, region) for command, call in zip(commands, calls, strict=True)]
        first = next(i for i, command in enumerate(commands) if _entries(command))
        launches[first] = self._fetching(launches[first], commands[first], count)
        fetch, behind_table = None, first + 1
        if launches[first].fetching is None:
            behind_table = 0
            fetch = self._once(("fetch", count, str(target)), lambda name: fetch_kernel(name, count, target))
        for i, command in enumerate(commands):
            if i > 0 or fetch is not None:
                launches[i] = self._early(launches[i], command, i == behind_table)
        fill = self._once(("fill", str(target)), lambda name: fill_kernel(name, target))
        record = fresh_global_var(f"{gv.name_hint}_record", tvm.ir.Type.missing(), self._taken)
        self._add(record, record_function(record.name_hint, count, launches, fetch, fill, target, parameters))
        submit = submit_function(gv.name_hint, tensors[:inputs], results, target, arena, numbers, parameters)
        submit = with_region(submit.without_attr("global_symbol"), replace(region, runs=GRAPH))
        return self._add(tvm.ir.GlobalVar(gv.name_hint), submit)

    def without_unused_kernels(self) -> dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc]:
        """The functions, less kernels that are not called: those of which only variants are, and variants of these."""
        called: set[str] = set()
        for func in self.functions.values():
            structural_walk(func.body, (tvm.ir.GlobalVar, lambda gv: called.add(gv.name_hint)))
        kernels = {gv.name_hint for gv in (*self._kernels.values(), *self._variants.values())}
        return {gv: f for gv, f in self.functions.items() if gv.name_hint not in kernels - called}

    def _launch(self, command: Dispatch, call: tvm.ir.Call, region: RegionSpec) -> Launch:
        kernel = self._kernels[command.kernel]
        raw = self.functions[kernel]
        entries = _entries(command)
        arguments: list[Any] = [
            tirx.const(ENTRIES + operand.index, "int32")
            if i in entries
            else (_word(operand, region), _offset(call.args[i]), raw.params[i].ty)
            for i, operand in enumerate(command.operands)
        ]
        arguments += call.args[len(arguments) :]
        if not entries:
            return Launch(kernel, arguments)
        variant = self._once((kernel.name_hint, entries), lambda _: table_kernel(raw, entries))
        return Launch(variant, [(TABLE, 0, _POINTER), *arguments])

    def _early(self, launch: Launch, command: Dispatch, is_behind_table: bool) -> Launch:
        """A launch that begins while the one before it ends, where its kernel waits for that before it needs it.

        Kernels read addresses in the table as soon as they begin, but for the one behind the kernel that writes it,
        which lets the next one begin when it has waited for that.
        """
        kernel, entries = self._kernels[command.kernel], _entries(command)
        raw = self.functions[kernel]
        reads = raw.attrs.get(READS_EARLY)
        if reads is None or any(command.operands[int(i)].space != DIRECT for i in reads):
            return launch
        if is_behind_table:
            if not entries or not waits_before_use(raw, entries):
                return launch  # the launch behind this one may begin at once, and reads the table
            key = (kernel.name_hint, entries, "behind wait")
            launch = replace(launch, kernel=self._once(key, lambda _: table_kernel(raw, entries, behind_wait=True)))
        func = self.functions[launch.kernel]
        return replace(launch, kernel=self._once((launch.kernel.name_hint, "early"), lambda _: launched_early(func)))

    def _fetching(self, launch: Launch, command: Dispatch, slots: int) -> Launch:
        """The first launch that needs the table, with the kernel that fetches it where one block does all its work."""
        kernel, entries = self._kernels[command.kernel], _entries(command)
        raw = self.functions[kernel]
        threads = threads_of_one_block(raw)
        if threads is None or threads.value * _MOST_ROUNDS < ROWS * slots:
            return launch
        fetch = fetch_kernel("fetch", slots, raw.attrs["target"], threads)
        key = (kernel.name_hint, entries, slots)
        return replace(launch, fetching=self._once(key, lambda _: fetching_kernel(raw, entries, fetch)))

    def _once(self, key: tuple[Any, ...], make: Any) -> tvm.ir.GlobalVar:
        if key not in self._variants:
            suffix = "early" if key[1] == "early" else "table"
            gv = fresh_global_var(f"{key[0]}_{suffix}", tvm.ir.Type.missing(), self._taken)
            self._variants[key] = self._add(gv, make(gv.name_hint))
        return self._variants[key]

    def _add(self, gv: tvm.ir.GlobalVar, func: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        self.functions[typed(gv, func.ty)] = func
        return gv


_POINTER = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def _entries(command: Dispatch) -> tuple[int, ...]:
    """Which operands of a command are bindings."""
    return tuple(i for i, operand in enumerate(command.operands) if operand.space == SLOT)


def _word(operand: Reference, region: RegionSpec) -> int:
    """The word of the plan that a direct reference or one to the arena starts from."""
    first = Layout(len(region.slots), len(region.parameters)).directs
    return first + (len(region.directs) if operand.space == ARENA else operand.index)


def _offset(argument: tirx.Expr) -> tirx.Expr:
    """The first byte of an argument of a kernel: those in the arena are addresses of its bytes."""
    if argument.op.same_as(_ADDRESS_OF):
        return argument.args[0].indices[0]
    return tirx.const(0, "int64")


_ADDRESS_OF = tvm.ir.Op.get("tirx.address_of")


def _calls_of_kernels(host: tirx.PrimFunc) -> list[tvm.ir.Call]:
    """In order."""
    found: list[tvm.ir.Call] = []

    def on_call(call: tvm.ir.Call) -> None:
        if isinstance(call.op, tvm.ir.GlobalVar):
            found.append(call)

    structural_walk(host.body, (tvm.ir.Call, on_call))
    return found


def _symbols(tensors: Sequence[Tensor], numbers: Sequence[tirx.Var]) -> list[tirx.Var]:
    """The symbolic extents of a command buffer."""
    found: dict[tirx.Var, None] = {}
    for expr in (*numbers, *(extent for tensor in tensors for extent in tensor.shape)):
        structural_walk(expr, (tvm.ir.Var, lambda var: found.setdefault(var)))
    return list(found)


class _Calls:
    """Rewrites the calls of command buffers that became graphs.

    Attributes
    ----------
    constants : dict of str to list of tvm.ir.GenericConst
        What each command buffer took as arguments, and its graph keeps.
    """

    def __init__(
        self,
        submits: dict[str, tvm.ir.GlobalVar],
        chosen: dict[tvm.ir.GlobalVar, RegionSpec],
        vdevices: list[relax.VDevice],
    ) -> None:
        self.constants: dict[str, list[tvm.ir.GenericConst]] = {}
        self._submits, self._vdevices = submits, vdevices
        self._regions = {gv.name_hint: region for gv, region in chosen.items()}
        self._names: dict[relax.Var, relax.Expr] = {}

    def change(self, binding: relax.Binding) -> relax.Binding:
        """A binding, with the state for constants and without an arena where it calls such a command buffer."""
        call = binding.value
        name = call.args[0].name_hint if op_name(call) == "relax.call_tir" else ""
        if name not in self._submits:
            return renamed(binding, self._names)
        region = self._regions[name]
        args = list(renamed(binding, self._names).value.args[1].fields)
        inputs = len(args) - len(region.directs)
        vdevice = self._vdevices[region.device]
        words = np.zeros(Layout(len(region.slots), len(region.parameters)).state, "int64")
        state = tvm.ir.GenericConst(tvm.runtime.tensor(words), relax.TensorType(words.shape, "int64", vdevice))
        self.constants[name] = args[inputs:]
        ty, var = call.ty_args[0], binding.var
        if region.arena != 0:
            ty = tvm.ir.TupleType(list(ty.fields)[:-1])
            self._names[var] = type(var)(var.name, ty)
        operands = [self._submits[name], relax.Tuple([*args[:inputs], state]), *call.args[2:]]
        new = relax.Call(call.op, operands, call.attrs, [ty], call.span, ret_ty=ty)
        return relax.VarBinding(self._names.get(var, var), new, binding.span)
