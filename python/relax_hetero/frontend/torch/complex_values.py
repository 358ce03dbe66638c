"""Complex numbers, as pairs of real tensors: Relax has no type for them.

An op on complex values moves both parts alike (reshaping, cutting, joining), or has a rule of its own (products,
magnitudes, Fourier transforms).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tvm import relax

from ...errors import FrontendError
from ..ops.node import const
from .exporting import torch_package
from .node import TABLE, Converter, TorchNode


@dataclass(frozen=True)
class Complex:
    """A complex tensor.

    Attributes
    ----------
    real, imaginary : relax.Expr
        Tensors of one shape and element type.
    """

    real: relax.Expr
    imaginary: relax.Expr

    def __iter__(self) -> Iterator[relax.Expr]:
        return iter((self.real, self.imaginary))


@dataclass(frozen=True)
class FakePart:
    """Shape and dtype of a part of a complex tensor, as torch tells those of a tensor."""

    shape: Any
    dtype: Any


# Both parts are moved alike, each by the op's own converter.
_ALIKE = frozenset(
    "view reshape _unsafe_view squeeze unsqueeze flatten unflatten view_copy expand permute transpose t slice select "
    "narrow split split_with_sizes unbind chunk cat concat stack repeat flip roll index_select gather index "
    "constant_pad_nd pad unfold sum mean cumsum clone alias detach contiguous lift_fresh_copy neg add sub rsub where "
    "expand_copy permute_copy diagonal to _to_copy zeros_like slice_scatter select_scatter tril triu".split()
)

# Arguments of these that may be real where the result is complex.
_OPERANDS = {
    "add": (0, 1), "sub": (0, 1), "rsub": (0, 1), "where": (1, 2), "cat": (0,), "concat": (0,), "stack": (0,),
    "to": (0,), "_to_copy": (0,),
}  # fmt: skip

_RULES: dict[str, Converter] = {}


def _rule(*names: str) -> Callable[[Converter], Converter]:
    def register(function: Converter) -> Converter:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return register


def is_complex(fake: Any) -> bool:
    """Return whether torch found a complex tensor, or a list with one."""
    if isinstance(fake, (list, tuple)):
        return any(map(is_complex, fake))
    return isinstance(fake, torch_package().Tensor) and bool(fake.dtype.is_complex)


def has_complex(arguments: Any) -> bool:
    """Return whether a value, or one in a list, is complex."""
    if isinstance(arguments, (list, tuple)):
        return any(map(has_complex, arguments))
    return isinstance(arguments, Complex)


def part_of(fake: Any) -> Any:
    """Metadata of the real part of a result, as torch would have it."""
    if isinstance(fake, (list, tuple)):
        return [part_of(entry) for entry in fake]
    torch = torch_package()
    reals = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
    return FakePart(fake.shape, reals.get(fake.dtype, fake.dtype))


def converts_complex(op: str) -> bool:
    """Return whether an op, by its name without overload, has a rule for complex values."""
    return op in _RULES or op in _ALIKE


def convert_complex(node: TorchNode, *arguments: Any) -> Any:
    """The result of an op that reads or makes complex values.

    Raises
    ------
    FrontendError
        If there is no rule for the op.
    """
    op = node.op.partition(".")[0]
    if op in _RULES:
        return _RULES[op](node, *arguments)
    if op not in _ALIKE:
        raise refusal_of_complex(node)
    operands = list(arguments)
    for place in _OPERANDS.get(op, ()):  # a real one has an imaginary part of 0
        given = operands[place]
        operands[place] = [_pair(node, part) for part in given] if isinstance(given, list) else _pair(node, given)
    half = node.of(part_of(node.value))
    convert = TABLE.get(node.op) or TABLE[op]
    real, imaginary = (convert(half, *_parts(operands, which)) for which in (0, 1))
    if isinstance(real, list):
        return [Complex(*pair) for pair in zip(real, imaginary, strict=True)]
    return Complex(real, imaginary)


def refusal_of_complex(node: TorchNode) -> FrontendError:
    """The error for an op that has no rule."""
    return node.refusal("of complex numbers cannot be imported")


def _parts(value: Any, which: int) -> Any:
    """Arguments with each complex value replaced by a part."""
    if isinstance(value, Complex):
        return (value.real, value.imaginary)[which]
    return [_parts(entry, which) for entry in value] if isinstance(value, (list, tuple)) else value


def _pair(node: TorchNode, value: Any) -> Complex:
    """An operand, a number or a real tensor among them, as a complex value."""
    if isinstance(value, Complex):
        return value
    dtype = node.of(part_of(node.value)).dtype
    if isinstance(value, complex):
        return Complex(const(value.real, dtype), const(value.imag, dtype))
    real = node.tensor(value, dtype)
    return Complex(real, node.filled(0.0, node.dims(real), dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, (Complex, complex))


def _product(node: TorchNode, a: Any, b: Any, times: Callable[..., Any]) -> Complex:
    """Product by a bilinear operation of real tensors."""
    if not _is_pair(a) or not _is_pair(b):  # a real factor
        scale, value = (a, b) if _is_pair(b) else (b, a)
        factor = node.tensor(scale, node.of(part_of(node.value)).dtype)
        pair = _pair(node, value)
        order = (lambda part: (factor, part)) if _is_pair(b) else (lambda part: (part, factor))
        return Complex(*(node.emit(times(*order(part))) for part in pair))
    (a, b), (c, d) = _pair(node, a), _pair(node, b)
    real = node.emit(relax.op.subtract(times(a, c), times(b, d)))
    return Complex(real, node.emit(relax.op.add(times(a, d), times(b, c))))


@_rule("mul")
def _mul(node: TorchNode, a: Any, b: Any) -> Complex:
    return _product(node, a, b, relax.op.multiply)


@_rule("mm", "bmm", "matmul")
def _matmul(node: TorchNode, a: Any, b: Any) -> Complex:
    return _product(node, a, b, relax.op.matmul)


@_rule("div")
def _div(node: TorchNode, a: Any, b: Any, *_: Any) -> Complex:
    if not _is_pair(b):
        divisor = node.tensor(b, node.of(part_of(node.value)).dtype)
        return Complex(*(node.emit(relax.op.divide(part, divisor)) for part in _pair(node, a)))
    c, d = _pair(node, b)
    size = node.emit(relax.op.add(relax.op.multiply(c, c), relax.op.multiply(d, d)))
    top = _product(node, _pair(node, a), Complex(c, node.emit(relax.op.negative(d))), relax.op.multiply)
    return Complex(*(node.emit(relax.op.divide(part, size)) for part in top))


@_rule("reciprocal")
def _reciprocal(node: TorchNode, x: Any) -> Complex:
    return _div(node, complex(1), x)


@_rule("pow")
def _pow(node: TorchNode, x: Any, exponent: Any) -> Complex:
    if exponent != 2:
        raise node.refusal(f"of complex numbers with the exponent {exponent}, expected 2")
    return _mul(node, x, x)


@_rule("conj", "_conj", "_conj_physical", "conj_physical")
def _conj(node: TorchNode, x: Complex) -> Complex:
    return Complex(x.real, node.emit(relax.op.negative(x.imaginary)))


@_rule("resolve_conj", "resolve_neg")
def _same(node: TorchNode, x: Complex) -> Complex:
    return x


@_rule("abs")
def magnitude(node: TorchNode, x: Complex) -> relax.Expr:
    """As a hypotenuse, whose squares neither overflow nor vanish: by the larger part."""
    a, b = (node.emit(relax.op.abs(part)) for part in x)
    large, small = node.emit(relax.op.maximum(a, b)), node.emit(relax.op.minimum(a, b))
    zero, one = const(0, node.dtype), const(1, node.dtype)
    is_plain = node.emit(relax.op.logical_and(relax.op.greater(large, zero), relax.op.isfinite(large)))
    ratio = node.emit(relax.op.divide(small, relax.op.where(is_plain, large, one)))
    length = relax.op.multiply(large, relax.op.sqrt(relax.op.add(relax.op.multiply(ratio, ratio), one)))
    infinite = node.emit(relax.op.logical_or(relax.op.isinf(a), relax.op.isinf(b)))
    otherwise = relax.op.where(infinite, const(math.inf, node.dtype), node.emit(relax.op.add(a, b)))
    return node.emit(relax.op.where(is_plain, length, otherwise))


@_rule("angle")
def _angle(node: TorchNode, x: Complex) -> relax.Expr:
    return TABLE["atan2"](node, x.imaginary, x.real)


@_rule("exp")
def _exp(node: TorchNode, x: Complex) -> Complex:
    size = node.emit(relax.op.exp(x.real))
    return _turned(node, size, x.imaginary)


@_rule("polar")
def _turned(node: TorchNode, size: relax.Expr, angle: relax.Expr) -> Complex:
    return Complex(*(node.emit(relax.op.multiply(size, turn(angle))) for turn in (relax.op.cos, relax.op.sin)))


@_rule("complex")
def _complex(node: TorchNode, real: relax.Expr, imaginary: relax.Expr) -> Complex:
    dims = node.shape
    return Complex(node.broadcast(real, dims), node.broadcast(imaginary, dims))


@_rule("real", "imag")
def _part(node: TorchNode, x: Complex) -> relax.Expr:
    return x.real if node.op.startswith("real") else x.imaginary


@_rule("view_as_complex")
def _view_as_complex(node: TorchNode, x: relax.Expr) -> Complex:
    rank = len(node.dims(x))
    return Complex(
        *(
            node.reshape(node.emit(relax.op.strided_slice(x, [rank - 1], [part], [part + 1])), node.shape)
            for part in (0, 1)
        )
    )


@_rule("view_as_real")
def _view_as_real(node: TorchNode, x: Complex) -> relax.Expr:
    dims = [*node.shape[:-1], 1]
    parts = [node.reshape(node.broadcast(part, dims[:-1]), dims) for part in x]
    return node.emit(relax.op.concat(parts, len(dims) - 1))


@_rule("full", "full_like", "scalar_tensor", "zeros", "ones", "empty", "new_zeros", "empty_like", "ones_like")
def _full(node: TorchNode, *given: Any) -> Complex:
    half = node.of(part_of(node.value))
    value = given[1] if node.op.startswith("full") else given[0] if node.op.startswith("scalar") else 0
    value = complex(int("ones" in node.op) if node.op[:4] not in ("full", "scal") else value)
    return Complex(half.filled(value.real), half.filled(value.imag))


def _transformed(node: TorchNode, x: Any, axis: int, length: Any, **attributes: Any) -> Any:
    """One axis of a complex or real value by ONNX's transform, without its factor of 1 / length."""
    value = x if isinstance(x, relax.Expr) else None
    dims = node.dims(value if value is not None else x.real)
    node.static([dims[axis]], "transforms an axis of")
    parts = [value] if value is not None else list(x)
    columns = [node.reshape(part, [*dims, 1]) for part in parts]
    data = columns[0] if len(columns) == 1 else node.emit(relax.op.concat(columns, len(dims)))
    out = node.onnx("DFT", data, const(length, "int64"), const(axis, "int64"), **attributes)
    if attributes.get("inverse"):
        out = node.emit(relax.op.multiply(out, const(length, str(out.ty.dtype))))
    found = node.dims(out)
    halves = [
        node.reshape(node.emit(relax.op.strided_slice(out, [len(dims)], [part], [part + 1])), found[:-1])
        for part in range(int(found[-1]))
    ]
    return Complex(*halves) if len(halves) == 2 else halves[0]


