"""Architectures of language models: rows of what their files do not state.

The rules are those of llama.cpp (`src/llama-model.cpp`) and of the authors' code in `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Norms:
    """Norms of a layer, by the names of their tensors; without a name, nothing is normalized there."""

    kind: str = "rms"  # "rms": RMS norm; "layer": layer norm, with a bias if the file has one
    # Norms of the inputs. If one is optional and the file lacks it, the other is that of both. If both are the same,
    # attention and feed-forward are parallel: both read the normalized input of the layer, which gets their sum.
    attention: str = "attn_norm"
    feed_forward: str = "ffn_norm"
    skips_first: bool = False  # True if the first layer's attention reads the embeddings as they are
    # Norms of the results, before they are added to the residual.
    attention_out: str = ""
    feed_forward_out: str = ""
    # Norms of the residual, after they are added.
    attention_sum: str = ""
    feed_forward_sum: str = ""
    # Norms of queries and keys, if the file has them. "each": RMS norm of each head, with factors of all heads;
    # "rotated": the same after rotation; "unit": without factors after rotation, in rotated layers of models that have
    # them; "own": layer norm of each head, with factors of its own; "joint": RMS norm of all heads together.
    heads: str = "each"
    values: bool = False  # True if each head's values have an RMS norm without factors


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a sliding window."""

    period: int = 0  # default period of layers: the last layer of each period attends to all keys; 0: none does
    length: int | None = None  # default length of the window, 0 without; None: the file must state it
    base: float | None = None  # default base of rotary frequencies of these layers; None: that of the others
    is_scaled: bool = True  # True if the file's scaling of positions applies to them, too
    first_is_full: bool = False  # True if the first layer of each period attends to all keys, not the last
    are_rotated: bool = False  # True if these layers alone are rotated, in models that have any


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that its files do not state."""

    # Elements of a head that are rotated together: "pairs" (2i and 2i + 1), or "halves" (i and i + rotary_size / 2);
    # "": none, because positions have embeddings.
    rotary: str
    models: str = ""  # names of models that people know it by
    # Activation of the feed-forward network: "silu", "gelu", "gelu_tanh", "squared_relu", "xielu" with numbers that the
    # file states, or "clamped_swiglu", which also changes the other factor: ``gate * sigmoid(1.702 * gate) * (up +
    # 1)``, with gates of at most 7 and `up` from -7 to 7.
    activation: str = "silu"
    # True if the activation is that of a gate, whose product with `up` is the input of the last matrix. Gates may be
    # the first half of a matrix ``ffn_up``.
    is_gated: bool = True
    scaled_embedding: bool = False  # True if embeddings are multiplied by the square root of their width
    norms: Norms = Norms()
    # True if attention and feed-forward are parallel, even if their norms differ; None: the file states it.
    is_parallel: bool | None = False
    # False for encoders of whole texts, whose tokens attend to all others, within half a window on both sides.
    is_causal: bool = True
    # Layers with a sliding window; None: only those of a list of layers in the file, which llama.cpp ignores.
    windows: Windows | None = None
    unrotated_period: int = 0  # period of layers whose last layer is not rotated; 0: all layers are rotated
    # Number of layers that identifies the model whose attention scores are divided by the square root of hidden_size /
    # heads, instead of that of a head's size.
    wide_layers: int | None = None
    # Number of layers that identifies the model whose scores have biases in place of rotation, which is refused.
    alibi_layers: int | None = None
    routing: str = "softmax"  # name of the `RoutingKind` of files that do not state it
    normalizes_shares: bool = True  # True if the shares of a token's experts sum to 1, unless the file states it
    ffn_parts: int = 1  # number of matrices whose rows the file's width of the feed-forward network counts
    # True if keys and values of all heads are products with one vector of a token, which the cache stores (MLA).
    has_latent_attention: bool = False
    # True if the matrix of queries also has, after those of each head, rows of gates of the head's result.
    has_output_gate: bool = False
    # True if layers have the gated delta rule in place of attention, except the last of each period.
    has_delta_rule: bool = False
    # True if heads of values that read the same head of keys are `key_heads` apart, not neighbours.
    has_tiled_heads: bool = False
    may_lack_values: bool = False  # True if layers without a window and a matrix of values have keys as values
    attention_scale: float = 0.0  # factor of attention scores, unless the file states it; 0: that of a head's size
    logit_softcap: float = 0.0  # softcap of logits, unless the file states it; 0: none
    # True if layers add a dense network to experts, both with norms of their own; the router reads the residual.
    has_dense_beside_experts: bool = False
    has_streams: bool = False  # True if the residual has several streams (AltUp), and gates of some layers are sparse
    # Factor of what a layer adds, times the square root of the number of layers, unless the file states the factor; 0:
    # it is in `scales`.
    depth_scale: float = 0.0
    # Width of a smaller model, whose logits the larger one's are made as small as, unless the file states their factor;
    # 0: it is in `scales`.
    base_width: int = 0
    # Keys of factors that apply, with their defaults; None: the file must state it.
    scales: Mapping[str, float | None] = field(default_factory=dict)
    has_temperature: bool = False  # True if the file's factor applies by which queries grow with their position
    # This factor and the positions of its steps, unless the file states them, for layers that are not rotated, whose
    # positions count from 1; None: the file states the factor for all layers, or there is none.
    temperature: tuple[float, int] | None = None
    # Positions of the chunks within which rotated layers attend, unless the file states it; 0: all.
    attention_chunk: int = 0
    shared_experts: int = 0  # number of experts of all tokens, unless the file states it
    # True if the input of a token's only expert is multiplied by its share, not its result.
    has_scaled_inputs: bool = False
    multiplies_logits: bool = False  # True if logits are multiplied by the file's scale, not divided
    # 16-bit float that its models are trained in, used if the file's weights are quantized.
    trained_type: str = "bfloat16"
    # Names, without ``blk.N.``, of tensors that a file must have or may have, besides the tensors of every
    # architecture. All layers have the same tensors, except that dense layers have none of experts. As in llama.cpp, a
    # file with any other tensor is refused, because the model would compute something else without it.
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_OUTPUT = ("output.weight",)
_ROPE = (*_OUTPUT, "rope_freqs.weight")
"""The output matrix, if it is not that of embeddings, and divisors of frequencies, as of llama 3.1 and later."""
_BIASES = tuple(
    f"{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
)
_ANY_BIASES = (*_ROPE, *_BIASES)
_QKV = ("attn_qkv.weight", "attn_qkv.bias")  # one matrix of queries, keys and values
_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_NORM_BIASES = ("attn_norm.bias", "output_norm.bias")
_LAYER_BIASES = (*_NORM_BIASES, "ffn_norm.bias")
_OWN_BIASES = ("attn_output.bias", "ffn_up.bias", "ffn_down.bias")
_ALL_BIASES = (*_LAYER_BIASES, *_OWN_BIASES)  # biases of all norms and products but those of queries, keys and values
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")

_SANDWICH = Norms(attention_out="post_attention_norm", feed_forward_out="post_ffw_norm")
_POST_NORMS = replace(_SANDWICH, attention="", feed_forward="")
_GLM_NORMS = Norms(feed_forward="post_attention_norm")
_LAYER_NORMS = Norms("layer")
_ONE_LAYER_NORM = Norms("layer", feed_forward="attn_norm", heads="own")
_GRANITE_SCALES = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}

_LLAMA = Architecture("pairs", trained_type="float16", optional=(*_ANY_BIASES, *_QKV))
_LLAMA_BF16 = replace(_LLAMA, trained_type="bfloat16")
_QWEN2 = Architecture("halves", required=_BIASES[:3], optional=(*_OUTPUT, "output.bias"))
_QWEN3 = Architecture("halves", required=_QK_NORMS, optional=_OUTPUT)
_QWEN35 = Architecture(
    "halves",
    norms=_GLM_NORMS,
    has_output_gate=True,
    has_delta_rule=True,
    has_tiled_heads=True,
    required=_QK_NORMS,
    optional=_OUTPUT,
)
_BAILING = Architecture("pairs", normalizes_shares=False, optional=(*_ANY_BIASES, "exp_probs_b.bias"))
_GPT = Architecture("halves", activation="gelu", is_gated=False, norms=_LAYER_NORMS, trained_type="float16")
_GPT2 = replace(
    _GPT, rotary="", activation="gelu_tanh", required=(*_ALL_BIASES, *_QKV, "position_embd.weight"), optional=_OUTPUT
)
_BERT = Architecture(
    "",
    activation="gelu",
    is_gated=False,
    norms=Norms("layer", "", "", attention_sum="attn_output_norm", feed_forward_sum="layer_output_norm"),
    is_causal=False,
)
_BERT_TENSORS = tuple(
    f"{name}.{end}"
    for name in ("token_embd_norm", "attn_output_norm", "layer_output_norm")
    for end in ("weight", "bias")
)
_GEMMA3 = Architecture(
    "halves",
    activation="gelu_tanh",
    scaled_embedding=True,
    norms=_SANDWICH,
    windows=Windows(6, 0, base=10000.0, is_scaled=False),
    wide_layers=62,
    required=_QK_NORMS,
    optional=_OUTPUT,
)

ARCHITECTURES = {
    "llama": replace(_LLAMA, models="Llama, Mistral, Mixtral, TinyLlama, SmolLM 2, Falcon 3"),
    "llama4": Architecture(
        "pairs",
        norms=Norms(heads="unit"),
        unrotated_period=4,
        routing="sigmoid",
        normalizes_shares=False,
        has_temperature=True,
        temperature=(0.1, 8192),
        attention_chunk=8192,
        shared_experts=1,
        has_scaled_inputs=True,
        optional=_ROPE,
        models="Llama 4 Scout (text)",
    ),
    "mistral3": replace(_LLAMA_BF16, has_temperature=True, models="Ministral 3"),
    "internlm2": replace(_LLAMA_BF16, models="InternLM 2"),
    "xverse": replace(_LLAMA_BF16, models="XVERSE"),
    "baichuan": replace(_LLAMA_BF16, alibi_layers=40, models="Baichuan 7B, Baichuan 2 7B"),
    "ernie4_5": replace(_LLAMA_BF16, models="ERNIE 4.5 0.3B"),
    "ernie4_5-moe": replace(_BAILING, normalizes_shares=True, models="ERNIE 4.5 21B-A3B, 300B-A47B"),
    "smollm3": replace(_LLAMA_BF16, unrotated_period=4, models="SmolLM 3"),
    "arcee": replace(_LLAMA_BF16, activation="squared_relu", is_gated=False, models="AFM 4.5B"),
    "deepseek": replace(_BAILING, models="DeepSeek MoE 16B"),
    "bailingmoe": replace(_BAILING, models="Ling Lite, Ling Plus"),
    "minicpm": replace(
        _LLAMA_BF16,
        scales=dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale")),
        optional=(*_ANY_BIASES, *LONG_ROPE),
        models="MiniCPM, MiniCPM 4",
    ),
    "minicpm3": Architecture(
        "halves",
        has_latent_attention=True,
        scales={"embedding_scale": 12.0},
        depth_scale=1.4,
        base_width=256,
        optional=(*_OUTPUT, *LONG_ROPE),
        models="MiniCPM 3",
    ),
    "granite": Architecture("pairs", scales=_GRANITE_SCALES, optional=(*_OUTPUT, *_BIASES), models="Granite 3"),
    "granitemoe": Architecture("pairs", scales=_GRANITE_SCALES, optional=_OUTPUT, models="Granite 3 MoE"),
    "apertus": Architecture(
        "halves", activation="xielu", is_gated=False, required=_QK_NORMS, optional=_ROPE, models="Apertus"
    ),
    "exaone": Architecture("halves", optional=_ROPE, models="EXAONE 3"),
    "exaone4": Architecture(
        "halves",
        norms=_POST_NORMS,
        windows=Windows(4, 0, are_rotated=True),
        required=_QK_NORMS,
        optional=_ROPE,
        models="EXAONE 4",
    ),
    "qwen": Architecture("halves", ffn_parts=2, required=_QKV, optional=_OUTPUT, models="Qwen"),
    "qwen2": replace(_QWEN2, models="Qwen 1.5, 2 and 2.5, QwQ"),
    # Their sections of rotated elements have positions of their own in pictures, and the same one in texts.
    "qwen2vl": replace(_QWEN2, models="Qwen 2 VL, Qwen 2.5 VL"),
    "pangu-embedded": replace(_QWEN2, required=(*_BIASES[:4],), models="openPangu Embedded"),
    "seed_oss": replace(_QWEN2, norms=_GLM_NORMS, optional=(*_OUTPUT, "attn_output.bias"), models="Seed OSS"),
    "qwen2moe": Architecture(
        "halves",
        normalizes_shares=False,
        required=(*_BIASES[:3], "ffn_gate_inp_shexp.weight"),
        optional=_OUTPUT,
        models="Qwen 1.5 MoE, Qwen 2 57B-A14B",
    ),
    "qwen3": replace(_QWEN3, models="Qwen 3"),
    "qwen3vl": replace(_QWEN3, models="Qwen 3 VL"),
    "qwen3moe": replace(_QWEN3, models="Qwen 3 30B-A3B, 235B-A22B"),
    "qwen3vlmoe": replace(_QWEN3, models="Qwen 3 VL 30B-A3B, 235B-A22B"),
    "qwen3next": replace(
        _QWEN35,
        has_tiled_heads=False,
        required=(*_QK_NORMS, "ssm_ba.weight", "ffn_gate_inp_shexp.weight"),
        models="Qwen 3 Next, Qwen 3 Coder Next",
    ),
    "qwen35": replace(_QWEN35, models="Qwen 3.5"),
    "qwen35moe": replace(
        _QWEN35, required=(*_QK_NORMS, "ffn_gate_inp_shexp.weight"), models="Qwen 3.5 35B-A3B, 122B-A10B, 397B-A17B"
    ),
    "hunyuan-dense": Architecture(
        "halves", norms=Norms(heads="rotated"), required=_QK_NORMS, optional=_ROPE, models="Hunyuan 0.5B to 7B"
    ),
    "hunyuan-moe": Architecture(
        "halves", norms=Norms(heads="rotated"), required=_QK_NORMS, optional=_ROPE, models="Hunyuan A13B"
    ),
    "dots1": replace(
        _QWEN3,
        routing="sigmoid",
        normalizes_shares=False,
        required=(*_QK_NORMS, "exp_probs_b.bias"),
        models="dots.llm1",
    ),
    "bailingmoe2": Architecture(
        "halves",
        routing="sigmoid",
        normalizes_shares=False,
        required=_QK_NORMS,
        optional=(*_OUTPUT, "exp_probs_b.bias", *_QKV),
        models="Ling 2, Ring 2",
    ),
    "minimax-m2": Architecture(
        "halves",
        norms=Norms(heads="joint"),
        routing="sigmoid",
        required=(*_QK_NORMS, "exp_probs_b.bias"),
        optional=_OUTPUT,
        models="MiniMax M2",
    ),
    # Version 3 has windows.
    "olmo2": Architecture(
        "halves",
        norms=replace(_POST_NORMS, heads="joint"),
        windows=Windows(4, 0, is_scaled=False),
        required=_QK_NORMS,
        optional=_OUTPUT,
        models="OLMo 2 and 3",
    ),
    "olmoe": Architecture(
        "halves",
        norms=Norms(heads="joint"),
        normalizes_shares=False,
        required=_QK_NORMS,
        optional=_OUTPUT,
        models="OLMoE",
    ),
    "chatglm": Architecture("pairs", optional=(*_ROPE, *_BIASES[:3], *_QKV), models="ChatGLM 3, GLM 4 9B"),
    "glm4": Architecture(
        "pairs", norms=_SANDWICH, optional=(*_OUTPUT, *_BIASES[:3], *_QKV), models="GLM 4 0414, GLM Z1"
    ),
    "glm4moe": Architecture(
        "halves",
        routing="sigmoid",
        normalizes_shares=False,
        norms=_GLM_NORMS,
        required=("exp_probs_b.bias",),
        optional=(*_OUTPUT, *_BIASES[:3], *_QK_NORMS),
        models="GLM 4.5 and 4.6",
    ),
    # Versions 2 and 3: the latter's queries are products of a narrow vector, its experts have biases.
    "deepseek2": Architecture(
        "pairs",
        normalizes_shares=False,
        has_latent_attention=True,
        optional=(*_OUTPUT, "exp_probs_b.bias"),
        models="DeepSeek V2, V3 and R1",
    ),
    "gpt-oss": Architecture(
        "halves",
        activation="clamped_swiglu",
        windows=Windows(2),
        routing="softmax_of_chosen",
        norms=_GLM_NORMS,
        required=(
            *_BIASES[:4],
            "attn_sinks.weight",
            *(f"{name}.bias" for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")),
        ),
        optional=_OUTPUT,
        models="gpt-oss",
    ),
    # The matrix of embeddings is also the output matrix.
    "gemma": Architecture("halves", activation="gelu_tanh", scaled_embedding=True, models="Gemma, CodeGemma"),
    "gemma2": Architecture(
        "halves",
        activation="gelu_tanh",
        scaled_embedding=True,
        norms=_SANDWICH,
        windows=Windows(2, 4096),
        wide_layers=46,
        models="Gemma 2",
    ),
    "gemma3": replace(_GEMMA3, models="Gemma 3"),
    "gemma3n": replace(
        _GEMMA3,
        norms=replace(_SANDWICH, values=True),
        wide_layers=None,
        attention_scale=1.0,
        logit_softcap=30.0,
        has_streams=True,
        required=(*_QK_NORMS, "laurel_l.weight"),
        models="Gemma 3n (text)",
    ),
    "gemma4": replace(
        _GEMMA3,
        norms=replace(_SANDWICH, values=True),
        wide_layers=None,
        attention_scale=1.0,
        may_lack_values=True,
        has_dense_beside_experts=True,
        optional=(*_ROPE, "layer_output_scale.weight"),
        models="Gemma 4 (text)",
    ),
    "eurobert": Architecture("halves", is_causal=False, models="EuroBERT"),
    "llama-embed": replace(_LLAMA, is_causal=False, models="Llama Embed Nemotron"),
    "modern-bert": Architecture(
        "halves",
        activation="gelu",
        norms=Norms("layer", skips_first=True),
        is_causal=False,
        windows=Windows(3, base=10000.0, first_is_full=True),
        required=("token_embd_norm.weight",),
        optional=("attn_qkv.weight",),
        models="ModernBERT, GTE ModernBERT, Granite Embedding R2",
    ),
    "gemma-embedding": replace(
        _GEMMA3, is_causal=False, optional=("dense_2.weight", "dense_3.weight"), models="EmbeddingGemma"
    ),
    "command-r": Architecture(
        "pairs",
        norms=_ONE_LAYER_NORM,
        scales={"logit_scale": None},
        multiplies_logits=True,
        trained_type="float16",
        optional=_QK_NORMS,
        models="Command R and R+, Aya 23",
    ),
    "cohere2": Architecture(
        "pairs",
        norms=_ONE_LAYER_NORM,
        windows=Windows(4, are_rotated=True),
        scales={"logit_scale": None},
        multiplies_logits=True,
        models="Command R7B, Command A",
    ),
    "phi2": replace(
        _GPT,
        activation="gelu_tanh",
        norms=_ONE_LAYER_NORM,
        required=(*_NORM_BIASES, *_OWN_BIASES, "output.weight", "output.bias"),
        optional=(*_BIASES[:3], *_QKV),
        models="Phi 1, 1.5 and 2",
    ),
    "phi3": Architecture(
        "halves", windows=Windows(0, 0), optional=(*_OUTPUT, *LONG_ROPE, *_QKV), models="Phi 3, 3.5 and 4"
    ),
    "stablelm": Architecture(
        "halves",
        norms=Norms("layer", heads="own"),
        required=_NORM_BIASES,
        optional=(*_OUTPUT, *_BIASES[:3], *_QK_NORMS, "ffn_norm.weight", "ffn_norm.bias"),
        models="StableLM, StableLM 2, Zephyr 3B",
    ),
    "orion": Architecture("halves", norms=_LAYER_NORMS, required=_LAYER_BIASES, optional=_ROPE, models="Orion 14B"),
    "nemotron": replace(
        _GPT,
        activation="squared_relu",
        trained_type="bfloat16",
        required=_LAYER_BIASES,
        optional=(*_ROPE, *_BIASES[:4], "ffn_up.bias", "ffn_down.bias"),
        models="Nemotron 4, Minitron",
    ),
    "jais2": replace(
        _GPT,
        activation="squared_relu",
        trained_type="bfloat16",
        required=(*_ALL_BIASES, *_BIASES[:3]),
        optional=_ROPE,
        models="Jais 2",
    ),
    "starcoder2": replace(
        _GPT,
        activation="gelu_tanh",
        trained_type="bfloat16",
        required=(*_ALL_BIASES, *_BIASES[:3]),
        optional=_ROPE,
        models="StarCoder 2",
    ),
    "codeshell": replace(
        _GPT, activation="gelu_tanh", required=(*_ALL_BIASES, *_QKV), optional=_ROPE, models="CodeShell"
    ),
    # The larger ones have a norm of each input.
    "falcon": replace(
        _GPT,
        norms=Norms("layer", attention="attn_norm_2", feed_forward="attn_norm"),
        is_parallel=True,
        trained_type="bfloat16",
        required=_NORM_BIASES,
        optional=(*_OUTPUT, "attn_qkv.weight", "attn_norm_2.weight", "attn_norm_2.bias"),
        models="Falcon 7B, 40B and 180B",
    ),
    "gptneox": replace(
        _GPT,
        is_parallel=None,
        required=(*_ALL_BIASES, *_QKV),
        optional=_OUTPUT,
        models="GPT-NeoX, Pythia, RedPajama INCITE",
    ),
    "bert": replace(
        _BERT,
        required=(*_BERT_TENSORS, "ffn_up.bias", "ffn_down.bias", "attn_output.bias"),
        optional=(*_BIASES[:3], *_QKV, "token_types.weight", "position_embd.weight"),
        models="BERT, BGE, E5, all-MiniLM, GTE, Arctic Embed",
    ),
    "nomic-bert": replace(
        _BERT,
        rotary="halves",
        activation="silu",
        is_gated=True,
        required=_BERT_TENSORS,
        optional=("attn_qkv.weight", "token_types.weight"),
        models="Nomic Embed",
    ),
    "gpt2": replace(_GPT2, models="GPT-2"),
    "starcoder": replace(_GPT2, models="StarCoder, SantaCoder"),
}
"""Architectures by the file's ``general.architecture``."""
