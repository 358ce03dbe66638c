"""The ``relax.run.*`` functions that TVM defines in Python beside its compiler.

A process with TVM's runtime only lacks them, and TVM's own put every result on ``cpu(0)``. These put it where the
operand is, or for an operand without a device on the running machine's host; otherwise they do the same, and take
TVM's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from .builtins import running_host
from .tensors import from_numpy


def _like(array: np.ndarray, operand: runtime.Tensor) -> runtime.Tensor:
    return from_numpy(array, operand.device)


@tvm_ffi.register_global_func("relax.run.shape_to_tensor", override=True)
def shape_to_tensor(shape: Sequence[int]) -> runtime.Tensor:
    """A shape as an ``int64`` vector on the host."""
    return from_numpy(np.array([int(dim) for dim in shape], "int64"), running_host())


@tvm_ffi.register_global_func("relax.run.nonzero", override=True)
def nonzero(x: runtime.Tensor) -> runtime.Tensor:
    """Positions of nonzero elements, a column each: ``int64[rank, count]`` (a scalar counts as a vector)."""
    return _like(np.stack(np.atleast_1d(x.numpy()).nonzero()), x)


@tvm_ffi.register_global_func("relax.run.unique", override=True)
def unique(
    x: runtime.Tensor,
    ordered: int,
    return_index: int,
    return_inverse: int,
    return_counts: int,
    axis: int | None = None,
) -> Any:
    """Distinct elements (or slices along `axis`), sorted or in order of first appearance.

    On request with the index of each one's first appearance, each element's position among them, and counts: all
    ``int64`` vectors. A tuple if any is requested.
    """
    values, index, inverse, counts = np.unique(
        x.numpy(), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)  # numpy 2.0 gives it the shape of x
    if not ordered:
        order = np.argsort(index)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        values, index, inverse, counts = values.take(order, axis or 0), index[order], rank[inverse], counts[order]
    wanted = [(index, return_index), (inverse, return_inverse), (counts, return_counts)]
    results = [_like(values, x), *(_like(part.astype("int64"), x) for part, wish in wanted if wish)]
    return tuple(results) if len(results) > 1 else results[0]


@tvm_ffi.register_global_func("relax.run.print", override=True)
def print_values(template: str, *values: Any) -> None:
    """Print values, through a Python format string if there is one."""
    texts = [_text(value) for value in values]
    print(template.format(*texts) if template else " ".join(texts))


@tvm_ffi.register_global_func("relax.run.assert_op", override=True)
def assert_true(condition: Any, template: str, *values: Any) -> None:
    """AssertionError with the formatted values unless `condition`, a scalar or a 0-d tensor, is true."""
    holds = condition.numpy() if isinstance(condition, tvm_ffi.core.Tensor) else condition
    if not holds:
        texts = [_text(value) for value in values]
        raise AssertionError((template.format(*texts) if template else ", ".join(texts)) or "Assertion Failed")


def _text(value: Any) -> str:
    if isinstance(value, tvm_ffi.core.Tensor):
        return str(value.numpy())
    if isinstance(value, tvm_ffi.Array):
        return f"({', '.join(map(_text, value))})"
    return str(value)
