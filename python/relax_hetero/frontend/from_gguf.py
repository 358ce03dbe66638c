"""GGUF import: a language model's functions, placed by the names of its layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import tvm

from ..errors import EncoderError, FrontendError
from ..target.backend import backend_of
from ..target.hosts import hosts_of
from ..target.mesh import mesh_positions
from ..target.vdevice import lookup
from ..transform.ir.remarks import with_remarks
from .auto.auto_placement import memory_limits
from .auto.cost_model import CostModel
from .gguf.activation_types import ActivationTypes, check_activations, trained_type
from .gguf.choose_rules import ChosenRules, choose_rules
from .gguf.encoder_graph import encoder_module
from .gguf.expert_rules import SplitRules, split_rules
from .gguf.file import GgufFile
from .gguf.hyperparameters import hyperparameters_of
from .gguf.language_graph import language_module
from .gguf.place_experts import ExpertCountsSource, read_expert_counts
from .gguf.place_layers import LayerProblem
from .gguf.stream_experts import ExpertStreams, check_stream_experts, plan_streams
from .gguf.tensor_parallel import dealt_rules, split_caches, with_split_parameters
from .gguf.weights import Weights
from .language_model_files import read_language_model
from .onnx.placement_rules import rule_pairs
from .paged_cache import PagedCache
from .parallel_devices import parallel_devices
from .place import place
from .placed_import import check_placement, with_rule_reasons

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .onnx.placement_rules import PlacementRules


def from_gguf(
    path: str | os.PathLike[str] | GgufFile,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | Literal["auto"] | None = None,
    batches: Sequence[int] = (1,),
    chunks: Sequence[int] = (128,),
    slots: int | None = None,
    context: int | None = None,
    page_type: str = "float16",
    all_logits: bool = False,
    cost_model: CostModel | None = None,
    memory_limit: MemoryLimit | None = None,
    activation_bits: int = 8,
    activations: str | None = None,
    count_experts: bool = False,
    expert_counts: ExpertCountsSource | None = None,
    stream_experts: int | Literal["auto"] | None = "auto",
    verify_rows: int = 0,
    masks_tokens: bool = False,
    tensor_parallel: int = 1,
) -> tvm.IRModule:
    """Import a language model as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    path : str, path or GgufFile
        GGUF file, folder of Hugging Face, or the result of `read_language_model`.
    vdevices : VDeviceEntry or iterable of VDeviceEntry, optional
        Devices, as in `from_onnx`.
    placement : mapping, list of (pattern, device) pairs, or "auto", optional
        Glob patterns over names of the file's tensors (``blk.3.ffn_down``, ``blk.[0-8].*``, ``output``), in order.
        The cache of a layer is on the device of its ``blk.N.attn``. A list that ends a pattern selects experts:
        ``blk.*.ffn_*_exps[0-31]``, ``[3,7,12-15]``. ``"auto"`` chooses devices for attention, experts and the rest of
        each layer, or groups of equal GPUs that share layers, for the least time per token within `memory_limit`,
        which also covers activations and a GPU's context (`gguf.choose_rules`). A mesh, ``"cuda[0:2]"``, shares the
        work of each layer: heads of attention with their part of the cache, columns and rows of feed-forward networks,
        logits, and whole experts.
    batches : sequence of int
        Rows of the functions ``decode_B``: one token of each of B sequences.
    chunks : sequence of int
        Rows of the functions ``prefill_C``: consecutive tokens of one sequence.
    slots : int, optional
        Number of sequences in the cache; by default the largest batch.
    context : int, optional
        Maximum number of positions of a sequence; by default the model's training context.
    page_type : str
        Element type of the cache: "float16", "bfloat16", "float32" or "int8".
    all_logits : bool
        True if ``prefill_C`` returns the logits of all its rows rather than of one.
    cost_model, memory_limit
        See `from_onnx`.
    activation_bits : int
        Precision of activations in products with block-quantized weights on CPUs (`R.hetero.dequantize_blocks`): 8 for
        8-bit integers with a scale for each 32, as in llama.cpp, or 16. GPUs multiply floats.
    activations : str, optional
        Element type of the operands of products and attention: "float16", "bfloat16" or "float32". The default on GPUs
        is the 16-bit float that the model was trained in (of the file's unquantized matrices, else of its
        architecture), on CPUs float32. Residual sums and norms are always float32.
    count_experts : bool
        Whether functions count the tokens that choose each expert of a mixture.
    expert_counts : str, path or mapping from int to sequence or array of numbers, optional
        Tokens that chose each expert, by the layer's number, or a file of ``relax-hetero serve --count-experts``: if
        not all experts fit the fastest device, ``placement="auto"`` puts the most frequent ones there. By default all
        are equally frequent.
    stream_experts : int, "auto" or None
        Minimum rows of ``prefill_C`` functions that multiply the experts of a CPU on the GPU that has the rest of their
        layer: each call copies them there, a layer at a time. ``"auto"``: from where copies are faster by the cost
        model, with measured figures if these devices were measured before; 0 or None: never.
    verify_rows : int
        Rows of a function ``verify_R``: a decode function that may have consecutive tokens of a sequence, as drafts
        need. On CPUs all decode functions may. 0: none.
    masks_tokens : bool
        Whether there is a function ``masked_tokens`` that takes logits and bits of allowed tokens
        (`frontend.greedy_tokens.masked_tokens`), for structured output on GPUs.
    tensor_parallel : int
        Number of equal devices that share the work of every layer: ``placement={"*": mesh}`` of the first ones of
        `vdevices`, which may be one kind that stands for all of them.

    Returns
    -------
    mod : tvm.IRModule
        Functions with the parameters ``tokens``, ``positions`` and ``sequences``, (rows,) each, ``last`` (prefill: the
        row to return logits of, (1,)), the page tables ``table_full`` and ``table_window``, (slots, pages) each, and
        the pages of each layer's cache, ``pages_N``; all integers are int32. They return logits, (rows or 1,
        vocabulary) of float32, decode functions then ``greedy_tokens``, (rows,), which index the largest logits (-1 if
        one is not finite), and the pages, written in place if the caller donates them (``rh.compile(donate=...)``).
        For layers over a mesh, ``pages_N`` are those of each layer's first device, then those of its second, and so on,
        and GPUs after the first one take a copy of the integers (``tokens@1``). Logits over a mesh are as many results
        (``logits``, ``logits@1``), each with the columns of one device, and GPUs return a copy each of the tokens.
        With `count_experts`, counters follow the pages, ``expert_counts_N``, (experts,) of int32 for each layer with
        experts; each call adds to them in place, and returns them last.
        Weights are views of the mapped file where possible, which must not change until the module is compiled.
        If `vdevices` are given, calls choose the number of pages; else it is what all sequences can fill.

    Raises
    ------
    FrontendError
        If the file cannot be read, its architecture or a tensor's type is unknown, a tensor is missing, unexpected or
        of another shape, a pattern matches nothing, or `activations` or `stream_experts` is invalid.
    EncodingError
        If `activation_bits` is invalid.
    VDeviceError
        If a device string is not in `vdevices`, or `cost_model` is one of other devices.
    PlacementError
        If no split over the devices fits `memory_limit`.
    """
    vdevices, placement = parallel_devices(vdevices, placement, tensor_parallel=tensor_parallel)
    devices = check_placement(vdevices, placement, cost_model, "latency", memory_limit)
    check_activations(activations)
    check_stream_experts(stream_experts)
    file = read_language_model(path)
    model = hyperparameters_of(file)
    if not model.is_causal:
        raise EncoderError(
            f"{file.path}: {model.name} encodes texts, expected a model that generates them; use rh.llm.Encoder"
        )
    if count_experts and not model.experts:
        raise FrontendError(f"{file.path}: the model has no experts, expected a mixture of experts for count_experts")
    cache = PagedCache(
        tuple(batches),
        tuple(chunks),
        slots,
        context or model.context,
        page_type,
        all_logits,
        devices is not None,
        verify_rows,
        masks_tokens,
    )
    if isinstance(placement, str):
        assert devices is not None, "check_placement refuses placement without devices"
        costs, limits = cost_model or CostModel.measured(devices), memory_limits(memory_limit, devices)
        costs.check(len(devices))
        counts = read_expert_counts(expert_counts, model)
        problem = LayerProblem(file, model, cache, devices, costs, limits, counts)
        placement = choose_rules(problem, may_share=not count_experts)
    elif expert_counts is not None:
        raise FrontendError('expert_counts are for placement="auto", found other rules; expected one or the other')
    meshes = [mesh_positions(lookup(device, devices)) for _, device in rule_pairs(placement or {}) if devices]
    if any(meshes) and count_experts:
        raise FrontendError("found count_experts and a mesh of devices in placement, expected one of them")
    split, streams = split_rules(dealt_rules(placement or {}, model, devices), model, devices), ExpertStreams()
    types_of = partial(ActivationTypes, activations, trained_type(file, model), vdevices=devices or ())
    if devices is not None and not any(meshes):
        streams = plan_streams(
            file, model, cache, types_of(split.rules), split.groups, devices, stream_experts,
            lambda: cost_model or CostModel.measured(devices, may_measure=False), all_logits or count_experts,
        )  # fmt: skip
    types, weights = types_of([*streams.rules, *split.rules]), Weights(file, model)
    mod = language_module(model, weights, cache, activation_bits, types, split.groups, streams, count_experts)
    weights.check_all_read()
    if devices is None:
        return mod
    if any(meshes):
        split_caches(model, split.rules, devices)  # checks heads
    is_on_gpus = not hosts_of(devices) and all(backend_of(device.target).records_graphs for device in devices)
    if any(meshes) or (is_on_gpus and not count_experts):
        mod = with_split_parameters(mod, model, types, devices)
    return _placed(mod, devices, placement or {}, split, streams)


def _placed(
    mod: tvm.IRModule,
    devices: list[tvm.relax.VDevice],
    placement: PlacementRules,
    split: SplitRules,
    streams: ExpertStreams,
) -> tvm.IRModule:
    """Place a module by rules, and give it the reasons of the generated ones."""
    chosen = placement if isinstance(placement, ChosenRules) else None
    reasons = {**split.reasons(chosen.reasons if chosen else {}), **dict(streams.reasons)}
    mod = with_rule_reasons(place(mod, [*streams.rules, *split.rules], devices), reasons)
    return mod if chosen is None else with_remarks(mod, placement_estimate=chosen.estimate)


def encoder_from_gguf(
    # Those without a comment are as for `from_gguf`.
    path: str | os.PathLike[str] | GgufFile,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | None = None,  # as for `from_gguf`, without lists of experts
    lengths: Sequence[int] = (512,),  # maximum tokens of a text of each function
    activation_bits: int = 8,
    activations: str | None = None,
) -> tvm.IRModule:
    """Import a model of a GGUF file as functions ``encode_C`` that return the embedding of a text.

    See `gguf.encoder_graph.encoder_module`. Raises FrontendError as for `from_gguf`, or if a length exceeds the
    context, or the architecture has an attention that only its kernel with a cache computes.
    """
    if isinstance(placement, str):
        raise FrontendError(f"placement is {placement!r}, expected rules: encoders are not placed by cost")
    devices = check_placement(vdevices, placement, None, "latency", None)
    check_activations(activations)
    file = read_language_model(path)
    model = hyperparameters_of(file)
    if not lengths or not all(type(length) is int and 0 < length <= model.context for length in lengths):
        raise FrontendError(f"lengths are {lengths!r}, expected whole numbers from 1 to the context, {model.context:,}")
    if model.latent or model.attention_softcap or "attn_sinks.weight" in model.architecture.required:
        raise FrontendError(f"{file.path}: {model.name} has an attention that rh.llm.Encoder does not compute")
    types = ActivationTypes(activations, trained_type(file, model), placement or {}, devices or ())
    weights = Weights(file, model)
    mod = encoder_module(model, weights, lengths, activation_bits, types)
    weights.check_all_read(unused=("output.weight", "output.bias"))
    return mod if devices is None else place(mod, placement or {}, devices)
