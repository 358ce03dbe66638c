"""Numpy functions as ops: what a compiled model calls, and the check of each call.

Bytecode names the function (`packed_name`); each process that runs the model registers it. Arrays are on the host:
those of another device are copied there, and results are copied to the device of the op.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ..artifact.messages import NUMPY_OP
from ..errors import HeteroError
from .device.builtins import running_host
from .device.tensor_arrays import host_array
from .device.tensors import dtype_name, from_numpy


@dataclass(frozen=True)
class NumpyCall:
    """The constant part of a call of a numpy function."""

    title: str  # op and node, for messages
    attributes: dict[str, Any]  # keyword arguments: numbers, text, or lists of these
    present: list[bool]  # whether each input is given; None stands for others
    dtypes: list[str]  # element types of the results, whose shapes follow the inputs in the call

    def text(self) -> str:
        """JSON text, as bytecode passes it; TypeError for attributes without one."""
        return json.dumps(asdict(self))


def packed_name(domain: str, op_type: str, version: int) -> str:
    """The name by which bytecode calls the numpy function of an op."""
    return f"{NUMPY_OP}{domain}::{op_type}::{version}"


def register_numpy_op(domain: str, op_type: str, function: Callable[..., Any], since_version: int = 1) -> None:
    """Register the numpy function of an op for compiled models of this process; it replaces an earlier one.

    `relax_hetero.frontend.register_op` does so, too; this one needs only TVM's runtime.

    Parameters
    ----------
    domain, op_type : str
        Domain and name of the op.
    function : callable
        Function that takes and returns arrays, as `register_op` describes it.
    since_version : int
        The version that the op was registered for when the model was compiled.
    """
    tvm_ffi.register_global_func(packed_name(domain, op_type, since_version), _callee(function), override=True)


def remove_numpy_op(domain: str, op_type: str, since_version: int) -> None:
    """Remove a numpy function; machines that were made before keep it."""
    tvm_ffi.registry.remove_global_func(packed_name(domain, op_type, since_version))


def _callee(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(text: str, *values: Any) -> Any:
        call = NumpyCall(**json.loads(text))
        count = sum(call.present)
        inputs = iter(map(_read_only, values[:count]))
        arrays = [next(inputs) if is_present else None for is_present in call.present]
        shapes = [tuple(map(int, shape)) for shape in values[count:]]
        try:
            results = function(*arrays, **call.attributes)
        except Exception as error:  # whatever the user's function raises
            raise HeteroError(
                f"{call.title}: its numpy function {_name(function)} raised {type(error).__name__}: {error}"
            ) from error
        if len(shapes) == 1:
            results = (results,)
        if not isinstance(results, (tuple, list)) or len(results) != len(shapes):
            found = f"{len(results)} results" if isinstance(results, (tuple, list)) else type(results).__name__
            raise HeteroError(
                f"{call.title}: its numpy function {_name(function)} returned {found}, expected a tuple of "
                f"{len(shapes)} arrays"
            )
        tensors = [
            _checked(result, shape, dtype, f"{call.title}: result {index} of its numpy function {_name(function)}")
            for index, (result, shape, dtype) in enumerate(zip(results, shapes, call.dtypes, strict=True))
        ]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    return run


def _read_only(tensor: runtime.Tensor) -> np.ndarray:
    """The elements of a tensor, which may be another value of the model."""
    array = host_array(tensor).view()
    array.flags.writeable = False
    return array


def _checked(result: Any, shape: tuple[int, ...], dtype: str, what: str) -> runtime.Tensor:
    """A copy of a result, if it has the type that was inferred at import."""
    array = np.asarray(result)
    if array.shape != shape or dtype_name(array.dtype) != dtype:
        raise HeteroError(
            f"{what} is {dtype_name(array.dtype)}{list(array.shape)}, expected {dtype}{list(shape)}, the type that "
            "infer= of register_op gave"
        )
    return from_numpy(array, running_host())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
