"""Encodings of convolutions, as text and as data, and how CPUs store their operands."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.encoding import Encoding, PackedLayout, resolver_for
from relax_hetero.encoding.encoding import CONVOLUTIONS, DYNAMIC, LHS, RESULT, RHS, ConvAttrs, conv_maps
from relax_hetero.errors import EncodingError
from tir.kernel_runs import TARGETS, target_of

GOOD = (
    "conv2d[1]<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); "
    "b=1, c=64, x0=56, x1=55, n=128, k=32, w0=3, w1=5, y0=28, y1=55; "
    "strides=2x1, padding=1x2x1x2, dilation=1x1, groups=2>"
)


@st.composite
def conv_encodings(draw):
    spatial = draw(st.integers(1, 3))
    one = st.integers(1, 3)
    strides, dilation = (tuple(draw(one) for _ in range(spatial)) for _ in range(2))
    padding = tuple(draw(st.integers(0, 3)) for _ in range(2 * spatial))
    groups, each, outputs = draw(one), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    maps = conv_maps(spatial)
    sizes = {"b": draw(st.integers(1, 9) | st.just(DYNAMIC)), "c": groups * each, "n": groups * outputs, "k": each}
    for d in range(spatial):
        window = draw(st.integers(1, 5))
        reach = (window - 1) * dilation[d] + 1
        image = draw(st.integers(reach, 60) | st.just(DYNAMIC))
        places = (image + padding[d] + padding[spatial + d] - reach) // strides[d] + 1
        sizes |= {f"x{d}": image, f"w{d}": window, f"y{d}": DYNAMIC if image == DYNAMIC else places}
    names = dict.fromkeys(name for index_map in maps for name in index_map)
    ordered = tuple((name, sizes[name]) for name in names)
    attrs = ConvAttrs(strides, padding, dilation, groups)
    types = (draw(st.sampled_from(["float32", "float64"])),) * 3
    return Encoding(CONVOLUTIONS[spatial - 1], draw(st.integers(0, 2)), types, maps, ordered, attrs)


@given(conv_encodings())
def test_text_round_trips(encoding):
    assert Encoding.parse(str(encoding)) == encoding
    assert pickle.loads(pickle.dumps(encoding)) == encoding


def test_meaning_of_the_fields():
    encoding = Encoding.parse(GOOD)
    assert str(encoding) == GOOD
    assert encoding.shape() == (128, 32, 3, 5)
    assert encoding.of(LHS).shape() == (1, 64, 56, 55)
    assert encoding.of(RESULT).shape() == (1, 128, 28, 55)
    assert [encoding.of(i).operand_name for i in (LHS, RHS, RESULT)] == ["data", "weight", "result"]
    assert encoding.conv == ConvAttrs((2, 1), (1, 2, 1, 2), (1, 1), 2)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("conv2d", "matmul", "has strides, padding, dilation and groups, others none"),
        ("conv2d", "conv1d", "found index maps"),
        ("conv2d", "conv4d", "found op type 'conv4d'"),
        ("(b, c, x0, x1)", "(b, x0, x1, c)", "found index maps"),
        ("x0=56, x1=55", "x1=55, x0=56", "found sizes of"),
        ("x0=56, ", "", "found sizes of"),
        ("strides=2x1", "strides=2", "expected 2 strides"),
        ("strides=2x1", "strides=2x", "expected numbers with an x between"),
        ("strides=2x1", "strides=0x1", "no stride, dilation or group of 0"),
        ("padding=1x2x1x2", "padding=1x2", "4 numbers of padding"),
        ("dilation=1x1, ", "", "expected 'strides="),
        ("groups=2", "groups=3", "3 groups of k=32 channels are not c=64"),
        ("n=128", "n=127", "n=127 output channels are not divided by 2 groups"),
        ("y0=28", "y0=29", "found y0=29, expected 28"),
        ("; strides=2x1, padding=1x2x1x2, dilation=1x1, groups=2", "", "has strides, padding, dilation and groups"),
    ],
)
def test_text_that_is_not_an_encoding(old, new, message):
    text = GOOD.replace(old, new, 1)
    with pytest.raises(EncodingError) as error:
        Encoding.parse(text)
    assert message in str(error.value) and repr(text) in str(error.value)


def conv(
    sizes: str,
    attrs: str = "strides=1x1, padding=1x1x1x1, dilation=1x1, groups=1",
    types: str = "float32 * float32 -> float32",
) -> Encoding:
    return Encoding.parse(f"conv2d[0]<{types}; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); {sizes}; {attrs}>")


PLAIN = conv("b=?, c=64, x0=7, x1=7, n=96, k=64, w0=3, w1=3, y0=7, y1=7")
FIRST = conv("b=1, c=3, x0=7, x1=7, n=96, k=3, w0=3, w1=3, y0=7, y1=7")
DEPTHWISE = conv(
    "b=1, c=40, x0=7, x1=7, n=40, k=1, w0=3, w1=3, y0=7, y1=7",
    "strides=1x1, padding=1x1x1x1, dilation=1x1, groups=40",
)
SYMBOLIC = conv("b=1, c=64, x0=?, x1=7, n=96, k=64, w0=3, w1=3, y0=?, y1=7")
LAST = PackedLayout((0, 2, 3, 1))


def layouts(encoding: Encoding, name: str) -> list[PackedLayout | None]:
    target = target_of(name)
    return [resolver_for(target).resolve(encoding.of(index), target) for index in (LHS, RHS, RESULT)]


@pytest.mark.parametrize("name", ["avx512", "avx2", "sse"])
def test_feature_maps_are_channels_last(name):
    data, weight, result = layouts(PLAIN, name)
    assert (data, result) == (LAST, LAST)
    assert weight.outer_perm == LAST.outer_perm and weight.inner_dims == (0,)
    assert layouts(FIRST, name)[0].is_identity
    assert layouts(DEPTHWISE, name) == [LAST, PackedLayout((1, 2, 3, 0)), LAST]


@pytest.mark.parametrize("name", TARGETS)
def test_convolutions_without_a_kernel_lack_a_layout(name):
    sizes = "b=1, c=4, x0=7, x1=7, n=4, k=4, w0=3, w1=3, y0=7, y1=7"
    assert layouts(conv(sizes, types="float16 * float16 -> float16"), name) == [None] * 3


@pytest.mark.parametrize("name", ["avx512", "avx2", "sse"])
def test_symbolic_images_are_channels_last(name):
    data, weight, result = layouts(replace(SYMBOLIC, accuracy="exact"), name)
    assert (data, result) == (LAST, LAST)
    assert (weight.inner_dims, weight.winograd) == ((0,), 0)


@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_windows_of_symbolic_images_are_transformed(name):
    data, weight, result = layouts(SYMBOLIC, name)
    assert (data, result) == (LAST, LAST)
    assert weight.winograd == 2
    assert layouts(replace(SYMBOLIC, accuracy="fast"), name)[1].winograd == 4


def test_windows_are_transformed_where_that_is_faster():
    def places_of_a_tile(channels, places):
        image = f"b=1, c={channels}, x0={places}, x1={places}, n={channels}, k={channels}"
        return layouts(conv(f"{image}, w0=3, w1=3, y0={places}, y1={places}"), "avx512")[1].winograd

    assert [places_of_a_tile(64, places) for places in (7, 14, 28, 56)] == [0, 2, 2, 2]
    assert [places_of_a_tile(channels, 28) for channels in (8, 16, 32, 128)] == [0, 0, 2, 2]


def test_windows_of_volumes_are_transformed_in_their_inner_dimensions():
    def volume(
        depth: str, attrs: str = "strides=1x1x1, padding=1x1x1x1x1x1, dilation=1x1x1", places: int = 14
    ) -> Encoding:
        maps = "(b, c, x0, x1, x2) * (n, k, w0, w1, w2) -> (b, n, y0, y1, y2)"
        image = f"b=1, c=64, x0={depth}, x1=14, x2=14, n=64, k=64, w0=3, w1=3, w2=3, y0={depth}, y1=14, y2={places}"
        return Encoding.parse(f"conv3d[0]<float32 * float32 -> float32; {maps}; {image}; {attrs}, groups=1>")

    data, weight, result = layouts(volume("8"), "avx512")
    assert data == result == PackedLayout((0, 2, 3, 4, 1))
    assert weight == PackedLayout((0, 3, 4, 2, 1), (0,), (32,), winograd=2)
    # With one image, two thirds of the windows are padding, which the direct form skips.
    assert layouts(volume("1"), "avx512")[1].winograd == 0
    assert layouts(volume("8", "strides=1x1x2, padding=1x1x1x1x1x1, dilation=1x1x1", 7), "avx512")[1].winograd == 0
    assert layouts(volume("?"), "avx512")[1].winograd == 0


@pytest.mark.parametrize(
    "types, name, k0, compensation",
    [
        ("uint8 * int8 -> int32", "vnni", 4, False),
        ("int8 * int8 -> int32", "vnni", 4, True),
        ("int8 * int8 -> int32", "avx2", 4, False),
        ("bfloat16 * bfloat16 -> float32", "vnni", 2, False),
        ("float16 * float16 -> float32", "avx512", 1, False),
    ],
)
def test_low_precision_packs_what_a_step_multiplies(types, name, k0, compensation):
    def of(encoding: Encoding) -> list[PackedLayout | None]:
        return layouts(Encoding.parse(str(encoding).replace("float32 * float32 -> float32", types)), name)

    data, weight, result = of(PLAIN)
    assert data == result == LAST
    assert weight.outer_perm == LAST.outer_perm and weight.tile(0) > 1 and weight.tile(1) == k0
    assert weight.compensation == compensation
    image = PackedLayout((0, 2, 3, 1), (1,), (k0,)) if k0 > 1 else PackedLayout.identity(4)
    assert of(FIRST)[0] == image
    assert of(DEPTHWISE) == [LAST, PackedLayout((1, 2, 3, 0)), LAST]


def test_unknown_machines_have_no_layouts_of_convolutions():
    assert layouts(PLAIN, "c") == [None] * 3
