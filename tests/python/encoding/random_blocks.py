"""Rows of a file's bytes, at random, as numbers of moderate size."""

import numpy as np

from relax_hetero.encoding.block_formats import block_format


def random_rows(name, rows, depth, seed=3):
    """Rows of random bytes, whose numbers of 16 bits are finite and of moderate size."""
    form, rng = block_format(name), np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, depth // form.superblock_size, form.superblock_bytes), dtype=np.uint8)
    places = {"q6_k": [208], "q8_0": [0], "q4_0": [0], "q5_0": [0], "f16": [0], "bf16": [0]}.get(name, [0, 2])
    if name == "mxfp4":
        raw[:, :, 0], places = rng.integers(120, 130, raw.shape[:2]), []
    for offset in places:
        numbers = rng.uniform(0.01, 1, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2])
        words = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
        words = words if name == "bf16" else numbers.astype("<f2").view("<u2")
        raw[:, :, offset : offset + 2] = words[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
