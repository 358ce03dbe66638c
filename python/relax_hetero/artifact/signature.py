"""Signatures: the inputs and results of an executable's functions, as plain data.

A symbolic dimension is text: an identifier (``"n"``) or an integer expression over identifiers with
``+ - * // %``, ``min`` and ``max`` (``"2*n + 1"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from .typed_data import from_data, to_data

Dim: TypeAlias = int | str


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: one argument, one result, or one field of a tuple.

    Attributes
    ----------
    name : str
        ONNX name, else the name of the Relax parameter.
    shape : tuple of int or str, or None
        Static extents and symbolic expressions; None if the shape is unknown.
    dtype : str or None
        TVM's element type (``"float32"``); None for any.
    device : int
        Manifest index (`Metadata.devices`); -1 for the implicit host, ``cpu(0)``.
    ndim : int
        Rank, set from `shape` if that is known; -1 if unknown.
    """

    KIND = "tensor"
    name: str
    shape: tuple[Dim, ...] | None
    dtype: str | None
    device: int
    ndim: int = -1

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "ndim", len(self.shape))


@dataclass(frozen=True)
class ShapeSpec:
    """A Relax shape value.

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    values : tuple of Dim or None
        Extents as in `TensorSpec.shape`.
    ndim : int
        Number of extents; -1 if unknown.
    """

    KIND = "shape"
    name: str
    values: tuple[Dim, ...] | None
    ndim: int = -1

    def __post_init__(self) -> None:
        if self.values is not None:
            object.__setattr__(self, "ndim", len(self.values))


@dataclass(frozen=True)
class PrimSpec:
    """A scalar (``R.Prim``).

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    dtype : str
        Type of the scalar.
    value : Dim or None
        Expression over symbolic dimensions, if the type has one.
    """

    KIND = "prim"
    name: str
    dtype: str
    value: Dim | None = None


@dataclass(frozen=True)
class TupleSpec:
    """A Relax tuple, whose fields may be tuples.

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    fields : tuple of ValueSpec
        Values in the tuple.
    """

    KIND = "tuple"
    name: str
    fields: tuple[ValueSpec, ...]


@dataclass(frozen=True)
class ObjectSpec:
    """Any other runtime object (a cache), passed through unchecked; or a function (a callback, a closure).

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    is_function : bool
        True for a function.
    """

    KIND = "object"
    name: str
    is_function: bool = False


ValueSpec: TypeAlias = TensorSpec | ShapeSpec | PrimSpec | TupleSpec | ObjectSpec


def tensors_of(spec: ValueSpec) -> Iterator[TensorSpec]:
    """All tensors in a spec, including nested tuples, in order."""
    if isinstance(spec, TensorSpec):
        yield spec
    elif isinstance(spec, TupleSpec):
        for field_spec in spec.fields:
            yield from tensors_of(field_spec)


def describe(spec: ValueSpec) -> str:
    """A short text of a spec's type: ``float32[n, 384]``, ``(int64[2], shape[3])``."""
    if isinstance(spec, TensorSpec):
        dims = "..." if spec.shape is None else ", ".join(map(str, spec.shape))
        if spec.shape is None and spec.ndim >= 0:
            dims = ", ".join("?" * spec.ndim)
        return f"{spec.dtype or 'any'}[{dims}]"
    if isinstance(spec, ShapeSpec):
        if spec.values is None:
            return "shape" if spec.ndim < 0 else f"shape of {spec.ndim} dimensions"
        return f"shape({', '.join(map(str, spec.values))})"
    if isinstance(spec, PrimSpec):
        return f"scalar {spec.dtype}"
    if isinstance(spec, TupleSpec):
        return f"({', '.join(map(describe, spec.fields))})"
    return "function" if spec.is_function else "object"


@dataclass(frozen=True)
class FunctionSignature:
    """The signature of a callable function.

    Attributes
    ----------
    name : str
        Global symbol of the function.
    inputs : tuple of ValueSpec
        Parameters in order, without the lifted constants.
    outputs : tuple of ValueSpec
        Results; one entry unless the function returns a tuple.
    output_is_tuple : bool
        Whether the function returns a tuple (of any length).
    num_input : int
        Number of `inputs` of every call; the others are parameters for `set_params`. -1 stands for all.
    defaults : dict of str to int
        Indices of the default constants of parameters after `num_input`, by name.
    takes_constants : bool
        Whether the lowered function takes the tuple of the module's constants as its last parameter.
    donated : tuple of str
        Inputs that a call consumes: results may use their memory.
    copied : tuple of str
        Inputs that the code writes to without donation, so that each call copies them.
    strings : tuple of str
        Strings of the function; a string's index is the code that it computes with.
    string_inputs, string_outputs : tuple of str
        Inputs and results that are strings for callers, and int64 codes in the function.
    input_names, output_names : tuple of str
        Names of `inputs` and of `outputs`.
    """

    name: str
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    output_is_tuple: bool = False
    num_input: int = -1
    takes_constants: bool = False
    defaults: dict[str, int] = field(default_factory=dict, hash=False)
    donated: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    string_inputs: tuple[str, ...] = ()
    string_outputs: tuple[str, ...] = ()
    input_names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    output_names: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_names", tuple(spec.name for spec in self.inputs))
        object.__setattr__(self, "output_names", tuple(spec.name for spec in self.outputs))
        if self.num_input < 0:
            object.__setattr__(self, "num_input", len(self.inputs))

    def __str__(self) -> str:
        takes = ", ".join(
            f"{spec.name}: {self._described(spec, self.string_inputs)}{' = default' * (spec.name in self.defaults)}"
            for spec in self.inputs
        )
        gives = ", ".join(f"{spec.name}: {self._described(spec, self.string_outputs)}" for spec in self.outputs)
        return f"{self.name}({takes}) -> " + (f"({gives})" if self.output_is_tuple else gives)

    def _described(self, spec: ValueSpec, strings: tuple[str, ...]) -> str:
        return describe(
            replace(spec, dtype="string") if isinstance(spec, TensorSpec) and spec.name in strings else spec
        )

    def to_json(self) -> dict[str, Any]:
        """The signature as a JSON object."""
        data: dict[str, Any] = to_data(self)
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> FunctionSignature:
        """The inverse of `to_json`.

        Parameters
        ----------
        data : dict of str to object
            JSON object.
        """
        signature: FunctionSignature = from_data(FunctionSignature, data)
        return signature
