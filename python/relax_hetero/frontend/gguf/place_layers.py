"""``placement="auto"`` of a language model: assignment of layers, or parts of layers, to devices.

The time of a token is the sum of reading weights and cache, launching kernels, and transferring a row of activations
between devices, which work one after the other (`part_costs`). The plan with the least time that fits is chosen
(`plan_layers`): all on the fastest device; consecutive layers on each device, as in llama.cpp; or experts, of which a
token reads a few, on another device than the rest (KTransformers); or anything between.

The bytes of a tensor differ by device (`resident_bytes`). A CPU keeps all weights in the file's format. A GPU stores
the 6-bit scales of K formats in bytes, and keeps unquantized matrices as 16-bit floats. Matrices of heads
(`attn_k_b`, `attn_v_b`) are no experts. Besides weights and cache, a device needs memory for activations, and a GPU for
its context and code (`working_bytes`), and beside a CPU for copies of experts (`stream_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import tvm

from ...encoding.block_formats import BlockFormat
from ...encoding.block_panels import Panels
from ...encoding.block_weights import BlockLayout, Fragments
from ...encoding.pages import PAGE
from ...encoding.resolver import resolver_or_default
from ...errors import PlacementError
from ...target.product_rates import QUANTIZED
from ...target.vdevice import device_name, is_cpu
from ..auto.cost_model import CostModel
from ..auto.placement_reasons import choice, memory_limited
from ..paged_cache import PagedCache
from .expert_rules import ExpertGroup
from .file import FileTensor, GgufFile
from .hyperparameters import Hyperparameters
from .part_costs import Part, Step, resident_bytes_of
from .place_experts import ExpertLayer, ExpertPlan, expert_pairs, place_experts
from .plan_layers import LayerPlan, PlanSearch
from .weights import format_of, is_plain

_MAX_SPLIT_TIME = 0.99
"""Maximum time of a plan with experts of layers on several devices, as a fraction of that of one with whole layers."""

COPIED_EXPERTS = 3
"""Number of times that a chosen expert's matrix is read or written on a device that copies it for each row."""


def layouts_of(vdevices: Sequence[tvm.relax.VDevice]) -> list[BlockLayout | None]:
    """Layout of block-quantized weights on each device; None if it lacks kernels for them."""
    return [resolver_or_default(vdevice.target).block_layout(vdevice.target) for vdevice in vdevices]


def resident_bytes(tensor: FileTensor, layout: BlockLayout | None) -> float:
    """Bytes of a tensor on a device with a layout."""
    shape, form = tensor.shape, _kept_format(tensor, layout)
    if form is None or layout is None:
        return 4.0 * prod(shape)
    if isinstance(layout, Panels):
        return float(prod(layout.shapes(shape[-2], form, shape[-1], prod(shape[:-2]))[0]))
    if form.is_plain and (len(shape) == 2 or _is_of_heads(tensor)):
        return 2.0 * prod(shape)
    return float(layout.packed_bytes(shape[-2], form, shape[-1], prod(shape[:-2])))


def _is_of_heads(tensor: FileTensor) -> bool:
    return ".attn_" in tensor.name and len(tensor.shape) == 3


def _kept_format(tensor: FileTensor, layout: BlockLayout | None) -> BlockFormat | None:
    """Format of a tensor on a device; None for float32, as rows of embeddings are gathered, and in routers."""
    is_float32 = tensor.name.endswith(("token_embd.weight", "ffn_gate_inp.weight"))
    is_half = isinstance(layout, Fragments) and tensor.type == "F32" and not is_float32
    form, shape = format_of("F16" if is_half else tensor.type), tensor.shape
    if form is None or len(shape) < 2 or layout is None or not layout.fits(form, shape[-1]):
        return None
    return form if len(shape) == 2 or layout.fits_matrices(shape[-2]) else None


def bytes_read(tensor: FileTensor, layout: BlockLayout | None) -> float:
    """Bytes of a tensor that many rows read."""
    is_copied = len(tensor.shape) > 2 and _kept_format(tensor, layout) is None and not _is_of_heads(tensor)
    return (COPIED_EXPERTS if is_copied else 1) * resident_bytes(tensor, layout)


CONTEXT_BYTES = 512 << 20  # memory that a process takes on a GPU for its context and code


