"""Signatures: the inputs and results of an executable's functions, as data in the file beside the code.

A symbolic dimension is text: an identifier (``"n"``) or an integer expression over identifiers with
``+ - * // %``, ``min`` and ``max`` (``"2*n + 1"``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Dim: TypeAlias = int | str


@dataclass(frozen=True)
class TensorSpec:
    """A tensor: one argument, one result, or one field of a tuple.

    Attributes
    ----------
    name : str
        The ONNX name where the model had one, else the Relax parameter's.
    shape : tuple of int or str, or None
        Static extents and symbolic expressions; None where the shape is unknown.
    dtype : str or None
        TVM's name of the element type (``"float32"``); None where any is taken.
    device : int
        Index in the manifest (`Metadata.devices`); -1 is the implicit host, ``cpu(0)``.
    ndim : int
        Rank; -1 where unknown. Taken from `shape` where that is given.
    """

    name: str
    shape: tuple[Dim, ...] | None
    dtype: str | None
    device: int
    ndim: int = -1

    def __post_init__(self) -> None:
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))
            object.__setattr__(self, "ndim", len(self.shape))


@dataclass(frozen=True)
class ShapeSpec:
    """A Relax shape value; `values` as in `TensorSpec.shape`, `ndim` -1 where the rank is unknown.

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    values : tuple of Dim or None
        Extents as in `TensorSpec.shape`.
    ndim : int
        Number of extents; -1 where the rank is unknown.
    """

    name: str
    values: tuple[Dim, ...] | None
    ndim: int = -1

    def __post_init__(self) -> None:
        if self.values is not None:
            object.__setattr__(self, "values", tuple(self.values))
            object.__setattr__(self, "ndim", len(self.values))


@dataclass(frozen=True)
class PrimSpec:
    """A scalar that is no tensor (``R.Prim``); `value` is its expression where the type gives one.

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    dtype : str
        Type of the scalar.
    value : Dim or None
        Expression over symbolic dimensions.
    """

    name: str
    dtype: str
    value: Dim | None = None


@dataclass(frozen=True)
class TupleSpec:
    """A Relax tuple; its fields may be tuples again.

    Attributes
    ----------
    name : str
        Name of the parameter or result.
    fields : tuple of ValueSpec
        Values in the tuple.
    """

    name: str
    fields: tuple[ValueSpec, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))


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

    name: str
    is_function: bool = False


ValueSpec: TypeAlias = TensorSpec | ShapeSpec | PrimSpec | TupleSpec | ObjectSpec

_KINDS: dict[str, type[Any]] = {
    "tensor": TensorSpec,
    "shape": ShapeSpec,
    "prim": PrimSpec,
    "tuple": TupleSpec,
    "object": ObjectSpec,
}
_TAGS: dict[type[Any], str] = {cls: tag for tag, cls in _KINDS.items()}


def spec_to_json(spec: ValueSpec) -> dict[str, Any]:
    """One spec as a JSON object with its `kind`."""
    data = dict(vars(spec))
    if isinstance(spec, TupleSpec):
        data["fields"] = [spec_to_json(part) for part in spec.fields]
    return {"kind": _TAGS[type(spec)], **data}


def spec_from_json(data: dict[str, Any]) -> ValueSpec:
    """The inverse of `spec_to_json`; raises KeyError or TypeError for anything else."""
    rest = {key: value for key, value in data.items() if key != "kind"}
    if data["kind"] == "tuple":
        rest["fields"] = tuple(spec_from_json(part) for part in rest["fields"])
    spec: ValueSpec = _KINDS[data["kind"]](**rest)
    return spec


def tensors_of(spec: ValueSpec) -> Iterator[TensorSpec]:
    """The tensors inside a spec, tuples opened, in order."""
    if isinstance(spec, TensorSpec):
        yield spec
    elif isinstance(spec, TupleSpec):
        for part in spec.fields:
            yield from tensors_of(part)


def describe(spec: ValueSpec) -> str:
    """A spec's type in a few characters: ``float32[n, 384]``, ``(int64[2], shape[3])``."""
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
    """One callable function.

    Attributes
    ----------
    name : str
        The function's global symbol.
    inputs : tuple of ValueSpec
        The parameters a caller gives, in order, without the lifted constants.
    outputs : tuple of ValueSpec
        The results; one entry where the function returns no tuple.
    output_is_tuple : bool
        Whether the function returns a tuple (also one of length 0 or 1).
    num_input : int
        Number of `inputs` that are given at every call; the rest are parameters for `set_params`. -1 stands for all.
    defaults : dict of str to int
        Parameters after `num_input` that a call may leave out -> index of the constant that is used then.
    takes_constants : bool
        Whether the lowered function takes the tuple of the module's constants as its last parameter.
    donated : tuple of str
        Inputs that a call consumes: results may lie in their memory.
    copied : tuple of str
        Inputs that the function's code writes to, though they are not donated: each call copies them.
    strings : tuple of str
        The strings that the function knows, whose places are the numbers that it computes with.
    string_inputs, string_outputs : tuple of str
        Inputs and results that callers give and get as strings, though the function has them as int64.
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
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
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
        return {
            "name": self.name,
            "inputs": [spec_to_json(spec) for spec in self.inputs],
            "outputs": [spec_to_json(spec) for spec in self.outputs],
            "output_is_tuple": self.output_is_tuple,
            "num_input": self.num_input,
            "takes_constants": self.takes_constants,
            "defaults": self.defaults,
            "donated": self.donated,
            "copied": self.copied,
            "strings": self.strings,
            "string_inputs": self.string_inputs,
            "string_outputs": self.string_outputs,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> FunctionSignature:
        """The inverse of `to_json`.

        Parameters
        ----------
        data : dict of str to object
            JSON object.
        """
        return FunctionSignature(
            name=data["name"],
            inputs=tuple(spec_from_json(spec) for spec in data["inputs"]),
            outputs=tuple(spec_from_json(spec) for spec in data["outputs"]),
            output_is_tuple=data["output_is_tuple"],
            num_input=data["num_input"],
            takes_constants=data["takes_constants"],
            defaults=dict(data.get("defaults", {})),
            donated=tuple(data.get("donated", ())),
            copied=tuple(data.get("copied", ())),
            strings=tuple(data.get("strings", ())),
            string_inputs=tuple(data.get("string_inputs", ())),
            string_outputs=tuple(data.get("string_outputs", ())),
        )
