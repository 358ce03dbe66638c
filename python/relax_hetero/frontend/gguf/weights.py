"""Tensors of a GGUF file as constants of a module; block-quantized weights keep their format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tvm
from tvm import relax

from ...encoding.block_formats import FILE_FORMATS, BlockFormat, block_format, dequantize_rows
from ...errors import FrontendError
from ...target.element_types import numpy_dtype
from ...vm.device.tensors import share_or_copy
from .file import FileTensor, GgufFile
from .hyperparameters import Hyperparameters

_MAX_LISTED = 5  # maximum number of tensors that an error lists


class Weights:
    """Converts each tensor to a constant once, so that functions share it.

    The architecture of `model` has the names of the tensors that the file may have; those of its `further_layers` are
    not read.
    """

    def __init__(self, file: GgufFile, model: Hyperparameters) -> None:
        self._file, architecture = file, model.architecture
        names = set(map(_strip_layer, file.tensors))
        self._expected_names = {*architecture.required, *(name for name in architecture.optional if name in names)}
        self._missing_names = {*architecture.optional} - names
        self._constants: dict[str, relax.Expr] = {}
        self._block_constants: dict[str, list[relax.Expr]] = {}
        further = tuple(f"blk.{layer}." for layer in range(model.layers, model.layers + model.further_layers))
        # Scales of inputs are for activations of 4 bits.
        read = (name for name in file.tensors if not name.endswith(".input_scale"))
        self._unread = dict.fromkeys(name for name in read if not name.startswith(further))
        for layer in range(model.layers):  # files have keys of layers that read those of others
            if model.cache_index(layer) != layer:
                for part in ("attn_k", "attn_v", "attn_k_norm"):
                    self._unread.pop(f"blk.{layer}.{part}.weight", None)
        self._stacked: dict[str, FileTensor] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether an optional tensor is expected; in a file, all layers have it or none, but for scales."""
        if name.endswith(".scale") and name in self._file.tensors:
            return True
        return name in self._stacked or _strip_layer(name) in self._expected_names

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has a tensor, which other layers may have or not."""
        return name in self._file.tensors

    def lacks(self, name: str) -> bool:
        """Return whether a tensor is optional and the file does not have it."""
        return _strip_layer(name) in self._missing_names

    def check_all_read(self, unused: Sequence[str] = ()) -> None:
        """Raise FrontendError if the file has tensors that were not read, except some that may be unused."""
        unread = [name for name in self._unread if name not in unused]
        if unread:
            names = ", ".join(map(repr, unread[:_MAX_LISTED]))
            suffix = f" and {len(unread) - _MAX_LISTED:,} more" if len(unread) > _MAX_LISTED else ""
            raise FrontendError(
                f"{self._file.path}: found tensors that its architecture does not use: {names}{suffix}; expected "
                "none, since without them the model computes something else"
            )

    def stack(self, name: str, parts: Sequence[tuple[str, int]], *depth: int) -> bool:
        """Stack tensors along rows into one with a new name; return False unless all exist, of one type without scales.

        `name`: new name; `parts`: names of the tensors and their numbers of rows, in order; `depth`: elements of a row,
        none for vectors.
        """
        tensors = [self._file.tensors.get(part) for part, _ in parts]
        if len({tensor and tensor.type for tensor in tensors}) != 1 or tensors[0] is None:
            return False
        if any(f"{part.removesuffix('.weight')}.scale" in self for part, _ in parts):
            return False
        if name not in self._stacked:
            data = np.concatenate([self.tensor(part, [rows, *depth]).data for part, rows in parts])
            shape = (sum(rows for _, rows in parts), *depth)
            self._stacked[name] = FileTensor(name, shape, tensors[0].type, data)
        return True

    def split_rows(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> None:
        """Split a matrix along rows into equal parts with new names, views of the file, if it has the rows of all.

        `name`: name of the matrix, which may also be that of a part; `parts`: new names, in order; `shape`: rows and
        depth of a part.
        """
        rows, depth = shape
        tensor = self._file.tensors.get(name)
        if len(parts) < 2 or parts[0] in self._file.tensors or tensor is None:
            return
        if tensor.shape != (rows * len(parts), depth):
            return
        for index, part in enumerate(parts):
            data = tensor.data[index * rows : (index + 1) * rows]
            self._stacked[part] = FileTensor(part, (rows, depth), tensor.type, data)
            scales = [f"{each.removesuffix('.weight')}.scale" for each in (name, part)]
            if scales[0] in self:
                self._stacked[scales[1]] = self.tensor(scales[0], [1]).renamed(scales[1])

    def order_rows(self, name: str, orders: Mapping[str, np.ndarray], depth: int) -> None:
        """Make matrices of some rows of a matrix, in other orders, that have all of them, under new names."""
        if next(iter(orders)) not in self._stacked:
            tensor = self.tensor(name, (sum(map(len, orders.values())), depth))
            for part, rows in orders.items():
                self._stacked[part] = FileTensor(part, (len(rows), depth), tensor.type, tensor.data[rows])

    def split_stack(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> None:
        """Give each matrix of a stack, (parts, rows, depth), a name of its own, a view of the file."""
        tensor = self.tensor(f"{name}.weight", (len(parts), *shape))
        for part, data in zip(parts, tensor.data, strict=True):
            self._stacked[f"{part}.weight"] = FileTensor(f"{part}.weight", tuple(shape), tensor.type, data)

    def split_experts(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> None:
        """Split matrices of experts along rows into equal parts with new names, views of the file, if it has them.

        `name`: name of the matrices; `parts`: new names, in order; `shape`: experts, rows and depth of a part.
        """
        experts, rows, depth = shape
        if name not in self._file.tensors or parts[0] in self._stacked:
            return
        tensor = self.tensor(name, (experts, rows * len(parts), depth))
        for index, part in enumerate(parts):
            data = tensor.data[:, index * rows : (index + 1) * rows]
            self._stacked[part] = FileTensor(part, (experts, rows, depth), tensor.type, data)

    def select_experts(
        self,
        name: str,  # name without ``.weight`` and ``.bias``
        new_name: str,  # the same of the selected ones
        experts: Sequence[int],  # numbers of the experts, ascending
        shape: Sequence[int],  # extents of all matrices: experts, rows and depth
    ) -> None:
        """Give the matrices, scales and biases of some experts a new name: views of the file if they are neighbours."""
        if f"{new_name}.weight" in self._stacked:
            return
        is_range = experts[-1] - experts[0] + 1 == len(experts)
        rows = slice(experts[0], experts[-1] + 1) if is_range else list(experts)
        for end, extents in (("weight", shape), ("bias", shape[:2]), ("scale", shape[:1])):
            if end == "weight" or f"{name}.{end}" in self:
                tensor, part = self.tensor(f"{name}.{end}", extents), f"{new_name}.{end}"
                self._stacked[part] = FileTensor(part, (len(experts), *extents[1:]), tensor.type, tensor.data[rows])

    def split_heads(self, name: str, heads: int, key_size: int, value_size: int, depth: int) -> None:
        """Split a matrix of keys and values of all heads into matrices of heads ``attn_k_b`` and ``attn_v_b``.

        Files have one or the other. Matrices of keys are transposed, so that block-quantized ones become float16.
        """
        prefix, rows = name.removesuffix("attn_kv_b"), key_size + value_size
        if f"{name}.weight" not in self._file.tensors or f"{prefix}attn_v_b.weight" in self._stacked:
            return
        tensor = self.tensor(f"{name}.weight", [heads * rows, depth])
        data = tensor.data.reshape(heads, rows, -1)
        keys, values = np.ascontiguousarray(data[:, :key_size]), np.ascontiguousarray(data[:, key_size:])
        kind = tensor.type
        if kind not in ("F32", "F16"):
            form = _format_of(tensor, self._file)
            keys, kind = dequantize_rows(keys.reshape(heads * key_size, -1), form, depth).astype("float16"), "F16"
        keys = np.ascontiguousarray(keys.reshape(heads, key_size, depth).swapaxes(1, 2))
        key_name, value_name = (f"{prefix}attn_{part}_b.weight" for part in "kv")
        self._stacked[key_name] = FileTensor(key_name, (heads, depth, key_size), kind, keys)
        self._stacked[value_name] = FileTensor(value_name, (heads, value_size, depth), tensor.type, values)

    def tensor(self, name: str, shape: Sequence[int]) -> FileTensor:
        """A tensor of the file; FrontendError if it is missing, or has another shape but for extents of 1 in front."""
        tensor = self._stacked.get(name) or self._file.tensors.get(name)
        self._unread.pop(name, None)
        if tensor is None:
            raise FrontendError(
                f"{self._file.path}: lacks tensor {name!r}, which its architecture needs or other layers have"
            )
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise FrontendError(f"{self._file.path}: {name!r} has shape {tensor.shape}, expected {tuple(shape)}")
        return tensor

    def numbers(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """A tensor's numbers as float32."""
        return _float32_numbers(self.tensor(name, shape), self._file).reshape(shape)

    def first_row(self, name: str, depth: int) -> np.ndarray:
        """The first row of a matrix with any number of rows, as float32."""
        return np.array(self.numbers(name, [self.rows_of(name), depth])[0])

    def rows_of(self, name: str) -> int:
        """Number of rows of a matrix; 1 if the file lacks it."""
        tensor = self._file.tensors.get(name)
        return tensor.shape[0] if tensor is not None else 1

    def vector(self, name: str, *shape: int) -> relax.Expr:
        """A vector, or an array of vectors, of float32."""
        return self._constant(name, lambda: self.numbers(name, shape))

    def matrix(
        self, name: str, shape: Sequence[int], dtype: str = "float32"
    ) -> tuple[list[relax.Expr], BlockFormat | None]:
        """A matrix as constants, and their block format (None: a matrix of float32).

        Axes before the last become one axis of rows. Unquantized numbers become `dtype`, unless that is float32. The
        constants are those of `dequantize_blocks`: bytes of a file's format, or integers, scales and zero points.
        Raises FrontendError if the tensor is missing, or has another shape or an unknown type.
        """
        tensor = self.tensor(name, shape)
        half = _HALF_FORMATS.get(dtype)
        if half and is_unquantized(tensor) and tensor.type.lower() != half:
            data = self._constant(f"{name}.{dtype}", lambda: _half_bytes(tensor, dtype, shape))
            return [data], FILE_FORMATS[half]
        if tensor.type == "F32":
            return [self._constant(name, lambda: self.numbers(name, shape).reshape(-1, shape[-1]))], None
        form = _format_of(tensor, self._file)
        rows = int(np.prod(shape[:-1]))
        if name not in self._block_constants:
            data = np.ascontiguousarray(tensor.data).view("uint8").reshape(rows, -1)
            # A view of the mapped file if possible: the pass that packs it makes the only copy.
            arrays = [data] if form.superblock_bytes else split_integer_rows(data, form, shape[-1])
            self._block_constants[name] = [relax.const(share_or_copy(array)) for array in arrays]
        return self._block_constants[name], form

    def unquantized_matrix(self, name: str, shape: Sequence[int], dtype: str) -> relax.Expr | None:
        """An unquantized matrix as a constant of a 16-bit float type; None for block-quantized weights or float32."""
        tensor = self.tensor(name, shape)
        if dtype == "float32" or not is_unquantized(tensor):
            return None
        return self._constant(f"{name}.{dtype}", lambda: _half_numbers(tensor, dtype).reshape(shape))

    def _constant(self, name: str, make: Callable[[], np.ndarray]) -> relax.Expr:
        if name not in self._constants:
            self._constants[name] = relax.const(tvm.runtime.tensor(make()))
        return self._constants[name]


