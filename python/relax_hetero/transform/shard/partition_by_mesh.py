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

A value is replicated, split along an axis, or a sum of what the devices have (`Sharding`). Annotations give values a
mesh, and spread forward to values without one; ``R.hetero.shard`` gives them a sharding. All other shardings follow
from operands by the rules of ops (`sharding_rules`), first to last. A value that a reader needs with another sharding
is exchanged once for all such readers: all-reduce, reduce-scatter, all-gather and all-to-all. Results of functions are
whole, on the first device of their mesh.

The attribute `SPLIT_PARAMETERS` of a function names parameters, such as caches, that callers give in parts, one for
each device: they become as many parameters, and results with their names as many results. It may name results only.

Assumes functions without control flow, and devices of one host. A module without meshes is returned as it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax

from ...errors import PlacementError
from ...op.placement import hinted_vdevice
from ...op.sharding import SHARD, split_axis
from ...op.traits import ELEMENTWISE
from ...target.backend import backend_of
from ...target.mesh import mesh_positions
from ...target.vdevice import device_name, vdevice_index, vdevices_of
from ...tir.cuda.all_reduce import AllReduce, supports
from ...vm.device.tensor_arrays import host_array
from ...vm.device.tensors import share_or_copy
from ..ir.blocks import renamed, shape_of, used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import HINT, TRANSFER
from ..ir.rewriting import copy_module, is_tensor_constant, op_name, relax_functions, typed, walk_bindings
from .gpu_sums import GpuSums, Mesh, Sum
from .sharding import PARTIAL, REPLICATED, Sharding, known
from .sharding_rules import (
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    WEIGHT_OPS,
    OpCall,
    Operand,
    OpPlan,
    passes_on,
    plan_op,
    segments_of_operand,
    weight_operands,
)

SPLIT_PARAMETERS = "relax_hetero.split_parameters"
"""On a function: JSON of a mapping from a parameter's name to ``{"placement": "S[1]", "names": [...], "mesh": [0]}``,
the placement of its parts, or "R" for copies, the names of the parameters that take its place, and the positions of
their devices in the module's list."""

_Make: TypeAlias = "Callable[[Sequence[relax.Expr]], relax.Expr]"


