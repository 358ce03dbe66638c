"""FormCudaGraphs: command buffers of GPUs become CUDA graphs, recorded once and launched with a table of bindings.

Before::

    buffer = R.call_tir(cls.main_commands, (x, w), out_ty=[R.Tensor((16,), "float32"), R.Tensor((64,), "uint8")])

After::

    buffer = R.call_tir(cls.main_commands, (x, state), out_ty=[R.Tensor((16,), "float32")])

`main_commands` now submits the graph that `main_commands_record` records. Constants and the arena, which the machine
owns, are arguments of the recorded launches; kernels that use bindings (inputs and results) read their addresses
from a table in device memory (`tir.commands.table_kernel`). `state` is a constant that each machine replaces by memory
of its own (`vm.region.cuda_graph`); an attribute of `main_commands` has the graph's constants (`GRAPH_CONSTANTS`).

From compute capability 9.0 on, every kernel but the first uses programmatic dependent launch: it begins while the
previous kernel ends, and waits for that where it was written to (`tir.cuda.core.launch.enable_pdl`), after set-up and
loads of constants, else at once (`tir.commands.graph_functions.waiting_first`). The kernel after the one that fetches
the table reads it after its wait.

Symbolic extents decide the grid of a launch, which a graph keeps: such a command buffer has a graph for each of their
recurring values, and a submission selects it. TVM's RewriteCUDAGraph instead captures work on memory of the function,
with inputs and outputs outside of the graph, and weights as they were at the first call.

Assumes FormCommandBuffers. A lowered module is returned as it is; a second run changes nothing. The result needs a
machine that records graphs, so `rh.compile` runs this pass and `rh.get_pipeline` leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var

from ...artifact.commands import (
    ARENA,
    DIRECT,
    GRAPH,
    READ,
    SLOT,
    WRITE,
    Dispatch,
    KernelSpec,
    Reference,
    RegionSpec,
    SlotSpec,
)
from ...artifact.dims import parse_dim
from ...artifact.graph_layout import ENTRIES, RING_ROWS, TABLE, Layout
from ...artifact.typed_data import from_data
from ...target.backend import backend_of
from ...target.gpu_target import gpu_target_of
from ...target.vdevice import vdevices_of
from ...tir.commands.command_list import Tensor
from ...tir.commands.graph_functions import (
    Launch,
    dim_value,
    fetch_kernel,
    fill_kernel,
    launched_early,
    record_function,
    releases_after_wait,
    submit_function,
    waiting_first,
    waiting_in_place,
    waiting_late,
)
from ...tir.commands.table_kernel import fetching_kernel, table_kernel, threads_of_one_block, waits_before_use
from ...tir.cuda.core.launch import LATE_WAIT, READS_EARLY
from ...tir.cuda.nccl_kernels import AFTER_NCCL
from ..ir.blocks import renamed
from ..ir.declare import declare_pass
from ..ir.module_attrs import COMMANDS, KERNEL, is_lowered
from ..ir.op_names import CALL_TIR, CALL_TIR_INPLACE
from ..ir.rewriting import copy_module, fresh_global_var, global_vars_in, map_bindings, op_name, relax_functions, typed
from .region_attrs import regions_of, with_region

_MAX_ROUNDS = 8
"""Rounds in which a kernel of one block may fetch the table itself; a longer table needs a kernel of its own."""


GRAPH_CONSTANTS = "relax_hetero.graph_constants"
"""Attribute of the function that submits a graph: the constants that its launches read."""


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
    is_new = backend_of(func.attrs["target"]).records_graphs and region.runs != GRAPH
    return is_new and all(str(p.ty.dtype) == "int64" for p in _numbers(func)) and _is_complete(region)


def _numbers(func: tirx.PrimFunc) -> list[tirx.Var]:
    """Parameters of a command buffer's host function that are not tensors."""
    return [param for param in func.params if not is_buffer_var(param)]


def _is_complete(region: RegionSpec) -> bool:
    """Return whether all extents, offsets and numbers of a region are expressions over its parameters."""
    dims: list[Any] = [region.arena, *(dim for slot in region.slots for dim in slot.shape or ())]
    for command in region.commands:
        if isinstance(command, Dispatch):
            dims += [*command.scalars, *(operand.offset for operand in command.operands)]
    texts = [parse_dim(dim) for dim in dims if isinstance(dim, str)]
    return all(text.evaluate is not None and text.names <= {*region.parameters} for text in texts)


