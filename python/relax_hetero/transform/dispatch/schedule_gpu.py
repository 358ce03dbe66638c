"""ScheduleGPU: kernels of GPUs without a schedule get blocks and threads.

Before::

    for i in range(4096):
        with T.sblock("exp"): y[i] = T.exp(x[i])

After::

    for block in T.thread_binding(16, thread="blockIdx.x"):
        for thread in T.thread_binding(64, thread="threadIdx.x"):
            x_vector[0:4] = x[block * 256 + thread * 4 : ...]     # 16 bytes at once
            for lane in T.unroll(4): y_vector[lane] = T.exp(x_vector[lane])
            y[block * 256 + thread * 4 : ...] = y_vector[0:4]

The device's back end schedules; the rules for GPUs are in `relax_hetero.tir.cuda.loops`. Kernels that bind threads
already are left as written. A kernel that matches no rule runs statement by statement, in one thread unless its
iterations are provably independent: slower, still correct.

Assumes BindTargets. A second run changes nothing.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import StructuralKey

from ...target.backend import backend_of
from ...tir.core.walks import any_node, binds_threads, nodes, replaced
from ...tir.cuda.loops import Launch, launches_of
from ...tir.cuda.loops.cuda_scatter import SEVERAL_LAUNCHES
from ..ir.blocks import Block, rewrite_function, shape_of, tensor_type
from ..ir.declare import declare_pass
from ..ir.kernels import called_prim_func
from ..ir.op_names import CALL_TIR
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    op_name,
    relax_functions,
    tensor_types,
    typed,
    with_functions,
    without_unused_kernels,
)

# Kernels of GPUs that take several launches become several kernels, with tensors between them.
#
# Before, where `normalize` launches a reduction and then a map, and allocates the sums between them::
#
#     y = R.call_tir(cls.normalize, (x,), out_ty=R.Tensor((64, 1000), "float32", "cuda:0"))
#
# After::
#
#     y_part = R.call_tir(cls.normalize_1, (x,), out_ty=R.Tensor((64,), "float32", "cuda:0"))
#     y = R.call_tir(cls.normalize_2, (x, y_part), out_ty=R.Tensor((64, 1000), "float32", "cuda:0"))
#
# Memory between the launches is planned with all other memory, and each launch can be a node of a CUDA graph. A launch
# that updates the result of an earlier one (a scatter over a copy) works in place.


def split_launches(mod: tvm.IRModule, kernels: set[tvm.ir.GlobalVar]) -> tvm.IRModule:
    """Split the calls of kernels that take several launches; the module itself if each takes one."""
    launches_by_kernel = {gv: launches_of(mod.functions[gv]) for gv in kernels}
    splitter = _Splitter(mod, {gv: launches for gv, launches in launches_by_kernel.items() if launches})
    if not splitter.launches:
        return mod
    rewritten = {gv: rewrite_function(func, splitter.rewrite) for gv, func in relax_functions(mod)}
    return without_unused_kernels(with_functions(mod, {**rewritten, **splitter.functions}), splitter.launches)


class _Splitter:
    def __init__(self, mod: tvm.IRModule, launches: dict[tvm.ir.GlobalVar, list[Launch]]) -> None:
        self.mod, self.launches = mod, launches
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._launch_names: dict[tvm.ir.GlobalVar, list[tvm.ir.GlobalVar]] = {}
        self._is_dataflow = False
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}

    def rewrite(self, block: Block) -> list[relax.Binding] | None:
        """The bindings of a block with split calls; None if nothing is split."""
        self._is_dataflow = block.is_dataflow
        groups = [self._change(binding) for binding in block.bindings]
        return [binding for group in groups for binding in group] if any(len(g) != 1 for g in groups) else None

    def _change(self, binding: relax.Binding) -> list[relax.Binding]:
        value = binding.value
        gv = called_prim_func(self.mod, value)
        is_plain = op_name(value) == CALL_TIR and len(value.args) == 2 and isinstance(value.args[1], relax.Tuple)
        if gv not in self.launches or not is_plain or not isinstance(binding, relax.VarBinding):
            return [binding]
        return self._split(gv, binding) or [binding]

    def _split(self, gv: tvm.ir.GlobalVar, binding: relax.VarBinding) -> list[relax.Binding] | None:
        func, call = self.mod.functions[gv], binding.value
        types = list(tensor_types(call.ty))
        args = list(call.args[1].fields)
        results = list(func.params)[len(args) :]
        if len(results) != len(types) or any(not isinstance(p, tvm.ir.Var) for p in func.params):
            return None
        extents = _extents(func, args, types)
        values: dict[tirx.Var, relax.Expr] = dict(zip(func.params, args, strict=False))
        result_types = dict(zip(results, types, strict=True))
        first_type = next((ty for ty in types), None)
        bindings: list[relax.Binding] = []
        launches = self.launches[gv]
        for number, (launch, name) in enumerate(zip(launches, self._names_of_launches(gv), strict=True)):
            written_types = []
            for buffer in launch.writes:
                ty = result_types.get(buffer)
                if ty is None:
                    shape = [_extent_at_call(extent, extents) for extent in buffer.shape]
                    if any(extent is None for extent in shape) or first_type is None:
                        return None
                    ty = tensor_type(shape, str(buffer.dtype), first_type)
                written_types.append(ty)
            operands = [values[var] for var in (*launch.reads, *launch.updates)]
            written_types = [*(values[buffer].ty for buffer in launch.updates), *written_types]
            if launch.updates:
                inplace_indices = [*range(len(launch.reads), len(operands)), *[-1] * len(launch.writes)]
                new = relax.call_tir_inplace(name, relax.Tuple(operands), inplace_indices, written_types)
            else:
                new = relax.call_tir(
                    name, relax.Tuple(operands), written_types if len(written_types) > 1 else written_types[0]
                )
            is_last, outputs = number == len(launches) - 1, [*launch.updates, *launch.writes]
            if is_last and outputs == results:
                return [*bindings, relax.VarBinding(binding.var, typed(new, call.ty), binding.span)]
            ty = written_types[0] if len(written_types) == 1 else tvm.ir.TupleType(written_types)
            var = self._variable(f"{binding.var.name}_part{number}", ty)
            bindings.append(relax.VarBinding(var, typed(new, ty)))
            for i, buffer in enumerate(outputs):
                values[buffer] = var
                if len(written_types) > 1:
                    field = self._variable(f"{var.name}_{i}", written_types[i])
                    bindings.append(relax.VarBinding(field, relax.TupleGetItem(var, i)))
                    values[buffer] = field
        fields = [values[buffer] for buffer in results]
        last = fields[0] if len(fields) == 1 else relax.Tuple(fields)
        return [*bindings, relax.VarBinding(binding.var, last, binding.span)]

    def _variable(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        return (relax.DataflowVar if self._is_dataflow else relax.Var)(name, ty)

    def _names_of_launches(self, gv: tvm.ir.GlobalVar) -> list[tvm.ir.GlobalVar]:
        if gv not in self._launch_names:
            self._launch_names[gv] = []
            for number, launch in enumerate(self.launches[gv], 1):
                name = fresh_global_var(f"{gv.name_hint}_{number}", launch.func.ty, self._used_names)
                self.functions[name] = launch.func
                self._launch_names[gv].append(name)
        return self._launch_names[gv]


def _extents(func: tirx.PrimFunc, args: list[relax.Expr], types: list[relax.TensorType]) -> dict[tirx.Var, Any]:
    """Values of a kernel's symbolic extents at a call."""
    extents: dict[tirx.Var, Any] = {}
    shapes = [shape_of(arg) if is_buffer_var(p) else None for p, arg in zip(func.params, args, strict=False)]
    shapes += [list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None for ty in types]
    for param, shape in zip(func.params, shapes, strict=True):
        if not is_buffer_var(param):
            extents[param] = args[list(func.params).index(param)]
        elif shape is not None:
            pairs = zip(param.shape, shape, strict=False)
            extents.update({symbol: extent for symbol, extent in pairs if isinstance(symbol, tirx.Var)})
    return extents


