"""Folders of Hugging Face: configuration and weights as those of a GGUF file.

The package gguf maps most names of tensors. Here are those of experts, which GGUF files have in one tensor, and what
llama.cpp's converter changes: rows of queries and keys in pairs, 1 added to Gemma's norms, vectors in float32.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from math import prod
from operator import itemgetter
from pathlib import Path

import numpy as np

from ...errors import FrontendError
from ..gguf.file import FileTensor, GgufFile
from ..gguf.weights import is_unquantized
from .config import CONFIG, HubConfig, metadata_of, rotary_tensors
from .lazy import as_float16, as_float32, file_tensor, floats, lazy, select_rows, stack
from .quantized import Quantization, read_mxfp4
from .stored_tensors import StoredTensor, read_json, read_tensors

_log = logging.getLogger("relax_hetero")


def read_folder(path: str | os.PathLike[str]) -> GgufFile:
    """Open a folder with ``config.json`` and ``*.safetensors`` as a GGUF file.

    Tensors are views of the mapped files, or made of them when they are read. Raises FrontendError if a file is missing
    or damaged, or the model's class, a tensor or a quantization is unknown.
    """
    folder = Path(path)
    config = HubConfig(folder / CONFIG)
    quantization = Quantization(config)
    fields = metadata_of(config)
    stored, mapped = read_tensors(folder)
    tensors = hub_tensors(stored, config, quantization)
    fields |= layer_numbers(stored, config)
    for module in sorted(folder.glob("[0-9]*_*")):
        if module.name.endswith("_Pooling"):
            fields[f"{config.hub_class.architecture}.pooling_type"] = _read_pooling(module / CONFIG)
        if module.name.endswith("_Dense"):
            name = f"dense_{module.name.partition('_')[0]}.weight"
            tensors[name], files = _read_dense(module, name)
            mapped += files
    for dtype in sorted(quantization.dequantized):
        method = quantization.values.get("quant_method", "quantized weights")
        _log.warning("%s: weights of %s become %s, since no kernel reads their bits", folder, method, dtype)
    fields |= {"general.architecture": config.hub_class.architecture, "general.name": _name_of(folder)}
    return GgufFile(folder, fields, tensors, mapped)


_POOLINGS = ("pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_lasttoken")
"""Kinds of pooling of sentence-transformers, in the order of ``pooling_type`` in GGUF files, which counts from 1."""


def _read_pooling(path: Path) -> int:
    """Number of the pooling of a module of sentence-transformers."""
    chosen = [name for name, value in read_json(path).items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise FrontendError(
            f"{path}: found {' and '.join(chosen) or 'no pooling'}, expected one of {', '.join(_POOLINGS)}"
        )
    return _POOLINGS.index(chosen[0]) + 1


def _read_dense(module: Path, name: str) -> tuple[FileTensor, tuple[mmap.mmap, ...]]:
    """Matrix of a module of sentence-transformers by which embeddings are multiplied, and its mapped files."""
    values = read_json(module / CONFIG)
    stored, mapped = read_tensors(module)
    is_identity = str(values.get("activation_function")).endswith("Identity")
    if stored.keys() != {"linear.weight"} or not is_identity:
        names = ", ".join(stored)
        raise FrontendError(
            f"{module}: found {names} and the activation {values.get('activation_function')!r:.100}, expected "
            "linear.weight and the identity"
        )
    return file_tensor(stored["linear.weight"]).renamed(name), mapped


def _name_of(folder: Path) -> str:
    """Name of a model: its folder's, or its repository's if that is a snapshot in the cache of huggingface_hub."""
    resolved = folder.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return resolved.name


_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Beginnings of the names of a text model's tensors, which mean "model."; the first that fits counts."""
_WITHOUT_PREFIX = re.compile(r"^(layers|embed_tokens|norm)\.")  # names of a model without a head, which lack the prefix
_UNUSED = re.compile(
    r"^(bert\.)?pooler\.|^cls\.|position_ids$|\.(attn|attention)\.bias$"
    r"|vision|visual|multi_modal|mm_proj|audio|embed_vision|rotary_emb\.inv_freq$|\.masked_bias$|(^|\.)mtp\."
    r"|\.(k_scale|v_scale|q_scale|input_scale|output_scale|input_global_scale|kv_scale)$"
)
"""Tensors of pictures and sounds, of further tokens, constants, and scales of activations, which stay floats."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,9}(?=\.)")  # number of a layer in a name
_ACTIVATION = re.compile(r"^model\.layers\.(\d+)\.mlp\.act_fn\.(alpha_n|alpha_p|beta|eps)$")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias|scale)$")
_RENAMED = (
    (re.compile(r"(\.moe_statics|\.mlp|\.block_sparse_moe|\.gate)*\.e_score_correction_bias$"), ".mlp.choice.bias"),
    (re.compile(r"\.linear_attn\.dt_bias$"), ".linear_attn.dt_proj.bias"),
    (re.compile(r"\.(layer_scalar|correct_output_scale)$"), r".\1.weight"),
    (re.compile(r"\.router\.per_expert_scale$"), ".experts.per_expert.scale"),
    (re.compile(r"self_attn\.sinks$"), "self_attn.sinks.weight"),
    (re.compile(r"\.block_sparse_moe\.experts\.(\w+_proj)"), r".mlp.experts.\1"),
    (re.compile(r"\.block_sparse_moe\.router\.weight$"), ".block_sparse_moe.router.layer.weight"),
    (re.compile(r"\.experts\.(\w+_proj)$"), r".experts.\1.weight"),
    (re.compile(r"\.experts\.(\w+_proj)_bias$"), r".experts.\1.bias"),
    (re.compile(r"\.block_sparse_moe\.input_linear\.weight$"), ".mlp.experts.gate_up_proj.weight"),
    (re.compile(r"\.block_sparse_moe\.output_linear\.weight$"), ".mlp.experts.down_proj.weight"),
)
"""Names of one tensor in several classes, and the name by which the package gguf or `_split` knows it."""
_PARTS = {
    "mlp.choice": "exp_probs_b",
    "mlp.gate.wg": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "experts.per_expert": "ffn_down_exps",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
}
"""Modules of layers that the package gguf does not know for every architecture."""
_STACKED_NORM = re.compile(r"^(.*layernorm)\.norms\.(\d+)\.(weight)$")
_STACKED = re.compile(r"^(model\.altup_(?:unembed_)?projections)\.(\d+)\.(weight)$")
_GATE_UP = re.compile(r"\.experts\.gate_up_proj\.(weight|bias)$")
_FLOAT32 = re.compile(r"(\.bias|_norm\.weight|_norm_\d\.weight|ffn_gate_inp(_shexp)?\.weight|attn_sinks\.weight)$")
"""Tensors that are float32 in every GGUF file."""


def hub_tensors(
    stored: Mapping[str, StoredTensor], config: HubConfig, quantization: Quantization
) -> dict[str, FileTensor]:
    """All tensors of a model by their names in GGUF files.

    Raises FrontendError if a tensor has an unknown name, type or shape.
    """
    modules = _read_modules(_used(stored, config), quantization)
    tensors = _named(_without_experts(_split(modules, config), config), config)
    for name, values in rotary_tensors(config).items():
        tensors[name] = FileTensor(name, values.shape, "F32", values)
    return tensors


def layer_numbers(stored: Mapping[str, StoredTensor], config: HubConfig) -> dict[str, list[float]]:
    """Numbers of activations that are tensors in folders, and lists with a number for each layer in GGUF files."""
    numbers: dict[str, dict[int, float]] = {}
    for name, tensor in stored.items():
        match = _ACTIVATION.match(name)
        if match is not None:
            if tensor.data.size != 1:
                raise tensor.error(f"has shape {tensor.shape}, expected one number")
            numbers.setdefault(f"xielu.{match[2]}", {})[int(match[1])] = float(tensor.data.reshape(-1)[0])
    for key, by_layer in numbers.items():
        if sorted(by_layer) != list(range(config.layers)):
            raise config.error(f"found {key} of layers {sorted(by_layer)!r:.50}, expected {config.layers} layers")
    return {key: [by_layer[layer] for layer in sorted(by_layer)] for key, by_layer in numbers.items()}


def _used(stored: Mapping[str, StoredTensor], config: HubConfig) -> dict[str, StoredTensor]:
    """The tensors of the text model's layers and embeddings, under names that begin with "model." or "lm_head."."""
    tensors: dict[str, StoredTensor] = {}
    has_own_output = not config.get("tie_word_embeddings")
    for name, tensor in stored.items():
        text = name
        prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
        if prefix:
            text = name.removeprefix(prefix)
            text = text if text.startswith("lm_head.") else f"model.{text}"
        elif _WITHOUT_PREFIX.match(name):
            text = f"model.{name}"
        layer = _LAYER.match(text)
        is_further = layer is not None and int(layer[1]) >= config.layers
        if (
            _UNUSED.search(name)
            or _ACTIVATION.match(name)
            or is_further
            or (text.startswith("lm_head.") and not has_own_output)
        ):
            continue
        for pattern, target in _RENAMED:
            text = pattern.sub(target, text)
        if text in tensors:
            raise tensor.error(f"means the same as {tensors[text].name!r}, expected one of them")
        tensors[text] = tensor
    return tensors


