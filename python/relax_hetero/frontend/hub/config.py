"""``config.json`` of a folder as metadata of a GGUF file.

`KEYS` has the numbers that are the same under another name. The others, such as positions and windows, have a function
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ...errors import FrontendError
from ..gguf.architectures import ARCHITECTURES
from ..gguf.hyperparameters import MAX_LAYERS, yarn_magnitude
from .classes import CLASSES, TEXT_CLASSES
from .stored_tensors import read_json

CONFIG = "config.json"

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "use_parallel_residual": "use_parallel_residual",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.scale": "attention_multiplier",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "attention.temperature_scale": "attn_scale",
    "attention.temperature_length": "floor_scale",
    "attention.chunk_size": "attention_chunk_size",
    "attention.use_qk_norm": "use_qk_norm",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "altup.num_inputs": "altup_num_inputs",
    "altup.active_idx": "altup_active_idx",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""Keys of GGUF files without the architecture, and the name of the same number in ``config.json``."""

_ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "partial_rotary_factor": ("rotary_pct",),
    "layer_norm_eps": ("layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "hidden_act": ("hidden_activation", "activation", "activation_function"),
    "logit_scale": ("logits_scaling",),
    "embedding_multiplier": ("scale_emb",),
    "num_experts": ("moe_num_experts", "n_routed_experts", "num_local_experts"),
    "num_experts_per_tok": ("moe_k", "moe_topk", "top_k_experts"),
    "n_shared_experts": ("moe_num_shared_experts", "num_shared_expert"),
    "sliding_window": ("local_attention",),
    "rope_theta": ("global_rope_theta",),
    "rope_local_base_freq": ("local_rope_theta",),
    "first_k_dense_replace": ("moe_layer_start_index",),
    "quantization_config": ("compression_config",),
}
"""Names that classes have for a value of another name, which they replace."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "squared_relu",
}
"""Names of activations, and those of architectures."""
_REQUIRED: dict[str, Any] = {
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "moe_layer_interval": 1,
    "alibi": False,
    "parallel_attn": True,
    "attn_output_gate": True,
    "altup_correct_scale": True,
    "interleave_moe_layer_step": 1,
}
"""Names whose other values are not supported, as models with them would compute something else."""
_ROPE_KINDS = ("default", "proportional", "linear", "yarn", "llama3", "longrope", "su", "dynamic", "mrope")
_GATING_FUNCTIONS = {"softmax": 1, "sigmoid": 2}
_MAX_NUMBER = 1e30
_UNROTATED = 1e30  # divisor of the frequencies of elements that are not rotated, as in GGUF files
_MAX_HEAD_SIZE = 1 << 16


class HubConfig:
    """Values of a ``config.json``, those of its text model first, and the class's defaults.

    `path`: the file; `name`: name of the class.
    """

    def __init__(self, path: Path) -> None:
        self.path, outer = path, read_json(path)
        names, text = outer.get("architectures"), outer.get("text_config", {})
        if not isinstance(text, dict):
            raise self.error(f"text_config is {text!r:.100}, expected names and values")
        name = names[0] if isinstance(names, list) and names else names
        if isinstance(name, str) and name not in CLASSES:
            causal = f"{name.removesuffix('Model')}ForCausalLM"
            name = causal if causal in CLASSES else TEXT_CLASSES.get(str(text.get("model_type")), name)
        if not isinstance(name, str) or name not in CLASSES:
            raise self.error(f"architectures is {names!r:.100}, expected one of {', '.join(CLASSES)}")
        self.name, self.hub_class = name, CLASSES[name]
        self.values: dict[str, Any] = {**self.hub_class.defaults, **outer, **text}
        for key, aliases in _ALIASES.items():
            self.values[key] = self.get(*aliases, key)
        self.values |= self.hub_class.fixed

    def error(self, text: str) -> FrontendError:
        """An error that names the file."""
        return FrontendError(f"{self.path}: {text}")

    def get(self, *names: str) -> Any:
        """The first value that is stated and not null; None without one."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = default if self.get(name) is None else self.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.error(f"{name} is {value!r:.100}, expected a whole number of at least 1")
        return value

    @property
    def layers(self) -> int:
        """Number of layers."""
        layers = self.count("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error(f"num_hidden_layers is {layers:,}, expected {MAX_LAYERS:,} at most")
        return layers

    @property
    def head_size(self) -> int:
        """Elements of a head's queries and keys that are rotated, or that a share of is."""
        if self.get("qk_rope_head_dim") is not None:
            return self.count("qk_rope_head_dim")
        return self.count("head_dim", self.count("hidden_size") // self.count("num_attention_heads"))

    def rotary(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Parameters of rotary embeddings, of layers without and with a window."""
        given = self.get("rope_parameters", "rope_scaling")
        given = {} if given is None else given
        nested = isinstance(given, dict) and "full_attention" in given
        full = given["full_attention"] if nested else given
        window = given.get("sliding_attention", full) if nested else {}
        if not isinstance(full, dict) or not isinstance(window, dict):
            raise self.error(f"the parameters of rotary embeddings are {given!r:.100}, expected names and values")
        shared = {name: self.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        local = {"rope_theta": self.get("rope_local_base_freq")}
        return {**shared, **_stated(full)}, {**local, **_stated(window)}

    def number(self, values: Mapping[str, Any], name: str, default: float | None = None) -> float:
        """A positive number of nested values."""
        value: Any = default if values.get(name) is None else values[name]
        if type(value) not in (int, float) or not 0 < value < _MAX_NUMBER:
            raise self.error(f"{name} is {value!r:.100}, expected a number above 0")
        return float(value)


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def metadata_of(config: HubConfig) -> dict[str, Any]:
    """Metadata as in a GGUF file of the model. Raises FrontendError if a value is invalid or not supported."""
    name = config.hub_class.architecture
    for key, expected in _REQUIRED.items():
        if config.get(key) not in (None, expected):
            raise config.error(f"{key} is {config.get(key)!r:.100}, expected {expected}: others are not supported")
    _check_activation(config)
    fields = {key: config.get(name) for key, name in KEYS.items()}
    for read in _READERS:
        fields |= read(config)
    stated = {key: value for key, value in fields.items() if value is not None}
    for key, value in stated.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, (int, float, str)) for number in numbers):
            raise config.error(f"{KEYS.get(key, key)} is {value!r:.100}, expected a number")
    return {f"{name}.{key}": _rounded(value) for key, value in stated.items()}


def _rounded(value: Any) -> Any:
    """A number as a float of 32 bits, as in GGUF files, so that logits are the same; all other values as they are."""
    with np.errstate(over="ignore"):
        if isinstance(value, list):
            return [_rounded(each) for each in value]
        return float(np.float32(value)) if isinstance(value, float) else value


def _check_activation(config: HubConfig) -> None:
    """Raise FrontendError if the feed-forward network has another activation than the architecture."""
    expected, found = ARCHITECTURES[config.hub_class.architecture].activation, config.get("hidden_act")
    if found is not None and expected in _ACTIVATIONS.values() and _ACTIVATIONS.get(str(found)) != expected:
        raise config.error(f"hidden_act is {found!r:.100}, expected one that is {expected}")


def _latent_fields(config: HubConfig) -> dict[str, Any]:
    """Sizes of an attention with compressed keys and values, for one matrix of both."""
    if config.get("kv_lora_rank") is None:
        return {}
    rotary = config.count("qk_rope_head_dim")
    return {
        "attention.key_length": config.count("qk_nope_head_dim") + rotary,
        "attention.value_length": config.count("v_head_dim"),
        "rope.dimension_count": rotary,
    }


def _delta_fields(config: HubConfig) -> dict[str, Any]:
    """Sizes of layers with the gated delta rule, whose heads of values are not tiled as in GGUF files."""
    if not ARCHITECTURES[config.hub_class.architecture].has_delta_rule:
        return {}
    kinds, period = config.get("layer_types"), config.count("full_attention_interval", 4)
    if isinstance(kinds, list):
        period = kinds.index("full_attention") + 1 if "full_attention" in kinds else config.layers + 1
        pattern = ["linear_attention" if (at + 1) % period else "full_attention" for at in range(config.layers)]
        if kinds != pattern:
            raise config.error(
                f"layer_types is {kinds!r:.100}, expected full_attention in the last layer of each period"
            )
    return {
        "ssm.inner_size": config.count("linear_num_value_heads") * config.count("linear_value_head_dim"),
        "ssm.has_tiled_heads": False,
        "full_attention_interval": period,
    }


def _stream_fields(config: HubConfig) -> dict[str, Any]:
    """Sparse activations of Gemma 3n, whose shares become deviations from the mean of a normal distribution."""
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        return {}
    values = shares if isinstance(shares, list) else [shares] * config.layers
    if not all(type(share) in (int, float) and 0 <= share < 1 for share in values):
        raise config.error(f"activation_sparsity_pattern is {shares!r:.100}, expected numbers from 0 to below 1")
    return {"activation_sparsity_scale": [NormalDist().inv_cdf(share) if share else -math.inf for share in values]}


def _chunk_fields(config: HubConfig) -> dict[str, Any]:
    """Widths of Llama 4, whose networks of all tokens are wider than experts, and its layers without rotation."""
    if not ARCHITECTURES[config.hub_class.architecture].attention_chunk:
        return {}
    layers, period = config.layers, ARCHITECTURES[config.hub_class.architecture].unrotated_period
    rotated = config.get("no_rope_layers")
    if rotated not in (None, [], [int((layer + 1) % period != 0) for layer in range(layers)]):
        raise config.error(f"no_rope_layers is {rotated!r:.100}, expected 0 in the last layer of each {period}")
    if config.get("moe_layers") not in (None, list(range(layers))):
        raise config.error(f"moe_layers is {config.get('moe_layers')!r:.100}, expected all layers")
    fields = {"expert_feed_forward_length": config.count("intermediate_size")}
    fields["feed_forward_length"] = config.count("intermediate_size_mlp")
    return fields if config.get("attn_temperature_tuning") else fields | {"attention.temperature_scale": 0.0}


def _global_fields(config: HubConfig) -> dict[str, Any]:
    """Sizes of Gemma 4's layers, of which those without a window have heads of their own."""
    if config.hub_class.architecture != "gemma4":
        return {}
    if config.get("use_bidirectional_attention") == "all":
        raise config.error("use_bidirectional_attention is 'all', expected a model that generates texts")
    layers, kinds = config.layers, config.get("layer_types")
    is_window = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else [False] * layers
    stated = {name: value for name, value in _global_sizes(config).items() if value is not None}
    size, kv_heads = stated.get("head_dim", config.head_size), stated.get("num_key_value_heads")
    fields: dict[str, Any] = {f"attention.{part}_length": size for part in ("key", "value")}
    fields |= {f"attention.{part}_length_swa": config.head_size for part in ("key", "value")}
    fields |= {"rope.dimension_count": size, "rope.dimension_count_swa": config.head_size}
    if kv_heads is not None:
        own = config.count("num_key_value_heads")
        fields["attention.head_count_kv"] = [own if each else kv_heads for each in is_window]
    if config.get("use_double_wide_mlp"):
        width, first = config.count("intermediate_size"), layers - config.count("num_kv_shared_layers")
        fields["feed_forward_length"] = [width * (1 + (layer >= first)) for layer in range(layers)]
    return fields if config.get("enable_moe_block") else fields | {"expert_count": None}


def _global_sizes(config: HubConfig) -> dict[str, Any]:
    """Head size and heads of keys of layers without a window, as `transformers` 5 or older versions write them."""
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {"head_dim": config.count("global_head_dim", 512), "num_key_value_heads": heads}
    kinds = config.get("layer_types")
    full = [str(layer) for layer, kind in enumerate(kinds if isinstance(kinds, list) else []) if "full" in str(kind)]
    values = list(by_layer.values()) if isinstance(by_layer, dict) else []
    if not values or [*by_layer] != full or not all(isinstance(value, dict) and value == values[0] for value in values):
        raise config.error(
            f"per_layer_config is {by_layer!r:.100}, expected the same sizes for each full_attention layer"
        )
    return dict(values[0])


def _head_fields(config: HubConfig) -> dict[str, Any]:
    """Sizes that older classes derive: a wide feed-forward network, and one head of keys and values (Falcon, GPT-2)."""
    fields = {} if config.get("intermediate_size") else {"feed_forward_length": 4 * config.count("hidden_size")}
    if config.get("new_decoder_architecture"):
        return {**fields, "attention.head_count_kv": config.get("num_kv_heads")}
    return {**fields, "attention.head_count_kv": 1} if config.get("multi_query") else fields


def _scale_fields(config: HubConfig) -> dict[str, Any]:
    """Factors of scores, of what layers add and of logits, that classes derive from other numbers."""
    if ARCHITECTURES[config.hub_class.architecture].depth_scale:
        depth, width = config.number(config.values, "scale_depth"), config.count("hidden_size")
        return {"residual_scale": depth / config.layers**0.5, "logit_scale": width / config.count("dim_model_base")}
    if config.get("query_pre_attn_scalar") is None:
        return {}
    return {"attention.scale": 1.0 / math.sqrt(config.number(config.values, "query_pre_attn_scalar"))}


def _window_fields(config: HubConfig) -> dict[str, Any]:
    """The window's length, and whether each layer has it."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return {}
    if kinds is not None:
        names = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != config.layers or not all(kind in names for kind in kinds):
            problem = f"found {len(kinds)}" if isinstance(kinds, list) else f"found {kinds!r:.100}"
            raise config.error(f"layer_types: {problem}, expected {config.layers} of {' and '.join(names)}")
        pattern: Any = [kind == names[0] for kind in kinds]
    elif config.get("use_sliding_window"):
        pattern = [layer >= config.count("max_window_layers", config.layers) for layer in range(config.layers)]
    elif config.hub_class.has_windows:
        pattern = [True] * config.layers
    else:
        pattern = config.get("sliding_window_pattern", "_sliding_window_pattern")
    return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}


def _group_fields(config: HubConfig) -> dict[str, Any]:
    """Choice of experts: the function of scores, and groups unless experts are chosen without them."""
    kind = config.get("scoring_func")
    if kind not in (None, *_GATING_FUNCTIONS):
        raise config.error(f"scoring_func is {kind!r:.100}, expected one of {', '.join(_GATING_FUNCTIONS)}")
    has_groups = config.get("topk_method") != "greedy"
    return {
        "expert_gating_func": _GATING_FUNCTIONS.get(kind),
        "expert_group_count": config.get("n_group") if has_groups else None,
        "expert_group_used_count": config.get("topk_group") if has_groups else None,
    }


def _rotary_fields(config: HubConfig) -> dict[str, Any]:
    """Frequencies of rotary embeddings; some of llama 3 and longrope are tensors (`rotary_tensors`)."""
    full, window = config.rotary()
    kind = _rotary_kind(config, full)
    fields = {"rope.freq_base": full.get("rope_theta"), "rope.freq_base_swa": window.get("rope_theta")}
    if full.get("partial_rotary_factor") is not None:
        share = config.number(full, "partial_rotary_factor")
        fields["rope.dimension_count"] = int(config.head_size * share)
    if full.get("alpha") is not None and config.head_size > 2:  # Hunyuan's scaling of the base
        power = config.head_size / (config.head_size - 2)
        fields["rope.freq_base"] = config.number(full, "rope_theta", 1e4) * config.number(full, "alpha") ** power
    if full.get("llama_4_scaling_beta") is not None:
        fields["attention.temperature_scale"] = config.number(full, "llama_4_scaling_beta")
    return fields | _SCALED[kind](config, full) if kind in _SCALED else fields


_READERS: tuple[Callable[[HubConfig], dict[str, Any]], ...] = (
    _latent_fields,
    _delta_fields,
    _stream_fields,
    _head_fields,
    _scale_fields,
    _rotary_fields,
    _window_fields,
    _group_fields,
    _chunk_fields,
    _global_fields,
)


def _rotary_kind(config: HubConfig, values: Mapping[str, Any]) -> str:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise config.error(f"the rope_type is {kind!r:.100}, expected one of {', '.join(_ROPE_KINDS)}")
    return str(kind)


def _linear_fields(config: HubConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope.scaling.type": "linear", "rope.scaling.factor": config.number(values, "factor")}


def _yarn_fields(config: HubConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of YaRN; GGUF files have a tenth of the multiplier of the magnitude of a latent attention."""
    factor = config.number(values, "factor")
    fields: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": values.get("original_max_position_embeddings"),
        "rope.scaling.yarn_beta_fast": values.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": values.get("beta_slow"),
        "rope.scaling.yarn_truncate": values.get("truncate"),
    }
    all_dim, dim = (config.number(values, name) if values.get(name) else 0.0 for name in ("mscale_all_dim", "mscale"))
    if config.get("kv_lora_rank") is not None and all_dim:
        if dim not in (0.0, all_dim):
            raise config.error(f"mscale is {dim:g}, expected mscale_all_dim, {all_dim:g}")
        return fields | {"rope.scaling.yarn_log_multiplier": all_dim / 10}
    if all_dim and dim == all_dim:
        return fields | {"rope.scaling.yarn_log_multiplier": all_dim}
    default = yarn_magnitude(factor, 1.0)
    stated = yarn_magnitude(factor, dim) / yarn_magnitude(factor, all_dim) if dim and all_dim else default
    return fields | {"rope.scaling.yarn_attn_factor": config.number(values, "attention_factor", stated) / default}


def _longrope_fields(config: HubConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Context of the short factors, and the magnitude, which grows with the context."""
    context = config.count("max_position_embeddings")
    stated = config.get("original_max_position_embeddings") or values.get("original_max_position_embeddings")
    original = context if stated is None else stated
    factor = context / config.number({"original_max_position_embeddings": original}, "original_max_position_embeddings")
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    magnitude = config.number(values, "attention_factor", default)
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": magnitude}


_SCALED: dict[str, Callable[[HubConfig, Mapping[str, Any]], dict[str, Any]]] = {
    "linear": _linear_fields,
    "yarn": _yarn_fields,
    "longrope": _longrope_fields,
    "su": _longrope_fields,
}
"""Kinds of positions whose parameters are keys of GGUF files."""


def rotary_tensors(config: HubConfig) -> dict[str, np.ndarray]:
    """Divisors of frequencies that GGUF files have as tensors, by their names.

    Those of llama 3 leave frequencies that turn often within the original context, and divide those that turn seldom.
    Raises FrontendError if a parameter is missing or invalid.
    """
    values, _ = config.rotary()
    kind = _rotary_kind(config, values)
    if kind in ("longrope", "su"):
        return {f"rope_factors_{name}.weight": _factors(config, values, f"{name}_factor") for name in ("long", "short")}
    if kind == "proportional":
        size = config.count("global_head_dim", _global_sizes(config)["head_dim"])
        rotated = int(config.number(values, "partial_rotary_factor", 1.0) * size // 2)
        if not rotated <= size // 2 <= _MAX_HEAD_SIZE:
            raise config.error(f"found heads of {size:,} elements, of which {2 * rotated:,} are rotated")
        return {"rope_freqs.weight": np.repeat(np.array([1, _UNROTATED], "float32"), [rotated, size // 2 - rotated])}
    if kind != "llama3":
        return {}
    factor, base = config.number(values, "factor"), config.number(values, "rope_theta", 1e4)
    low, high = (config.number(values, f"{end}_freq_factor") for end in ("low", "high"))
    context = config.number(values, "original_max_position_embeddings", config.count("max_position_embeddings"))
    if high <= low:
        raise config.error(f"high_freq_factor is {high:g}, expected more than low_freq_factor, {low:g}")
    size = config.head_size
    if size > _MAX_HEAD_SIZE:
        raise config.error(f"found heads of {size:,} elements, expected {_MAX_HEAD_SIZE:,} at most")
    turns = context * base ** (-np.arange(0, size, 2) / size) / (2 * np.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return {"rope_freqs.weight": (1 / (share + (1 - share) / factor)).astype("float32")}


def _factors(config: HubConfig, values: Mapping[str, Any], name: str) -> np.ndarray:
    """A list of positive numbers."""
    numbers = values.get(name)
    if not isinstance(numbers, list) or len(numbers) > _MAX_HEAD_SIZE:
        raise config.error(f"{name} is {numbers!r:.100}, expected a number for each frequency")
    return np.array([config.number({name: number}, name) for number in numbers], "float32")
