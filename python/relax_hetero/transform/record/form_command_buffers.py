"""FormCommandBuffers: runs of kernels on one device become one host function, which calls them one after the other.

Before::

    lv = R.call_tir(cls.scale, (x, w), out_ty=R.Tensor((4,), "float32", "llvm:0"))
    gv = R.call_tir(cls.shift, (lv,), out_ty=R.Tensor((4,), "float32", "llvm:0"))

After::

    buffer = R.call_tir(cls.main_commands, (x, w), out_ty=[R.Tensor((4,), "float32", "llvm:0"),
                                                           R.Tensor((64,), "uint8", "llvm:0")])   # gv, and the arena
    gv = buffer[0]

`main_commands` is a PrimFunc with a target like any other. It takes what the run reads and nothing else gives, what
others read of the run, and an arena, where the run's transient values lie by lifetime; the kernels become plain
functions of pointers (`tir.core.raw_kernel`). Control flow, transfers of what the run made, work on another device and
calls of unknown functions end a run (`command_regions`). The module stays one that stock TVM can build.

What each buffer does stands on its host function as an attribute, as data (`artifact.commands.RegionSpec`).

Assumes FormDispatches: a module that has still to be formed is returned as it is. So is a lowered one, and one whose
runs are outlined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...artifact.commands import READ, READ_WRITE, WRITE, SingleCall
from ...target.vdevice import vdevices_of
from ...tir.core.raw_kernel import RawSignature, raw_kernel
from ...tir.core.ties import Tie
from ..dispatch.bind_targets import bind_targets
from ..dispatch.form_dispatches import is_formed
from ..ir.blocks import Block, Rewrite, rewrite_function, same_shape, with_root_blocks, without_unused
from ..ir.declare import declare_pass
from ..ir.extents import known_extents
from ..ir.module_attrs import COMMANDS, is_lowered
from ..ir.op_names import CALL_TIR_OPS, RESHAPE, TRANSFER
from ..ir.remarks import with_remarks
from ..ir.rewriting import copy_module, fresh_global_var, op_name, relax_functions, typed
from .command_regions import MAX_CALLS, Run, RunFinder, is_view
from .donated import DonatedVariables
from .kernel_calls import KernelCall, KernelCalls
from .plan_arena import Lifetime, plan_arena
from .region_attrs import kernel_specs, region_spec, with_kernel, with_region
from .region_ir import OutlinedRegion, RegionStep, RegionValue

# A run of kernels becomes a command buffer: what it reads and gives, where its transient values lie, its commands.


@dataclass
class Draft:
    """A call of a kernel in a run, before it is known which results take the memory of an operand.

    Attributes
    ----------
    kernel : tvm.ir.GlobalVar
    reads, makes : list of RegionValue
    scalars : tuple
    variable : str
    over : dict
        From a result's number to that of the operand whose memory it takes. Of a kernel that works in place anyway
        this is given; of any other it has one pair at most.
    """

    kernel: tvm.ir.GlobalVar
    reads: list[RegionValue]
    makes: list[RegionValue]
    scalars: tuple[object, ...]
    variable: str
    over: dict[int, int] = field(default_factory=dict)

    def take(self, result: int, operand: int) -> None:
        """Have a result take the memory of an operand."""
        self.over[result] = operand
        self.makes[result].over = self.reads[operand]


def take_operands(
    drafts: Sequence[Draft],
    ties: Callable[[tvm.ir.GlobalVar], list[Tie]],
    made: Collection[RegionValue],
    free: Collection[RegionValue],
) -> list[Draft]:
    """Have results take the memory of operands; the drafts of which one does now.

    Parameters
    ----------
    drafts : sequence of Draft
        In order; `RegionValue.end` and `RegionValue.is_result` are final.
    ties : callable
        Function that gives the ties of a kernel: numbers of its tensors, operands first.
    made : collection of RegionValue
        Values that the run makes.
    free : collection of RegionValue
        Those that the run is given and may overwrite.
    """
    made, free = frozenset(made), frozenset(free)
    taken: list[Draft] = []
    for now, draft in enumerate(drafts):
        if draft.over:
            continue
        pairs = ties(draft.kernel)
        for operand, result in pairs:
            value, number = draft.reads[operand], result - len(draft.reads)
            is_free = value.home in free and _same_form(value.home, draft.makes[number])
            if (is_free or value.home in made) and _is_last_reader(draft, operand, result, now, pairs):
                draft.take(number, operand)
                taken.append(draft)
                break
    kept = _without_unused(taken, free)
    if len(kept) < len(taken):
        RegionValue.forget_homes(made)
    return kept


def _is_last_reader(draft: Draft, operand: int, result: int, now: int, pairs: Sequence[Tie]) -> bool:
    """Return whether nothing else reads an operand from a kernel on, the kernel's other operands included."""
    value = draft.reads[operand]
    others = [i for i, other in enumerate(draft.reads) if other.home is value.home]
    return value.end == now and not value.is_result and all((other, result) in pairs for other in others)


