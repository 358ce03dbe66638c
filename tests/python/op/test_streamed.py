"""`R.hetero.stream` and `R.hetero.panel_fragments`: their types, and what they refuse."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal

from op.test_quantized_matmul import infer
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import PanelPlan
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.errors import EncodingError
from relax_hetero.op import panel_fragments, stream

CPU, GPU = tvm.relax.VDevice("llvm"), tvm.relax.VDevice({"kind": "cuda", "arch": "sm_90a"})
PANELS, SIZES = ((3, 4736), "uint8", GPU), {"columns": 32, "depth": 256, "experts": 3, "format": "q4_k"}


def test_a_copy_is_on_the_device_of_what_it_waits_for():
    ty = infer(stream, ((40, 7), "uint8", CPU), ((3,), "int32", GPU))
    assert_structural_equal(ty, relax.TensorType([40, 7], "uint8", GPU))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q4_1", "bf16"])
def test_parts(name):
    form = FILE_FORMATS[name]
    panels = (3, PanelPlan(form, 256, 32).panel_bytes), "uint8", GPU
    for part, shape in enumerate(Fragments().shapes(32, form, 256, 3)):
        ty = infer(panel_fragments, panels, **{**SIZES, "format": name}, part=part)
        assert_structural_equal(ty, relax.TensorType(shape, Fragments().part_types(form)[part], GPU))


@pytest.mark.parametrize(
    ("panels", "sizes"),
    [(((3, 4735), "uint8"), {}), (((2, 4736), "uint8"), {}), (((3, 4736), "int8"), {}), (PANELS, {"columns": 24})],
)
def test_panels_that_do_not_fit(panels, sizes):
    with pytest.raises(EncodingError, match="expected bytes of panels of 3 experts with .. columns of 256 weights in"):
        infer(panel_fragments, panels, **{**SIZES, **sizes})


def test_operands_that_are_no_tensors():
    with pytest.raises(EncodingError, match="operand 1 is a int, expected a Relax expression"):
        stream(relax.Var("x", relax.TensorType([4], "uint8")), 1)
    call = stream(relax.Var("x", relax.TensorType([4], "uint8")), relax.Var("after", relax.ShapeType(ndim=1)))
    with pytest.raises(EncodingError, match="operand 1 is a .*, expected a tensor"):
        relax.BlockBuilder().normalize(call)
