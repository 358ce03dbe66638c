"""Expansion of transposed convolutions to convolutions, one for each phase of the stride.

Before::

    y = R.nn.conv2d_transpose(x, w, strides=[2, 2])                      # w of 2 x 2

After::

    phases = R.nn.conv2d(x, w of 1 x 1 for 4 * c channels)
    split = R.reshape(phases, (n, 2, 2, c, h, w))
    y = R.reshape(R.permute_dims(split, axes=[0, 3, 4, 1, 5, 2]), (n, c, 2 * h, 2 * w))

Output ``s * j + r`` of an axis is a sum over the kernel elements k with ``k * dilation = r + padding (mod s)``, of
neighbouring inputs: a convolution of stride 1 for each r, whose kernel is these elements in reverse order. If all
phases read the same inputs, they are one convolution. Ops per channel after it (a bias, an activation) are applied
before the phases are interleaved, so that the kernel can fuse them. Weights are constants; an image may have symbolic
sizes if those of the result are multiples of the stride, and all of the image is read: TVM's slices of symbolic sizes
cannot be fused.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, sym, tirx

from ...op.traits import ELEMENTWISE
from ..ir.blocks import Block, Emitter, is_one, shape_of, tensor_type, with_replaced
from ..ir.constant_values import ConstantValues, constant_like
from ..ir.rewriting import op_name, with_args

_CONVOLUTION = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
TRANSPOSED = {f"relax.nn.conv{n}d_transpose": n for n in (1, 2, 3)}
"""Number of spatial axes of each transposed convolution."""

_LAYOUTS = {1: ("NCW", "IOW", "OIW"), 2: ("NCHW", "IOHW", "OIHW"), 3: ("NCDHW", "IODHW", "OIDHW")}


@dataclass(frozen=True)
class _Phase:
    """Phase r: the outputs ``stride * j + r`` of one axis, as a convolution of stride 1."""

    taps: tuple[int, ...]  # kernel elements in the order of the inputs; empty if the outputs are zeros
    first: int  # input of the first tap at j = 0; negative in the padding
    dilation: int  # distance of inputs of neighbouring taps

    @property
    def window(self) -> tuple[int, int, int]:
        """Parameters that determine the inputs."""
        return len(self.taps), self.first, self.dilation

    def is_cut(self, overhang: int) -> bool:
        """Return whether inputs at an end are not read; the last window extends `overhang` beyond the data."""
        return self.first > 0 or overhang < 0


def expand_transposed_convolutions(block: Block) -> list[relax.Binding] | None:
    """The block with convolutions in place of transposed ones; None if there are none to replace."""
    values = ConstantValues(block)
    replacements: dict[int, list[relax.Binding]] = {}
    removed: set[int] = set()
    for index, binding in enumerate(block.bindings):
        if op_name(binding.value) in TRANSPOSED and isinstance(binding, relax.VarBinding):
            expansion = _Expansion.of(block, values, index)
            if expansion is not None:
                replacements[index] = expansion.bindings()
                removed.update(expansion.chain)
    return with_replaced(block, replacements, removed)


@dataclass
class _Expansion:
    """Expansion of one transposed convolution, and of the elementwise ops after it that are applied to its phases."""

    block: Block
    values: ConstantValues
    call: relax.Call
    var: relax.Var
    last: relax.Var
    weights: np.ndarray
    chain: list[int]

    @staticmethod
    def of(block: Block, values: ConstantValues, index: int) -> _Expansion | None:
        """The expansion of a binding; None if weights, size differences or the layout are not supported."""
        binding = block.bindings[index]
        call = binding.value
        data_layout, kernel_layout, _ = _LAYOUTS[TRANSPOSED[op_name(call) or ""]]
        weights, shapes = values.of(call.args[1]), (shape_of(call.args[0]), shape_of(binding.var))
        layouts = (
            str(call.attrs.data_layout),
            str(call.attrs.out_layout or data_layout),
            str(call.attrs.kernel_layout),
        )
        if weights is None or None in shapes or layouts != (data_layout, data_layout, kernel_layout):
            return None
        if not all(isinstance((shape or [])[1], tirx.IntImm) for shape in shapes):
            return None
        chain, last = _chain(block, values, binding.var)
        expansion = _Expansion(block, values, call, binding.var, last, weights, chain)
        return expansion if expansion._is_uncut() else None

    def _is_uncut(self) -> bool:
        """Return whether nothing has to be cut off along the axes of symbolic sizes."""
        shapes = (shape_of(x) or [] for x in (self.call.args[0], self.var))
        for axis, (size, result_size) in enumerate(zip(*shapes, strict=True)):
            if axis < 2 or (isinstance(size, tirx.IntImm) and isinstance(result_size, tirx.IntImm)):
                continue
            stride = int(self.call.attrs.strides[axis - 2])
            count = _phase_size(result_size, stride)
            if _simplified(count * stride - result_size) != 0 or not isinstance(_simplified(count - size), int):
                return False
            if any(phase.is_cut(_overhang(phase, count, size)) for phase in self._phases(axis - 2, stride)):
                return False
        return True

    def bindings(self) -> list[relax.Binding]:
        """Bindings that replace the transposed convolution."""
        strides = [int(stride) for stride in self.call.attrs.strides]
        shape = shape_of(self.var) or []
        sizes = [_simplified(extent) for extent in shape[2:]]
        counts = [_phase_size(size, stride) for size, stride in zip(sizes, strides, strict=True)]
        phases = [self._phases(axis, stride) for axis, stride in enumerate(strides)]
        emitter = Emitter(self.block.is_dataflow)
        is_one_window = all(len({phase.window for phase in axis_phases}) == 1 for axis_phases in phases)
        if is_one_window and int(self.call.attrs.groups) == 1:
            results = [self._convolved(emitter, list(itertools.product(*phases)), counts)]
        else:
            results = [self._convolved(emitter, [phase], counts) for phase in itertools.product(*phases)]
        if math.prod(strides) == 1:
            emitter.bindings[-1] = relax.VarBinding(self.last, emitter.bindings[-1].value)
            return emitter.bindings
        self._interleave(emitter, results, strides, counts, sizes)
        return emitter.bindings

    def _phases(self, axis: int, stride: int) -> list[_Phase]:
        attrs = self.call.attrs
        padding, dilation = int(attrs.padding[axis]), int(attrs.dilation[axis])
        phases = []
        for r in range(stride):
            quotient, remainder = divmod(r + padding, stride)
            taps = [k for k in range(self.weights.shape[2 + axis]) if (k * dilation - remainder) % stride == 0][::-1]
            distances = [(k * dilation - remainder) // stride for k in taps]
            step = distances[0] - distances[1] if len(taps) > 1 else 1
            phases.append(_Phase(tuple(taps), quotient - distances[0] if taps else 0, step))
        return phases

    def _convolved(self, emitter: Emitter, phases: list[tuple[_Phase, ...]], counts: list[Any]) -> relax.Expr:
        """One convolution with the channels of all `phases`, which read the same inputs."""
        count, attrs = len(counts), self.call.attrs
        kernel = np.concatenate([self._kernel(phase) for phase in phases])
        data, pads = self._padded(emitter, phases[0], counts, kernel.shape[2:])
        data_layout, _, kernel_layout = _LAYOUTS[count]
        dilations = [phase.dilation for phase in phases[0]]
        weights = constant_like(kernel, self.call.args[1].ty)
        layouts = (data_layout, kernel_layout, data_layout, attrs.out_dtype)
        call = _CONVOLUTION[count](data, weights, 1, pads, dilations, int(attrs.groups), *layouts)
        shape = [(shape_of(self.var) or [])[0], kernel.shape[0], *counts]
        name = self.var.name
        result = emitter.emit(call, tensor_type(shape, str(self.var.ty.dtype), self.var.ty), f"{name}_phases")
        for index in self.chain:
            member = self.block.bindings[index]
            args = [self._argument(arg, result, len(phases)) for arg in member.value.args]
            step = with_args(member.value, args)
            ty = tensor_type(shape, str(member.var.ty.dtype), member.var.ty)
            result = emitter.emit(step, ty, f"{member.var.name}_phases")
        return result

    def _argument(self, arg: relax.Expr, result: relax.Expr, copies: int) -> relax.Expr:
        """An operand of an op on phases: the phases, or constants per channel, repeated for each phase."""
        array = self.values.of(arg) if isinstance(arg.ty, relax.TensorType) else None
        if array is None:
            return arg if not isinstance(arg.ty, relax.TensorType) else result
        repeats = [copies if extent != 1 else 1 for extent in array.shape]
        return constant_like(np.tile(array, repeats), arg.ty)

    def _kernel(self, phase: tuple[_Phase, ...]) -> np.ndarray:
        """The weights (o, i / groups, ...) of one phase."""
        groups = int(self.call.attrs.groups)
        kernel = self.weights
        for axis, part in enumerate(phase, 2):
            kernel = np.take(kernel, part.taps, axis) if part.taps else np.zeros_like(np.take(kernel, [0], axis))
        grouped = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
        return grouped.reshape(-1, *grouped.shape[2:])

    def _padded(
        self, emitter: Emitter, phase: tuple[_Phase, ...], counts: list[Any], kernel: tuple[int, ...]
    ) -> tuple[relax.Expr, list[int]]:
        """The data, without ends that the phase does not read, and the padding of the convolution."""
        data = self.call.args[0]
        shape = shape_of(data) or []
        before, after, begin, end = [], [], [], []
        cut = False
        for axis, part in enumerate(phase):
            overhang = _overhang(part, counts[axis], shape[2 + axis])
            before.append(max(-part.first, 0))
            after.append(max(overhang, 0))
            begin.append(max(part.first, 0))
            end.append(_simplified(shape[2 + axis] + min(overhang, 0)))
            cut |= part.is_cut(overhang)
        sizes = [_simplified(stop - start) for start, stop in zip(begin, end, strict=True)]
        if cut:
            axes = [2 + axis for axis in range(len(counts))]
            ty = tensor_type([*shape[:2], *sizes], str(data.ty.dtype), data.ty)
            data = emitter.emit(relax.op.strided_slice(data, axes, begin, end), ty, f"{self.var.name}_read")
        return data, before + after

    def _interleave(
        self, emitter: Emitter, phases: list[relax.Expr], strides: list[int], counts: list[Any], sizes: list[Any]
    ) -> None:
        name, ty, rank = self.last.name, self.last.ty, len(strides)
        batch, channels = (shape_of(self.last) or [])[:2]
        dtype = str(ty.dtype)

        def emit(call: relax.Call, shape: list[Any], suffix: str) -> relax.Var:
            return emitter.emit(call, tensor_type(shape, dtype, ty), f"{name}_{suffix}")

        value = phases[0]
        if len(phases) > 1:
            value = emit(relax.op.concat(phases, 1), [batch, int(channels) * len(phases), *counts], "phases")
        value = emit(
            relax.op.reshape(value, [batch, *strides, channels, *counts]), [batch, *strides, channels, *counts], "split"
        )
        pairs = list(zip(range(2 + rank, 2 + 2 * rank), range(1, 1 + rank), strict=True))
        axes = [0, 1 + rank, *itertools.chain(*pairs)]
        interleaved = [*itertools.chain(*zip(counts, strides, strict=True))]
        value = emit(relax.op.permute_dims(value, axes), [batch, channels, *interleaved], "mixed")
        full_sizes = [_simplified(count * stride) for count, stride in zip(counts, strides, strict=True)]
        result = relax.op.reshape(value, [batch, channels, *full_sizes])
        if any(_simplified(full_size - size) != 0 for full_size, size in zip(full_sizes, sizes, strict=True)):
            full_size = emit(result, [batch, channels, *full_sizes], "joined")
            result = relax.op.strided_slice(full_size, [2 + axis for axis in range(rank)], [0] * rank, sizes)
        emitter.emit_as(self.last, result)


def _simplified(extent: Any) -> Any:
    """A simplified extent; an int if it is constant."""
    if isinstance(extent, int):
        return extent
    simplified = sym.Analyzer().simplify(extent)
    return int(simplified) if isinstance(simplified, tirx.IntImm) else simplified


def _overhang(phase: _Phase, count: Any, size: Any) -> int:
    """Number of elements by which the last of `count` windows extends beyond the data; negative: data are not read."""
    difference: int = _simplified(count - size)
    return phase.first + difference + (max(1, len(phase.taps)) - 1) * phase.dilation


def _phase_size(size: Any, stride: int) -> Any:
    """Size of the result in each phase of the stride, rounded up."""
    return -(-size // stride) if isinstance(size, int) else _simplified(tirx.floordiv(size + (stride - 1), stride))


def _chain(block: Block, values: ConstantValues, var: relax.Var) -> tuple[list[int], relax.Var]:
    """Elementwise bindings after `var`, each the only user of the one before, with constants per channel at most."""
    chain: list[int] = []
    user = block.sole_user(var)
    while user is not None:
        binding = block.bindings[user]
        call = binding.value
        if op_name(call) not in ELEMENTWISE or not isinstance(binding, relax.VarBinding):
            break
        constants = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType) and not arg.same_as(var)]
        if not all(_is_per_channel(values, constant, len(shape_of(var) or [])) for constant in constants):
            break
        if shape_of(binding.var) is None or binding.var.ty.vdevice != var.ty.vdevice:
            break
        chain.append(user)
        var = binding.var
        user = block.sole_user(var)
    return chain, var


def _is_per_channel(values: ConstantValues, operand: relax.Expr, rank: int) -> bool:
    shape = shape_of(operand)
    if shape is None or len(shape) > rank or values.of(operand) is None:
        return False
    channel = len(shape) - (rank - 1)
    return all(is_one(extent) for axis, extent in enumerate(shape) if axis != channel)
