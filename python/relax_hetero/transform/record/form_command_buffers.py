"""FormCommandBuffers: runs of kernels on one device become one host function, which calls them in order.

Before::

    lv = R.call_tir(cls.scale, (x, w), out_ty=R.Tensor((4,), "float32", "llvm:0"))
    gv = R.call_tir(cls.shift, (lv,), out_ty=R.Tensor((4,), "float32", "llvm:0"))

After::

    buffer = R.call_tir(cls.main_commands, (x, w), out_ty=[R.Tensor((4,), "float32", "llvm:0"),
                                                           R.Tensor((64,), "uint8", "llvm:0")])   # gv, and the arena
    gv = buffer[0]

`main_commands` is a PrimFunc with a target like any other. Its parameters are the run's inputs, its results, and an
arena for its transient values, planned by lifetime; the kernels become raw functions of pointers
(`tir.core.raw_kernel`). Control flow, transfers of the run's results, work on another device and calls of unknown
functions end a run (`command_regions`). Stock TVM can still build the module.

The host function of each command buffer has its commands as an attribute (`artifact.commands.RegionSpec`).

Assumes FormDispatches: a module without dispatches is returned as it is. So is a lowered one, and one with command
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ...artifact.commands import READ, READ_WRITE, WRITE, SingleCall
from ...target.vdevice import vdevices_of
from ...tir.core.raw_kernel import RawSignature, raw_kernel
from ...tir.core.ties import Tie
from ...tir.core.walks import nodes
from ..dispatch.bind_targets import bind_targets
from ..dispatch.form_dispatches import is_formed
from ..ir.blocks import Block, Rewrite, rewrite_function, same_shape, with_root_blocks, without_unused
from ..ir.declare import declare_pass
from ..ir.extents import known_extents
from ..ir.module_attrs import COMMANDS, is_lowered
from ..ir.op_names import CALL_TIR_OPS, RESHAPE, TRANSFERS
from ..ir.remarks import with_remarks
from ..ir.rewriting import copy_module, fresh_global_var, op_name, relax_functions, typed
from .command_regions import MAX_CALLS, Run, RunFinder, is_view
from .donated import DonatedVariables
from .kernel_calls import KernelCall, KernelCalls, sizes_of_peers
from .plan_arena import Lifetime, plan_arena
from .region_attrs import kernel_specs, region_spec, with_kernel, with_region
from .region_ir import OutlinedRegion, RegionStep, RegionValue

# Outlining of a run: inputs and results of its command buffer, its commands, and the arena for transient values.


@dataclass
class Draft:
    """A call of a kernel in a run, before it is decided which results take the memory of an operand."""

    kernel: tvm.ir.GlobalVar
    reads: list[RegionValue]
    makes: list[RegionValue]
    scalars: tuple[object, ...]
    variable: str
    # From the index of a result to that of the operand whose memory it takes; at most one pair, unless the program
    # calls the kernel in place.
    stored_over: dict[int, int] = field(default_factory=dict)

    def take(self, result: int, operand: int) -> None:
        """Let a result take the memory of an operand."""
        self.stored_over[result] = operand
        self.makes[result].stored_over = self.reads[operand]


def take_operands(
    drafts: Sequence[Draft],  # calls in order; `RegionValue.end` and `RegionValue.is_result` are final
    # Returns the ties of a kernel: indices of its tensors, operands first.
    ties: Callable[[tvm.ir.GlobalVar], list[Tie]],
    made: Collection[RegionValue],  # values that the run defines
    free: Collection[RegionValue],  # inputs that the run may overwrite
) -> list[Draft]:
    """Let results take the memory of operands; returns the drafts that changed."""
    made, free = frozenset(made), frozenset(free)
    changed: list[Draft] = []
    for now, draft in enumerate(drafts):
        if draft.stored_over:
            continue
        pairs = ties(draft.kernel)
        for operand, result in pairs:
            value, number = draft.reads[operand], result - len(draft.reads)
            is_free = value.root in free and same_shape(value.root.ty.shape.values, draft.makes[number].ty.shape.values)
            if (is_free or value.root in made) and _is_last_reader(draft, operand, result, now, pairs):
                draft.take(number, operand)
                changed.append(draft)
                break
    useful = _without_unused(changed, free)
    if len(useful) < len(changed):
        RegionValue.forget_roots(made)
    return useful


def _is_last_reader(draft: Draft, operand: int, result: int, now: int, pairs: Sequence[Tie]) -> bool:
    """Return whether nothing else reads an operand's memory from a kernel on, its other operands included."""
    value = draft.reads[operand]
    same_root = [i for i, read in enumerate(draft.reads) if read.root is value.root]
    return value.end == now and not value.is_result and all((i, result) in pairs for i in same_root)


