"""Convolutions on tensor cores: implicit GEMMs by wgmma or ``mma.sync`` whose left operand is a feature map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES, PackedLayout
from ....encoding.problem import ConvProblem, MatmulProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ...conv.conv_products import IMAGE_CHANNELS, implicit_product
from ...core.builder import Expr, Function, int64, when
from ...core.ties import tied_to
from ...core.view import Coordinates, extent_of
from ...matmul.matmul import merge_batches
from ..core import ptx
from ..core.launch import SharedMemory, enable_pdl, local, unrolled
from ..core.operand import GlobalView
from ..matmul import mma_matmul, wgmma_matmul
from ..matmul.mma_matmul import MmaProduct
from ..matmul.mma_tiling import MmaTiling, choose_mma_tiling
from ..matmul.wgmma_matmul import WgmmaProduct
from ..matmul.wgmma_tiling import Tiling, choose_tiling, reads_rows
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from ..tile.fragment_store import FragmentStore
from ..tile.operand_tiles import PACKED_ROWS, PRODUCERS, OperandTile, Source, StageTile
from . import filter_taps
from .filter_taps import FilterTaps

# Tiles of the left operand of an implicit GEMM: input pixels of an output pixel's filter taps.
#
# A line of the tile is one output pixel, and holds 128 bytes of k in each k-step. If pixels have about that many bytes
# of channels, these are channels of one tap. If they have fewer, the weight is stored in "chunks" of 16 bytes of
# channels of a tap, and a k-step has chunks of several taps. Images are stored with four channels, padded with zeros,
# and a chunk has one, two or four neighbouring taps.
#
# Pixels are copied by cp.async, which fills padding with zeros.

_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES


def untileable_reason(problem: ConvProblem) -> str:
    """Reason why tiles of a problem's map cannot be copied; empty if they can."""
    channels, layout, element = problem.weight.shape[1], problem.data.layout, bytes_of(problem.data.dtype)
    spatial = tuple(range(2, len(problem.windows) + 2))
    if layout.outer_perm != (0, *spatial, 1):
        return f"the map is stored as {layout}, expected channels last"
    if not isinstance(channels, int):
        return "the channels are symbolic"
    stored = channels
    if layout.inner_dims:
        if layout.inner_tiles != (IMAGE_CHANNELS,) or channels > IMAGE_CHANNELS:
            return f"the map is stored as {layout}, expected no tiles but those of up to {IMAGE_CHANNELS} channels"
        stored = IMAGE_CHANNELS
    if stored * element % 4:
        return f"pixels of {channels} channels of {problem.data.dtype} do not begin at multiples of 4 bytes"
    return filter_taps.unsupported_reason(problem)


