"""Folders of Hugging Face with the random weights of a GGUF file: names, numbers and order of rows of transformers."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from llm import architecture_models as architectures
from llm.gguf_files import LLAMA3, MODELS, write_gguf
from llm.reference_model import ReferenceModel
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.frontend.gguf.weights import _without_ones
from relax_hetero.frontend.hub.classes import CLASSES as HUB_CLASSES
from relax_hetero.frontend.language_model_files import read_language_model

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
    return options


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
    return {name: np.array(weight) for name, weight in state.items()}


TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int8": "I8", "int32": "I32"}
TYPES |= {"int64": "I64", "float8_e4m3fn": "F8_E4M3"}


def write_safetensors(path, arrays):
    """Write a file of arrays by their names."""
    header, parts, end = {}, [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": TYPES[array.dtype.name], "shape": list(array.shape)}
        header[name]["data_offsets"] = [end, end := end + len(data)]
        parts.append(data)
    text = json.dumps(header).encode()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def write_sharded(folder, arrays, shards):
    """Write arrays to several files with an index."""
    names = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    files = {name: names[at % shards] for at, name in enumerate(arrays)}
    for file in names:
        write_safetensors(folder / file, {name: array for name, array in arrays.items() if files[name] == file})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def config_json(sizes, path):
    """A configuration as transformers writes it."""
    return {"architectures": [CLASSES[family_of(sizes)][1]], **config_of(sizes, ReferenceModel(path))}


def write_folder(name, folder, convert=None, **config):
    """A GGUF file and a folder of the same model; returns their paths.

    `convert` changes the arrays of the folder by their names, and `config` its configuration.
    """
    sizes = MODELS[name]
    path = write_gguf(folder / "model.gguf", sizes)
    target = folder / "hub"
    target.mkdir()
    values, arrays = {**config_json(sizes, path), **config}, state_of(path, sizes)
    if values["tie_word_embeddings"]:
        del arrays["lm_head.weight"]
    write_safetensors(target / "model.safetensors", arrays if convert is None else convert(arrays))
    (target / "config.json").write_text(json.dumps(values))
    return path, target


def assert_same_model(*paths):
    """Compare the tensors and hyperparameters of a folder and a file."""
    files = [read_language_model(path) for path in paths]
    tensors = [{t.name: (_without_ones(t.shape), t.type) for t in file.tensors.values()} for file in files]
    joined = {"attn_k_b", "attn_v_b", "attn_kv_b"}  # a file has one matrix of keys and values or two
    tensors = [{key: each[key] for key in each if key.split(".")[-2] not in joined} for each in tensors]
    assert tensors[0] == tensors[1]
    for key in tensors[0]:
        found, expected = (file.tensors[key].data for file in files)
        # 1 is subtracted from Gemma's norms, and added again; llama 3's factors are computed anew.
        tolerance = 1e-6 if key.endswith("norm.weight") or key == "rope_freqs.weight" else 0
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=tolerance, atol=tolerance, err_msg=key)
    models = [hyperparameters_of(file) for file in files]
    assert replace(models[0], attention_scale=models[0].scale_of(0)) == replace(
        models[1], attention_scale=models[1].scale_of(0)
    )


ARCHITECTURES = architectures.MODELS | architectures.ENCODERS


def _has_own_class(model):
    """True if its class is that of its architecture, not a look-alike."""
    name = architectures.class_of(model)
    row = HUB_CLASSES.get(name) or HUB_CLASSES.get(f"{name.removesuffix('Model')}ForCausalLM")
    return row is not None and row.architecture == model.architecture and "fused_qkv" not in model.steps


HUB_MODELS = [name for name, model in ARCHITECTURES.items() if _has_own_class(model)]


def architecture_file(name, shapes, folder):
    """A GGUF file of one of them."""
    model, weights = ARCHITECTURES[name], architectures.weights_of(shapes)
    if "tiled" in model.steps:  # folders keep the order of heads
        steps = tuple(step for step in model.steps if step != "tiled")
        model = replace(model, steps=steps, keys={**model.keys, "ssm.has_tiled_heads": False})
    return architectures.write(folder / "model.gguf", model, architectures.tensors_of(model, weights))


def architecture_folder(name, folder):
    """A file and a folder of one of them; models without a head lack the prefix of names."""
    model, (shapes, _) = ARCHITECTURES[name], architectures.recorded(name)
    config, target = (
        {"architectures": [architectures.class_of(model)], **architectures.config_of(model)},
        folder / "hub",
    )
    weights = architectures.weights_of(shapes)
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    if model.pooling:
        weights = {key.removeprefix("model."): array for key, array in weights.items()}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    write_safetensors(target / "model.safetensors", weights)
    write_pooling(model, target)
    return architecture_file(name, shapes, folder), target


def write_pooling(model, folder):
    """Modules of sentence-transformers of a model whose results are embeddings."""
    modes = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    if model.pooling:
        values = {f"pooling_mode_{mode}": model.pooling == kind for kind, mode in modes.items()}
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **values}))
    for name, matrix in architectures.dense_layers(model).items():
        module = folder / f"{name.removeprefix('dense_').removesuffix('.weight')}_Dense"
        module.mkdir()
        values = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (module / "config.json").write_text(json.dumps(values))
        write_safetensors(module / "model.safetensors", {"linear.weight": matrix})