def _without_unused(drafts: list[Draft], free: Collection[RegionValue]) -> list[Draft]:
    """Undo overwriting of inputs by values that nothing reads after the run."""
    useful: list[Draft] = []
    needed: set[RegionValue] = set()
    for draft in reversed(drafts):
        ((number, operand),) = draft.stored_over.items()
        result = draft.makes[number]
        if result.root in free and not (result.is_result or result in needed):
            draft.stored_over, result.stored_over = {}, None
            continue
        needed.add(draft.reads[operand])
        useful.append(draft)
    return useful[::-1]


class RunOutliner:
    """Outlines one run of a block."""

    def __init__(
        self,
        block: Block,
        run: Run,  # run of the block
        outside: Set[relax.Var],  # the variables of the block that are bound outside of runs
        kernels: KernelCalls,  # kernel calls of the module
        # Variables from outside of the block that it may overwrite after their last use.
        free: Set[relax.Var] = frozenset(),
        # Parameters of the command buffer, if its kernels wait for those of other devices (`sizes_of_peers`).
        sizes: Sequence[tirx.Var] = (),
    ) -> None:
        self._block, self._run, self._outside, self._kernels, self._free = block, run, outside, kernels, free
        self._sizes = sizes
        self._members = set(run.members)
        self._results: dict[relax.Var, list[RegionValue]] = {}
        self._values: list[RegionValue] = []
        self._inputs: dict[relax.Var, RegionValue] = {}
        self._constants: dict[tvm.ir.GenericConst, RegionValue] = {}
        self._drafts: list[Draft] = []

    def record(self, function: str, gv: tvm.ir.GlobalVar) -> tuple[OutlinedRegion, list[relax.Binding]]:
        """The command buffer, with the name `gv`, and the bindings that replace the run: none if it is unused."""
        for index in self._run.members:
            var = self._block.bindings[index].var
            call = self._run.calls.get(index)
            self._results[var] = self._view_of(self._block.definitions[var]) if call is None else self._step(var, call)
            if self._is_needed(var):
                for value in self._results[var]:
                    value.is_result = True
        steps = self._steps()
        arena = self._planned_arena()
        inputs, constants = list(self._inputs.values()), list(self._constants.values())
        results = [value for value in self._values if value.is_result and value.root not in set(inputs)]
        sizes = list(self._sizes) if any(self._kernels.has_peers(step.kernel) for step in steps) else []
        outlined = OutlinedRegion(gv, function, self._run.vdevice, inputs, constants, results, sizes, arena, steps)
        extents = {e for v in (*inputs, *constants, *results) for e in v.shape if isinstance(e, tirx.Var)}
        outlined.numbers = [symbol for symbol in outlined.symbols() if symbol not in extents]
        return outlined, self._bindings(outlined)

    def _steps(self) -> list[RegionStep]:
        """The final calls, with results that take the memory of operands where they may."""
        free = [value for var, value in self._inputs.items() if var in self._free and self._is_inside(var)]
        for draft in take_operands(self._drafts, self._kernels.ties, self._values, free):
            ((number, operand),) = draft.stored_over.items()
            draft.kernel = self._kernels.in_place(draft.kernel, (operand, len(draft.reads) + number))
        steps = []
        for draft in self._drafts:
            access = [READ_WRITE if i in draft.stored_over.values() else READ for i in range(len(draft.reads))]
            results = [value for i, value in enumerate(draft.makes) if i not in draft.stored_over]
            operands, all_access = (*draft.reads, *results), (*access, *[WRITE] * len(results))
            steps.append(RegionStep(draft.kernel, operands, all_access, draft.scalars, draft.variable))
        return steps

    def _planned_arena(self) -> Any:
        """Set the offsets of transient values in the arena; returns its bytes."""
        values_of: dict[RegionValue, list[RegionValue]] = {}
        for value in self._values:
            values_of.setdefault(value.root, []).append(value)
        inputs = set(self._inputs.values())
        transient = [r for r, values in values_of.items() if r not in inputs and not any(v.is_result for v in values)]
        arena = plan_arena([Lifetime(v.nbytes, v.begin, max(w.end for w in values_of[v])) for v in transient])
        for value, offset in zip(transient, arena.offsets, strict=True):
            value.offset = offset
        return arena.nbytes

    def _is_inside(self, var: relax.Var) -> bool:
        """Return whether only the run uses a variable, directly or by views."""
        pending = [var]
        while pending:
            for user in self._block.users.get(pending.pop(), []):
                binding = self._block.bindings[user]
                if user in self._members:
                    continue
                if not (binding.var in self._outside and is_view(binding) and self._block.is_local(binding.var)):
                    return False
                pending.append(binding.var)
        return True

    def _view_of(self, view: relax.Expr) -> list[RegionValue]:
        if isinstance(view, relax.TupleGetItem):
            return [self._results[view.tuple_value][view.index]]
        return self._results[view if isinstance(view, relax.Var) else view.args[0]]

    def _step(self, var: relax.Var, call: KernelCall) -> list[RegionValue]:
        now = len(self._drafts)
        names = [var.name] if len(call.makes) == 1 else [f"{var.name}_{i}" for i in range(len(call.makes))]
        results = [RegionValue(ty, name, now, now) for ty, name in zip(call.makes, names, strict=True)]
        self._values += results
        operands = [self._operand(arg, now) for arg in call.reads]
        draft = Draft(call.kernel, operands, results, call.scalars, var.name)
        for number, operand in call.stored_over:
            draft.take(number, operand)
        self._drafts.append(draft)
        return results

    def _operand(self, arg: relax.Expr, now: int) -> RegionValue:
        if isinstance(arg, tvm.ir.GenericConst):
            return self._constants.setdefault(arg, RegionValue(arg.ty, f"constant_{len(self._constants)}"))
        if arg in self._results:
            (value,) = self._results[arg]
            value.end = now
            return value
        source = self._source(arg)
        value = self._inputs.setdefault(source, RegionValue(source.ty, source.name))
        value.end = now
        return value

    def _source(self, var: relax.Var) -> relax.Var:
        """The tensor that a view outside of runs is a view of: kernels take its address."""
        while var in self._outside and is_view(self._block.bindings[self._block.positions[var]]):
            view = self._block.definitions[var]
            if isinstance(view, relax.TupleGetItem):
                break
            source = view if isinstance(view, relax.Var) else view.args[0]
            if known_extents(source.ty) is None:
                break
            var = source
        return var

    def _is_needed(self, var: relax.Var) -> bool:
        users = self._block.users.get(var, [])
        return not self._block.is_local(var) or any(user not in self._members for user in users)

    def _bindings(self, outlined: OutlinedRegion) -> list[relax.Binding]:
        positions = {value: number for number, value in enumerate(outlined.inputs)}
        in_place = [value for value in self._values if value.is_result and value.root in positions]
        if not outlined.results and not in_place:
            return []
        new_types = [value.ty for value in outlined.results]
        if outlined.has_arena:
            new_types.append(relax.TensorType([outlined.arena], "uint8", self._run.vdevice))
        types = [*new_types, *(value.ty for value in in_place)]
        args = relax.Tuple([*self._inputs, *self._constants, *outlined.numbers])
        if in_place:
            inplace_indices = [-1] * len(new_types) + [positions[value.root] for value in in_place]
            call = relax.call_tir_inplace(outlined.gv, args, inplace_indices, types)
        else:
            call = relax.call_tir(outlined.gv, args, types)
        buffer = self._block.new_var(outlined.gv.name_hint, tvm.ir.TupleType(types) if len(types) > 1 else types[0])
        bindings = [relax.VarBinding(buffer, typed(call, buffer.ty))]
        numbers = [*enumerate(outlined.results), *enumerate(in_place, len(new_types))]
        fields = {value: buffer if len(types) == 1 else relax.TupleGetItem(buffer, i) for i, value in numbers}
        for index in self._run.members:
            var = self._block.bindings[index].var
            if self._is_needed(var):
                bindings += self._result(var, fields)
        return bindings

    def _result(self, var: relax.Var, fields: Mapping[RegionValue, relax.Expr]) -> list[relax.Binding]:
        """Bindings of a variable of the run that later bindings read."""
        values = self._results[var]
        if isinstance(var.ty, tvm.ir.TupleType):
            parts = [self._block.new_var(value.name, value.ty) for value in values]
            bindings = [relax.VarBinding(part, fields[v]) for part, v in zip(parts, values, strict=True)]
            return [*bindings, relax.VarBinding(var, relax.Tuple(parts))]
        (value,) = values
        if known_extents(var.ty) is None or same_shape(var.ty.shape.values, value.ty.shape.values):
            return [relax.VarBinding(var, fields[value])]
        unshaped = self._block.new_var(f"{var.name}_whole", value.ty)
        reshaped = typed(relax.op.reshape(unshaped, var.ty.shape), var.ty)
        return [relax.VarBinding(unshaped, fields[value]), relax.VarBinding(var, reshaped)]