class _Writer:
    """Writes the functions of graphs."""

    def __init__(self, mod: tvm.IRModule) -> None:
        # Functions of the module, with those of graphs in place of the command buffers' host functions.
        self.functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = dict(mod.functions.items())
        self._used_names = {gv.name_hint for gv in self.functions}
        self._kernels: dict[str, tvm.ir.GlobalVar] = {}
        self._specs: dict[str, KernelSpec] = {}
        for gv, func in mod.functions.items():
            if KERNEL in func.attrs:
                spec = from_data(KernelSpec, json.loads(str(func.attrs[KERNEL])))
                self._kernels[spec.name], self._specs[spec.name] = gv, spec
        self._variants: dict[tuple[Any, ...], tvm.ir.GlobalVar] = {}

    def write(self, gv: tvm.ir.GlobalVar, region: RegionSpec) -> tvm.ir.GlobalVar:
        """Replace a host function by those of a graph; returns the one that submits the graph."""
        old = self.functions.pop(gv)
        target, count = old.attrs["target"], len(region.slots)
        values = {name: tirx.Var(name, "int64") for name in region.parameters}
        commands = [command for command in region.commands if isinstance(command, Dispatch)]
        launches = [self._launch(command, region, values) for command in commands]
        first = next(i for i, command in enumerate(commands) if _entries(command))
        launches[first] = self._fetching(launches[first], commands[first], count)
        fetch, after_table = None, first + 1
        if launches[first].fetching is None:
            after_table = 0
            fetch = self._once(("fetch", count, str(target)), lambda name: fetch_kernel(name, count, target))
        if gpu_target_of(target).overlaps_launches:
            written: set[int] = set()
            for i, command in enumerate(commands):
                # NCCL's kernels complete before the launch after them, which does not begin early.
                begins_early = launches[i].fetching is None and not launches[i].nccl
                if begins_early and (i > 0 or fetch is not None):
                    if i > after_table and self._may_wait_late(command, commands[i - 1], launches[i - 1]):
                        launches[i] = self._late(launches[i])
                    else:
                        launches[i] = self._early(launches[i], command, i == after_table, written)
                written |= self._written(command)
        fill = self._once(("fill", str(target)), lambda name: fill_kernel(name, target))
        record = fresh_global_var(f"{gv.name_hint}_record", tvm.ir.Type.missing(), self._used_names)
        self._add(
            record, record_function(record.name_hint, count, launches, fetch, fill, target, list(values.values()))
        )
        # Each function has variables of its own.
        values = {name: tirx.Var(name, "int64") for name in region.parameters}
        inputs, results = (
            [_tensor(slot, values) for slot in region.slots if (slot.access == WRITE) == is_result]
            for is_result in (False, True)
        )
        extents = {dim for slot in region.slots for dim in slot.shape or ()}
        numbers = [var for name, var in values.items() if name not in extents]
        assert len(numbers) == len(_numbers(old)), "the call passes the parameters that are not extents"
        submit = submit_function(gv.name_hint, inputs, results, target, list(values.values()), numbers)
        submit = submit.without_attr("global_symbol")
        return self._add(tvm.ir.GlobalVar(gv.name_hint), with_region(submit, replace(region, runs=GRAPH)))

    def without_unused_kernels(self) -> dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc]:
        """The functions without kernels and variants of kernels that nothing calls."""
        called = {gv.name_hint for func in self.functions.values() for gv in global_vars_in(func.body)}
        kernels = {gv.name_hint for gv in (*self._kernels.values(), *self._variants.values())}
        return {gv: f for gv, f in self.functions.items() if gv.name_hint not in kernels - called}

    def _launch(self, command: Dispatch, region: RegionSpec, values: Mapping[str, tirx.Var]) -> Launch:
        kernel = self._kernels[command.kernel]
        raw = self.functions[kernel]
        entries = _entries(command)
        arguments: list[Any] = [
            tirx.const(ENTRIES + operand.index, "int32")
            if i in entries
            else (*_word(operand, region, values), raw.params[i].ty)
            for i, operand in enumerate(command.operands)
        ]
        numbers = raw.params[len(arguments) :]
        arguments += [_number(value, p, values) for p, value in zip(numbers, command.scalars, strict=True)]
        nccl = [int(number) for number in raw.attrs.get(AFTER_NCCL, ())]
        if not entries:
            return Launch(kernel, arguments, nccl=nccl)
        variant = self._once((kernel.name_hint, entries), lambda _: table_kernel(raw, entries))
        return Launch(variant, [(TABLE, 0, _POINTER), *arguments], nccl=nccl)

    def _written(self, command: Dispatch) -> set[int]:
        """The slots that a command writes."""
        tensors = self._specs[command.kernel].tensors
        return {
            operand.index
            for operand, tensor in zip(command.operands, tensors, strict=True)
            if operand.space == SLOT and tensor.access != READ
        }

    def _may_wait_late(self, command: Dispatch, previous: Dispatch, launch: Launch) -> bool:
        """Return whether a launch may begin when all but the previous one are complete, and wait in its epilogue."""
        reads = self.functions[self._kernels[command.kernel]].attrs.get(LATE_WAIT)
        if reads is None or _entries(command) or not releases_after_wait(self.functions[launch.kernel]):
            return False
        written = [
            operand
            for operand, tensor in zip(previous.operands, self._specs[previous.kernel].tensors, strict=True)
            if tensor.access != READ
        ]
        return not any(_may_overlap(command.operands[int(i)], operand) for i in reads for operand in written)

    def _late(self, launch: Launch) -> Launch:
        func = self.functions[launch.kernel]
        key = (launch.kernel.name_hint, "early", "in the epilogue")
        return replace(launch, kernel=self._once(key, lambda _: launched_early(waiting_late(func))))

    def _early(self, launch: Launch, command: Dispatch, is_after_table: bool, written: set[int]) -> Launch:
        """A launch that begins while the previous one ends, and waits for that before it needs its results.

        Before its wait it reads only constants, or slots that no earlier launch has written: those are complete
        when the kernel that fetches the table is.

        Kernels read the table as soon as they begin, except the first one after the kernel that writes it, which lets
        the next one begin after its own wait.
        """
        kernel, entries = self._kernels[command.kernel], _entries(command)
        raw = self.functions[kernel]
        reads = raw.attrs.get(READS_EARLY)
        waits_itself = reads is not None and all(
            operand.space == DIRECT or (operand.space == SLOT and operand.index not in written)
            for operand in (command.operands[int(i)] for i in reads)
        )
        if waits_itself and is_after_table:
            # Otherwise the next launch might begin at once, and read the table too early.
            waits_itself = bool(entries) and waits_before_use(raw, entries)
            if waits_itself:
                variant = (kernel.name_hint, entries, "after wait")
                launch = replace(
                    launch, kernel=self._once(variant, lambda _: table_kernel(raw, entries, after_wait=True))
                )
        func = self.functions[launch.kernel]
        key = (launch.kernel.name_hint, "early", waits_itself, is_after_table)

        def make(_: str) -> tirx.PrimFunc:
            return launched_early(waiting_in_place(func) if waits_itself else waiting_first(func, is_after_table))

        early = self._once(key, make)
        return replace(launch, kernel=early)

    def _fetching(self, launch: Launch, command: Dispatch, slots: int) -> Launch:
        """The first launch that needs the table, which fetches it itself if its kernel has one block."""
        kernel, entries = self._kernels[command.kernel], _entries(command)
        raw = self.functions[kernel]
        threads = threads_of_one_block(raw)
        if threads is None or threads.value * _MAX_ROUNDS < RING_ROWS * slots:
            return launch
        fetch = fetch_kernel("fetch", slots, raw.attrs["target"], threads)
        key = (kernel.name_hint, entries, slots)
        return replace(launch, fetching=self._once(key, lambda _: fetching_kernel(raw, entries, fetch)))

    def _once(self, key: tuple[Any, ...], make: Any) -> tvm.ir.GlobalVar:
        if key not in self._variants:
            suffix = "early" if key[1:2] == ("early",) else "table"
            gv = fresh_global_var(f"{key[0]}_{suffix}", tvm.ir.Type.missing(), self._used_names)
            self._variants[key] = self._add(gv, make(gv.name_hint))
        return self._variants[key]

    def _add(self, gv: tvm.ir.GlobalVar, func: tirx.PrimFunc) -> tvm.ir.GlobalVar:
        self.functions[typed(gv, func.ty)] = func
        return gv