def _same_form(one: RegionValue, other: RegionValue) -> bool:
    """Return whether two values have one shape: an operand may be shown in another than it has."""
    return same_shape(one.ty.shape.values, other.ty.shape.values)


def _without_unused(taken: list[Draft], free: Collection[RegionValue]) -> list[Draft]:
    """Less those at the end of a chain that overwrites what the run was given for nothing that is read after it."""
    kept: list[Draft] = []
    needed: set[RegionValue] = set()
    for draft in reversed(taken):
        ((number, operand),) = draft.over.items()
        result = draft.makes[number]
        if result.home in free and not (result.is_result or result in needed):
            draft.over, result.over = {}, None
            continue
        needed.add(draft.reads[operand])
        kept.append(draft)
    return kept[::-1]


class RunOutliner:
    """Records one run of a block.

    Parameters
    ----------
    block : Block
    run : Run
        Run of the block.
    outside : set of relax.Var
        The variables of the block that are bound outside of any run.
    kernels : KernelCalls
    free : set of relax.Var
        Variables that only this block uses, and that may be overwritten where nothing reads them later.
    """

    def __init__(
        self, block: Block, run: Run, outside: Set[relax.Var], kernels: KernelCalls, free: Set[relax.Var] = frozenset()
    ) -> None:
        self._block, self._run, self._outside, self._kernels, self._free = block, run, outside, kernels, free
        self._members = set(run.members)
        self._results: dict[relax.Var, list[RegionValue]] = {}
        self._values: list[RegionValue] = []
        self._inputs: dict[relax.Var, RegionValue] = {}
        self._constants: dict[tvm.ir.GenericConst, RegionValue] = {}
        self._drafts: list[Draft] = []

    def record(self, function: str, gv: tvm.ir.GlobalVar) -> tuple[OutlinedRegion, list[relax.Binding]]:
        """The command buffer, to be called `gv`, and the bindings in the run's place: none if no one reads it."""
        for index in self._run.members:
            var = self._block.bindings[index].var
            call = self._run.calls.get(index)
            self._results[var] = self._viewed(self._block.definitions[var]) if call is None else self._step(var, call)
            if self._is_needed(var):
                for value in self._results[var]:
                    value.is_result = True
        steps = self._steps()
        arena = self._placed()
        inputs, constants = list(self._inputs.values()), list(self._constants.values())
        given = set(inputs)
        results = [value for value in self._values if value.is_result and value.home not in given]
        outlined = OutlinedRegion(gv, function, self._run.vdevice, inputs, constants, results, [], arena, steps)
        said = {e for v in (*inputs, *constants, *results) for e in v.shape if isinstance(e, tirx.Var)}
        outlined.numbers = [symbol for symbol in outlined.symbols() if symbol not in said]
        return outlined, self._bindings(outlined)

    def _steps(self) -> list[RegionStep]:
        """The calls as they will be made, results over operands where they may be."""
        free = [value for var, value in self._inputs.items() if var in self._free and self._is_inside(var)]
        taken = take_operands(self._drafts, self._kernels.ties, self._values, free)
        for draft in taken:
            ((number, operand),) = draft.over.items()
            draft.kernel = self._kernels.in_place(draft.kernel, (operand, len(draft.reads) + number))
        steps = []
        for draft in self._drafts:
            access = [READ_WRITE if i in draft.over.values() else READ for i in range(len(draft.reads))]
            made = [value for i, value in enumerate(draft.makes) if i not in draft.over]
            operands, all_access = (*draft.reads, *made), (*access, *[WRITE] * len(made))
            steps.append(RegionStep(draft.kernel, operands, all_access, draft.scalars, draft.variable))
        return steps

    def _placed(self) -> Any:
        """Give transient values their places in the arena; its bytes."""
        homes: dict[RegionValue, list[RegionValue]] = {}
        for value in self._values:
            homes.setdefault(value.home, []).append(value)
        given = set(self._inputs.values())
        transient = [home for home, all_ in homes.items() if home not in given and not any(v.is_result for v in all_)]
        arena = plan_arena([Lifetime(v.nbytes, v.begin, max(w.end for w in homes[v])) for v in transient])
        for value, offset in zip(transient, arena.offsets, strict=True):
            value.offset = offset
        return arena.nbytes

    def _is_inside(self, var: relax.Var) -> bool:
        """Return whether what uses a variable is in the run, or shows it to the run alone."""
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

    def _viewed(self, view: relax.Expr) -> list[RegionValue]:
        if isinstance(view, relax.TupleGetItem):
            return [self._results[view.tuple_value][view.index]]
        return self._results[view if isinstance(view, relax.Var) else view.args[0]]

    def _step(self, var: relax.Var, call: KernelCall) -> list[RegionValue]:
        now = len(self._drafts)
        names = [var.name] if len(call.makes) == 1 else [f"{var.name}_{i}" for i in range(len(call.makes))]
        made = [RegionValue(ty, name, now, now) for ty, name in zip(call.makes, names, strict=True)]
        self._values += made
        read = [self._operand(arg, now) for arg in call.reads]
        draft = Draft(call.kernel, read, made, call.scalars, var.name)
        for number, operand in call.over:
            draft.take(number, operand)
        self._drafts.append(draft)
        return made

    def _operand(self, arg: relax.Expr, now: int) -> RegionValue:
        if isinstance(arg, tvm.ir.GenericConst):
            return self._constants.setdefault(arg, RegionValue(arg.ty, f"constant_{len(self._constants)}"))
        if arg in self._results:
            (value,) = self._results[arg]
            value.end = now
            return value
        shown = self._aliased(arg)
        value = self._inputs.setdefault(shown, RegionValue(shown.ty, shown.name))
        value.end = now
        return value

    def _aliased(self, var: relax.Var) -> relax.Var:
        """The tensor that a view shows, if no run made it: kernels take it as it is, by its address."""
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
        over = [value for value in self._values if value.is_result and value.home in positions]
        if not outlined.results and not over:
            return []
        fresh = [value.ty for value in outlined.results]
        if outlined.has_arena:
            fresh.append(relax.TensorType([outlined.arena], "uint8", self._run.vdevice))
        types = [*fresh, *(value.ty for value in over)]
        args = relax.Tuple([*self._inputs, *self._constants, *outlined.numbers])
        if over:
            places = [-1] * len(fresh) + [positions[value.home] for value in over]
            call = relax.call_tir_inplace(outlined.gv, args, places, types)
        else:
            call = relax.call_tir(outlined.gv, args, types)
        buffer = self._local(outlined.gv.name_hint, tvm.ir.TupleType(types) if len(types) > 1 else types[0])
        bindings = [relax.VarBinding(buffer, typed(call, buffer.ty))]
        numbers = [*enumerate(outlined.results), *enumerate(over, len(fresh))]
        fields = {value: buffer if len(types) == 1 else relax.TupleGetItem(buffer, i) for i, value in numbers}
        for index in self._run.members:
            var = self._block.bindings[index].var
            if self._is_needed(var):
                bindings += self._result(var, fields)
        return bindings

    def _result(self, var: relax.Var, fields: Mapping[RegionValue, relax.Expr]) -> list[relax.Binding]:
        """Bindings of a variable of the run that something after it reads."""
        values = self._results[var]
        if isinstance(var.ty, tvm.ir.TupleType):
            parts = [self._local(value.name, value.ty) for value in values]
            bindings = [relax.VarBinding(part, fields[v]) for part, v in zip(parts, values, strict=True)]
            return [*bindings, relax.VarBinding(var, relax.Tuple(parts))]
        (value,) = values
        if known_extents(var.ty) is None or same_shape(var.ty.shape.values, value.ty.shape.values):
            return [relax.VarBinding(var, fields[value])]
        whole = self._local(f"{var.name}_whole", value.ty)
        shaped = typed(relax.op.reshape(whole, var.ty.shape), var.ty)
        return [relax.VarBinding(whole, fields[value]), relax.VarBinding(var, shaped)]

    def _local(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        return (relax.DataflowVar if self._block.is_dataflow else relax.Var)(name, ty)


# Why runs of kernels end where they do, and kernels stay outside of runs, in words.

_CALL_PACKED = ("relax.call_packed", "relax.call_pure_packed", "relax.invoke_closure")


def why_ended(block: Block, run: Run) -> str:
    """Description of the binding that ended a run, since it could neither join nor move: ``a transfer (lv3)``."""
    if run.ended_by is None:
        return "end of block"
    if len(run.calls) >= MAX_CALLS:
        return f"length ({MAX_CALLS} kernels)"
    binding = block.bindings[run.ended_by]
    return f"{_what(binding)} ({binding.var.name})"


def single_calls(function: str, block: Block, order: list[int | Run], calls: KernelCalls) -> list[SingleCall]:
    """The kernels of a block that no run took."""
    found: list[SingleCall] = []
    for item in order:
        binding = None if isinstance(item, Run) else block.bindings[item]
        if binding is not None and op_name(binding.value) in CALL_TIR_OPS:
            call = calls.of(binding)
            why = "no other kernel to run with" if call is not None else "it cannot be called as a plain function"
            if call is not None and call.over:
                why = "it works in place"
            found.append(SingleCall(function, binding.var.name, binding.value.args[0].name_hint, why))
    return found


def _what(binding: relax.Binding) -> str:
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return "check of shapes"
    if isinstance(value, (relax.If, relax.Function)):
        return "control flow" if isinstance(value, relax.If) else "function"
    if not isinstance(value, relax.Call):
        return type(value).__name__
    name = op_name(value)
    if name == TRANSFER:
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
        Whether kernels of llvm devices will be compiled apart from the host function, as ``rh.compile`` does. Only
        then kernels with temporaries in TVM's workspace join, which stock TVM cannot build.
    """
    if is_lowered(mod) or not vdevices_of(mod) or any(COMMANDS in func.attrs for func in mod.functions.values()):
        return mod
    bound = mod if all(map(_has_target, mod.functions.values())) else bind_targets(mod)
    if not is_formed(bound):  # FormDispatches would fuse buffers with what it has yet to make kernels of
        return mod
    # Views must be seen as such: a reshape that is a kernel copies.
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
        """Function that rewrites the blocks of a function."""
        variables = DonatedVariables(func)

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
                    outliner = RunOutliner(block, item, stay, self._finder.calls, free)
                    bindings += self._outlined(name, outliner, why_ended(block, item))
                else:
                    bindings.append(block.bindings[item])
            # Views of what a buffer reads are of no use any more: it takes the tensor itself.
            return without_unused(bindings, block, _is_view)

        return rewrite

    def _outlined(self, function: str, outliner: RunOutliner, ended: str) -> list[relax.Binding]:
        gv = fresh_global_var(f"{function}_commands", tvm.ir.Type.missing(), self._used_names)
        outlined, bindings = outliner.record(function, gv)
        outlined.ended = ended
        if bindings:
            self.outlined.append(outlined)
        return bindings

    def finish(self, functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> tvm.IRModule:
        """The module with its command buffers; kernels that nobody else calls are raw ones only."""
        kernels = {**dict(self.mod.functions.items()), **self._finder.calls.functions}
        result = {**dict(self.mod.functions.items()), **functions}
        called = _called(result.values())
        replaced: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        signatures: dict[tvm.ir.GlobalVar, RawSignature] = {}
        for kernel in dict.fromkeys(gv for outlined in self.outlined for gv in outlined.kernels):
            func = kernels[kernel]
            stays = kernel.name_hint in called or "global_symbol" in func.attrs
            raw = fresh_global_var(f"{kernel.name_hint}_raw", kernel.ty, self._used_names) if stays else kernel
            replaced[kernel] = raw
            signature = self._finder.calls.signature(kernel)
            assert signature is not None, f"{kernel.name_hint} is no kernel of a run"
            result[raw] = raw_kernel(func, signature)
            signatures[kernel] = signature
        for kernel in self._finder.calls.replaced:
            is_kept = kernel in replaced or kernel.name_hint in called or "global_symbol" in kernels[kernel].attrs
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


def _called(functions: Iterable[tvm.ir.BaseFunc]) -> set[str]:
    """The names of functions that others refer to: by variable, or as PrimFuncs may, by name."""
    found: set[str] = set()
    seen = [
        (tvm.ir.GlobalVar, lambda gv: found.add(gv.name_hint)),
        (tvm.ir.StringImm, lambda text: found.add(text.value)),
    ]
    for func in functions:
        structural_walk(func.body, seen)
    return found