# Diagnostics: reasons why runs end, and why kernels stay outside of runs.

_CALL_PACKED = ("relax.call_packed", "relax.call_pure_packed", "relax.invoke_closure")


def why_ended(block: Block, run: Run) -> str:
    """Description of the binding that ended a run: ``transfer (lv3)``."""
    if run.ended_by is None:
        return "end of block"
    if len(run.calls) >= MAX_CALLS:
        return f"length ({MAX_CALLS} kernels)"
    binding = block.bindings[run.ended_by]
    return f"{_description(binding)} ({binding.var.name})"


def single_calls(function: str, block: Block, order: list[int | Run], calls: KernelCalls) -> list[SingleCall]:
    """The kernel calls of a block outside of runs, with reasons."""
    single: list[SingleCall] = []
    for item in order:
        binding = None if isinstance(item, Run) else block.bindings[item]
        if binding is not None and op_name(binding.value) in CALL_TIR_OPS:
            call = calls.of(binding)
            why = "no other kernel to run with" if call is not None else "it cannot be called as a plain function"
            if call is not None and call.stored_over:
                why = "it works in place"
            single.append(SingleCall(function, binding.var.name, binding.value.args[0].name_hint, why))
    return single


def _description(binding: relax.Binding) -> str:
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return "check of shapes"
    if isinstance(value, (relax.If, relax.Function)):
        return "control flow" if isinstance(value, relax.If) else "function"
    if not isinstance(value, relax.Call):
        return type(value).__name__
    name = op_name(value)
    if name in TRANSFERS:
        return "transfer"
    in_args = name in CALL_TIR_OPS or name in _CALL_PACKED
    callee = value.args[0] if in_args else value.op
    if name in CALL_TIR_OPS:
        return f"kernel {callee.name_hint}"
    if isinstance(callee, tvm.ir.GlobalVar):
        return f"call of {callee.name_hint}"
    if isinstance(callee, relax.ExternFunc):
        return f"call of {callee.global_symbol}"
    return str(name or "call of a closure")


