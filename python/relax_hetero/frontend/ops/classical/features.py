"""Feature preprocessing: scaling, normalization, imputation, selection, encoding."""

from __future__ import annotations

import logging

import numpy as np
from onnx import numpy_helper
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Node, const, dtype_of, is_float
from ..required_sizes import require_equal
from ..table import CLASSICAL, convert_node, converts

_log = logging.getLogger("relax_hetero")

_MAX_SHOWN = 10  # maximum number of labels in a warning


def vector(node: Node, name: str, default: float, dtype: str = "float32") -> relax.Expr:
    """Read an attribute with one number, or one per feature along the last axis."""
    numbers = np.array([float(number) for number in node.attribute(name, ())] or [default])
    data = node.tensor(0)
    width = node.shape(data)[-1] if node.rank(data) else 1
    if numbers.size not in (1, width):
        raise node.refusal(f"{name} has {numbers.size} numbers, expected 1 or {width}")
    return const(numbers.reshape(()) if numbers.size == 1 else numbers, dtype)


@converts("Scaler", domain=CLASSICAL)
def scaler(node: Node) -> relax.Expr:
    """(x - offset) * scale in float32, by feature."""
    shifted = node.emit(cast(node, node.tensor(0), "float32") - vector(node, "offset", 0.0))
    return node.emit(shifted * vector(node, "scale", 1.0))


@converts("Normalizer", domain=CLASSICAL)
def normalizer(node: Node) -> relax.Expr:
    """Divide rows by their maximum, 1-norm or 2-norm; rows with a norm of 0 are unchanged."""
    data = cast(node, node.tensor(0), "float32")
    norm = node.attribute("norm", "MAX")
    if norm == "MAX":
        size = relax.op.max(data, [-1], keepdims=True)
    elif norm == "L1":
        size = relax.op.sum(relax.op.abs(data), [-1], keepdims=True)
    elif norm == "L2":
        size = relax.op.sqrt(relax.op.sum(data * data, [-1], keepdims=True))
    else:
        raise node.refusal(f"found norm {norm!r}, expected MAX, L1 or L2")
    size = node.emit(size)
    safe = node.emit(relax.op.where(relax.op.equal(size, const(0, "float32")), const(1, "float32"), size))
    return node.emit(data / safe)


@converts("Imputer", domain=CLASSICAL)
def imputer(node: Node) -> relax.Expr:
    """Replace missing elements (a number, or NaN), by feature."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    is_integer = "imputed_value_int64s" in node.attributes
    missing = node.attribute("replaced_value_int64" if is_integer else "replaced_value_float", 0)
    value = vector(node, "imputed_value_int64s" if is_integer else "imputed_value_floats", 0.0, dtype)
    is_missing = relax.op.isnan(data) if np.isnan(missing) else relax.op.equal(data, const(missing, dtype))
    return node.emit(relax.op.where(node.emit(is_missing), value, data))


@converts("Binarizer", domain=CLASSICAL)
def binarizer(node: Node) -> relax.Expr:
    """1 where x > threshold, else 0."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    above = node.emit(data > const(node.attribute("threshold", 0.0), dtype))
    return cast(node, above, dtype)


@converts("ArrayFeatureExtractor", domain=CLASSICAL)
def array_feature_extractor(node: Node) -> relax.Expr:
    """Columns of the last axis."""
    data, indices = node.tensor(0), node.tensor(1)
    flat = node.emit(relax.op.reshape(indices, (-1,)))
    columns = node.builder.normalize(convert_node(node.as_op("Gather", [data, flat], axis=-1)))
    return columns if node.rank(data) > 1 else node.emit(relax.op.expand_dims(columns, [0]))


@converts("LabelEncoder", domain=CLASSICAL)
def label_encoder(node: Node) -> relax.Expr:
    """Replace numbers by a table."""
    keys, values = _key_or_value_array(node, "keys"), _key_or_value_array(node, "values")
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
    return _look_up(node, data, _cast_keys(node, keys, dtype_of(data)), values, missing)


def _cast_keys(node: Node, keys: np.ndarray, dtype: str) -> relax.Expr:
    with np.errstate(invalid="ignore"):
        cast_keys = keys.astype(dtype)
    if not np.array_equal(cast_keys, keys, equal_nan=keys.dtype.kind == "f"):
        raise node.refusal(f"some of its keys are not numbers of its input's type, {dtype}")
    return const(cast_keys)


