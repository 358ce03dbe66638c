"""Convolutions on tensor cores: products by wgmma or ``mma.sync`` whose left operand is found in a map."""

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
from ..core.operand import GlobalView, GpuOperand
from ..matmul import mma_matmul, wgmma_matmul
from ..matmul.fragments import FragmentStore
from ..matmul.mma_matmul import MmaProduct
from ..matmul.mma_tiling import MmaTiling, choose_mma_tiling
from ..matmul.operand_tiles import PACKED_ROWS, PRODUCERS, OperandTile, Source, SwizzledLines
from ..matmul.simt_tiles import Batches
from ..matmul.wgmma_matmul import WgmmaProduct
from ..matmul.wgmma_tiling import Tiling, choose_tiling, reads_rows
from . import window_places
from .window_places import WindowPlaces

# Tiles of the left operand of an implicit product: pixels of a map under places of a window, for tensor cores.
#
# A line of the tile is one pixel of the result, of which a step holds 128 bytes. Where a pixel has about as many
# bytes of channels, these are channels that one place of the window ("tap") sees. Where it has fewer, the weight is
# stored in "chunks", 16 bytes of channels of a tap after each other, and a step has chunks of several taps. Images
# are stored with four channels, perhaps of zeros, and a chunk has one, two or four neighbouring taps.
#
# What lies in the map is copied as it is; where a tap sees padding, zeros are.

_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES


def untileable_reason(problem: ConvProblem) -> str:
    """Why tiles of a problem's map cannot be copied; empty where they can."""
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
    return window_places.unsupported_reason(problem)


