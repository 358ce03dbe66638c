"""Whole models for a GPU on a machine without one: the interpreter runs every kernel that the passes make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from relax_hetero.driver.link.llvm_kernels import build_llvm
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.vm.device.tensor_arrays import host_array
from relax_hetero.vm.device.tensors import bytes_of, from_numpy, view_bytes

from .dtypes import scalar_type
from .expressions import Expressions
from .launch import run
from .names import Names

LAST_STEP = "FormDispatches"
"""Pass after which a model consists of calls of kernels; later passes order and record them."""


def dispatched(mod: tvm.IRModule) -> tvm.IRModule:
    """The module after the passes that make kernels."""
    for step in pipeline_steps(command_buffers=False):
        mod = step.run(mod)
        if step.name == LAST_STEP:
            return mod
    raise AssertionError(f"no step {LAST_STEP}")


class InterpretedModel:
    """A module whose functions run in Python: GPU kernels by the interpreter, those of CPUs compiled.

    Parameters
    ----------
    mod : tvm.IRModule
        With vdevices, before the passes.
    strict : bool
        As for `run`.
    """

    def __init__(self, mod: tvm.IRModule, strict: bool = False) -> None:
        self.mod, self._strict = dispatched(mod), strict
        self.launched: list[str] = []
        self._compiled: dict[str, Any] = {}

    def __call__(self, *arguments: Any, function: str = "main") -> Any:
        """Call a Relax function with arrays; results are arrays or tuples of them."""
        return _Frame(self, self.mod[function], [_value(a) for a in arguments]).result

    def call_kernel(self, name: str, arguments: Sequence[Any]) -> None:
        """Run a kernel on arrays and numbers, in place."""
        func = self.mod[name]
        target = func.attrs.get("target")
        if target is not None and target.kind.name == "cuda":
            self.launched.append(name)
            run(func, *(np.ascontiguousarray(a) if np.ndim(a) else a for a in arguments), strict=self._strict)
            return
        if name not in self._compiled:
            entry = func.with_attr("global_symbol", name)
            module = tvm.IRModule({name: entry.without_attr("target") if target is not None else entry})
            self._compiled[name] = build_llvm(target or tvm.target.Target("llvm"), module)
        tensors = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
        self._compiled[name][name](*tensors)
        for array, tensor in zip(arguments, tensors, strict=True):
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = tensor.numpy().reshape(array.shape)


def _value(argument: Any) -> Any:
    if hasattr(argument, "numpy"):
        return argument.numpy()
    if isinstance(argument, (list, tuple)) or type(argument).__name__ in ("Array", "ShapeTuple", "Shape"):
        return tuple(_value(one) for one in argument)
    return argument if isinstance(argument, (int, float, str)) else np.asarray(argument)


def _viewed(array: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The bytes of an array as elements of another type; of less than a byte, arrays hold an element in each."""
    tensor = from_numpy(array, tvm.runtime.device("cpu", 0))
    return host_array(view_bytes(bytes_of(tensor), shape, dtype))


