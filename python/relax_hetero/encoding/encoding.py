"""Encodings: the role of a tensor as an operand of a product or convolution, before a device chooses its layout.

An encoding is written as text, in attributes of ops and in messages::

    batch_matmul[1]<uint8 * int8 -> int32; (b0, m, k) * (b0, k, n) -> (b0, m, n); b0=12, m=128, n=?, k=64>

that is: operand 1 (the right one) of a batched product; element types; which iteration dimension each dimension of
each operand runs along; the iteration sizes, "?" where they are symbolic. (Source: the data-tiling design document's
encoding attribute: operand index, op type, element types, user indexing maps, iteration sizes.) A convolution adds
strides, padding, dilation and groups::

    conv2d[1]<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); b=1, c=64, x0=56, x1=56,
    n=128, k=64, w0=3, w1=3, y0=28, y1=28; strides=2x2, padding=1x1x1x1, dilation=1x1, groups=1>

(in one line): batch, input channels and image; output channels, input channels of a group and window; result. Padding
is zeros, before every spatial dimension and then after every one. An accuracy other than the default stands at the
end: "; accuracy=fast".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from ..errors import EncodingError
from ..target.element_types import stored_type

DYNAMIC = -1  # size of an iteration dimension that is symbolic
LHS, RHS, RESULT = 0, 1, 2  # operand indices of a matrix product; a convolution's data, weight and result

OPERAND_NAMES = ("lhs", "rhs", "result")
CONV_OPERAND_NAMES = ("data", "weight", "result")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")  # names by number of spatial dimensions, less one
OP_TYPES = ("matmul", "batch_matmul", *CONVOLUTIONS)

_ELEMENT_TYPE = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bfloat16|bool|float8_e[0-9]m[0-9][a-z0-9]*")

DEFAULT, EXACT, FAST = ACCURACIES = ("default", "exact", "fast")
"""Required accuracy of sums of products of floats; `rh.compile` documents what each allows."""

_TEXT = re.compile(r"(\w+)\[([0-9])\]<([^;]+); ([^;]+); ([^;]+?)(?:; (?!accuracy=)([^;]+))?(?:; accuracy=([^;]+))?>")
_CONV_ATTRS = re.compile(r"strides=([0-9x]+), padding=([0-9x]+), dilation=([0-9x]+), groups=([0-9]+)")
_OPERANDS = re.compile(r"(.+) \* (.+) -> (.+)")

IndexMap = tuple[str, ...]
"""One name per dimension of an operand: "b0", "b1", ... (batch), "m", "n", "k", or "1" for a size of one that is
broadcast. For convolutions see `conv_maps`."""


@dataclass(frozen=True)
class ConvAttrs:
    """Strides, padding, dilation and groups of a convolution."""

    strides: tuple[int, ...]  # one for each spatial dimension, at least 1
    padding: tuple[int, ...]  # elements of zeros before each spatial dimension, then after each
    dilation: tuple[int, ...]  # one for each spatial dimension, at least 1
    groups: int = 1  # output channels of a group read only the input channels of that group: ``c = groups * k``

    def __str__(self) -> str:
        strides, padding, dilation = ("x".join(map(str, t)) for t in (self.strides, self.padding, self.dilation))
        return f"strides={strides}, padding={padding}, dilation={dilation}, groups={self.groups}"


@dataclass(frozen=True)
class Encoding:
    """Role of a tensor; it says nothing about storage.

    Attributes
    ----------
    op_type : str
        "matmul", or "batch_matmul" where there are batch dimensions; "conv1d", "conv2d", "conv3d".
    operand_index : int
        0 for the left operand (data), 1 for the right one (weight), 2 for the result.
    element_types : tuple of str
        TVM dtypes of left operand, right operand and accumulator; "tfloat32" for operands that are float32 in memory
        and may be multiplied with the first 10 bits of their fractions (`ToMixedPrecision`).
    index_maps : tuple of IndexMap
        Index maps of left operand, right operand and result: a transposed right operand has ("n", "k").
    iteration_sizes : tuple of (str, int)
        Extents of every iteration dimension; `DYNAMIC` where symbolic. Batch dimensions first, then m, n, k; those of a
        convolution in the order of its index maps.
    conv : ConvAttrs, optional
        Strides, padding, dilation and groups of a convolution.
    accuracy : str
        One of `ACCURACIES`.
    """

    op_type: str
    operand_index: int
    element_types: tuple[str, str, str]
    index_maps: tuple[IndexMap, IndexMap, IndexMap]
    iteration_sizes: tuple[tuple[str, int], ...]
    conv: ConvAttrs | None = None
    accuracy: str = DEFAULT

    def __str__(self) -> str:
        types = "{} * {} -> {}".format(*self.element_types)
        maps = "{} * {} -> {}".format(*(f"({', '.join(names)})" for names in self.index_maps))
        sizes = ", ".join(f"{name}={'?' if size == DYNAMIC else size}" for name, size in self.iteration_sizes)
        conv = "" if self.conv is None else f"; {self.conv}"
        accuracy = "" if self.accuracy == DEFAULT else f"; accuracy={self.accuracy}"
        return f"{self.op_type}[{self.operand_index}]<{types}; {maps}; {sizes}{conv}{accuracy}>"

    @staticmethod
    def parse(text: str) -> Encoding:
        """The encoding that `str` wrote; EncodingError for other text, and for one that contradicts itself.

        Parameters
        ----------
        text : str
            Encoding in the form that `str` gives.
        """
        return _parse(text)

    def of(self, operand_index: int) -> Encoding:
        """The encoding of another operand of the same op.

        Parameters
        ----------
        operand_index : int
            Position of the other operand: 0 for the left one, 1 for the right one, 2 for the result.
        """
        return replace(self, operand_index=operand_index)

    @property
    def index_map(self) -> IndexMap:
        """The index map of the operand itself."""
        return self.index_maps[self.operand_index]

    @property
    def element_type(self) -> str:
        """The element type of the operand itself."""
        return self.element_types[self.operand_index]

    @property
    def sizes(self) -> dict[str, int]:
        """Iteration sizes by name."""
        return dict(self.iteration_sizes)

    @property
    def operand_name(self) -> str:
        """Name of the operand in messages: "lhs", "weight", ..."""
        return (OPERAND_NAMES if self.conv is None else CONV_OPERAND_NAMES)[self.operand_index]

    @property
    def batch_dims(self) -> tuple[str, ...]:
        """Names of the batch dimensions, outermost first."""
        return tuple(name for name, _ in self.iteration_sizes if name.startswith("b"))

    def shape(self) -> tuple[int, ...]:
        """Shape of the operand itself by the iteration sizes, `DYNAMIC` where symbolic."""
        return tuple(1 if name == "1" else self.sizes[name] for name in self.index_map)


def is_element_type(text: str) -> bool:
    """Return whether text is a TVM dtype of tensor elements: one lane, whole bytes."""
    return _ELEMENT_TYPE.fullmatch(text) is not None


def conv_maps(spatial: int) -> tuple[IndexMap, IndexMap, IndexMap]:
    """Index maps of data, weight and result of a convolution with `spatial` spatial dimensions.

    "b" is the batch, "c" are all input channels, "n" output channels, "k" input channels of one group; "x0", ... the
    image, "w0", ... the window, "y0", ... the result's spatial dimensions.
    """
    images, windows, results = (tuple(f"{letter}{d}" for d in range(spatial)) for letter in "xwy")
    return ("b", "c", *images), ("n", "k", *windows), ("b", "n", *results)


@cache
def _parse(text: str) -> Encoding:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise EncodingError(f"{text!r} is not an encoding; expected op[operand]<types; index maps; sizes>")
    op_type, operand, types, maps, sizes, conv, accuracy = match.groups()
    type_match, map_match = _OPERANDS.fullmatch(types), _OPERANDS.fullmatch(maps)
    if type_match is None or map_match is None:
        raise EncodingError(f"encoding {text!r}: types and index maps have the form 'lhs * rhs -> result'")
    pairs = []
    for item in sizes.split(", "):
        name, _, size = item.partition("=")
        if not re.fullmatch(r"[0-9]+|\?", size):
            raise EncodingError(f"encoding {text!r}: found size {item!r}, expected a name and a number or '?'")
        pairs.append((name, DYNAMIC if size == "?" else int(size)))
    index_maps = tuple(tuple(names.strip("()").split(", ")) for names in map_match.groups())
    encoding = Encoding(
        op_type,
        int(operand),
        type_match.groups(),  # type: ignore[arg-type]
        index_maps,  # type: ignore[arg-type]
        tuple(pairs),
        None if conv is None else _parse_conv_attrs(conv, text),
        accuracy or DEFAULT,
    )
    _check(encoding, text)
    return encoding


def _parse_conv_attrs(conv: str, text: str) -> ConvAttrs:
    match = _CONV_ATTRS.fullmatch(conv)
    if match is None:
        raise EncodingError(
            f"encoding {text!r}: found {conv!r}, expected 'strides=..., padding=..., dilation=..., groups=...'"
        )
    try:
        strides, padding, dilation = (tuple(map(int, match[i].split("x"))) for i in (1, 2, 3))
    except ValueError as error:
        raise EncodingError(f"encoding {text!r}: found {conv!r}, expected numbers with an x between") from error
    return ConvAttrs(strides, padding, dilation, int(match[4]))


def _check(encoding: Encoding, text: str) -> None:
    unknown = [ty for ty in encoding.element_types if not is_element_type(stored_type(ty))]
    if unknown:
        raise EncodingError(f"encoding {text!r}: found element types {unknown}, expected TVM's of whole bytes")
    if encoding.op_type not in OP_TYPES:
        raise EncodingError(f"encoding {text!r}: found op type {encoding.op_type!r}, expected one of {OP_TYPES}")
    if encoding.accuracy not in ACCURACIES:
        raise EncodingError(f"encoding {text!r}: found accuracy {encoding.accuracy!r}, expected one of {ACCURACIES}")
    if encoding.operand_index not in (LHS, RHS, RESULT):
        raise EncodingError(f"encoding {text!r}: found operand {encoding.operand_index}, expected 0, 1 or 2")
    if (encoding.op_type in CONVOLUTIONS) != (encoding.conv is not None):
        raise EncodingError(f"encoding {text!r}: a convolution has strides, padding, dilation and groups, others none")
    (_check_product if encoding.conv is None else _check_convolution)(encoding, text)


def _check_product(encoding: Encoding, text: str) -> None:
    if (encoding.op_type == "matmul") != (not encoding.batch_dims):
        raise EncodingError(f"encoding {text!r}: a matmul has no batch dimensions, a batch_matmul has some")
    for operand, dims in zip(OPERAND_NAMES, ("mk", "kn", "mn"), strict=True):
        names = [n for n in encoding.index_maps[OPERAND_NAMES.index(operand)] if n != "1" and not n.startswith("b")]
        if sorted(names) != sorted(dims):
            raise EncodingError(f"encoding {text!r}: {operand} runs along {names}, expected {list(dims)}")
    for index_map in encoding.index_maps:
        if len({n for n in index_map if n != "1"}) != len([n for n in index_map if n != "1"]):
            raise EncodingError(f"encoding {text!r}: an operand runs along a dimension twice: {index_map}")
        missing = [n for n in index_map if n != "1" and n not in encoding.sizes]
        if missing:
            raise EncodingError(f"encoding {text!r}: no size for {missing}")
    names, batch = [name for name, _ in encoding.iteration_sizes], encoding.batch_dims
    if sorted(names) != sorted({*batch, "m", "n", "k"}) or not all(re.fullmatch("b[0-9]+", name) for name in batch):
        raise EncodingError(f"encoding {text!r}: found sizes of {names}, expected one each of b0, b1, ..., m, n and k")
    lhs, rhs, result = encoding.index_maps
    for name in batch:
        if name not in result or name not in (*lhs, *rhs):
            raise EncodingError(f"encoding {text!r}: {name} has to be a dimension of the result and of an operand")


def _check_convolution(encoding: Encoding, text: str) -> None:
    spatial, conv, sizes = CONVOLUTIONS.index(encoding.op_type) + 1, encoding.conv, encoding.sizes
    assert conv is not None
    maps = conv_maps(spatial)
    if encoding.index_maps != maps:
        raise EncodingError(f"encoding {text!r}: found index maps {encoding.index_maps}, expected {maps}")
    names = [name for name, _ in encoding.iteration_sizes]
    expected = list(dict.fromkeys(name for index_map in maps for name in index_map))
    if names != expected:
        raise EncodingError(f"encoding {text!r}: found sizes of {names}, expected {expected}")
    counts = (len(conv.strides), len(conv.padding), len(conv.dilation))
    if counts != (spatial, 2 * spatial, spatial) or 0 in (*conv.strides, *conv.dilation, conv.groups):
        raise EncodingError(
            f"encoding {text!r}: found '{conv}', expected {spatial} strides and dilations, {2 * spatial} numbers of "
            "padding, and no stride, dilation or group of 0"
        )
    channels, group_channels, output_channels = (sizes[name] for name in ("c", "k", "n"))
    if DYNAMIC not in (channels, group_channels) and channels != conv.groups * group_channels:
        raise EncodingError(
            f"encoding {text!r}: {conv.groups} groups of k={group_channels} channels are not c={channels}"
        )
    if output_channels != DYNAMIC and output_channels % conv.groups:
        raise EncodingError(
            f"encoding {text!r}: n={output_channels} output channels are not divided by {conv.groups} groups"
        )
    for d in range(spatial):
        image, window, extent = (sizes[f"{letter}{d}"] for letter in "xwy")
        if DYNAMIC in (image, window, extent):
            continue
        window_extent = (window - 1) * conv.dilation[d] + 1
        expected_extent = (image + conv.padding[d] + conv.padding[spatial + d] - window_extent) // conv.strides[d] + 1
        if extent != expected_extent:
            raise EncodingError(f"encoding {text!r}: found y{d}={extent}, expected {expected_extent}")
