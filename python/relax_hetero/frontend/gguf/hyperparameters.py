"""Hyperparameters of a language model: numbers from a GGUF file's metadata, and its row of `architectures`.

The rules are those of llama.cpp (`src/llama-model.cpp`), except for groups of experts (`tir.routing.RoutingKind`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...encoding.pages import LayerCache
from ...errors import FrontendError
from ...tir.delta_rule import DeltaRuleProblem, DeltaRuleSizes
from ...tir.routing import ROUTING_KINDS, RoutingProblem
from .architectures import ARCHITECTURES, LONG_ROPE, Architecture, Windows
from .file import GgufFile

_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN_TURNS = (("slow", 1.0), ("fast", 32.0))
"""Turns within the original context of frequencies that are scaled, and of those that stay, by default."""
_REFUSED = {
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "expert_group_scale": 0.0,
    "interleave_moe_layer_step": 1.0,
    "router_logit_softcapping": 0.0,
}
"""Keys that would change results, with the values that would not."""
_YARN_FACTORS = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0}
"""Keys of factors of YaRN's magnitude, with their defaults."""
_UNNORMED_EXPERTS = 128
"""Number of experts that identifies the Llama 4 without norms of queries and keys, as in llama.cpp."""
POOLINGS = ("mean", "cls", "last")  # poolings by their number in a file, from 1 on
_EPSILONS = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
"""Keys of the epsilon of norms by their kind."""
_MAX_INT32 = (1 << 31) - 1  # maximum of counts: positions, tokens and sizes are int32
_TINY, _HUGE = float(np.finfo("float32").tiny), float(np.finfo("float32").max)
MAX_LAYERS = 10_000  # a file with more layers is damaged


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of positions: fast frequencies stay as they are, slow ones are scaled (arXiv:2309.00071)."""

    # Pairs of elements up to which frequencies stay, and from which they are scaled.
    first: float
    last: float
    share: float  # share of frequencies that stay
    magnitude: float  # factor of cosines and sines

    def scaled(self, frequencies: np.ndarray, scale: float) -> np.ndarray:
        """Frequencies of all pairs, some of them scaled."""
        ramp = (np.arange(len(frequencies)) - self.first) / max(0.001, self.last - self.first)
        share = self.share * (1 - np.clip(ramp, 0, 1))
        return frequencies * (scale * (1 - share) + share)


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of an attention whose cache has one vector of a token for all heads (MLA, arXiv:2405.04434).

    The vector is the key of all heads, rotated elements and a compressed vector, and also the value.
    """

    rank: int  # elements of the compressed vector
    # Elements of the narrow vector that queries are products of; 0: they are products of the layer's input.
    query_rank: int
    # Elements of a head's key, rotated ones included, and of its value, before compression.
    key_size: int
    value_size: int


