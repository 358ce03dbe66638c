"""Numbers prepared for a model: scaled, normalized, filled in, chosen."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper
from tvm import relax

from ..elementwise import cast
from ..node import Node, const, dtype_of
from ..table import CLASSICAL, convert_node, converts

_MOST_LABELS = 1024  # each is an op


def vector(node: Node, name: str, default: float, dtype: str = "float32") -> relax.Expr:
    """An attribute of a number, or a number for each feature, laid along the last axis."""
    numbers = np.array([float(number) for number in node.attribute(name, ())] or [default])
    data = node.tensor(0)
    width = node.shape(data)[-1] if node.rank(data) else 1
    if numbers.size not in (1, width):
        raise node.refusal(f"{name} has {numbers.size} numbers, expected 1 or {width}")
    return const(numbers.reshape(()) if numbers.size == 1 else numbers, dtype)


@converts("Scaler", domain=CLASSICAL)
def scaler(node: Node) -> relax.Expr:
    """(x - offset) * scale in float32, by feature."""
    data = cast(node, node.tensor(0), "float32")
    moved = node.emit(relax.op.subtract(data, vector(node, "offset", 0.0)))
    return node.emit(relax.op.multiply(moved, vector(node, "scale", 1.0)))


@converts("Normalizer", domain=CLASSICAL)
def normalizer(node: Node) -> relax.Expr:
    """Rows divided by their greatest element, sum of magnitudes or length; rows where that is 0 stay."""
    data = cast(node, node.tensor(0), "float32")
    norm = node.attribute("norm", "MAX")
    if norm == "MAX":
        size = relax.op.max(data, [-1], keepdims=True)
    elif norm == "L1":
        size = relax.op.sum(relax.op.abs(data), [-1], keepdims=True)
    elif norm == "L2":
        size = relax.op.sqrt(relax.op.sum(relax.op.multiply(data, data), [-1], keepdims=True))
    else:
        raise node.refusal(f"found norm {norm!r}, expected MAX, L1 or L2")
    size = node.emit(size)
    safe = node.emit(relax.op.where(relax.op.equal(size, const(0, "float32")), const(1, "float32"), size))
    return node.emit(relax.op.divide(data, safe))


@converts("Imputer", domain=CLASSICAL)
def imputer(node: Node) -> relax.Expr:
    """Elements that are missing (a number, or NaN) replaced, by feature."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    is_whole = "imputed_value_int64s" in node.attributes
    missing = node.attribute("replaced_value_int64" if is_whole else "replaced_value_float", 0)
    value = vector(node, "imputed_value_int64s" if is_whole else "imputed_value_floats", 0.0, dtype)
    is_missing = relax.op.isnan(data) if np.isnan(missing) else relax.op.equal(data, const(missing, dtype))
    return node.emit(relax.op.where(node.emit(is_missing), value, data))


@converts("Binarizer", domain=CLASSICAL)
def binarizer(node: Node) -> relax.Expr:
    """1 where x > threshold, else 0."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    above = node.emit(relax.op.greater(data, const(node.attribute("threshold", 0.0), dtype)))
    return cast(node, above, dtype)


@converts("ArrayFeatureExtractor", domain=CLASSICAL)
def array_feature_extractor(node: Node) -> relax.Expr:
    """Columns of the last axis."""
    data, indices = node.tensor(0), node.tensor(1)
    flat = node.emit(relax.op.reshape(indices, (-1,)))
    taken = node.builder.normalize(convert_node(node.as_op("Gather", [data, flat], axis=-1)))
    return taken if node.rank(data) > 1 else node.emit(relax.op.expand_dims(taken, [0]))


@converts("LabelEncoder", domain=CLASSICAL)
def label_encoder(node: Node) -> relax.Expr:
    """Numbers replaced by others, by a table."""
    keys, values = _column(node, "keys"), _column(node, "values")
    if keys.shape != values.shape or not keys.size:
        raise node.refusal(f"found {keys.size} keys and {values.size} values, expected as many, and at least one")
    data = node.tensor(0)
    default = node.attributes.get("default_tensor")
    if default is not None:
        missing = float(np.asarray(_array(default)).reshape(-1)[0])
    elif values.dtype.kind == "f":
        missing = node.attribute("default_float", -0.0)
    else:
        missing = node.attribute("default_int64", -1)
    _, first = np.unique(keys[::-1], return_index=True)
    order = keys.size - 1 - first  # of equal keys the last one counts; keys in order, NaN last
    keys, values = keys[order], values[order]
    node.check_table(keys.size)
    dims = node.shape(data)
    result = node.filled(dims, missing, str(values.dtype))
    if keys.size > _MOST_LABELS:
        raise node.refusal(f"has {keys.size} keys, expected at most {_MOST_LABELS}")
    for key, value in zip(keys, values, strict=True):
        same = relax.op.isnan(data) if np.isnan(key) else relax.op.equal(data, const(key, dtype_of(data)))
        result = node.emit(relax.op.where(node.emit(same), const(value, str(values.dtype)), result))
    return result


def _array(tensor: object) -> np.ndarray:
    return numpy_helper.to_array(tensor)  # type: ignore[arg-type]


def _column(node: Node, name: str) -> np.ndarray:
    """Keys or values, whichever attribute carries them.

    Raises
    ------
    FrontendError: if they are strings, which no tensor holds.
    """
    if f"{name}_int64s" in node.attributes:
        return np.array(node.attributes[f"{name}_int64s"], "int64")
    if f"{name}_floats" in node.attributes:
        return np.array(node.attributes[f"{name}_floats"], "float32")
    tensor = node.attributes.get(f"{name}_tensor")
    found = None if tensor is None else _array(tensor)
    if found is None or found.dtype.kind not in "fi":
        raise node.refusal(f"its {name} are strings, which no tensor holds; train the model with numbers as labels")
    return found.reshape(-1)
