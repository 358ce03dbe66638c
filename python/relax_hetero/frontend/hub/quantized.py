"""Quantized weights of folders: FP8, AWQ, GPTQ, compressed-tensors, MXFP4 and NVFP4.

A matrix is several tensors of one module, such as ``qweight``, ``scales`` and ``qzeros``. Integers with a scale and
perhaps a zero point for each group keep their bits (`integer_rows`), MXFP4 and NVFP4 become those of GGUF files. All
others become bfloat16 or float16, because no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...target.element_types import numpy_dtype
from ..gguf.file import FileTensor
from ..gguf.weights import integer_rows
from .config import HubConfig
from .lazy import lazy
from .stored_tensors import StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight neighbouring 4-bit integers
_FP8 = ("F8_E4M3", "F8_E5M2")
_FP8_BLOCK = 128
_GROUPS = (128, 64, 32)  # groups that a scale of a whole row is repeated for: the first that divides the row
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], "float32")

Module = Mapping[str, StoredTensor]  # tensors of a module by the ends of their names


class Quantization:
    """The quantization of a folder's weights, and the readers of its modules.

    `values`: ``quantization_config`` of the configuration, empty without one; `dequantized`: element types of matrices
    that did not keep their bits. Raises FrontendError if the method is unknown.
    """

    def __init__(self, config: HubConfig) -> None:
        values = config.get("quantization_config")
        values = {} if values is None else values
        method = values.get("quant_method") if isinstance(values, dict) else values
        if not isinstance(values, dict) or (values and str(method) not in METHODS):
            names = ", ".join(METHODS)
            raise config.error(f"quantization_config has the method {method!r:.100}, expected one of {names}")
        self.config = config
        self.values: Mapping[str, Any] = values
        self.dequantized: set[str] = set()

    def tensors(self, name: str, module: Module) -> list[FileTensor]:
        """The matrix of a module as tensor `name` ``.weight``, and perhaps its ``.scale``; [] if it is not quantized.

        Raises FrontendError if a tensor is missing or has another shape or type, or the quantization is not supported.
        """
        for part, is_quantized, read in _READERS:
            if part in module and is_quantized(module[part]):
                reader = _Reader(self, f"{name}.weight", module)
                return [read(reader), *reader.scale]
        return []

    def count(self, name: str, default: int) -> int:
        """A whole number of `values`."""
        value = self.values.get(name, default)
        if type(value) is not int:
            raise self.config.error(f"{name} of quantization_config is {value!r:.100}, expected a whole number")
        return value


class _Reader:
    """Reader of one module's tensors with checks.

    `scale`: factor of the matrix that is a tensor of its own, if it has one.
    """

    def __init__(self, quantization: Quantization, name: str, module: Module) -> None:
        self.quantization, self.name, self.module = quantization, name, module
        self.scale: list[FileTensor] = []
        self.method = str(quantization.values.get("quant_method", ""))

    def tensor(self, part: str, types: Sequence[str], *shape: int | None) -> np.ndarray:
        """A required tensor of one of some types; None is any extent of its shape."""
        stored = self.module.get(part)
        if stored is None:
            first = next(iter(self.module.values()))
            raise first.error(f"is part of quantized weights that lack {part!r}, expected it, too")
        if stored.type not in types:
            raise stored.error(f"is of type {stored.type}, expected {' or '.join(types)}")
        fits = len(stored.shape) == len(shape) and all(
            size > 0 and expected in (None, size) for size, expected in zip(stored.shape, shape, strict=True)
        )
        if not fits:
            expected_shape = ", ".join("any" if size is None else str(size) for size in shape)
            raise stored.error(f"has shape {stored.shape}, expected ({expected_shape})")
        return stored.data

    def words(self, part: str, *shape: int | None) -> np.ndarray:
        """A required tensor of words of 32 bits."""
        return self.tensor(part, _WORDS, *shape).view("uint32")

    def integers(
        self,
        bits: int,
        shape: tuple[int, int],
        read: Callable[[], np.ndarray],
        scales: Callable[[], np.ndarray],
        zeros: np.ndarray | None,
        groups: int,
        group_of: np.ndarray | None = None,
    ) -> FileTensor:
        """A matrix of integers without a sign, with scales and zero points, (rows, groups).

        `read` returns rows of bytes, the first integer of a byte in its lowest bits. Zero points in the middle of the
        range are left out. `group_of` has the group of each column, if groups are not consecutive columns.
        """
        rows, depth = shape
        if zeros is not None and (zeros == 1 << (bits - 1)).all():
            zeros = None
        block = depth // groups
        if groups == 1:
            block = next((size for size in _GROUPS if depth % size == 0), depth)
        in_order = group_of is None or np.array_equal(group_of, np.arange(depth) // block)
        fits = in_order and depth % block == 0 and depth // block % groups == 0 and block % _GROUPS[-1] == 0
        if not fits or (zeros is not None and zeros.max() > 255):
            columns = np.arange(depth) // -(-depth // groups) if group_of is None else group_of

            def numbers() -> np.ndarray:
                points = np.float32(1 << (bits - 1)) if zeros is None else zeros.astype("float32")[:, columns]
                quants = _numbers(read(), bits)[:, :depth].astype("float32")
                return (quants - points) * scales().astype("float32")[:, columns]

            return self.dequantized(shape, numbers, "float16")

        def rows_of_bytes() -> np.ndarray:
            repeats = depth // block // groups
            points = None if zeros is None else np.repeat(zeros.astype("uint8"), repeats, 1)
            return integer_rows(read(), np.repeat(scales().astype("float32"), repeats, 1), points)

        kind = f"INT{bits}_{block}{'' if zeros is None else '_MINIMUM'}"
        nbytes = rows * (depth * bits // 8 + depth // block * (4 if zeros is None else 5))
        return lazy(self.name, shape, kind, rows_of_bytes, nbytes)

    def dequantized(self, shape: Sequence[int], read: Callable[[], np.ndarray], dtype: str = "bfloat16") -> FileTensor:
        """A matrix that is read as 16-bit floats."""
        self.quantization.dequantized.add(dtype)
        if dtype == "float16":
            return lazy(self.name, shape, "F16", lambda: read().astype("float16"))
        return lazy(self.name, shape, "BF16", lambda: read().astype(numpy_dtype("bfloat16")).view("uint8"))


def _numbers(data: np.ndarray, bits: int, axis: int = 1) -> np.ndarray:
    """Integers of bytes, or of words of 32 bits, along an axis, the first in the lowest bits."""
    mask = data.dtype.type((1 << bits) - 1)
    parts = [(data >> data.dtype.type(bit) & mask).astype("uint8") for bit in range(0, 8 * data.itemsize, bits)]
    shape = [*data.shape[:axis], data.shape[axis] * len(parts), *data.shape[axis + 1 :]]
    return np.stack(parts, axis + 1).reshape(shape)


def _bytes(words: np.ndarray) -> np.ndarray:
    """Bytes of rows of words, which have the same order of integers."""
    return np.ascontiguousarray(words).view("uint8")


def _awq_bytes(words: np.ndarray) -> np.ndarray:
    """Rows of bytes with two integers of neighbouring columns, from words of neighbouring rows, (depth, rows / 8)."""
    depth, count = words.shape
    data = np.empty((count * 8, depth // 2), "uint8")
    for row, place in enumerate(_AWQ_ORDER):
        numbers = (words >> np.uint32(4 * place) & np.uint32(15)).astype("uint8")
        data[row::8] = (numbers[0::2] | numbers[1::2] << np.uint8(4)).T
    return data


_FLOATS, _WORDS = ("F16", "BF16", "F32"), ("I32", "U32")


def _read_awq(reader: _Reader) -> FileTensor:
    """AWQ: eight 4-bit integers of neighbouring rows in a word, (depth, rows / 8), in an order of their own."""
    quantization = reader.quantization
    bits, version = quantization.count("bits", 4), str(quantization.values.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise quantization.config.error(f"found AWQ of {bits} bits, version {version!r:.50}, expected 4 bits and gemm")
    words = reader.words("qweight", None, None)
    depth, rows = words.shape[0], words.shape[1] * 8
    if depth % 2:
        raise reader.module["qweight"].error(f"has {depth} rows, expected an even number")
    scales = reader.tensor("scales", _FLOATS, None, rows)
    groups = scales.shape[0]
    zeros = None
    if "qzeros" in reader.module:
        stored = _awq_bytes(np.repeat(reader.words("qzeros", groups, rows // 8), 2, axis=0))
        zeros = stored & np.uint8(15)
    return reader.integers(4, (rows, depth), lambda: _awq_bytes(words), lambda: scales.T, zeros, groups)


def _read_gptq(reader: _Reader) -> FileTensor:
    """GPTQ: integers of neighbouring columns in a word, (depth * bits / 32, rows), zero points less 1 in version 1."""
    quantization = reader.quantization
    bits = quantization.count("bits", 4)
    if bits not in (2, 4, 8):
        raise quantization.config.error(f"found GPTQ of {bits} bits, expected 2, 4 or 8")
    words = reader.words("qweight", None, None)
    depth, rows = words.shape[0] * (32 // bits), words.shape[1]
    scales = reader.tensor("scales", _FLOATS, None, rows)
    groups = scales.shape[0]
    if rows * bits % 32:
        raise reader.module["qweight"].error(f"has {rows} columns, expected a multiple of {32 // bits}")
    stored = _numbers(reader.words("qzeros", groups, rows * bits // 32), bits).T.astype("int32")
    is_less = str(quantization.values.get("checkpoint_format", "gptq")) != "gptq_v2"
    group_of = reader.tensor("g_idx", _WORDS, depth).astype("int64") if "g_idx" in reader.module else None
    _check_groups(reader, group_of, groups)

    def read() -> np.ndarray:
        data = _bytes(words.T)
        if bits > 2:
            return data
        numbers = _numbers(data, 2)  # kernels read 4 bits at least
        return numbers[:, 0::2] | numbers[:, 1::2] << np.uint8(4)

    return reader.integers(max(bits, 4), (rows, depth), read, lambda: scales.T, stored + is_less, groups, group_of)


def _check_groups(reader: _Reader, group_of: np.ndarray | None, groups: int) -> None:
    if group_of is not None and (group_of.min() < 0 or group_of.max() >= groups):
        part = next(part for part in ("g_idx", "weight_g_idx") if part in reader.module)
        raise reader.module[part].error(f"has groups {group_of.min()} to {group_of.max()}, expected 0 to {groups - 1}")


def _read_packed(reader: _Reader) -> FileTensor:
    """compressed-tensors, integers: neighbouring columns in a word, (rows, depth * bits / 32), 2**(bits - 1) added."""
    weight = reader.module["weight_packed"]
    if weight.type == "U8":
        return _read_nvfp4(reader)
    rows, depth = (int(extent) for extent in reader.tensor("weight_shape", ("I64", "I32"), 2))
    words = reader.words("weight_packed", rows, None)
    bits = next((bits for bits in (4, 8) if -(-depth * bits // 32) == words.shape[1]), 0)
    if not bits or depth < 1:
        raise weight.error(f"has {words.shape[1]} words for rows of {depth} weights, expected 4 or 8 bits")
    scales = reader.tensor("weight_scale", _FLOATS, rows, None)
    groups, zeros = scales.shape[1], None
    if "weight_zero_point" in reader.module:
        packed = reader.words("weight_zero_point", -(-rows * bits // 32), groups)
        zeros = _numbers(packed, bits, axis=0)[:rows]
    group_of = None
    if "weight_g_idx" in reader.module:
        group_of = reader.tensor("weight_g_idx", _WORDS, depth).astype("int64")
        group_of = None if (group_of < 0).all() else group_of  # -1: not set
    _check_groups(reader, group_of, groups)
    return reader.integers(bits, (rows, depth), lambda: _bytes(words), lambda: scales, zeros, groups, group_of)


def _read_nvfp4(reader: _Reader) -> FileTensor:
    """NVFP4: two numbers in a byte, FP8 scales of 16 numbers, and one of the matrix, as in GGUF files.

    There, 64 numbers and their scales are neighbours, and the low halves of 8 bytes are the first 8 of 16 numbers.
    The scale of the matrix divides in compressed-tensors, and multiplies in ModelOpt.
    """
    part = "weight_packed" if "weight_packed" in reader.module else "weight"
    data = reader.tensor(part, ("U8",), None, None)
    rows, depth = data.shape[0], data.shape[1] * 2
    if depth % 16:
        raise reader.module[part].error(f"has rows of {depth} numbers, expected a multiple of 16")
    scales = reader.tensor("weight_scale", ("F8_E4M3",), rows, depth // 16)
    factor = next((name for name in _NVFP4_FACTORS if name in reader.module), _NVFP4_FACTORS[0])
    stored = reader.module.get(factor)
    scale = reader.tensor(factor, ("F32",), *([1] * (len(stored.shape) if stored else 1))).reshape(1)
    if factor == "weight_global_scale":
        scale = np.float32(1) / scale
    if depth % 64 or reader.name.endswith(_IN_PARTS) or np.signbit(scales.astype("float32")).any():

        def numbers() -> np.ndarray:
            values = _FLOAT4[np.stack([data & 15, data >> 4], -1).reshape(rows, -1, 16)]
            return (values * (scales.astype("float32") * scale)[..., None]).reshape(rows, depth)

        return reader.dequantized((rows, depth), numbers)

    def read() -> np.ndarray:
        blocks = np.empty((rows, depth // 64, 36), "uint8")
        blocks[..., :4] = scales.view("uint8").reshape(rows, -1, 4)
        numbers = np.stack([data & 15, data >> 4], -1).reshape(rows, depth // 64, 4, 2, 8)
        blocks[..., 4:] = (numbers[..., 0, :] | numbers[..., 1, :] << 4).reshape(rows, -1, 32)
        return blocks.reshape(rows, -1)

    name = f"{reader.name.removesuffix('.weight')}.scale"
    reader.scale.append(FileTensor(name, (1,), "F32", scale))
    return lazy(reader.name, (rows, depth), "NVFP4", read, rows * depth // 64 * 36)


_NVFP4_FACTORS = ("weight_global_scale", "weight_scale_2")
"""Names of the scale of a matrix in compressed-tensors and in ModelOpt."""
_IN_PARTS = ("kv_b_proj.weight", "embed_tokens.weight")
"""Ends of names of matrices that are split by heads, or gathered."""


def _read_scaled(reader: _Reader) -> FileTensor:
    """8-bit floats or integers with a scale of the matrix, of each row or of each block of rows and columns."""
    weight = reader.tensor("weight", (*_FP8, "I8"), None, None)
    rows, depth = weight.shape
    part = next((part for part in ("weight_scale_inv", "weight_scale") if part in reader.module), "weight_scale")
    stored = reader.module.get(part)
    scale = reader.tensor(part, _FLOATS, *([None] * (len(stored.shape) if stored else 0)))
    if scale.size == 1:
        scale = scale.reshape(1, 1)
    elif scale.shape == (rows,):
        scale = scale.reshape(rows, 1)
    blocks = _blocks_of(reader, (rows, depth), scale.shape)
    if reader.module["weight"].type == "I8" and blocks == (1, depth) and "weight_zero_point" not in reader.module:
        return reader.integers(8, (rows, depth), lambda: weight.view("uint8") ^ np.uint8(128), lambda: scale, None, 1)
    if reader.module["weight"].type == "I8":
        raise reader.module["weight"].error("has integers with zero points or blocks, expected a scale for each row")

    def numbers() -> np.ndarray:
        factors = np.repeat(np.repeat(scale.astype("float32"), blocks[0], 0)[:rows], blocks[1], 1)[:, :depth]
        values = np.arange(256, dtype="uint8").view(weight.dtype).astype("float32")
        return values[weight.view("uint8")] * factors

    return reader.dequantized((rows, depth), numbers)


def _blocks_of(reader: _Reader, shape: tuple[int, int], scales: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    blocks = []
    sizes = reader.quantization.values.get("weight_block_size") or (_FP8_BLOCK, _FP8_BLOCK)
    is_pair = isinstance(sizes, (list, tuple)) and len(sizes) == 2
    is_pair = is_pair and all(type(size) is int and size > 0 for size in sizes)
    if len(scales) != 2 or not is_pair:
        raise reader.module["weight"].error(f"has scales of shape {scales} in blocks {sizes!r:.50}, expected two axes")
    for extent, count, size in zip(shape, scales, sizes, strict=True):
        block = extent if count == 1 else 1 if count == extent else size
        if -(-extent // block) != count:
            raise reader.module["weight"].error(f"has scales of shape {scales}, expected one for each {sizes} weights")
        blocks.append(block)
    return blocks[0], blocks[1]


def read_mxfp4(blocks: StoredTensor, scales: StoredTensor, name: str) -> FileTensor:
    """MXFP4 of gpt-oss: 32 numbers in 16 bytes, neighbours in a byte, (experts, rows, blocks, 16), as in GGUF files.

    There, the low halves of a block's bytes are its first 16 numbers.
    """
    if blocks.type != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != 16 or not all(blocks.shape):
        raise blocks.error(f"is of type {blocks.type} and shape {blocks.shape}, expected bytes, (any, any, any, 16)")
    if scales.type not in ("U8", "F8_E8M0") or scales.shape != blocks.shape[:3]:
        raise scales.error(f"is of type {scales.type} and shape {scales.shape}, expected bytes, {blocks.shape[:3]}")
    experts, rows, count, _ = blocks.shape

    def read() -> np.ndarray:
        data = np.empty((experts, rows, count, 17), "uint8")
        data[..., 0] = scales.data
        numbers = np.stack([blocks.data & 15, blocks.data >> 4], -1).reshape(experts, rows, count, 2, 16)
        data[..., 1:] = numbers[..., 0, :] | numbers[..., 1, :] << 4
        return data.reshape(experts, rows, count * 17)

    return lazy(name, (experts, rows, count * 32), "MXFP4", read, experts * rows * count * 17)


_READERS: tuple[tuple[str, Callable[[StoredTensor], bool], Callable[[_Reader], FileTensor]], ...] = (
    ("qweight", lambda _: True, lambda reader: (_read_awq if reader.method == "awq" else _read_gptq)(reader)),
    ("weight_packed", lambda _: True, _read_packed),
    ("weight", lambda tensor: tensor.type in (*_FP8, "I8"), _read_scaled),
    ("weight", lambda tensor: tensor.type == "U8", _read_nvfp4),
)
"""End of the name of a module's tensor, whether it is quantized, and the function that reads the module."""
METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8", "mxfp4", "modelopt")
"""Values of ``quant_method`` in a configuration."""