@dataclass(frozen=True)
class DeltaRule(DeltaRuleSizes):
    """Sizes of layers with the gated delta rule, and their period."""

    period: int  # period of layers whose last layer has attention


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a model."""

    name: str  # name of the architecture
    architecture: Architecture
    layers: int
    dense_layers: int  # number of layers at the beginning that have no experts
    further_layers: int  # number of layers after the others, which predict further tokens and are not read
    hidden_size: int  # elements of an embedding
    vocabulary: int  # number of tokens
    context: int  # positions in training
    heads: int  # number of query heads
    kv_heads: tuple[int, ...]  # number of key-value heads of each layer
    head_sizes: tuple[int, ...]  # elements of a head in the cache of each layer
    latent: LatentAttention | None  # sizes of an attention with compressed keys and values
    delta: DeltaRule | None  # sizes of layers with the gated delta rule
    feed_forward: tuple[int, ...]  # width of each layer's feed-forward network
    expert_feed_forward: int  # width of each expert
    eps: float  # epsilon of norms
    base: float  # base of rotary frequencies ``base_scale * base ** (-2i / rotary_size)``
    base_scale: float
    yarn: Yarn | None  # rule by which frequencies are scaled; None: all by `base_scale`
    magnitude: float  # factor of cosines and sines without YaRN
    # Positions up to which a model with two lists of divisors of frequencies uses the short one; 0 without.
    short_context: int
    rotary_sizes: tuple[int, ...]  # number of rotated elements of a head of each layer
    # Positions of the chunks within which some layers attend, which contexts must not exceed; 0: all.
    attention_chunk: int
    has_unit_norms: bool  # queries and keys of rotated layers have norms without factors
    # Factor f and positions n in ``1 + f * log(1 + floor(position / n))``, by which queries are multiplied.
    temperature: tuple[float, int]
    window_base: float  # base of layers with a window
    windows: tuple[int, ...]  # number of positions that each layer attends to; 0: all
    attention_softcap: float  # c in ``c * tanh(x / c)`` of scores; 0: none
    logit_softcap: float  # the same of logits
    is_parallel: bool  # attention and feed-forward both read the input of a layer
    is_causal: bool  # tokens attend to earlier ones only
    pooling: str  # tokens of a text whose results are its embedding: the "mean" of all, the first ("cls") or the "last"
    # For each layer, the numbers of its activation: of negative values, of positive ones, of both, and the bound of the
    # exponential function (arXiv:2411.13010); none without.
    xielu: tuple[tuple[float, ...], ...]
    routing: RoutingProblem | None  # choice of experts, for any number of rows and without biases; None without experts
    shared_feed_forward: int  # width of the expert of all tokens; 0 without one
    shared_caches: int  # number of layers at the end that read the cache of an earlier layer
    layer_width: int  # elements of a token's embedding for each layer; 0 without
    streams: int  # number of residual streams of a model with AltUp; 0 without
    active_stream: int  # the stream that layers change
    # Deviations from the mean that each layer's gates have to exceed; None: all gates count; empty without.
    sparsity: tuple[float | None, ...]
    embedding_scale: float  # factor of embeddings
    residual_scale: float  # factor of what a layer adds to the residual
    logit_scale: float  # factor of logits
    attention_scale: float  # factor of attention scores; 0: that of a head's size

    @property
    def experts(self) -> int:
        """Number of experts; 0 without experts."""
        return self.routing.experts if self.routing else 0

    @property
    def experts_used(self) -> int:
        """Number of experts that are used for a token; 0 without experts."""
        return self.routing.used if self.routing else 0

    @property
    def has_shared_values(self) -> bool:
        """True if keys in the cache are the values, too."""
        return self.latent is not None

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """Cache of each layer but those at the end that read the cache of another."""
        return tuple(map(self._cache_of, range(self.layers - self.shared_caches)))

    def _cache_of(self, layer: int) -> LayerCache:
        if self.has_delta_rule(layer):
            return LayerCache(0, 0, state=self.delta_problem(1, 1, False).elements)
        sizes = self.kv_heads[layer], self.head_sizes[layer]
        return LayerCache(*sizes, self.windows[layer], self.has_shared_values)

    def cache_index(self, layer: int) -> int:
        """Number of the cache that a layer reads: its own, or that of the last layer of its kind that has one."""
        own = self.layers - self.shared_caches
        if layer < own:
            return layer
        is_window = self.windows[layer] > 0
        return next(other for other in range(own - 1, -1, -1) if (self.windows[other] > 0) == is_window)

    def full_layers(self, all_rows: bool) -> int:
        """Number of first layers that compute all rows of a chunk; the attention of the next one does, too.

        That layer is the last with a cache of its own. What follows computes the row whose logits a prefill returns,
        unless `all_rows` are needed.
        """
        return self.layers if all_rows else len(self.caches) - 1

    def has_delta_rule(self, layer: int) -> bool:
        """Return whether a layer has the gated delta rule in place of attention."""
        return self.delta is not None and layer % self.delta.period != self.delta.period - 1

    def delta_problem(self, rows: int, slots: int, is_chunk: bool) -> DeltaRuleProblem:
        """The gated delta rule of a layer for a call's rows and the sequences of a cache."""
        assert self.delta is not None, "only models with sizes of the delta rule have one"
        sizes = {field.name: getattr(self.delta, field.name) for field in dataclasses.fields(DeltaRuleSizes)}
        return DeltaRuleProblem(rows=rows, slots=slots, is_chunk=is_chunk, **sizes)

    def result_size(self, layer: int) -> int:
        """Elements of the results of all heads of a layer."""
        if self.delta is not None and self.has_delta_rule(layer):
            return self.delta.value_heads * self.delta.value_size
        return self.heads * (self.latent.value_size if self.latent else self.head_sizes[layer])

    def scale_of(self, layer: int) -> float:
        """Factor of attention scores of a layer."""
        if self.attention_scale:
            return self.attention_scale
        is_wide = self.layers == self.architecture.wide_layers
        return 1.0 / math.sqrt(self.hidden_size / self.heads if is_wide else self.head_sizes[layer])

    def window_of(self, layer: int) -> int:
        """Number of positions that a layer attends to; 0: all."""
        return self.windows[layer]

    def is_rotated(self, layer: int) -> bool:
        """Return whether queries and keys of a layer are rotated."""
        rule, period = self.architecture.windows, self.architecture.unrotated_period
        if rule is not None and rule.are_rotated and any(self.windows):
            return self.windows[layer] > 0
        return bool(self.architecture.rotary) and not (period and layer % period == period - 1)

    def is_tempered(self, layer: int) -> bool:
        """Return whether queries of a layer grow with their position."""
        return self.temperature[0] > 0 and not (self.architecture.temperature and self.is_rotated(layer))

    def rotary_base_of(self, layer: int) -> tuple[float, float, Yarn | None]:
        """Base and scale of the frequencies of a layer, and the rule by which they are scaled."""
        if not self.windows[layer] or self.architecture.windows is None:
            return self.base, self.base_scale, self.yarn
        is_scaled = self.has_scaled_positions(layer)
        return (self.window_base, self.base_scale, self.yarn) if is_scaled else (self.window_base, 1.0, None)

    def has_scaled_positions(self, layer: int) -> bool:
        """Return whether the file's scaling of positions applies to a layer."""
        rule = self.architecture.windows
        return not self.windows[layer] or rule is None or rule.is_scaled

    def compiled_context(self, context: int) -> int:
        """Context of code for a cache of so many positions: the trained one, unless other frequencies are for it."""
        return self.short_context if context <= self.short_context else max(self.context, context)