def partition_by_mesh(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    PlacementError
        If a function over a mesh has control flow, or a value cannot be split as it says.
    """
    vdevices = vdevices_of(mod)
    over_meshes = {gv: func for gv, func in relax_functions(mod) if _has_mesh(func)}
    if not over_meshes:
        return mod
    _check_calls(mod, {gv.name_hint for gv in over_meshes})
    cuts: dict[tuple[Any, Sharding, int, int], relax.Expr] = {}
    builder = relax.BlockBuilder(mod)
    kernels: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc] = {}
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in mod.functions.items():
        if gv in over_meshes:
            func = _FunctionPartition(builder, gv.name_hint, func, vdevices, cuts, kernels).function()
            gv = typed(tvm.ir.GlobalVar(gv.name_hint), func.ty)
        functions[gv] = func
    return copy_module(mod, {**functions, **kernels})


PartitionByMesh = declare_pass("PartitionByMesh", partition_by_mesh)


def _check_calls(mod: tvm.IRModule, over_meshes: set[str]) -> None:
    """Raise PlacementError if a function calls one of those over meshes."""
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func.body):
            callee = binding.value.op if isinstance(binding.value, relax.Call) else None
            if isinstance(callee, tvm.ir.GlobalVar) and callee.name_hint in over_meshes:
                raise PlacementError(
                    f"function {gv.name_hint!r} calls {callee.name_hint!r}, which has values over a mesh; expected "
                    "meshes only in functions that no other one calls"
                )


def _has_mesh(func: relax.Function) -> bool:
    types = [param.ty for param in func.params] + [binding.var.ty for binding in walk_bindings(func.body)]
    return any(mesh_positions(_vdevice_in(ty)) for ty in types)


def _vdevice_in(ty: tvm.ir.Type) -> relax.VDevice | None:
    """The device of the first tensor in a type that has one."""
    if isinstance(ty, relax.TensorType):
        return ty.vdevice
    fields = ty.fields if isinstance(ty, tvm.ir.TupleType) else ()
    return next((found for field in fields if (found := _vdevice_in(field)) is not None), None)


def _on(ty: tvm.ir.Type, vdevice: relax.VDevice | None) -> tvm.ir.Type:
    """A type with all tensors on a device."""
    if isinstance(ty, relax.TensorType):
        ndim = -1 if ty.shape is not None else ty.ndim
        return relax.TensorType(ty.shape, ty.dtype, vdevice, ndim)
    return tvm.ir.TupleType([_on(field, vdevice) for field in ty.fields]) if isinstance(ty, tvm.ir.TupleType) else ty


@dataclass(frozen=True)
class _Value:
    """A value over a mesh: the sharding of each tensor in it, and the local value of each device."""

    mesh: Mesh
    shardings: list[Sharding]
    locals: list[relax.Expr]


class _FunctionPartition:
    """Partitions one function."""

    def __init__(
        self,
        builder: relax.BlockBuilder,
        name: str,
        func: relax.Function,
        vdevices: Sequence[relax.VDevice],
        cuts: dict[tuple[Any, Sharding, int, int], relax.Expr],
        kernels: dict[tvm.ir.GlobalVar, tvm.tirx.PrimFunc],
    ) -> None:
        self._name, self._func, self._vdevices, self._cuts = name, func, vdevices, cuts
        self._builder, self._kernels = builder, kernels
        self._source = list(walk_bindings(func.body, nested=False))
        self._is_dataflow = all(isinstance(block, relax.DataflowBlock) for block in func.body.blocks)
        self._items: list[relax.VarBinding | Sum] = []
        self._values: dict[relax.Var, _Value] = {}
        self._weights: dict[relax.Var, relax.Expr] = {}
        self._tuples: dict[relax.Var, list[relax.Expr]] = {}
        self._bare: dict[relax.Var, relax.Var] = {}
        self._converted: dict[tuple[Any, Mesh, Sharding], list[relax.Expr]] = {}
        self._transferred: dict[tuple[relax.Expr, int], relax.Expr] = {}
        self._segments: dict[relax.Var, tuple[int, ...]] = {}
        self._repeatable: dict[relax.Var, tuple[relax.Expr, relax.Call]] = {}
        self._read_by_products: set[relax.Var] = set()
        self._outputs = _leaves(func.body.body)
        self._find_readers()
        attributes = json.loads(str(func.attrs.get(SPLIT_PARAMETERS, "{}")))
        self._split_names: dict[str, list[str]] = {name: each["names"] for name, each in attributes.items()}
        self._split = {name: _sharding(each["placement"]) for name, each in attributes.items()}
        self._split_meshes = {name: tuple(each["mesh"]) for name, each in attributes.items()}
        self._params: dict[relax.Var, list[relax.Var]] = {}

    def function(self) -> relax.Function:
        """The function with values of single devices only."""
        for param in self._func.params:
            self._add_param(param)
        for binding in self._source:
            self._at = binding.var.name
            if not isinstance(binding, relax.VarBinding) or isinstance(binding.value, (relax.If, relax.Function)):
                raise PlacementError(
                    f"function {self._name!r} has values over a mesh and {type(binding.value).__name__} at "
                    f"{binding.var.name!r}; expected neither control flow nor match_cast beside meshes"
                )
            self._add(binding.var, binding.value)
            if binding.var in self._outputs and not self._is_split_output(binding.var):
                self._whole(binding.var)
        params = [local for param in self._func.params for local in self._params[param]]
        names = dict(zip(self._func.params, self._params.values(), strict=True))
        result, output_names = self._result()
        bindings = self._lowered(set(_leaves(result)))
        outputs = {var: relax.Var(var.name, var.ty) for var in _leaves(result) if isinstance(var, relax.DataflowVar)}
        bindings = [
            relax.VarBinding(outputs[binding.var], binding.value) if binding.var in outputs else binding
            for binding in (renamed(binding, outputs) for binding in bindings)
        ]
        result = _replaced(result, outputs)
        block = (relax.DataflowBlock if self._is_dataflow else relax.BindingBlock)(bindings)
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

    # -- readers

    def _find_readers(self) -> None:
        """Find segments that readers would like, and values that products read, from the last binding to the first."""
        self._read_by_products |= set(self._outputs)
        for binding in reversed(self._source):
            value = binding.value
            if isinstance(value, (relax.Var, relax.TupleGetItem)):
                source = value if isinstance(value, relax.Var) else value.tuple_value
                if binding.var in self._read_by_products:
                    self._read_by_products.update(_leaves(source))
                continue
            if not isinstance(value, relax.Call):
                continue
            operands = [var for arg in value.args for var in _leaves(arg)]
            if op_name(value) in PRODUCTS or (passes_on(value) and binding.var in self._read_by_products):
                self._read_by_products.update(operands)
            for index, var in enumerate(operands):
                shape = shape_of(var)
                if shape and (index == 0 or op_name(value) in ELEMENTWISE):
                    wanted = segments_of_operand(value, shape, self._segments.get(binding.var, ()))
                    if wanted:
                        self._segments[var] = wanted

    # -- parameters and results

    def _add_param(self, param: relax.Var) -> None:
        name, sharding = str(param.name), self._split.get(str(param.name))
        mesh = self._split_meshes.get(name) or self._annotated(param.ty) or self._mesh_of_reader(param) or (0,)
        if sharding is None:
            local = relax.Var(name, _on(param.ty, self._vdevices[mesh[0]]))
            self._params[param] = [local]
            self._values[param] = _Value(mesh[:1], [REPLICATED] * _tensors(param.ty), [local])
            return
        names = self._split_names[name]
        shape = shape_of(param)
        if shape is None or len(names) != len(mesh) or not sharding.divides(shape, len(mesh)):
            raise PlacementError(
                f"parameter {name!r} of {self._name!r}, {param.ty}, has parts {names} of placement {sharding}, "
                f"expected one for each of {self._mesh_name(mesh)}, and an axis that they divide"
            )
        local_shape = sharding.local_shape(shape, len(mesh))
        types = [relax.TensorType(local_shape, param.ty.dtype, self._vdevices[device]) for device in mesh]
        self._params[param] = list(map(relax.Var, names, types))
        self._values[param] = _Value(mesh, [sharding], list(self._params[param]))

    def _mesh_of_reader(self, param: relax.Var) -> Mesh:
        for binding in self._source:
            if param in used_vars(binding.value) and (mesh := self._annotated(binding.var.ty)):
                return mesh
        return ()

    def _is_split_output(self, var: relax.Var) -> bool:
        return any(name in self._split_names for name in self._names_of_output(var))

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
        """The whole value on the first device of its mesh."""
        if var in self._tuples:
            return relax.Tuple([self._whole(field) for field in self._tuples[var]])
        if isinstance(var.ty, tvm.ir.TupleType) and var in self._values:
            self._collect(var, [])
            return relax.Tuple([self._whole(field) for field in self._tuples[var]])
        mesh = self._values[var].mesh[:1] if var in self._values else (self._annotated(var.ty) or (0,))[:1]
        return self._get(var, mesh, REPLICATED)[0]

    # -- bindings

    def _add(self, var: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.Var):
            for table in (self._values, self._weights, self._tuples):
                if value in table:
                    table[var] = table[value]  # type: ignore[index, assignment]
        elif is_tensor_constant(value):
            self._weights[var] = value
        elif isinstance(value, relax.Tuple):
            self._tuples[var] = list(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            self._add_field(var, value)
        elif isinstance(value, relax.Call) and not tvm.ir.is_prim_expr(value):
            self._add_call(var, value)
        else:  # a shape or a number
            local = self._bind(var.name, value, var.ty)
            self._values[var] = _Value((0,), [], [local])

    def _add_field(self, var: relax.Var, value: relax.TupleGetItem) -> None:
        source = value.tuple_value
        if isinstance(source, relax.Tuple) or source in self._tuples:
            fields = source.fields if isinstance(source, relax.Tuple) else self._tuples[source]
            self._add(var, fields[value.index])
            return
        self._add_field_of_value(var, source, value.index)

    def _add_call(self, var: relax.Var, call: relax.Call) -> None:
        name = op_name(call)
        leaves = self._operands(call)
        tensors = [leaf for leaf in leaves if isinstance(leaf.ty, relax.TensorType)]
        mesh = self._mesh(var, tensors)
        if name in (SHARD, TRANSFER, HINT):
            self._move(var, call, mesh)
            return
        if name in WEIGHT_OPS and tensors and all(map(self._is_weight, tensors)):
            self._weights[var] = call
            return
        if len(mesh) > 1 and self._joins(var, call, tensors, mesh):
            return
        op = self._op_call(var, call, tensors, mesh)
        plan = plan_op(op) if len(mesh) > 1 and op is not None else None
        shardings = plan.operands if plan else [REPLICATED] * len(tensors)
        by_tensor = dict(
            zip(map(id, tensors), (self._get(t, mesh, s) for t, s in zip(tensors, shardings, strict=True)), strict=True)
        )
        make = self._local_call(call, plan, len(mesh))
        locals_ = []
        for number, device in enumerate(mesh):
            args = [by_tensor[id(leaf)][number] if id(leaf) in by_tensor else self._get_plain(leaf) for leaf in leaves]
            local = self._emit(make, args, device, self._named(var, number))
            if plan is not None and plan.factor != 1.0:
                operands = [local, relax.const(plan.factor, str(call.ty.dtype))]
                local = self._emit(_multiplied, operands, device, self._named(var, number))
            locals_.append(local)
        self._values[var] = _Value(mesh, plan.results if plan else [REPLICATED] * max(_tensors(call.ty), 1), locals_)
        if len(tensors) == 1 and (name in RESHAPES or name in REDUCTIONS):
            self._repeatable[var] = tensors[0], call

    def _local_call(self, call: relax.Call, plan: OpPlan | None, count: int) -> _Make:
        """Maker of what a device computes."""
        of_device = plan.local if plan is not None else None
        if of_device is None:
            return partial(self._rebuilt, call)
        return lambda args: of_device(args, count)

    def _op_call(self, var: relax.Var, call: relax.Call, tensors: list[relax.Expr], mesh: Mesh) -> OpCall | None:
        """Description of a call for the rules; None if a shape is unknown."""
        shapes = [shape_of(tensor) for tensor in tensors]
        types = call.ty.fields if isinstance(call.ty, tvm.ir.TupleType) else [call.ty]
        results = [_extents(ty) for ty in types]
        if any(shape is None for shape in (*shapes, *results)):
            return None
        operands = [
            Operand(tensor, shape or [], self._sharding_of(tensor, mesh), self._can(tensor, len(mesh)))
            for tensor, shape in zip(tensors, shapes, strict=True)
        ]
        segments, is_read = self._segments.get(var, ()), var in self._read_by_products
        return OpCall(call, operands, len(mesh), [shape or [] for shape in results], segments, is_read)

    def _joins(self, var: relax.Var, call: relax.Call, tensors: list[relax.Expr], mesh: Mesh) -> bool:
        """Add to a sum over devices what single devices have, such as sums of their experts, or what all have.

        The result is a sum, too. The first device adds what all have, as a residual or a bias, in its product's kernel.
        """
        if op_name(call) != "relax.add" or any(shape_of(tensor) is None for tensor in tensors):
            return False
        parts: list[dict[int, relax.Expr]] = []  # of each operand, by number of the device
        sums, homes = 0, set()
        for tensor in tensors:
            value = None if self._is_weight(tensor) else self._values[tensor]
            is_whole_anyway = (tensor, mesh, REPLICATED) in self._converted
            if value is not None and value.mesh == mesh and value.shardings == [PARTIAL] and not is_whole_anyway:
                sums += 1
                parts.append(dict(enumerate(value.locals)))
            elif value is not None and len(value.mesh) == 1 and value.mesh[0] in mesh:
                homes.add(value.mesh[0])
                parts.append({mesh.index(value.mesh[0]): value.locals[0]})
            elif value is None or is_whole_anyway or (value.mesh == mesh and value.shardings == [REPLICATED]):
                parts.append({0: self._get(tensor, mesh, REPLICATED)[0]})
            else:
                return False
        has_shape = [str(shape_of(tensor)) == str(_extents(call.ty)) for tensor in tensors]
        if (
            not sums
            and len(homes) < 2
            or not all(has or len(part) == 1 for has, part in zip(has_shape, parts, strict=True))
        ):
            return False
        locals_: list[relax.Expr] = []
        for number, device in enumerate(mesh):
            own = [part[number] for part in parts if number in part]
            if len(own) == 2:
                add: _Make = lambda args: relax.op.add(*args)  # noqa: E731
                locals_.append(self._emit(add, own, device, self._named(var, number)))
            elif own and str(shape_of(own[0])) == str(_extents(call.ty)):
                locals_.append(own[0])
            elif own or None in (extents := [known(extent) for extent in _extents(call.ty) or []]):
                return False  # zeros of an unknown size are no constant
            else:
                locals_.append(relax.const(np.zeros([extent or 0 for extent in extents], str(call.ty.dtype))))
        self._values[var] = _Value(mesh, [PARTIAL], locals_)
        return True

    def _move(self, var: relax.Var, call: relax.Call, mesh: Mesh) -> None:
        source, sharding = call.args[0], REPLICATED
        if op_name(call) == TRANSFER:
            mesh = self._positions(call.attrs.dst_vdevice)
        elif op_name(call) == HINT:
            mesh = self._positions(hinted_vdevice(call, self._vdevices))
        else:
            sharding = _sharding(str(call.attrs.placement))
            shape = shape_of(source)
            if len(mesh) == 1 or shape is None or not sharding.divides(shape, len(mesh)):
                raise PlacementError(
                    f"{SHARD} at {var.name!r} in function {self._name!r}: placement {sharding} of a {source.ty} on "
                    f"{self._mesh_name(mesh)}; expected a mesh of several devices, and an axis whose extent they divide"
                )
        self._values[var] = _Value(mesh, [sharding], self._get(source, mesh, sharding))

    # -- meshes

    def _mesh(self, var: relax.Var, tensors: Sequence[relax.Expr]) -> Mesh:
        """The mesh of a call: its annotation's, else the largest one of its operands."""
        if mesh := self._annotated(var.ty):
            return mesh
        meshes = [self._values[tensor].mesh for tensor in tensors if tensor in self._values]
        return max(meshes, key=len, default=(0,))

    def _annotated(self, ty: tvm.ir.Type) -> Mesh:
        vdevice = _vdevice_in(ty)
        return () if vdevice is None else self._positions(vdevice)

    def _positions(self, vdevice: relax.VDevice) -> Mesh:
        return mesh_positions(vdevice) or (vdevice_index(vdevice, self._vdevices),)

    def _mesh_name(self, mesh: Mesh) -> str:
        return " and ".join(device_name(self._vdevices[device], self._vdevices) for device in mesh)

    def _named(self, var: relax.Var, number: int) -> str:
        return f"{var.name}@{number}" if number else str(var.name)

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
        locals_ = [
            self._emit(lambda args: relax.TupleGetItem(args[0], index), [local], device, self._named(item, number))
            for number, (device, local) in enumerate(zip(of.mesh, of.locals, strict=True))
        ]
        self._values[item] = _Value(of.mesh, [of.shardings[index]], locals_)

    def _rebuilt(self, call: relax.Call, leaves: Sequence[relax.Expr]) -> relax.Call:
        """The call with other tensors and variables, in the order of `_operands`."""
        rest = list(leaves)

        def of(arg: relax.Expr) -> relax.Expr:
            if isinstance(arg, relax.Tuple):
                return relax.Tuple([of(field) for field in arg.fields])
            if isinstance(arg, relax.Var) and arg in self._tuples:
                return relax.Tuple([of(field) for field in self._tuples[arg]])
            return rest.pop(0) if is_tensor_constant(arg) or isinstance(arg, relax.Var) else arg

        return relax.Call(call.op, [of(arg) for arg in call.args], call.attrs, call.ty_args, call.span)

    def _get_plain(self, leaf: relax.Expr) -> relax.Expr:
        """A shape or a number, which every device may use."""
        return self._values[leaf].locals[0] if leaf in self._values else leaf

    def _is_weight(self, expr: relax.Expr) -> bool:
        return is_tensor_constant(expr) or expr in self._weights

    def _sharding_of(self, expr: relax.Expr, mesh: Mesh) -> Sharding | None:
        """The sharding that rules see: None for a weight, replicated for values of other meshes."""
        if self._is_weight(expr):
            return None
        value = self._values[expr]
        is_same = value.mesh == mesh or (len(value.mesh) == len(mesh) and not value.shardings[0].is_partial)
        return value.shardings[0] if is_same else REPLICATED

    def _can(self, expr: relax.Expr, count: int) -> Callable[[Sharding], bool]:
        def can(sharding: Sharding) -> bool:
            shape = shape_of(expr)
            if not sharding.is_split or shape is None:
                return not sharding.is_split
            if not sharding.divides(shape, count):
                return False
            value = self._weights.get(expr, expr)
            if not isinstance(value, relax.Call) or expr not in self._weights:
                return value is expr or self._can(value, count)(sharding)
            found = weight_operands(
                value, [shape_of(arg) or [] for arg in value.args if _is_tensor(arg)], sharding, count
            )
            operands = [arg for arg in value.args if _is_tensor(arg)]
            return found is not None and all(
                self._can(arg, count)(each) for arg, each in zip(operands, found[0], strict=True)
            )

        return can

    # -- values with a sharding

    def _get(self, expr: relax.Expr, mesh: Mesh, sharding: Sharding) -> list[relax.Expr]:
        """The local value of each device of a mesh."""
        key = expr, mesh, sharding
        if key not in self._converted:
            if self._is_weight(expr):
                self._converted[key] = self._weight(expr, mesh, sharding)
            else:
                self._converted[key] = self._convert(expr, mesh, sharding)
        return self._converted[key]

    def _weight(self, expr: relax.Expr, mesh: Mesh, sharding: Sharding) -> list[relax.Expr]:
        value, count = self._weights.get(expr, expr), len(mesh)
        if is_tensor_constant(value):
            return [self._cut(value, sharding, number, count) for number in range(count)]
        if isinstance(value, relax.Var):
            return self._get(value, mesh, sharding)
        tensors = [arg for arg in value.args if _is_tensor(arg)]
        if not sharding.is_split:
            operands, local = [REPLICATED] * len(tensors), None
        else:
            found = weight_operands(value, [shape_of(arg) or [] for arg in tensors], sharding, count)
            assert found is not None, "plans ask `_can` first"
            operands, local = found
        by_device = list(
            zip(*(self._get(arg, mesh, each) for arg, each in zip(tensors, operands, strict=True)), strict=True)
        )
        make = self._local_call(value, OpPlan(operands, [sharding], local), count)
        name = expr.name
        return [
            self._emit(make, list(by_device[number]), device, f"{name}@{number}" if number else name)
            for number, device in enumerate(mesh)
        ]

    def _cut(self, constant: relax.Expr, sharding: Sharding, number: int, count: int) -> relax.Expr:
        if not sharding.is_split:
            return constant
        key = constant, sharding, number, count
        if key not in self._cuts:
            part = sharding.part(host_array(constant.value), number, count)
            ty = relax.TensorType(list(part.shape), constant.ty.dtype)
            self._cuts[key] = tvm.ir.GenericConst(share_or_copy(part), ty)
        return self._cuts[key]

    def _convert(self, expr: relax.Expr, mesh: Mesh, sharding: Sharding) -> list[relax.Expr]:
        value = self._values[expr]
        own = value.shardings[0] if value.shardings else REPLICATED
        name = str(expr.name)
        if value.mesh != mesh:
            if own == REPLICATED:
                at = [self._local_on(value, device) for device in mesh]
            elif len(value.mesh) == len(mesh) and own.is_split:
                at = [self._transfer(local, device) for local, device in zip(value.locals, mesh, strict=True)]
            elif own.is_partial and len(mesh) == 1:  # only this device needs the sum
                parts = [self._transfer(local, mesh[0]) for local in value.locals]
                return [self._added(parts, mesh[0], name)]
            elif own.is_split and len(mesh) == 1:
                return [self._gathered(expr, value, mesh[0], own, f"{name}_whole")]
            else:
                whole = self._get(expr, value.mesh, REPLICATED)
                at, own = (
                    [self._local_on(_Value(value.mesh, [REPLICATED], whole), device) for device in mesh],
                    REPLICATED,
                )
            value = _Value(mesh, [own], at)
        if own == sharding:
            return value.locals
        if own.is_partial:
            return self._reduced(value, sharding, name)
        if own == REPLICATED:
            return [
                self._sliced(local, sharding, expr, number, len(mesh), device, name)
                for number, (device, local) in enumerate(zip(mesh, value.locals, strict=True))
            ]
        if sharding == REPLICATED:
            if self._sums_gather(value) and self._source_of_repeat(expr, value.mesh, mesh[0]) is None:
                return self._reduced(_Value(mesh, [PARTIAL], self._padded(value, own, name)), sharding, name)
            return [
                self._gathered(expr, value, device, own, f"{name}_whole@{number}" if number else f"{name}_whole")
                for number, device in enumerate(mesh)
            ]
        if sharding.axis != own.axis and not own.segments and not sharding.segments:
            return self._exchanged(value, sharding, own, expr, name)
        return [
            self._sliced(local, sharding, expr, number, len(mesh), device, name)
            for number, (device, local) in enumerate(zip(mesh, self._get(expr, mesh, REPLICATED), strict=True))
        ]

    def _sums_gather(self, value: _Value) -> bool:
        """Return whether GPUs gather a small value as a sum of what they have, padded with zeros: by one kernel each.

        That is exact, as all summands but one are zeros; only -0 becomes 0.
        """
        shape = [known(extent) for extent in shape_of(value.locals[0]) or [None]]
        if None in shape or not all(self._records_graphs(device) for device in value.mesh):
            return False
        count = math.prod(extent or 0 for extent in shape) * len(value.mesh)
        return supports(count, str(value.locals[0].ty.dtype)) and AllReduce((count,), len(value.mesh)).is_short

    def _padded(self, value: _Value, own: Sharding, name: str) -> list[relax.Expr]:
        """The parts of a split value, each among zeros in the place of the others."""
        axis, count = own.axis, len(value.mesh)
        assert axis is not None, "the value is split"
        extents = [int(extent) for extent in shape_of(value.locals[0]) or []]
        sizes = [size // count for size in own.segments or (extents[axis] * count,)]
        padded = []
        for number, (device, local) in enumerate(zip(value.mesh, value.locals, strict=True)):
            pieces, begin = [], 0
            for size in sizes:
                piece = local if len(sizes) == 1 else self._slice_of(local, axis, begin, begin + size, device, name)
                widths = [0] * (2 * len(extents))
                widths[2 * axis], widths[2 * axis + 1] = number * size, (count - 1 - number) * size
                make: _Make = partial(_zeros_around, widths)
                pieces.append(self._emit(make, [piece], device, f"{name}_among_zeros"))
                begin += size
            joined: _Make = lambda args: relax.op.concat(list(args), axis)  # noqa: E731
            padded.append(pieces[0] if len(pieces) == 1 else self._emit(joined, pieces, device, f"{name}_among_zeros"))
        return padded

    def _local_on(self, value: _Value, device: int) -> relax.Expr:
        """A replicated value on a device."""
        if device in value.mesh:
            return value.locals[value.mesh.index(device)]
        return self._transfer(value.locals[0], device)

    def _reduced(self, value: _Value, sharding: Sharding, name: str) -> list[relax.Expr]:
        """An all-reduce, or for a split a reduce-scatter."""
        mesh, count = value.mesh, len(value.mesh)
        if sharding.is_split:
            return [
                self._added(
                    [
                        self._transfer(self._sliced(local, sharding, local, number, count, source, name), device)
                        for source, local in zip(mesh, value.locals, strict=True)
                    ],
                    device,
                    f"{name}_scattered@{number}" if number else f"{name}_scattered",
                )
                for number, device in enumerate(mesh)
            ]
        results = [
            self._new_var(f"{name}_sum@{number}" if number else f"{name}_sum", self._bare_type(local), device)
            for number, (device, local) in enumerate(zip(mesh, value.locals, strict=True))
        ]
        self._items.append(Sum(results, list(value.locals), mesh))
        return list(results)

    def _added(self, parts: Sequence[relax.Expr], device: int, name: str) -> relax.Expr:
        total = parts[0]
        for part in parts[1:]:
            total = self._emit(lambda args: relax.op.add(*args), [total, part], device, f"{name}_sum")
        return total

    def _gathered(self, expr: relax.Expr, value: _Value, device: int, own: Sharding, name: str) -> relax.Expr:
        """All elements of a split value on a device: a reshape, or a reduction, of what is there, or exchanged."""
        source = self._source_of_repeat(expr, value.mesh, device)
        if source is not None:
            return self._emit(partial(self._rebuilt, self._repeatable[expr][1]), [source], device, name)
        parts = [self._transfer(local, device) for local in value.locals]
        axis, count = own.axis, len(value.mesh)
        assert axis is not None, "the value is split"
        pieces: list[relax.Expr] = []
        begin = 0
        for size in own.segments or (0,):
            share = size // count
            for part in parts:
                pieces.append(self._slice_of(part, axis, begin, begin + share, device, name) if share else part)
            begin += share
        return self._emit(lambda args: relax.op.concat(list(args), axis), pieces, device, name)

    def _source_of_repeat(self, expr: relax.Expr, mesh: Mesh, device: int) -> relax.Expr | None:
        """A whole value of a device from which it can compute `expr`; None if there is none."""
        source, _ = self._repeatable.get(expr, (None, None))
        for each in ((device,), mesh):
            if whole := self._converted.get((source, each, REPLICATED)):
                return whole[each.index(device)]
        return None

    def _exchanged(
        self, value: _Value, sharding: Sharding, own: Sharding, expr: relax.Expr, name: str
    ) -> list[relax.Expr]:
        """An all-to-all: each device sends each other one its share of another axis."""
        count = len(value.mesh)
        return [
            self._emit(
                lambda args: relax.op.concat(list(args), own.axis),
                [
                    self._transfer(self._sliced(local, sharding, expr, number, count, source, name), device)
                    for source, local in zip(value.mesh, value.locals, strict=True)
                ],
                device,
                f"{name}_exchanged@{number}" if number else f"{name}_exchanged",
            )
            for number, device in enumerate(value.mesh)
        ]

    def _sliced(
        self, local: relax.Expr, sharding: Sharding, whole: relax.Expr, number: int, count: int, device: int, name: str
    ) -> relax.Expr:
        """A device's part of a value that it has whole along the axis."""
        axis = sharding.axis
        assert axis is not None, "the value becomes split"
        ranges = sharding.ranges(int((shape_of(whole) or [])[axis]), number, count)
        pieces = [self._slice_of(local, axis, *pair, device, name) for pair in ranges]
        if len(pieces) == 1:
            return pieces[0]
        return self._emit(lambda args: relax.op.concat(list(args), axis), pieces, device, f"{name}_part")

    def _slice_of(self, local: relax.Expr, axis: int, begin: int, end: int, device: int, name: str) -> relax.Expr:
        make: _Make = lambda args: relax.op.strided_slice(args[0], [axis], [begin], [end])  # noqa: E731
        return self._emit(make, [local], device, f"{name}_part")

    def _transfer(self, local: relax.Expr, device: int) -> relax.Expr:
        """A local value on another device; constants are where they are used."""
        vdevice = local.ty.vdevice if isinstance(local.ty, relax.TensorType) else None
        if vdevice is None or vdevice_index(vdevice, self._vdevices) == device:
            return local
        key = local, device
        if key not in self._transferred:
            var = self._new_var(f"{local.name}_sent", self._bare_type(local), device)
            call = relax.op.to_vdevice(local, self._vdevices[device])
            self._items.append(relax.VarBinding(var, typed(call, var.ty)))
            self._transferred[key] = var
        return self._transferred[key]

    # -- new bindings

    def _emit(self, make: _Make, args: Sequence[relax.Expr], device: int, name: str) -> relax.Expr:
        """Bind what a device computes; its type is inferred from operands without devices."""
        bare = self._builder.normalize(make([self._bare_of(arg) for arg in args])).ty
        var = self._new_var(name, bare, device)
        value = make(list(args))
        if isinstance(value, relax.Call):
            value = typed(value, var.ty)
        self._items.append(relax.VarBinding(var, value))
        return var

    def _bind(self, name: str, value: relax.Expr, ty: tvm.ir.Type) -> relax.Var:
        var = self.new_local(name, ty)
        self._items.append(relax.VarBinding(var, value))
        return var

    def _new_var(self, name: str, ty: tvm.ir.Type, device: int) -> relax.Var:
        var = self.new_local(name, _on(ty, self._vdevices[device]))
        self._bare[var] = relax.Var(name, ty)
        return var

    def _bare_of(self, expr: relax.Expr) -> relax.Expr:
        if not isinstance(expr, relax.Var):
            return expr
        if expr not in self._bare:
            self._bare[expr] = relax.Var(expr.name, _on(expr.ty, None))
        return self._bare[expr]

    def _bare_type(self, expr: relax.Expr) -> tvm.ir.Type:
        return _on(expr.ty, None)

    def new_local(self, name: str, ty: tvm.ir.Type) -> relax.Var:
        """Make a variable of the function."""
        return (relax.DataflowVar if self._is_dataflow else relax.Var)(name, ty)

    def add_binding(self, var: relax.Var, value: relax.Expr) -> None:
        """Bind a value whose type is that of the variable."""
        value = typed(value, var.ty) if isinstance(value, relax.Call) else value
        self._items.append(relax.VarBinding(var, value))

    def add_kernel(self, kernel: tvm.tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel to the module, under a name of its own."""
        gv = self._builder.add_func(kernel, name)
        self._kernels[gv] = self._builder.get()[gv]
        return gv

    def new_addresses(self, function: str, numbers: Sequence[relax.Expr], count: int, device: int) -> relax.Var:
        """Bind addresses, (count,) of int64, that a function of the run time returns."""
        ty = relax.TensorType([count], "int64", self._vdevices[device])
        var = self.new_local("peer_memory", ty)
        self.add_binding(var, relax.op.call_pure_packed(function, *numbers, ty_args=[ty]))
        return var

    # -- the end

    def _lowered(self, results: set[relax.Var]) -> list[relax.VarBinding]:
        """All bindings that results need, with exchanges in place of sums."""
        used, kept = set(results), []
        for item in reversed(self._items):
            if isinstance(item, Sum):
                if any(result in used for result in item.results):
                    used.update(var for part in item.parts for var in used_vars(part))
                    kept.append(item)
            elif item.var in used or not _is_droppable(item.value):
                used.update(used_vars(item.value))
                kept.append(item)
        order = kept[::-1]
        by_kernels = [item for item in order if isinstance(item, Sum) and self._has_kernel(item, used)]
        self._items = []
        sums = GpuSums(self, order, by_kernels, results)
        for item in order:
            if isinstance(item, relax.VarBinding):
                if item.var not in sums.replaced:
                    self._items.append(item)
            elif item in by_kernels:
                sums.add(item)
            else:
                self._exchange(item, used)
        return self._items  # type: ignore[return-value]

    def _exchange(self, item: Sum, used: set[relax.Var]) -> None:
        """Add the parts of a sum on each device that uses it, in the same order on all."""
        for device, result in zip(item.mesh, item.results, strict=True):
            if result in used:
                total = self._added([self._transfer(part, device) for part in item.parts], device, str(result.name))
                last = self._items.pop()
                assert isinstance(last, relax.VarBinding) and last.var.same_as(total), "a sum is the last binding"
                self._items.append(relax.VarBinding(result, last.value))

    def _has_kernel(self, item: Sum, used: set[relax.Var]) -> bool:
        """Return whether GPUs sum by kernels that write to each other's memory: all of them must use the result."""
        shape = [known(extent) for extent in shape_of(item.results[0]) or [None]]
        if None in shape or not all(result in used for result in item.results):
            return False
        count = math.prod(extent or 0 for extent in shape)
        return all(map(self._records_graphs, item.mesh)) and supports(count, str(item.results[0].ty.dtype))

    def _records_graphs(self, device: int) -> bool:
        return bool(backend_of(self._vdevices[device].target).records_graphs)


def _sharding(placement: str) -> Sharding:
    return Sharding(split_axis(placement))


def _extents(ty: tvm.ir.Type) -> list[Any] | None:
    has_shape = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return list(ty.shape.values) if has_shape else None


def _is_tensor(expr: relax.Expr) -> bool:
    return is_tensor_constant(expr) or (isinstance(expr, relax.Var) and isinstance(expr.ty, relax.TensorType))


def _tensors(ty: tvm.ir.Type) -> int:
    return sum(map(_tensors, ty.fields)) if isinstance(ty, tvm.ir.TupleType) else int(isinstance(ty, relax.TensorType))


def _leaves(expr: relax.Expr) -> list[relax.Var]:
    """Variables in an expression of tuples."""
    if isinstance(expr, relax.Tuple):
        return [var for field in expr.fields for var in _leaves(field)]
    return [expr] if isinstance(expr, relax.Var) else []


def _replaced(expr: relax.Expr, names: dict[relax.Var, relax.Var]) -> relax.Expr:
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_replaced(field, names) for field in expr.fields])
    return names.get(expr, expr) if isinstance(expr, relax.Var) else expr


def _multiplied(args: Sequence[relax.Expr]) -> relax.Expr:
    return relax.op.multiply(*args)


def _zeros_around(widths: Sequence[int], args: Sequence[relax.Expr]) -> relax.Expr:
    return relax.op.nn.pad(args[0], list(widths))


def _is_droppable(value: relax.Expr) -> bool:
    is_call = isinstance(value, relax.Call) and not tvm.ir.is_prim_expr(value)
    return not is_call or (isinstance(value.op, tvm.ir.Op) and bool(value.op.get_attr("FPurity")))
