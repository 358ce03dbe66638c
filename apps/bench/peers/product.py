"""The product that every contestant computes: its operands, and whether a result is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from .four_bits import Weights, numbers_of, weights_of
from .shape import Shape

BF16 = np.dtype(ml_dtypes.bfloat16)
# Element types of both operands and of the result. Weights of q4 are stored in 4 bits; the type is their values'.
KINDS: dict[str, tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]] = {
    "f32": (np.dtype("float32"), np.dtype("float32"), np.dtype("float32")),
    "u8s8": (np.dtype("uint8"), np.dtype("int8"), np.dtype("int32")),
    "s8s8": (np.dtype("int8"), np.dtype("int8"), np.dtype("int32")),
    "bf16": (BF16, BF16, BF16),
    "f16": (np.dtype("float16"),) * 3,
    "q4": (np.dtype("float32"), np.dtype("float32"), np.dtype("float32")),
}
# Bytes of a cache line and of a vector register; all allocators of contestants align to them.
ALIGNMENT = 64


@dataclass(frozen=True)
class Product:
    """A product with its operands.

    Attributes
    ----------
    shape : Shape
    kind : str
        A key of `KINDS`.
    weight : bool
        If true, the right operand is a constant that may be packed before the call; always false for a batch, where
        both are activations.
    seed : int
    """

    shape: Shape
    kind: str
    weight: bool
    seed: int = 0

    @cached_property
    def lhs(self) -> np.ndarray:
        """The row-major left operand."""
        return aligned(self._random(self.shape.tensor(self.shape.m, self.shape.k), KINDS[self.kind][0], 0))

    @cached_property
    def rhs(self) -> np.ndarray:
        """The row-major right operand."""
        if self.kind == "q4":
            return aligned(numbers_of(self.blocks))
        return aligned(self._random(self.shape.tensor(self.shape.k, self.shape.n), KINDS[self.kind][1], 1))

    @property
    def blocks(self) -> Weights:
        """The right operand of q4, as stored."""
        return weights_of(self.shape, self.weight, self.seed)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.shape.tensor(self.shape.m, self.shape.n)

    @property
    def result_dtype(self) -> np.dtype[Any]:
        """Element type of the result; some contestants give float32 instead, and their notes say so."""
        return KINDS[self.kind][2]

    @cached_property
    def reference(self) -> np.ndarray:
        """The product in float64, which is exact for integers."""
        return np.matmul(self.lhs.astype("float64"), self.rhs.astype("float64"))

    def error(self, result: np.ndarray) -> float:
        """Largest difference of a result over the allowed one: up to 1 is right.

        Integers must be exact. Floats may differ by 1e-5 sqrt(K) and one rounding of the result's type; float16, where
        a few terms may be added in float16, by six thousandths of the root mean square; weights of 4 bits by ten times
        as much as other floats, since data may be integers of 16 bits.
        """
        if tuple(result.shape) != self.result_shape:
            return float("inf")
        difference = np.abs(result.astype("float64") - self.reference)
        if self.kind in ("u8s8", "s8s8"):
            return 0.0 if not difference.any() else float("inf")
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(result.dtype.name, 2.0**-23)
        sums = 1e-5 * np.sqrt(self.shape.k)
        if self.kind == "q4":
            sums *= 10
        if self.kind == "f16":
            sums = max(sums, 6e-3 * np.sqrt(np.mean(self.reference**2)))
        worst = np.max(difference / (sums + rounding * np.abs(self.reference)))
        return float(worst) if np.isfinite(worst) else float("inf")

    def _random(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> np.ndarray:
        generator = np.random.default_rng((self.seed, stream))
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return generator.integers(limits.min, limits.max + 1, shape, dtype=dtype)
        return generator.standard_normal(shape, dtype="float32").astype(dtype)


@dataclass(frozen=True)
class Contestant:
    """A program that computes one product.

    Attributes
    ----------
    call : Callable
        Computes the product once, from row-major operands to a row-major result; this is timed.
    result : Callable
        Returns the result of the last call as a numpy array.
    note : str
        Note on the timed call, if it needs one.
    kernel : Callable, optional
        The same without the public call, for an extra column.
    compile_seconds : float, optional
        Compile time of the product.
    """

    call: Callable[[], object]
    result: Callable[[], np.ndarray]
    note: str = ""
    kernel: Callable[[], object] | None = None
    compile_seconds: float | None = None


def aligned(array: np.ndarray) -> np.ndarray:
    """A row-major copy that begins at a cache line."""
    room = empty(array.shape, array.dtype)
    room[...] = array
    return room


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """A row-major array that begins at a cache line; its bytes are 0xAB, so that it is wrong before a call."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + ALIGNMENT, 0xAB, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)