def _scaled(node: TorchNode, x: Any, mode: int, count: int) -> Any:
    """Tensor scaled by torch's numbers of norms: none, the root of the number of elements, or that number."""
    if mode == 0:
        return x
    factor = 1 / (math.sqrt(count) if mode == 1 else count)
    if isinstance(x, Complex):
        return Complex(*(_scaled(node, part, mode, count) for part in x))
    return node.emit(relax.op.multiply(x, const(factor, str(x.ty.dtype))))


@_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(node: TorchNode, x: Any, axes: list[int], mode: int, option: Any) -> Any:
    """Transforms of axes, one after the other; `option` is halved?, forward?, or the last axis's length."""
    dims = node.dims(x.real if isinstance(x, Complex) else x)
    axes = [node.axis(axis, len(dims)) for axis in axes]
    sizes = node.static([dims[axis] for axis in axes], "transforms axes of")
    kind = node.op.partition(".")[0]
    if kind == "_fft_c2r":
        (sizes[-1],) = node.static([node.shape[axes[-1]]], "transforms to an axis of")
    count = math.prod(sizes)
    is_inverse = kind == "_fft_c2r" or (kind == "_fft_c2c" and not option)
    if kind == "_fft_r2c":
        x = _transformed(node, x, axes[-1], sizes[-1], onesided=int(bool(option)))
    rest = axes if kind == "_fft_c2c" else axes[:-1]
    for axis, size in zip(rest, sizes, strict=False):
        x = _transformed(node, x, axis, size, inverse=int(is_inverse))
    if kind == "_fft_c2r":
        x = _transformed(node, x, axes[-1], sizes[-1], inverse=1, onesided=1)
    return _scaled(node, x, mode, count)
