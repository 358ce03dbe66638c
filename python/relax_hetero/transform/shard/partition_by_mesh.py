"""PartitionByMesh: values over a mesh of devices become a value of each device, and exchanges between devices.

Before, for devices ``llvm:0`` and ``llvm:1``::

    def main(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        a: "llvm[0:2]" = R.matmul(x, w)   # w: (8, 16), a constant
        b: "llvm[0:2]" = R.nn.relu(a)
        c: "llvm[0:2]" = R.matmul(b, v)   # v: (16, 8)
        return c

After::

    def main(x: "llvm:0"):
        x@1: "llvm:1" = R.to_vdevice(x)
        a: "llvm:0" = R.matmul(x, w[:, :8])
        a@1: "llvm:1" = R.matmul(x@1, w[:, 8:])
        b, b@1 = R.nn.relu(a), R.nn.relu(a@1)
        c_part = R.matmul(b, v[:8]);  c_part@1 = R.matmul(b@1, v[8:])
        c = R.add(c_part, R.to_vdevice(c_part@1, "llvm:0"))   # an all-reduce, of which only one result is used
        return c

Along each axis of its mesh, a value is replicated, split, or a sum of what the devices have (`Sharding`). Annotations
give values a mesh, and spread forward to values without one; ``R.hetero.shard`` gives them a sharding. All other
shardings follow from operands by the rules of ops (`sharding_rules`), first to last, along one axis of the mesh after
the other. A value that a reader needs with another sharding is exchanged once for all such readers (`exchanges`).
Results of functions are whole, on the first device of their mesh.

The attribute `SPLIT_PARAMETERS` of a function names parameters, such as caches, that callers give in parts, one for
each device: they become as many parameters, and results with their names as many results. It may name results only.

Functions over meshes that others call are inlined there. A ``match_cast`` is one on each device, of its part.

A branch begins with the whole of each value on all devices of the value's mesh, and ends with the whole result on one
device. So does a function that calls itself, such as a loop, whose parameters are on single devices. Both are refused
on GPUs, whose kernels wait for each other.

Assumes devices of one host. A module without meshes and that attribute is returned as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.distributed import DTensorType

from ...display.text import plural
from ...errors import PlacementError
from ...op.placement import hinted_vdevice
from ...op.sharding import SHARD, split_axes
from ...op.traits import traits_of
from ...target.mesh import Mesh, mesh_of
from ...target.vdevice import device_name, vdevice_index, vdevices_of
from ...tir.core.walks import replaced
from ..ir.blocks import renamed, shape_of, used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import HINT, TRANSFER
from ..ir.remarks import with_remarks
from ..ir.rewriting import (
    calls_pure_op,
    copy_module,
    is_tensor_constant,
    op_name,
    rebound,
    relax_functions,
    tensor_types,
    typed,
    vdevice_in,
    walk_bindings,
    with_args,
)
from .exchanges import Exchanges, MeshValue, whole_on
from .inlining import callees_of, has_mesh, recursive_functions, with_inlined_calls
from .local_bindings import LocalBindings, Make, numbered, on_device
from .local_calls import CallPlan, LocalCall
from .preferred_splits import PreferredSplits, leaves
from .sharding import PARTIAL, Sharding, Shardings, divide, extended, known, local_shape
from .sharding_costs import Readers, ShardingCosts, Splits, elements_of, nbytes_of, readers_of
from .sharding_rules import (
    REDUCTIONS,
    RESHAPES,
    WEIGHT_OPS,
    OpCall,
    Operand,
    columns_axis,
    passes_on,
    plan_op,
)
from .weights import Cuts, Weights

SPLIT_PARAMETERS = "relax_hetero.split_parameters"
"""On a function: JSON of a mapping from a parameter's name to ``{"placement": "S[1]", "names": [...], "mesh": [0]}``,
the placement of its parts, or "R" for copies, the names of the parameters that take its place, and the positions of
their devices in the module's list."""


