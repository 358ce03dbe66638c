"""`rh.llm.KVCache`: sequences that are added, extended, forked, truncated and freed, against lists of tokens."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from relax_hetero.encoding.pages import PAGE, page_bytes
from relax_hetero.errors import CacheError
from relax_hetero.llm.cache import CacheLayer, KVCache

WINDOWED = CacheLayer(kv_heads=1, size=2, window=100)
FULL = CacheLayer(kv_heads=2, size=2)
SLOTS, LENGTH, CHUNK = 5, 600, 70


def make(layers=(WINDOWED, FULL, WINDOWED), **options):
    settings = {"slots": SLOTS, "length": LENGTH, "chunk": CHUNK, "dtype": "float32", **options}
    return KVCache(layers, **settings)


class Writer:
    """A cache with what should be in it: every token is a number of its own, written to each of its layers' pages."""

    def __init__(self, cache):
        self.cache, self.tokens, self.next = cache, {}, 1.0

    def arrays(self):
        pages = self.cache.take()
        self.cache.release(pages)
        return [np.from_dlpack(array) for array in pages]

    def table(self, layer):
        return self.cache.tables["table_window" if layer.window else "table_full"]

    def add(self):
        slot = self.cache.add()
        assert slot not in self.tokens
        self.tokens[slot] = []

    def extend(self, slot, count):
        first = len(self.tokens[slot])
        self.cache.extend(slot, count)
        for position in range(first, first + count):
            for layer, array in zip(self.cache.layers, self.arrays(), strict=True):
                page = self.table(layer)[slot, position // PAGE]
                array[page, :, position % PAGE] = self.next
            self.tokens[slot].append(self.next)
            self.next += 1

    def check(self):
        assert {slot: self.cache.length(slot) for slot in self.tokens} == {s: len(t) for s, t in self.tokens.items()}
        for layer, array in zip(self.cache.layers, self.arrays(), strict=True):
            for slot, tokens in self.tokens.items():
                first = max(0, len(tokens) - layer.window + 1) if layer.window else 0
                for position in range(first, len(tokens)):
                    page = self.table(layer)[slot, position // PAGE]
                    assert page >= 0
                    assert (array[page, :, position % PAGE] == tokens[position]).all(), (slot, position)
        for name, table in self.cache.tables.items():
            used, total = self.cache.pages[name]
            assert used == len(set(table[table >= 0].tolist())), "a page leaked"
            assert table.max(initial=-1) < total
            assert not (table[[slot for slot in range(self.cache.slots) if slot not in self.tokens]] >= 0).any()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add")),
        st.tuples(st.just("extend"), st.integers(0, SLOTS - 1), st.integers(0, CHUNK)),
        st.tuples(st.just("extend"), st.integers(0, SLOTS - 1), st.sampled_from([1, PAGE - 1, PAGE, CHUNK])),
        st.tuples(st.just("fork"), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("truncate"), st.integers(0, SLOTS - 1), st.integers(0, LENGTH)),
        st.tuples(st.just("free"), st.integers(0, SLOTS - 1)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(STEPS, st.sampled_from([None, 3, 7]))
def test_any_steps(steps, pages):
    """Contents, lengths and pages in use after each step; a step that is refused changes nothing."""
    writer = Writer(make(pages=pages))
    for step, *values in [("add",), *steps]:
        if step != "add" and values[0] not in writer.tokens:
            with pytest.raises(CacheError, match=f"slot {values[0]} is not in use"):
                writer.cache.length(values[0])
            continue
        before = {name: table.copy() for name, table in writer.cache.tables.items()}
        try:
            if step in ("add", "extend"):
                getattr(writer, step)(*values)
            elif step == "fork":
                writer.tokens[writer.cache.fork(*values)] = list(writer.tokens[values[0]])
            elif step == "truncate":
                length = min(values[1], len(writer.tokens[values[0]]))
                writer.cache.truncate(values[0], length)
                del writer.tokens[values[0]][length:]
            else:
                writer.cache.free(*values)
                del writer.tokens[values[0]]
        except CacheError:
            for name, table in writer.cache.tables.items():
                np.testing.assert_array_equal(table, before[name])
        writer.check()
    for slot in list(writer.tokens):
        writer.cache.free(slot)
    assert all(used == 0 for used, _ in writer.cache.pages.values())


def test_a_window_stays_small():
    """A long sequence has a bounded number of pages in a window's group, and may be truncated to its length before."""
    writer = Writer(make(slots=1, length=5000))
    writer.add()
    max_pages = -(-(WINDOWED.window + CHUNK) // PAGE) + 1
    assert writer.cache.pages["table_window"] == (0, max_pages)
    while writer.cache.length(0) + CHUNK <= 5000:
        length = writer.cache.length(0)
        writer.cache.extend(0, CHUNK)
        writer.cache.truncate(0, length)
        writer.extend(0, CHUNK)
        assert writer.cache.pages["table_window"][0] <= max_pages
    writer.check()
    with pytest.raises(
        CacheError, match=r"cannot be truncated to 1000: the window of 100 would see positions from 896 on"
    ):
        writer.cache.truncate(0, 1000)
    writer.check()


def test_rows_of_a_step_extend_as_sequences_do():
    """Tables after each step, also of shared pages, of several rows of a sequence, and of steps that are refused."""
    rng, caches = np.random.default_rng(0), (make(pages=12), make(pages=12))
    planned = refused = 0
    for _ in range(4):
        for cache in caches:
            cache.extend(cache.add(), 3)
    for number in range(1500):
        slots = [int(slot) for slot in rng.permutation(4)[: rng.integers(1, 5)]] * int(rng.choice([1, 1, 1, 3]))
        counts, changed = Counter(slots), int(rng.integers(4))
        before = [caches[0].length(slot) for slot in range(4)]
        ends = caches[1]._planned_ends
        planned += all(ends.get(slot, 0) >= before[slot] + count for slot, count in counts.items())
        positions = [before[slot] + slots[:row].count(slot) for row, slot in enumerate(slots)]
        try:
            for slot, count in counts.items():
                caches[0].extend(slot, count)
            assert caches[1].extend_rows(slots) == positions
        except CacheError as error:
            for slot in slots:
                caches[0].truncate(slot, before[slot])
            with pytest.raises(CacheError, match=re.escape(str(error))):
                caches[1].extend_rows(slots)
            assert [caches[1].length(slot) for slot in range(4)] == before
            for cache in caches:
                cache.truncate(slots[0], 0)
            refused += 1
        for slot in slots[: number % 3]:  # as drafts do whose tokens are refused
            for cache in caches:
                cache.truncate(slot, min(cache.length(slot), max(before[slot], cache.length(slot) - 1)))
        if number % 40 == 0:
            for cache in caches:
                cache.free(changed)
                cache.fork((changed + 1) % 4)
        for name, table in caches[0].tables.items():
            np.testing.assert_array_equal(caches[1].tables[name], table)
    assert planned > 500 and refused > 5
    with pytest.raises(CacheError, match="slot 4 is not in use"):
        caches[1].extend_rows([0, 4])
    assert caches[1].length(0) == caches[0].length(0)


def test_a_fork_writes_a_copy():
    writer = Writer(make())
    writer.add()
    writer.extend(0, 70)
    assert writer.cache.fork(0) == 1
    writer.tokens[1] = list(writer.tokens[0])
    assert writer.cache.pages["table_full"][0] == 2
    writer.extend(1, 1)
    assert writer.cache.pages["table_full"][0] == 3
    writer.extend(0, 1)  # nobody else has the page now
    assert writer.cache.pages["table_full"][0] == 3
    writer.check()


def test_refused_by_name():
    cache = make(pages=2)
    slot = cache.add()
    with pytest.raises(CacheError, match="asks for 641 more, expected at most 640"):
        cache.extend(slot, 641)
    cache.extend(slot, 64)
    message = "sequence 0 of 64 tokens asks for 70 more: 2 pages of table_.*, of which 1 are free and 1 of 2 in use"
    with pytest.raises(CacheError, match=message):
        cache.extend(slot, 70)
    for _ in range(SLOTS - 1):
        cache.add()
    with pytest.raises(CacheError, match="all 5 slots of the cache are in use"):
        cache.add()
    with pytest.raises(CacheError, match="all 5 slots"):
        cache.fork(slot)
    with pytest.raises(CacheError, match="slot 7 is not in use; slots in use are"):
        cache.free(7)
    with pytest.raises(CacheError, match="cannot be truncated to 65"):
        cache.truncate(slot, 65)


def test_memory():
    """Pages that fit into a memory limit, and bytes by device."""
    sizes = [page_bytes(layer.kv_heads, layer.size, "float32") for layer in (WINDOWED, FULL)]
    cache = make(memory=10 * sizes[1] + 100 * sizes[0])
    (used,) = cache.bytes.values()
    pages = {name: whole for name, (_, whole) in cache.pages.items()}
    assert used == pages["table_full"] * sizes[1] + 2 * pages["table_window"] * sizes[0]
    assert used <= 10 * sizes[1] + 100 * sizes[0] < used + sizes[1] + 2 * sizes[0]
    assert make(memory={"cuda:0": 1}).bytes == make().bytes
    with pytest.raises(CacheError, match=r"memory=5: expected at least a page of each layer, \{'cpu:0': "):
        make(memory=5)
    with pytest.raises(CacheError, match="expected one of them"):
        make(memory=5, pages=5)


def test_windows_that_differ():
    with pytest.raises(CacheError, match=r"windows \[50, 100\]: expected 1 or more of each, and at most one window"):
        make((WINDOWED, CacheLayer(1, 2, 50)))


def test_pages_are_taken_once():
    cache = make()
    pages = cache.take()
    with pytest.raises(CacheError, match="taken already"):
        cache.take()
    with pytest.raises(CacheError, match="found 1 layers' pages, expected 3"):
        cache.release(pages[:1])
    cache.release(pages)
    assert rh.llm.KVCache is KVCache