class _Frame:
    """A call of a Relax function."""

    def __init__(self, model: InterpretedModel, func: relax.Function, arguments: list[Any]) -> None:
        self._model, self._names = model, Names()
        self._values: dict[relax.Var, Any] = {}
        self._slots: list[Any] = [None] * 10_000
        for parameter, value in zip(func.params, arguments, strict=True):
            self._bind(parameter, value)
        self.result = self._of(func.body)

    def _bind(self, var: relax.Var, value: Any) -> None:
        self._values[var] = value
        self._match(var.ty, value)

    def _match(self, kind: Any, value: Any) -> None:
        """Sizes that a type names and a value has."""
        if type(kind).__name__.startswith("Tuple"):
            for part, one in zip(kind.fields, value, strict=True):
                self._match(part, one)
            return
        shape = getattr(kind, "shape", None) if isinstance(value, np.ndarray) else getattr(kind, "values", None)
        extents = value.shape if isinstance(value, np.ndarray) else value
        shape = getattr(shape, "values", shape)
        if shape is None or not isinstance(extents, tuple):
            return
        for dim, extent in zip(shape, extents, strict=True):
            if isinstance(dim, tirx.Var):
                self._slots[self._names.slot(dim)] = np.int64(extent)

    def _number(self, expr: Any) -> Any:
        compiled: Callable[..., Any] = Expressions(self._names).compiled(expr)
        return compiled(self, None)

    @property
    def slots(self) -> list[Any]:
        """Values of symbolic sizes, as expressions find them."""
        return self._slots

    def _extents(self, shape: Any) -> tuple[int, ...]:
        return tuple(int(self._number(extent)) for extent in getattr(shape, "values", shape))

    def _empty(self, kind: Any) -> Any:
        if type(kind).__name__.startswith("Tuple"):
            return tuple(self._empty(part) for part in kind.fields)
        dtype = scalar_type(str(kind.dtype))
        array = np.empty(self._extents(kind.shape), dtype)
        array.reshape(-1).view(np.uint8)[...] = 1 if dtype.kind == "b" else 0xFF
        return array

    def _of(self, expr: Any) -> Any:
        if isinstance(expr, relax.SeqExpr):
            for block in expr.blocks:
                for binding in block.bindings:
                    value = self._of(binding.value)
                    if isinstance(binding, relax.MatchCast):
                        self._match(binding.ty, value)
                    self._bind(binding.var, value)
            return self._of(expr.body)
        if isinstance(expr, tvm.ir.GenericConst):
            return expr.value.numpy()
        if isinstance(expr, (tuple, list)):
            return tuple(self._of(one) for one in expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self._of(one) for one in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._of(expr.tuple_value)[int(expr.index)]
        if isinstance(expr, relax.ShapeExpr):
            return self._extents(expr)
        if isinstance(expr, relax.If):
            return self._of(expr.true_branch if bool(self._of(expr.cond)) else expr.false_branch)
        if isinstance(expr, relax.Var) and expr in self._values:
            return self._values[expr]
        if isinstance(expr, tvm.ir.Call):
            return self._call(expr)
        if isinstance(expr, tvm.ir.StringImm):
            return str(expr.value)
        return self._number(expr)

    def _call(self, call: tvm.ir.Call) -> Any:
        if isinstance(call.op, tvm.ir.GlobalVar):
            return _Frame(self._model, self._model.mod[call.op], [self._of(a) for a in call.args]).result
        name = str(call.op.name)
        if name == "relax.call_tir":
            return self._call_tir(call)
        if name in ("relax.to_vdevice", "relax.hint_on_device"):
            return self._of(call.args[0])
        if name == "relax.memory.view":
            return _viewed(self._of(call.args[0]), self._extents(call.ty.shape), str(call.ty.dtype))
        if name == "relax.reshape":
            return np.asarray(self._of(call.args[0]), order="C").reshape(self._of(call.args[1]))
        if name == "relax.tensor_to_shape":
            return tuple(int(extent) for extent in self._of(call.args[0]))
        if name == "relax.shape_of":
            return tuple(self._of(call.args[0]).shape)
        if name == "relax.hetero.requirement":
            assert bool(self._of(call.args[0])), f"a requirement does not hold: {call}"
            return (1,)
        if name == "relax.call_tir_inplace":
            return self._call_in_place(call)
        if name in ("relax.call_pure_packed", "relax.call_dps_packed"):
            return self._call_packed(call)
        raise NotImplementedError(f"the operator {name}: {str(call)[:200]}")

    def _call_tir(self, call: tvm.ir.Call) -> Any:
        out = self._empty(call.ty_args[0])
        arguments = self._of(call.args[1])
        extra = self._of(call.args[2]) if len(call.args) > 2 else ()
        outputs = out if isinstance(out, tuple) else (out,)
        self._model.call_kernel(call.args[0].name_hint, [*arguments, *outputs, *extra])
        return out

    def _call_in_place(self, call: tvm.ir.Call) -> Any:
        arguments = [np.array(a) if isinstance(a, np.ndarray) else a for a in self._of(call.args[1])]
        kinds = call.ty_args[0]
        kinds = list(kinds.fields) if type(kinds).__name__.startswith("Tuple") else [kinds]
        indices = [int(i) for i in call.attrs.inplace_indices]
        outputs = [arguments[i] if i >= 0 else self._empty(kind) for i, kind in zip(indices, kinds, strict=True)]
        extra = self._of(call.args[2]) if len(call.args) > 2 else ()
        fresh = [out for i, out in zip(indices, outputs, strict=True) if i < 0]
        self._model.call_kernel(call.args[0].name_hint, [*arguments, *fresh, *extra])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _call_packed(self, call: tvm.ir.Call) -> Any:
        function = tvm.get_global_func(str(call.args[0].global_symbol))
        arguments = [self._of(a) for a in call.args[1:]]
        if str(call.op.name) == "relax.call_dps_packed":
            out = self._empty(call.ty_args[0])
            tensors = [tvm.runtime.tensor(np.asarray(a, order="C")) for a in (*arguments[0], out)]
            function(*tensors)
            return tensors[-1].numpy()
        tensors = [tvm.runtime.tensor(np.asarray(a, order="C")) if isinstance(a, np.ndarray) else a for a in arguments]
        return _value(function(*tensors))