@dataclass
class WindowTile(StageTile):
    """Left operand of an implicit GEMM, whose rows are pixels; other attributes are those of `StageTile`."""

    taps: FilterTaps  # addresses in the map, opened raw
    rows: int
    extent: Expr
    depth: int
    in_chunks: bool  # whether each 16 bytes of a k-step have a tap of their own
    threads: int = PRODUCERS
    source: Source = Source.LINES
    _offsets: Any = field(default=None, init=False)
    _masks: Any = field(default=None, init=False)
    _tap: Any = field(default=None, init=False)
    _tap_offsets: Any = field(default=None, init=False)
    _tap_sizes: Any = field(default=None, init=False)

    @property
    def view(self) -> GlobalView:
        """The feature map."""
        return self.taps.view

    @property
    def per_chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.element

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Compute the offsets of the thread's lines, and the masks of their taps in bounds."""
        count, kind = self.rows // self.lines, self.taps.kind
        self._offsets = local(count, kind)
        self._masks = local(count, "uint32") if self.taps.has_padding else None
        first_row = T.bind(first + T.Cast("int64", thread // _CHUNKS))
        channel_offset = 0 if self.in_chunks else T.Cast(kind, thread % _CHUNKS * self.per_chunk)
        if not self.in_chunks and self._tap_steps > 1:
            self._tap, self._tap_offsets, self._tap_sizes = local(1, "int32"), local(count, kind), local(count, "int32")
            T.buffer_store(self._tap, -1, [0])
        with unrolled(count) as i:
            # Rows beyond the extent are copies of the last one, and are not stored.
            row = T.min(first_row + T.Cast("int64", i * self.lines), int64(self.extent - 1))
            begin, mask = self.taps.pixel(at, row)
            T.buffer_store(self._offsets, begin + channel_offset, [i])
            if self._masks is not None:
                T.buffer_store(self._masks, mask, [i])

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Issue the copies of the tile of a k-step; parameters as in `StageTile.load`."""
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        if not self.in_chunks:
            self._load_channels(shared, target, step, chunk)
        elif self.taps.channels > IMAGE_CHANNELS:
            self._load_chunks(shared, target, step, chunk)
        else:
            self._load_pixels(shared, target, step, chunk)

    @property
    def _tap_steps(self) -> int:
        """Number of k-steps of a tap."""
        return -(-self.taps.channels // self.step)

    def _load_channels(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """Load a k-step of channels of one tap."""
        channels, width = self.taps.channels, CHUNK_BYTES
        while channels * self.element % width:
            width //= 2
        elements = width // self.element
        if self._tap_steps == 1:
            tap_offset, bits = self.taps.tap(step)
            for copy in range(CHUNK_BYTES // width):
                exists = self._has_channel(chunk * self.per_chunk + copy * elements)
                self._copy(shared, target + copy * width, tap_offset + copy * elements, width, bits, exists)
            return
        self._find_tap(T.bind(T.truncdiv(step, self._tap_steps)), width)
        channel_offset = T.bind(T.truncmod(step, self._tap_steps) * self.step)
        # Unsigned, so that the compiler uses 32-bit additions.
        unsigned = f"u{self.taps.kind}"
        for copy in range(CHUNK_BYTES // width):
            exists = self._has_channel(chunk * self.per_chunk + copy * elements + channel_offset)
            offset = T.Cast(unsigned, channel_offset + copy * elements)

            def tap_source(i: Expr, exists: Expr | None = exists, offset: Expr = offset) -> tuple[Expr, Expr | None]:
                # Lines of padding read the begin of the map, where there are as many channels.
                source = T.Cast(unsigned, self._tap_offsets[i]) + offset
                size = None if self._masks is None else self._tap_sizes[i]
                if exists is not None:
                    source = T.Select(exists, source, tirx.const(0, unsigned))
                    size = T.Select(exists, width if size is None else size, 0)
                return T.Cast("int64", source), size

            self._copy_lines(shared, target + copy * width, width, tap_source)

    def _has_channel(self, channel: Expr) -> Expr | None:
        """Return whether a channel exists; None if all copied ones do."""
        channels = self.taps.channels
        return None if channels % self.step == 0 else T.bind(channel < channels)

    def _find_tap(self, tap: Expr, width: int) -> None:
        """Compute the lines' offsets and copy sizes for a tap, once for all its k-steps."""
        kind = self.taps.kind
        with when(tap != self._tap[0]):
            T.buffer_store(self._tap, tap, [0])
            tap_offset, bits = self.taps.tap(tap)
            with unrolled(self.rows // self.lines) as i:
                source = self._offsets[i] + tap_offset
                if bits is not None:
                    is_inside = T.bitwise_and(self._masks[i], bits) == bits
                    source = T.Select(is_inside, source, tirx.const(0, kind))
                    T.buffer_store(self._tap_sizes, T.Select(is_inside, width, 0), [i])
                T.buffer_store(self._tap_offsets, source, [i])

    def _load_chunks(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """Load a k-step whose chunks have a tap and some channels each."""
        number, is_new = self._own_chunk(step, chunk)
        parts = self.taps.channels // self.per_chunk
        tap_offset, bits = self.taps.tap(T.bind(T.truncdiv(number, parts)))
        channel_offset = T.Cast(self.taps.kind, T.truncmod(number, parts) * self.per_chunk)
        self._copy(shared, target, T.bind(tap_offset + channel_offset), CHUNK_BYTES, bits, is_new)

    def _load_pixels(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """Load a k-step whose chunks have neighbouring taps of a window row each; the last taps may not exist."""
        number, is_new = self._own_chunk(step, chunk)
        sizes = [window.size for window in self.taps.problem.windows]
        taps_per_chunk = self.per_chunk // IMAGE_CHANNELS
        row_chunks = -(-sizes[-1] // taps_per_chunk)
        outer, first = T.bind(T.truncdiv(number, row_chunks)), T.bind(T.truncmod(number, row_chunks) * taps_per_chunk)
        taps: list[Expr] = []
        for size in reversed(sizes[:-1]):
            taps.insert(0, T.bind(T.truncmod(outer, size)))
            outer = T.bind(T.truncdiv(outer, size))
        width = CHUNK_BYTES // taps_per_chunk
        for i in range(taps_per_chunk):
            exists, last = is_new, first + i
            if sizes[-1] % taps_per_chunk > 0 and i >= sizes[-1] % taps_per_chunk:
                is_inside = last < sizes[-1]
                exists = T.bind(is_inside if is_new is None else tirx.all(is_new, is_inside))
                last = T.min(last, sizes[-1] - 1)
            tap_offset, bits = self.taps.tap_at([*taps, T.bind(last)])
            self._copy(shared, target + i * width, tap_offset, width, bits, exists)

    def _own_chunk(self, step: Expr, chunk: Expr) -> tuple[Expr, Expr]:
        """Number of the thread's chunk of k, and whether it is new to this k-step; None if all are.

        An incomplete last step begins earlier, like that of the weight, and repeats chunks of the step before.
        """
        total = self.depth // self.per_chunk
        if total < _CHUNKS:
            return T.min(chunk, total - 1), T.bind(chunk < total)
        if total % _CHUNKS == 0:
            return T.bind(step * _CHUNKS + chunk), None
        number = T.bind(T.min(step * _CHUNKS, total - _CHUNKS) + chunk)
        return number, T.bind(number >= step * _CHUNKS)

    def _copy(
        self, shared: SharedMemory, target: Expr, offset: Expr, width: int, bits: Expr | None, exists: Expr | None
    ) -> None:
        """Issue copies of `width` bytes for every line of the thread, zeros where they do not exist."""

        def line_source(i: Expr) -> tuple[Expr, Expr | None]:
            source, predicate = self._offsets[i] + offset, exists
            if bits is not None:
                is_inside = T.bitwise_and(self._masks[i], bits) == bits
                predicate = is_inside if predicate is None else tirx.all(is_inside, predicate)
            if predicate is None:
                return source, None
            # A copy of zero bytes still needs a valid address.
            return T.Select(predicate, source, tirx.const(0, self.taps.kind)), T.Select(predicate, width, 0)

        self._copy_lines(shared, target, width, line_source)

    def _copy_lines(
        self, shared: SharedMemory, target: Expr, width: int, of_line: Callable[[Expr], tuple[Expr, Expr | None]]
    ) -> None:
        """Issue copies of `width` bytes for every line; `of_line` gives the source element and the valid bytes."""
        with unrolled(self.rows // self.lines) as i:
            source, size = of_line(i)
            target_pointer = shared.at(target + i * (self.lines * SWIZZLED_BYTES))
            ptx.copy_async(target_pointer, T.address_of(self.view.data[source]), width, size)


def unsupported_reason(problem: ConvProblem, gpu: GpuTarget) -> str:
    """Reason why `tensor_core_conv_kernel` does not support a problem; empty if it does."""
    columns = problem.weight.shape[0]
    if problem.groups > 1 and (not isinstance(columns, int) or columns // problem.groups % PACKED_ROWS):
        return f"{columns} output channels in {problem.groups} groups, expected a multiple of {PACKED_ROWS} per group"
    layout = problem.weight.layout
    if not layout.inner_dims:
        return f"the weight is stored as {layout}, expected tiles"
    product = implicit_product(problem)
    if not layout.swizzle:
        if gpu.tensor != "wgmma":
            return f"{gpu.arch} reads only swizzled tiles, found the weight stored as {layout}"
        if layout != _chunks(problem) or problem.groups > 1:
            return f"the weight is stored as {layout} for {problem.groups} groups, expected {_chunks(problem)} for one"
        element = bytes_of(problem.weight.dtype)
        tiles = (PACKED_ROWS, SWIZZLED_BYTES // element)
        k = int(product.rhs.size("k"))
        if k < tiles[1] and k * element % ptx.CONTRACTION_BYTES:
            expected = f"a multiple of {ptx.CONTRACTION_BYTES // element}, or at least {tiles[1]}"
            return f"k is {k}, expected {expected}"
        swizzled = PackedLayout((0, 1), (0, 1), tiles, swizzle=True)
        product = replace(product, rhs=replace(product.rhs, layout=swizzled))
    instruction = wgmma_matmul if gpu.tensor == "wgmma" else mma_matmul
    return instruction.unsupported_reason(product, gpu) or untileable_reason(problem)


def _chunks(problem: ConvProblem) -> PackedLayout:
    """Layout of a weight in chunks of 16 bytes of k: channels of a tap, or of several taps of an image."""
    spatial = tuple(range(2, len(problem.windows) + 2))
    per_chunk = CHUNK_BYTES // bytes_of(problem.weight.dtype)
    is_image = problem.data.layout.inner_dims or problem.weight.shape[1] == IMAGE_CHANNELS
    if is_image and per_chunk > IMAGE_CHANNELS:
        dims = (0, spatial[-1], 1)
        return PackedLayout((0, *spatial, 1), dims, (PACKED_ROWS, per_chunk // IMAGE_CHANNELS, IMAGE_CHANNELS))
    return PackedLayout((0, *spatial, 1), (0, 1), (PACKED_ROWS, per_chunk))


def tensor_core_conv_kernel(
    problem: ConvProblem, gpu: GpuTarget, tiling: Tiling | MmaTiling | None = None
) -> tirx.PrimFunc:
    """Kernel of a convolution on tensor cores, one launch; `ConvProblem` documents its parameters.

    `tiling`: tiling for the GPU's instruction; by default that of `choose_tiling` or `choose_mma_tiling`. Raises
    EncodingError if the kernel does not support the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"convolution on {gpu.arch}: {reason}")
    product = implicit_product(problem)
    function = Function("conv", registers="local")
    with function:
        data = GlobalView(function, "data", problem.data)
        weight = GlobalView(function, "weight", problem.weight)
        writer = EpilogueWriter.of(function, product.epilogue, product.result, problem.acc_dtype)
        store, result = FragmentStore(writer, gpu), writer.result
        _restate_weight(weight, problem, product)
        names = ["b", *(f"y{d}" for d in range(len(problem.windows)))]
        output_extents: dict[str, Expr] = dict(zip(names, result.extents, strict=False))
        if problem.groups > 1:
            for view in writer.operands:
                view.split("n", "g", problem.groups)
        batch = merge_batches([weight, *writer.operands], weight, weight, result)
        sizes = m, n, k = extent_of([result], "m"), extent_of([result], "n"), extent_of([weight], "k")
        groups = {"g": problem.groups} if problem.groups > 1 else {}
        batches = Batches({name: extent_of([result], name) for name in batch} | groups)
        with function.body():
            data.open(raw=True)
            weight.open(raw=True)
            store.open(m, n, reads_rows(product))
            pixel_taps = FilterTaps(data, problem, output_extents, len(batch))
            in_chunks = not problem.weight.layout.swizzle
            if gpu.tensor == "wgmma":
                tiling = tiling or choose_tiling(
                    product, gpu, sizes, list(batches.extents.values()), may_swap=not in_chunks
                )
                assert isinstance(tiling, Tiling)
                left = WindowTile(pixel_taps, tiling.rows, m, k, in_chunks)
                right = OperandTile.of(weight, "n", tiling.columns, n, k)
                kernel = WgmmaProduct(left, right, store, tiling, sizes, batches)
                kernel.emit()
                read_early = kernel.read_early
            else:
                tiling = tiling or choose_mma_tiling(product, gpu, sizes, list(batches.extents.values()))
                assert isinstance(tiling, MmaTiling)
                left = WindowTile(pixel_taps, tiling.rows, m, k, in_chunks, tiling.threads)
                right = OperandTile.of(weight, "n", tiling.columns, n, k, tiling.threads)
                MmaProduct(left, right, store, tiling, batches).emit()
    tied = tied_to(function.result, problem.parameters[2:-1], 2, problem.result)
    return enable_pdl(tied, read_early) if gpu.tensor == "wgmma" else tied


def _restate_weight(weight: GlobalView, problem: ConvProblem, product: MatmulProblem) -> None:
    """Reinterpret the weight as the right operand of the product of each group."""
    rhs = product.rhs
    if problem.groups == 1:
        weight.restate(rhs.shape, rhs.index_map, rhs.layout)
        return
    layout = PackedLayout((0, 1, 2), (1, 2), rhs.layout.inner_tiles, swizzle=rhs.layout.swizzle)
    weight.restate((problem.groups, *rhs.shape), ("g", *rhs.index_map), layout)
