"""Small GGUF files with random weights for each architecture; dimensions that K types block are multiples of 256."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

_BENCH = Path(__file__).parents[3] / "apps" / "bench" / "llm_bench"


def _load(name: str):
    """A module of the benchmarks, without their folder on the path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _BENCH / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_random = _load("random_gguf")
Sizes, write_gguf, random_blocks, shapes = _random.Sizes, _random.write_gguf, _random.random_blocks, _random.shapes

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


def llama3_factors(base: float, dims: int) -> tuple[float, ...]:
    """Divisors of Llama 3's frequencies: waves that fit often into the old context stay, long ones grow."""
    waves = LLAMA3["original_max_position_embeddings"] * base ** (-np.arange(0, dims, 2) / dims) / (2 * np.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = np.clip((waves - low) / (high - low), 0, 1)
    return tuple(1 / (share + (1 - share) / LLAMA3["factor"]))


DEEPSEEK2 = Sizes("deepseek2", eps=1e-6, layers=3, rotary=32, expert_width=256, dense_layers=1)

MODELS = {
    "llama": Sizes(),
    "llama-tied": Sizes(tied=True, rope_base=5e5, rope_factors=llama3_factors(5e5, 64)),
    "qwen2": Sizes("qwen2", rope_base=1e6, eps=1e-6, tied=True),
    "qwen3": Sizes("qwen3", rope_base=1e6, eps=1e-6, size=128),
    "qwen3moe": Sizes("qwen3moe", rope_base=1e6, eps=1e-6, size=128, experts=8, experts_used=3, expert_width=256),
    "qwen2moe": Sizes(
        "qwen2moe", rope_base=1e6, eps=1e-6, experts=6, experts_used=2, expert_width=256, shared_width=512
    ),
    "olmoe": Sizes("olmoe", feed_forward=256, kv_heads=4, experts=6, experts_used=2, expert_width=256),
    "granite": Sizes("granite", tied=True, scales=(3.0, 0.6, 0.07, 2.0)),
    "granitemoe": Sizes(
        "granitemoe", feed_forward=256, experts=4, experts_used=2, expert_width=256, scales=(3.0, 0.6, 0.07, 2.0)
    ),
    "glm4moe": Sizes(
        "glm4moe",
        layers=3,
        size=64,
        rotary=32,
        experts=8,
        experts_used=3,
        expert_width=256,
        shared_width=256,
        dense_layers=1,
        expert_scale=1.5,
        normalizes=True,
        gating=2,
        biased=True,
    ),
    "gpt-oss": Sizes(
        "gpt-oss",
        layers=3,
        size=64,
        window=24,
        rope_base=150000.0,
        yarn=(32, 64),
        experts=8,
        experts_used=3,
        expert_width=256,
    ),
    "deepseek2-lite": replace(
        DEEPSEEK2,
        latent=(0, 256, 288, 256),
        joined=True,
        experts=6,
        experts_used=2,
        shared_width=512,
        expert_scale=1.0,
        gating=1,
        yarn=(40, 64, 0.0707),
    ),
    "deepseek2": replace(
        DEEPSEEK2,
        latent=(256, 256, 288, 256),
        experts=16,
        experts_used=4,
        shared_width=256,
        expert_scale=2.5,
        normalizes=True,
        gating=2,
        biased=True,
        groups=4,
        groups_used=2,
        yarn=(40, 64, 0.1),
    ),
    "mixtral": Sizes(feed_forward=256, experts=4, experts_used=2, expert_width=256, rope_base=1e6),
    "gemma2": Sizes("gemma2", eps=1e-6, window=24, layers=3, attention_softcap=2.0, final_softcap=3.0),
    "gemma3": Sizes("gemma3", eps=1e-6, window=24, layers=7, kv_heads=1, rope_base=1e6),
    "gemma3-pattern": Sizes("gemma3", eps=1e-6, window=70, layers=3, pattern=2, rope_base=1e6, local_rope_base=5e4),
}
"""The architectures with what their files may differ in; windows end inside of prompts of a hundred tokens."""

QWEN3_30B, FOUR_BITS = _random.QWEN3_30B, _random.FOUR_BITS

LLAMA_CPP_MODELS = [name for name in MODELS if name != "deepseek2-lite"]
"""Models that llama.cpp loads: a DeepSeek without a rank of queries needs the 27 layers of version 2 Lite."""
