"""Complex numbers as pairs of real tensors, because Relax lacks complex types.

An op on complex values applies to both parts separately (reshape, slice, concat), or has a rule of its own (products,
magnitude, Fourier transforms).
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
from .torch_node import TABLE, Converter, TorchNode


@dataclass(frozen=True)
class Complex:
    """A complex tensor."""

    # Tensors of one shape and element type.
    real: relax.Expr
    imaginary: relax.Expr

    def __iter__(self) -> Iterator[relax.Expr]:
        return iter((self.real, self.imaginary))


@dataclass(frozen=True)
class FakePart:
    """Shape and torch dtype of a part of a complex tensor, in place of a fake tensor."""

    shape: Any
    dtype: Any


# Linear ops that the op's converter applies to each part.
_PARTWISE_OPS = frozenset(
    "view reshape _unsafe_view squeeze unsqueeze flatten unflatten view_copy expand permute transpose t slice select "
    "narrow split split_with_sizes unbind chunk cat concat stack repeat flip roll index_select gather index "
    "constant_pad_nd pad unfold sum mean cumsum clone alias detach contiguous lift_fresh_copy neg add sub rsub where "
    "expand_copy permute_copy diagonal to _to_copy zeros_like slice_scatter select_scatter tril triu".split()
)

# Op -> arguments that may be real although the result is complex.
_PROMOTED_OPERANDS = {
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
    """Return whether a fake tensor, or one in a list, is complex."""
    if isinstance(fake, (list, tuple)):
        return any(map(is_complex, fake))
    return isinstance(fake, torch_package().Tensor) and bool(fake.dtype.is_complex)


def has_complex(arguments: Any) -> bool:
    """Return whether a value, or one in a list, is complex."""
    if isinstance(arguments, (list, tuple)):
        return any(map(has_complex, arguments))
    return isinstance(arguments, Complex)


def part_of(fake: Any) -> Any:
    """Fake tensors of the real part of a result."""
    if isinstance(fake, (list, tuple)):
        return [part_of(entry) for entry in fake]
    torch = torch_package()
    reals = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
    return FakePart(fake.shape, reals.get(fake.dtype, fake.dtype))


def converts_complex(op: str) -> bool:
    """Return whether an op (a name without overload) can be converted for complex values."""
    return op in _RULES or op in _PARTWISE_OPS


def convert_complex(node: TorchNode, *arguments: Any) -> Any:
    """Convert an op that reads or returns complex values. Raises FrontendError if there is no rule for the op."""
    op = node.op.partition(".")[0]
    if op in _RULES:
        return _RULES[op](node, *arguments)
    if op not in _PARTWISE_OPS:
        raise refusal_of_complex(node)
    operands = list(arguments)
    for index in _PROMOTED_OPERANDS.get(op, ()):  # real operands get an imaginary part of 0
        operand = operands[index]
        operands[index] = [_pair(node, part) for part in operand] if isinstance(operand, list) else _pair(node, operand)
    half = node.of(part_of(node.value))
    convert = TABLE.get(node.op) or TABLE[op]
    real, imaginary = (convert(half, *_select_part(operands, which)) for which in (0, 1))
    if isinstance(real, list):
        return [Complex(*pair) for pair in zip(real, imaginary, strict=True)]
    return Complex(real, imaginary)


def refusal_of_complex(node: TorchNode) -> FrontendError:
    """The error for an op without a rule."""
    return node.refusal("of complex numbers cannot be imported")


def _select_part(value: Any, part: int) -> Any:
    """Replace each complex value in arguments by its real (0) or imaginary (1) part."""
    if isinstance(value, Complex):
        return (value.real, value.imaginary)[part]
    return [_select_part(entry, part) for entry in value] if isinstance(value, (list, tuple)) else value


def _pair(node: TorchNode, value: Any) -> Complex:
    """Convert a number or a real tensor to a complex value."""
    if isinstance(value, Complex):
        return value
    dtype = node.of(part_of(node.value)).dtype
    if isinstance(value, complex):
        return Complex(const(value.real, dtype), const(value.imag, dtype))
    real = node.tensor(value, dtype)
    return Complex(real, node.filled(0.0, node.dims(real), dtype))


def _is_complex_operand(value: Any) -> bool:
    return isinstance(value, (Complex, complex))


def _product(node: TorchNode, a: Any, b: Any, times: Callable[..., Any]) -> Complex:
    """Product of complex values by a bilinear operation on real tensors."""
    if not _is_complex_operand(a) or not _is_complex_operand(b):  # one factor is real
        scale, value = (a, b) if _is_complex_operand(b) else (b, a)
        factor = node.tensor(scale, node.of(part_of(node.value)).dtype)
        pair = _pair(node, value)
        operands = (lambda part: (factor, part)) if _is_complex_operand(b) else (lambda part: (part, factor))
        return Complex(*(node.emit(times(*operands(part))) for part in pair))
    (a, b), (c, d) = _pair(node, a), _pair(node, b)
    return Complex(node.emit(times(a, c) - times(b, d)), node.emit(times(a, d) + times(b, c)))


@_rule("mul")
def _mul(node: TorchNode, a: Any, b: Any) -> Complex:
    return _product(node, a, b, relax.op.multiply)


@_rule("mm", "bmm", "matmul")
def _matmul(node: TorchNode, a: Any, b: Any) -> Complex:
    return _product(node, a, b, relax.op.matmul)


@_rule("div")
def _div(node: TorchNode, a: Any, b: Any, *_: Any) -> Complex:
    if not _is_complex_operand(b):
        divisor = node.tensor(b, node.of(part_of(node.value)).dtype)
        return Complex(*(node.emit(part / divisor) for part in _pair(node, a)))
    c, d = _pair(node, b)
    norm = node.emit(c * c + d * d)
    numerator = _product(node, _pair(node, a), Complex(c, node.emit(-d)), relax.op.multiply)
    return Complex(*(node.emit(part / norm) for part in numerator))


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
    return Complex(x.real, node.emit(-x.imaginary))


@_rule("resolve_conj", "resolve_neg")
def _unchanged(node: TorchNode, x: Complex) -> Complex:
    return x


@_rule("abs")
def magnitude(node: TorchNode, x: Complex) -> relax.Expr:
    """Absolute value, ``large * sqrt(1 + (small / large)^2)`` to avoid overflow and underflow of squares."""
    a, b = (node.emit(relax.op.abs(part)) for part in x)
    large, small = node.emit(relax.op.maximum(a, b)), node.emit(relax.op.minimum(a, b))
    zero, one = const(0, node.dtype), const(1, node.dtype)
    is_regular = node.emit(relax.op.logical_and(large > zero, relax.op.isfinite(large)))
    ratio = node.emit(small / relax.op.where(is_regular, large, one))
    hypotenuse = large * relax.op.sqrt(ratio * ratio + one)
    infinite = node.emit(relax.op.logical_or(relax.op.isinf(a), relax.op.isinf(b)))
    special = relax.op.where(infinite, const(math.inf, node.dtype), node.emit(a + b))
    return node.emit(relax.op.where(is_regular, hypotenuse, special))


@_rule("angle")
def _angle(node: TorchNode, x: Complex) -> relax.Expr:
    return TABLE["atan2"](node, x.imaginary, x.real)


@_rule("exp")
def _exp(node: TorchNode, x: Complex) -> Complex:
    return _polar(node, node.emit(relax.op.exp(x.real)), x.imaginary)


@_rule("polar")
def _polar(node: TorchNode, radius: relax.Expr, angle: relax.Expr) -> Complex:
    return Complex(*(node.emit(radius * op(angle)) for op in (relax.op.cos, relax.op.sin)))


@_rule("complex")
def _complex(node: TorchNode, real: relax.Expr, imaginary: relax.Expr) -> Complex:
    dims = node.shape
    return Complex(node.broadcast(real, dims), node.broadcast(imaginary, dims))


@_rule("real", "imag")
def _real_or_imaginary(node: TorchNode, x: Complex) -> relax.Expr:
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
def _full(node: TorchNode, *arguments: Any) -> Complex:
    half = node.of(part_of(node.value))
    value = arguments[1] if node.op.startswith("full") else arguments[0] if node.op.startswith("scalar") else 0
    value = complex(int("ones" in node.op) if node.op[:4] not in ("full", "scal") else value)
    return Complex(half.filled(value.real), half.filled(value.imag))


def _transform_axis(node: TorchNode, x: Any, axis: int, length: Any, **attributes: Any) -> Any:
    """Fourier transform of an axis by ONNX's DFT, without its factor of 1 / length."""
    value = x if isinstance(x, relax.Expr) else None
    dims = node.dims(value if value is not None else x.real)
    node.static([dims[axis]], "transforms an axis of")
    parts = [value] if value is not None else list(x)
    columns = [node.reshape(part, [*dims, 1]) for part in parts]
    data = columns[0] if len(columns) == 1 else node.emit(relax.op.concat(columns, len(dims)))
    out = node.onnx("DFT", data, const(length, "int64"), const(axis, "int64"), **attributes)
    if attributes.get("inverse"):
        out = node.emit(out * const(length, str(out.ty.dtype)))
    out_dims = node.dims(out)
    halves = [
        node.reshape(node.emit(relax.op.strided_slice(out, [len(dims)], [part], [part + 1])), out_dims[:-1])
        for part in range(int(out_dims[-1]))
    ]
    return Complex(*halves) if len(halves) == 2 else halves[0]


