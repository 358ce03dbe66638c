"""The side of a transfer that changes a layout: its time there, and the bytes on the wire."""

import pytest
from tvm import relax, tirx

import relax_hetero as rh
from relax_hetero.encoding import Encoding, PackedLayout
from relax_hetero.transform.encode.relayout_transfers import Crossing

ENCODING = Encoding.parse("matmul[0]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=64, k=64>")
ROWS, TILES, PADDED = PackedLayout.identity(2), PackedLayout((0, 1), (0,), (8,)), PackedLayout((0, 1), (1,), (4096,))
FAST = rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 4})
SLOW = rh.VDevice("c", 1)
FAST_TOO = rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 4}, 2)
GPU = rh.VDevice({"kind": "cuda", "arch": "sm_90a"})
ON_FAST = rh.VDevice("c", 0)  # the same physical device as FAST


def crossing(source, destination, old, new, shape=(64, 64)):
    return Crossing(ENCODING, relax.TensorType(shape, "float32", source), source, destination, old, new)


@pytest.mark.parametrize(
    ("source", "destination", "old", "new", "before"),
    [
        (FAST, SLOW, ROWS, TILES, True),  # vectors against scalars
        (SLOW, FAST, TILES, ROWS, False),
        (FAST, FAST_TOO, ROWS, PADDED, False),  # equally fast: the smaller one goes over the wire
        (FAST, FAST_TOO, PADDED, ROWS, True),
        (FAST, FAST_TOO, ROWS, TILES, True),  # nothing to choose: the source
        (FAST, GPU, ROWS, TILES, False),  # a GPU lays out at the rate of its memory
        (GPU, FAST, TILES, ROWS, True),
        (FAST, GPU, PADDED, ROWS, True),  # but padding does not go over the wire
        (FAST, ON_FAST, ROWS, PADDED, True),  # nothing crosses a wire
        (ON_FAST, FAST, PADDED, ROWS, False),
    ],
)
def test_the_cheaper_side(source, destination, old, new, before):
    assert crossing(source, destination, old, new).is_relayout_at_source is before


def test_compensation_is_computed_by_the_cpu_that_needs_it():
    layout = PackedLayout((0, 1), (0, 1), (16, 4), compensation=True)
    assert crossing(GPU, FAST, ROWS, layout).is_relayout_at_source is False
    assert crossing(FAST, FAST_TOO, ROWS, layout).is_relayout_at_source is False


def test_symbolic_extents_count_as_some():
    shape = (tirx.Var("m", "int64"), 64)
    assert crossing(FAST, FAST_TOO, ROWS, PADDED, shape).is_relayout_at_source is False
    assert crossing(FAST, FAST_TOO, PADDED, ROWS, shape).is_relayout_at_source is True