def partition_by_mesh(mod: tvm.IRModule, by_cost: bool = True) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    by_cost : bool
        False to split every product that rules can, even if its exchanges take longer than what it saves.

    Raises
    ------
    PlacementError
        If a function over a mesh of GPUs has branches or calls itself, or a value cannot be split as it says.
    """
    _refuse_distributed_ops(mod)
    vdevices = vdevices_of(mod)
    if not any(_is_partitioned(func) for _, func in relax_functions(mod)):
        return mod
    mod = with_inlined_calls(mod)
    recursive = recursive_functions(mod)
    over_meshes = {
        gv: func for gv, func in relax_functions(mod) if _is_partitioned(func) or callees_of(func, recursive)
    }
    callees = {gv: over_meshes[gv] for gv in recursive}
    cuts: Cuts = {}
    builder = relax.BlockBuilder(mod)
    costs = ShardingCosts(vdevices) if by_cost else None
    reasons: dict[str, str] = {}
    kernels: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc] = {}
    partitions: dict[tvm.ir.GlobalVar, relax.Function] = {}
    for gv in sorted(over_meshes, key=lambda gv: _elements(over_meshes[gv]), reverse=True):
        # Functions with most work first: others follow them in the splits of weights, which are stored once.
        func = over_meshes[gv]
        is_dataflow = all(isinstance(block, relax.DataflowBlock) for block in func.body.blocks)
        bindings = LocalBindings(builder, vdevices, is_dataflow, kernels)
        partition = _FunctionPartition(gv.name_hint, func, cuts, bindings, costs, reasons, callees)
        if gv in recursive:
            partition.home = partition.home_of_results(func)
        partitions[gv] = partition.function()
    names = {gv: typed(tvm.ir.GlobalVar(gv.name_hint), func.ty) for gv, func in partitions.items()}
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in mod.functions.items():
        func = partitions.get(gv, func)
        if gv in partitions and callees_of(func, recursive):
            func = replaced(func, names, tvm.ir.GlobalVar)
        functions[names.get(gv, gv)] = func
    return with_remarks(copy_module(mod, {**functions, **kernels}), shardings=reasons or None)


PartitionByMesh = declare_pass("PartitionByMesh", partition_by_mesh)


def _is_partitioned(func: relax.Function) -> bool:
    return SPLIT_PARAMETERS in (func.attrs or {}) or has_mesh(func)


def _refuse_distributed_ops(mod: tvm.IRModule) -> None:
    """PlacementError for a module with types or ops of TVM's ``relax.distributed``."""
    for gv, func in relax_functions(mod):
        bindings = list(walk_bindings(func.body))
        names = [str(param.name) for param in func.params if isinstance(param.ty, DTensorType)]
        names += [str(each.var.name) for each in bindings if (op_name(each.value) or "").startswith("relax.dist.")]
        if names:
            raise PlacementError(
                f"{names[0]!r} in function {gv.name_hint!r} is a DTensor, or the result of an op of R.dist, which "
                "TVM's relax.distributed lowers; expected annotations of a mesh, such as R.Tensor((8, 8), 'float32', "
                "'cuda[0:2]'), and R.hetero.shard(x, 'S[0]') for parts"
            )


def _elements(func: relax.Function) -> int:
    """Elements of all values in a function."""
    return sum(elements_of(binding.var.ty) for binding in walk_bindings(func.body))