def _may_overlap(one: Reference, other: Reference) -> bool:
    """Return whether two references may be to the same bytes."""
    if one.space != other.space or (one.space != ARENA and one.index != other.index):
        return False
    begins, lengths = (one.offset, other.offset), (one.length, other.length)
    ends = [a + b for a, b in zip(begins, lengths, strict=True) if isinstance(a, int) and isinstance(b, int)]
    return len(ends) < 2 or (begins[0] < ends[1] and begins[1] < ends[0])  # type: ignore[operator]


_POINTER = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def _entries(command: Dispatch) -> tuple[int, ...]:
    """Indices of a command's operands that are bindings."""
    return tuple(i for i, operand in enumerate(command.operands) if operand.space == SLOT)


def _word(operand: Reference, region: RegionSpec, values: Mapping[str, tirx.Var]) -> tuple[int, Any]:
    """The word of the plan with the base address of a direct reference, or of the arena, and the offset."""
    first = Layout(len(region.slots)).constants
    offset = operand.offset if isinstance(operand.offset, int) else dim_value(operand.offset, values)
    return first + (len(region.directs) if operand.space == ARENA else operand.index), offset


def _number(value: Any, param: tirx.Var, values: Mapping[str, tirx.Var]) -> Any:
    """A scalar argument of a kernel."""
    dtype = str(param.ty.dtype)
    if not isinstance(value, str):
        return tirx.const(value, dtype)
    number = dim_value(value, values)
    return number if dtype == "int64" else tirx.Cast(dtype, number)