def _normalize(node: TorchNode, x: Any, mode: int, count: int) -> Any:
    """Scale by torch's normalization mode: 0 none, 1 by 1 / sqrt(count), 2 by 1 / count."""
    if mode == 0:
        return x
    factor = 1 / (math.sqrt(count) if mode == 1 else count)
    if isinstance(x, Complex):
        return Complex(*(_normalize(node, part, mode, count) for part in x))
    return node.emit(x * const(factor, str(x.ty.dtype)))


@_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _fft(node: TorchNode, x: Any, axes: list[int], mode: int, option: Any) -> Any:
    """Transform axes one after the other; `option` is `onesided` (r2c), `forward` (c2c) or the last length (c2r)."""
    dims = node.dims(x.real if isinstance(x, Complex) else x)
    axes = [node.axis(axis, len(dims)) for axis in axes]
    sizes = node.static([dims[axis] for axis in axes], "transforms axes of")
    kind = node.op.partition(".")[0]
    if kind == "_fft_c2r":
        (sizes[-1],) = node.static([node.shape[axes[-1]]], "transforms to an axis of")
    count = math.prod(sizes)
    is_inverse = kind == "_fft_c2r" or (kind == "_fft_c2c" and not option)
    if kind == "_fft_r2c":
        x = _transform_axis(node, x, axes[-1], sizes[-1], onesided=int(bool(option)))
    for axis, size in zip(axes if kind == "_fft_c2c" else axes[:-1], sizes, strict=False):
        x = _transform_axis(node, x, axis, size, inverse=int(is_inverse))
    if kind == "_fft_c2r":
        x = _transform_axis(node, x, axes[-1], sizes[-1], inverse=1, onesided=1)
    return _normalize(node, x, mode, count)