def working_bytes(model: Hyperparameters, cache: PagedCache, vdevice: tvm.relax.VDevice) -> int:
    """Estimate of the memory that a device needs besides weights and cache.

    Rows of the largest call have two copies of the residual, of attention's operands and result, and of the widest
    feed-forward values; logits are float32.
    """
    rows = max(*cache.batches, *cache.chunks)
    heads = zip(model.kv_heads, model.head_sizes, strict=True)
    attention = max((2 * model.heads + 2 * count) * size for count, size in heads)
    pairs = model.experts_used * (model.expert_feed_forward + model.hidden_size)
    widest = max(attention, *model.feed_forward, pairs + model.shared_feed_forward)
    logit_rows = rows if cache.all_logits else max(cache.batches)
    arena = 4 * (rows * 2 * (model.hidden_size + widest) + logit_rows * model.vocabulary)
    return arena if is_cpu(vdevice) else arena + CONTEXT_BYTES


def _bytes_of_copies(file: GgufFile) -> int:
    """Memory for copies of a CPU's experts: three matrices in the order of the CPU, and two in that of the GPU."""
    return max((5 * tensor.nbytes for tensor in file.tensors.values() if "_exps.weight" in tensor.name), default=0)


class LayerProblem:
    """Placement of a model's layers on some devices."""

    def __init__(
        self,
        file: GgufFile,
        model: Hyperparameters,
        cache: PagedCache,
        vdevices: Sequence[tvm.relax.VDevice],
        costs: CostModel,  # cost model of these devices
        limits: Mapping[int, int],  # index of a device -> maximum bytes of its memory; other devices have no limit
        # Layer -> counts of its experts (`place_experts.read_expert_counts`).
        expert_counts: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.file, self.model, self.cache, self.vdevices = file, model, cache, list(vdevices)
        self._layouts, self._expert_counts = layouts_of(vdevices), expert_counts or {}
        parts = self.parts()
        # Parts of the model, and the search for plans.
        self.search = PlanSearch(parts, costs, model.hidden_size * 4, Step(1, cache.context // 2))
        self.limits = dict(limits)
        # Bytes that each device needs besides weights and cache.
        self.working = [working_bytes(model, cache, vdevice) for vdevice in vdevices]
        if any(map(is_cpu, vdevices)):
            copies = _bytes_of_copies(file)
            self.working = [
                size + copies * (not is_cpu(vdevice)) for size, vdevice in zip(self.working, vdevices, strict=True)
            ]
        self.names = [device_name(vdevice, vdevices) for vdevice in vdevices]  # names of the devices

    def parts(
        self,
        device_of: Callable[[str], object] = lambda _: None,
        groups: Mapping[str, Sequence[ExpertGroup]] | None = None,
    ) -> list[Part]:
        """The parts in execution order, as `ModelParts`."""
        counts = self._expert_counts
        return ModelParts(self.file, self.model, self.cache, self._layouts, device_of, groups, counts).all()

    def free(self, limits: Mapping[int, float] | None = None) -> dict[int, float]:
        """Bytes for weights and cache on devices with limits."""
        limits = self.limits if limits is None else limits
        return {device: limit - self.working[device] for device, limit in limits.items()}

    def best(self, limits: Mapping[int, float] | None = None) -> LayerPlan | ExpertPlan:
        """The plan with the least time per token, with other limits if given.

        Raises PlacementError if the model does not fit.
        """
        free = self.free(limits)
        plan, split = self.search.best(free), self._split_experts(free)
        if split is not None and (plan is None or split.seconds < _MAX_SPLIT_TIME * plan.seconds):
            return split
        if plan is None:
            raise self.misfit()
        return plan

    def fastest_by_limit(self, device: int, sizes: Sequence[float]) -> list[float]:
        """Seconds of the best plan for each number of bytes of weights and cache on a device; infinite if none fits."""
        free, found = self.free(), []
        for size, seconds in zip(sizes, self.search.fastest_by_limit(device, sizes, free), strict=True):
            split = self._split_experts({**free, device: size})
            is_split = split is not None and split.seconds < _MAX_SPLIT_TIME * seconds
            found.append(split.seconds if split is not None and is_split else seconds)
        return found

    def rules(self, plan: LayerPlan | ExpertPlan) -> list[tuple[str, str, str]]:
        """Patterns of a plan in order, the names of their devices, and the reasons."""
        if isinstance(plan, ExpertPlan):
            return plan.rules(self.names, self.limits)
        ordered: list[tuple[int, str, str, str]] = []
        for part, device in zip(self.search.parts, plan.devices, strict=True):
            reason = self.reason(part, device, plan)
            for rank, pattern in _patterns(part, self.model):
                ordered.append((rank, pattern, self.names[device], reason))
        # The first match decides.
        return [rule[1:] for rule in sorted(ordered, key=lambda rule: rule[0])]

    def _split_experts(self, free: Mapping[int, float]) -> ExpertPlan | None:
        """The best plan with experts of layers on several devices, and all else on one; None if there is none."""
        parts, costs, step, devices = self.search.parts, self.search.costs, self.search.step, range(len(self.names))
        dense = [part for part in parts if part.name != "experts"]
        dense_costs = [(bytes_on(dense, i), sum(part.seconds(i, costs, step) for part in dense)) for i in devices]
        layers = []
        for part in parts:
            if part.name == "experts":
                resident = tuple(size / self.model.experts for size in part.resident_bytes)
                seconds = tuple(part.work_seconds(i, costs, step) / self.model.experts_used for i in devices)
                pairs = expert_pairs(self.model, self._expert_counts.get(part.layer))
                layers.append(ExpertLayer(part.layer, resident, seconds, pairs))
        plan = place_experts(layers, costs, free, dense_costs, self.search.row_bytes) if layers else None
        return plan if plan is not None and plan.has_split_layers else None

    def estimate(self, seconds: float, busy_seconds: Mapping[str, float]) -> dict[str, Any]:
        """The estimate of a decoded token in the form of `AutoPlacement.to_json`.

        `busy_seconds`: name of a device -> time that it works.
        """
        alone = {name: self.search.plan((i,) * len(self.search.parts)).seconds for i, name in enumerate(self.names)}
        return {
            "objective": "latency",
            "seconds": seconds,
            "busy_seconds": busy_seconds,
            "single_device_seconds": {name: time for name, time in alone.items() if math.isfinite(time)},
            "assumed_sizes": {},
            "figures": self.search.costs.figures,
        }

    def misfit(self) -> PlacementError:
        """The error of a model that does not fit; the text has the required bytes."""
        needs = ", ".join(
            f"{bytes_on(self.search.parts, device):,.0f} bytes on {self.names[device]}, where the limit is {limit:,} "
            f"and other memory takes {self.working[device]:,}"
            for device, limit in self.limits.items()
        )
        return PlacementError(
            f"{self.file.path}: no split by layers or by parts fits the limits of the devices; all weights and the "
            f"cache would take {needs}. Raise memory_limit, or take a smaller context or fewer slots"
        )

    def reason(self, part: Part, device: int, plan: LayerPlan) -> str:
        """The reason why a part is on its device."""
        names = self.names
        seconds = [part.seconds(index, self.search.costs, self.search.step) for index in range(len(names))]
        faster = sorted((i for i in range(len(names)) if seconds[i] < seconds[device]), key=seconds.__getitem__)
        if not faster:
            return choice("no device is faster", seconds, device, names)
        free = self.free()
        for candidate in faster:
            left = free.get(candidate, math.inf) - plan.resident_bytes.get(candidate, 0.0)
            if part.resident_bytes[candidate] > left:
                needed = part.resident_bytes[candidate]
                limit = memory_limited(names[candidate], self.limits[candidate], left, needed)
                return choice(f"the memory of {names[candidate]} is too small", seconds, device, names, limit)
        return choice("staying saves transfers of activations", seconds, device, names)


def _patterns(part: Part, model: Hyperparameters) -> list[tuple[int, str]]:
    """Patterns that match the names of a part's variables, none of them unused, and their ranks among all patterns."""
    prefix = f"blk.{part.layer}."
    if part.name == "embd":
        return [(0, "token_embd*")]
    if part.name == "inputs":  # before the others
        return [(-1, f"token_embd.{name}*") for name in ("layers", *(["altup"] if model.streams else []))]
    if part.name == "output":
        return [(0, "output*")]
    if part.name == "experts":  # all values of chosen pairs of a token and an expert
        return [(1, f"{prefix}ffn_*_exps*")]
    if part.name in ("ffn", "router"):
        return [(2, f"{prefix}*")]
    names = ["attn*", *(["ssm*"] if model.has_delta_rule(part.layer) else [])]
    names += ["post_attention*"] if model.architecture.norms.attention_out else []
    readers = [layer for layer in range(model.layers) if model.cache_index(layer) == part.layer]
    return [(0, f"blk.{layer}.{name}") for layer in readers for name in names]


_INPUTS = (("per_layer", "altup_proj"), ("altup_unembd",))
"""Beginnings of the names of tensors of the inputs of layers, and of those of the output besides its matrix."""


_AFTER_ATTENTION = ("attn_output", "attn_gate", "ssm_out")
"""Matrices of attention, or of a delta rule, that its results are multiplied by, or their gates."""


class ModelParts:
    """The parts of a model."""

    def __init__(
        self,
        file: GgufFile,
        model: Hyperparameters,
        cache: PagedCache,
        layouts: Sequence[BlockLayout | None],  # layout of block-quantized weights on each device
        # Device of a variable by its name: a part whose matrices are on several devices is several.
        device_of: Callable[[str], object] = lambda _: None,
        # Experts by device of each layer that is split, by its prefix.
        groups: Mapping[str, Sequence[ExpertGroup]] | None = None,
        expert_counts: Mapping[int, Sequence[float]] | None = None,  # layer -> counts of its experts
    ) -> None:
        self._file, self._model, self._cache, self._layouts = file, model, cache, layouts
        self._device_of, self._groups, self._expert_counts = device_of, groups or {}, expert_counts or {}
        self._full_layers = model.full_layers(cache.all_logits)

    def all(self) -> list[Part]:
        """The parts in execution order."""
        tensors = self._file.tensors
        table, is_tied = tensors["token_embd.weight"], "output.weight" not in tensors
        output = table.renamed("output.weight") if is_tied else tensors["output.weight"]
        layers = [part for layer in range(self._model.layers) for part in self._of_layer(layer)]
        first, last = ([tensors[name] for name in tensors if name.startswith(start)] for start in _INPUTS)
        inputs = [self._inputs(first)] if first else []
        return [self._embeddings(table, is_tied), *inputs, *layers, self._part("output", 0, "output", [output, *last])]

    def _inputs(self, tensors: Sequence[FileTensor]) -> Part:
        """Embeddings of each layer, of whose table a row is read, and products of the embeddings."""
        part = self._part("inputs", -1, "token_embd.layers", tensors)
        read = [tensor for tensor in tensors if "token_embd" not in tensor.name]
        products = self._part("inputs", -1, "token_embd.layers", read)
        return replace(part, weights_read=products.weights_read, products=products.products)

    def _embeddings(self, table: FileTensor, is_tied: bool) -> Part:
        """The table of embeddings, of which a row is read, which takes no time."""
        is_plain_table = table.type == "F32" or is_plain(table.type)  # which GPUs multiply in a layout of its own
        is_shared = tuple(
            is_tied and (isinstance(layout, Panels) or (layout is not None and not is_plain_table))
            for layout in self._layouts
        )
        part = self._part("embd", 0, "token_embd", [table])
        return replace(part, weights_read=(0.0,) * len(self._layouts), products={}, shared=is_shared)

    def _of_layer(self, layer: int) -> list[Part]:
        model, prefix = self._model, f"blk.{layer}"
        tensors = self._tensors_of(layer)
        attention = [tensor for tensor in tensors if self._is_attention(tensor)]
        experts = [tensor for tensor in tensors if "_exps." in tensor.name]
        rest = [tensor for tensor in tensors if tensor not in attention and tensor not in experts]
        parts = self._attention(layer) if model.cache_index(layer) == layer else []
        if not experts:
            return [*parts, *self._by_device("ffn", layer, f"{prefix}.ffn_down", rest)]
        router = self._by_device("router", layer, f"{prefix}.ffn_gate_inp", rest)
        return [*parts, *router, *self._experts(layer, experts)]

    def _attention(self, layer: int) -> list[Part]:
        """Attention of a layer, and of those that read its cache, which have to be on the same device."""
        model, cache, own = self._model, self._cache, self._model.caches[layer]
        readers = [other for other in range(model.layers) if model.cache_index(other) == layer]
        tensors = [tensor for other in readers for tensor in self._tensors_of(other) if self._is_attention(tensor)]
        unit, scores = own.unit_bytes(cache.page_type), 2.0 * model.heads * model.head_sizes[layer] * len(readers)
        cached = float((cache.sequences if own.state else cache.pages(own.window)) * unit)
        first, *others = self._by_device("attn", layer, f"blk.{layer}.attn", tensors, cached=cached)
        # A state is read and written by each call, whatever its rows.
        size, window = (2.0 * unit, 1) if own.state else (unit / PAGE * len(readers), own.window)
        last_row = first.last_row[0], sum(reader > self._full_layers for reader in readers) / len(readers)
        return [replace(first, cache_bytes=size, window=window, scores=scores, last_row=last_row), *others]

    def _tensors_of(self, layer: int) -> list[FileTensor]:
        return [tensor for name, tensor in self._file.tensors.items() if name.startswith(f"blk.{layer}.")]

    def _is_attention(self, tensor: FileTensor) -> bool:
        has_post_norm = self._model.architecture.norms.attention_out
        starts = ("attn", "ssm", *(["post_attention"] if has_post_norm else []))
        return tensor.name.split(".")[2].startswith(starts)

    def _experts(self, layer: int, tensors: Sequence[FileTensor]) -> Iterable[Part]:
        model, prefix = self._model, f"blk.{layer}"
        down, share = f"{prefix}.ffn_down_exps", model.experts_used / model.experts
        groups, counts = self._groups.get(prefix, ()), self._expert_counts.get(layer)
        pairs = expert_pairs(model, counts)
        if not groups:
            parts = self._by_device("experts", layer, down, tensors, share)
            return [replace(part, pairs=pairs) for part in parts] if counts else parts
        whole = self._part("experts", layer, down, tensors, share)
        return [whole.some_experts(group.experts, pairs, f"{down}{group.suffix}") for group in groups]

    def _by_device(
        self, name: str, layer: int, main: str, tensors: Sequence[FileTensor], share: float = 1.0, cached: float = 0.0
    ) -> Iterator[Part]:
        """The part with the matrices on the device of variable `main`, then one for each other device."""
        own: dict[object, tuple[str, list[FileTensor]]] = {self._device_of(main): (main, [])}
        for tensor in tensors:
            variable = tensor.name.rpartition(".")[0] if len(tensor.shape) > 1 else main
            own.setdefault(self._device_of(variable), (variable, []))[1].append(tensor)
        for variable, matrices in own.values():
            yield self._part(name, layer, variable, matrices, share, cached if variable == main else 0.0)

    def _part(
        self,
        name: str,
        layer: int,
        variable: str,
        tensors: Sequence[FileTensor],
        share: float = 1.0,
        cached: float = 0.0,
    ) -> Part:
        products: dict[str, float] = {}
        of_last_row = of_all = 0
        for tensor in tensors:
            if len(tensor.shape) > 1:
                kind, count = _PRODUCT_TYPES.get(tensor.type, QUANTIZED), prod(tensor.shape)
                products[kind] = products.get(kind, 0.0) + share * count
                of_all += count
                of_last_row += count * self._is_of_last_row(name, tensor)
        return Part(
            name,
            layer,
            tuple(cached + sum(resident_bytes(tensor, layout) for tensor in tensors) for layout in self._layouts),
            tuple(sum(bytes_read(tensor, layout) for tensor in tensors) for layout in self._layouts),
            share,
            products,
            resident_cache=cached,
            variable=variable,
            last_row=(of_last_row / max(of_all, 1), 0.0),
        )

    def _is_of_last_row(self, part: str, tensor: FileTensor) -> bool:
        """Return whether a prefill multiplies one row by a matrix."""
        if part in ("embd", "inputs", "output"):
            return part == "output" and not self._cache.all_logits
        _, layer, name, *_ = tensor.name.split(".")
        is_after = not self._is_attention(tensor) or name in _AFTER_ATTENTION
        return int(layer) > self._full_layers or (int(layer) == self._full_layers and is_after)


_PRODUCT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def bytes_on(parts: Sequence[Part], device: int) -> float:
    """Bytes of all parts on one device."""
    return resident_bytes_of(parts, (device,) * len(parts))[device]
