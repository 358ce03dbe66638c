"""The partition of a function's work: random graphs against the promises of the partition, and small cases."""

from unittest import mock

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.transform.ir.blocks import used_vars
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.partition import device_partition
from relax_hetero.transform.partition.device_partition import BindingDevices, DevicePartition, is_transfer
from transform.outlines import D0, D1, FIRST, ONE, SECOND, TWO, with_main

DEVICES = [rh.VDevice({"kind": "llvm", "num-cores": 1}, index) for index in range(3)]
SETTINGS = settings(max_examples=200, deadline=None)


@st.composite
def graphs(draw):
    """A module whose `main` is work on two or three devices, with one transfer for each value and device."""
    devices = DEVICES[: draw(st.integers(2, 3))]
    types = [relax.TensorType([4], "float32", device) for device in devices]
    params = [relax.Var(f"x{number}", ty) for number, ty in enumerate(types)]
    values = [{number: param} for number, param in enumerate(params)]  # where each value is
    bindings = []

    def bind(value, number):
        bindings.append(relax.VarBinding(relax.DataflowVar(f"v{len(bindings)}", types[number]), value))
        return bindings[-1].var

    for _ in range(draw(st.integers(3, 14))):
        number = draw(st.integers(0, len(devices) - 1))
        operands = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=2, unique=True))
        for operand in operands:
            here = values[operand]
            if number not in here:
                here[number] = bind(relax.op.to_vdevice(next(iter(here.values())), devices[number]), number)
        work = relax.call_tir(ONE, [values[operand][number] for operand in operands], types[number])
        values.append({number: bind(work, number)})
    result = next(iter(values[-1].values()))
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
    mod = tvm.IRModule({"main": relax.Function(params, body, result.ty)})
    mod.update_global_info("vdevice", devices)
    return mod


def parts_of(mod, small=-1):
    """The parts of `main`; by default none counts as small."""
    with mock.patch.object(device_partition, "SMALL_PART_BYTES", small):
        return DevicePartition(list(walk_bindings(mod["main"].body)), BindingDevices(mod))


class Dependence:
    """Dependences of each binding, recomputed by walking its reads."""

    def __init__(self, bindings, places):
        self.bindings, self.places = bindings, places
        position = {binding.var: index for index, binding in enumerate(bindings)}
        self.reads = [{position[var] for var in used_vars(b.value) if var in position} for b in bindings]
        self.before = [set() for _ in bindings]
        for index, read in enumerate(self.reads):
            self.before[index] = read.union(*(self.before[other] for other in read))

    def producers(self, index):
        """Bindings that a binding reads, looking through those that cost nothing."""
        sources = set()
        for read in self.reads[index]:
            sources |= self.producers(read) if self.places.is_zero_cost(self.bindings[read]) else {read}
        return sources

    def transfers_before(self, index):
        return {other for other in self.before[index] if is_transfer(self.bindings[other])}

    def transfers_after(self, index):
        return {t for t, b in enumerate(self.bindings) if is_transfer(b) and index in self.before[t]}

    def readers(self, index):
        work = [i for i, b in enumerate(self.bindings) if not self.places.is_zero_cost(b)]
        return [reader for reader in work if index in self.producers(reader)]

    def comes_no_later(self, transfer, others):
        """True if the source of a transfer is ready when that of one of the others is."""
        needed = self.producers(transfer)
        return not needed or any(needed <= self.producers(o) | self.before[o] for o in others)


@given(graphs(), st.sampled_from([-1, 50, 1 << 20]))
@SETTINGS
def test_parts_read_values_of_earlier_parts(mod, small):
    parts = parts_of(mod, small)
    order = parts.topological_order()
    assert sorted(order) == sorted(parts.parts)
    dependence = Dependence(parts.bindings, BindingDevices(mod))
    done: set[int] = set()
    for number in order:
        members = set(parts.parts[number].members)
        for index in members:
            earlier = {other for other in dependence.before[index] if other in parts.part_of}
            assert earlier <= done | members
        done |= members
    work = {i for i, b in enumerate(parts.bindings) if not BindingDevices(mod).is_zero_cost(b)}
    assert work <= done == set(parts.part_of)


