"""Random recordings: compiled, walked and carried out with numpy, they leave the same bytes."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from vm.command_kernels import Kernels, floats

# Two slots and a kept buffer hold floats; slot 2 and another kept buffer hold int32, slot 3 what `mark` counts in.
FLOATS, NUMBERS, MARKS = 48, 16, (4, 3, 2)
POOLS = ["slot 0", "slot 1", "kept 0"]
COUNTS = np.array([0, 1, -1, 2, 3, 2, 4, 3, 2, 1, 1, 0, 1, 2, 2, 0], "int32")
PATTERNS = [b"\x31", b"\x12\x34", b"1234", b"\x01\x02\x33\x3f4321"]


@pytest.fixture(scope="module")
def vm():
    return rh.vm.VirtualMachine(rh.compile(Kernels))


@dataclass(frozen=True)
class Place:
    """Bytes of a pool from `offset` on, and 8 times parameter 1 further if it moves."""

    pool: str
    offset: int
    moves: bool = False

    def recorded(self, cb, buffers, length=None):
        """The reference."""
        offset = self.offset + cb.parameter(1) * 8 if self.moves else self.offset
        if self.pool in buffers:
            return cb.buffer(buffers[self.pool], offset, length)
        return cb.slot(int(self.pool[-1]), offset, length)

    def bytes(self, memory, row, length):
        """The bytes themselves."""
        offset = self.offset + 8 * row * self.moves
        return memory[self.pool].view("uint8")[offset : offset + length]

    def floats(self, memory, row, count=16):
        """The floats themselves."""
        return self.bytes(memory, row, 4 * count).view("float32")


def places(pool):
    return st.builds(Place, st.just(pool), st.integers(0, 11).map(lambda i: 8 * i), st.booleans())


def places_in(count):
    """Places in as many different pools."""
    return st.permutations(POOLS).flatmap(lambda pools: st.tuples(*map(places, pools[:count])))


numbers = st.builds(Place, st.sampled_from(["slot 2", "kept 1"]), st.integers(0, NUMBERS - 3).map(lambda i: 4 * i))
written = st.builds(Place, st.just("slot 2"), st.integers(0, NUMBERS - 3).map(lambda i: 4 * i))
valid_counts = st.builds(Place, st.just("kept 1"), st.integers(0, 4).map(lambda i: 12 * i))
guards = st.one_of(st.none(), st.tuples(st.sampled_from(["when", "unless"]), numbers))
grids = st.one_of(st.sampled_from([(1,), (0,), (2, 1), (1, 0, 1)]), numbers)
mark_grids = st.one_of(st.tuples(*(st.integers(0, extent) for extent in MARKS)), valid_counts)
commands = st.one_of(
    st.tuples(st.just("fill"), places_in(1), st.sampled_from(PATTERNS)),
    st.tuples(st.just("copy"), places_in(2), st.integers(0, 64)),
    *(st.tuples(st.just(kind), places_in(2), grids, guards) for kind in ("scale", "shift", "accumulate")),
    st.tuples(st.just("add"), places_in(3), grids, guards),
    st.tuples(st.just("above"), places_in(1), written, st.integers(-2, 2)),
    st.tuples(st.just("count_positive"), places_in(1), written),
    st.tuples(st.just("mark"), mark_grids, guards),
)


def record(cb, buffers, kind, operands, *rest):
    if kind == "fill":
        cb.fill(operands[0].recorded(cb, buffers, 32), rest[0])
    elif kind == "copy":
        source, target = operands
        cb.copy(source.recorded(cb, buffers, rest[0]), target.recorded(cb, buffers))
    elif kind in ("above", "count_positive"):
        scalars = {"limit": rest[1] + cb.parameter(1) % 3} if kind == "above" else {}
        cb.dispatch(kind, 1, [operands[0].recorded(cb, buffers), rest[0].recorded(cb, buffers)], scalars)
    else:
        grid, guard = (operands, rest[0]) if kind == "mark" else rest
        memory = [cb.slot(3)] if kind == "mark" else [place.recorded(cb, buffers) for place in operands]
        scalars = {"n": cb.parameter(1) + 2, "factor": cb.parameter(0)} if kind == "scale" else {}
        guards = {guard[0]: guard[1].recorded(cb, buffers)} if guard else {}
        if isinstance(grid, Place):
            cb.dispatch_indirect(
                kind, grid.recorded(cb, buffers, None if kind == "mark" else 8), memory, scalars, **guards
            )
        else:
            cb.dispatch(kind, grid, memory, scalars, **guards)


def carry_out(memory, factor, row, kind, operands, *rest):
    if kind == "fill":
        place = operands[0].bytes(memory, row, 32)
        place[:] = np.frombuffer(rest[0] * (32 // len(rest[0])), "uint8")
    elif kind == "copy":
        source, target = (place.bytes(memory, row, rest[0]) for place in operands)
        target[:] = source
    elif kind == "above":
        limit = np.float32(rest[1] + row % 3)
        rest[0].bytes(memory, row, 4).view("int32")[0] = operands[0].floats(memory, row)[0] > limit
    elif kind == "count_positive":
        count = (operands[0].floats(memory, row) > 0).sum()
        rest[0].bytes(memory, row, 12).view("int32")[:] = count, 1, 2
    else:
        grid, guard = (operands, rest[0]) if kind == "mark" else rest
        if guard and (guard[1].bytes(memory, row, 4).view("int32")[0] != 0) != (guard[0] == "when"):
            return
        if isinstance(grid, Place):
            grid = grid.bytes(memory, row, 12 if kind == "mark" else 8).view("int32").tolist()
        if min(grid) <= 0:
            return
        if kind == "mark":
            x, y, z = grid
            memory["slot 3"].reshape(MARKS)[:x, :y, :z] += 1
            return
        *read, result = (place.floats(memory, row, row + 2 if kind == "scale" else 16) for place in operands)
        result[:] = {
            "scale": lambda a: a * np.float32(factor),
            "shift": lambda a: a + np.float32(1),
            "accumulate": lambda a: result + a,
            "add": lambda a, b: a + b,
        }[kind](*read)


def fresh(seed):
    return {
        **{pool: floats(FLOATS, seed + i) for i, pool in enumerate(POOLS)},
        "slot 2": np.random.default_rng(seed).integers(-1, 3, NUMBERS).astype("int32"),
        "slot 3": np.zeros(MARKS, "int32").ravel(),
        "kept 1": COUNTS.copy(),
    }


@settings(max_examples=35, deadline=None)
@given(recorded=st.lists(commands, min_size=1, max_size=16), seed=st.integers(0, 1000), begin=st.integers(0, 3))
def test_random_recordings(vm, recorded, seed, begin):
    submissions = [(1.5, 5), (-0.25, 0)]
    expected = fresh(seed)
    eager = []
    for number, (factor, row) in enumerate(submissions):
        memory = {
            **fresh(seed + number),
            "kept 0": expected["kept 0"],
        }  # kept by the buffer, so also between submissions
        for command in recorded:
            carry_out(memory, factor, row, *command)
        expected["kept 0"] = memory["kept 0"]
        eager.append({name: array.copy() for name, array in memory.items()})
    for compiled in (True, False):
        buffers = {name: array for name, array in fresh(seed).items() if name.startswith("kept")}
        cb = rh.vm.CommandBuffer(vm, slots=4, parameters=2)
        cb.begin()
        for command in recorded:
            record(cb, buffers, *command)
        cb.end(compiled)
        for number, (factor, row) in enumerate(submissions):
            bindings = []
            for name, array in list(fresh(seed + number).items()):
                if name.startswith("slot"):
                    storage = np.full(array.nbytes + 8 * begin + 24, 0x55, "uint8")
                    storage[8 * begin : 8 * begin + array.nbytes] = array.view("uint8")
                    bindings.append((storage, 8 * begin, array.nbytes))
            cb.submit(bindings, [factor, row])
            slots = {f"slot {slot}": whole[start : start + size] for slot, (whole, start, size) in enumerate(bindings)}
            for name, array in eager[number].items():
                bytes_found = slots[name] if name in slots else buffers[name].copy()
                np.testing.assert_array_equal(bytes_found.view(array.dtype), array, err_msg=name)
            for storage, start, size in bindings:
                assert (storage[:start] == 0x55).all() and (storage[start + size :] == 0x55).all()
