"""A llama-shaped model as a Relax module whose large weights are made on the device, after it was compiled.

Weights are constants whose bytes nobody reads while the module is compiled: memory that was never touched, of the
shape that the device's kernels read. `with_random_weights` puts random tensors of the device in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from llm_bench.llama_shape import LlamaShape
from relax_hetero.driver.compile import prepared
from relax_hetero.driver.pipeline import pipeline_steps
from relax_hetero.encoding.block_formats import of_integers
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.encoding.encoding import Encoding
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.pages import PAGE, page_shape
from relax_hetero.op.block_products import block_matmul
from relax_hetero.op.cached_attention import cached_attention
from relax_hetero.op.encoded import SET, encoded_op, prepacked
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.ir.blocks import tensor_type
from relax_hetero.transform.ir.rewriting import is_tensor_constant, map_bindings, relax_functions, typed, with_functions

LARGE = 1 << 20
"""Bytes from which on a constant is a weight that is made on the device."""

BLOCK = 32
"""Weights of 4 bits that share a scale."""


@dataclass(frozen=True)
class Functions:
    """Which functions a module has.

    Attributes
    ----------
    batches : tuple of int
        Rows of ``decode_B``.
    chunks : tuple of int
        Rows of ``prefill_C``.
    context : int
        Tokens of a sequence, at most.
    """

    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    context: int

    @property
    def most_pages(self) -> int:
        """Of a sequence."""
        return -(-max(self.context, *self.chunks, 1) // PAGE)

    @property
    def slots(self) -> int:
        """Sequences."""
        return max(self.batches, default=1)

    @property
    def pages(self) -> int:
        """Of the cache of a layer."""
        return self.slots * self.most_pages


class LlamaModule:
    """Writes the functions of a model.

    Parameters
    ----------
    shape : LlamaShape
    functions : Functions
    bits : int
        Of a weight: 16, or 4, which is a scale of 16 bits for each block besides.
    """

    def __init__(self, shape: LlamaShape, functions: Functions, bits: int, gpu: Any) -> None:
        self.shape, self.functions, self.bits = shape, functions, bits
        self.vdevice, self.builder = rh.VDevice(gpu), relax.BlockBuilder()
        self.ones = relax.const(np.ones(shape.width), "float16")
        self._constants: dict[str, list[relax.Expr]] = {}

    def build(self) -> tvm.IRModule:
        """All functions."""
        for kind, sizes in (("decode", self.functions.batches), ("prefill", self.functions.chunks)):
            for rows in sizes:
                _Function(self, rows, kind == "prefill").build(f"{kind}_{rows}")
        return self.builder.finalize()

    @property
    def donated(self) -> dict[str, list[str]]:
        """The pages, which all functions write over."""
        names = [f"pages_{layer}" for layer in range(self.shape.layers)]
        sizes = self.functions
        return {
            **{f"decode_{rows}": names for rows in sizes.batches},
            **{f"prefill_{rows}": names for rows in sizes.chunks},
        }

    def weight(self, name: str, shape: Sequence[int]) -> relax.Expr:
        """A weight of 16 bits, by its name; the same one for all functions."""
        if name not in self._constants:
            self._constants[name] = [_untouched(shape, "float16")]
        return self._constants[name][0]

    def fragments(self, name: str, depth: int, columns: int) -> list[relax.Expr]:
        """A weight of 4 bits, and its scales."""
        if name not in self._constants:
            weight, scales = Fragments().shapes(columns, of_integers(4, BLOCK, False), depth)
            self._constants[name] = [_untouched(weight, "int32"), _untouched(scales, "float16")]
        return self._constants[name]


def _untouched(shape: Sequence[int], dtype: str) -> relax.Expr:
    data = tvm.runtime.empty(list(shape), dtype, tvm.cpu())
    return tvm.ir.GenericConst(data, relax.TensorType(list(shape), dtype))


class _Function:
    """One function, from its first variable to its last."""

    def __init__(self, module: LlamaModule, rows: int, is_chunk: bool) -> None:
        self.module, self.shape, self.rows, self.is_chunk = module, module.shape, rows, is_chunk
        sizes, shape = module.functions, module.shape

        def integers(name: str, extents: Sequence[int]) -> relax.Var:
            return relax.Var(name, relax.TensorType(list(extents), "int32"))

        self.tokens, self.positions, self.sequences = (
            integers(name, [rows]) for name in ("tokens", "positions", "sequences")
        )
        self.table = integers("table", [sizes.slots, sizes.most_pages])
        pages = list(page_shape(sizes.pages, shape.kv_heads, shape.size))
        self.pages = [relax.Var(f"pages_{layer}", relax.TensorType(pages, "float16")) for layer in range(shape.layers)]
        self.builder = module.builder

    def build(self, name: str) -> None:
        """Write the function."""
        params = [self.tokens, self.positions, self.sequences, self.table, *self.pages]
        with self.builder.function(name, params):
            with self.builder.dataflow():
                x = self._emit(relax.op.take(self.module.weight("embedding", self._table()), self.tokens, axis=0))
                rotation = self._rotation()
                written = []
                for layer in range(self.shape.layers):
                    x, pages = self._layer(x, layer, rotation)
                    written.append(pages)
                if self.is_chunk:
                    last = relax.const([self.rows - 1], "int32")
                    x = self._emit(relax.op.take(x, last, axis=0, mode="clip"))
                logits = self._product(self._norm(x), "output", self.shape.vocabulary)
                result = self.builder.emit_output(relax.Tuple([logits, *written]))
            self.builder.emit_func_output(result)

    def _table(self) -> list[int]:
        return [self.shape.vocabulary, self.shape.width]

    def _emit(self, value: relax.Expr) -> relax.Var:
        return self.builder.emit(value)

    def _rotation(self) -> relax.Expr:
        size = self.shape.size
        wide = self._emit(relax.op.expand_dims(relax.op.astype(self.positions, "float32"), 1))
        steps = [5e5 ** (-2 * i / size) for i in range(size // 2)]
        angles = self._emit(relax.op.multiply(wide, relax.const([steps], "float32")))
        return self._emit(relax.op.concat([relax.op.cos(angles), relax.op.sin(angles)], axis=1))

    def _layer(self, x: relax.Expr, layer: int, rotation: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        shape = self.shape
        joined = self._product(self._norm(x), f"{layer}.joined", shape.joined)
        attended, pages = self._attention(joined, layer, rotation)
        x = self._product(attended, f"{layer}.attended", shape.width, adds=x)
        normal = self._norm(x)
        gate = self._product(normal, f"{layer}.gate", shape.feed_forward)
        made = self._product(normal, f"{layer}.up", shape.feed_forward, gate=gate)
        return self._product(made, f"{layer}.down", shape.width, adds=x), pages

    def _attention(self, joined: relax.Expr, layer: int, rotation: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        shape = self.shape
        call = cached_attention(
            joined,
            self.pages[layer],
            self.table,
            self.sequences,
            self.positions,
            rotation,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            size=shape.size,
            scale=shape.size**-0.5,
            rotary="halves",
            rows="chunk" if self.is_chunk else "decode",
        )
        both = self._emit(call)
        return self._emit(relax.TupleGetItem(both, 0)), self._emit(relax.TupleGetItem(both, 1))

    def _norm(self, x: relax.Expr) -> relax.Expr:
        weight = self.module.ones
        return self._emit(relax.op.nn.rms_norm(x, weight, axes=[-1], epsilon=1e-5))

    def _product(
        self,
        x: relax.Expr,
        name: str,
        columns: int,
        adds: relax.Expr | None = None,
        gate: relax.Expr | None = None,
    ) -> relax.Expr:
        """A product of 16-bit results; `adds` is added, or ``silu(gate)`` multiplies it."""
        depth = int(x.ty.shape.values[-1])
        if self.module.bits == 4:
            return self._block_product(x, name, depth, columns, adds, gate)
        made = self._emit(relax.op.matmul(x, self.module.weight(name, [depth, columns])))
        if adds is not None:
            return self._emit(relax.op.add(made, adds))
        if gate is not None:
            return self._emit(relax.op.multiply(self._emit(relax.op.nn.silu(gate)), made))
        return made

    def _block_product(
        self,
        x: relax.Expr,
        name: str,
        depth: int,
        columns: int,
        adds: relax.Expr | None,
        gate: relax.Expr | None,
    ) -> relax.Expr:
        weights = self.module.fragments(name, depth, columns)
        others = [one for one in (adds, gate) if one is not None]
        sums = "cast(x0, 'float16')"
        text = f"add({sums}, x1)" if adds is not None else f"multiply(silu(x1), {sums})" if gate is not None else sums
        return self._emit(block_matmul(x, *weights, *others, columns=columns, block=BLOCK, expression=text))


def compiled(module: LlamaModule) -> rh.vm.Executable:
    """The model's executable, whose large constants are untouched memory of the shape that kernels read."""
    mod = prepared(with_vdevices(module.build(), [module.vdevice]), None, module.donated, "default", "default", "bench")
    for step in pipeline_steps():
        if step.name == "HoistEncodings":
            break
        mod = step.run(mod)
    return rh.compile(packed_untouched(mod), cache=False)