def _tensor(slot: SlotSpec, values: Mapping[str, tirx.Var]) -> Tensor:
    assert slot.shape is not None, "tensors of a model have shapes"
    return Tensor(slot.name, [dim_value(dim, values) for dim in slot.shape], slot.dtype)


class _Calls:
    """Rewrites the calls of command buffers that became graphs."""

    def __init__(
        self,
        submits: dict[str, tvm.ir.GlobalVar],
        chosen: dict[tvm.ir.GlobalVar, RegionSpec],
        vdevices: list[relax.VDevice],
    ) -> None:
        # Former constant arguments of each command buffer, which its graph keeps.
        self.constants: dict[str, list[tvm.ir.GenericConst]] = {}
        self._submits, self._vdevices = submits, vdevices
        self._regions = {gv.name_hint: region for gv, region in chosen.items()}
        self._names: dict[relax.Var, relax.Expr] = {}
        self._arenas: dict[relax.Var, int] = {}  # former position of the arena in a call's results

    def change(self, binding: relax.Binding) -> relax.Binding:
        """A call of such a command buffer with the state in place of constants and arena; other bindings unchanged."""
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self._arenas:
            index = value.index - (value.index > self._arenas[value.tuple_value])
            return relax.VarBinding(
                binding.var, relax.TupleGetItem(self._names[value.tuple_value], index), binding.span
            )
        is_call = op_name(value) in (CALL_TIR, CALL_TIR_INPLACE)
        name = value.args[0].name_hint if is_call else ""
        if name not in self._submits:
            return renamed(binding, self._names)
        return self._changed(binding, renamed(binding, self._names).value, self._regions[name])

    def _changed(self, binding: relax.Binding, call: relax.Call, region: RegionSpec) -> relax.Binding:
        args = list(call.args[1].fields)
        inputs = sum(slot.access != WRITE for slot in region.slots)
        end = inputs + len(region.directs)
        vdevice = self._vdevices[region.device]
        words = np.zeros(Layout(len(region.slots), len(region.parameters)).state_words, "int64")
        state = tvm.ir.GenericConst(tvm.runtime.tensor(words), relax.TensorType(words.shape, "int64", vdevice))
        self.constants[region.name] = args[inputs:end]
        args = [*args[:inputs], state, *args[end:]]
        ty, var = call.ty_args[0], binding.var
        fields = list(ty.fields) if isinstance(ty, tvm.ir.TupleType) else [ty]
        inplace_indices = list(call.attrs.inplace_indices) if op_name(call) == CALL_TIR_INPLACE else []
        if region.arena != 0:
            arena = len(region.slots) - inputs  # after the results
            del fields[arena]
            if inplace_indices:
                del inplace_indices[arena]
            self._arenas[var] = arena
            ty = tvm.ir.TupleType(fields)
            self._names[var] = type(var)(var.name, ty)
        gv = self._submits[region.name]
        if inplace_indices:
            in_place = relax.call_tir_inplace(gv, relax.Tuple(args), inplace_indices, fields)
            new = relax.Call(in_place.op, in_place.args, in_place.attrs, [ty], call.span, ret_ty=ty)
        else:
            new = relax.Call(call.op, [gv, relax.Tuple(args)], call.attrs, [ty], call.span, ret_ty=ty)
        return relax.VarBinding(self._names.get(var, var), new, binding.span)
