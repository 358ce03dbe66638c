"""Signatures of Relax functions as plain data: inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from ..artifact.signature import (
    Dim,
    FunctionSignature,
    ObjectSpec,
    PrimSpec,
    ShapeSpec,
    TensorSpec,
    TupleSpec,
    ValueSpec,
)
from ..target.vdevice import vdevice_index, vdevices_of
from ..transform.ir.extents import NoTextError, dim_text
from ..transform.ir.module_attrs import public_functions
from ..transform.ir.rewriting import relax_functions
from ..transform.partition.written_arguments import WRITTEN
from ..transform.record.donated import DONATED, input_names


def function_signatures(
    mod: tvm.IRModule, takers: set[str], defaults: Mapping[str, Mapping[str, int]] | None = None
) -> dict[str, FunctionSignature]:
    """Signatures of the module's callable functions, by name.

    `mod`: lowered module before its constants are lifted; `takers`: names of the functions that will take the tuple of
    constants; `defaults`: index of the default constant by function and parameter.
    """
    return _signatures(mod, public_functions(mod), takers, defaults or {})


def signatures_before_lowering(mod: tvm.IRModule) -> dict[str, FunctionSignature]:
    """Signatures of a module's public functions (with a ``global_symbol``) at any stage before lowering."""
    return _signatures(
        mod, [gv.name_hint for gv, func in relax_functions(mod) if "global_symbol" in func.attrs], set(), {}
    )


def _signatures(
    mod: tvm.IRModule, names: Sequence[str], takers: set[str], defaults: Mapping[str, Mapping[str, int]]
) -> dict[str, FunctionSignature]:
    reader = _TypeReader(vdevices_of(mod))
    return {
        gv.name_hint: reader.signature(gv.name_hint, func, gv.name_hint in takers, defaults.get(gv.name_hint, {}))
        for gv, func in relax_functions(mod)
        if gv.name_hint in names
    }


class _TypeReader:
    def __init__(self, vdevices: list[relax.VDevice]):
        self.vdevices = vdevices

    def signature(
        self, name: str, func: relax.Function, takes_constants: bool, defaults: Mapping[str, int]
    ) -> FunctionSignature:
        attrs = func.attrs
        names = input_names(func)
        donated, written = ([names[int(number)] for number in attrs.get(key, ())] for key in (DONATED, WRITTEN))
        is_tuple = isinstance(func.ret_ty, tvm.ir.TupleType)
        results = list(func.ret_ty.fields) if is_tuple else [func.ret_ty]
        output_names = [str(n) for n in attrs.get("output_names", [])]
        if len(output_names) != len(results):
            output_names = [f"output_{i}" for i in range(len(results))] if is_tuple else ["output"]
        return FunctionSignature(
            name=name,
            inputs=tuple(self.spec(n, param.ty) for n, param in zip(names, func.params, strict=True)),
            outputs=tuple(self.spec(n, ty) for n, ty in zip(output_names, results, strict=True)),
            output_is_tuple=is_tuple,
            num_input=int(attrs.get("num_input", -1)),
            takes_constants=takes_constants,
            defaults={n: defaults[p.name] for n, p in zip(names, func.params, strict=True) if p.name in defaults},
            donated=tuple(donated),
            copied=tuple(name for name in written if name not in donated),
            strings=tuple(map(str, attrs.get("strings", ()))),
            string_inputs=tuple(map(str, attrs.get("string_inputs", ()))),
            string_outputs=tuple(map(str, attrs.get("string_outputs", ()))),
        )

    def spec(self, name: str, ty: tvm.ir.Type) -> ValueSpec:
        if isinstance(ty, relax.TensorType):
            shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else None
            device = vdevice_index(ty.vdevice, self.vdevices) if ty.vdevice is not None else 0
            dtype = str(ty.dtype.dtype) if ty.dtype is not None else None
            return TensorSpec(name, dims(shape), dtype, device, int(ty.ndim))
        if isinstance(ty, tvm.ir.TupleType):
            return TupleSpec(name, tuple(self.spec(f"{name}.{i}", field) for i, field in enumerate(ty.fields)))
        if isinstance(ty, relax.ShapeType):
            return ShapeSpec(name, dims(ty.values), int(ty.ndim))
        if isinstance(ty, tvm.ir.PrimType):
            return PrimSpec(name, str(ty.dtype))
        return ObjectSpec(name, isinstance(ty, relax.FuncType))


def dims(values: object) -> tuple[Dim, ...] | None:
    """Extents as integers and text of expressions; None if unknown or not expressible as text."""
    if values is None:
        return None
    try:
        return tuple(dim_text(value) for value in values)  # type: ignore[attr-defined]
    except NoTextError:
        return None