def packed_untouched(mod: tvm.IRModule) -> tvm.IRModule:
    """Large constants under an encoding as untouched memory of the packed shape, once for each constant and layout."""
    made: dict[tuple[int, str], relax.Expr] = {}

    def change(binding: relax.Binding) -> relax.Binding:
        call = binding.value
        if encoded_op(call) != SET or not is_tensor_constant(call.args[0]):
            return binding
        constant, layout = call.args[0], PackedLayout.parse(call.attrs.layout)
        shape = [int(extent) for extent in constant.ty.shape.values]
        key = (hash(constant.value), str(layout))
        if key not in made:
            packed = [int(extent) for extent in layout.packed_shape(shape)]
            data = tvm.runtime.empty(packed, str(constant.ty.dtype), tvm.cpu())
            made[key] = tvm.ir.GenericConst(data, tensor_type(packed, str(constant.ty.dtype), constant.ty))
        value = prepacked(made[key], shape, Encoding.parse(call.attrs.encoding), layout)
        return relax.VarBinding(binding.var, typed(value, binding.var.ty))

    return with_functions(mod, {gv: map_bindings(func, change) for gv, func in relax_functions(mod)})


def with_random_weights(executable: rh.vm.Executable, tensor: Any) -> rh.vm.Executable:
    """An executable with other constants.

    Parameters
    ----------
    tensor : callable
        Gives a random tensor of a shape and an element type, on the device.
    """
    for index, constant in enumerate(executable.constants):
        count, bits = 1, tvm.DataType(str(constant.dtype)).bits
        for extent in constant.shape:
            count *= int(extent)
        if count * bits // 8 >= LARGE:
            executable.constants[index] = tensor([int(extent) for extent in constant.shape], str(constant.dtype))
    return executable


__all__ = ["BLOCK", "Functions", "LlamaModule", "compiled", "with_random_weights"]
