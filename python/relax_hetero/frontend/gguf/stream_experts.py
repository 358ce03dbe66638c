"""Long chunks of prompts multiply the experts of a CPU on the GPU that has the rest of their layer.

Many tokens meet all experts of a layer. Copying these takes less time than multiplying by them on the CPU then. In a
chunk of at least so many rows, the experts' products are on the GPU of the router or, if that is on the CPU, too, of
attention, and each call copies the matrices that the CPU keeps (`R.hetero.stream`). The names of the products'
variables end in `STREAMED`, for which rules are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import tvm

from ...encoding.block_formats import FILE_FORMATS
from ...encoding.block_weights import Fragments, is_streamable
from ...encoding.resolver import resolver_or_default
from ...errors import FrontendError
from ...target.hosts import host_of
from ...target.vdevice import VDeviceSpec, device_name, is_cpu, vdevice_index
from ..auto.cost_model import CostModel
from ..paged_cache import PagedCache
from .activation_types import ActivationTypes
from .expert_rules import MATRICES, ExpertGroup
from .file import FileTensor, GgufFile
from .hyperparameters import Hyperparameters
from .part_costs import first_streamed_rows
from .place_layers import ModelParts, layouts_of

STREAMED = ".streamed"  # end of the names of variables

_log = logging.getLogger("relax_hetero")


@dataclass(frozen=True)
class ExpertStreams:
    """Layers whose experts are copied to a GPU in each call of a long chunk."""

    rows: int = 0  # minimum rows of such a chunk
    layers: frozenset[str] = frozenset()  # prefixes of the layers, ``blk.3``, with the suffix of a group of experts
    # Placement rules for the variables of the products, which come before all others.
    rules: tuple[tuple[str, VDeviceSpec], ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # patterns of the rules, and why they exist

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
    groups: Mapping[str, Sequence[ExpertGroup]],  # experts by device of each layer that is split, by its prefix
    vdevices: Sequence[tvm.relax.VDevice],
    # Minimum rows of a chunk; "auto": those from which copies are faster by the cost model; 0 or None: never.
    stream_experts: int | Literal["auto"] | None,
    costs: Callable[[], CostModel],  # makes the cost model of `vdevices`, if it is needed
    # True if all layers compute all rows of a chunk; others compute one (`Hyperparameters.full_layers`).
    all_rows: bool,
) -> ExpertStreams:
    """Choose the layers and chunks whose experts are copied."""
    ends: dict[tuple[int, str], list[int]] = {}
    for layer in range(model.dense_layers, model.full_layers(all_rows)) if stream_experts and model.experts else ():
        prefix = f"blk.{layer}"
        for suffix in [group.suffix for group in groups.get(prefix, ())] or [""]:
            pair = _ends_of(file, prefix, suffix, types, is_asked=stream_experts != "auto")
            if pair is not None:
                ends[layer, suffix] = [vdevice_index(vdevice, vdevices) for vdevice in pair]
    if not ends:
        return ExpertStreams()
    first = min(ends)
    source, target = ends[first]
    if isinstance(stream_experts, int):
        rows = stream_experts
    else:
        parts = {(part.name, part.layer): part for part in ModelParts(file, model, cache, layouts_of(vdevices)).all()}
        rows = first_streamed_rows(parts["experts", first[0]], source, target, costs(), model.hidden_size * 4) or 0
    if not 0 < rows <= max(cache.chunks):
        return ExpertStreams()
    is_same = len({target for _, target in ends.values()}) == 1
    patterns = {"*" if is_same else str(layer): vdevices[target] for (layer, _), (_, target) in ends.items()}
    rules = tuple((f"blk.{layer}.ffn_*{STREAMED}*", vdevice) for layer, vdevice in patterns.items())
    reason = f"chunks of {rows:,} rows or more copy experts from {device_name(vdevices[source], vdevices)}"
    layers = frozenset(f"blk.{layer}{suffix}" for layer, suffix in ends)
    return ExpertStreams(rows, layers, rules, tuple((pattern, reason) for pattern, _ in rules))


def _ends_of(
    file: GgufFile, layer: str, suffix: str, types: ActivationTypes, is_asked: bool
) -> tuple[tvm.relax.VDevice, tvm.relax.VDevice] | None:
    """The CPU that has a layer's experts, and the GPU of its router or attention; None if that cannot multiply them."""
    names = [f"{layer}.{matrix}" for matrix in MATRICES]
    sources = {types.device_of(f"{name}{suffix}") for name in names}
    source = sources.pop()
    if sources or source is None or not is_cpu(source):
        return None
    rest = [f"{layer}.ffn_gate_inp", f"{layer}.attn"]
    ends = [(types.device_of(name), types.dtype_of(name)) for name in rest]
    target, dtype = next((end for end in ends if end[0] is not None and not is_cpu(end[0])), (None, ""))
    if target is None or host_of(target) != host_of(source):
        return None
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
