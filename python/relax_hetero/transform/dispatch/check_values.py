"""CheckValues: an index out of bounds, or a divisor 0, becomes an error.

Before::

    y: R.Tensor((3, 4), "float32", "llvm:0") = R.take(x, index, axis=0, mode="fast")

After, where `x` has 10 rows::

    y_checked: R.Tensor((3,), "int64", "llvm:0") = R.call_tir(cls.check_values, (index, 0, 10), out_ty=...)
    y = R.take(x, y_checked, axis=0, mode="fast")

The kernel ends the call if an index is not in [-10, 10), and counts negative ones from the front. The op reads the
kernel's result, so that it cannot run before. The number of the check, here 0, tells the machine which op and
variable to name. Integer divisions read their divisors in the same way.

Constant indices are checked at compile time, and need no kernel. On GPUs, where a kernel cannot end a call, negative
indices are only counted from the front: ClampIndices clamps them to the nearest element. In a module that is
marked strict (``rh.compile(checks="strict")``) a kernel of the GPU checks them, and reports a wrong one in the GPU's
error record, which is one more operand, a constant (`artifact.checks.RECORD`) that the machine replaces::

    y_checked: R.Tensor((3,), "int64", "cuda:0") = R.call_tir(cls.check_values, (index, record, key, 10), out_ty=...)

There the check is identified by its key, a hash of its text, as calls of several machines may share the GPU.

Ops whose mode defines the result of an index outside (``take`` with ``clip``, ``wrap`` or ``nan``) are left alone.

Assumes a placed module (RealizeVDevice), before FormDispatches. A second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm_ffi import StructuralKey

from ...artifact.checks import RECORD, CheckSpec
from ...errors import BuildError
from ...target.backend import backend_of
from ...tir.checks import CHECKED, RANGE, CheckProblem, check_kernel, reporting_kernel
from ...tir.core.bounds import BOUNDED, from_front
from ...tir.core.builder import int64, plain_extent
from ..ir.blocks import Block, Emitter, rewrite_function, shape_of
from ..ir.constant_values import ConstantValues, constant_on_device_of
from ..ir.declare import declare_pass
from ..ir.extents import Symbols
from ..ir.kernels import called_prim_func, opaque_kernel
from ..ir.module_attrs import STRICT, is_lowered
from ..ir.op_names import TRANSFER
from ..ir.remarks import remarks_of, with_remarks
from ..ir.rewriting import copy_module, fresh_global_var, op_name, relax_functions, typed, with_args


@dataclass(frozen=True)
class _Operand:
    """An operand of an op whose values are checked."""

    number: int  # number of the operand
    # The end of the range for each position along the last axis, None where any value is valid; a single one for all
    # values. None: the values are divisors.
    ends: tuple[Any, ...] | None
    wraps: bool = True  # True if negative values count from the end
    field: int | None = None  # index of the field, if the operand is a tuple
    subject: str = "index"  # word for a value in messages


Operands = Callable[[relax.Call], "list[_Operand]"]


def check_values(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        When it runs: a constant index or divisor is wrong.
    """
    if is_lowered(mod):
        return mod
    checker = _Checker(mod)
    functions = {gv: rewrite_function(func, checker.in_function(gv.name_hint)) for gv, func in relax_functions(mod)}
    return checker.finish(functions)


CheckValues = declare_pass("CheckValues", check_values)


