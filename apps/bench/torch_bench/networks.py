"""Networks of torchvision, timm, transformers, diffusers and torch itself, with random weights.

Those of a library have their published sizes.

Nothing is downloaded, and importing this file needs none of these packages: networks are built on request.
Weights and inputs come from a fixed seed, so that every process builds the same network.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SEED = 0
Built = tuple[Any, tuple[Any, ...]]
"""A module and its arguments, all of them tensors."""


@dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes
    ----------
    package : str
        Required library of models.
    build : Callable
        Returns the module and its arguments.
    """

    package: str
    build: Callable[[], Built]


def build(name: str) -> Built:
    """The module of `NETWORKS`, in inference mode, and its arguments; the same for every call."""
    import torch

    torch.manual_seed(SEED)
    module, arguments = NETWORKS[name].build()
    module = module.eval().requires_grad_(False)
    _settle(module)
    return module, arguments


def _settle(module: Any) -> None:
    """Set statistics of batch norms like those of a trained network; those of a new one are all 0 and 1."""
    import torch

    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)


def _torchvision(name: str, size: int = 224, folder: str = "", **options: Any) -> Callable[[], Built]:
    def make() -> Built:
        import torch

        models = importlib.import_module(f"torchvision.models{folder}")
        return getattr(models, name)(weights=None, **options), (torch.randn(1, 3, size, size),)

    return make


def _segmentation(name: str, size: int) -> Callable[[], Built]:
    plain = _torchvision(name, size, ".segmentation", weights_backbone=None)

    def make() -> Built:
        module, arguments = plain()
        return _chosen(module, lambda module, image: module(image)["out"]), arguments

    return make


def _chosen(module: Any, call: Callable[..., Any]) -> Any:
    """A module that calls another as `call(module, *tensors)`."""
    import torch

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = module

        def forward(self, *tensors: Any) -> Any:
            return call(self.network, *tensors)

    return Chosen()


def _transformer(
    model: str,
    config: str,
    inputs: Callable[[Any], tuple[Any, ...]],
    call: Callable[..., Any],
    **options: Any,
) -> Callable[[], Built]:
    """A model of transformers: class, configuration, arguments from a configuration, and the call."""

    def make() -> Built:
        import transformers

        configuration = getattr(transformers, config)(**options)
        configuration._attn_implementation = "sdpa"
        network = getattr(transformers, model)(configuration)
        return _chosen(network, call), inputs(configuration)

    return make


def _tokens(count: int) -> Any:
    import torch

    return torch.randint(5, 900, (1, count))


def _masked(count: int) -> tuple[Any, Any]:
    """Tokens, and a mask without the last eighth."""
    import torch

    mask = torch.ones(1, count, dtype=torch.int64)
    mask[:, count - count // 8 :] = 0
    return _tokens(count), mask


def _noise(*shape: int) -> Any:
    import torch

    return torch.randn(*shape)


def _past(layers: int, heads: int, length: int, width: int) -> tuple[Any, ...]:
    """Keys and values of each layer."""
    return tuple(_noise(1, heads, length, width) for _ in range(2 * layers))


def _cache(tensors: tuple[Any, ...]) -> Any:
    import transformers

    cache = transformers.DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def _step(network: Any, token: Any, *past: Any) -> tuple[Any, ...]:
    """Logits of one more token, and keys and values with it."""
    output = network(input_ids=token, past_key_values=_cache(past), use_cache=True)
    layers = output.past_key_values.layers
    return (output.logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))


def _last_hidden(network: Any, tokens: Any, mask: Any) -> Any:
    return network(input_ids=tokens, attention_mask=mask).last_hidden_state


def _logits(network: Any, tokens: Any) -> Any:
    return network(input_ids=tokens, use_cache=False).logits


def _encoded_decoded(network: Any, tokens: Any, targets: Any) -> Any:
    return network(input_ids=tokens, decoder_input_ids=targets, use_cache=False).logits


def _spoken(network: Any, features: Any, targets: Any) -> Any:
    return network(input_features=features, decoder_input_ids=targets, use_cache=False).last_hidden_state


def _timm(name: str, size: int = 224) -> Callable[[], Built]:
    def make() -> Built:
        import timm

        return timm.create_model(name, pretrained=False), (_noise(1, 3, size, size),)

    return make


def _tagger() -> Built:
    """Two bidirectional LSTM layers over 40 tokens."""
    import torch

    layers = torch.nn.ModuleList(
        [torch.nn.Embedding(1000, 128), torch.nn.LSTM(128, 256, 2, batch_first=True, bidirectional=True)]
    )
    layers.append(torch.nn.Linear(512, 20))
    return _chosen(layers, lambda parts, tokens: parts[2](parts[1](parts[0](tokens))[0])), (_tokens(40),)


