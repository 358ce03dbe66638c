"""Small models of architectures: their classes in `transformers`, the keys of their files, and their weights as files.

Weights are random numbers in the order of the names in `transformers`; `tensors_of` does with them what llama.cpp's
converter does. `architecture_logits.npz` has the names and shapes, and logits that `transformers` computed, so that
tests need neither it nor PyTorch; `python tests/python/llm/test_torch_architectures.py` records them anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, SIZE, VOCABULARY, CONTEXT = 3, 64, 4, 2, 16, 96, 256
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, 70)
ROWS = (0, 20, 31, 45, 63, 66, 69)
"""Positions of the recorded logits: in both chunks of a prompt, and in tokens that are decoded."""
RECORDED = Path(__file__).with_name("architecture_logits.npz")


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes
    ----------
    architecture : str
        GGUF's name.
    family : str
        Start of the names of the classes in `transformers`; that of a look-alike where it lacks the architecture.
    config : dict
        Parameters of the configuration besides the usual ones.
    keys : dict
        Keys of the file besides the usual ones, without the architecture's prefix.
    rope : dict
        Rotary parameters of the configuration.
    norm : str
        "rms" or "layer".
    names : dict
        Names of modules that the package `gguf` does not translate, by their ends.
    steps : tuple of str
        Conversions besides names: "pairs", "norms", "joint_qkv", "split_experts", … (`tensors_of`).
    tolerance : float
        Allowed difference of logits, as a share of the largest: more where sharp attention amplifies rounding.
    """

    architecture: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    norm: str = "rms"
    names: dict[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    pooling: str = ""
    tolerance: float = 2e-5

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.config.get("num_hidden_layers", LAYERS)

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.keys.get("attention.head_count_kv", KV_HEADS)


def _partial(share: float) -> dict[str, Any]:
    return {"rope": {"partial_rotary_factor": share}, "keys": {"rope.dimension_count": int(SIZE * share)}}


_LONG = {"long_factor": [1.0 + 0.5 * i for i in range(8)], "short_factor": [1.0 + 0.1 * i for i in range(8)]}
_WINDOW = {"attention.sliding_window": 24}
_SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
_PATTERN = {**_WINDOW, "attention.sliding_window_pattern": [True, True, False]}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
_EXPERTS |= {"num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 32}
_EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
_DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_DENSE_FIRST_KEYS = {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2}
_GROUP_KEYS = {"expert_group_count": 2, "expert_group_used_count": 1}
_MOE_STEPS = ("split_experts",)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA4 = {"num_hidden_layers": 5, "sliding_window": 24, "num_kv_shared_layers": 2, "tie_word_embeddings": True}
_GEMMA4 |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
_IS_WINDOW = [True, False, True, True, False]
_GEMMA4 |= {"layer_types": ["sliding_attention" if each else "full_attention" for each in _IS_WINDOW]}
_GEMMA4_KEYS = {**_WINDOW, "attention.sliding_window_pattern": _IS_WINDOW, "attention.shared_kv_layers": 2}
_GEMMA4_KEYS |= {"embedding_length_per_layer_input": 32, "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_GLOBAL_KEYS = {f"attention.{part}_length": 32 for part in ("key", "value")}
_GLOBAL_KEYS |= {f"attention.{part}_length_swa": 16 for part in ("key", "value")}
_GLOBAL_KEYS |= {"rope.dimension_count": 32, "rope.dimension_count_swa": 16}
_GLOBAL_KEYS |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_PROPORTIONAL = {
    "sliding_attention": _ROPE,
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
_DELTA |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
_DELTA_KEYS = {"ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.state_size": 8, "ssm.inner_size": 64}
_DELTA_KEYS |= {"ssm.conv_kernel": 4, "full_attention_interval": 3, "rope.dimension_count": 4}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
_FALCON = {"ffn_hidden_size": 128, "new_decoder_architecture": False, "alibi": False, "bias": False}
_NEOX = {"rotary_pct": 0.25, "use_parallel_residual": True}
_PAIRS = ("pairs",)

MODELS = {
    "llama4": Model(
        "llama4",
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size": 32,
            "intermediate_size_mlp": 128,
            "floor_scale": 16,
        },
        {**_EXPERT_KEYS, "expert_used_count": 1, "attention.temperature_length": 16, "interleave_moe_layer_step": 1},
        steps=("transposed_experts",),
    ),
    "mistral3": Model(
        "mistral3",
        "Ministral3",
        keys={
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        rope={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        steps=_PAIRS,
    ),
    "internlm2": Model("internlm2", "Llama", steps=_PAIRS),
    "xverse": Model("xverse", "Llama", steps=_PAIRS),
    "baichuan": Model("baichuan", "Llama", steps=_PAIRS),
    "ernie4_5": Model("ernie4_5", "Ernie4_5"),
    "ernie4_5-moe": Model(
        "ernie4_5-moe",
        "Ernie4_5_Moe",
        {**_EXPERTS, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "use_bias": False},
        {**_EXPERT_KEYS, "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 64},
        steps=_MOE_STEPS,
    ),
    "smollm3": Model("smollm3", "SmolLM3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, steps=_PAIRS),
    "arcee": Model("arcee", "Arcee", steps=_PAIRS),
    "bailingmoe": Model(
        "bailingmoe",
        "Ernie4_5_Moe",
        {**_EXPERTS, "moe_num_shared_experts": 2, "moe_layer_start_index": 0, "use_bias": False},
        {**_EXPERT_KEYS, "expert_shared_count": 2, "expert_weights_norm": True},
        steps=_MOE_STEPS,
    ),
    # Their attention and experts are those of Mixtral and Qwen 2, whose shares sum to 1 only if the file says so.
    "deepseek": Model(
        "deepseek",
        "Mixtral",
        {**_EXPERTS, "intermediate_size": 32},
        {"expert_weights_norm": True, **_EXPERT_KEYS},
        steps=_PAIRS,
    ),
    "minicpm": Model(
        "minicpm",
        "Granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.8, "logits_scaling": 4.0, "attention_multiplier": 0.25},
        {"embedding_scale": 12.0, "residual_scale": 0.8, "logit_scale": 4.0},
        steps=_PAIRS,
    ),
    "minicpm3": Model(
        "minicpm3",
        "MiniCPM3",
        {**_LATENT, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        {
            "attention.q_lora_rank": 32,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.head_count_kv": 4,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": 8,
        },
    ),
    "apertus": Model("apertus", "Apertus"),
    "exaone": Model("exaone", "Llama"),
    "exaone4": Model("exaone4", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "exaone4-window": Model("exaone4", "Exaone4", {**_SLIDING, "sliding_window_pattern": 3}, _PATTERN),
    "qwen": Model("qwen", "Qwen2", keys={"feed_forward_length": 256}, steps=("fused_qkv",)),
    "qwen2vl": Model("qwen2vl", "Qwen2", keys={"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": Model("qwen3vl", "Qwen3", keys={"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vlmoe": Model("qwen3vlmoe", "Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}, _EXPERT_KEYS, steps=_MOE_STEPS),
    "pangu-embedded": Model("pangu-embedded", "Llama", {"attention_bias": True}),
    "seed_oss": Model("seed_oss", "SeedOss"),
    "qwen3next": Model(
        "qwen3next",
        "Qwen3Next",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32, "norm_topk_prob": True},
        {**_EXPERT_KEYS, **_DELTA_KEYS, "expert_shared_feed_forward_length": 32},
        {"partial_rotary_factor": 0.25},
        steps=(*_MOE_STEPS, "norms", "delta"),
        tolerance=4e-5,
    ),
    "qwen35": Model(
        "qwen35",
        "Qwen3_5",
        _DELTA,
        {**_DELTA_KEYS, "rope.dimension_sections": [2, 0, 0, 0]},
        {"partial_rotary_factor": 0.25, "mrope_section": [2, 0, 0]},
        steps=("norms", "delta", "tiled"),
        tolerance=4e-5,
    ),
    "qwen35moe": Model(
        "qwen35moe",
        "Qwen3_5Moe",
        {**_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 32},
        {**_EXPERT_KEYS, **_DELTA_KEYS, "expert_shared_feed_forward_length": 32},
        {"partial_rotary_factor": 0.25, "mrope_section": [2, 0, 0]},
        steps=(*_MOE_STEPS, "norms", "delta", "tiled"),
    ),
    "hunyuan-dense": Model("hunyuan-dense", "HunYuanDenseV1"),
    "hunyuan-moe": Model(
        "hunyuan-moe",
        "HunYuanMoEV1",
        {"num_experts": 4, "moe_topk": 2},
        {**_EXPERT_KEYS, "expert_feed_forward_length": 128, "expert_shared_feed_forward_length": 128},
        names={"mlp.shared_mlp.gate_proj": "ffn_gate_shexp"},
        steps=_MOE_STEPS,
    ),
    "dots1": Model(
        "dots1",
        "Dots1",
        {**_EXPERTS, **_DENSE_FIRST, "n_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        {**_EXPERT_KEYS, **_DENSE_FIRST_KEYS, "expert_weights_norm": True, "expert_weights_scale": 1.5},
        steps=_MOE_STEPS,
    ),
    "bailingmoe2": Model(
        "bailingmoe2",
        "Glm4Moe",
        {**_EXPERTS, **_DENSE_FIRST, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        {
            **_EXPERT_KEYS,
            **_DENSE_FIRST_KEYS,
            **_GROUP_KEYS,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "rope.dimension_count": 8,
        },
        {"partial_rotary_factor": 0.5},
        names={"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
        steps=(*_MOE_STEPS, "fused_qkv"),
    ),
    "minimax-m2": Model(
        "minimax-m2",
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        {**_EXPERT_KEYS, "expert_gating_func": 2, "rope.dimension_count": 8},
        {"partial_rotary_factor": 0.5},
        names={"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
        steps=_MOE_STEPS,
    ),
    "olmo2": Model("olmo2", "Olmo2"),
    "olmo3": Model(
        "olmo2",
        "Olmo3",
        _SLIDING,
        {
            **_PATTERN,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "chatglm": Model("chatglm", "Glm", steps=("fused_qkv",), **_partial(0.5)),
    "glm4": Model("glm4", "Glm4", **_partial(0.5)),
    "gemma": Model("gemma", "Gemma", {"tie_word_embeddings": True}, steps=("norms",)),
    "gemma3n": Model(
        "gemma3n",
        "Gemma3n",
        {
            **_GEMMA4,
            "laurel_rank": 32,
            "altup_num_inputs": 4,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0, 0.0],
            "final_logit_softcapping": 30.0,
        },
        {
            **_GEMMA4_KEYS,
            "altup.num_inputs": 4,
            "altup.active_idx": 1,
            "activation_sparsity_scale": [0.8416212335729143, float("-inf"), 0.2533471031357997, *[float("-inf")] * 2],
        },
        {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 1e6}},
        steps=("streams",),
    ),
    "gemma4": Model(
        "gemma4",
        "Gemma4",
        {**_GEMMA4, "global_head_dim": 32, "use_double_wide_mlp": True, "final_logit_softcapping": 20.0},
        {
            **_GEMMA4_KEYS,
            **_GLOBAL_KEYS,
            "feed_forward_length": [128, 128, 128, 256, 256],
            "final_logit_softcapping": 20.0,
        },
        _PROPORTIONAL,
        steps=("proportional",),
        tolerance=2e-4,
    ),
    "gemma4-moe": Model(
        "gemma4",
        "Gemma4",
        {
            **_SLIDING,
            **_EXPERTS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
        {
            **_PATTERN,
            **_GLOBAL_KEYS,
            **_EXPERT_KEYS,
            "embedding_length_per_layer_input": 0,
            "attention.shared_kv_layers": 0,
            "attention.head_count_kv": [2, 2, 1],
        },
        _PROPORTIONAL,
        steps=("proportional", "merged_experts"),
    ),
    "command-r": Model(
        "command-r", "Cohere", {"tie_word_embeddings": True, "logit_scale": 0.3}, {"logit_scale": 0.3}, norm="layer"
    ),
    "command-r-plus": Model(
        "command-r",
        "Cohere",
        {"tie_word_embeddings": True, "logit_scale": 0.3, "use_qk_norm": True},
        {"logit_scale": 0.3},
        norm="layer",
    ),
    "cohere2": Model(
        "cohere2",
        "Cohere2",
        {**_SLIDING, "tie_word_embeddings": True, "logit_scale": 0.3},
        {**_PATTERN, "logit_scale": 0.3},
        norm="layer",
    ),
    "phi2": Model("phi2", "Phi", norm="layer", **_partial(0.5)),
    "phi2-fused": Model("phi2", "Phi", norm="layer", steps=("fused_qkv",), **_partial(0.5)),
    "phi3": Model("phi3", "Phi3", {"sliding_window": 24}, _WINDOW),
    "phi3-long": Model(
        "phi3",
        "Phi3",
        {"original_max_position_embeddings": 32},
        {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.2649110640673518},
        {"rope_type": "longrope", **_LONG},
        steps=("long_rope",),
    ),
    "phi3-short": Model(
        "phi3",
        "Phi3",
        {"original_max_position_embeddings": 256, "max_position_embeddings": 512},
        {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.125**0.5, "context_length": 512},
        {"rope_type": "longrope", **_LONG},
        steps=("long_rope",),
    ),
    "stablelm": Model("stablelm", "StableLm", {"use_qkv_bias": True}, norm="layer", **_partial(0.25)),
    "stablelm2-12b": Model(
        "stablelm",
        "StableLm",
        {"use_parallel_residual": True, "qk_layernorm": True},
        norm="layer",
        steps=("stacked_norms",),
        **_partial(0.25),
    ),
    "orion": Model("orion", "StableLm", norm="layer", rope={"partial_rotary_factor": 1.0}),
    "nemotron": Model("nemotron", "Nemotron", norm="layer", steps=("norms",), **_partial(0.5)),
    "jais2": Model("jais2", "Jais2", norm="layer"),
    "starcoder2": Model("starcoder2", "Starcoder2", {"sliding_window": None}, norm="layer"),
    "codeshell": Model("codeshell", "Starcoder2", {"sliding_window": None}, norm="layer", steps=("fused_qkv",)),
    "falcon-7b": Model(
        "falcon", "Falcon", {**_FALCON, "multi_query": True}, {"attention.head_count_kv": 1}, norm="layer"
    ),
    "falcon-40b": Model(
        "falcon",
        "Falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        norm="layer",
        steps=("joint_qkv",),
    ),
    "gptneox": Model(
        "gptneox",
        "GPTNeoX",
        {**_NEOX, "num_key_value_heads": 4},
        {"use_parallel_residual": True, "attention.head_count_kv": 4, "rope.dimension_count": 4},
        {"partial_rotary_factor": 0.25},
        norm="layer",
        steps=("joint_qkv",),
    ),
    "gptneox-sequential": Model(
        "gptneox",
        "GPTNeoX",
        {**_NEOX, "use_parallel_residual": False, "num_key_value_heads": 4},
        {"use_parallel_residual": False, "attention.head_count_kv": 4, "rope.dimension_count": 4},
        {"partial_rotary_factor": 0.25},
        norm="layer",
        steps=("joint_qkv",),
    ),
    "gpt2": Model(
        "gpt2",
        "GPT2LMHead",
        {"n_inner": 128, "tie_word_embeddings": True},
        {"attention.head_count_kv": 4},
        norm="layer",
        steps=("transposed",),
    ),
    "starcoder": Model(
        "starcoder",
        "GPTBigCode",
        {"n_inner": 128, "tie_word_embeddings": True},
        {"attention.head_count_kv": 1},
        norm="layer",
    ),
}
"""The architectures with what their files may differ in; windows end inside of the prompt."""

_BERT = {"attention.head_count_kv": 4, "attention.causal": False}

ENCODERS = {
    "bert": Model("bert", "Bert", {"hidden_act": "gelu"}, {**_BERT, "pooling_type": 2}, norm="layer", pooling="cls"),
    "nomic-bert": Model(
        "nomic-bert",
        "NomicBert",
        {"num_key_value_heads": 4},
        {**_BERT, "pooling_type": 1, "rope.freq_base": 1000.0},
        {"rope_theta": 1000.0},
        norm="layer",
        names={"post_attention_layernorm": "attn_output_norm", "post_mlp_layernorm": "layer_output_norm"},
        steps=("fused_qkv",),
        pooling="mean",
    ),
    "gemma-embedding": Model(
        "gemma-embedding",
        "Gemma3Text",
        {**_SLIDING, "use_bidirectional_attention": True, "query_pre_attn_scalar": SIZE},
        {**_PATTERN, "attention.causal": False, "rope.freq_base": 1e6, "pooling_type": 1},
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        },
        steps=("norms", "dense"),
        pooling="mean",
    ),
    "modern-bert": Model(
        "modern-bert",
        "ModernBert",
        {"local_attention": 24, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"attention.head_count_kv": 4, "attention.causal": False, "rope.freq_base": 1e5, **_WINDOW},
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        },
        norm="layer",
        pooling="mean",
    ),
    "eurobert": Model("eurobert", "EuroBert", keys={"attention.causal": False}, pooling="mean"),
    "llama-embed": Model("llama-embed", "EuroBert", keys={"pooling_type": 3}, steps=_PAIRS, pooling="last"),
    "qwen3-embedding": Model("qwen3", "Qwen3", keys={"pooling_type": 3}, pooling="last"),
    "llama-embedding": Model("llama", "Llama", keys={"pooling_type": 1}, steps=_PAIRS, pooling="mean"),
    "hunyuan-embedding": Model("hunyuan-dense", "HunYuanDenseV1", pooling="last"),
}
"""Models whose results are embeddings."""

LENGTHS = (20, 70)
"""Tokens of the texts whose embeddings are recorded."""


def pooled(model: Model, length: int) -> np.ndarray:
    """Factors of the results of a text's tokens."""
    share = {"mean": np.full(length, 1 / length), "cls": np.eye(length)[0], "last": np.eye(length)[-1]}
    return share[model.pooling].astype("float32")


def dense_layers(model: Model) -> dict[str, np.ndarray]:
    """Matrices by which an embedding is multiplied, in order."""
    generator = np.random.default_rng(2)
    shapes = {"dense_2.weight": (96, WIDTH), "dense_3.weight": (WIDTH, 96)} if "dense" in model.steps else {}
    return {name: generator.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}


def class_of(model: Model) -> str:
    """Name of the class in `transformers`."""
    return f"{model.family}{'Model' if model.pooling or model.family.endswith('LMHead') else 'ForCausalLM'}"


def config_of(model: Model) -> dict[str, Any]:
    """Parameters of the configuration in `transformers`."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": model.rope if "full_attention" in model.rope else {**_ROPE, **model.rope},
        **model.config,
    }
    if model.family == "Falcon":
        del options["head_dim"]
    return options


def weights_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Random weights with the names in `transformers`: products keep the spread of their inputs."""
    generator, weights = np.random.default_rng(0), {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        numbers = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) < 2:
            weights[name] = np.asarray(numbers * 0.2 + name.endswith("weight"), "float32")
        else:
            weights[name] = numbers * (1 if re.search("emb|wte|wpe", name) else shape[-1] ** -0.5)
    return weights


_NAMES = {
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
"""Ends of names that the package `gguf` does not translate, or not for every architecture."""


def tensors_of(model: Model, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a file by their names, as llama.cpp's converter makes them of the weights."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[model.architecture]
    table = gguf.get_tensor_name_map(architecture, model.layers)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in (_delta_weights(model, weights) if "delta" in model.steps else weights).items():
        if name.startswith("lm_head") and model.config.get("tie_word_embeddings"):
            continue
        if name.endswith("e_score_correction_bias"):
            weight = weight.reshape(-1)
        layer = re.search(r"(?:layers?|h)\.(\d+)\.", name)
        prefix, end = (f"blk.{layer[1]}.", name[layer.end() :]) if layer else ("", name)
        stem, _, suffix = end.rpartition(".")
        if (model.names | _NAMES).get(end):
            tensors[prefix + (model.names | _NAMES)[end]] = weight
        elif (model.names | _NAMES).get(stem):
            tensors[f"{prefix}{(model.names | _NAMES)[stem]}.{suffix}"] = weight
        elif ".act_fn." in name:  # a number of a layer, which is metadata
            tensors[f"xielu.{suffix}"] = np.append(tensors.get(f"xielu.{suffix}", []), weight)
        elif "altup_" in name and "_projections." in name:  # in order
            part = f"altup_{'unembd_' if 'unembed' in name else ''}proj.weight"
            tensors[part] = np.stack([*tensors.get(part, []), weight])
        elif ".experts." in name:
            weight = weight.swapaxes(1, 2) if "transposed_experts" in model.steps else weight
            gate_up = suffix == "gate_up_proj" and "merged_experts" not in model.steps
            parts = np.split(weight, 2, axis=1) if gate_up else [weight]
            ends = ("gate", "up") if gate_up else ("gate_up" if suffix == "gate_up_proj" else "down",)
            for part, data in zip(ends, parts, strict=True):
                tensors[f"{prefix}ffn_{part}_exps.weight"] = data
        elif "layernorm.norms" in name:
            part = f"{prefix}attn_{stem.split('.')[1][0]}_norm.weight"
            tensors[part] = np.stack([*tensors.get(part, []), weight])
        elif "fused_qkv" in model.steps and re.fullmatch(r"self_attn\.[qkv]_proj", stem):
            tensors[f"{prefix}attn_{stem[10]}.{suffix}"] = weight
        else:
            found = [table.get_name(each, (".weight", ".bias")) for each in (name, name.removeprefix("model."))]
            tensors[found[0] or found[1]] = weight
    tensors |= dense_layers(model)
    for name in list(tensors):
        tensors[name] = _changed(model, name, tensors[name])
    if "fused_qkv" in model.steps:
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.pop(name.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
            tensors[name.replace("attn_q.", "attn_qkv.")] = np.concatenate(parts)
    if "proportional" in model.steps:
        tensors["rope_freqs.weight"] = np.repeat(np.array([1.0, 1e30], "float32"), [4, 12])
    if "long_rope" in model.steps:
        for end, factors in _LONG.items():
            tensors[f"rope_factors_{end.removesuffix('_factor')}.weight"] = np.array(factors, "float32")
    return tensors


def _delta_weights(model: Model, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights whose layers with the delta rule have the parts and the order of heads that files have."""
    sizes = [
        model.config[f"linear_{key}"] for key in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    ]
    key_heads, key_size, heads, size = sizes
    keys, group = 2 * key_heads * key_size, heads // key_heads
    order = np.arange(heads).reshape(key_heads, group).T.reshape(-1) if "tiled" in model.steps else np.arange(heads)
    rows = (order[:, None] * size + np.arange(size)).reshape(-1)
    channels = np.concatenate([np.arange(keys), keys + rows])
    result = {}
    for name, weight in weights.items():
        end = name.partition("linear_attn.")[2]
        if end == "in_proj_qkvz.weight":
            parts = np.split(
                weight.reshape(key_heads, -1, weight.shape[1]), np.cumsum([key_size] * 2 + [group * size]), axis=1
            )
            query, key, value, gate = (part.reshape(-1, weight.shape[1]) for part in parts)
            result[name.replace("qkvz", "qkv")] = np.concatenate([query, key, value])
            result[name.replace("qkvz", "z")] = gate
            continue
        if end == "A_log":
            weight = -np.exp(weight)
        if end in ("in_proj_qkv.weight", "conv1d.weight"):
            weight = weight.reshape(weight.shape[0], -1)[channels]
        elif end == "in_proj_z.weight":
            weight = weight[rows]
        elif end == "out_proj.weight":
            weight = weight[:, rows]
        elif end in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            weight = weight[order]
        result[name] = weight
    return result


def _changed(model: Model, name: str, weight: np.ndarray) -> np.ndarray:
    """The numbers of a tensor in the order of the file."""
    if "pairs" in model.steps and re.search(r"\.attn_[qk]\.", name):
        return weight.reshape(-1, 2, SIZE // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if "joint_qkv" in model.steps and ".attn_qkv." in name:
        per_group = HEADS // model.kv_heads
        groups = weight.reshape(model.kv_heads, per_group + 2, SIZE, *weight.shape[1:])
        parts = groups[:, :per_group], groups[:, per_group : per_group + 1], groups[:, per_group + 1 :]
        return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])
    if "transposed" in model.steps and weight.ndim == 2 and name.startswith("blk."):
        return np.ascontiguousarray(weight.T)
    has_offset = "norms" in model.steps and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
    return weight + 1 if has_offset else weight


def write(path: Path, model: Model, tensors: Mapping[str, np.ndarray], kind: str = "F32", fields: Any = None) -> Path:
    """Write a file with matrices of type `kind`, and further fields."""
    writer = gguf.GGUFWriter(path, model.architecture)
    eps = "attention.layer_norm_epsilon" if model.norm == "layer" else "attention.layer_norm_rms_epsilon"
    fields = dict(fields or {})
    own = {
        "block_count": model.layers,
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "feed_forward_length": 128,
        "attention.head_count": HEADS,
        "attention.head_count_kv": model.kv_heads,
        eps: 1e-5,
        **model.keys,
    }
    fields |= {name: list(map(float, values)) for name, values in tensors.items() if name.startswith("xielu.")}
    fields |= {f"{model.architecture}.{key}": value for key, value in own.items()}
    for key, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, weight in tensors.items():
        if name in fields:
            continue
        is_matrix = weight.ndim > 1 and "norm" not in name and weight.shape[-1] % 32 == 0
        number = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        data = np.ascontiguousarray(weight)
        writer.add_tensor(name, gguf.quants.quantize(data, number), raw_dtype=number)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def recorded(name: str) -> tuple[dict[str, tuple[int, ...]], np.ndarray]:
    """Names and shapes of a model's weights in `transformers`, and its logits at `ROWS` or embeddings of `LENGTHS`."""
    with np.load(RECORDED) as archive:
        return json.loads(str(archive[f"{name}/shapes"])), archive[f"{name}/logits"]