def form_command_buffers(mod: tvm.IRModule, separate_kernels: bool = False) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    separate_kernels : bool
        True if kernels of llvm devices are compiled separately from the host function, as in ``rh.compile``. Only
        then kernels with temporaries in TVM's workspace join, which stock TVM cannot build.
    """
    if is_lowered(mod) or not vdevices_of(mod) or any(COMMANDS in func.attrs for func in mod.functions.values()):
        return mod
    bound = mod if all(map(_has_target, mod.functions.values())) else bind_targets(mod)
    if not is_formed(bound):  # FormDispatches would fuse command buffers with ops
        return mod
    # A reshape as a kernel would copy.
    former = _Former(relax.transform.RewriteDataflowReshape()(with_root_blocks(bound)), separate_kernels)
    functions = {
        gv: rewrite_function(func, former.in_function(gv.name_hint, func)) for gv, func in relax_functions(former.mod)
    }
    return former.finish(functions) if former.outlined else mod


FormCommandBuffers = declare_pass("FormCommandBuffers", form_command_buffers)


class _Former:
    """Collects the command buffers of a module."""

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool) -> None:
        self.mod = mod
        self.outlined: list[OutlinedRegion] = []
        self.single: list[SingleCall] = []
        self._finder = RunFinder(mod, separate_kernels)
        self._used_names = self._finder.calls.used_names

    def in_function(self, name: str, func: relax.Function) -> Rewrite:
        """Rewrite for the blocks of the function `name`."""
        variables, sizes = DonatedVariables(func), sizes_of_peers(func, self._finder.calls)

        def rewrite(block: Block) -> list[relax.Binding] | None:
            free = variables.of(block)
            order = self._finder.cut(block, free)
            self.single += single_calls(name, block, order, self._finder.calls)
            if not any(isinstance(item, Run) for item in order):
                return None
            stay = {block.bindings[item].var for item in order if not isinstance(item, Run)}
            bindings: list[relax.Binding] = []
            for item in order:
                if isinstance(item, Run):
                    outliner = RunOutliner(block, item, stay, self._finder.calls, free, sizes)
                    bindings += self._outlined(name, outliner, why_ended(block, item))
                else:
                    bindings.append(block.bindings[item])
            # Views of a command buffer's inputs are unused now: it takes the tensor itself.
            return without_unused(bindings, block, _is_view)

        return rewrite

    def _outlined(self, function: str, outliner: RunOutliner, ended: str) -> list[relax.Binding]:
        gv = fresh_global_var(f"{function}_commands", tvm.ir.Type.missing(), self._used_names)
        outlined, bindings = outliner.record(function, gv)
        outlined.ended_by = ended
        if bindings:
            self.outlined.append(outlined)
        return bindings

    def finish(self, functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> tvm.IRModule:
        """The module with its command buffers; kernels that only they call remain as raw kernels only."""
        kernels = {**dict(self.mod.functions.items()), **self._finder.calls.functions}
        result = {**dict(self.mod.functions.items()), **functions}
        referenced = _referenced_names(result.values())
        replaced: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        signatures: dict[tvm.ir.GlobalVar, RawSignature] = {}
        for kernel in dict.fromkeys(gv for outlined in self.outlined for gv in outlined.kernels):
            func = kernels[kernel]
            is_referenced = kernel.name_hint in referenced or "global_symbol" in func.attrs
            raw = fresh_global_var(f"{kernel.name_hint}_raw", kernel.ty, self._used_names) if is_referenced else kernel
            replaced[kernel] = raw
            signature = self._finder.calls.signature(kernel)
            assert signature is not None, f"{kernel.name_hint} is not a kernel of a run"
            result[raw] = raw_kernel(func, signature)
            signatures[kernel] = signature
        for kernel in self._finder.calls.replaced:
            is_kept = kernel in replaced or kernel.name_hint in referenced or "global_symbol" in kernels[kernel].attrs
            if not is_kept:
                del result[kernel]
        vdevices = vdevices_of(self.mod)
        for outlined in self.outlined:
            host = with_region(outlined.host_function(replaced), region_spec(outlined, vdevices))
            result[typed(outlined.gv, host.ty)] = host
            for kernel, spec in kernel_specs(outlined, kernels, signatures, vdevices).items():
                raw = replaced[kernel]
                result[raw] = with_kernel(result[raw], spec, raw.name_hint)
        return with_remarks(copy_module(self.mod, result), single_calls=self.single)


def _has_target(func: tvm.ir.BaseFunc) -> bool:
    return not isinstance(func, tirx.PrimFunc) or "target" in func.attrs


def _is_view(value: relax.Expr) -> bool:
    return isinstance(value, relax.Var) or op_name(value) == RESHAPE


def _referenced_names(functions: Iterable[tvm.ir.BaseFunc]) -> set[str]:
    """The names that functions refer to: by global variable, or by string, as PrimFuncs may."""
    occurring = [node for func in functions for node in nodes(func.body, tvm.ir.GlobalVar, tvm.ir.StringImm)]
    return {node.name_hint if isinstance(node, tvm.ir.GlobalVar) else node.value for node in occurring}