class _FunctionPartition:
    """Partitions one function, or a branch."""

    def __init__(
        self,
        name: str,
        func: relax.Function,
        cuts: Cuts,
        bindings: LocalBindings,
        costs: ShardingCosts | None,
        reasons: dict[str, str],
        callees: Mapping[tvm.ir.GlobalVar, relax.Function],
    ) -> None:
        self._name, self._func, self._bindings, self._cuts = name, func, bindings, cuts
        self._costs, self._reasons, self._callees = costs, reasons, callees
        self.home: Mesh | None = None  # single device of all results; None: the first one of each result's mesh
        self._vdevices = bindings.vdevices
        self._exchanges = Exchanges(bindings)
        self._values = self._exchanges.values
        self._source = list(walk_bindings(func.body, nested=False))
        self._weights = Weights(bindings, cuts)
        self._tuples: dict[relax.Var, list[relax.Expr]] = {}
        self._outputs = leaves(func.body.body)
        self._annotated_splits: set[relax.Var] = set()
        self._readers = Readers(readers_of(self._source), self._outputs, self._weights.nbytes)
        attributes = json.loads(str(func.attrs.get(SPLIT_PARAMETERS, "{}")))
        self._split_names: dict[str, list[str]] = {name: each["names"] for name, each in attributes.items()}
        self._split = {name: _shardings(each["placement"]) for name, each in attributes.items()}
        self._split_meshes = {
            name: Mesh(tuple(each["mesh"]), (len(each["mesh"]),)) for name, each in attributes.items()
        }
        asked = {var: self._splits_of_output(var) for var in self._outputs}
        self._preferred = PreferredSplits(self._source, asked)
        self._params: dict[relax.Var, list[relax.Var]] = {}
        self._copied: dict[relax.Var, Mesh] = {}  # devices that TVM's inference copied to types after a hint
        types = [each.ty for each in (*func.params, *(binding.var for binding in self._source))]
        annotated = [mesh_of(vdevice_in(ty)) for ty in types]
        self._meshes_of_one = {mesh.positions for mesh in annotated if mesh is not None and len(mesh) == 1}

    def function(self) -> relax.Function:
        """The function with values of single devices only."""
        for param in self._func.params:
            self._add_param(param)
        for binding in self._source:
            if isinstance(binding.value, relax.Function):
                raise PlacementError(
                    f"function {self._name!r} has values over a mesh and a local function {binding.var.name!r}; "
                    "expected none besides meshes"
                )
            if isinstance(binding.value, relax.If):
                self._add_branches(binding.var, binding.value)
            elif isinstance(binding, relax.MatchCast):
                self._add_match_cast(binding)
            else:
                self._add(binding.var, binding.value)
            if binding.var in self._outputs and self._split_names.keys().isdisjoint(self._names_of_output(binding.var)):
                self._whole(binding.var)
        params = [local for param in self._func.params for local in self._params[param]]
        names = dict(zip(self._func.params, self._params.values(), strict=True))
        result, output_names = self._result()
        bindings = self._exchanges.lowered(set(leaves(result)))
        outputs = {var: relax.Var(var.name, var.ty) for var in leaves(result) if isinstance(var, relax.DataflowVar)}
        bindings = [rebound(b, outputs.get(b.var, b.var), renamed(b, outputs).value) for b in bindings]
        result = replaced(result, outputs)
        block = (relax.DataflowBlock if self._bindings.is_dataflow else relax.BindingBlock)(bindings)
        body = typed(relax.SeqExpr([block], result), result.ty)
        attrs = {key: value for key, value in dict(self._func.attrs or {}).items() if key != SPLIT_PARAMETERS}
        if "num_input" in attrs:
            attrs["num_input"] = sum(len(names[param]) for param in self._func.params[: int(attrs["num_input"])])
        if "input_names" in attrs:
            listed = zip(self._func.params, attrs["input_names"], strict=False)
            attrs["input_names"] = [
                name for param, given in listed for name in self._split_names.get(str(param.name), [str(given)])
            ]
        if "output_names" in attrs:
            attrs["output_names"] = output_names
        attributes = tvm.ir.make_node("ir.DictAttrs", **attrs)
        return relax.Function(params, body, result.ty, self._func.is_pure, attributes, self._func.span)

    # -- parameters and results

    def _add_param(self, param: relax.Var) -> None:
        name, shardings = str(param.name), self._split.get(str(param.name))
        mesh = self._split_meshes.get(name) or self._mesh_of_param(param, self._source)
        if shardings is None:
            home = Mesh.of_device(mesh.positions[0])
            local = relax.Var(name, on_device(param.ty, self._vdevices[home.positions[0]]))
            self._params[param] = [local]
            self._values[param] = MeshValue(home, [whole_on(home) for _ in tensor_types(param.ty)], [local])
            return
        names = self._split_names[name]
        shape = shape_of(param)
        if shape is None or len(names) != len(mesh) or not divide(shardings, shape, mesh.shape):
            raise PlacementError(
                f"parameter {name!r} of {self._name!r}, {param.ty}, has parts {names} of placement "
                f"{_text(shardings)}, expected one for each of {self._mesh_name(mesh)}, and an axis that they divide"
            )
        part = local_shape(shardings, shape, mesh.shape)
        types = [relax.TensorType(part, param.ty.dtype, self._vdevices[device]) for device in mesh]
        self._params[param] = list(map(relax.Var, names, types))
        self._values[param] = MeshValue(mesh, [shardings], list(self._params[param]))

    def _mesh_of_param(self, param: relax.Var, bindings: Iterable[relax.Binding]) -> Mesh:
        """The mesh of a parameter's annotation, else of a value that is computed from it."""
        if (mesh := self._annotated(param.ty)) is not None:
            return mesh
        for binding in bindings:
            if param in used_vars(binding.value) and (mesh := self._annotated(binding.var.ty)) is not None:
                return mesh
        return _FIRST

    def _splits_of_output(self, var: relax.Var) -> set[tuple[int, int]]:
        """Axes of the mesh, and of a result, along which the caller takes parts."""
        shardings = [self._split[name] for name in self._names_of_output(var) if name in self._split]
        return {
            (number, each.axis) for split in shardings for number, each in enumerate(split) if each.axis is not None
        }

    def _names_of_output(self, var: relax.Var) -> list[str]:
        names = (self._func.attrs or {}).get("output_names", ())
        return [str(name) for name, output in zip(names, self._outputs, strict=False) if output.same_as(var)]

    def _result(self) -> tuple[relax.Expr, list[str]]:
        """The result, and the names of its tensors."""
        names: list[str] = []
        given = [str(name) for name in (self._func.attrs or {}).get("output_names", ())]

        def of(expr: relax.Expr, name: str) -> list[relax.Expr]:
            if isinstance(expr, relax.Tuple):
                return [relax.Tuple([local for field in expr.fields for local in of(field, "")])]
            if isinstance(expr, relax.Var) and name in self._split_names:
                names.extend(self._split_names[name])
                value = self._values[expr]
                return self._get(expr, value.mesh, self._split[name])
            names.append(name)
            return [self._whole(expr)] if isinstance(expr, relax.Var) else [expr]

        body = self._func.body.body
        if isinstance(body, relax.Tuple):
            fields = zip(body.fields, given or [""] * len(body.fields), strict=True)
            return relax.Tuple([local for field, name in fields for local in of(field, name)]), names
        locals_ = of(body, given[0] if len(given) == 1 else "")
        return (locals_[0] if len(locals_) == 1 else relax.Tuple(locals_)), names

    def _whole(self, var: relax.Var) -> relax.Expr:
        """The whole value on the first device of its mesh, or that of a branch."""
        if var not in self._tuples and isinstance(var.ty, tvm.ir.TupleType) and var in self._values:
            value = self._values[var]
            if len(value.mesh) == 1 and self.home in (None, value.mesh):
                return value.locals[0]
            self._collect(var, [])
        if var in self._tuples:
            return relax.Tuple([self._whole(field) for field in self._tuples[var]])
        mesh = self._values[var].mesh if var in self._values else self._annotated(var.ty) or _FIRST
        home = self.home or Mesh.of_device(mesh.positions[0])
        return self._get(var, home, whole_on(home))[0]

    # -- bindings

    def _add(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.Var):
            for table in (self._values, self._weights.values, self._tuples, self._copied):
                if value in table:
                    table[var] = table[value]  # type: ignore[index, assignment]
        elif is_tensor_constant(value):
            self._weights.values[var] = value
        elif isinstance(value, relax.Tuple):
            self._tuples[var] = list(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            self._add_field(var, value)
        elif isinstance(value, relax.Call) and not tvm.ir.is_prim_expr(value):
            self._add_call(var, value)
        else:  # a shape or a number
            local = self._bindings.new_local(var.name, var.ty)
            self._bindings.add_binding(local, value)
            self._values[var] = MeshValue(_FIRST, [], [local])

    def _add_field(self, var: relax.Var, value: relax.TupleGetItem) -> None:
        source = value.tuple_value
        if isinstance(source, relax.Tuple) or source in self._tuples:
            fields = source.fields if isinstance(source, relax.Tuple) else self._tuples[source]
            self._add(var, fields[value.index])
            return
        self._add_field_of_value(var, source, value.index)

    def _add_branches(self, var: relax.Var, value: relax.If) -> None:
        """Partition branches, which begin with whole values on all devices and end with one on a single device."""
        self._refuse_gpus(f"If at {var.name!r}")
        mesh = self._mesh(var, [each for each in used_vars(value) if each in self._values])
        home = Mesh.of_device(mesh.positions[0])
        condition = self._whole(value.cond) if isinstance(value.cond, relax.Var) else value.cond
        ends = [self._partitioned_branch(branch, home) for branch in (value.true_branch, value.false_branch)]
        local = self._bindings.new_local(var.name, on_device(var.ty, self._vdevices[home.positions[0]]))
        self._bindings.items.append(relax.VarBinding(local, typed(relax.If(condition, *ends), local.ty)))
        self._values[var] = MeshValue(home, [whole_on(home) for _ in tensor_types(var.ty)], [local])

    def _refuse_gpus(self, control_flow: str) -> None:
        """PlacementError for control flow in a function over a mesh of GPUs."""
        variables = [*self._func.params, *(binding.var for binding in walk_bindings(self._func.body))]
        meshes = [self._annotated(var.ty) or _FIRST for var in variables]
        meshes += [value.mesh for value in self._values.values()]
        if any(len(mesh) > 1 and any(map(self._bindings.records_graphs, mesh)) for mesh in meshes):
            raise PlacementError(
                f"function {self._name!r} has values over a mesh of GPUs and {control_flow}; expected no control flow "
                "besides meshes of GPUs, whose kernels wait for each other"
            )

    def _partitioned_branch(self, branch: relax.SeqExpr, home: Mesh) -> relax.SeqExpr:
        """A branch with values of single devices only, and its result on one of them."""
        is_dataflow = all(isinstance(block, relax.DataflowBlock) for block in branch.blocks)
        bindings = self._bindings.nested(is_dataflow and bool(branch.blocks))
        func = relax.Function([], branch, branch.ty, False, tvm.ir.make_node("ir.DictAttrs"))
        inner = _FunctionPartition(self._name, func, self._cuts, bindings, self._costs, self._reasons, self._callees)
        free = [var for each in relax.analysis.free_vars(branch) for var in self._tensors_of(each)]
        inner.home = home
        inner._weights.values.update(self._weights.values)
        inner._tuples.update(self._tuples)
        inner._copied.update(self._copied)
        for var in free:
            if var in self._values and isinstance(var.ty, relax.TensorType):
                mesh = self._values[var].mesh
                inner._values[var] = MeshValue(mesh, [whole_on(mesh)], self._get(var, mesh, whole_on(mesh)))
            elif var in self._values:
                inner._values[var] = self._values[var]
        return inner.function().body

    def _add_recursive_call(self, var: relax.Var, call: relax.Call) -> None:
        """Call a function over a mesh that calls itself: its parameters and results are whole, on single devices."""
        self._refuse_gpus(f"a call of {call.op.name_hint!r}, which calls itself")
        callee = self._callees[call.op]
        bindings = list(walk_bindings(callee.body, nested=False))
        meshes = [self._mesh_of_param(param, bindings) for param in callee.params]
        args = [
            self._argument(arg, Mesh.of_device(mesh.positions[0])) for arg, mesh in zip(call.args, meshes, strict=True)
        ]
        home = self.home_of_results(callee)
        local = self._bindings.new_local(var.name, on_device(var.ty, self._vdevices[home.positions[0]]))
        self._bindings.add_binding(local, with_args(call, args))
        self._values[var] = MeshValue(home, [whole_on(home) for _ in tensor_types(var.ty)], [local])

    def _argument(self, arg: relax.Expr, home: Mesh) -> relax.Expr:
        """An argument of a function, whole on a device."""
        if isinstance(arg.ty, tvm.ir.TupleType):
            if isinstance(arg, relax.Var):
                self._collect(arg, [])
            fields = arg.fields if isinstance(arg, relax.Tuple) else self._tuples[arg]
            return relax.Tuple([self._argument(field, home) for field in fields])
        if isinstance(arg.ty, relax.TensorType):
            return self._get(arg, home, whole_on(home))[0]
        return self._get_plain(arg)

    def home_of_results(self, func: relax.Function) -> Mesh:
        """Device of the results of a function that calls itself: the first one of its first annotated mesh."""
        variables = [*func.params, *(binding.var for binding in walk_bindings(func.body))]
        meshes = [self._annotated(ty) for ty in (func.ret_ty, *(var.ty for var in variables))]
        mesh = next((mesh for mesh in meshes if mesh is not None), _FIRST)
        return Mesh.of_device(mesh.positions[0])

    def _tensors_of(self, var: relax.Var) -> list[relax.Var]:
        """The variable, or those of the tuple that it is."""
        collected: list[relax.Expr] = []
        self._collect(var, collected)
        return [each for each in collected if isinstance(each, relax.Var)]

    def _add_match_cast(self, binding: relax.MatchCast) -> None:
        """Check the type of what each device has, so that sizes that it defines are known on all."""
        var, value = binding.var, binding.value
        if isinstance(binding.ty, tvm.ir.TupleType):
            raise PlacementError(
                f"function {self._name!r} has values over a mesh and match_cast of a tuple at {var.name!r}; expected "
                "one of each tensor"
            )
        if not isinstance(binding.ty, relax.TensorType):  # a shape
            local = self._bindings.new_local(var.name, binding.ty)
            source = self._get_plain(value) if isinstance(value, relax.Var) else value
            self._bindings.items.append(relax.MatchCast(local, source, binding.ty))
            self._values[var] = MeshValue(_FIRST, [], [local])
            return
        if isinstance(value, relax.TupleGetItem):
            field = relax.Var(f"{var.name}_field", value.ty)
            self._add_field(field, value)
            value = field
        mesh = self._mesh(var, [value])
        shardings, shape = self._shardings_of(value, mesh) or whole_on(mesh), _extents(binding.ty)
        if shape is None or any(each.is_partial for each in shardings) or not divide(shardings, shape, mesh.shape):
            shardings = whole_on(mesh)
        ty = binding.ty
        if shape is not None:
            ty = relax.TensorType(local_shape(shardings, shape, mesh.shape), ty.dtype)
        locals_: list[relax.Expr] = []
        for number, (device, local) in enumerate(zip(mesh, self._get(value, mesh, shardings), strict=True)):
            cast = self._bindings.new_var(numbered(var.name, number), ty, device)
            self._bindings.items.append(relax.MatchCast(cast, local, cast.ty))
            locals_.append(cast)
        self._values[var] = MeshValue(mesh, [shardings], locals_)

    def _add_call(self, var: relax.Var, call: relax.Call) -> None:
        if call.op in self._callees:
            self._add_recursive_call(var, call)
            return
        name = op_name(call)
        leaves = self._operands(call)
        tensors = [leaf for leaf in leaves if isinstance(leaf.ty, relax.TensorType)]
        mesh = self._mesh(var, tensors)
        if not _is_pure(call):  # once, not on every device
            mesh = Mesh.of_device(mesh.positions[0])
        if name in (SHARD, TRANSFER, HINT):
            self._move(var, call, mesh)
            return
        if name in WEIGHT_OPS and tensors and all(tensor in self._weights for tensor in tensors):
            self._weights.values[var] = call
            return
        if len(mesh) > 1 and self._joins(var, call, tensors, mesh):
            return
        plan = self._plan(var, call, leaves, tensors, mesh)
        by_tensor = {
            id(tensor): self._get(tensor, mesh, shardings)
            for tensor, shardings in zip(tensors, plan.operands, strict=True)
        }
        if passes_on(call) and not self._annotated_splits.isdisjoint(tensors):
            self._annotated_splits.add(var)
        locals_ = []
        for number, device in enumerate(mesh):
            args = [by_tensor[id(leaf)][number] if id(leaf) in by_tensor else self._get_plain(leaf) for leaf in leaves]
            local: relax.Expr = self._bindings.emit(plan.make, args, device, numbered(var.name, number))
            if plan.factor != 1.0:
                operands = [local, relax.const(plan.factor, str(call.ty.dtype))]
                make: Make = lambda args: relax.op.multiply(*args)  # noqa: E731
                local = self._bindings.emit(make, operands, device, numbered(var.name, number))
            locals_.append(local)
        self._values[var] = MeshValue(mesh, plan.results, locals_)
        if len(tensors) == 1 and (name in RESHAPES or name in REDUCTIONS):
            self._exchanges.repeatable[var] = tensors[0], partial(self._rebuilt, call)

    def _plan(
        self, var: relax.Var, call: relax.Call, leaves: list[relax.Expr], tensors: list[relax.Expr], mesh: Mesh
    ) -> CallPlan:
        """Plan of a call by the rules, along one axis of the mesh after the other."""
        shapes = [shape_of(tensor) for tensor in tensors]
        results = [_extents(ty) for ty in (call.ty.fields if isinstance(call.ty, tvm.ir.TupleType) else [call.ty])]
        local = LocalCall(call, leaves, self._rebuilt, self._bindings.normalized)
        whole = whole_on(mesh)
        if len(mesh) == 1 or any(shape is None for shape in (*shapes, *results)):
            return CallPlan([whole] * len(tensors), [whole] * max(len(list(tensor_types(call.ty))), 1), local.make)
        states = [self._shardings_of(tensor, mesh) for tensor in tensors]
        operands: list[Shardings] = [()] * len(tensors)
        outputs: list[Shardings] = [()] * len(results)
        segments, factor = self._preferred.segments.get(var, ()), 1.0
        for count in mesh.shape:
            described = self._described(tensors, local.shapes, states, operands, mesh)
            op = OpCall(local.call, described, count, results, segments, var in self._preferred.read_by_products)  # type: ignore[arg-type]
            plan = plan_op(self._with_costs(op, var, mesh, operands))
            operands = extended(operands, plan.operands)
            outputs = extended(outputs, plan.results)
            local.split(plan.operands, plan.local, count)
            factor *= plan.factor
            if plan.results[0].is_split and segments:
                is_same = plan.results[0].segments == segments
                segments = tuple(size // count for size in segments) if is_same else ()
            results = [each.local_shape(shape, count) for each, shape in zip(plan.results, results, strict=True)]  # type: ignore[arg-type]
        return CallPlan(operands, outputs, local.make, factor)

    def _described(
        self,
        tensors: Sequence[relax.Expr],
        shapes: Sequence[list[Any]],
        states: Sequence[Shardings | None],
        earlier: Sequence[Shardings],
        mesh: Mesh,
    ) -> list[Operand]:
        """Operands of a call as rules see them, given their shapes and shardings along earlier axes of the mesh."""
        return [
            Operand(tensor, shape, None if state is None else state[len(own)], self._can(tensor, mesh, own))
            for tensor, shape, state, own in zip(tensors, shapes, states, earlier, strict=True)
        ]

    def _with_costs(self, op: OpCall, var: relax.Var, mesh: Mesh, operands: list[Shardings]) -> OpCall:
        """The call with tests of what pays, given shardings along earlier axes.

        Splits that a reader asks for pay, and so does what other functions store already.
        """
        if self._costs is None or traits_of(op_name(op.call)).kind not in ("product", "conv") or op.count == 1:
            return op
        axis, weight = len(operands[-1]), op.operands[-1].expr
        group = tuple(mesh.positions[number] for number in mesh.groups(axis)[0])
        operand_bytes = 0.0
        for operand in op.operands:
            ty, stored = operand.expr.ty, self._weights.nbytes(operand.expr)
            extents = zip(operand.shape, shape_of(operand.expr) or (), strict=True)
            share = math.prod((known(part) or 1) / (known(whole) or 1) for part, whole in extents)
            operand_bytes += share * (nbytes_of(ty) if stored is None else stored)
        record, earlier = partial(self._record, str(var.name)), math.prod(mesh.shape[:axis])
        splits = Splits(self._costs, self._readers, var, op.call, operand_bytes, group, earlier, record)
        is_asked = (axis, columns_axis(op.call)) in self._preferred.asked.get(var, ())

        def pays(sharding: Sharding, estimate: Callable[[], bool]) -> bool:
            shardings = (*operands[-1], sharding)
            is_stored = self._weights.is_stored(weight, shardings, mesh.shape[: len(shardings)])
            if is_stored is None:
                return estimate()
            record("as another function stores the weight")
            return is_stored

        return replace(
            op,
            columns_pay=lambda columns: is_asked or pays(columns, splits.columns_pay),
            rows_pay=lambda x, rows: x.expr in self._annotated_splits or pays(rows, partial(splits.rows_pay, x)),
        )

    def _record(self, variable: str, reason: str) -> None:
        """Record the reason of a decision; the last one of a variable counts."""
        self._reasons[f"{self._name}/{variable}"] = reason

    def _joins(self, var: relax.Var, call: relax.Call, tensors: list[relax.Expr], mesh: Mesh) -> bool:
        """Add to a sum over devices what single devices have, such as sums of their experts, or what all have.

        The result is a sum, too. The first device along the axes of the sum adds what all have, as a residual or a
        bias, in its product's kernel.
        """
        shape = _extents(call.ty)
        if op_name(call) != "relax.add" or shape is None or any(shape_of(tensor) is None for tensor in tensors):
            return False
        states: list[Shardings] = []
        homes: dict[int, int] = {}  # number of the device that alone has an operand
        for index, tensor in enumerate(tensors):
            value = None if tensor in self._weights else self._values[tensor]
            if value is None or self._exchanges.has(tensor, mesh, whole_on(mesh)):
                states.append(whole_on(mesh))
            elif len(value.mesh) == 1 and value.mesh.positions[0] in mesh.positions:
                homes[index] = mesh.positions.index(value.mesh.positions[0])
                states.append((PARTIAL,) * len(mesh.shape))
            elif value.mesh == mesh:
                states.append(value.shardings[0])
            else:
                return False
        axes = range(len(mesh.shape))
        summed = [axis for axis in axes if any(state[axis].is_partial for state in states)]
        sums = sum(any(each.is_partial for each in state) for state in states) - len(homes)
        if not summed or (not sums and len(set(homes.values())) < 2):
            return False
        if any(state[axis].is_split for state in states for axis in (axes if homes else summed)):
            return False
        is_part = [any(state[axis].is_partial for axis in summed) for state in states]
        if any(part and str(shape_of(t)) != str(shape) for part, t in zip(is_part, tensors, strict=True)):
            return False
        operands, result = self._around_sums(call, tensors, states, summed, mesh)
        present = [
            [
                index
                for index, state in enumerate(states)
                if homes.get(index, number) == number
                and all(state[axis].is_partial or not mesh.coordinates(number)[axis] for axis in summed)
            ]
            for number in range(len(mesh))
        ]
        zeros = [known(extent) for extent in local_shape(result, shape, mesh.shape)]
        if not all(present) and None in zeros:
            return False  # zeros of an unknown size are no constant
        given = [
            [self._values[tensor].locals[0]] * len(mesh) if index in homes else self._get(tensor, mesh, operands[index])
            for index, tensor in enumerate(tensors)
        ]
        locals_: list[relax.Expr] = []
        for number, device in enumerate(mesh):
            own = [given[index][number] for index in present[number]]
            if len(own) == 2:
                make: Make = lambda args: relax.op.add(*args)  # noqa: E731
                locals_.append(self._bindings.emit(make, own, device, numbered(var.name, number)))
            else:
                extents = [extent or 0 for extent in zeros]
                locals_.append(own[0] if own else relax.const(np.zeros(extents, str(call.ty.dtype))))
        self._values[var] = MeshValue(mesh, [result], locals_)
        return True

    def _around_sums(
        self, call: relax.Call, tensors: list[relax.Expr], states: list[Shardings], summed: list[int], mesh: Mesh
    ) -> tuple[list[Shardings], Shardings]:
        """Shardings of operands and result of an addition that is a part of sums along some axes of a mesh."""
        shapes: list[list[Any]] = [shape_of(tensor) or [] for tensor in tensors]
        operands: list[Shardings] = [()] * len(tensors)
        result: Shardings = ()
        given = [None if tensor in self._weights else state for tensor, state in zip(tensors, states, strict=True)]
        extents = _extents(call.ty) or []
        for axis, count in enumerate(mesh.shape):
            if axis in summed:
                operands = extended(operands, [state[axis] for state in states])
                result = (*result, PARTIAL)
                continue
            described = self._described(tensors, shapes, given, operands, mesh)
            plan = plan_op(OpCall(call, described, count, [extents], (), False))
            operands = extended(operands, plan.operands)
            result = (*result, plan.results[0])
            shapes = [each.local_shape(shape, count) for each, shape in zip(plan.operands, shapes, strict=True)]
            extents = plan.results[0].local_shape(extents, count)
        return operands, result

    def _move(self, var: relax.Var, call: relax.Call, mesh: Mesh) -> None:
        source, shardings = call.args[0], whole_on(mesh)
        if op_name(call) in (TRANSFER, HINT):
            is_transfer = op_name(call) == TRANSFER
            mesh = self._mesh_at(call.attrs.dst_vdevice if is_transfer else hinted_vdevice(call, self._vdevices))
            shardings, declared = whole_on(mesh), self._annotated(var.ty)
            if declared not in (None, mesh):  # the operand's, because TVM checks annotations
                self._copied[var] = declared
        else:
            shardings = _shardings(str(call.attrs.placement))
            if reason := self._misplaced(source, shardings, mesh):
                raise PlacementError(
                    f"{SHARD} at {var.name!r} in function {self._name!r}, placement {_text(shardings)!r}: {reason}"
                )
            self._annotated_splits.add(var)
        if source in self._weights and not self._weights.can_cut(source, shardings, mesh.shape):
            whole = whole_on(mesh)
            self._values[source] = MeshValue(mesh, [whole], self._weights.parts(source, mesh, whole))
            locals_ = self._exchanges.get(source, mesh, shardings)
        else:
            locals_ = self._get(source, mesh, shardings)
        self._values[var] = MeshValue(mesh, [shardings], locals_)

    def _misplaced(self, source: relax.Expr, shardings: Shardings, mesh: Mesh) -> str:
        """Reason why a value cannot have shardings on a mesh, and what was expected; empty if it can."""
        shape, devices = shape_of(source), self._mesh_name(mesh)
        if len(mesh) == 1 and mesh.positions not in self._meshes_of_one:
            return (
                f"the operand is on {devices}, which is not a mesh; expected the annotation of a mesh, such as "
                "'cuda[0:2]', on the operand or the result"
            )
        if len(shardings) != len(mesh.shape):
            extents = f" of shape {mesh.shape}" if len(mesh.shape) > 1 else ""
            return (
                f"found {plural(len(shardings), 'placement')} for the mesh{extents} of {devices}; expected one for "
                f"each of its axes, {len(mesh.shape)} in all"
            )
        if shape is None:
            return "the operand's sizes are not known; expected a shape, for example by a match_cast"
        if not divide(shardings, shape, mesh.shape):
            extents = ", ".join(str(extent if known(extent) is None else known(extent)) for extent in shape)
            return (
                f"the operand has shape ({extents}), whose split axes {' x '.join(map(str, mesh.shape))} devices "
                "cannot have in equal parts; expected known extents that are multiples of the number of devices"
            )
        return ""

    # -- meshes

    def _mesh(self, var: relax.Var, tensors: Sequence[relax.Expr]) -> Mesh:
        """The mesh of a call: its annotation's, else the largest one of its operands."""
        mesh = self._annotated(var.ty)
        if mesh is not None and not self._is_copied(var, mesh, tensors):
            return mesh
        meshes = [self._values[tensor].mesh for tensor in tensors if tensor in self._values]
        return max(meshes, key=len, default=_FIRST)

    def _is_copied(self, var: relax.Var, mesh: Mesh, tensors: Sequence[relax.Expr]) -> bool:
        """Return whether TVM's inference copied a device to a variable's type from before a hint."""
        is_there = any(
            tensor in self._values and tensor not in self._copied and self._values[tensor].mesh == mesh
            for tensor in tensors
        )
        if is_there or all(self._copied.get(tensor) != mesh for tensor in tensors):
            return False
        self._copied[var] = mesh
        return True

    def _annotated(self, ty: tvm.ir.Type) -> Mesh | None:
        vdevice = vdevice_in(ty)
        return None if vdevice is None else self._mesh_at(vdevice)

    def _mesh_at(self, vdevice: relax.VDevice) -> Mesh:
        return mesh_of(vdevice) or Mesh.of_device(vdevice_index(vdevice, self._vdevices))

    def _mesh_name(self, mesh: Mesh) -> str:
        return " and ".join(device_name(self._vdevices[device], self._vdevices) for device in mesh)

    # -- operands

    def _operands(self, call: relax.Call) -> list[relax.Expr]:
        """Tensors and variables among the arguments of a call, those in tuples among them."""
        leaves: list[relax.Expr] = []
        for arg in call.args:
            self._collect(arg, leaves)
        return leaves

    def _collect(self, arg: relax.Expr, leaves: list[relax.Expr]) -> None:
        if isinstance(arg, relax.Tuple):
            for field in arg.fields:
                self._collect(field, leaves)
        elif isinstance(arg, relax.Var) and isinstance(arg.ty, tvm.ir.TupleType):
            if arg not in self._tuples:
                self._tuples[arg] = []
                for index, field in enumerate(arg.ty.fields):
                    item = relax.Var(f"{arg.name}_{index}", field)
                    self._add_field_of_value(item, arg, index)
                    self._tuples[arg].append(item)
            for field in self._tuples[arg]:
                self._collect(field, leaves)
        elif is_tensor_constant(arg) or isinstance(arg, relax.Var):
            leaves.append(arg)

    def _add_field_of_value(self, item: relax.Var, source: relax.Var, index: int) -> None:
        of = self._values[source]
        if source in self._copied:
            self._copied[item] = self._copied[source]
        locals_ = [
            self._bindings.emit(
                lambda args: relax.TupleGetItem(args[0], index), [local], device, numbered(item.name, number)
            )
            for number, (device, local) in enumerate(zip(of.mesh, of.locals, strict=True))
        ]
        ends = [0, *accumulate(len(list(tensor_types(field))) for field in source.ty.fields)]
        self._values[item] = MeshValue(of.mesh, of.shardings[ends[index] : ends[index + 1]], locals_)

    def _rebuilt(self, call: relax.Call, leaves: Sequence[relax.Expr]) -> relax.Call:
        """The call with other tensors and variables, in the order of `_operands`."""
        rest = list(leaves)

        def of(arg: relax.Expr) -> relax.Expr:
            if isinstance(arg, relax.Tuple):
                return relax.Tuple([of(field) for field in arg.fields])
            if isinstance(arg, relax.Var) and arg in self._tuples:
                return relax.Tuple([of(field) for field in self._tuples[arg]])
            return rest.pop(0) if is_tensor_constant(arg) or isinstance(arg, relax.Var) else arg

        types = [on_device(ty, None) for ty in call.ty_args]  # such as the mesh of a kernel's result
        return relax.Call(call.op, [of(arg) for arg in call.args], call.attrs, types, call.span)

    def _get_plain(self, leaf: relax.Expr) -> relax.Expr:
        """A shape or a number, which every device may use."""
        return self._values[leaf].locals[0] if leaf in self._values else leaf

    def _shardings_of(self, expr: relax.Expr, mesh: Mesh) -> Shardings | None:
        """The shardings that rules see: None for a weight, replicated for values of other meshes."""
        if expr in self._weights:
            return None
        value = self._values[expr]
        is_alike = value.mesh.shape == mesh.shape and not any(each.is_partial for each in value.shardings[0])
        return value.shardings[0] if value.mesh == mesh or is_alike else whole_on(mesh)

    def _can(self, expr: relax.Expr, mesh: Mesh, earlier: Shardings) -> Callable[[Sharding], bool]:
        """Test of whether a value can have a sharding along an axis of a mesh, given those along earlier axes."""

        def can(sharding: Sharding) -> bool:
            shape, shardings = shape_of(expr), (*earlier, sharding)
            if shape is None:
                return not sharding.is_split
            counts = mesh.shape[: len(shardings)]
            if not divide(shardings, shape, counts):
                return False
            return expr not in self._weights or self._weights.can_cut(expr, shardings, counts)

        return can

    def _get(self, expr: relax.Expr, mesh: Mesh, shardings: Shardings) -> list[relax.Expr]:
        """The local value of each device of a mesh."""
        is_weight = expr in self._weights
        return self._weights.parts(expr, mesh, shardings) if is_weight else self._exchanges.get(expr, mesh, shardings)


def _is_pure(call: relax.Call) -> bool:
    """Return whether a call of an op, or of a function, only computes its result."""
    if isinstance(call.op, tvm.ir.Op):
        return calls_pure_op(call)
    return isinstance(call.op.ty, relax.FuncType) and bool(call.op.ty.purity)


_FIRST = Mesh.of_device(0)
"""The default device."""


def _shardings(placement: str) -> Shardings:
    return tuple(Sharding(axis) for axis in split_axes(placement))


def _text(shardings: Shardings) -> str:
    return ", ".join(map(str, shardings))


def _extents(ty: tvm.ir.Type) -> list[Any] | None:
    has_shape = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return list(ty.shape.values) if has_shape else None