def _extent_at_call(extent: Any, extents: dict[tirx.Var, Any]) -> Any:
    """An extent of a kernel's internal tensor at a call; None if it is unknown there."""
    return replaced(extent, extents) if all(var in extents for var in nodes(extent, tvm.ir.Var)) else None


def schedule_gpu(mod: tvm.IRModule) -> tvm.IRModule:
    """Schedule the kernels of GPUs that do not bind threads yet."""
    schedules: dict[StructuralKey, tirx.PrimFunc] = {}
    functions = dict(mod.functions.items())
    scheduled: set[tvm.ir.GlobalVar] = set()
    for gv, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or not _is_gpu(func):
            continue
        if SEVERAL_LAUNCHES in func.attrs:
            scheduled.add(gv)
            continue
        if binds_threads(func.body) or _has_thread_extents(func.body):
            continue
        key = StructuralKey(func)
        if key not in schedules:
            schedules[key] = backend_of(func.attrs["target"]).schedule(func)
        functions[gv] = schedules[key]
        scheduled.add(gv)
    changed = copy_module(mod, functions) if schedules else mod
    return split_launches(changed, scheduled) if scheduled else mod


ScheduleGPU = declare_pass("ScheduleGPU", schedule_gpu)


def _has_thread_extents(body: tirx.Stmt) -> bool:
    return any_node(body, tirx.AttrStmt, lambda node: node.attr_key == "thread_extent")


def _is_gpu(func: tirx.PrimFunc) -> bool:
    return "gpu" in getattr(func.attrs.get("target"), "keys", ()) and "tirx.is_scheduled" not in func.attrs
