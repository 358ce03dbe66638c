"""Signatures and metadata: text, JSON and back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relax_hetero as rh
from relax_hetero.artifact import commands
from relax_hetero.artifact.metadata import device_names
from relax_hetero.artifact.signature import describe, tensors_of

names = st.text(min_size=1, max_size=8)
dims = st.one_of(st.integers(0, 1 << 40), st.sampled_from(["n", "(n + 1)", "batch size"]))
shapes = st.one_of(st.none(), st.lists(dims, max_size=4).map(tuple))
devices = st.integers(-1, 3)
tensors = st.builds(
    rh.vm.TensorSpec, names, shapes, st.sampled_from([None, "float32", "bool"]), devices, st.integers(-1, 4)
)
leaves = st.one_of(
    tensors,
    st.builds(rh.vm.ShapeSpec, names, shapes, st.integers(-1, 4)),
    st.builds(rh.vm.PrimSpec, names, st.just("int64"), st.one_of(st.none(), dims)),
    st.builds(rh.vm.ObjectSpec, names),
)
specs = st.recursive(leaves, lambda inner: st.builds(rh.vm.TupleSpec, names, st.lists(inner, max_size=3).map(tuple)))
signatures = st.builds(
    rh.vm.FunctionSignature,
    names,
    st.lists(specs, max_size=3).map(tuple),
    st.lists(specs, min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.integers(-1, 0),
    st.booleans(),
)


references = st.builds(
    commands.Reference, st.sampled_from([commands.SLOT, commands.DIRECT, commands.ARENA]), st.integers(0, 9), dims, dims
)
maybe = st.one_of(st.none(), references)


def tuples(elements, size=3):
    return st.lists(elements, max_size=size).map(tuple)


each_command = st.one_of(
    st.builds(
        commands.Dispatch,
        names,
        tuples(references),
        tuples(st.one_of(dims, st.floats(allow_nan=False))),
        tuples(dims),
        maybe,
        maybe,
        maybe,
        st.sampled_from(["", "lv"]),
    ),
    st.builds(commands.Copy, references, references),
    st.builds(commands.Fill, references, st.sampled_from(["00", "0000803f"])),
    st.just(commands.Barrier()),
)
slots = st.builds(commands.SlotSpec, names, devices, dims, st.just(16), names, names, shapes)
regions = st.builds(
    commands.RegionSpec,
    names, names, devices, tuples(slots), tuples(names), tuples(st.integers(0, 9)), dims, tuples(each_command), names,
    names,
)  # fmt: skip
tensor_params = st.builds(commands.TensorParam, names, names, tuples(dims), st.just(4), names)
scalar_params = st.builds(commands.ScalarParam, names, names)
kernels = st.builds(
    commands.KernelSpec,
    names, devices, tuples(tensor_params), tuples(scalar_params), st.integers(0, 3), tuples(names), names,
)  # fmt: skip


@given(signatures)
def test_signatures_survive_json(signature):
    assert rh.vm.FunctionSignature.from_json(json.loads(json.dumps(signature.to_json()))) == signature


@given(
    st.lists(st.builds(rh.vm.DeviceSpec, st.sampled_from(['{"kind":"llvm"}', '{"kind":"cuda"}']), st.integers(0, 3))),
    st.lists(signatures, max_size=2, unique_by=lambda s: s.name),
    st.lists(st.builds(rh.vm.ConstantSpec, names, st.lists(st.integers(0, 9)).map(tuple), names, devices), max_size=2),
    st.dictionaries(names, st.builds(rh.vm.DispatchSpec, devices, st.lists(names).map(tuple)), max_size=2),
)
def test_metadata_survives_json(manifest, functions, constants, dispatches):
    metadata = rh.vm.Metadata(
        tuple(manifest), -1, {s.name: s for s in functions}, tuple(constants), {"entries": []}, dispatches
    )
    assert rh.vm.Metadata.from_json(metadata.to_json()) == metadata


@given(
    st.lists(regions, max_size=2),
    st.lists(kernels, max_size=2, unique_by=lambda kernel: kernel.name),
    st.lists(st.builds(commands.SingleCall, names, names, names, names), max_size=2),
)
def test_command_buffers_survive_json(specs, callable_kernels, single):
    by_name = {kernel.name: kernel for kernel in callable_kernels}
    metadata = rh.vm.Metadata((), -1, {}, regions=tuple(specs), kernels=by_name, single_calls=tuple(single))
    assert rh.vm.Metadata.from_json(metadata.to_json()) == metadata


def test_devices_are_numbered_within_their_kind():
    kinds = ["llvm", "cuda", "llvm", "c"]
    manifest = tuple(rh.vm.DeviceSpec(json.dumps({"kind": kind})) for kind in kinds)
    assert device_names(manifest) == ["llvm:0", "cuda:0", "llvm:1", "c:0"]
    assert [spec.device_type for spec in manifest] == [1, 2, 1, 1]
    with pytest.raises(rh.BuildError, match="kind 'abacus' is unknown; expected one of llvm"):
        _ = rh.vm.DeviceSpec('{"kind": "abacus"}').device_type


def test_signatures_read_well():
    tensor = rh.vm.TensorSpec("x", ("n", 4), "float32", 0)
    pair = rh.vm.TupleSpec("t", (tensor, rh.vm.ShapeSpec("s", ("n",))))
    assert describe(pair) == "(float32[n, 4], shape(n))"
    assert describe(rh.vm.TensorSpec("x", None, None, 0, 2)) == "any[?, ?]"
    assert describe(rh.vm.TensorSpec("x", None, "int8", 0)) == "int8[...]"
    signature = rh.vm.FunctionSignature("main", (tensor, pair), (tensor,))
    assert str(signature) == "main(x: float32[n, 4], t: (float32[n, 4], shape(n))) -> x: float32[n, 4]"
    assert signature.num_input == 2
    assert signature.input_names == ("x", "t")
    assert list(tensors_of(pair)) == [tensor]
