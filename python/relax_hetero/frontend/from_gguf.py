"""GGUF import: a language model's functions, placed by the names of its layers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tvm

from ..errors import FrontendError
from .auto.auto_placement import memory_limits
from .auto.cost_model import CostModel
from .gguf.activations import ActivationTypes, check_activations, trained_type
from .gguf.file import GgufFile, read_gguf
from .gguf.hyperparameters import Hyperparameters, read_hyperparameters
from .gguf.language_graph import language_module
from .gguf.place_layers import place_layers
from .gguf.weights import Weights
from .onnx.placement_rules import rule_pairs
from .paged_cache import PagedCache
from .place import place
from .placed_import import check_placement, with_auto_reasons

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
) -> tvm.IRModule:
    """Import a language model of a GGUF file as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    path : str, path or GgufFile
        File, or what `read_gguf` returned for it.
    vdevices : VDeviceEntry or iterable of VDeviceEntry, optional
        Devices as `from_onnx` takes them.
    placement : mapping, list of (pattern, device) pairs, or "auto", optional
        Glob patterns over names of the file's tensors (``blk.3.ffn_down``, ``blk.[0-8].*``, ``output``), in order.
        The cache of a layer is where its ``blk.N.attn`` is. ``"auto"`` splits the model by layers, or attention from
        feed-forward parts, for the least time of a token within `memory_limit` (`gguf.place_layers`).
    batches : sequence of int
        Rows of the functions ``decode_B``: one token of each of B sequences.
    chunks : sequence of int
        Rows of the functions ``prefill_C``: tokens that follow each other in one sequence.
    slots : int, optional
        Sequences that the cache holds at once; by default as many as the largest batch.
    context : int, optional
        Most positions of a sequence; by default what the model was trained for.
    page_type : str
        Element type of the cache: "float16", "float32" or "int8".
    all_logits : bool
        Whether ``prefill_C`` gives the logits of all its rows, and not of one.
    cost_model, memory_limit
        As `from_onnx` takes them.
    activation_bits : int
        How exact products with weights in blocks are, as of `R.hetero.dequantize_blocks`: 8 (numbers become integers of
        8 bits with a scale for each 32, as llama.cpp rounds them) or 16. CPUs do so; GPUs multiply floats.
    activations : str, optional
        Element type of what products and attention read: "float16", "bfloat16" or "float32". By default on GPUs the
        16-bit float that the model was trained in (of the file's plain matrices, else of its architecture), on CPUs
        float32. Sums between layers and norms are float32 in all cases.

    Returns
    -------
    mod : tvm.IRModule
        Functions of ``tokens``, ``positions`` and ``sequences``, (rows,) each, ``last`` (prefill: the row whose logits
        are wanted, (1,)), the tables of pages, ``table_full`` and ``table_window``, (slots, pages) each, and the pages
        of each layer's cache, ``pages_N``; all integers are int32. They give logits, (rows or 1, vocabulary) of
        float32, and the pages, written in place where the caller donates them (``rh.compile(donate=...)``).

    Raises
    ------
    FrontendError
        If the file cannot be read, its architecture or a tensor's type is not known, a tensor is missing, has another
        shape or is not one of the architecture's, a pattern matches nothing, or `activations` is none of these types.
    EncodingError
        For other `activation_bits`.
    VDeviceError
        If a device string names nothing in `vdevices`.
    PlacementError
        If no split over the devices fits `memory_limit`.
    """
    devices = check_placement(vdevices, placement, cost_model, "latency", memory_limit)
    check_activations(activations)
    file = path if isinstance(path, GgufFile) else read_gguf(path)
    model = hyperparameters_of(file)
    cache = PagedCache(tuple(batches), tuple(chunks), slots, context or model.context, page_type, all_logits)
    reasons: dict[str, str] = {}
    estimate: dict[str, Any] | None = None
    if isinstance(placement, str):
        assert devices is not None, "check_placement refuses placement without devices"
        costs = cost_model or CostModel.measured(devices)
        limits = memory_limits(memory_limit, devices)
        placement, reasons, estimate = place_layers(file, model, cache, devices, costs, limits)
    rules = rule_pairs(placement or {})
    types = ActivationTypes(activations, trained_type(file, model), rules, devices or ())
    weights = Weights(file, model.architecture)
    mod = language_module(model, weights, cache, activation_bits, types)
    weights.check_all_read()
    if devices is not None:
        mod = place(mod, rules, devices)
    return mod if estimate is None else with_auto_reasons(mod, reasons, estimate)


def hyperparameters_of(file: GgufFile) -> Hyperparameters:
    """The numbers of a file's model; FrontendError where they do not make sense."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        found = "no" if table is None else f"shape {table.shape} of the"
        raise FrontendError(f"{file.path}: has {found} tensor 'token_embd.weight', expected a table of embeddings")
    tokens: Any = file.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != table.shape[0]:
        raise FrontendError(
            f"{file.path}: token_embd has {table.shape[0]:,} rows, expected one for each of {len(tokens):,} tokens"
        )
    return read_hyperparameters(file.fields, table.shape[0], str(file.path))
