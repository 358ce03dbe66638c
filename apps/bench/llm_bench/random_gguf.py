"""Language models with random weights as GGUF files, in the form that llama.cpp's converter writes.

python apps/bench/llm_bench/random_gguf.py tinyllama.gguf      # 1.1 billion parameters in 4 bits
python apps/bench/llm_bench/random_gguf.py mixture.gguf --shape mixture    # 64 experts, 8 for each token
python apps/bench/llm_bench/random_gguf.py model.gguf --shape 30b-a3b --sparse    # 17 GB, of which no disk has any

Keys and tensors have the names that llama.cpp reads, rows of llama's queries and keys are in pairs for its rotary
embedding, and norms of Gemma include the 1 that its authors' code adds. Block-quantized weights are random bits with
scales for the wanted spread: the package `gguf` reads K types but does not write them, and writes the others slowly.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as BlockType
from gguf import GGUFWriter

GEMMAS = ("gemma2", "gemma3")
ARCHITECTURES = (
    "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "olmoe", "granite", "granitemoe", "glm4moe", "gpt-oss",
    "deepseek2", *GEMMAS,
)  # fmt: skip
# Architectures whose experts have a width of their own, and those whose files state their routing.
OWN_WIDTH = ("qwen2moe", "qwen3moe", "glm4moe", "gpt-oss", "deepseek2")
STATED = ("glm4moe", "deepseek2")
# Tensors that are always float32: those of one dimension, and routers of experts.
PLAIN = ("*norm.weight", "*.bias", "*attn_sinks.weight", "rope_freqs.weight", "*ffn_gate_inp*.weight")
# Offsets of a block's float16 scales, and the ratio of the second (of minimums) to the first, so that the weights'
# mean is near 0.
SCALES = {
    BlockType.Q4_0: {0: 1.0},
    BlockType.Q4_1: {0: 1.0, 2: -7.5},
    BlockType.Q5_0: {0: 1.0},
    BlockType.Q5_1: {0: 1.0, 2: -15.5},
    BlockType.Q8_0: {0: 1.0},
    BlockType.Q4_K: {0: 1.0, 2: 7.5},
    BlockType.Q5_K: {0: 1.0, 2: 15.5},
    BlockType.Q6_K: {208: 1.0},
    BlockType.Q2_K: {80: 1.0, 82: 1.5},
    BlockType.Q3_K: {108: 1.0},
    BlockType.Q1_0: {0: 1.0},
    BlockType.TQ2_0: {64: 1.0},
    BlockType.TQ1_0: {52: 1.0},
    BlockType.MXFP4: {},
    BlockType.NVFP4: {},
    BlockType.IQ1_M: {},
    **{kind: {0: 1.0} for kind in BlockType if kind.name.startswith("IQ") and kind != BlockType.IQ1_M},
}


@dataclass(frozen=True)
class Sizes:
    """A language model's architecture and sizes; the default is a tiny llama.

    Attributes
    ----------
    architecture : str
        GGUF's name of the architecture, one of `ARCHITECTURES`.
    layers, width, feed_forward, heads, kv_heads, size, vocabulary, context : int
        Sizes; `size` is that of a head, `context` the number of positions that the model was trained for.
    tied : bool
        If true, the embeddings are the output projection, too, as always in Gemma.
    rope_base, local_rope_base : float
        Bases of the rotary embedding, in all layers and in those with a window (Gemma 3).
    rope_factors : tuple of float
        Divisors of llama 3's frequencies: size // 2 numbers, or none.
    window, pattern : int
        Gemma: positions that a layer with a window sees, its own included; the last of `pattern` layers lacks a window,
        0 for llama.cpp's default (2 for Gemma 2, 6 for Gemma 3).
    attention_softcap, final_softcap : float
        Soft caps of Gemma 2.
    experts, experts_used, expert_width, shared_width : int
        Sizes of a mixture of experts; `shared_width` is that of the expert of all tokens, 0 for none.
    scales : tuple of float
        Granite's factors of embeddings, residuals and attention scores, and the divisor of logits.
    dense_layers : int
        Number of layers at the beginning that have no experts.
    expert_scale : float
        Factor of the experts' shares; 0 for none.
    gating : int
        GGUF's number of the function of scores; 0 for the architecture's, without a key.
    normalizes : bool
        True if the shares of a token's experts sum to their factor, for architectures whose files state it.
    groups, groups_used : int
        Number of groups of experts, and of those that a token chooses from; 0 without groups.
    rotary : int
        Number of rotated elements of a head; 0 for all.
    yarn : tuple of float
        Factor of YaRN, the context before it, and perhaps a tenth of the multiplier of its magnitude; none without.
    latent : tuple of int
        Ranks of queries (0: without) and of keys, and sizes of a head's key and value, for an attention with compressed
        keys and values; none without.
    joined : bool
        True if keys and values of all heads are products with one matrix, as in older files.
    biased : bool
        True if the choice of experts has biases.
    """

    architecture: str = "llama"
    layers: int = 2
    width: int = 256
    feed_forward: int = 512
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    vocabulary: int = 320
    context: int = 512
    eps: float = 1e-5
    tied: bool = False
    rope_base: float = 10000.0
    local_rope_base: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    window: int = 0
    pattern: int = 0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    shared_width: int = 0
    scales: tuple[float, ...] = ()
    dense_layers: int = 0
    expert_scale: float = 0.0
    gating: int = 0
    normalizes: bool = False
    groups: int = 0
    groups_used: int = 0
    rotary: int = 0
    yarn: tuple[float, ...] = ()
    latent: tuple[int, ...] = ()
    joined: bool = False
    biased: bool = False


TINYLLAMA = Sizes(
    layers=22, width=2048, feed_forward=5632, heads=32, kv_heads=4, size=64, vocabulary=32000, context=2048
)
LLAMA_8B = Sizes(
    layers=32, width=4096, feed_forward=14336, heads=32, kv_heads=8, size=128, vocabulary=128256, context=8192,
    rope_base=5e5,
)  # fmt: skip
# Layers like those of Qwen 3 30B-A3B, but fewer, with half as many experts.
MIXTURE = Sizes(
    "qwen3moe", layers=4, width=2048, heads=32, kv_heads=4, size=128, vocabulary=32000, context=4096, eps=1e-6,
    rope_base=1e6, experts=64, experts_used=8, expert_width=768,
)  # fmt: skip
# In 4 bits, it has 17 GB.
QWEN3_30B = replace(MIXTURE, layers=48, vocabulary=151936, context=40960, experts=128)
LLAMA_70B = replace(LLAMA_8B, layers=80, width=8192, feed_forward=28672, heads=64)
SHAPES = {
    "tiny": Sizes(), "1b": TINYLLAMA, "8b": LLAMA_8B, "70b": LLAMA_70B, "mixture": MIXTURE, "30b-a3b": QWEN3_30B,
}  # fmt: skip
# Types of llama.cpp's Q4_K_M, without the layers with more bits.
FOUR_BITS = {"output.weight": "Q6_K", "*attn_v.weight": "Q6_K", "*": "Q4_K"}


RANDOM_ROWS = 8209
"""Maximum of different rows of a tensor, a prime number, so that no two experts are equal."""


def random_blocks(
    kind: BlockType, rows: int, columns: int, spread: float, generator: np.random.Generator
) -> np.ndarray:
    """Random weights of one type.

    Parameters
    ----------
    kind : BlockType
    rows, columns : int
        `columns` is a multiple of the type's block.
    spread : float
        Standard deviation of the weights.
    generator : np.random.Generator

    Returns
    -------
    np.ndarray
        Shape (rows, n): n numbers if numpy has the type, else n bytes.
    """
    if kind not in SCALES:
        weights = generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)
        return gguf.quants.quantize(weights, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if columns % block:
        raise ValueError(f"rows of {columns} weights are no whole blocks of {block} as {kind.name} has them")
    count = rows * columns // block
    blocks = np.frombuffer(bytearray(generator.bytes(count * size)), np.uint8).reshape(count, size)
    _set_scales(blocks[:256], kind, np.ones(len(blocks[:256])))
    # The package gguf lacks Q1_0, whose weights are plus or minus their scale.
    unit = 1.0 if kind == BlockType.Q1_0 else float(gguf.quants.dequantize(blocks[:256], kind).std())
    # Scales of either sign: codes of some types lie around -1/2, not 0.
    scales = generator.uniform(0.5, 1.5, count) * generator.choice((-1, 1), count)
    _set_scales(blocks, kind, scales * spread / unit)
    return blocks.reshape(rows, -1)


def _set_scales(blocks: np.ndarray, kind: BlockType, scales: np.ndarray) -> None:
    if kind == BlockType.MXFP4:  # a power of two
        blocks[:, 0] = 127 + np.round(np.log2(np.abs(scales)))
    if kind == BlockType.NVFP4:  # the upper bits of a float16, with another bias of the exponent
        blocks[:, :4] = ((np.abs(scales) / 2**7).astype("<f2").view("<u2") >> 7)[:, None]
    if kind == BlockType.IQ1_M:  # in the high bits of the words of the blocks' scales
        bits = scales.astype("<f2").view("<u2")
        for word in range(4):
            blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | (bits >> 4 * word & 15) << 4
    for offset, share in SCALES[kind].items():
        blocks[:, offset : offset + 2] = (scales * share).astype("<f2")[:, None].view(np.uint8)


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by their names, in numpy's order: the innermost dimension last."""
    width, feed_forward = sizes.width, sizes.feed_forward
    table: dict[str, tuple[int, ...]] = {"token_embd.weight": (sizes.vocabulary, width), "output_norm.weight": (width,)}
    if not (sizes.tied or sizes.architecture in GEMMAS):
        table["output.weight"] = (sizes.vocabulary, width)
    if sizes.rope_factors:
        table["rope_freqs.weight"] = (sizes.size // 2,)
    for layer in range(sizes.layers):
        ffn_norm = "post_attention_norm" if sizes.architecture in ("glm4moe", "gpt-oss") else "ffn_norm"
        tensors: dict[str, tuple[int, ...]] = {"attn_norm.weight": (width,), f"{ffn_norm}.weight": (width,)}
        if sizes.latent:
            tensors |= _latent_shapes(sizes)
        for name, heads in () if sizes.latent else (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            tensors[f"attn_{name}.weight"] = (heads * sizes.size, width)
            if sizes.architecture in ("qwen2", "qwen2moe", "glm4moe", "gpt-oss"):
                tensors[f"attn_{name}.bias"] = (heads * sizes.size,)
            if name != "v" and sizes.architecture in ("qwen3", "qwen3moe", "gemma3", "olmoe", "glm4moe"):
                is_wide = sizes.architecture == "olmoe"
                tensors[f"attn_{name}_norm.weight"] = (heads * sizes.size if is_wide else sizes.size,)
        tensors["attn_output.weight"] = (width, sizes.heads * (sizes.latent[3] if sizes.latent else sizes.size))
        if sizes.architecture == "gpt-oss":
            tensors |= {"attn_output.bias": (width,), "attn_sinks.weight": (sizes.heads,)}
        if sizes.architecture in GEMMAS:
            tensors |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
        if layer >= sizes.dense_layers and sizes.experts:
            inner = (sizes.experts, sizes.expert_width, width)
            tensors |= {"ffn_gate_inp.weight": (sizes.experts, width), "ffn_gate_exps.weight": inner}
            tensors |= {"ffn_up_exps.weight": inner, "ffn_down_exps.weight": (inner[0], width, inner[1])}
            if sizes.shared_width:
                inner = (sizes.shared_width, width)
                if sizes.architecture == "qwen2moe":
                    tensors["ffn_gate_inp_shexp.weight"] = (width,)
                tensors |= {"ffn_gate_shexp.weight": inner, "ffn_up_shexp.weight": inner}
                tensors["ffn_down_shexp.weight"] = inner[::-1]
            if sizes.architecture == "gpt-oss":
                names = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
                tensors |= {f"{name}.bias": tensors[f"{name}.weight"][:-1] for name in names}
            if sizes.biased:
                tensors["exp_probs_b.bias"] = (sizes.experts,)
        else:
            tensors |= {"ffn_gate.weight": (feed_forward, width), "ffn_up.weight": (feed_forward, width)}
            tensors["ffn_down.weight"] = (width, feed_forward)
        table |= {f"blk.{layer}.{name}": shape for name, shape in tensors.items()}
    return table


def _latent_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of an attention with compressed keys and values."""
    query_rank, rank, key_size, value_size = sizes.latent
    queries = sizes.heads * key_size
    tensors: dict[str, tuple[int, ...]] = {"attn_q.weight": (queries, sizes.width)}
    if query_rank:
        tensors = {"attn_q_a.weight": (query_rank, sizes.width), "attn_q_a_norm.weight": (query_rank,)}
        tensors["attn_q_b.weight"] = (queries, query_rank)
    tensors |= {"attn_kv_a_mqa.weight": (rank + sizes.rotary, sizes.width), "attn_kv_a_norm.weight": (rank,)}
    if sizes.joined:
        return tensors | {"attn_kv_b.weight": (sizes.heads * (key_size - sizes.rotary + value_size), rank)}
    return tensors | {
        "attn_k_b.weight": (sizes.heads, rank, key_size - sizes.rotary),
        "attn_v_b.weight": (sizes.heads, value_size, rank),
    }


def write_gguf(
    path: Path | str,
    sizes: Sizes,
    types: Mapping[str, str] | str = "F32",
    seed: int = 0,
    chat_template: str | None = None,
    sparse: bool = False,
) -> Path:
    """Write a model with random weights.

    Parameters
    ----------
    path : Path or str
    sizes : Sizes
    types : mapping of str to str, or str
        Types of tensors by patterns of their names, the first match decides, such as ``{"output*": "Q6_K",
        "*": "Q4_K"}``; or one for all. Norms, biases and routers of experts are always float32.
    seed : int
        Seed of the weights.
    chat_template : str, optional
        Template that makes a prompt of a conversation.
    sparse : bool
        If true, weights are a hole at the end of the file, which takes neither time nor space.

    Returns
    -------
    Path
        `path`.
    """
    patterns = {"*": types} if isinstance(types, str) else dict(types)
    generator = np.random.default_rng(seed)
    writer = GGUFWriter(path, sizes.architecture)
    _add_keys(writer, sizes)
    _add_vocabulary(writer, sizes.vocabulary)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in shapes(sizes).items():
        plain = any(fnmatch.fnmatch(name, pattern) for pattern in PLAIN)
        kind = next(kind for pattern, kind in patterns.items() if fnmatch.fnmatch(name, pattern))
        if sparse:
            kind = BlockType.F32 if plain else BlockType[kind]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            count = int(np.prod(shape)) // block * size
            writer.add_tensor_info(name, shape, np.dtype("float32"), count, kind)
            continue
        if plain:
            writer.add_tensor(name, _plain(name, shape, sizes, generator))
            continue
        spread = 0.1 if name == "token_embd.weight" else shape[-1] ** -0.5
        rows = int(np.prod(shape[:-1]))
        data = random_blocks(BlockType[kind], min(rows, RANDOM_ROWS), shape[-1], spread, generator)
        data = data if len(data) == rows else np.resize(data, (rows, data.shape[1]))
        writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=BlockType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if sparse:
        writer.write_ti_data_to_file()
        (file,), (tensors,) = writer.fout, writer.tensors
        padded = [GGUFWriter.ggml_pad(tensor.nbytes, writer.data_alignment) for tensor in tensors.values()]
        file.truncate(GGUFWriter.ggml_pad(file.tell(), writer.data_alignment) + sum(padded))
    else:
        writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _plain(name: str, shape: tuple[int, ...], sizes: Sizes, generator: np.random.Generator) -> np.ndarray:
    """A tensor that is float32 in every file; norms are near 1, so that misplaced ones show."""
    if name == "rope_freqs.weight":
        return np.array(sizes.rope_factors, "float32")
    if name.endswith("norm.weight"):
        return generator.uniform(0.5, 1.5, shape).astype("float32")
    return generator.standard_normal(shape).astype("float32") * np.float32(0.2)


def _add_keys(writer: GGUFWriter, sizes: Sizes) -> None:
    """The keys that llama.cpp's converter writes for the architecture, and no others."""
    architecture = sizes.architecture
    writer.add_name("random")
    writer.add_block_count(sizes.layers)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.feed_forward)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv((sizes.heads if sizes.joined else 1) if sizes.latent else sizes.kv_heads)
    writer.add_layer_norm_rms_eps(sizes.eps)
    if sizes.latent:
        query_rank, rank, key_size, value_size = sizes.latent
        if query_rank:
            writer.add_q_lora_rank(query_rank)
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(key_size if sizes.joined else rank + sizes.rotary)
        writer.add_value_length(value_size if sizes.joined else rank)
        if not sizes.joined:
            writer.add_key_length_mla(key_size)
            writer.add_value_length_mla(value_size)
    elif architecture not in ("qwen2", "qwen2moe"):
        writer.add_key_length(sizes.size)
        writer.add_value_length(sizes.size)
    if architecture != "gemma2":
        writer.add_rope_freq_base(sizes.rope_base)
    local_base, is_stated = sizes.local_rope_base, architecture in STATED
    optional: list[tuple[Callable[..., None], object]] = [
        (writer.add_sliding_window, sizes.window),
        (writer.add_sliding_window_pattern, sizes.pattern),
        (writer.add_attn_logit_softcapping, sizes.attention_softcap),
        (writer.add_final_logit_softcapping, sizes.final_softcap),
        (writer.add_expert_count, sizes.experts),
        (writer.add_expert_used_count, sizes.experts_used),
        # Other architectures' experts have the width of a feed-forward network.
        (writer.add_expert_feed_forward_length, architecture in OWN_WIDTH and sizes.expert_width),
        (writer.add_expert_shared_feed_forward_length, architecture == "qwen2moe" and sizes.shared_width),
        (writer.add_expert_shared_count, sizes.shared_width // (sizes.expert_width or 1) if is_stated else 0),
        (writer.add_leading_dense_block_count, sizes.dense_layers),
        (writer.add_expert_weights_scale, sizes.expert_scale),
        (writer.add_expert_weights_norm, sizes.normalizes),
        (writer.add_expert_gating_func, sizes.gating and gguf.ExpertGatingFuncType(sizes.gating)),
        (writer.add_expert_group_count, sizes.groups),
        (writer.add_expert_group_used_count, sizes.groups_used),
        (writer.add_rope_dimension_count, sizes.rotary or (architecture == "llama" and sizes.size)),
        (writer.add_vocab_size, architecture == "llama" and sizes.vocabulary),
        # Gemma 3 files without this key, which is newer, mean 10,000.
        (writer.add_rope_freq_base_swa, architecture == "gemma3" and local_base != 1e4 and local_base),
    ]
    if sizes.yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(sizes.yarn[0]))
        writer.add_rope_scaling_orig_ctx_len(int(sizes.yarn[1]))
        if len(sizes.yarn) > 2:
            writer.add_rope_scaling_yarn_log_mul(sizes.yarn[2])
    adds = writer.add_embedding_scale, writer.add_residual_scale, writer.add_attention_scale, writer.add_logit_scale
    optional += zip(adds, sizes.scales, strict=False)
    for add, value in optional:
        if value:
            add(value)


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """A vocabulary like SentencePiece's: three control tokens, all bytes, letters, and words that never occur."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokens += [chr(ord("a") + letter) for letter in range(26)]
    tokens += [f"\u2581word{number}" for number in range(size - len(tokens))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens[:size])
    writer.add_token_scores([-float(token) for token in range(size)])
    writer.add_token_types(kinds[:size])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


def main() -> None:
    """Write the model that benchmarks use."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b", help="sizes of the model; the default is 1b")
    parser.add_argument("--sparse", action="store_true", help="no weights: a hole, for plans that read none")
    parser.add_argument("--smoke", action="store_true", help="a model of a megabyte: does the command work?")
    options = parser.parse_args()
    sizes = SHAPES["tiny" if options.smoke else options.shape]
    print(write_gguf(options.path, sizes, FOUR_BITS, options.seed, sparse=options.sparse))


if __name__ == "__main__":
    main()
