"""MultiHeadAttention and DecoderMaskedMultiHeadAttention, whose caches have room for all positions, and MHA's forms."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.contrib.contrib_nodes import Nodes

BATCH, HEADS, SIZE, ROOM = 2, 2, 4, 10
PAST = np.array([5], "int32")


def past_of(nodes: Nodes) -> list[np.ndarray]:
    """Keys and values of five positions, and unused capacity."""
    caches = [nodes.floats(BATCH, HEADS, ROOM, SIZE) for _ in range(2)]
    for cache in caches:
        cache[:, :, PAST[0] :] = 7
    return caches


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_shared_caches(vdevices):
    nodes = Nodes()
    several = [nodes.floats(BATCH, 3, HEADS * SIZE) for _ in range(3)]
    one = [nodes.floats(BATCH, 1, HEADS * SIZE) for _ in range(3)]
    mask, bias = np.ones((BATCH, 6), "int32"), nodes.floats(3 * HEADS * SIZE)
    mask[1, :2] = 0
    nodes.add(
        "MultiHeadAttention", *several, None, None, None, *past_of(nodes), PAST, num_heads=HEADS, unidirectional=1,
        outputs=3,
    )  # fmt: skip
    nodes.add(
        "DecoderMaskedMultiHeadAttention", *one, mask, None, *past_of(nodes), PAST, None, None, bias, num_heads=HEADS,
        past_present_share_buffer=1, outputs=3, scale=0.3,
    )  # fmt: skip
    cross = [nodes.floats(BATCH, HEADS, 7, SIZE) for _ in range(2)]
    nodes.add("DecoderMaskedMultiHeadAttention", one[0], *cross, num_heads=HEADS)
    nodes.check(vdevices)


def test_too_many_positions_and_other_forms_are_refused():
    nodes = Nodes()
    new = [nodes.floats(BATCH, 3, HEADS * SIZE) for _ in range(3)]
    nodes.add("MultiHeadAttention", *new, None, None, None, *past_of(nodes), PAST, num_heads=HEADS)
    model = nodes.model()
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(1, None))
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    with pytest.raises(rh.HeteroError, match="expected at most the 10 of its cache"):
        main(**(nodes.feeds | {"x0_8": np.array([8], "int32")}))
    model.graph.node[0].input[7] = ""
    with pytest.raises(rh.FrontendError, match="a past of keys or of values alone"):
        rh.from_onnx(model)