def _format_of(tensor: FileTensor, file: GgufFile) -> BlockFormat:
    """The block format of a matrix; FrontendError if its type is unknown."""
    form = format_of(tensor.type)
    if form is None:
        types = ", ".join(map(str.upper, ("f32", *FILE_FORMATS)))
        raise FrontendError(f"{file.path}: {tensor.name!r} is of type {tensor.type}, expected one of {types}")
    return form


def format_of(type_name: str) -> BlockFormat | None:
    """The block format of a type: of GGUF files, or of rows that `integer_rows` makes; None for others."""
    name = type_name.lower()
    return FILE_FORMATS.get(name) or (block_format(name) if name.startswith("int") and "_" in name else None)


def integer_rows(quants: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """Rows of bytes of `integer_format`: packed integers, then scales as float32, then perhaps zero points as bytes."""
    parts = [quants, np.ascontiguousarray(scales, "float32").view("uint8"), *([] if zeros is None else [zeros])]
    return np.concatenate(parts, axis=1)


def split_integer_rows(data: np.ndarray, form: BlockFormat, depth: int) -> list[np.ndarray]:
    """The arrays that `integer_rows` joined, of rows of `depth` weights."""
    blocks = depth // form.block
    quants = depth * form.bits // 8
    scales = np.ascontiguousarray(data[:, quants : quants + 4 * blocks]).view("float32")
    zeros = [np.ascontiguousarray(data[:, quants + 4 * blocks :])] if form.minimum else []
    return [np.ascontiguousarray(data[:, :quants]), scales, *zeros]


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Extents from the first on that is not 1: files may have rows as vectors, and vectors as rows."""
    first = next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))
    return tuple(shape[first:])


def _strip_layer(name: str) -> str:
    """Return a tensor's name without the prefix of its layer, such as ``blk.0.``."""
    return re.sub(r"^blk\.\d+\.", "", name)


def is_plain(type_name: str) -> bool:
    """Return whether a type of a file is an unquantized 16-bit float."""
    form = format_of(type_name)
    return form is not None and form.is_plain


_HALF_FORMATS = {"float16": "f16", "bfloat16": "bf16"}  # block formats of 16-bit floats


def is_unquantized(tensor: FileTensor) -> bool:
    """Return whether a tensor's numbers are floats."""
    return tensor.type == "F32" or is_plain(tensor.type)


def _half_numbers(tensor: FileTensor, dtype: str) -> np.ndarray:
    """Numbers of an unquantized tensor as 16-bit floats."""
    numbers = np.asarray(tensor.data)
    if tensor.type == "BF16":
        numbers = np.ascontiguousarray(numbers).view(numpy_dtype("bfloat16"))
    return numbers.astype(numpy_dtype(dtype))


def _half_bytes(tensor: FileTensor, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Bytes of the 16-bit floats, with one axis of rows."""
    return _half_numbers(tensor, dtype).reshape(-1, shape[-1]).view("uint8")


def _float32_numbers(tensor: FileTensor, file: GgufFile) -> np.ndarray:
    """Convert a tensor of any type to float32."""
    if tensor.type in ("F32", "F16"):
        return np.ascontiguousarray(tensor.data, "float32").reshape(tensor.shape)
    form, depth = _format_of(tensor, file), tensor.shape[-1]
    data = np.ascontiguousarray(tensor.data).view("uint8").reshape(-1, form.row_bytes(depth))
    return dequantize_rows(data, form, depth).reshape(tensor.shape)
