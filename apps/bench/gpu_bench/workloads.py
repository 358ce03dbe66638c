"""Workloads that are compiled and timed on a GPU: several equal pieces of work, each with its own operands.

One kernel is too short to be timed; a program of several, which becomes one CUDA graph, is long enough, and
no piece finds its operands in a cache after the piece before it.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import tvm
from peers.shape import Shape
from tvm import relax

import relax_hetero as rh

Array = np.ndarray


class Workload(Protocol):
    """A program of `count` equal pieces."""

    @property
    def title(self) -> str:
        """Its name in tables."""

    @property
    def count(self) -> int:
        """The number of pieces that one call computes."""

    def module(self, gpu: Any) -> tvm.IRModule:
        """``main`` on a device."""

    def inputs(self) -> list[Array]:
        """Arguments of ``main``."""


@dataclass(frozen=True)
class Kind:
    """Element types of a product.

    Attributes
    ----------
    operand, result : str
        Types of both operands, and of the result.
    precision : str
        Precision that `ToMixedPrecision` gives float products, if any.
    allowed : float
        Largest allowed error relative to the result's largest number.
    """

    operand: str
    result: str
    precision: str
    allowed: float


KINDS = {
    "f16": Kind("float16", "float16", "", 2e-3),
    "bf16": Kind("bfloat16", "bfloat16", "", 1e-2),
    "f32": Kind("float32", "float32", "", 1e-5),
    "tf32": Kind("float32", "float32", "tfloat32", 2e-3),
    "e4m3": Kind("float8_e4m3fn", "bfloat16", "", 1e-2),
    "s8": Kind("int8", "int32", "", 0.0),
}


@dataclass(frozen=True)
class Products:
    """Matrix products with constant weights, or of two activations if they are batched.

    Attributes
    ----------
    shape : Shape
    kind : str
        A key of `KINDS`, or "q4": 4-bit weights in blocks of 32, and float16.
    gelu : bool
        If true, a bias is added and GELU applied.
    count : int
    """

    shape: Shape
    kind: str
    gelu: bool = False
    count: int = 8

    @property
    def title(self) -> str:
        """Its shape."""
        return f"{self.shape}{' bias, GELU' if self.gelu else ''}"

    @property
    def types(self) -> Kind:
        """Its element types."""
        return KINDS["f16" if self.kind == "q4" else self.kind]

    def inputs(self) -> list[Array]:
        """Left operands, and for a batch also right operands."""
        s = self.shape
        left = [self._random(f"x{index}", s.tensor(s.m, s.k)) for index in range(self.count)]
        return left + (self.weights() if s.batch else [])

    def weights(self) -> list[Array]:
        """Right operands (k, n): no two are equal, all are shifted views of the same numbers, made quickly."""
        s = self.shape
        first = self._random("w", s.tensor(s.k, s.n), s.k**-0.5)
        return [np.roll(first.reshape(-1), 997 * index).reshape(first.shape) for index in range(self.count)]

    def biases(self) -> list[Array]:
        """Biases (n,)."""
        return [self._random(f"b{index}", (self.shape.n,)) for index in range(self.count)]

    def module(self, gpu: Any) -> tvm.IRModule:
        """``main(x0, x1, ...)``, a tuple of results."""
        if self.kind == "q4":
            return rh.from_onnx(self._four_bits(), [gpu])
        s, types, builder = self.shape, self.types, relax.BlockBuilder()
        parameters = [
            relax.Var(f"x{index}", relax.TensorType(s.tensor(s.m, s.k), types.operand)) for index in range(self.count)
        ]
        right: list[relax.Expr] = []
        if s.batch:
            right = [relax.Var(f"w{i}", relax.TensorType(s.tensor(s.k, s.n), types.operand)) for i in range(self.count)]
        else:
            right = [relax.const(tvm.runtime.tensor(weight)) for weight in self.weights()]
        biases = self.biases() if self.gelu else []
        with builder.function("main", [*parameters, *(right if s.batch else [])]):
            with builder.dataflow():
                results = []
                for index, (x, w) in enumerate(zip(parameters, right, strict=True)):
                    operands = [x, w]
                    if types.operand == "int8":
                        operands = [builder.emit(relax.op.astype(operand, "int32")) for operand in operands]
                    y = builder.emit(relax.op.matmul(*operands, out_dtype=types.result))
                    if self.gelu:
                        y = builder.emit(relax.op.add(y, relax.const(tvm.runtime.tensor(biases[index]))))
                        y = builder.emit(relax.op.nn.gelu(y))
                    results.append(builder.emit_output(y))
            builder.emit_func_output(relax.Tuple(results))
        return on_gpu(builder.get(), gpu, types.precision)

    def _four_bits(self) -> Any:
        import onnx
        from onnx import helper, numpy_helper
        from peers.four_bits import BLOCK

        s, nodes, constants = self.shape, [], []
        sizes = {"K": s.k, "N": s.n, "bits": 4, "block_size": BLOCK}
        for index, weights in enumerate(self._blocks()):
            packed = weights.packed().reshape(s.n, s.k // BLOCK, BLOCK // 2)
            constants.append(numpy_helper.from_array(packed, f"w{index}"))
            constants.append(numpy_helper.from_array(weights.scales.astype("float16").reshape(-1), f"s{index}"))
            operands = [f"x{index}", f"w{index}", f"s{index}"]
            nodes.append(helper.make_node("MatMulNBits", operands, [f"y{index}"], domain="com.microsoft", **sizes))
        kind, numbers = onnx.TensorProto.FLOAT16, range(self.count)
        values = [
            [helper.make_tensor_value_info(f"{name}{index}", kind, extents) for index in numbers]
            for name, extents in (("x", s.tensor(s.m, s.k)), ("y", s.tensor(s.m, s.n)))
        ]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph(nodes, "products", *values, constants)
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def four_bit_numbers(self) -> list[Array]:
        """The dequantized 4-bit weights, float32 (k, n)."""
        from peers.four_bits import Weights, numbers_of

        blocks = self._blocks()
        return [numbers_of(Weights(one.codes, one.scales.astype("float16").astype("float32"))) for one in blocks]

    def _blocks(self) -> list[Any]:
        from peers.four_bits import Weights, weights_of

        first = weights_of(self.shape, True, 0)
        numbers = range(self.count)
        return [Weights(np.roll(first.codes, index, 0), np.roll(first.scales, index, 0)) for index in numbers]

    def _random(self, name: str, extents: tuple[int, ...], scale: float = 1.0) -> Array:
        generator = np.random.default_rng(zlib.crc32(f"{self.shape} {name}".encode()))
        if self.types.operand == "int8":
            return generator.integers(-128, 128, extents, dtype="int8")
        scale = 1.0 if self.types.operand.startswith("float8") else scale
        array = generator.standard_normal(extents, dtype="float32") * np.float32(scale)
        dtype = self.types.operand if name[0] != "b" else self.types.result
        return array.astype(getattr(ml_dtypes, dtype, None) or dtype)


@dataclass(frozen=True)
class Rows:
    """Memory-bound work on matrices.

    Attributes
    ----------
    name : str
        "chain", "softmax", "layer norm", "transpose" or "reduction".
    rows, width : int
    dtype : str
    count : int
    """

    name: str
    rows: int
    width: int
    dtype: str
    count: int = 8

    @property
    def title(self) -> str:
        """Its name and size."""
        return f"{self.name} {self.rows}x{self.width}"

    @property
    def bytes(self) -> int:
        """Bytes that one piece reads and writes, each once."""
        results = self.rows if self.name == "reduction" else self.rows * self.width
        operands = self.rows * self.width * (2 if self.name == "chain" else 1)
        return (operands + results) * np.dtype(self.dtype).itemsize

    def inputs(self) -> list[Array]:
        """One matrix per piece, two for a chain."""
        number = self.count * (2 if self.name == "chain" else 1)
        return _moved_on((self.rows, self.width), number, self.dtype, 0)

    def module(self, gpu: Any) -> tvm.IRModule:
        """``main(x0, ...)``, a tuple of results."""
        builder = relax.BlockBuilder()
        number = self.count * (2 if self.name == "chain" else 1)
        kind = relax.TensorType((self.rows, self.width), self.dtype)
        parameters = [relax.Var(f"x{index}", kind) for index in range(number)]
        with builder.function("main", parameters):
            with builder.dataflow():
                pairs = zip(parameters[: self.count], parameters[-self.count :], strict=True)
                results = [builder.emit_output(self._piece(builder, x, other)) for x, other in pairs]
            builder.emit_func_output(relax.Tuple(results))
        return on_gpu(builder.get(), gpu)

    def _piece(self, builder: relax.BlockBuilder, x: relax.Expr, other: relax.Expr) -> relax.Expr:
        def number(value: float) -> relax.Expr:
            return relax.const(value, self.dtype)

        if self.name == "softmax":
            return relax.op.nn.softmax(x, axis=-1)
        if self.name == "layer norm":
            gamma, beta = (relax.const(np.full(self.width, value, self.dtype)) for value in (1.5, 0.25))
            return relax.op.nn.layer_norm(x, gamma, beta, axes=[-1])
        if self.name == "transpose":
            return relax.op.permute_dims(x, [1, 0])
        if self.name == "reduction":
            return relax.op.sum(x, axis=-1)
        y = builder.emit(relax.op.add(builder.emit(relax.op.multiply(x, number(1.5))), other))
        y = builder.emit(relax.op.multiply(y, builder.emit(relax.op.sigmoid(y))))
        mask = builder.emit(relax.op.greater(x, number(0.0)))
        return relax.op.where(mask, y, builder.emit(relax.op.tanh(other)))


@dataclass(frozen=True)
class Attentions:
    """Attention of one sequence, heads before positions.

    Attributes
    ----------
    heads, queries, keys, width : int
        Sizes; every head has its own keys.
    causal : bool
        If true, query i sees keys up to i.
    dtype : str
    count : int
    """

    heads: int
    queries: int
    keys: int
    width: int
    causal: bool
    dtype: str
    count: int

    @property
    def title(self) -> str:
        """Its sizes."""
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries} on {self.keys}"
        return f"{self.heads} x {lengths} x {self.width}{' causal' if self.causal else ''}"

    @property
    def operations(self) -> float:
        """Operations of both products, without hidden keys."""
        return 4 * self.heads * self.queries * self.keys * self.width / (2 if self.causal else 1)

    def inputs(self) -> list[Array]:
        """Query, key and value of each piece, (1, heads, positions, width)."""
        lengths = enumerate((self.queries, self.keys, self.keys))
        operands = [
            _moved_on((1, self.heads, length, self.width), self.count, self.dtype, seed) for seed, length in lengths
        ]
        return [array for piece in zip(*operands, strict=True) for array in piece]

    def module(self, gpu: Any) -> tvm.IRModule:
        """``main(q0, k0, v0, ...)``, a tuple of results."""
        builder = relax.BlockBuilder()
        lengths = (self.queries, self.keys, self.keys)
        parameters = [
            relax.Var(f"{name}{i}", relax.TensorType((1, self.heads, length, self.width), self.dtype))
            for i in range(self.count)
            for name, length in zip("qkv", lengths, strict=True)
        ]
        with builder.function("main", parameters):
            with builder.dataflow():
                results = []
                for i in range(0, len(parameters), 3):
                    # The op's order is positions before heads.
                    turned = [builder.emit(relax.op.permute_dims(x, [0, 2, 1, 3])) for x in parameters[i : i + 3]]
                    mask = "TopLeft" if self.causal else None
                    y = builder.emit(relax.op.nn.attention(*turned, causal_mask=mask))
                    results.append(builder.emit_output(relax.op.permute_dims(y, [0, 2, 1, 3])))
            builder.emit_func_output(relax.Tuple(results))
        return on_gpu(builder.get(), gpu)


def _moved_on(shape: tuple[int, ...], count: int, dtype: str, seed: int) -> list[Array]:
    """Arrays that all differ: views of the same normal numbers at different offsets."""
    size, step = int(np.prod(shape)), 997
    numbers = _normal(size + step * count, dtype, seed)
    return [numbers[step * index :][:size].reshape(shape) for index in range(count)]


@functools.lru_cache(maxsize=3)
def _normal(size: int, dtype: str, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(size, "float32").astype(dtype)


def on_gpu(module: tvm.IRModule, gpu: Any, precision: str = "") -> tvm.IRModule:
    """The module with everything on one device, and its float products in a precision."""
    target = rh.native(gpu) if isinstance(gpu, str) else tvm.target.Target(gpu)
    module = rh.transform.UpdateVDevice(rh.VDevice(target))(module)
    return rh.transform.ToMixedPrecision(precision)(module) if precision else module
