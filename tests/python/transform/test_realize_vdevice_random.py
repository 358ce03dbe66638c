"""RealizeVDevice on random programs: placed as the verifier says, idempotent, and the same program as before."""

import tvm
from hypothesis import given, settings
from tvm import relax

from relax_hetero.transform.realize_vdevice import realize_vdevice, verify_placement
from transform.placement_programs import meaning, modules


def check_placed(mod: tvm.IRModule, placed: tvm.IRModule) -> None:
    verify_placement(placed)
    relax.analysis.well_formed(placed)
    assert meaning(placed) == meaning(mod)
    again, _ = realize_vdevice(placed)
    assert again.same_as(placed)


@settings(max_examples=150)
@given(modules())
def test_programs_with_copies(mod):
    before = tvm.ir.save_json(mod)
    placed, _ = realize_vdevice(mod, insert_copies=True)
    check_placed(mod, placed)
    again, _ = realize_vdevice(placed, insert_copies=True)
    assert again.same_as(placed)
    assert tvm.ir.save_json(mod) == before