def _read_modules(stored: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, FileTensor]:
    """Tensors whose quantized matrices are one tensor each."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    tensors: dict[str, FileTensor] = {}
    for module, parts in modules.items():
        for part in ("gate_up_proj", "down_proj"):
            if f"{part}_blocks" in parts and f"{part}_scales" in parts:
                blocks, scales = (parts.pop(f"{part}_{end}") for end in ("blocks", "scales"))
                tensors[f"{module}.{part}.weight"] = read_mxfp4(blocks, scales, f"{module}.{part}.weight")
        quantized = quantization.tensors(module, parts)
        if quantized:
            tensors |= {tensor.name: tensor for tensor in quantized}
            parts = {"bias": parts["bias"]} if "bias" in parts else {}
        tensors |= {f"{module}.{part}": file_tensor(tensor) for part, tensor in parts.items()}
    return tensors


def _split(tensors: Mapping[str, FileTensor], config: HubConfig) -> dict[str, FileTensor]:
    """Tensors whose experts have gates and others apart, in matrices (experts, out, in)."""
    is_interleaved = config.hub_class.has_interleaved_experts
    split: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        is_matrix = ".experts." in name and name.endswith("_proj.weight") and not _EXPERT.match(name)
        is_transposed = is_interleaved or config.hub_class.has_transposed_experts
        if is_transposed and is_matrix and len(tensor.shape) == 3 and tensor.type != "MXFP4":
            tensor = _transposed(tensor)
        if name.endswith(".in_proj_qkvz.weight"):
            split |= _split_delta(tensor, name, config)
            continue
        if config.hub_class.has_merged_experts or not _GATE_UP.search(name):
            split[name] = tensor
            continue
        if name.endswith(".bias"):
            tensor = as_float32(tensor)  # whose last axis has numbers, not bytes
        if len(tensor.shape) < 2 or tensor.shape[1] % 2:
            raise config.error(f"tensor {name!r} has shape {tensor.shape}, expected (experts, an even number, ...)")
        half = tensor.shape[1] // 2
        shape = (tensor.shape[0], half, *tensor.shape[2:])
        for index, part in enumerate(("gate_proj", "up_proj")):
            rows = slice(index, None, 2) if is_interleaved else slice(index * half, (index + 1) * half)
            target = name.replace("gate_up_proj", part)
            split[target] = select_rows(tensor, target, itemgetter((slice(None), rows)), shape)
    return split


def _split_delta(tensor: FileTensor, name: str, config: HubConfig) -> dict[str, FileTensor]:
    """Rows of queries, keys and values of all heads, and those of gates, from those of each head of keys in turn."""
    key_heads, heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    key_size, size = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    keys, values = key_heads * key_size, heads * size
    if tensor.shape[0] != 2 * keys + 2 * values or heads % key_heads:
        raise config.error(f"tensor {name!r} has {tensor.shape[0]} rows, expected 2 * {keys} + 2 * {values}")
    groups = np.arange(tensor.shape[0]).reshape(key_heads, -1)
    ends = np.cumsum([key_size, key_size, values // key_heads])
    query, key, value, gate = (part.reshape(-1) for part in np.split(groups, ends, axis=1))
    orders = {"qkv": np.concatenate([query, key, value]), "z": gate}
    targets = {name.replace("qkvz", part): order for part, order in orders.items()}
    return {
        target: select_rows(tensor, target, itemgetter(order), (len(order), *tensor.shape[1:]))
        for target, order in targets.items()
    }


def _transposed(tensor: FileTensor) -> FileTensor:
    """Unquantized matrices with their last axes swapped."""
    *leading, depth, rows = tensor.shape

    def read() -> np.ndarray:
        data = tensor.data.reshape(-1).view("<u2") if tensor.type == "BF16" else tensor.data
        data = np.ascontiguousarray(data.reshape(tensor.shape).swapaxes(-1, -2))
        return data.view("uint8") if tensor.type == "BF16" else data

    return lazy(tensor.name, (*leading, rows, depth), tensor.type, read)


def _without_experts(tensors: Mapping[str, FileTensor], config: HubConfig) -> dict[str, FileTensor]:
    """Tensors with those of all experts of a layer, or norms of all its heads, stacked."""
    result: dict[str, FileTensor] = {}
    stacks: dict[str, dict[int, FileTensor]] = {}
    for name, tensor in tensors.items():
        expert, norm, stacked = (pattern.match(name) for pattern in (_EXPERT, _STACKED_NORM, _STACKED))
        if expert is not None:
            stacks.setdefault(f"{expert[1]}.{expert[3]}.{expert[4]}", {})[int(expert[2])] = tensor
        elif stacked is not None:
            stacks.setdefault(f"{stacked[1]}.{stacked[3]}", {})[int(stacked[2])] = tensor
        elif norm is not None:
            stacks.setdefault(f"{norm[1]}.{norm[3]}", {})[int(norm[2])] = as_float32(tensor)
        else:
            result[name] = tensor
    for name, experts in stacks.items():
        if sorted(experts) != list(range(len(experts))):
            missing = next(number for number in range(len(experts)) if number not in experts)
            raise config.error(f"the weights lack number {missing} of {name!r}, expected those up to {max(experts)}")
        result[name] = stack(name, [experts[number] for number in range(len(experts))])
    return result


def _named(tensors: Mapping[str, FileTensor], config: HubConfig) -> dict[str, FileTensor]:
    """Tensors under their names in GGUF files, with the numbers that these have."""
    named: dict[str, FileTensor] = {}
    unknown = []
    for name, target in _targets(tensors, config):
        if not target:
            unknown.append(name)
            continue
        if target in named:
            raise config.error(f"the tensors {named[target].name!r} and {name!r} mean {target!r}, expected one of them")
        named[target] = _converted(tensors[name], target, config)
    if unknown:
        names = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else "")
        raise config.error(f"found tensors that {config.name} does not have: {names}; expected none")
    return {target: tensor.renamed(target) for target, tensor in named.items()}


def _targets(tensors: Mapping[str, FileTensor], config: HubConfig) -> Iterator[tuple[str, str | None]]:
    """Each name, and the name in GGUF files."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == config.hub_class.architecture)
    names = get_tensor_name_map(architecture, 1)  # of one layer, as names of all layers are alike
    for name in tensors:
        number = _NUMBER.search(name)
        first = name if number is None else f"{name[: number.start()]}0{name[number.end() :]}"
        known = (names.get_name(each, (".weight", ".bias", ".scale")) for each in (first, first.removeprefix("model.")))
        target = next((each for each in known if each), None)
        module, _, end = first.removeprefix("model.layers.0.").rpartition(".")
        if target is None and module in _PARTS and first.startswith("model.layers.0."):
            target = f"blk.0.{_PARTS[module]}.{end}"
        if target is not None and number is not None:
            target = target.replace("blk.0.", f"blk.{int(number[0])}.", 1)
        yield name, target


