"""Formats of GGUF files as numbers: against their definitions, weight by weight, and against the `gguf` package."""

from pathlib import Path

import numpy as np
import pytest

from encoding.random_blocks import random_rows
from relax_hetero.encoding.block_formats import (
    FILE_FORMATS,
    block_format,
    dequantize_rows,
    integer_format,
    read_block_weights,
)
from relax_hetero.encoding.block_panels import PanelPlan
from relax_hetero.errors import EncodingError

F = np.float32


def half(superblock, offset):
    return F(superblock[offset : offset + 2].view("<f2")[0])


def of_simple(superblock, bits, minimum):
    """32 weights with a scale and perhaps a minimum: 4 bits, and the fifth ones in front."""
    first = 4 if minimum else 2
    high = 0
    if bits == 5:
        high, first = int(superblock[first : first + 4].view("<u4")[0]), first + 4
    scale, least = half(superblock, 0), half(superblock, 2) if minimum else None
    for i in range(32):
        byte = int(superblock[first + i % 16])
        code = (byte >> 4 if i >= 16 else byte & 15) | ((high >> i & 1) << 4)
        yield scale * F(code) + least if minimum else scale * F(code - (1 << (bits - 1)))


def of_large(superblock, bits):
    """256 weights in eight blocks, whose scales and minimums have 6 bits."""
    small, first = superblock[4:16], 48 if bits == 5 else 16
    for i in range(256):
        block = i // 32
        if block < 4:
            scale, least = small[block] & 63, small[block + 4] & 63
        else:
            scale = small[block + 4] & 15 | (small[block - 4] >> 6) << 4
            least = small[block + 4] >> 4 | (small[block] >> 6) << 4
        byte = int(superblock[first + block // 2 * 32 + i % 32])
        code = byte >> 4 if block % 2 else byte & 15
        if bits == 5:
            code |= (int(superblock[16 + i % 32]) >> block & 1) << 4
        yield half(superblock, 0) * F(scale) * F(code) - half(superblock, 2) * F(least)


def of_six(superblock):
    for i in range(256):
        part, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = int(superblock[part * 64 + place + (32 if quarter % 2 else 0)])
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = int(superblock[128 + part * 32 + place]) >> (2 * quarter) & 3
        scale = superblock[192:208].view(np.int8)[i // 16]
        yield half(superblock, 208) * F(scale) * F((low | high << 4) - 32)


def of_float4(superblock):
    for i in range(32):
        byte = int(superblock[1 + i % 16])
        bits = byte >> 4 if i >= 16 else byte & 15
        exponent, fraction = bits >> 1 & 3, bits & 1
        magnitude = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
        yield F(2.0 ** (int(superblock[0]) - 127)) * F(-magnitude if bits & 8 else magnitude)


def of_neighbours(superblock, bits):
    """Weights of a byte are neighbours: 64 of 2 bits, or 128 of one."""
    for i in range(128 // bits):
        quant = int(superblock[2 + i * bits // 8]) >> i * bits % 8 & (1 << bits) - 1
        yield half(superblock, 0) * F(quant - 1 if bits == 2 else 2 * quant - 1)


DEFINITIONS = {
    "q2_0": lambda superblock: of_neighbours(superblock, 2),
    "q1_0": lambda superblock: of_neighbours(superblock, 1),
    "mxfp4": of_float4,
    "q8_0": lambda superblock: (half(superblock, 0) * F(code) for code in superblock[2:].view(np.int8)),
    "q4_0": lambda superblock: of_simple(superblock, 4, False),
    "q4_1": lambda superblock: of_simple(superblock, 4, True),
    "q5_0": lambda superblock: of_simple(superblock, 5, False),
    "q5_1": lambda superblock: of_simple(superblock, 5, True),
    "q4_k": lambda superblock: of_large(superblock, 4),
    "q5_k": lambda superblock: of_large(superblock, 5),
    "q6_k": of_six,
    "f16": lambda superblock: (half(superblock, 0),),
    "bf16": lambda superblock: (np.uint32(int(superblock.view("<u2")[0]) << 16).view(np.float32),),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_numbers_are_those_of_the_definition(name):
    form, depth = block_format(name), 512
    raw = random_rows(name, 3, depth)
    superblocks = raw.reshape(-1, form.superblock_bytes)
    want = np.array([list(DEFINITIONS[name](superblock)) for superblock in superblocks], np.float32).reshape(3, depth)
    np.testing.assert_array_equal(dequantize_rows(raw, form, depth), want)


@pytest.mark.parametrize("name", [name for name in FILE_FORMATS if name not in ("q1_0", "q2_0")])
def test_numbers_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    raw = random_rows(name, 5, 768)
    kind = gguf.GGMLQuantizationType[name.upper()]
    want = gguf.quants.dequantize(raw, kind).reshape(5, 768)
    np.testing.assert_array_equal(dequantize_rows(raw, block_format(name), 768), want)


@pytest.mark.parametrize("name", [name for name, form in FILE_FORMATS.items() if not form.is_plain])
def test_codes_scales_and_minimums(name):
    form = block_format(name)
    weights = read_block_weights(random_rows(name, 16, 512), form, 512)
    codes = weights.codes.astype(int)
    expected = set(form.codes or range(form.min_code, form.min_code + (1 << form.bits)))
    expected -= {"tq1_0": {2}, "iq1_s": {2}}.get(name, set())
    assert set(codes.ravel()) == expected and form.min_code == min(expected)
    assert weights.scales.shape == (16, 512 // form.block)
    assert (weights.minimums is None) == (form.minimum == "")


def test_table_of_the_guide():
    """The bits of each type, as in the file and in a CPU's panels; those of GPUs are the same."""
    guide = (Path(__file__).parents[3] / "docs/guides/language_models.md").read_text()
    rows = []
    for form in FILE_FORMATS.values():
        if not form.is_plain:
            bits = [8 * size / 4096 for size in (form.row_bytes(4096), PanelPlan(form, 4096, 32).panel_bytes / 32)]
            rows.append(f"| {form.name.upper()} | {bits[0]:.4g} | {bits[1]:.4g} |")
    table = "\n".join(["| type | bits in the file | bits on devices |", "| --- | --- | --- |", *rows])
    assert f"\n\n{table}\n\n" in guide, f"docs/guides/language_models.md lacks this table:\n{table}"


def test_names_and_what_is_refused():
    assert block_format("int4_32") == integer_format(4, 32, False)
    assert block_format("int8_128_minimum") == integer_format(8, 128, True)
    for name in ("q3_0", "int5_32", "int4_x", "int4_32_maximum"):
        with pytest.raises(EncodingError, match=f"format '{name}', expected one of q8_0"):
            block_format(name)
    with pytest.raises(EncodingError, match="q4_k: found rows of 640 weights, expected a multiple of 256"):
        block_format("q4_k").row_bytes(640)