def read_hyperparameters(fields: Mapping[str, Any], vocabulary: int, file: str) -> Hyperparameters:
    """Read and check the hyperparameters of a model.

    `fields`: the file's metadata; `vocabulary`: rows of the embedding table; `file`: name of the file, for errors.
    Raises FrontendError if the architecture is not in the table, a number is missing or invalid, or a feature is not
    supported.
    """
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise FrontendError(f"{file}: found architecture {name!r}, expected one of {names}")
    metadata, architecture = _Fields(fields, name, file), ARCHITECTURES[name]
    further_layers = metadata.count("nextn_predict_layers", 0)
    layers = metadata.layers - further_layers
    if layers < 1:
        raise FrontendError(f"{file}: all {metadata.layers} layers predict further tokens, expected others before them")
    if metadata.count("vocab_size", vocabulary) != vocabulary:
        rows = metadata.count("vocab_size")
        raise FrontendError(f"{file}: {name}.vocab_size is {rows:,}, expected the rows of token_embd, {vocabulary:,}")
    metadata.refuse(_REFUSED)
    if layers == architecture.alibi_layers:
        raise FrontendError(f"{file}: {name} of {layers} layers has ALiBi positions, expected a model with rotary ones")
    windows = _read_windows(metadata, architecture, layers)
    chunk = metadata.count("attention.chunk_size", architecture.attention_chunk)  # a key of folders
    routing = _read_routing(metadata, architecture)
    return Hyperparameters(
        name=name,
        architecture=architecture,
        layers=layers,
        further_layers=further_layers,
        hidden_size=metadata.count("embedding_length"),
        vocabulary=vocabulary,
        context=min(metadata.count("context_length"), chunk or _MAX_INT32),
        delta=_read_delta(metadata) if architecture.has_delta_rule else None,
        eps=metadata.number(_EPSILONS[architecture.norms.kind]),
        short_context=_read_short_context(metadata, architecture),
        attention_chunk=chunk,
        has_unit_norms=architecture.norms.heads == "unit"
        and metadata.flag("attention.use_qk_norm", not routing or routing.experts != _UNNORMED_EXPERTS),
        temperature=_read_temperature(metadata, architecture),
        windows=windows,
        attention_softcap=metadata.number("attn_logit_softcapping", 0.0) if name == "gemma2" else 0.0,
        logit_softcap=metadata.number("final_logit_softcapping", architecture.logit_softcap),
        is_parallel=_read_is_parallel(metadata, architecture),
        is_causal=metadata.flag("attention.causal", architecture.is_causal),
        pooling=_read_pooling(metadata, architecture),
        xielu=_read_xielu(metadata, layers) if architecture.activation == "xielu" else (),
        shared_caches=_read_shared_caches(metadata, windows),
        layer_width=metadata.count("embedding_length_per_layer_input", 0),
        streams=metadata.count("altup.num_inputs") if architecture.has_streams else 0,
        active_stream=metadata.count("altup.active_idx", 0) if architecture.has_streams else 0,
        sparsity=_read_sparsity(metadata) if architecture.has_streams else (),
        **_read_attention(metadata, architecture, windows),
        **_read_networks(metadata, architecture, layers, routing),
        **_read_scales(metadata, architecture, layers),
    )


