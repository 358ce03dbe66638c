"""Transposed convolutions become convolutions, one for each phase of the stride.

Before::

    y = R.nn.conv2d_transpose(x, w, strides=[2, 2])                      # w of 2 x 2

After::

    phases = R.nn.conv2d(x, w of 1 x 1 for 4 * c channels)
    split = R.reshape(phases, (n, 2, 2, c, h, w))
    y = R.reshape(R.permute_dims(split, axes=[0, 3, 4, 1, 5, 2]), (n, c, 2 * h, 2 * w))

Output ``s * j + r`` of an axis is a sum over those kernel elements k with ``k * dilation = r + padding (mod s)``, of
inputs that are neighbours: a convolution of stride 1 for each r, whose kernel is those elements backwards. Where all
phases read the same inputs they are one convolution. Work per channel behind the op (a bias, an activation) is done
before the phases are put side by side, where a kernel takes it in. Weights are constants; an image may have symbolic
sizes where those of the result are multiples of the stride, and all of the image is read: TVM's slices of symbolic
sizes cannot be fused.
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
from ..ir.rewriting import op_name, typed

_CONVOLUTION = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
TRANSPOSED = {f"relax.nn.conv{n}d_transpose": n for n in (1, 2, 3)}
"""Transposed convolutions, with their number of spatial axes."""

_LAYOUTS = {1: ("NCW", "IOW", "OIW"), 2: ("NCHW", "IOHW", "OIHW"), 3: ("NCDHW", "IODHW", "OIDHW")}


@dataclass(frozen=True)
class _Phase:
    """The outputs ``stride * j + r`` of one axis, as a convolution of stride 1.

    Attributes
    ----------
    taps : tuple of int
        Kernel elements in the order in which they meet the inputs; none where the outputs are zeros.
    first : int
        The input that the first of them meets at j = 0; negative in the padding.
    dilation : int
        Inputs from one to the next.
    """

    taps: tuple[int, ...]
    first: int
    dilation: int

    @property
    def window(self) -> tuple[int, int, int]:
        """Parameters that decide which inputs are read."""
        return len(self.taps), self.first, self.dilation

    def is_cut(self, behind: int) -> bool:
        """Return whether inputs at an end are not read: `behind` is how far behind the data the last window ends."""
        return self.first > 0 or behind < 0


def expand_transposed_convolutions(block: Block) -> list[relax.Binding] | None:
    """The block with convolutions in place of transposed ones; None where there are none to replace."""
    values = ConstantValues(block)
    made: dict[int, list[relax.Binding]] = {}
    gone: set[int] = set()
    for index, binding in enumerate(block.bindings):
        if op_name(binding.value) in TRANSPOSED and isinstance(binding, relax.VarBinding):
            expansion = _Expansion.of(block, values, index)
            if expansion is not None:
                made[index] = expansion.bindings()
                gone.update(expansion.chain)
    return with_replaced(block, made, gone)


@dataclass
class _Expansion:
    """One transposed convolution, and the elementwise work behind it that is done on its phases."""

    block: Block
    values: ConstantValues
    call: relax.Call
    var: relax.Var
    last: relax.Var
    weights: np.ndarray
    chain: list[int]

    @staticmethod
    def of(block: Block, values: ConstantValues, index: int) -> _Expansion | None:
        """None where weights, or how far sizes of image and result are apart, are not known now; or by the layout."""
        binding = block.bindings[index]
        call = binding.value
        count = TRANSPOSED[op_name(call) or ""]
        data_layout, kernel_layout, _ = _LAYOUTS[count]
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
        found = _Expansion(block, values, call, binding.var, last, weights, chain)
        return found if found._is_whole() else None

    def _is_whole(self) -> bool:
        """Return whether nothing has to be cut off along the axes of symbolic sizes."""
        for axis, (read, made) in enumerate(
            zip(*(shape_of(x) or [] for x in (self.call.args[0], self.var)), strict=True)
        ):
            if axis < 2 or (isinstance(read, tirx.IntImm) and isinstance(made, tirx.IntImm)):
                continue
            stride = int(self.call.attrs.strides[axis - 2])
            count = _count(made, stride)
            if _plain(count * stride - made) != 0 or not isinstance(_plain(count - read), int):
                return False
            if any(each.is_cut(_behind(each, count, read)) for each in self._phases(axis - 2, stride)):
                return False
        return True

    def bindings(self) -> list[relax.Binding]:
        """Bindings that replace it."""
        strides = [int(stride) for stride in self.call.attrs.strides]
        shape = shape_of(self.var) or []
        sizes = [_plain(extent) for extent in shape[2:]]
        counts = [_count(size, stride) for size, stride in zip(sizes, strides, strict=True)]
        phases = [self._phases(axis, stride) for axis, stride in enumerate(strides)]
        emitter = Emitter(self.block.is_dataflow)
        is_one_window = all(len({phase.window for phase in each}) == 1 for each in phases)
        if is_one_window and int(self.call.attrs.groups) == 1:
            parts = [self._convolved(emitter, list(itertools.product(*phases)), counts)]
        else:
            parts = [self._convolved(emitter, [phase], counts) for phase in itertools.product(*phases)]
        if math.prod(strides) == 1:
            emitter.bindings[-1] = relax.VarBinding(self.last, emitter.bindings[-1].value)
            return emitter.bindings
        self._put_side_by_side(emitter, parts, strides, counts, sizes)
        return emitter.bindings

    def _phases(self, axis: int, stride: int) -> list[_Phase]:
        attrs = self.call.attrs
        padding, dilation = int(attrs.padding[axis]), int(attrs.dilation[axis])
        found = []
        for r in range(stride):
            whole, part = divmod(r + padding, stride)
            taps = [k for k in range(self.weights.shape[2 + axis]) if (k * dilation - part) % stride == 0][::-1]
            distances = [(k * dilation - part) // stride for k in taps]
            step = distances[0] - distances[1] if len(taps) > 1 else 1
            found.append(_Phase(tuple(taps), whole - distances[0] if taps else 0, step))
        return found

    def _convolved(self, emitter: Emitter, phases: list[tuple[_Phase, ...]], counts: list[Any]) -> relax.Expr:
        """The phases, which read the same inputs, in one convolution with all their channels."""
        count, attrs = len(counts), self.call.attrs
        kernel = np.concatenate([self._kernel(phase) for phase in phases])
        data, pads = self._padded(emitter, phases[0], counts, kernel.shape[2:])
        data_layout, _, kernel_layout = _LAYOUTS[count]
        dilations = [phase.dilation for phase in phases[0]]
        weights = constant_like(kernel, self.call.args[1].ty)
        layouts = (data_layout, kernel_layout, data_layout, attrs.out_dtype)
        call = _CONVOLUTION[count](data, weights, 1, pads, dilations, int(attrs.groups), *layouts)
        batch = (shape_of(self.var) or [])[0]
        shape = [batch, kernel.shape[0], *counts]
        name = self.var.name
        result = emitter.emit(call, tensor_type(shape, str(self.var.ty.dtype), self.var.ty), f"{name}_phases")
        for index in self.chain:
            member = self.block.bindings[index]
            args = [self._argument(arg, result, len(phases)) for arg in member.value.args]
            step = relax.Call(member.value.op, args, member.value.attrs, member.value.ty_args)
            ty = tensor_type(shape, str(member.var.ty.dtype), member.var.ty)
            result = emitter.emit(step, ty, f"{member.var.name}_phases")
        return result

    def _argument(self, arg: relax.Expr, result: relax.Expr, copies: int) -> relax.Expr:
        """An operand of work on a phase: the phase, or a number per channel, repeated where channels are."""
        array = self.values.of(arg) if isinstance(arg.ty, relax.TensorType) else None
        if array is None:
            return arg if not isinstance(arg.ty, relax.TensorType) else result
        repeats = [copies if extent != 1 else 1 for extent in array.shape]
        return constant_like(np.tile(array, repeats), arg.ty)

    def _kernel(self, phase: tuple[_Phase, ...]) -> np.ndarray:
        """Weights (o, i / groups, ...) of one phase."""
        groups = int(self.call.attrs.groups)
        kernel = self.weights
        for axis, each in enumerate(phase, 2):
            kernel = np.take(kernel, each.taps, axis) if each.taps else np.zeros_like(np.take(kernel, [0], axis))
        grouped = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
        return grouped.reshape(-1, *grouped.shape[2:])

    def _padded(
        self, emitter: Emitter, phase: tuple[_Phase, ...], counts: list[Any], kernel: tuple[int, ...]
    ) -> tuple[relax.Expr, list[int]]:
        """The data, less the ends that the phase does not read, and the padding of the convolution."""
        data = self.call.args[0]
        shape = shape_of(data) or []
        before, after, begin, end = [], [], [], []
        cut = False
        for axis, each in enumerate(phase):
            behind = _behind(each, counts[axis], shape[2 + axis])
            before.append(max(-each.first, 0))
            after.append(max(behind, 0))
            begin.append(max(each.first, 0))
            end.append(_plain(shape[2 + axis] + min(behind, 0)))
            cut |= each.is_cut(behind)
        sizes = [_plain(stop - start) for start, stop in zip(begin, end, strict=True)]
        if cut:
            axes = [2 + axis for axis in range(len(counts))]
            ty = tensor_type([*shape[:2], *sizes], str(data.ty.dtype), data.ty)
            data = emitter.emit(relax.op.strided_slice(data, axes, begin, end), ty, f"{self.var.name}_read")
        return data, before + after

    def _put_side_by_side(
        self, emitter: Emitter, parts: list[relax.Expr], strides: list[int], counts: list[Any], sizes: list[Any]
    ) -> None:
        name, like, rank = self.last.name, self.last.ty, len(strides)
        batch, channels = (shape_of(self.last) or [])[:2]
        dtype = str(like.dtype)

        def emit(call: relax.Call, shape: list[Any], what: str) -> relax.Var:
            return emitter.emit(call, tensor_type(shape, dtype, like), f"{name}_{what}")

        value = parts[0]
        if len(parts) > 1:
            value = emit(relax.op.concat(parts, 1), [batch, int(channels) * len(parts), *counts], "phases")
        value = emit(
            relax.op.reshape(value, [batch, *strides, channels, *counts]), [batch, *strides, channels, *counts], "split"
        )
        pairs = list(zip(range(2 + rank, 2 + 2 * rank), range(1, 1 + rank), strict=True))
        axes = [0, 1 + rank, *itertools.chain(*pairs)]
        mixed = [*itertools.chain(*zip(counts, strides, strict=True))]
        value = emit(relax.op.permute_dims(value, axes), [batch, channels, *mixed], "mixed")
        whole = [_plain(count * stride) for count, stride in zip(counts, strides, strict=True)]
        result = relax.op.reshape(value, [batch, channels, *whole])
        if any(_plain(joined - size) != 0 for joined, size in zip(whole, sizes, strict=True)):
            joined = emit(result, [batch, channels, *whole], "joined")
            result = relax.op.strided_slice(joined, [2 + axis for axis in range(rank)], [0] * rank, sizes)
        emitter.bind(self.last, typed(result, like))


def _plain(extent: Any) -> Any:
    """An extent as simple as can be: an int where it is known."""
    if isinstance(extent, int):
        return extent
    found = sym.Analyzer().simplify(extent)
    return int(found) if isinstance(found, tirx.IntImm) else found


def _behind(phase: _Phase, count: Any, size: Any) -> int:
    """How far behind the data the last of `count` windows ends; negative where data are not read."""
    apart: int = _plain(count - size)
    return phase.first + apart + (max(1, len(phase.taps)) - 1) * phase.dilation


def _count(size: Any, stride: int) -> Any:
    """Places of the result in each phase of the stride, those of the longest."""
    return -(-size // stride) if isinstance(size, int) else _plain(tirx.floordiv(size + (stride - 1), stride))


def _chain(block: Block, values: ConstantValues, var: relax.Var) -> tuple[list[int], relax.Var]:
    """Elementwise bindings behind `var`, each the only user of the one before, with numbers per channel at most."""
    chain: list[int] = []
    user = block.sole_user(var)
    while user is not None:
        binding = block.bindings[user]
        call = binding.value
        if op_name(call) not in ELEMENTWISE or not isinstance(binding, relax.VarBinding):
            break
        others = [arg for arg in call.args if isinstance(arg.ty, relax.TensorType) and not arg.same_as(var)]
        if not all(_is_per_channel(values, other, len(shape_of(var) or [])) for other in others):
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