@dataclass
class WindowTile(SwizzledLines):
    """The left operand of an implicit product, and the tile that a stage holds of it; stands for an `OperandTile`.

    Attributes
    ----------
    places : WindowPlaces
        Addresses of the map, opened raw.
    rows : int
        Pixels of a tile.
    extent : PrimExpr or int
        Rows of all tiles.
    depth : int
        The product's k, as the weight is stored.
    in_chunks : bool
        Whether a step has taps of their own for each 16 bytes.
    threads : int
        Number of threads that load it together.
    """

    places: WindowPlaces
    rows: int
    extent: Expr
    depth: int
    in_chunks: bool
    threads: int = PRODUCERS
    source: Source = Source.LINES
    is_transposed: bool = False
    leading: int = 1
    advance: int = ptx.CONTRACTION_BYTES // 16
    _begins: Any = field(default=None, init=False)
    _seen: Any = field(default=None, init=False)
    _tap: Any = field(default=None, init=False)
    _under_tap: Any = field(default=None, init=False)
    _sees: Any = field(default=None, init=False)

    @property
    def view(self) -> GlobalView:
        """The map."""
        return self.places.view

    @property
    def per_chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.element

    def begin(self, at: Coordinates, first: Expr, thread: Expr) -> None:
        """Find the pixels of the thread's lines, and which taps see the map from each."""
        count, kind = self.rows // self.lines, self.places.kind
        self._begins = local(count, kind)
        self._seen = local(count, "uint32") if self.places.has_padding else None
        own = T.bind(first + T.Cast("int64", thread // _CHUNKS))
        skipped = 0 if self.in_chunks else T.Cast(kind, thread % _CHUNKS * self.per_chunk)
        if not self.in_chunks and self._parts > 1:
            self._tap, self._under_tap, self._sees = local(1, "int32"), local(count, kind), local(count, "int32")
            T.buffer_store(self._tap, -1, [0])
        with unrolled(count) as i:
            # Rows beyond the last are copies of it, which are not stored.
            row = T.min(own + T.Cast("int64", i * self.lines), int64(self.extent - 1))
            begin, seen = self.places.pixel(at, row)
            T.buffer_store(self._begins, begin + skipped, [i])
            if self._seen is not None:
                T.buffer_store(self._seen, seen, [i])

    def load(self, shared: SharedMemory, offset: Expr, at: Coordinates, first: Expr, step: Expr, thread: Expr) -> None:
        """Begin to copy the tile of a step; parameters as of `OperandTile.load`."""
        chunk, line = thread % _CHUNKS, thread // _CHUNKS
        target = offset + line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES
        if not self.in_chunks:
            self._load_channels(shared, target, step, chunk)
        elif self.places.channels > IMAGE_CHANNELS:
            self._load_chunks(shared, target, step, chunk)
        else:
            self._load_pixels(shared, target, step, chunk)

    @property
    def _parts(self) -> int:
        """Steps of a tap."""
        return -(-self.places.channels // self.step)

    def _load_channels(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """A step is a tap, and channels that it sees."""
        channels, width = self.places.channels, CHUNK_BYTES
        while channels * self.element % width:
            width //= 2
        elements = width // self.element
        if self._parts == 1:
            moved, bits = self.places.tap(step)
            for copy in range(CHUNK_BYTES // width):
                exists = self._has_channel(chunk * self.per_chunk + copy * elements)
                self._copy(shared, target + copy * width, moved + copy * elements, width, bits, exists)
            return
        self._find_tap(T.bind(T.truncdiv(step, self._parts)), width)
        skipped = T.bind(T.truncmod(step, self._parts) * self.step)
        # Of unsigned numbers, the compiler adds 32 bits where it would add 64.
        unsigned = f"u{self.places.kind}"
        for copy in range(CHUNK_BYTES // width):
            exists = self._has_channel(chunk * self.per_chunk + copy * elements + skipped)
            further = T.Cast(unsigned, skipped + copy * elements)

            def under_tap(i: Expr, exists: Expr | None = exists, further: Expr = further) -> tuple[Expr, Expr | None]:
                # A line that sees padding begins where the map does: so many channels are there.
                begin = T.Cast(unsigned, self._under_tap[i]) + further
                size = None if self._seen is None else self._sees[i]
                if exists is not None:
                    begin = T.Select(exists, begin, tirx.const(0, unsigned))
                    size = T.Select(exists, width if size is None else size, 0)
                return T.Cast("int64", begin), size

            self._copy_lines(shared, target + copy * width, width, under_tap)

    def _has_channel(self, channel: Expr) -> Expr | None:
        """Return whether a channel exists; None: all that are copied do."""
        channels = self.places.channels
        return None if channels % self.step == 0 else T.bind(channel < channels)

    def _find_tap(self, tap: Expr, width: int) -> None:
        """Where the lines' pixels are under a tap, and what is read of each: found once for all its steps."""
        kind = self.places.kind
        with when(tap != self._tap[0]):
            T.buffer_store(self._tap, tap, [0])
            moved, bits = self.places.tap(tap)
            with unrolled(self.rows // self.lines) as i:
                begin = self._begins[i] + moved
                if bits is not None:
                    sees = T.bitwise_and(self._seen[i], bits) == bits
                    begin = T.Select(sees, begin, tirx.const(0, kind))
                    T.buffer_store(self._sees, T.Select(sees, width, 0), [i])
                T.buffer_store(self._under_tap, begin, [i])

    def _load_chunks(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """Every chunk has a tap of its own, and some channels."""
        number, is_new = self._own_chunk(step, chunk)
        parts = self.places.channels // self.per_chunk
        moved, bits = self.places.tap(T.bind(T.truncdiv(number, parts)))
        skipped = T.Cast(self.places.kind, T.truncmod(number, parts) * self.per_chunk)
        self._copy(shared, target, T.bind(moved + skipped), CHUNK_BYTES, bits, is_new)

    def _load_pixels(self, shared: SharedMemory, target: Expr, step: Expr, chunk: Expr) -> None:
        """Every chunk has neighbouring taps of a row of the window; the last may be beyond its end."""
        number, is_new = self._own_chunk(step, chunk)
        sizes = [window.size for window in self.places.problem.windows]
        taps_per_chunk = self.per_chunk // IMAGE_CHANNELS
        parts = -(-sizes[-1] // taps_per_chunk)
        outer, first = T.bind(T.truncdiv(number, parts)), T.bind(T.truncmod(number, parts) * taps_per_chunk)
        taps: list[Expr] = []
        for size in reversed(sizes[:-1]):
            taps.insert(0, T.bind(T.truncmod(outer, size)))
            outer = T.bind(T.truncdiv(outer, size))
        width = CHUNK_BYTES // taps_per_chunk
        for i in range(taps_per_chunk):
            exists, last = is_new, first + i
            if sizes[-1] % taps_per_chunk > 0 and i >= sizes[-1] % taps_per_chunk:
                inside = last < sizes[-1]
                exists = T.bind(inside if is_new is None else tirx.all(is_new, inside))
                last = T.min(last, sizes[-1] - 1)
            moved, bits = self.places.tap_at([*taps, T.bind(last)])
            self._copy(shared, target + i * width, moved, width, bits, exists)

    def _own_chunk(self, step: Expr, chunk: Expr) -> tuple[Expr, Expr]:
        """The number of the thread's chunk of k, and whether no step before had it; None: none had.

        The last step begins earlier where chunks are not enough, as it does of the weight.
        """
        total = self.depth // self.per_chunk
        if total % _CHUNKS == 0:
            return T.bind(step * _CHUNKS + chunk), None
        number = T.bind(T.min(step * _CHUNKS, total - _CHUNKS) + chunk)
        return number, T.bind(number >= step * _CHUNKS)

    def _copy(
        self, shared: SharedMemory, target: Expr, moved: Expr, width: int, bits: Expr | None, exists: Expr | None
    ) -> None:
        """Begin to copy `width` bytes of every line of the thread, zeros where they do not exist."""

        def of_line(i: Expr) -> tuple[Expr, Expr | None]:
            begin, valid = self._begins[i] + moved, exists
            if bits is not None:
                sees = T.bitwise_and(self._seen[i], bits) == bits
                valid = sees if valid is None else tirx.all(sees, valid)
            if valid is None:
                return begin, None
            # Where nothing is read, the address is that of the map.
            return T.Select(valid, begin, tirx.const(0, self.places.kind)), T.Select(valid, width, 0)

        self._copy_lines(shared, target, width, of_line)

    def _copy_lines(
        self, shared: SharedMemory, target: Expr, width: int, of_line: Callable[[Expr], tuple[Expr, Expr | None]]
    ) -> None:
        """Begin to copy `width` bytes of every line of the thread: from which element, and how many of them exist."""
        with unrolled(self.rows // self.lines) as i:
            begin, size = of_line(i)
            place = shared.at(target + i * (self.lines * SWIZZLED_BYTES))
            ptx.copy_async(place, T.address_of(self.view.data[begin]), width, size)


def unsupported_reason(problem: ConvProblem, gpu: GpuTarget) -> str:
    """Why `tensor_core_conv_kernel` cannot solve a problem; empty where it can."""
    columns = problem.weight.shape[0]
    if problem.groups > 1 and (not isinstance(columns, int) or columns // problem.groups % PACKED_ROWS):
        return f"{columns} channels in {problem.groups} groups are no multiples of {PACKED_ROWS} in each"
    layout = problem.weight.layout
    if not layout.inner_dims:
        return f"the weight is stored as {layout}, expected tiles"
    product = implicit_product(problem)
    if not layout.swizzle:
        if gpu.tensor != "wgmma":
            return f"{gpu.arch} reads only swizzled tiles, found the weight stored as {layout}"
        if layout != _chunks(problem) or problem.groups > 1:
            return f"the weight is stored as {layout} for {problem.groups} groups, expected {_chunks(problem)} for one"
        tiles = (PACKED_ROWS, SWIZZLED_BYTES // bytes_of(problem.weight.dtype))
        if int(product.rhs.size("k")) < tiles[1]:
            return f"{product.rhs.size('k')} products of a sum are fewer than a step has"
        swizzled = PackedLayout((0, 1), (0, 1), tiles, swizzle=True)
        product = replace(product, rhs=replace(product.rhs, layout=swizzled))
    instruction = wgmma_matmul if gpu.tensor == "wgmma" else mma_matmul
    return instruction.unsupported_reason(product, gpu) or untileable_reason(problem)


def _chunks(problem: ConvProblem) -> PackedLayout:
    """The weight in 16 bytes of k: channels of a place of the window, or those of an image of several places."""
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
    """The kernel of a convolution for a GPU with tensor cores, one launch; `ConvProblem` says what its parameters are.

    Parameters
    ----------
    tiling : Tiling or MmaTiling, optional
        Tiling of products of the GPU's instruction; by default as `choose_tiling` or `choose_mma_tiling` finds it.

    Raises
    ------
    EncodingError
        If `unsupported_reason` says why the problem is not one for this kernel.
    """
    reason = unsupported_reason(problem, gpu)
    if reason:
        raise EncodingError(f"convolution on {gpu.arch}: {reason}")
    product = implicit_product(problem)
    function = Function("conv", registers="local")
    with function:
        data = GlobalView(function, "data", problem.data)
        weight = GlobalView(function, "weight", problem.weight)
        store = FragmentStore(function, None, product.epilogue, problem.acc_dtype, gpu)
        result = GpuOperand(function, "result", product.result)
        _restate_weight(weight, problem, product)
        names = ["b", *(f"y{d}" for d in range(len(problem.windows)))]
        places: dict[str, Expr] = dict(zip(names, result.extents, strict=False))
        others = [*store.views, result]
        if problem.groups > 1:
            for view in others:
                view.split("n", "g", problem.groups)
        batch = merge_batches([weight, *others], weight, weight, result)
        sizes = m, n, k = extent_of([result], "m"), extent_of([result], "n"), extent_of([weight], "k")
        counts = {name: extent_of([result], name) for name in batch}
        if problem.groups > 1:
            counts["g"] = problem.groups
        with function.body():
            data.open(raw=True)
            weight.open(raw=True)
            store.open(result, m, n, reads_rows(product))
            pixels = WindowPlaces(data, problem, places, len(batch))
            in_chunks = not problem.weight.layout.swizzle
            if gpu.tensor == "wgmma":
                tiling = tiling or choose_tiling(product, gpu, sizes, list(counts.values()), may_swap=not in_chunks)
                assert isinstance(tiling, Tiling)
                left = WindowTile(pixels, tiling.rows, m, k, in_chunks)
                right = OperandTile.of(weight, "n", tiling.columns, n, k)
                kernel = WgmmaProduct(left, right, store, tiling, sizes, counts)
                kernel.emit()
                read_early = kernel.read_early
            else:
                tiling = tiling or choose_mma_tiling(product, gpu, sizes, list(counts.values()))
                assert isinstance(tiling, MmaTiling)
                left = WindowTile(pixels, tiling.rows, m, k, in_chunks, tiling.threads)
                right = OperandTile.of(weight, "n", tiling.columns, n, k, tiling.threads)
                MmaProduct(left, right, store, tiling, Batches(counts)).emit()
    tied = tied_to(function.result, problem.epilogue.operands if problem.epilogue else (), 2, problem.result)
    return enable_pdl(tied, read_early) if gpu.tensor == "wgmma" else tied


def _restate_weight(weight: GlobalView, problem: ConvProblem, product: MatmulProblem) -> None:
    """Read the weight as the right operand of the product, of which there is one for each group."""
    rhs = product.rhs
    if problem.groups == 1:
        weight.restate(rhs.shape, rhs.index_map, rhs.layout)
        return
    layout = PackedLayout((0, 1, 2), (1, 2), rhs.layout.inner_tiles, swizzle=rhs.layout.swizzle)
    weight.restate((problem.groups, *rhs.shape), ("g", *rhs.index_map), layout)
