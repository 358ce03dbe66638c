"""Weights in fragments of tensor cores: chunks of a weight that are packed one by one."""

import numpy as np
import pytest

from encoding.random_blocks import random_rows
from relax_hetero.encoding import block_panels
from relax_hetero.encoding.block_formats import block_format, integer_format
from relax_hetero.encoding.block_panels import BlockSource
from relax_hetero.encoding.block_weights import Fragments, pack_fragments


@pytest.mark.parametrize("name", ["q4_k", "mxfp4"])
def test_scales_keep_the_numbers_of_every_chunk(name, monkeypatch):
    """Those of the first chunk are exact as float16, those of a later one are not."""
    monkeypatch.setattr(block_panels, "_CHUNK_WEIGHTS", 1 << 14)
    raw = random_rows(name, 96, 1024)
    if name == "mxfp4":
        raw.reshape(96, -1, 17)[:, :, 0] = np.where(np.arange(96) < 64, 127, 60)[:, None]
    else:
        raw[:64] = 0
    source = BlockSource((raw,), block_format(name), 1024)
    whole = Fragments()._pack_rows(source)
    for packed, expected in zip(Fragments().pack(source), whole, strict=True):
        assert packed.dtype == expected.dtype
        np.testing.assert_array_equal(packed, expected)


def test_high_zero_points_of_a_later_chunk(monkeypatch):
    monkeypatch.setattr(block_panels, "_CHUNK_WEIGHTS", 1 << 10)
    points = np.where(np.arange(64) < 32, 3, 200)[:, None].astype("uint8").repeat(2, 1)
    data, scales = np.zeros((64, 32), "uint8"), np.ones((64, 2), "float32")
    source = BlockSource((data, scales, points), integer_format(4, 32, True), 64)
    zeros = Fragments().pack(source)[2]
    assert zeros.dtype == "float32" and set(zeros.ravel().tolist()) == {3, 200}


@pytest.mark.parametrize("bits", [4, 8])
def test_no_columns(bits):
    assert pack_fragments(np.zeros((0, 64), "uint8"), 64, 32, bits).shape == (0, 64 // (256 // bits), 32, 4)
