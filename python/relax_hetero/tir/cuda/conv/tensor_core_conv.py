"""Convolutions on tensor cores: products by wgmma or ``mma.sync`` whose left operand is found in a map."""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES, PackedLayout
from ....encoding.problem import ConvProblem, MatmulProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ...conv.conv_products import IMAGE_CHANNELS, implicit_product
from ...core.builder import Expr, Function
from ...core.ties import tied_to
from ...core.view import extent_of
from ...matmul.matmul import merge_batches
from ..core.global_view import GlobalView
from ..core.launch import enable_pdl
from ..core.operand import GpuOperand
from ..matmul import mma_matmul, wgmma_matmul
from ..matmul.fragments import FragmentStore
from ..matmul.mma_matmul import MmaProduct
from ..matmul.mma_tiling import MmaTiling, choose_mma_tiling
from ..matmul.operand_tiles import PACKED_ROWS, OperandTile
from ..matmul.simt_parts import Batches
from ..matmul.wgmma_matmul import WgmmaProduct
from ..matmul.wgmma_tiling import Tiling, choose_tiling, reads_rows
from . import window_tiles
from .window_places import WindowPlaces
from .window_tiles import WindowTile


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
    return instruction.unsupported_reason(product, gpu) or window_tiles.unsupported_reason(problem)


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
