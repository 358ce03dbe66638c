"""The float64 reference against the authors' models in `transformers`, with the same random weights."""

import gguf
import numpy as np
import pytest

from llm.gguf_files import LLAMA3, MODELS, write_gguf
from llm.reference_model import ReferenceModel

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen2moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "glm4moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM"),
    "deepseek2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek2": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
GLM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
LATENT_NAMES = {
    **GLM_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
OSS_NAMES = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
# Gemma norms before and after both parts of a layer, so that one name means another norm than elsewhere.
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def family_of(sizes):
    """The family of a model, by which `CLASSES` has it: a llama with experts is a Mixtral."""
    if sizes.architecture == "deepseek2":
        return "deepseek2" if sizes.biased else "deepseek2-lite"
    return "mixtral" if sizes.architecture == "llama" and sizes.experts else sizes.architecture


def config_of(sizes, reference):
    """The sizes in transformers' words."""
    rope = {"rope_type": "default", "rope_theta": sizes.rope_base}
    if sizes.rope_factors:
        rope = {**LLAMA3, "rope_type": "llama3", "rope_theta": sizes.rope_base}
    options = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.size,
        "rms_norm_eps": sizes.eps,
        "max_position_embeddings": sizes.context,
        "tie_word_embeddings": sizes.tied or sizes.architecture.startswith("gemma"),
        "rope_parameters": rope,
        "attn_implementation": "eager",
    }
    if sizes.experts:
        options |= {"num_experts": sizes.experts, "num_experts_per_tok": sizes.experts_used}
        options |= {"moe_intermediate_size": sizes.expert_width, "norm_topk_prob": sizes.architecture == "qwen3moe"}
        options |= {"shared_expert_intermediate_size": sizes.shared_width}
    if sizes.latent:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        query_rank, rank, key_size, value_size = sizes.latent
        options |= dict(zip(names, (query_rank or None, rank, key_size - sizes.rotary, value_size), strict=True))
        options |= {"qk_rope_head_dim": sizes.rotary, "head_dim": sizes.rotary, "num_key_value_heads": sizes.heads}
        options |= {"n_group": sizes.groups or 1, "topk_group": sizes.groups_used or 1, "topk_method": "greedy"}
        rope |= {"mscale": sizes.yarn[2] * 10, "mscale_all_dim": sizes.yarn[2] * 10}
    if sizes.architecture in ("glm4moe", "deepseek2"):
        options |= {"n_routed_experts": sizes.experts, "n_shared_experts": sizes.shared_width // sizes.expert_width}
        options |= {"norm_topk_prob": sizes.normalizes, "routed_scaling_factor": sizes.expert_scale or 1.0}
        options |= {"first_k_dense_replace": sizes.dense_layers, "use_qk_norm": True}
    if sizes.architecture == "glm4moe":
        options["attention_bias"] = True
        rope["partial_rotary_factor"] = sizes.rotary / sizes.size
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    options |= dict(zip(names, sizes.scales, strict=False))
    if family_of(sizes) in ("mixtral", "granitemoe", "olmoe", "gpt-oss"):
        options |= {"num_local_experts": sizes.experts, "intermediate_size": sizes.expert_width}
    if sizes.yarn:
        rope |= {"rope_type": "yarn", "factor": float(sizes.yarn[0])}
        rope |= {"original_max_position_embeddings": sizes.yarn[1]}
    if sizes.architecture == "gpt-oss" or sizes.architecture.startswith("gemma"):
        kinds = ["sliding_attention" if reference.window(at) else "full_attention" for at in range(sizes.layers)]
        options |= {"sliding_window": sizes.window, "layer_types": kinds, "query_pre_attn_scalar": sizes.size}
    if sizes.architecture == "gemma2":
        options |= {"attn_logit_softcapping": sizes.attention_softcap, "final_logit_softcapping": sizes.final_softcap}
    if sizes.architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": sizes.local_rope_base}
        options["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return getattr(transformers, CLASSES[family_of(sizes)][0])(**options)


def in_halves(rows, size):
    """Rows of llama's queries or keys as transformers has them: pairs lie half a head apart, not side by side."""
    return rows.reshape(-1, size // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def state_of(path, sizes):
    """The weights of a file under transformers' names."""
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    state = {"model.embed_tokens.weight": tensors.pop("token_embd.weight")}
    state["lm_head.weight"] = tensors.pop("output.weight", state["model.embed_tokens.weight"])
    state["model.norm.weight"] = tensors.pop("output_norm.weight")
    tensors.pop("rope_freqs.weight", None)
    names = NAMES | (GEMMA_NAMES if sizes.architecture.startswith("gemma") else {})
    names = names | (LATENT_NAMES if sizes.latent else {})
    names = names | (OSS_NAMES if sizes.architecture == "gpt-oss" else {})
    names = names | (GLM_NAMES if sizes.architecture == "glm4moe" else {})
    for layer in range(sizes.layers):
        of_layer = {name.split(".", 2)[2]: w for name, w in tensors.items() if name.startswith(f"blk.{layer}.")}
        experts = ""
        if sizes.latent and not sizes.joined:
            keys, values = of_layer.pop("attn_k_b.weight"), of_layer.pop("attn_v_b.weight")
            both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
            state[f"model.layers.{layer}.self_attn.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
        if sizes.architecture == "gpt-oss":
            experts = f"model.layers.{layer}.mlp.experts"
            for end, target in (("weight", ""), ("bias", "_bias")):
                parts = (of_layer.pop(f"ffn_{part}_exps.{end}") for part in ("gate", "up", "down"))
                gate, up, down = (part.swapaxes(1, -1) for part in parts)
                state[f"{experts}.gate_up_proj{target}"] = np.stack([gate, up], -1).reshape(*gate.shape[:-1], -1)
                state[f"{experts}.down_proj{target}"] = down
            state[f"model.layers.{layer}.self_attn.sinks"] = of_layer.pop("attn_sinks.weight")
        if "ffn_gate_exps.weight" in of_layer:
            gates, ups = of_layer.pop("ffn_gate_exps.weight"), of_layer.pop("ffn_up_exps.weight")
            experts = "block_sparse_moe" if sizes.architecture == "granitemoe" else "mlp"
            state[f"model.layers.{layer}.{experts}.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
            state[f"model.layers.{layer}.{experts}.experts.down_proj"] = of_layer.pop("ffn_down_exps.weight")
        for name, weight in of_layer.items():
            if sizes.architecture in ("llama", "granite", "granitemoe") and name in ("attn_q.weight", "attn_k.weight"):
                weight = in_halves(weight, sizes.size)
            if name == "ffn_gate_inp_shexp.weight":
                weight = weight[None]
            first, last = name.split(".")
            target = names[first]
            if name == "ffn_gate_inp.weight" and experts == "block_sparse_moe":
                target = "block_sparse_moe.router"
            target = f"{target}.{last}" if first != "exp_probs_b" else target
            state[f"model.layers.{layer}.{target}"] = weight
    if sizes.architecture.startswith("gemma"):
        state = {name: weight - ("norm" in name) for name, weight in state.items()}
    return {name: torch.from_numpy(np.array(weight)) for name, weight in state.items()}


@pytest.mark.parametrize("name", MODELS)
def test_reference_computes_what_transformers_does(name, tmp_path):
    sizes = MODELS[name]
    path = write_gguf(tmp_path / "model.gguf", sizes)
    reference = ReferenceModel(path)
    model = getattr(transformers, CLASSES[family_of(sizes)][1])(config_of(sizes, reference)).eval()
    model.load_state_dict(state_of(path, sizes))
    tokens = np.random.default_rng(1).integers(0, sizes.vocabulary, 100)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(reference.logits(tokens), expected, atol=2e-4)
