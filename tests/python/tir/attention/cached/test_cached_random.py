"""Attention with a cache of random attributes, lengths, orders of rows and chunks, against float64."""

import numpy as np
import pytest

from tir.attention.cached.cached_cases import Cache, Case, compiled

TARGETS = [
    "llvm",
    '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}',
    '{"kind": "llvm", "mcpu": "x86-64", "num-cores": 3}',
]


def random_case(rng):
    """Attributes of any kind; half of the sizes are not multiples of a vector."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    size = int(rng.choice([8, 24, 40, 64, 96, 128, 200]))
    rotary = str(rng.choice(["", "halves", "pairs"]))
    return Case(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=size,
        scale=float(rng.uniform(0.05, 0.5)),
        window=int(rng.choice([0, 1, 5, 64, 65, 150])),
        softcap=float(rng.choice([0, 2.0, 50.0])),
        rotary=rotary,
        turned=2 * int(rng.integers(1, size // 2 + 1)) if rotary else 0,
        norms=str(rng.choice(["", "q", "k", "qk"])),
        pages=str(rng.choice(["float16", "float32", "int8", "bfloat16"])),
        sinks=bool(rng.integers(2)),
        shared_values=int(rng.integers(1, size + 1)) * int(rng.integers(4) == 0),
        dtype=str(rng.choice(["float32", "float32", "float16", "bfloat16"])),
    )


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_random(seed):
    rng = np.random.default_rng(seed)
    case, target = random_case(rng), TARGETS[int(rng.integers(len(TARGETS)))]
    slots, max_pages, chunk, batch = int(rng.integers(1, 5)), 5, int(rng.integers(1, 90)), int(rng.integers(1, 5))
    machines = {
        rows: compiled(Case(**{**case.__dict__, "rows": rows}), count, slots, max_pages, target)
        for rows, count in (("chunk", chunk), ("decode", batch))
    }
    cache = Cache(case, slots, max_pages, seed, target)
    for _ in range(14):
        free = [slot for slot in range(slots) if cache.length(slot) + chunk <= max_pages * 64]
        if not free:
            break
        if rng.integers(2):
            slot, count = int(rng.choice(free)), int(rng.integers(1, chunk + 1))
            first, rest = cache.length(slot), chunk - count
            inputs = cache.inputs([slot] * count + [-1] * rest, [*range(first, first + count), *[0] * rest])
            out = cache.call(machines["chunk"], inputs)
        else:
            chosen = [int(slot) for slot in rng.permutation(free)[:batch]]
            rows = [*chosen, *[-1] * (batch - len(chosen))]
            inputs = cache.inputs(rows, [cache.length(slot) if slot >= 0 else 0 for slot in rows])
            out = cache.call(machines["decode"], inputs)
        cache.check(inputs, out)
