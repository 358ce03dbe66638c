"""Measurement of a language model on one device, as a correction of what its parts are expected to take.

A few layers of the model are compiled, and called as an engine calls them: greedy decode steps of several numbers of
texts, and a prompt. `frontend.gguf.scaling` applies the ratios to all layers, and to other arrangements of devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CacheError
from ..vm.device.cuda_copies import has_peer_access
from .compiled_model import CompiledModel
from .model_loader import compile_layers

if TYPE_CHECKING:
    from tvm.relax import VDevice

    from ..frontend.auto.cost_model import CostModel
    from ..frontend.gguf.file import GgufFile
    from ..frontend.gguf.hyperparameters import Hyperparameters
    from ..frontend.gguf.scaling import Calibration
    from ..frontend.paged_cache import PagedCache

STEPS = 16  # decode steps of a measured call, whose tokens stay on the device from one to the next
_MAX_BYTES = 2 << 30  # weights of measured layers, unless those of each kind have more
_MIN_LAYERS = 2
_BATCHES = (1, 2, 4, 8, 16, 32)
_MIN_CACHED = 16  # tokens of a text in the measured decode steps, besides those of a chunk
_MIN_DIFFERENCE, _MIN_MEASURED_DIFFERENCE = 0.05, 0.2
"""Minimum expected or measured time that a longer cache adds to a step, as a fraction of it; less is noise."""
_NO_TIME = 1e-3  # ratio of products whose time is negligible
_MIN_SECONDS, _MAX_SECONDS, _MIN_CALLS = 0.5, 5.0, 3
"""Time of the measured calls, unless one call takes longer; and their number, unless they take too long."""


def calibrate(
    file: GgufFile,
    cache: PagedCache,  # for its chunks and context
    vdevices: Sequence[VDevice],  # equal devices
    costs: CostModel,  # cost model of the first device, which the result corrects
    texts: int,  # maximum number of texts of a decode step; more than 32 are not measured
) -> Calibration:
    """Measure a model on one device of this machine; takes a minute, or more for a large one.

    The host's time for two GPUs is measured, too, if they are in this machine. Raises HeteroError if the device is not
    in this machine, or the layers cannot be compiled.
    """
    from ..frontend.auto.measure_devices import are_present
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.place_layers import LayerProblem
    from ..frontend.gguf.scaling import Calibration, Fleet, HostTime, Pipeline, with_slower_products

    chunk = min(max(cache.chunks), cache.context)
    short, long = min(_MIN_CACHED, chunk // 2), min(chunk - 1, cache.context // 2)
    batches = tuple(rows for rows in _BATCHES if rows <= texts)
    model = hyperparameters_of(file)
    layers = _measured_layers(file, model)
    if model.shared_caches:
        layers = model.layers  # later ones read the cache of earlier ones
    part, alone = file.first_layers(layers), vdevices[:1]
    measured = compile_layers(part, alone, None, batches, (chunk,), max(cache.context, chunk + STEPS))
    # Texts differ, as they then choose different experts.
    tokens = np.random.default_rng(0).integers(0, measured.vocabulary, (max(batches), chunk)).astype("int32")
    slots = [measured.cache.add() for _ in tokens]
    for slot, text in zip(slots, tokens, strict=True):
        measured.prefill(slot, text[:long])

    def step_seconds(rows: int, cached: int) -> float:
        rewind = partial(_rewind, measured, slots[:rows], tokens, cached)
        return _seconds(decode_steps(measured, slots[:rows], tokens[:rows, -1].tolist(), cached), rewind) / STEPS

    longest = step_seconds(batches[-1], long)  # before shorter ones, as `truncate` removes tokens
    steps = {rows: step_seconds(rows, short) for rows in batches}
    host = None
    if measured.looks_ahead:
        few, many = (
            _host_seconds(measured, slots[:rows], partial(_rewind, measured, slots[:rows], tokens, short))
            for rows in (1, batches[-1])
        )
        has_two = len(vdevices) > 1 and are_present(vdevices[:2])
        further = _further_host_seconds(file, cache, vdevices[:2], costs, few) if has_two else {}
        host = HostTime(few, max(many - few, 0.0) / max(batches[-1] - 1, 1), **further)
    prefill = _seconds(prompt(measured, slots[0], tokens[0]))

    model = hyperparameters_of(part)
    own_cache = replace(cache, batches=batches, chunks=(chunk,), slots=max(batches))
    parts, fleet = LayerProblem(part, model, own_cache, alone, costs, {}).search.parts, Fleet.of_vdevices(alone, costs)

    def with_products(ratio: float) -> Pipeline:
        return Pipeline(parts, model, with_slower_products(costs, ratio), fleet, 1, 1)

    products = _product_ratio(lambda ratio: with_products(ratio).prefill(chunk, chunk), prefill)
    one = with_products(products)
    expected, expected_longest = (one.decode(batches[-1], cached + STEPS // 2)[0] for cached in (short, long))
    added, expected_added = longest - steps[batches[-1]], expected_longest - expected
    ratio = steps[batches[-1]] / expected
    is_seen = expected_added / expected > _MIN_DIFFERENCE or added / longest > _MIN_MEASURED_DIFFERENCE
    if expected_added > 0 and is_seen:
        ratio = max(added, 0.0) / expected_added
    decode = {rows: seconds / one.decode(rows, short + STEPS // 2)[0] for rows, seconds in steps.items()}
    return Calibration(decode, ratio, prefill / one.prefill(chunk, chunk), host, products)


def _product_ratio(expected: Callable[[float], float], measured: float) -> float:
    """Time of products over the expected one, from that of a prefill; 1 if products are less than half of it.

    `expected`: expected time of the prefill, given this ratio. `measured`: measured time.
    """
    others, whole = expected(_NO_TIME), expected(1.0)
    return max((measured - others) / (whole - others), _NO_TIME) if others < min(measured, whole) / 2 else 1.0


def _host_seconds(model: CompiledModel, slots: Sequence[int], rewind: Callable[[], object]) -> float:
    """Time in which the host begins a step, and takes tokens that are there, as in `decode_steps`."""
    times: list[float] = []
    for _ in range(2):  # the first steps make graphs
        times.clear()
        rewind()
        step = model.begin_decode(slots, [0] * len(slots))
        for _ in range(STEPS - 1):
            begin = time.perf_counter()
            ahead = model.begin_decode(slots, step)
            begun = time.perf_counter()
            for device in model.machine.devices:
                device.sync()
            ended = time.perf_counter()
            step.tokens()
            times.append(time.perf_counter() - ended + begun - begin)
            step = ahead
        step.tokens()
    return float(np.mean(times))


def _further_host_seconds(
    file: GgufFile, cache: PagedCache, vdevices: Sequence[VDevice], costs: CostModel, alone: float
) -> dict[str, float]:
    """Time of the host for two GPUs besides that for one: those of a group, and stages, as far as they are possible."""
    from ..frontend.gguf.choose_rules import rules_of
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.place_layers import LayerProblem
    from ..frontend.gguf.scaling import Fleet, Pipeline, can_share, max_stages

    model = hyperparameters_of(file)
    part = file if model.shared_caches else file.first_layers(min(model.layers, _MIN_LAYERS))
    model = hyperparameters_of(part)
    cache = replace(cache, batches=(1,), chunks=(_MIN_CACHED,), slots=1)
    parts = LayerProblem(part, model, cache, vdevices[:1], costs, {}).search.parts
    gpus = [int(vdevice.vdevice_id) for vdevice in vdevices]
    further = {}
    for name, tensor, stages in ("device", 2, 1), ("stage", 1, 2):
        reaches = tensor == 1 or (can_share(model, tensor) and all(map(has_peer_access, gpus, reversed(gpus))))
        if not reaches or stages > max_stages(model):
            continue
        groups = Pipeline(parts, model, costs, Fleet.of_vdevices(vdevices, costs), tensor, stages)
        two = compile_layers(part, vdevices, rules_of(groups), (1,), (_MIN_CACHED,), 2 * STEPS)
        slot = two.cache.add()
        further[name] = max(0.0, _host_seconds(two, [slot], partial(two.cache.truncate, slot, 0)) - alone)
    return further


def _measured_layers(file: GgufFile, model: Hyperparameters) -> int:
    """Number of layers that are measured: some of each kind, such as those with experts after dense ones.

    The last one's feed-forward network has one row of a prompt.
    """
    nbytes = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.startswith("blk."))
    kinds = [_MIN_LAYERS, model.dense_layers + 2 if model.experts else 0, model.delta.period if model.delta else 0]
    return min(model.layers, max(*kinds, int(_MAX_BYTES * model.layers / max(nbytes, 1))))


def _rewind(model: CompiledModel, slots: Sequence[int], texts: np.ndarray, cached: int) -> None:
    """Cut sequences to `cached` tokens; computed again where states or freed pages of windows forbid that."""
    for slot, text in zip(slots, texts, strict=False):
        try:
            model.cache.truncate(slot, cached)
        except CacheError:
            model.cache.truncate(slot, 0)
            model.prefill(slot, text[:cached])


def decode_steps(
    model: CompiledModel, slots: Sequence[int], tokens: Sequence[int], cached: int, steps: int = STEPS
) -> Callable[[], object]:
    """A call of greedy decode steps after `cached` tokens, each begun before the last one's tokens are read."""

    def work() -> object:
        for slot in slots:
            model.cache.truncate(slot, cached)
        step = model.begin_decode(slots, tokens)
        for _ in range(steps - 1):
            ahead = model.begin_decode(slots, step)
            step.tokens()
            step = ahead
        return step.tokens()

    return work


def prompt(model: CompiledModel, slot: int, tokens: Sequence[int] | np.ndarray) -> Callable[[], object]:
    """A prefill of an empty sequence, to logits in the host's memory."""

    def work() -> object:
        model.cache.truncate(slot, 0)
        return model.prefill(slot, tokens)

    return work


def _seconds(call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Time of the fastest of some calls, since disturbances only make calls slower; without that of `prepare`."""
    prepare()
    call()
    times: list[float] = []
    while not times or (sum(times) < _MAX_SECONDS and (len(times) < _MIN_CALLS or sum(times) < _MIN_SECONDS)):
        prepare()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