def _look_up(node: Node, data: relax.Expr, keys: relax.Expr, values: np.ndarray, missing: float) -> relax.Expr:
    """Replace elements by the value of the last equal key, where NaN equals NaN."""
    dtype = dtype_of(data)

    def search(x: te.Tensor, keys: te.Tensor) -> te.Tensor:
        key = te.reduce_axis((0, keys.shape[0]), "key")

        def element(*position: tirx.Expr) -> tirx.Expr:
            is_same = x[position] == keys[key]
            if is_float(dtype):
                is_same = tirx.any(is_same, tirx.all(tirx.isnan(x[position]), tirx.isnan(keys[key])))
            candidate = tirx.Select(is_same, tirx.Cast("int32", key + 1), tirx.const(0, "int32"))
            return te.max(candidate, axis=key)

        return te.compute(x.shape, element, name="label")

    table_index = node.builder.emit_te(search, data, keys, primfunc_name_hint="label")
    table = const(np.concatenate([[missing], values]), str(values.dtype))
    return node.emit(relax.op.take(table, table_index, 0, "fast"))


@converts("OneHotEncoder", domain=CLASSICAL)
def one_hot_encoder(node: Node) -> relax.Expr:
    """One-hot encoding along a new last axis; all zeros for an unknown category."""
    categories = np.array(node.attribute("cats_int64s", ()), "int64")
    if not categories.size:
        raise node.refusal("its categories are strings, which no tensor holds; give them as numbers")
    data = cast(node, node.tensor(0), "int64")
    if not node.attribute("zeros", 1):
        _log.warning("%s: an element that is not one of its categories gives zeros, and no error", node.title)
    column = node.emit(relax.op.expand_dims(data, [-1]))
    return cast(node, node.emit(relax.op.equal(column, const(categories))), "float32")


@converts("FeatureVectorizer", domain=CLASSICAL)
def feature_vectorizer(node: Node) -> relax.Expr:
    """Concatenate the features of all inputs in float32."""
    widths = list(node.attribute("inputdimensions", ()))
    if len(widths) != len(node.inputs):
        raise node.refusal(f"inputdimensions has {len(widths)} entries for {len(node.inputs)} inputs")
    parts = []
    for index, width in enumerate(widths):
        part = cast(node, node.tensor(index), "float32")
        if node.rank(part) == 1:
            part = node.emit(relax.op.expand_dims(part, [0]))
        if node.rank(part) != 2:
            raise node.refusal(f"input {index} is of rank {node.rank(part)}, expected rows of features")
        require_equal(node, node.shape(part)[1], width, f"axis 1 of input {index}, its features, has")
        parts.append(part)
    return node.emit(relax.op.concat(parts, axis=1))


@converts("ZipMap", domain=CLASSICAL)
def zip_map(node: Node) -> relax.Expr:
    """Scores with a column per label, since a list of dictionaries is not a tensor."""
    labels = node.attribute("classlabels_int64s", ()) or node.attribute("classlabels_strings", ())
    names = ", ".join(label.decode() if isinstance(label, bytes) else str(label) for label in labels[:_MAX_SHOWN])
    ellipsis = ", ..." if len(labels) > _MAX_SHOWN else ""
    _log.warning("%s: its output is a tensor with a column for each of the labels %s%s", node.title, names, ellipsis)
    data = node.tensor(0)
    return data if node.rank(data) > 1 else node.emit(relax.op.expand_dims(data, [0]))


def _array(tensor: object) -> np.ndarray:
    return numpy_helper.to_array(tensor)  # type: ignore[arg-type]


def _key_or_value_array(node: Node, name: str) -> np.ndarray:
    """Keys or values from one of the attributes that can hold them. Raises FrontendError if they are strings."""
    if f"{name}_int64s" in node.attributes:
        return np.array(node.attributes[f"{name}_int64s"], "int64")
    if f"{name}_floats" in node.attributes:
        return np.array(node.attributes[f"{name}_floats"], "float32")
    tensor = node.attributes.get(f"{name}_tensor")
    array = None if tensor is None else _array(tensor)
    if array is None or array.dtype.kind not in "fi":
        raise node.refusal(f"its {name} are strings, which no tensor holds; train the model with numbers as labels")
    return array.reshape(-1)
