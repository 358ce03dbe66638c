"""RealizeVDevice on random programs: placed as the verifier says, idempotent, and the same program as before."""

import re

import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal

from modules import ops_of
from relax_hetero import PlacementError
from relax_hetero.transform.ir.rewriting import handle
from relax_hetero.transform.placement.realize_vdevice import realize_vdevice, verify_placement
from transform.placement_programs import constants, erased, hints, meaning, modules, transfers


def check_placed(mod: tvm.IRModule, placed: tvm.IRModule) -> None:
    verify_placement(placed)
    relax.analysis.well_formed(placed)
    assert meaning(placed) == meaning(mod)
    again, _ = realize_vdevice(placed)
    assert again.same_as(placed)


@settings(max_examples=120)
@given(modules())
def test_programs_with_copies(mod):
    """Any program can be placed where copies are allowed, and nothing is left to a second run."""
    before = tvm.ir.save_json(mod)
    placed, report = realize_vdevice(mod, insert_copies=True)
    check_placed(mod, placed)
    assert realize_vdevice(placed, insert_copies=True)[0].same_as(placed)
    assert tvm.ir.save_json(mod) == before
    transferred = [entry.variable for entry in report.entries if entry.kind == "transfer"]
    written = [binding.var.name for _, func in placed.functions.items() for binding in transfers(func)]
    assert len(transferred) == len(written)


@settings(max_examples=60)
@given(modules(fixed=False))
def test_programs_with_hints(mod):
    """Hints and transfers alone: placed, or two hints that meet are named."""
    try:
        placed, _ = realize_vdevice(mod)
    except PlacementError as error:
        assert "two devices meet" in str(error) and "hint" in str(error)
    else:
        check_placed(mod, placed)
        assert "relax.hint_on_device" not in ops_of(placed)


@settings(max_examples=60)
@given(modules(fixed=False))
def test_programs_in_dataflow_blocks(mod):
    """Copies stay inside the blocks whose variables they copy."""
    mod = relax.transform.ConvertToDataflow(1)(mod)
    check_placed(mod, realize_vdevice(mod, insert_copies=True)[0])


@settings(max_examples=60)
@given(modules(size=5))
def test_programs_without_copies(mod):
    """Placed without new transfers, or refused; a placed program is the same with copies allowed."""
    try:
        placed, _ = realize_vdevice(mod)
    except PlacementError as error:
        assert "two devices meet" in str(error)
    else:
        check_placed(mod, placed)
        assert_structural_equal(realize_vdevice(mod, insert_copies=True)[0], placed)


@settings(max_examples=60)
@given(modules())
def test_one_transfer_per_value_and_destination(mod):
    """Inserted copies are named after the value and the device; a value has one copy per device."""
    placed, _ = realize_vdevice(mod, insert_copies=True)
    for _, func in placed.functions.items():
        pairs = [(binding.value.args[0], binding.var.name) for binding in transfers(func)]
        inserted = [(handle(source), name) for source, name in pairs if re.search("_(llvm|c)_[0-9]$", str(name))]
        assert len(inserted) == len(set(inserted))


@settings(max_examples=40)
@given(modules(functions=3, size=5), st.randoms(use_true_random=False))
def test_order_of_functions(mod, random):
    """Which function keeps its name may change where a function is cloned, nothing else."""
    items = list(mod.functions.items())
    random.shuffle(items)
    turned = tvm.IRModule(dict(items), global_infos=mod.global_infos)
    placed, _ = realize_vdevice(mod, insert_copies=True)
    other, _ = realize_vdevice(turned, insert_copies=True)
    if len(placed.functions) == len(items):
        assert_structural_equal(other, placed)
    else:
        assert len(other.functions) == len(placed.functions)
        assert meaning(other) == meaning(placed)


@settings(max_examples=60)
@given(modules(functions=1, fixed=False), st.sets(st.integers(0, 40)))
def test_erasing_what_the_pass_derived_changes_nothing(mod, annotated):
    """The result follows from hints and transfers alone, however many of the annotations it wrote are left."""
    try:
        placed, _ = realize_vdevice(mod)
    except PlacementError:
        return
    # Hints, and transfers that went away, leave no trace but the device of their variable.
    named = (*hints(mod["main"]), *transfers(mod["main"]), *constants(placed["main"]))
    fixed = {binding.var.name for binding in named}
    fixed |= {f"v{number}" for number in annotated}
    again, _ = realize_vdevice(erased(placed, lambda name: name not in fixed))
    assert_structural_equal(again, placed)
