"""Formats of GGUF files as numbers: against their definitions, weight by weight, and against the `gguf` package."""

import numpy as np
import pytest

from encoding.random_blocks import random_rows
from relax_hetero.encoding.block_formats import (
    FILE_FORMATS,
    block_format,
    numbers_of_rows,
    of_integers,
    weights_of_rows,
)
from relax_hetero.errors import EncodingError

F = np.float32


def half(record, offset):
    return F(record[offset : offset + 2].view("<f2")[0])


def of_simple(record, bits, minimum):
    """32 weights with a scale and perhaps a minimum: 4 bits, and the fifth ones in front."""
    first = 4 if minimum else 2
    high = 0
    if bits == 5:
        high, first = int(record[first : first + 4].view("<u4")[0]), first + 4
    scale, least = half(record, 0), half(record, 2) if minimum else None
    for i in range(32):
        byte = int(record[first + i % 16])
        code = (byte >> 4 if i >= 16 else byte & 15) | ((high >> i & 1) << 4)
        yield scale * F(code) + least if minimum else scale * F(code - (1 << (bits - 1)))


def of_large(record, bits):
    """256 weights in eight blocks, whose scales and minimums have 6 bits."""
    small, first = record[4:16], 48 if bits == 5 else 16
    for i in range(256):
        block = i // 32
        if block < 4:
            scale, least = small[block] & 63, small[block + 4] & 63
        else:
            scale = small[block + 4] & 15 | (small[block - 4] >> 6) << 4
            least = small[block + 4] >> 4 | (small[block] >> 6) << 4
        byte = int(record[first + block // 2 * 32 + i % 32])
        code = byte >> 4 if block % 2 else byte & 15
        if bits == 5:
            code |= (int(record[16 + i % 32]) >> block & 1) << 4
        yield half(record, 0) * F(scale) * F(code) - half(record, 2) * F(least)


def of_six(record):
    for i in range(256):
        part, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = int(record[part * 64 + place + (32 if quarter % 2 else 0)])
        low = byte >> 4 if quarter >= 2 else byte & 15
        high = int(record[128 + part * 32 + place]) >> (2 * quarter) & 3
        scale = record[192:208].view(np.int8)[i // 16]
        yield half(record, 208) * F(scale) * F((low | high << 4) - 32)


DEFINITIONS = {
    "q8_0": lambda record: (half(record, 0) * F(code) for code in record[2:].view(np.int8)),
    "q4_0": lambda record: of_simple(record, 4, False),
    "q4_1": lambda record: of_simple(record, 4, True),
    "q5_0": lambda record: of_simple(record, 5, False),
    "q5_1": lambda record: of_simple(record, 5, True),
    "q4_k": lambda record: of_large(record, 4),
    "q5_k": lambda record: of_large(record, 5),
    "q6_k": of_six,
    "f16": lambda record: (half(record, 0),),
    "bf16": lambda record: (np.uint32(int(record.view("<u2")[0]) << 16).view(np.float32),),
}


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_numbers_are_those_of_the_definition(name):
    form, depth = block_format(name), 512
    raw = random_rows(name, 3, depth)
    records = raw.reshape(-1, form.record_bytes)
    want = np.array([list(DEFINITIONS[name](record)) for record in records], np.float32).reshape(3, depth)
    np.testing.assert_array_equal(numbers_of_rows(raw, form, depth), want)


@pytest.mark.parametrize("name", FILE_FORMATS)
def test_numbers_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    raw = random_rows(name, 5, 768)
    kind = gguf.GGMLQuantizationType[name.upper()]
    want = gguf.quants.dequantize(raw, kind).reshape(5, 768)
    np.testing.assert_array_equal(numbers_of_rows(raw, block_format(name), 768), want)


@pytest.mark.parametrize("name", [name for name, form in FILE_FORMATS.items() if not form.is_plain])
def test_codes_scales_and_minimums(name):
    form = block_format(name)
    weights = weights_of_rows(random_rows(name, 4, 512), form, 512)
    codes = weights.codes.astype(int)
    assert codes.min() == form.low and codes.max() == form.low + (1 << form.bits) - 1
    assert weights.scales.shape == (4, 512 // form.block)
    assert (weights.minimums is None) == (form.minimum == "")


def test_names_and_what_is_refused():
    assert block_format("int4_32") == of_integers(4, 32, False)
    assert block_format("int8_128_minimum") == of_integers(8, 128, True)
    for name in ("q3_k", "int5_32", "int4_x", "int4_32_maximum"):
        with pytest.raises(EncodingError, match=f"format '{name}', expected one of q8_0"):
            block_format(name)
    with pytest.raises(EncodingError, match="q4_k: found rows of 640 weights, expected a multiple of 256"):
        block_format("q4_k").bytes_of_row(640)