def _read_attention(metadata: _Fields, architecture: Architecture, windows: Sequence[int]) -> dict[str, Any]:
    """Heads, the elements of each, their rotation, and the factor of scores."""
    file, layers = metadata.file, len(windows)
    width, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    if width % heads and not metadata.has("attention.key_length"):
        raise FrontendError(f"{file}: {heads} heads do not divide the width of {width}, and no key_length is given")
    latent = _read_latent(metadata) if architecture.has_latent_attention else None
    size = metadata.count("attention.key_length", width // heads)
    rotary_size = metadata.count("rope.dimension_count", size)
    if latent:
        size = latent.rank + rotary_size
        if latent.key_size <= rotary_size:
            raise FrontendError(f"{file}: rotates {rotary_size} elements of keys of {latent.key_size}, expected fewer")
    window_size = metadata.count("attention.key_length_swa", size)
    window_rotary = metadata.count("rope.dimension_count_swa", min(rotary_size, window_size))
    for end, expected in () if latent else (("", size), ("_swa", window_size)):
        length = metadata.count(f"attention.value_length{end}", expected)
        if length != expected:
            raise FrontendError(
                f"{file}: values of a head have {length} elements, expected as many as keys, {expected}"
            )
    kv_heads = (1,) * layers if latent else metadata.counts("attention.head_count_kv", heads)[:layers]
    for count in kv_heads:
        if heads % count:
            raise FrontendError(f"{file}: {heads} heads of queries are not a multiple of {count} of keys")
    for rotated, extent in (rotary_size, size), (window_rotary, window_size):
        if rotated > extent or rotated % 2:
            raise FrontendError(f"{file}: rotates {rotated} elements of a head, expected an even number up to {extent}")
    base, rule = metadata.number("rope.freq_base", 10000.0, above=0.0), architecture.windows
    factor, yarn = _read_rope_scaling(metadata, rotary_size, base)
    stated_scale = 0.0 if latent else metadata.number("attention.scale", architecture.attention_scale)
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_sizes": tuple(window_size if window else size for window in windows),
        "rotary_sizes": tuple(window_rotary if window else rotary_size for window in windows),
        "latent": latent,
        "base": base,
        "base_scale": 1.0 / factor if factor else 1.0,
        "yarn": yarn,
        "magnitude": metadata.number("rope.scaling.attn_factor", 1.0) if not yarn else 1.0,
        "window_base": metadata.number("rope.freq_base_swa", (rule and rule.base) or base, above=0.0),
        "attention_scale": _latent_scale(metadata, latent, yarn, factor) if latent else stated_scale,
    }


