"""Classes of transformers whose folders are read, and how their tensors and numbers differ from those of GGUF files.

The rules are those of llama.cpp's converter. A class that only has other names for known facts is one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class HubClass:
    """A class of models."""

    # GGUF's name of the architecture, a key of `ARCHITECTURES`; also of its tensors in the package gguf.
    architecture: str
    # True if rows of queries and keys have to be reordered, so that neighbours are rotated together.
    has_pairs: bool = False
    norm_offset: float = 0.0  # number that is added to the weights of norms
    # True if all layers have a window, where the folder states its length but not which layers have it.
    has_windows: bool = False
    # True if stacked matrices of experts are (experts, in, out), and rows of gates and others alternate.
    has_interleaved_experts: bool = False
    has_transposed_experts: bool = False  # True if stacked matrices of experts are (experts, in, out)
    has_merged_experts: bool = False  # True if gates and others of experts stay one matrix
    # True if a matrix has the rows of queries, keys and values of each head of keys in turn.
    has_joint_qkv: bool = False
    has_transposed: bool = False  # True if matrices of layers are (in, out)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of the configuration that files may leave out
    # Values that count whatever files say, as the class does not read them.
    fixed: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 8192,
}
_GEMMA3 = HubClass(
    "gemma3",
    norm_offset=1.0,
    defaults={
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
)
_GEMMA3N = {
    **_GEMMA3.defaults,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "query_pre_attn_scalar": None,
}
_GEMMA4 = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
}
_LLAMA = HubClass("llama", has_pairs=True, defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048})
_MISTRAL = HubClass("llama", has_pairs=True, has_windows=True, fixed={"norm_topk_prob": None})
_QWEN = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "use_sliding_window": False}
_QWEN3NEXT = HubClass(
    "qwen35",
    norm_offset=1.0,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    fixed={"sliding_window": None, "norm_topk_prob": None},
)

CLASSES = {
    "LlamaForCausalLM": _LLAMA,
    "Llama4ForCausalLM": HubClass(
        "llama4",
        has_transposed_experts=True,
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16384,
            "attn_temperature_tuning": True,
        },
        fixed={"sliding_window": None},
    ),
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": HubClass("qwen2", defaults=_QWEN),
    "Qwen2MoeForCausalLM": HubClass("qwen2moe", defaults={**_QWEN, "norm_topk_prob": False}),
    "Qwen3ForCausalLM": HubClass("qwen3", defaults={**_QWEN, "head_dim": 128}),
    "Qwen3MoeForCausalLM": HubClass("qwen3moe", defaults={**_QWEN, "norm_topk_prob": False}),
    "Qwen3NextForCausalLM": replace(_QWEN3NEXT, architecture="qwen3next", fixed={"sliding_window": None}),
    "Qwen3_5ForCausalLM": _QWEN3NEXT,
    "Qwen3_5MoeForCausalLM": replace(_QWEN3NEXT, architecture="qwen35moe"),
    "Gemma2ForCausalLM": HubClass("gemma2", norm_offset=1.0, defaults={**_GEMMA, "sliding_window": 4096}),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma3nForCausalLM": HubClass("gemma3n", defaults=_GEMMA3N),
    "Gemma4ForCausalLM": HubClass("gemma4", has_merged_experts=True, defaults=_GEMMA4),
    "Qwen2VLForConditionalGeneration": HubClass("qwen2vl", defaults=_QWEN),
    "Qwen2_5_VLForConditionalGeneration": HubClass("qwen2vl", defaults=_QWEN),
    "Qwen3VLForConditionalGeneration": HubClass("qwen3vl", defaults={**_QWEN, "head_dim": 128}),
    "GraniteForCausalLM": HubClass("granite", has_pairs=True),
    "GraniteMoeForCausalLM": HubClass("granitemoe", has_pairs=True, fixed={"norm_topk_prob": None}),
    "OlmoeForCausalLM": HubClass("olmoe", defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False}),
    "Glm4MoeForCausalLM": HubClass("glm4moe", defaults={"partial_rotary_factor": 0.5}),
    "DeepseekV2ForCausalLM": HubClass("deepseek2", defaults={"scoring_func": "softmax", "topk_method": "greedy"}),
    "DeepseekV3ForCausalLM": HubClass("deepseek2", fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    "MiniCPM3ForCausalLM": HubClass(
        "minicpm3",
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
    "Ministral3ForCausalLM": HubClass("mistral3", has_pairs=True),
    "SmolLM3ForCausalLM": HubClass("smollm3", has_pairs=True, defaults={"use_sliding_window": False}),
    "ApertusForCausalLM": HubClass("apertus"),
    "ArceeForCausalLM": HubClass("arcee", has_pairs=True),
    "Ernie4_5ForCausalLM": HubClass("ernie4_5"),
    "Ernie4_5_MoeForCausalLM": HubClass("ernie4_5-moe"),
    "Exaone4ForCausalLM": HubClass("exaone4"),
    "SeedOssForCausalLM": HubClass("seed_oss"),
    "HunYuanDenseV1ForCausalLM": HubClass("hunyuan-dense"),
    "HunYuanMoEV1ForCausalLM": HubClass("hunyuan-moe", fixed={"n_shared_experts": 1}),
    "Dots1ForCausalLM": HubClass("dots1"),
    "MiniMaxM2ForCausalLM": HubClass("minimax-m2", fixed={"scoring_func": "sigmoid"}),
    "Olmo2ForCausalLM": HubClass("olmo2"),
    "Olmo3ForCausalLM": HubClass("olmo2"),
    "GlmForCausalLM": HubClass("chatglm", defaults={"partial_rotary_factor": 0.5}),
    "Glm4ForCausalLM": HubClass("glm4", defaults={"partial_rotary_factor": 0.5}),
    "GemmaForCausalLM": HubClass(
        "gemma", norm_offset=1.0, defaults=_GEMMA, fixed={"hidden_act": None, "query_pre_attn_scalar": None}
    ),
    "CohereForCausalLM": HubClass("command-r", defaults={"tie_word_embeddings": True, "logit_scale": 0.0625}),
    "Cohere2ForCausalLM": HubClass("cohere2", defaults={"tie_word_embeddings": True, "logit_scale": 0.0625}),
    "PhiForCausalLM": HubClass("phi2", defaults={"partial_rotary_factor": 0.5}),
    "Phi3ForCausalLM": HubClass("phi3", has_windows=True),
    "StableLmForCausalLM": HubClass("stablelm", defaults={"partial_rotary_factor": 0.25}),
    "NemotronForCausalLM": HubClass("nemotron", norm_offset=1.0, defaults={"partial_rotary_factor": 0.5}),
    "Jais2ForCausalLM": HubClass("jais2"),
    "Starcoder2ForCausalLM": HubClass("starcoder2", has_windows=True, defaults={"tie_word_embeddings": True}),
    "FalconForCausalLM": HubClass(
        "falcon",
        has_joint_qkv=True,
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True, "max_position_embeddings": 2048},
        fixed={"num_key_value_heads": None},
    ),
    "GPTNeoXForCausalLM": HubClass(
        "gptneox",
        has_joint_qkv=True,
        defaults={"use_parallel_residual": True, "partial_rotary_factor": 0.25},
        fixed={"num_key_value_heads": None},
    ),
    "GPT2LMHeadModel": HubClass(
        "gpt2",
        has_transposed=True,
        defaults={"tie_word_embeddings": True},
        fixed={"num_key_value_heads": None, "head_dim": None},
    ),
    "GPTBigCodeForCausalLM": HubClass(
        "starcoder",
        defaults={"tie_word_embeddings": True, "multi_query": True},
        fixed={"num_key_value_heads": None, "head_dim": None},
    ),
    "BertModel": HubClass("bert", fixed={"num_key_value_heads": None}),
    "NomicBertModel": HubClass("nomic-bert", fixed={"num_key_value_heads": None}),
    "ModernBertModel": HubClass("modern-bert", fixed={"num_key_value_heads": None}),
    "EuroBertModel": HubClass("eurobert"),
    "Gemma3TextModel": replace(_GEMMA3, architecture="gemma-embedding"),
    "GptOssForCausalLM": HubClass("gpt-oss", has_interleaved_experts=True),
}
"""Classes by their names in ``architectures`` of ``config.json``; ``XModel`` without a row is ``XForCausalLM``."""

TEXT_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Classes of the text models of classes without a row, by the ``model_type`` in their ``text_config``."""