def _converted(tensor: FileTensor, target: str, config: HubConfig) -> FileTensor:
    """A tensor with the order of rows and the numbers that GGUF files have."""
    row = config.hub_class
    if target.endswith(".scale"):
        return as_float32(tensor, shape=[prod(tensor.shape)])
    part = target.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if part == "ssm_a":
        return lazy(tensor.name, tensor.shape, "F32", lambda: -np.exp(floats(tensor)))
    if part == "ssm_conv1d" and len(tensor.shape) == 3:
        return as_float32(tensor, shape=(tensor.shape[0], tensor.shape[2]))
    if target.endswith("norm.weight") and row.norm_offset and part != "ssm_norm":
        return as_float32(tensor, row.norm_offset)
    if row.has_transposed and len(tensor.shape) == 2 and target.startswith("blk.") and is_unquantized(tensor):
        tensor = _transposed(tensor)
    if row.has_joint_qkv and part == "attn_qkv":
        tensor = _in_parts(tensor, config)
    if row.has_pairs and part in ("attn_q", "attn_k"):
        tensor = _in_pairs(tensor, config, "num_attention_heads" if part == "attn_q" else "num_key_value_heads")
    if part in ("ffn_gate_inp_shexp", "exp_probs_b") and tensor.shape[:1] == (1,) and len(tensor.shape) > 1:
        return as_float32(tensor, shape=tensor.shape[1:])
    if part in ("attn_kv_b", "token_embd") and tensor.type.startswith("INT"):
        return as_float16(tensor)  # split by heads, and gathered
    if len(tensor.shape) < 2 or _FLOAT32.search(target):
        return as_float32(tensor)
    return tensor


