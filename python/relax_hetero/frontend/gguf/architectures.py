"""The architectures of language models in GGUF files: one table of what sets them apart.

The rules are those by which llama.cpp reads the same files (`src/llama-model.cpp`); numbers that a file states itself
are in `hyperparameters`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Facts that the files of an architecture leave unsaid.

    Attributes
    ----------
    rotary : str
        Which elements of a head turn together: "pairs" (2i and 2i + 1) or "halves" (i and i + r/2).
    activation : str
        Activation of the feed-forward part's gate: "silu" or "gelu_tanh".
    scaled_embedding : bool
        Whether embeddings are multiplied by the square root of their width.
    post_norms : bool
        Whether what attention and feed-forward part give is normalized before it is added.
    pattern : int
        Number of layers of which the last sees all keys, the others those in their window, where the file does not say
        which; 0: a window is ignored.
    window : int
        Positions that layers with a window see, where the file does not say so.
    window_base : float or None
        Base of the frequencies of layers with a window, where the file does not say so; None: that of all layers.
    window_scaled : bool
        Whether the file's scaling of positions holds for layers with a window, too.
    wide_layers : int or None
        Number of layers of the model whose scores are divided by the root of width / heads, not of the head's size.
    trained_type : str
        16-bit float that its models are trained in, where the file's weights are quantized.
    required, optional : tuple of str
        Tensors besides those of every architecture, without ``blk.N.``: which a file must have, and which it may have.
        All layers are alike. As in llama.cpp, a file with any other tensor is refused: its author's model computes
        something with it.
    """

    rotary: str
    activation: str = "silu"
    scaled_embedding: bool = False
    post_norms: bool = False
    pattern: int = 0
    window: int = 0
    window_base: float | None = None
    window_scaled: bool = True
    wide_layers: int | None = None
    trained_type: str = "bfloat16"
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("output.weight",)


_BIASES = tuple(
    f"{name}.bias" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
)
_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")

ARCHITECTURES = {
    # The divisors of frequencies, rope_freqs, are those of llama 3.1 and later.
    "llama": Architecture("pairs", trained_type="float16", optional=("output.weight", "rope_freqs.weight", *_BIASES)),
    "qwen2": Architecture("halves", required=_BIASES[:3], optional=("output.weight", "output.bias")),
    "qwen3": Architecture("halves", required=_QK_NORMS),
    "qwen3moe": Architecture("halves", required=_QK_NORMS),
    # The embeddings are the matrix of logits.
    "gemma2": Architecture("halves", "gelu_tanh", True, True, pattern=2, window=4096, wide_layers=46, optional=()),
    "gemma3": Architecture(
        "halves",
        "gelu_tanh",
        True,
        True,
        pattern=6,
        window_base=10000.0,
        window_scaled=False,
        wide_layers=62,
        required=_QK_NORMS,
    ),
}
"""Architectures by the file's ``general.architecture``."""
