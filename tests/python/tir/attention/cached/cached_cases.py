"""Cases of attention with a cache: random sequences, inputs of the op, and expected results in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import tvm
from tvm import relax

import relax_hetero as rh
from relax_hetero.encoding.pages import PAGE, page_shape
from relax_hetero.encoding.resolver import resolver_or_default
from relax_hetero.target.element_types import numpy_dtype
from relax_hetero.target.make_vdevice import parse_vdevices

POISON = {"float16": np.nan, "bfloat16": np.nan, "float32": np.nan, "int8": -1}
"""Contents of pages where nothing was written: NaN, or for int8 an odd byte, whose scales are NaN, too."""


@dataclass(frozen=True)
class Case:
    """Attributes of the op, and the tensors' types."""

    heads: int = 4
    kv_heads: int = 1
    size: int = 64
    scale: float = 0.125
    window: int = 0
    softcap: float = 0.0
    rotary: str = ""
    turned: int = 0
    norms: str = ""
    eps: float = 1e-5
    rows: str = "decode"
    pages: str = "float16"
    dtype: str = "float32"
    sinks: bool = False
    shared_values: int = 0

    @property
    def attributes(self) -> dict:
        names = "heads kv_heads size scale window softcap rotary norms eps rows sinks shared_values".split()
        return {name: getattr(self, name) for name in names}

    @property
    def value_size(self) -> int:
        return self.shared_values or self.size

    @property
    def width(self) -> int:
        return (self.heads + (1 if self.shared_values else 2) * self.kv_heads) * self.size


@dataclass
class Inputs:
    """Inputs of one call, and the float64 keys and values of every sequence before it (by slot)."""

    qkv: np.ndarray
    table: np.ndarray
    sequences: np.ndarray
    positions: np.ndarray
    others: list[np.ndarray]
    tokens: dict[int, np.ndarray] = field(default_factory=dict)


def vdevice_of(text: str) -> relax.VDevice:
    """The vdevice of a text, as vdevices= takes it."""
    return parse_vdevices([text])[0]


def module(case: Case, rows: int, pages: int | None, slots: int, max_pages: int, vdevice: str) -> tvm.IRModule:
    """A function `main` with one call of the op; the number of pages is symbolic if `pages` is None."""
    where = vdevice_of(vdevice)
    count = pages if pages is not None else tvm.tirx.Var("page_count", "int64")
    types = [
        ("qkv", (rows, case.width), case.dtype),
        ("pages", page_shape(count, case.kv_heads, case.size, case.pages, bool(case.shared_values)), case.pages),
        ("table", (slots, max_pages), "int32"),
        ("sequences", (rows,), "int32"),
        ("positions", (rows,), "int32"),
    ]
    if case.rotary:
        types.append(("rotation", (rows, case.turned), "float32"))
    types += [(f"{letter}_norm", (case.size,), "float32") for letter in case.norms]
    types += [("sinks", (case.heads,), "float32")] * case.sinks
    params = [relax.Var(name, relax.TensorType(shape, dtype, where)) for name, shape, dtype in types]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit(rh.op.cached_attention(*params, **case.attributes))
            out = builder.emit_output(result)
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [where])
    return mod


def compiled(case: Case, rows: int, slots: int, max_pages: int, vdevice: str = "llvm", pages: int | None = None):
    """A machine whose `main` is the op, its pages donated."""
    exe = rh.compile(module(case, rows, pages, slots, max_pages, vdevice), donate=["pages"], cache=False)
    return rh.vm.VirtualMachine(exe)


def optional_operands(case: Case, positions: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Rotations of positions, factors of norms, and sinks."""
    arrays = []
    if case.rotary:
        angles = np.maximum(positions, 0)[:, None] * 10000.0 ** (-np.arange(case.turned // 2) / (case.turned // 2))
        arrays.append(np.concatenate([np.cos(angles), np.sin(angles)], 1).astype("float32"))
    arrays += [rng.uniform(0.5, 1.5, case.size).astype("float32") for _ in case.norms]
    return arrays + [rng.standard_normal(case.heads).astype("float32") * 3] * case.sinks


def heads_of(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of the rows in float64, (rows, heads, size), normalized and rotated."""
    rows = len(inputs.qkv)
    joined = inputs.qkv.astype("float64").reshape(rows, -1, case.size)
    queries, keys, *others = np.split(joined, np.cumsum([case.heads, case.kv_heads]), 1)
    factors = list(inputs.others[bool(case.rotary) :])
    for letter in case.norms:
        heads = queries if letter == "q" else keys
        normed = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + case.eps) * factors.pop(0)
        queries, keys = (normed, keys) if letter == "q" else (queries, normed)
    if case.rotary:
        queries, keys = (_rotated(case, heads, inputs.others[0].astype("float64")) for heads in (queries, keys))
    return queries, keys, keys if case.shared_values else others[0]