def _forecaster() -> Built:
    """A GRU over 100 steps of 8 series, whose last state gives a forecast."""
    import torch

    layers = torch.nn.ModuleList([torch.nn.GRU(8, 128, batch_first=True), torch.nn.Linear(128, 8)])
    return _chosen(layers, lambda parts, x: parts[1](parts[0](x)[0][:, -1])), (_noise(1, 100, 8),)


def _encoder() -> Built:
    """Three layers of torch's own Transformer over 64 tokens."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (_noise(1, 64, 256),)


def _unet() -> Built:
    import diffusers
    import torch

    network = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(128, 256),
        layers_per_block=1,
        cross_attention_dim=512,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    call = _chosen(network, lambda unet, *given: unet(*given, return_dict=False)[0])
    return call, (_noise(1, 4, 32, 32), torch.tensor([3]), _noise(1, 77, 512))


def _vae_decoder() -> Built:
    import diffusers

    network = diffusers.AutoencoderKL(
        block_out_channels=(64, 128),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
    )
    network.encoder = None
    return _chosen(network, lambda vae, latents: vae.decode(latents, return_dict=False)[0]), (_noise(1, 4, 32, 32),)


_VISION: Mapping[str, Callable[[], Built]] = {
    "resnet50": _torchvision("resnet50"),
    "mobilenet_v3_large": _torchvision("mobilenet_v3_large"),
    "efficientnet_b0": _torchvision("efficientnet_b0"),
    "convnext_tiny": _torchvision("convnext_tiny"),
    "vit_b_16": _torchvision("vit_b_16"),
    "swin_t": _torchvision("swin_t"),
    "swin_v2_t": _torchvision("swin_v2_t", 256),
    "densenet121": _torchvision("densenet121"),
    "regnet_y_400mf": _torchvision("regnet_y_400mf"),
    "shufflenet_v2_x1_0": _torchvision("shufflenet_v2_x1_0"),
    "maxvit_t": _torchvision("maxvit_t"),
    "deeplabv3_mobilenet": _segmentation("deeplabv3_mobilenet_v3_large", 224),
    "lraspp_mobilenet": _segmentation("lraspp_mobilenet_v3_large", 320),
}
_LANGUAGE: Mapping[str, Callable[[], Built]] = {
    "bert_base": _transformer("BertModel", "BertConfig", lambda _: _masked(128), _last_hidden),
    "distilbert": _transformer("DistilBertModel", "DistilBertConfig", lambda _: _masked(128), _last_hidden),
    "gpt2": _transformer("GPT2LMHeadModel", "GPT2Config", lambda _: (_tokens(64),), _logits),
    "gpt2_step": _transformer("GPT2LMHeadModel", "GPT2Config", lambda _: (_tokens(1), *_past(12, 12, 64, 64)), _step),
    "llama_small": _transformer(
        "LlamaForCausalLM",
        "LlamaConfig",
        lambda _: (_tokens(64),),
        _logits,
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "t5_small": _transformer(
        "T5ForConditionalGeneration", "T5Config", lambda _: (_tokens(64), _tokens(16)), _encoded_decoded
    ),
}
_SPEECH_AND_IMAGES: Mapping[str, Callable[[], Built]] = {
    "whisper_tiny": _transformer(
        "WhisperModel",
        "WhisperConfig",
        lambda _: (_noise(1, 80, 3000), _tokens(8)),
        _spoken,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        pad_token_id=0,
    ),
    "wav2vec2_base": _transformer(
        "Wav2Vec2Model",
        "Wav2Vec2Config",
        lambda _: (_noise(1, 16000),),
        lambda network, sound: network(sound).last_hidden_state,
    ),
    "clip_vision": _transformer(
        "CLIPVisionModel",
        "CLIPVisionConfig",
        lambda _: (_noise(1, 3, 224, 224),),
        lambda network, image: network(image).last_hidden_state,
    ),
    "segformer_b0": _transformer(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        lambda _: (_noise(1, 3, 256, 256),),
        lambda network, image: network(image).logits,
    ),
    "detr": _transformer(
        "DetrForObjectDetection",
        "DetrConfig",
        lambda _: (_noise(1, 3, 320, 320),),
        lambda network, image: (lambda found: (found.logits, found.pred_boxes))(network(image)),
        use_timm_backbone=True,
        use_pretrained_backbone=False,
        backbone="resnet18",
        encoder_layers=3,
        decoder_layers=3,
    ),
}

NETWORKS: Mapping[str, Network] = {
    **{name: Network("torchvision", make) for name, make in _VISION.items()},
    **{name: Network("transformers", make) for name, make in {**_LANGUAGE, **_SPEECH_AND_IMAGES}.items()},
    **{name: Network("timm", _timm(name)) for name in ("mobilevitv2_050", "mixer_s32_224")},
    "lstm_tagger": Network("torch", _tagger),
    "gru_forecaster": Network("torch", _forecaster),
    "transformer_encoder": Network("torch", _encoder),
    "unet": Network("diffusers", _unet),
    "vae_decoder": Network("diffusers", _vae_decoder),
}
"""Networks by their names on the command line."""