def _read_networks(
    metadata: _Fields, architecture: Architecture, layers: int, routing: RoutingProblem | None
) -> dict[str, Any]:
    """Widths of feed-forward networks and experts, and the choice of experts."""
    file = metadata.file
    dense_layers = metadata.count("leading_dense_block_count", 0) if routing else layers
    if dense_layers > layers:
        raise FrontendError(f"{file}: {dense_layers} dense layers come first, expected {layers} layers at most")
    expert_width = metadata.count("expert_feed_forward_length", 0) if routing else 0
    expert_width = expert_width or (metadata.count("feed_forward_length") if routing else 0)
    parts, has_dense = architecture.ffn_parts, dense_layers or architecture.has_dense_beside_experts
    widths = metadata.counts("feed_forward_length")[:layers] if has_dense else (0,) * layers
    if any(width % parts for width in widths):
        raise FrontendError(
            f"{file}: {metadata.name}.feed_forward_length is {widths[0]:,}, expected a multiple of {parts}"
        )
    if architecture.has_scaled_inputs and routing and routing.used > 1:
        raise FrontendError(f"{file}: uses {routing.used} experts for a token, expected one: inputs have its share")
    shared = metadata.count("expert_shared_count", architecture.shared_experts) * expert_width
    return {
        "dense_layers": dense_layers,
        "feed_forward": tuple(width // parts for width in widths),
        "expert_feed_forward": expert_width,
        "shared_feed_forward": metadata.count("expert_shared_feed_forward_length", 0) or shared,
        "routing": routing,
    }


def _read_scales(metadata: _Fields, architecture: Architecture, layers: int) -> dict[str, Any]:
    """Factors of embeddings, of what layers add, and of logits."""
    defaults, width = dict(architecture.scales), metadata.count("embedding_length")
    if architecture.depth_scale:
        defaults |= {"residual_scale": float(np.float32(architecture.depth_scale / math.sqrt(layers)))}
        defaults |= {"logit_scale": width / architecture.base_width}
    scales = {key: metadata.number(key, default) for key, default in defaults.items()}
    logit_scale = scales.get("logit_scale", 1.0)
    if not logit_scale:
        raise FrontendError(f"{metadata.file}: {metadata.name}.logit_scale is 0, expected a number above 0")
    return {
        "embedding_scale": math.sqrt(width) if architecture.scaled_embedding else scales.get("embedding_scale", 1.0),
        "residual_scale": scales.get("residual_scale", 1.0),
        "logit_scale": logit_scale if architecture.multiplies_logits else 1.0 / logit_scale,
    }


def _read_shared_caches(metadata: _Fields, windows: Sequence[int]) -> int:
    """Number of layers that read another layer's cache, before which there is one of each of their kinds."""
    count = metadata.count("attention.shared_kv_layers", 0)
    kinds = [window > 0 for window in windows]
    if count and not {*kinds[-count:]} <= {*kinds[:-count]}:
        raise FrontendError(
            f"{metadata.file}: {count} layers read the keys of others, expected a layer of each of their kinds before"
        )
    return count


def _read_sparsity(metadata: _Fields) -> tuple[float | None, ...]:
    key = f"{metadata.name}.activation_sparsity_scale"
    values = metadata.fields.get(key, [-math.inf] * metadata.layers)
    if (
        not isinstance(values, list)
        or len(values) != metadata.layers
        or not all(type(each) is float for each in values)
    ):
        raise FrontendError(f"{metadata.file}: {key} is {values!r:.100}, expected {metadata.layers} numbers")
    return tuple(value if math.isfinite(value) else None for value in values)


def _read_routing(metadata: _Fields, architecture: Architecture) -> RoutingProblem | None:
    """Choice of experts; None without experts."""
    experts = metadata.count("expert_count", 0)
    if not experts:
        return None
    file, used = metadata.file, metadata.count("expert_used_count", 0)
    if not 0 < used <= experts:
        raise FrontendError(f"{file}: uses {used} of {experts} experts, expected 1 to {experts}")
    kind, number = architecture.routing, metadata.count("expert_gating_func", 0)
    if number > len(ROUTING_KINDS):
        names = ", ".join(f"{i} ({name})" for i, name in enumerate(ROUTING_KINDS, 1))
        raise FrontendError(f"{file}: {metadata.name}.expert_gating_func is {number}, expected one of {names}")
    kind = [*ROUTING_KINDS][number - 1] if number else kind
    groups = metadata.count("expert_group_count", 0) or 1
    groups_used = metadata.count("expert_group_used_count", 0) or groups
    if experts % groups or groups_used > groups or used > groups_used * (experts // groups):
        raise FrontendError(
            f"{file}: chooses {used} of {experts} experts from {groups_used} of {groups} groups, expected groups of "
            "equal size, and enough experts in those that are used"
        )
    normalizes = ROUTING_KINDS[kind].normalizes
    if normalizes is None:
        normalizes = metadata.flag("expert_weights_norm", architecture.normalizes_shares)
    return RoutingProblem(
        "rows",
        experts,
        used,
        metadata.number("expert_weights_scale", 1.0) or 1.0,
        normalizes,
        kind,
        groups=groups,
        groups_used=groups_used,
    )


def _read_latent(metadata: _Fields) -> LatentAttention:
    # Older files have these sizes, newer ones have those of compressed keys and values, under the names without an end.
    end = "_mla" if metadata.has("attention.key_length_mla") else ""
    default = metadata.count("embedding_length") // metadata.count("attention.head_count") or 1
    key_size = metadata.count(f"attention.key_length{end}")
    value_size = metadata.count(f"attention.value_length{end}", default)
    rank, query_rank = metadata.count("attention.kv_lora_rank"), metadata.count("attention.q_lora_rank", 0)
    return LatentAttention(rank, query_rank, key_size, value_size)


def _read_delta(metadata: _Fields) -> DeltaRule:
    key_heads, value_heads, inner = (
        metadata.count(f"ssm.{key}") for key in ("group_count", "time_step_rank", "inner_size")
    )
    if value_heads % key_heads or inner % value_heads:
        raise FrontendError(
            f"{metadata.file}: found {key_heads} heads of keys, {value_heads} of values, of {inner} elements in all, "
            "expected each to be a multiple of the one before"
        )
    key_size, taps = metadata.count("ssm.state_size"), metadata.count("ssm.conv_kernel")
    period = metadata.count("full_attention_interval", 4)
    is_tiled = metadata.flag("ssm.has_tiled_heads", ARCHITECTURES[metadata.name].has_tiled_heads)  # a key of folders
    return DeltaRule(key_heads, value_heads, key_size, inner // value_heads, taps, is_tiled, period)


def _latent_scale(metadata: _Fields, latent: LatentAttention, yarn: Yarn | None, factor: float) -> float:
    """Factor of scores; files have a tenth of the multiplier of YaRN's magnitude, which scores take squared."""
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0) * 10
    magnitude = yarn.magnitude * yarn_magnitude(factor, multiplier) if yarn else 1.0
    return magnitude**2 / math.sqrt(latent.key_size)


def _read_rope_scaling(metadata: _Fields, rotary_size: int, base: float) -> tuple[float, Yarn | None]:
    """Factor by which positions are divided, 0 if they are not, and the rule of YaRN."""
    scaling = metadata.text("rope.scaling.type", "linear" if metadata.has("rope.scaling.factor") else "none")
    if scaling not in _ROPE_SCALINGS:
        problem = f"found {metadata.name}.rope.scaling.type {scaling!r}, expected one of {_ROPE_SCALINGS}"
        raise FrontendError(f"{metadata.file}: {problem}")
    if scaling != "yarn":
        metadata.refuse({"rope.scaling.yarn_attn_factor": 1.0})
    factor = metadata.number("rope.scaling.factor", 0.0) if scaling in ("linear", "yarn") else 0.0
    return factor, _read_yarn(metadata, rotary_size, base, factor) if scaling == "yarn" and factor else None


def _read_yarn(metadata: _Fields, rotary_size: int, base: float, factor: float) -> Yarn:
    if base <= 1:
        raise FrontendError(f"{metadata.file}: {metadata.name}.rope.freq_base is {base:g}, expected above 1 for YaRN")
    context = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))

    def pair_of(turns: float) -> float:
        """Pair of elements that turns so often within the original context."""
        return rotary_size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    # With a multiplier, the scores of a latent attention are scaled instead (`_latent_scale`).
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    is_scaled_later = multiplier and ARCHITECTURES[metadata.name].has_latent_attention
    share = metadata.number("rope.scaling.yarn_ext_factor", 1.0)
    has_magnitude = share > 0 and not is_scaled_later
    magnitude = yarn_magnitude(factor) / yarn_magnitude(factor, multiplier) if has_magnitude else 1.0
    slow, fast = (metadata.number(f"rope.scaling.yarn_beta_{key}", default, above=0.0) for key, default in _YARN_TURNS)
    first, last = pair_of(fast), pair_of(slow)
    if metadata.flag("rope.scaling.yarn_truncate", True):  # a key of folders: GGUF files do not state it
        first, last = math.floor(first), math.ceil(last)
    return Yarn(
        max(0.0, first),
        min(rotary_size - 1.0, last),
        share,
        magnitude * math.prod(metadata.number(key, default) for key, default in _YARN_FACTORS.items()),
    )


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's factor of queries and keys for positions that are scaled by 1 / `factor`."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