def _rotated(case: Case, heads: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    half = case.turned // 2
    cosine, sine = rotation[:, None, :half], rotation[:, None, half:]
    pairs = (slice(0, case.turned, 2), slice(1, case.turned, 2))
    halves = (slice(0, half), slice(half, case.turned))
    left, right = halves if case.rotary == "halves" else pairs
    result = heads.copy()
    result[..., left] = heads[..., left] * cosine - heads[..., right] * sine
    result[..., right] = heads[..., right] * cosine + heads[..., left] * sine
    return result


def expected(
    case: Case, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, sinks: np.ndarray
) -> np.ndarray:
    """The attention of one token's queries, (heads, size), to keys and values (tokens, kv_heads, size)."""
    first = max(0, position - case.window + 1) if case.window else 0
    keys, values = keys[first : position + 1], values[first : position + 1]
    group = case.heads // case.kv_heads
    result = []
    for head in range(case.heads):
        scores = keys[:, head // group] @ queries[head] * case.scale
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        highest = max(scores.max(), sinks[head])
        powers = np.exp(scores - highest)
        total = powers.sum() + np.exp(sinks[head] - highest)
        result.append(powers @ values[:, head // group, -case.value_size :] / total)
    return np.stack(result)


class Cache:
    """A cache in numpy, written by the op alone: pages that start poisoned, and what float64 knows of each slot."""

    def __init__(self, case: Case, slots: int, max_pages: int, seed: int, vdevice: str = "llvm") -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        target = vdevice_of(vdevice).target
        self.order = resolver_or_default(target).page_order(target)
        count = slots * max_pages + 3
        shape = page_shape(count, case.kv_heads, case.size, case.pages, bool(case.shared_values))
        self.pages = np.full(shape, POISON[case.pages], numpy_dtype(case.pages))
        self.table = np.full((slots, max_pages), -1, "int32")
        self._free = list(self.rng.permutation(count))
        self.keys: dict[int, np.ndarray] = {slot: np.zeros((0, case.kv_heads, case.size)) for slot in range(slots)}
        self.values = dict(self.keys)

    def length(self, slot: int) -> int:
        return len(self.keys[slot])

    def inputs(self, sequences: list[int], positions: list[int]) -> Inputs:
        """Random rows for these; pages are found for their positions."""
        rows = len(sequences)
        for slot, position in zip(sequences, positions, strict=True):
            if slot >= 0 and self.table[slot, position // PAGE] < 0:
                self.table[slot, position // PAGE] = self._free.pop()
        where = np.array(positions, "int32")
        qkv = self.rng.standard_normal((rows, self.case.width)).astype(numpy_dtype(self.case.dtype))
        return Inputs(
            qkv, self.table.copy(), np.array(sequences, "int32"), where, optional_operands(self.case, where, self.rng)
        )

    def call(self, machine, inputs: Inputs) -> np.ndarray:
        """Run the op on the cache's pages, which it overwrites."""
        arrays = [inputs.qkv, self.pages, inputs.table, inputs.sequences, inputs.positions, *inputs.others]
        out, pages = machine["main"](*arrays)
        if self.case.pages == "bfloat16":
            self.pages = pages.numpy()  # numpy's arrays of bfloat16 are copied to the machine
        else:
            assert np.shares_memory(np.from_dlpack(pages), self.pages), "pages were copied"
        return out.numpy()

    def check(self, inputs: Inputs, out: np.ndarray, tolerance: float | None = None) -> None:
        """Compare a result, and the pages, with float64; later calls take the op's written values as given."""
        case = self.case
        queries, keys, values = heads_of(case, inputs)
        pages = self.pages.view("uint16") if case.pages == "bfloat16" else self.pages
        stored = unpacked_pages(pages, case.size, self.order, bool(case.shared_values))
        for row in np.argsort(inputs.positions, kind="stable"):
            slot, position = inputs.sequences[row], inputs.positions[row]
            if slot < 0:
                continue
            assert position == self.length(slot), "a sequence has no gaps"
            for cache, new, pages in zip((self.keys, self.values), (keys, values), stored, strict=True):
                page = pages[self.table[slot, position // PAGE], :, position % PAGE]
                steps = np.abs(new[row]).max(-1, keepdims=True) / 127 if case.pages == "int8" else np.abs(new[row])
                limit = {"float32": 4e-6, "float16": 6e-4, "bfloat16": 4e-3, "int8": 0.51}[case.pages]
                assert (np.abs(page - new[row]) < limit * steps + 3e-6).all()
                # Later calls read the stored values: their rounding is not the attention's.
                cache[slot] = np.concatenate([cache[slot], page[None].astype("float64")])
        scale = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}[case.dtype] if tolerance is None else tolerance
        sinks = inputs.others[-1].astype("float64") if case.sinks else np.full(case.heads, -np.inf)
        for row, (slot, position) in enumerate(zip(inputs.sequences, inputs.positions, strict=True)):
            actual = out[row].astype("float64").reshape(case.heads, case.value_size)
            assert np.isfinite(actual).all()
            if slot >= 0:
                want = expected(case, queries[row], self.keys[slot], self.values[slot], position, sinks)
                np.testing.assert_allclose(actual, want, atol=scale, rtol=scale)


def fill(cache: Cache, slot: int, length: int, machines: dict) -> None:
    """Fill a slot up to a length in chunks of 64 rows; the last chunk is padded."""
    case = replace(cache.case, rows="chunk")
    while cache.length(slot) < length:
        first = cache.length(slot)
        count = min(64, length - first)
        sequences = [slot] * count + [-1] * (64 - count)
        positions = [first + i for i in range(count)] + [0] * (64 - count)
        inputs = cache.inputs(sequences, positions)
        cache.check(inputs, cache.call(machines["chunk"], inputs))
    assert case.rows == "chunk"


def unpacked_pages(pages: np.ndarray, size: int, order: str, shared: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values of pages as numbers.

    Parameters
    ----------
    pages : array, (pages, kv_heads, elements)
        The device's pages, of float16, float32 or int8 (bfloat16: as uint16).
    size : int
        Numbers of a key.
    order : str
        One of `ORDERS`.
    shared : bool
        True if keys are the values.

    Returns
    -------
    tuple of array of float32
        Keys and values, each (pages, kv_heads, 64, size).
    """
    count, heads = pages.shape[:2]
    if pages.dtype == np.uint16:
        pages = (pages.astype(np.uint32) << 16).view(np.float32)
    if shared:  # as a page of keys and of the same values, in the order of values
        begin = PAGE * size
        parts = [pages[..., :begin], pages[..., :begin], pages[..., begin:], pages[..., begin:]]
        pages, order = np.concatenate(parts, axis=-1), order if order == "chunks" else "rows"
    keys = pages[..., : PAGE * size].astype(np.float32)
    values = pages[..., PAGE * size : 2 * PAGE * size].astype(np.float32).reshape(count, heads, PAGE, size)
    if order == "chunks":
        keys, values = (_rows_from_chunks(x.reshape(count, heads, size // 8, PAGE, 8)) for x in (keys, values))
    if order == "lanes":
        keys = keys.reshape(count, heads, size, PAGE).swapaxes(2, 3)
    keys = keys.reshape(count, heads, PAGE, size)
    if pages.dtype == np.int8:
        scales = np.ascontiguousarray(pages[..., 2 * PAGE * size :]).view(np.float32).reshape(count, heads, 2, PAGE, 1)
        keys, values = keys * scales[:, :, 0], values * scales[:, :, 1]
    return keys, values


def _rows_from_chunks(tiles: np.ndarray) -> np.ndarray:
    pages, heads, chunks, tokens, width = tiles.shape
    return tiles.swapaxes(2, 3).reshape(pages, heads, tokens, chunks * width)