class _Checker:
    """Collects the checks of a module."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self._specs = list(remarks_of(mod).checks or ())
        self._num_earlier = len(self._specs)
        self._kernels: dict[Any, tvm.ir.GlobalVar] = {}
        self._functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self._has_changed = False
        self._is_strict = bool(mod.attrs and STRICT in mod.attrs)
        self._records: dict[Any, tvm.ir.GenericConst] = {}

    def in_function(self, name: str) -> Callable[[Block], list[relax.Binding] | None]:
        """Rewrite for the blocks of the function `name`."""

        def rewrite(block: Block) -> list[relax.Binding] | None:
            if not any(op_name(binding.value) in _CHECKED for binding in block.bindings):
                return None
            emitter, constants = Emitter(block.is_dataflow), ConstantValues(block)
            for binding in block.bindings:
                emitter.bindings.append(self._checked(name, binding, block, emitter, constants))
            changed = any(a is not b for a, b in zip(emitter.bindings, block.bindings, strict=False))
            self._has_changed |= changed
            return emitter.bindings if changed else None

        return rewrite

    def finish(self, functions: dict[tvm.ir.GlobalVar, relax.Function]) -> tvm.IRModule:
        """The module with its checks; the same module if there are none."""
        if not self._has_changed:
            return self._mod
        mod = copy_module(self._mod, {**dict(self._mod.functions.items()), **functions, **self._functions})
        return with_remarks(mod, checks=tuple(self._specs)) if len(self._specs) > self._num_earlier else mod

    def _checked(
        self, function: str, binding: relax.Binding, block: Block, emitter: Emitter, constants: ConstantValues
    ) -> relax.Binding:
        call = binding.value
        name = op_name(call)
        if name not in _CHECKED or not isinstance(binding, relax.VarBinding):
            return binding
        args = list(call.args)
        where = f"op {name} of variable {binding.var.name!r} in function {function!r}"
        kernel = called_prim_func(self._mod, call)
        if kernel is not None:
            where = f"variable {binding.var.name!r} in function {function!r}"
        operands = _CHECKED[name](call) if kernel is None else _in_range(call, self._mod.functions[kernel])
        for operand in operands:
            arg = args[operand.number]
            fields = list(arg.fields) if isinstance(arg, relax.Tuple) else None
            value = arg if fields is None else fields[operand.field or 0]
            new = self._valid_value(value, operand, where, binding.var.name, block, emitter, constants)
            if fields is None:
                args[operand.number] = new
            elif not new.same_as(value):
                fields[operand.field or 0] = new
                args[operand.number] = relax.Tuple(fields)
        if all(new.same_as(old) for new, old in zip(args, call.args, strict=True)):
            return binding
        return relax.VarBinding(binding.var, typed(with_args(call, args), call.ty), binding.span)

    def _valid_value(
        self,
        value: relax.Expr,
        operand: _Operand,
        where: str,
        name: str,
        block: Block,
        emitter: Emitter,
        constants: ConstantValues,
    ) -> relax.Expr:
        """The operand's value with its check: a checked constant, a kernel's result, or the value itself."""
        shape, ends = shape_of(value), operand.ends
        source = block.definition(value)
        while op_name(source) == TRANSFER:
            source = block.definition(source.args[0])
        if shape is None or value.ty.dtype is None or self._is_checked(source):
            return value
        subject = "divisor" if ends is None else operand.subject
        is_static = ends is None or all(isinstance(end, int) or end is None for end in ends)
        array = constants.of(value) if is_static else None
        if array is not None:
            return _checked_constant(array, value, operand, CheckSpec(subject, where))
        vdevice = value.ty.vdevice
        is_cpu = vdevice is not None and "cpu" in vdevice.target.keys
        if not is_cpu and (vdevice is None or not self._is_strict):
            return (
                value
                if ends is None or not operand.wraps
                else _counted_from_front(value, ends, name, emitter, self._add)
            )
        if not backend_of(vdevice.target).checks_values:
            kind = vdevice.target.kind.name
            raise BuildError(f"{where} is on a device of kind {kind!r}: strict checks need a CPU or a CUDA device")
        symbols = Symbols()
        problem = CheckProblem(
            tuple(map(symbols.dim, shape)),
            str(value.ty.dtype),
            (True,) if ends is None else tuple(end is not None for end in ends),
            operand.wraps,
            ends is None,
        )
        spec = CheckSpec(subject, where)
        numbers = [len(self._specs) if is_cpu else spec.key, *(end for end in ends or () if end is not None)]
        self._specs.append(spec)
        result = relax.TensorType(shape, problem.result, vdevice)
        scalars = [int64(n) for n in numbers]
        operands = [value, *scalars] if is_cpu else [value, self._record(vdevice), *scalars]
        call = relax.call_tir(self._kernel(problem, is_cpu), relax.Tuple(operands), result)
        return emitter.emit(call, result, f"{name}_checked")

    def _record(self, vdevice: relax.VDevice) -> tvm.ir.GenericConst:
        """Constant that stands for the error record of a GPU."""
        key = StructuralKey(vdevice)
        if key not in self._records:
            words = np.frombuffer(RECORD, "int32")
            ty = relax.TensorType(words.shape, "int32", vdevice)
            self._records[key] = tvm.ir.GenericConst(tvm.runtime.tensor(words), ty)
        return self._records[key]

    def _kernel(self, problem: CheckProblem, is_cpu: bool) -> tvm.ir.GlobalVar:
        key = problem, is_cpu
        if key not in self._kernels:
            kernel = check_kernel(problem) if is_cpu else reporting_kernel(problem)
            self._kernels[key] = self._add(opaque_kernel(kernel), "check_values")
        return self._kernels[key]

    def _add(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        key = StructuralKey(kernel)
        if key not in self._kernels:
            gv = fresh_global_var(name, kernel.ty, self._used_names)
            self._kernels[key] = gv
            self._functions[gv] = kernel
        return self._kernels[key]

    def _is_checked(self, definition: relax.Expr) -> bool:
        gv = called_prim_func(self._mod, definition)
        return gv is not None and CHECKED in self._mod.functions[gv].attrs


def _checked_constant(array: np.ndarray, value: relax.Expr, operand: _Operand, spec: CheckSpec) -> relax.Expr:
    """A constant operand, checked now, with negative indices counted from the front."""
    if operand.ends is None:
        if array.dtype.kind in "iu" and np.any(array == 0):
            raise BuildError(spec.message(0, 0, 0))
        return value
    if array.size == 0:
        return value
    rows = array.reshape(-1, len(operand.ends)).copy()
    for column, end in enumerate(operand.ends):
        if end is None:
            continue
        first = -end if operand.wraps else 0
        values = rows[:, column]
        invalid = values[~((values >= first) & (values < end))]
        if invalid.size:
            raise BuildError(spec.message(int(invalid[0]), first, end))
        if operand.wraps and values.dtype.kind == "i":
            rows[:, column] = np.where(values < 0, values + end, values)
    counted = rows.reshape(array.shape)
    return value if np.array_equal(counted, array) else constant_on_device_of(counted, value)


def _counted_from_front(
    value: relax.Expr,
    ends: Sequence[Any],
    name: str,
    emitter: Emitter,
    add: Callable[[tirx.PrimFunc, str], tvm.ir.GlobalVar],
) -> relax.Expr:
    """Indices with the negative ones counted from the front, by a kernel that fuses with the op."""
    if str(value.ty.dtype).startswith("uint"):
        return value
    shape = shape_of(value)
    assert shape is not None, "the caller checks the shape"
    numbers = [tirx.Var(f"end_{i}", "int64") for i in range(len(ends))]
    symbols: dict[Any, tirx.Var] = {}

    def extent(dim: Any) -> Any:
        return dim if isinstance(dim, tirx.IntImm) else symbols.setdefault(StructuralKey(dim), tirx.Var("n", "int64"))

    tensor = te.placeholder([extent(dim) for dim in shape], str(value.ty.dtype), "indices")

    def element(*indices: Any) -> Any:
        end: Any = numbers[0]
        for i in range(1, len(numbers)):
            end = tirx.Select(indices[-1] == i, numbers[i], end)
        return from_front(tensor(*indices), end)

    result = te.compute(tensor.shape, element, name="from_front")
    return _call(value, ends, te.create_prim_func([tensor, *numbers, result]), name, emitter, add) if numbers else value


def _call(
    value: relax.Expr,
    ends: Sequence[Any],
    kernel: tirx.PrimFunc,
    name: str,
    emitter: Emitter,
    add: Callable[[tirx.PrimFunc, str], tvm.ir.GlobalVar],
) -> relax.Var:
    kernel = kernel.without_attr("global_symbol").with_attrs({"tirx.noalias": True, CHECKED: True, BOUNDED: True})
    ty = relax.TensorType(value.ty.shape, "int64", value.ty.vdevice)
    scalars = [int64(end) for end in ends]
    return emitter.emit(
        relax.call_tir(add(kernel, "from_front"), relax.Tuple([value, *scalars]), ty), ty, f"{name}_index"
    )


def _extent(data: relax.Expr, axis: int) -> Any | None:
    shape = shape_of(data)
    if shape is None:
        return None
    return plain_extent(shape[axis % len(shape)]) if shape else None


def _along(data: relax.Expr, axis: Any, number: int, field: int | None = None) -> list[_Operand]:
    extent = _extent(data, int(axis))
    return [] if extent is None else [_Operand(number, (extent,), field=field)]


def _take(call: relax.Call) -> list[_Operand]:
    data, _ = call.args
    axis = 0 if call.attrs.axis is None else call.attrs.axis
    is_flat = call.attrs.axis is None and int(data.ty.ndim) != 1
    return [] if str(call.attrs.mode) != "fast" or is_flat else _along(data, axis, 1)


def _coordinates(call: relax.Call) -> list[_Operand]:
    shape, indices = shape_of(call.args[0]), shape_of(call.args[1])
    first = int(getattr(call.attrs, "batch_dims", 0))
    if shape is None or not indices or not isinstance(indices[-1], tirx.IntImm):
        return []
    ends = tuple(map(plain_extent, shape[first : first + int(indices[-1])]))
    return [_Operand(1, ends)] if ends else []


def _in_range(call: relax.Call, kernel: tirx.PrimFunc) -> list[_Operand]:
    """The operand of a kernel whose values have to be in the range of the attribute `RANGE`."""
    if RANGE not in kernel.attrs:
        return []
    number, sized, axis, offset = map(int, kernel.attrs[RANGE])
    size = 0 if sized < 0 else _extent(call.args[1].fields[sized], axis)
    return [] if size is None else [_Operand(1, (size + offset,), wraps=False, field=number, subject="value")]


def _each_axis(call: relax.Call) -> list[_Operand]:
    data, indices = call.args[:2]
    return [operand for axis in range(len(indices.ty.fields)) for operand in _along(data, axis, 1, axis)]


def _regions(call: relax.Call) -> list[_Operand]:
    end = _extent(call.args[0], 0)
    return [] if end is None else [_Operand(1, (end, None, None, None, None), wraps=False)]


def _divisor(call: relax.Call) -> list[_Operand]:
    dtype = call.args[1].ty.dtype if isinstance(call.args[1].ty, relax.TensorType) else None
    return [_Operand(1, None)] if dtype is not None and str(dtype).startswith(("int", "uint")) else []


_CHECKED: dict[str | None, Operands] = {
    "relax.take": _take,
    "relax.call_tir": lambda call: [],  # an attribute of the kernel names its operand: `_in_range`
    "relax.gather_elements": lambda call: _along(call.args[0], call.attrs.axis, 1),
    "relax.gather_nd": _coordinates,
    "relax.scatter_elements": lambda call: _along(call.args[0], call.attrs.axis, 1),
    "relax.scatter_nd": _coordinates,
    "relax.index_tensor": _each_axis,
    "relax.index_put": _each_axis,
    "relax.vision.roi_align": _regions,
    "relax.vision.roi_pool": _regions,
    **dict.fromkeys(("relax.divide", "relax.floor_divide", "relax.mod", "relax.floor_mod"), _divisor),
}
"""Operands of each op whose values are checked."""