def _read_short_context(metadata: _Fields, architecture: Architecture) -> int:
    """Positions of the short list of divisors of frequencies; 0 for architectures without lists."""
    if LONG_ROPE[0] not in architecture.optional:
        return 0
    return metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))


def _read_is_parallel(metadata: _Fields, architecture: Architecture) -> bool:
    stated = architecture.is_parallel
    return metadata.flag("use_parallel_residual", False) if stated is None else stated


def _read_pooling(metadata: _Fields, architecture: Architecture) -> str:
    number = metadata.count("pooling_type", 0)
    if number > len(POOLINGS):
        names = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS, 1))
        raise FrontendError(f"{metadata.file}: {metadata.name}.pooling_type is {number}, expected one of {names}")
    return POOLINGS[number - 1] if number else "last" if architecture.is_causal else "mean"


def _read_xielu(metadata: _Fields, layers: int) -> tuple[tuple[float, ...], ...]:
    """Numbers of each layer's activation; files state the first two before softplus."""
    columns = []
    for key in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"):
        value = metadata.fields.get(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers or not all(type(each) is float and math.isfinite(each) for each in values):
            raise FrontendError(f"{metadata.file}: {key} is {value!r}, expected a number for each of {layers} layers")
        columns.append(values)
    rows = zip(*columns, strict=True)
    return tuple((b + np.logaddexp(0, n).item(), np.logaddexp(0, p).item(), b, e) for n, p, b, e in rows)


def _read_temperature(metadata: _Fields, architecture: Architecture) -> tuple[float, int]:
    """Factor of the logarithm by which queries grow, and the positions of its steps."""
    if architecture.temperature:
        factor, length = architecture.temperature
        factor = metadata.number("attention.temperature_scale", float(np.float32(factor)))
        return factor, metadata.count("attention.temperature_length", length)
    factor = metadata.number("attention.temperature_scale", 0.0)
    if not ARCHITECTURES[metadata.name].has_temperature:
        metadata.refuse({"attention.temperature_scale": 0.0})
    return factor, metadata.count("rope.scaling.original_context_length") if factor else 1


def _read_windows(metadata: _Fields, architecture: Architecture, layers: int) -> tuple[int, ...]:
    """Window of each layer, from a list of layers with a window or from a period of layers."""
    # Files of folders state each layer, as classes of transformers have windows where llama.cpp has none.
    is_stated = isinstance(metadata.fields.get(f"{metadata.name}.attention.sliding_window_pattern"), list)
    rule = architecture.windows or (Windows() if is_stated else None)
    window = metadata.count("attention.sliding_window", rule.length) if rule else 0
    if rule is None or not window:
        return (0,) * layers
    pattern = metadata.pattern("attention.sliding_window_pattern", rule.period)
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise FrontendError(f"{metadata.file}: found windows of {len(pattern)} layers, expected {layers}")
        return tuple(window if has_window else 0 for has_window in pattern)
    full = 0 if rule.first_is_full else pattern - 1
    return tuple(0 if pattern and layer % pattern == full else window for layer in range(layers))


class _Fields:
    """Metadata with an architecture's prefix, by keys without it."""

    def __init__(self, fields: Mapping[str, Any], name: str, file: str) -> None:
        self.fields, self.name, self.file, self.layers = fields, name, file, 1
        self.layers = self.count("block_count")
        if self.layers > MAX_LAYERS:
            raise FrontendError(f"{file}: {name}.block_count is {self.layers:,}, expected {MAX_LAYERS:,} at most")

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.fields

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(f"{self.name}.{key}", default)
        if value is None:
            raise FrontendError(f"{self.file}: lacks {self.name}.{key}, which its architecture needs")
        if isinstance(value, list):  # one for each layer
            if len(value) != self.layers or len(set(map(str, value))) != 1:
                problem = f"{len(value)} values, {len(set(map(str, value)))} of them distinct"
                raise FrontendError(
                    f"{self.file}: {self.name}.{key} has {problem}, expected one value, or the same for each of "
                    f"{self.layers} layers"
                )
            value = value[0]
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        minimum = 0 if default == 0 else 1
        if type(value) is not int or not minimum <= value <= _MAX_INT32:
            problem = f"{value!r}, expected a whole number of at least {minimum} and below 2**31"
            raise FrontendError(f"{self.file}: {self.name}.{key} is {problem}")
        return value

    def counts(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """A number for each layer."""
        value = self.fields.get(f"{self.name}.{key}")
        values = value if isinstance(value, list) and len(value) == self.layers else [self.count(key, default)]
        if any(type(each) is not int or not 0 < each <= _MAX_INT32 for each in values):
            problem = f"{value!r:.100}, expected whole numbers of at least 1 and below 2**31"
            raise FrontendError(f"{self.file}: {self.name}.{key} is {problem}")
        return tuple(values) if len(values) == self.layers else (*values,) * self.layers

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        value = self._get(key, default)
        # Reciprocals are float32, too.
        is_number = type(value) in (int, float) and (value == 0 or _TINY <= value <= _HUGE)
        if not is_number or value < 0 or (above is not None and value <= above):
            bound = " of at least 0" if above is None else f" above {above:g}"
            raise FrontendError(f"{self.file}: {self.name}.{key} is {value!r}, expected a number{bound}")
        return float(value)

    def pattern(self, key: str, default: int) -> int | list[bool]:
        """Period of layers, or whether each layer has a window."""
        value = self.fields.get(f"{self.name}.{key}", default)
        return [bool(each) for each in value] if isinstance(value, list) else self.count(key, default)

    def refuse(self, keys: Mapping[str, float]) -> None:
        """Raise FrontendError for a key with another number than the given one."""
        for key, neutral in keys.items():
            if self.number(key, neutral) != neutral:
                raise FrontendError(
                    f"{self.file}: {self.name}.{key} is {self.number(key):g}, expected {neutral:g}: it is not supported"
                )

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise FrontendError(f"{self.file}: {self.name}.{key} is {value!r}, expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default))


def hyperparameters_of(file: GgufFile) -> Hyperparameters:
    """The hyperparameters of a file's model; FrontendError if they are invalid."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        problem = "lacks" if table is None else f"found shape {table.shape} of"
        raise FrontendError(f"{file.path}: {problem} tensor 'token_embd.weight', expected a table of embeddings")
    tokens: Any = file.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != table.shape[0]:
        raise FrontendError(
            f"{file.path}: token_embd has {table.shape[0]:,} rows, expected one for each of {len(tokens):,} tokens"
        )
    return read_hyperparameters(file.fields, table.shape[0], str(file.path))
