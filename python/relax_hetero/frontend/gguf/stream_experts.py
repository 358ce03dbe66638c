"""Long chunks of prompts multiply the experts of a CPU on the GPU that has the rest of their layer.

Many tokens meet all experts of a layer. Copying these takes less time than multiplying by them on the CPU then. In a
chunk of at least so many rows, the experts' products are on the router's device, and each call copies the matrices that
the CPU keeps (`R.hetero.stream`). The names of the products' variables end in `STREAMED`, for which rules are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import tvm

from ...encoding.block_formats import FILE_FORMATS
from ...encoding.block_weights import Fragments, is_streamable
from ...encoding.resolver import resolver_or_default
from ...errors import FrontendError
from ...target.vdevice import VDeviceSpec, device_name, is_cpu, vdevice_index
from ..auto.cost_model import CostModel
from ..paged_cache import PagedCache
from .activation_types import ActivationTypes
from .file import FileTensor, GgufFile
from .hyperparameters import Hyperparameters
from .part_costs import first_streamed_rows
from .place_layers import layouts_of, parts_of

STREAMED = ".streamed"
"""End of the names of variables."""

_log = logging.getLogger("relax_hetero")


@dataclass(frozen=True)
class ExpertStreams:
    """Layers whose experts are copied to a GPU in each call of a long chunk.

    Attributes
    ----------
    rows : int
        Minimum rows of such a chunk.
    layers : frozenset of str
        Prefixes of the layers, ``blk.3``.
    rules : tuple of (str, VDeviceSpec)
        Placement rules for the variables of the products, which come before all others.
    reasons : tuple of (str, str)
        Patterns of the rules, and why they exist.
    """

    rows: int = 0
    layers: frozenset[str] = frozenset()
    rules: tuple[tuple[str, VDeviceSpec], ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()

    def suffix_of(self, layer: str, rows: int) -> str:
        """End of the names of a layer's products with experts in a chunk."""
        return STREAMED if rows >= self.rows and layer in self.layers else ""


def check_stream_experts(stream_experts: int | Literal["auto"] | None) -> None:
    """Raise FrontendError unless the argument is a number of rows, None or "auto"."""
    is_number = isinstance(stream_experts, int) and not isinstance(stream_experts, bool) and stream_experts >= 0
    if not (is_number or stream_experts is None or stream_experts == "auto"):
        raise FrontendError(
            f'stream_experts is {stream_experts!r}, expected a number of rows, 0 or None for never, or "auto"'
        )


def plan_streams(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    types: ActivationTypes,
    vdevices: Sequence[tvm.relax.VDevice],
    stream_experts: int | Literal["auto"] | None,
    costs: Callable[[], CostModel],
) -> ExpertStreams:
    """Choose the layers and chunks whose experts are copied.

    Parameters
    ----------
    stream_experts : int, "auto" or None
        Minimum rows of a chunk; "auto": those from which copies are faster by the cost model; 0 or None: never.
    costs : callable
        Makes the cost model of `vdevices`, if it is needed.
    """
    ends = {}
    for layer in range(model.dense_layers, model.layers) if stream_experts and model.experts else ():
        pair = _ends_of(file, f"blk.{layer}", types, is_asked=stream_experts != "auto")
        if pair is not None:
            ends[f"blk.{layer}"] = tuple(vdevice_index(vdevice, vdevices) for vdevice in pair)
    if not ends:
        return ExpertStreams()
    rows = stream_experts if isinstance(stream_experts, int) else 0
    if stream_experts == "auto":
        parts = {(part.name, part.layer): part for part in parts_of(file, model, cache, layouts_of(vdevices))}
        layer, (source, target) = next(iter(ends.items()))
        part = parts["experts", int(layer.removeprefix("blk."))]
        rows = first_streamed_rows(part, source, target, costs(), model.hidden_size * 4) or 0
    if not 0 < rows <= max(cache.chunks):
        return ExpertStreams()
    targets = {layer: target for layer, (_, target) in ends.items()}
    is_same = len(set(targets.values())) == 1
    patterns = {"blk.*" if is_same else layer: vdevices[target] for layer, target in targets.items()}
    rules = tuple((f"{prefix}.ffn_*{STREAMED}*", vdevice) for prefix, vdevice in patterns.items())
    source_name = device_name(vdevices[next(iter(ends.values()))[0]], vdevices)
    reason = f"chunks of {rows:,} rows or more copy experts from {source_name}"
    return ExpertStreams(rows, frozenset(ends), rules, tuple((pattern, reason) for pattern, _ in rules))


def _ends_of(
    file: GgufFile, layer: str, types: ActivationTypes, is_asked: bool
) -> tuple[tvm.relax.VDevice, tvm.relax.VDevice] | None:
    """The CPU that has a layer's experts, and the GPU of its router that can multiply them; None if there are none."""
    names = [f"{layer}.ffn_{part}_exps" for part in ("gate", "up", "down")]
    sources, target = {types.device_of(name) for name in names}, types.device_of(f"{layer}.ffn_gate_inp")
    source = sources.pop()
    if sources or source is None or target is None or not is_cpu(source) or is_cpu(target):
        return None
    dtype = types.dtype_of(f"{layer}.ffn_gate_inp")
    for name in names:
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None or not _is_streamable(tensor, source, target, dtype):
            if is_asked:
                _log.warning(
                    "%s: experts of %s stay on the CPU for all chunks: no kernel for copies of type %s",
                    file.path,
                    layer,
                    tensor and tensor.type,
                )
            return None
    return source, target


def _is_streamable(tensor: FileTensor, source: tvm.relax.VDevice, target: tvm.relax.VDevice, dtype: str) -> bool:
    form, depth, columns = FILE_FORMATS.get(tensor.type.lower()), tensor.shape[-1], tensor.shape[-2]
    panels, fragments = (resolver_or_default(end.target).block_layout(end.target) for end in (source, target))
    return (
        form is not None
        and isinstance(fragments, Fragments)
        and is_streamable(form, panels, fragments)
        and panels is not None
        and panels.fits(form, depth)
        and fragments.fits(form, depth)
        and fragments.fits_matrices(columns)
        and fragments.multiplies(form, dtype)
    )