@given(graphs())
@SETTINGS
def test_a_part_waits_only_for_operands_of_its_first_kernel(mod):
    parts = parts_of(mod)
    places = BindingDevices(mod)
    dependence = Dependence(parts.bindings, places)
    for part in parts.parts.values():
        work = [index for index in part.members if not places.is_zero_cost(parts.bindings[index])]
        assert {places.devices(parts.bindings[index]) for index in work} == {part.devices}
        for one in work:
            needs, leads_to = dependence.transfers_before(one), dependence.transfers_after(one)
            for other in work:
                for transfer in dependence.transfers_before(other) - needs:
                    assert needs and dependence.comes_no_later(transfer, needs)
                for transfer in leads_to - dependence.transfers_after(other):  # it may have to wait for `other`
                    waits = [dependence.transfers_before(r) for r in dependence.readers(transfer)]
                    assert all(wait & dependence.transfers_after(other) for wait in waits)


@given(graphs())
@SETTINGS
def test_work_with_the_same_transfers_around_it_is_one_part(mod):
    parts = parts_of(mod)
    places = BindingDevices(mod)
    dependence = Dependence(parts.bindings, places)
    numbers = {}
    for number, part in parts.parts.items():
        for index in part.members:
            binding = parts.bindings[index]
            if not part.is_isolated and not places.is_zero_cost(binding):
                around = dependence.transfers_before(index), dependence.transfers_after(index)
                kind = (places.device(binding.value), *map(frozenset, around))
                assert numbers.setdefault(kind, number) == number


def members(mod, small=-1):
    """The names of each part's variables, in order."""
    parts = parts_of(mod, small)
    return [" ".join(parts.bindings[i].var.name for i in parts.parts[n].members) for n in parts.topological_order()]


def test_small_work_joins_its_only_reader():
    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            t = R.to_vdevice(z, D0)
            b = R.call_tir(ONE, (a, t), out_ty=FIRST)
            R.output(b)
        return b

    assert members(with_main(main)) == ["a", "t", "b"]
    assert members(with_main(main), small=64) == ["t", "a b"]


def test_small_work_with_two_readers_joins_none():
    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND, y: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            s = R.to_vdevice(a, D1)
            c = R.call_tir(ONE, (s,), out_ty=SECOND)
            t = R.to_vdevice(c, D0)
            b = R.call_tir(ONE, (a, t), out_ty=FIRST)
            R.output(b)
        return b

    assert members(with_main(main), small=1 << 20) == ["a", "s", "c", "t", "b"]


def test_a_transfer_that_is_there_by_then_cuts_nothing():
    """The mask of a model is there long before what the layers make; both are needed by layers on the other device."""

    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            mask = R.call_tir(ONE, (x,), out_ty=FIRST)
            there = R.to_vdevice(mask, D1)
            layer = R.call_tir(TWO, (mask,), out_ty=FIRST)
            hidden = R.to_vdevice(layer, D1)
            a = R.call_tir(ONE, (hidden,), out_ty=SECOND)
            b = R.call_tir(TWO, (a, there), out_ty=SECOND)
            R.output(b)
        return b

    assert sorted(members(with_main(main))) == ["a b", "hidden", "mask layer", "there"]


def test_shapes_of_one_device_that_another_one_needs_cut_too():
    """Without a transfer between them: work on the host, of a shape, between two pieces of work of a device."""

    @R.function(check_well_formed=False)
    def main(x: R.Tensor((4,), "float32", D0)):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            s = R.shape_of(a)
            t: R.Tensor((1,), "int64", D1) = R.shape_to_tensor(s)
            u = R.call_tir(TWO, (t,), out_ty=R.Tensor((1,), "int64", D1))
            v: R.Shape(ndim=1) = R.tensor_to_shape(u)
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            w = R.reshape(b, v)
            d: R.Tensor(dtype="float32", ndim=1, vdevice=D0) = R.exp(w)
            R.output(d)
        return d

    mod = with_main(main)
    parts = parts_of(mod)
    names = [set(name.split()) for name in members(mod)]
    first = next(n for n, part in enumerate(names) if "a" in part)
    host = next(n for n, part in enumerate(names) if "u" in part)
    last = next(n for n, part in enumerate(names) if "d" in part)
    assert first < host < last and len(parts.parts) == len(names)


@pytest.mark.parametrize("count", [1, 2])
def test_calls_on_one_device_are_work_like_any_other(count):
    @R.function(check_well_formed=False)
    def main(x: FIRST, choice: R.Tensor((), "bool", D0)):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        if choice:
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            c = b
        else:
            c = a
        d = R.call_tir(TWO, (c,), out_ty=FIRST)
        return d

    mod = with_main(main)
    mod.update_global_info("vdevice", [D0, D1][:count])
    assert len(parts_of(mod).parts) == 1
