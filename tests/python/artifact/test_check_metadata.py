"""Metadata that came from a file: dangling references and values of wrong types are found and named."""

import dataclasses
import json
import re

import pytest

from relax_hetero.artifact import commands, schedule, signature
from relax_hetero.artifact.check_metadata import check_metadata, read_metadata
from relax_hetero.artifact.metadata import ConstantSpec, DeviceSpec, Metadata

REFERENCE = commands.Reference("slot", 0, 0, "4 * n")
KERNEL = commands.KernelSpec("k", 0, (commands.TensorParam("a", "float32", ("n",), 64, "read"),))
REGION = commands.RegionSpec(
    "r", "main", 0, (commands.SlotSpec("x", 0, 4, 64, "read"),), ("n",), (), 0, (commands.Dispatch("k", (REFERENCE,)),)
)
STEPS = (schedule.Step(0, (0,), (1,), "f"), schedule.Step(0, (1,), (2,), source=0))
SIGNATURE = signature.FunctionSignature("main", (signature.TensorSpec("x", ("n",), "float32", 0),), ())
GOOD = Metadata(
    devices=(DeviceSpec('{"kind": "llvm"}'),),
    host_index=0,
    signatures={"main": SIGNATURE},
    constants=(ConstantSpec("c", (2, 3), "float32", 0),),
    regions=(REGION,),
    kernels={"k": KERNEL},
    schedules=(schedule.Schedule("main", 1, 3, STEPS, (2, (1,))),),
)


def test_written_metadata_are_read():
    assert read_metadata(GOOD.to_json()) == GOOD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["constants"][0].pop("shape"), "KeyError('shape')"),
        (lambda data: data["constants"][0].update(size=1), "ConstantSpec: found 'size', expected only name, shape"),
        (lambda data: data.update(cache=None), "CacheUse: found None, expected an object"),
        (lambda data: data["regions"][0]["commands"][0]["operands"][0].pop(), "0, 0], expected a list of space, index"),
        (
            lambda data: data["regions"][0]["commands"][0].update(operands=["ab"]),
            "found 'ab', expected a list of space",
        ),
    ],
)
def test_parts_of_other_forms_are_named(change, words):
    data = json.loads(GOOD.to_json())
    change(data)
    with pytest.raises(ValueError, match=f"a part of it is missing, or of another kind: .*{re.escape(words)}"):
        read_metadata(json.dumps(data))


def with_region(**changes):
    return dataclasses.replace(GOOD, regions=(dataclasses.replace(REGION, **changes),))


def with_schedule(**changes):
    return dataclasses.replace(GOOD, schedules=(dataclasses.replace(GOOD.schedules[0], **changes),))


def with_constant(**changes):
    return dataclasses.replace(GOOD, constants=(dataclasses.replace(GOOD.constants[0], **changes),))


def with_nodes(nodes):
    entry = {"function": "main", "variable": "y", "kernel": "k", "device": "llvm:0", "ops": [], "precision": ""}
    return dataclasses.replace(GOOD, fusions={"dispatches": [{**entry, "nodes": nodes}], "missed": []})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (dataclasses.replace(GOOD, host_index=1), "host_index is 1, expected -1 to 0"),
        (dataclasses.replace(GOOD, host_index=True), "host_index: found True, expected a 64-bit integer"),
        (dataclasses.replace(GOOD, alignment=48), "expected a power of two"),
        (dataclasses.replace(GOOD, alignment=1 << 64), "an integer of 65 bits"),
        (dataclasses.replace(GOOD, devices=(DeviceSpec("[]"),)), "has no kind"),
        (dataclasses.replace(GOOD, placement=[{"op": 1}]), r"placement\[0\] lacks"),
        (with_nodes([0]), "a node of kernel 'k' is 0"),
        (with_nodes(["0"]), "the nodes of kernel 'k' are"),
        (with_constant(device=7), "the device of constant 'c' is 7"),
        (with_constant(shape=(2, -3)), "expected sizes >= 0"),
        (with_constant(shape=(2, "n")), "found 'n', expected a 64-bit integer"),
        (with_constant(addresses=(5,)), "an address of constant 'c' is 5"),
        (with_region(commands=(commands.Dispatch("gone", ()),)), "calls the kernel 'gone', which is not there"),
        (with_region(commands=(commands.Dispatch("k", ()),)), "with 0 operands, expected 1"),
        (
            with_region(commands=(commands.Dispatch("k", (commands.Reference("slot", 1),)),)),
            "a slot of region 'r' is 1",
        ),
        (with_region(commands=(commands.Dispatch("k", (commands.Reference("disk", 0),)),)), "refers to 'disk'"),
        (with_region(directs=(1,)), "a constant of region 'r' is 1"),
        (with_schedule(values=1), "a value of the schedule"),
        (with_schedule(steps=STEPS[::-1]), "reads values .* that no step before it makes"),
        (with_schedule(results=(9,)), "returns 9, which no step makes"),
    ],
)
def test_dangling_references_are_named(bad, words):
    with pytest.raises(ValueError, match=words):
        check_metadata(bad)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"devices": 1}', json.dumps({"devices": [1]})]
)
def test_other_text_is_refused_by_one_error(text):
    with pytest.raises(ValueError):
        read_metadata(text)
