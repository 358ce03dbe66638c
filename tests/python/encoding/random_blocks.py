"""Rows of a file's bytes, at random, as numbers of moderate size."""

import numpy as np

from relax_hetero.encoding.block_formats import block_format

HALVES = {
    "q2_k": [80, 82], "q3_k": [108], "q6_k": [208], "tq1_0": [52], "tq2_0": [64], "mxfp4": [], "nvfp4": [], "iq1_m": [],
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), [0, 2]),
}  # fmt: skip
"""Offsets of float16 in a superblock; [0] if not stated."""


def random_rows(name, rows, depth, seed=3):
    """Rows of random bytes, whose numbers of 16 bits are finite and of moderate size."""
    form, rng = block_format(name), np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, depth // form.superblock_size, form.superblock_bytes), dtype=np.uint8)
    if name == "mxfp4":
        raw[:, :, 0] = rng.integers(120, 130, raw.shape[:2])
    if name == "iq1_m":  # the float16's highest bits, of sign and exponent, are those of the last word
        raw[:, :, 55] = raw[:, :, 55] & 0xBF | 0x30
    for offset in HALVES.get(name, [0]):
        numbers = rng.uniform(0.01, 1, raw.shape[:2]) * rng.choice([-1, 1], raw.shape[:2])
        words = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
        words = words if name == "bf16" else numbers.astype("<f2").view("<u2")
        raw[:, :, offset : offset + 2] = words[..., None].view(np.uint8)
    return raw.reshape(rows, -1)