def _in_pairs(tensor: FileTensor, config: HubConfig, heads: str) -> FileTensor:
    """Rows of queries or keys with those that are rotated together side by side, not half a head apart."""
    count, rows = config.count(heads, config.count("num_attention_heads")), tensor.shape[0]
    if rows % (2 * count):
        raise config.error(f"tensor {tensor.name!r} has {rows} rows, expected a multiple of 2 * {count} ({heads})")
    order = np.arange(rows).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1)
    return select_rows(tensor, tensor.name, itemgetter(order), tensor.shape)


def _in_parts(tensor: FileTensor, config: HubConfig) -> FileTensor:
    """Rows of all queries, then of keys, then of values, from those of each head of keys in turn."""
    heads, rows = config.count("num_attention_heads"), tensor.shape[0]
    kv_heads = metadata_of(config).get(f"{config.hub_class.architecture}.attention.head_count_kv", heads)
    if type(kv_heads) is not int or not 0 < kv_heads <= heads or heads % kv_heads or rows % (heads + 2 * kv_heads):
        raise config.error(
            f"tensor {tensor.name!r} has {rows} rows, expected those of {heads} and 2 * {kv_heads} heads"
        )
    groups = np.arange(rows).reshape(kv_heads, heads // kv_heads + 2, -1)
    order = np.concatenate([groups[:, :-2].reshape(-1), groups[:, -2].reshape(-1), groups[:, -1].reshape(-1)])
    return select_rows(tensor, tensor.name, itemgetter(order), tensor.shape)
