"""Language models over many equal devices and hosts: the expected speed of each arrangement, by simulation.

Devices are arranged in replicas of pipelines of tensor-parallel groups: each group shares the work of the ops of a
stage's layers (`tensor_parallel=`), stages have consecutive layers, and replicas answer different texts. The time of a
stage follows from the parts of the model (`part_costs`) and the sums over its group; `auto.simulate` runs stages and
transfers of several steps, so that waits for other stages are part of the result.

Assumed are equal devices, groups within a host, sums that nothing hides, texts that choose experts independently of
each other, and replicas that get equal shares of the texts. Failures, and the arrival of texts, are not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import tvm

from ...display.text import bytes_text, plural
from ...errors import PlacementError
from ...target.hosts import NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS
from ...target.vdevice import is_cpu
from ...tir.cuda.all_reduce import all_reduce_seconds, max_short_bytes
from ..auto.cost_model import CostModel, LinkCost
from ..auto.measure_devices import SharingFigures
from ..auto.simulate import Task, simulate
from ..paged_cache import PagedCache
from .file import GgufFile
from .hyperparameters import Hyperparameters
from .part_costs import KERNELS, Part, Step
from .place_layers import LayerProblem

_STEPS = 6  # simulated decode steps; the first half fills the pipeline

MAX_STAGES = 32

_SUMMED_PARTS = ("attn", "ffn", "experts")  # parts whose results the devices of a group add

GPU_TRANSFER_SECONDS = 25e-6
"""Time from a kernel's end on a GPU to the next kernel's begin on another one, with a small copy between them.

Measured on two H200s (23 us); ``python apps/bench/transfers.py --vdevice cuda:0 --vdevice cuda:1`` prints it as
"in order". Measured links have the host's time for the launches, too, if that is longer.
"""


@dataclass(frozen=True)
class Fleet:
    """Equal devices on hosts."""

    # hosts, devices: numbers of hosts, and of devices of each.
    hosts: int
    devices: int
    # link, network: between devices of a host, and between hosts.
    link: LinkCost
    network: LinkCost
    # Seconds that a sum of CPU devices takes, whose threads wait for each other; None for GPUs, which sum by kernels.
    sum_seconds: float | None = None
    # Whether a call returns before it ends, as on GPUs, so that calls of a step follow each other through stages.
    overlaps: bool = True
    workers: int = 0  # maximum devices of a host that work at the same time, as CPU devices share its cores; 0: all
    # lone_bandwidth, shared_bandwidth: bytes per second that one device reads alone, and that each of so many devices
    # reads while all work.
    lone_bandwidth: float = math.inf
    shared_bandwidth: float = math.inf
    slowdown: float = 1.0  # time that so many devices take at the same time for products over that of one alone

    @classmethod
    def of_vdevices(
        cls,
        # Devices of a host; one or two stand for more, whose number the caller replaces.
        vdevices: Sequence[tvm.relax.VDevice],
        costs: CostModel,  # cost model of these devices
        hosts: int = 1,
        network: LinkCost | None = None,  # between hosts; by default 10 Gb/s Ethernet
        # Measurements of CPU devices that work at the same time; by default they do not slow each other down.
        sharing: SharingFigures | None = None,
    ) -> Fleet:
        """Hosts of equal devices."""
        count = len(vdevices)
        link = costs.links[0, 1] if count > 1 else LinkCost(math.inf, 0.0)
        network = network or LinkCost(NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS)
        if not is_cpu(vdevices[0]):
            return cls(hosts, count, replace(link, latency=min(link.latency, GPU_TRANSFER_SECONDS)), network)
        if sharing is None:
            return cls(hosts, count, link, network, link.latency, overlaps=False)
        link = replace(link, latency=sharing.crossing)
        shared = sharing.lone_memory, sharing.memory, sharing.products
        return cls(hosts, count, link, network, sharing.sum_seconds, False, sharing.devices, *shared)

    def with_link(self, link: LinkCost) -> Fleet:
        """The fleet with another link between devices of a host; sums of CPU devices take at least its latency."""
        sum_seconds = self.sum_seconds
        if sum_seconds is not None:
            sum_seconds = max(sum_seconds if self.workers else 0.0, link.latency)  # it is measured if there are workers
        return replace(self, link=link, sum_seconds=sum_seconds)

    def slowdowns(
        self,
        bandwidth: float,  # bytes per second that the device reads alone
        count: int,  # devices of its host that work at the same time
        group: int,  # devices that are called together
    ) -> tuple[float, float, float]:
        """Factors of a device's time for all work, as devices take turns, and besides for reading and for products.

        More devices of a group than workers take turns in one thread; devices of different groups share the workers.
        """
        turns = group if self.workers and group > self.workers else 1
        count //= turns
        workers = min(count, self.workers or count)
        share = (workers - 1) / (self.workers - 1) if self.workers > 1 else 0.0
        # What a byte takes longer is added: kernels that read slower than memory allows wait for it as long.
        longer = max(0.0, 1 / self.shared_bandwidth - 1 / self.lone_bandwidth)
        return turns * count / workers, 1 + share * bandwidth * longer, 1 + share * (self.slowdown - 1)


def with_slower_products(costs: CostModel, ratio: float) -> CostModel:
    """Costs with `ratio` times the time of products on the first device."""
    if ratio == 1:
        return costs
    first, *others = costs.devices
    rates = {kind: rate / ratio for kind, rate in first.products.items()}
    return replace(costs, devices=[replace(first, flops=first.flops / ratio, products=rates), *others])


@dataclass(frozen=True)
class HostTime:
    """Seconds that the host computes for a call of a greedy decode step, alongside GPUs."""

    call: float  # a call of one text on one GPU
    text: float  # each further text
    device: float = 0.0  # each further GPU of a group; 0 if it was not measured
    stage: float = 0.0  # each further stage of one GPU; 0 if it was not measured

    def seconds(self, texts: int, tensor: int, stages: int) -> float:
        """Time of a call of `texts` texts for stages of `tensor` GPUs each."""
        further = stages * (tensor - 1) * self.device + (stages - 1) * self.stage
        return self.call + (texts - 1) * self.text + further


@dataclass(frozen=True)
class Calibration:
    """Measured times of some layers of a model on one device over those that their parts are expected to take."""

    decode: Mapping[int, float]  # number of texts of a call -> ratio of decode steps with few cached tokens
    cached: float  # ratio of the time that more cached tokens add to a decode step
    prefill: float  # ratio of prefills
    # Time of the host, which a step takes at least; None if devices compute during its calls.
    host: HostTime | None = None
    # Ratio of products, as far as prefills show it; the other ratios are those of times that follow from it.
    products: float = 1.0

    def decode_ratio(self, texts: int) -> float:
        """Ratio of a call, between those of the nearest measured numbers of texts."""
        counts = sorted(self.decode)
        return float(np.interp(np.log2(texts), np.log2(counts), [self.decode[count] for count in counts]))

    def reading_ratio(self, texts: int) -> float:
        """Least ratio of at most so many texts: others take longer for products, not for reading."""
        return min(self.decode_ratio(count) for count in {texts, *self.decode} if count <= texts)


@dataclass(frozen=True)
class Exchange:
    """Values that cross between devices in a step of a replica."""

    kind: str  # such as "all-reduce"
    count: int
    bytes: int  # size of one, to each other device
    seconds: float  # time of all of them


@dataclass(frozen=True)
class Arrangement:
    """A way to use all devices, and its expected speed."""

    # tensor, stages, replicas: devices of a group, groups of a pipeline, and pipelines.
    tensor: int
    stages: int
    replicas: int
    texts: int  # texts that are generated at the same time, by all replicas together
    token_seconds: float  # time between two tokens of a text
    tokens_per_second: float  # rate of all texts together
    prefill_seconds: float  # time of a prompt of `prompt` tokens
    prompt: int
    device_bytes: int  # largest memory of a device: weights, cache, activations, context and code
    busy: float  # fraction of the time that a stage works, on average
    exchanges: tuple[Exchange, ...]  # those of a decode step of a replica

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        return asdict(self)


def arrangements(
    file: GgufFile,
    model: Hyperparameters,
    # Gives the context and the chunks; replicas have as many sequences as texts, and decode as many rows as their
    # stages have at a time.
    cache: PagedCache,
    vdevice: tvm.relax.VDevice,  # a device of the fleet
    costs: CostModel,  # cost model of that device alone
    fleet: Fleet,
    texts: int,  # texts that are generated at the same time
    limit: int | None = None,  # maximum bytes of a device
    calibration: Calibration | None = None,  # measurements of the device with the model
    # Layer -> counts of its experts (`place_experts.read_expert_counts`); by default all are equally frequent.
    expert_counts: Mapping[int, Sequence[float]] | None = None,
) -> list[Arrangement]:
    """All arrangements of a model on a fleet that fit, the one with the most tokens per second first.

    Raises PlacementError if the model fits in no arrangement.
    """
    fitting, least = [], math.inf
    for tensor, stages, replicas in group_shapes(model, fleet):
        own = math.ceil(texts / replicas)
        batch = math.ceil(own / stages) if fleet.overlaps else own
        problem = LayerProblem(
            file, model, replace(cache, batches=(batch,), slots=own), [vdevice], costs, {}, expert_counts
        )
        pipeline = Pipeline(problem.search.parts, model, costs, fleet, tensor, stages, replicas, calibration)
        device_bytes = max(pipeline.stage_bytes) + problem.working[0]
        least = min(least, device_bytes)
        if limit is not None and device_bytes > limit:
            continue
        token_seconds, busy = pipeline.decode(own, cache.context // 2, batch)
        prompt = min(cache.context, 4096)
        fitting.append(
            Arrangement(
                tensor,
                stages,
                replicas,
                texts,
                token_seconds,
                texts / token_seconds,
                pipeline.prefill(prompt, max(cache.chunks)),
                prompt,
                device_bytes,
                busy * min(1.0, texts / replicas),
                tuple(pipeline.exchanges(own, batch)),
            )
        )
    if not fitting:
        raise PlacementError(
            f"{file.path}: found a limit of {limit:,} bytes for a device, expected at least {int(least):,} "
            f"({bytes_text(int(least))}) on each of {plural(fleet.hosts * fleet.devices, 'device')}, for weights and "
            f"{plural(texts, 'text')} of {plural(cache.context, 'token')}; raise the limit, or take more devices, "
            "fewer texts or a smaller context"
        )
    return sorted(fitting, key=lambda each: (-each.tokens_per_second, each.token_seconds))


def can_share(model: Hyperparameters, count: int) -> bool:
    """Return whether devices can share each layer, as `tensor_parallel.split_caches` and dealt experts demand."""
    heads = math.gcd(model.heads, *(own.kv_heads for own in model.caches))
    return not (heads % count or any(own.state or own.shared for own in model.caches) or 0 < model.experts < count)


def max_stages(model: Hyperparameters) -> int:
    """Maximum number of stages: 1 if layers read the caches of others."""
    return 1 if model.shared_caches else min(model.layers, MAX_STAGES)


def group_shapes(model: Hyperparameters, fleet: Fleet) -> Iterator[tuple[int, int, int]]:
    """Devices of a group, stages and replicas of each arrangement."""
    total = fleet.hosts * fleet.devices
    for tensor in range(1, fleet.devices + 1):
        if fleet.devices % tensor or (tensor > 1 and not can_share(model, tensor)):
            continue
        for stages in range(1, min(max_stages(model), total // tensor) + 1):
            if total % (tensor * stages) == 0:
                yield tensor, stages, total // (tensor * stages)


class Pipeline:
    """A replica: stages of consecutive layers, each on a group of devices.

    Parameters
    ----------
    parts : sequence of Part
        Parts of the model in order; costs are those of device 0.
    model : Hyperparameters
    costs : CostModel
    fleet : Fleet
    tensor, stages, replicas : int
        Devices of a group, groups of a pipeline, and pipelines.
    calibration : Calibration, optional

    Attributes
    ----------
    tensor : int
        Devices of a group.
    stages : list of list of Part
        Parts of each stage.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        model: Hyperparameters,
        costs: CostModel,
        fleet: Fleet,
        tensor: int,
        stages: int,
        replicas: int = 1,
        calibration: Calibration | None = None,
    ) -> None:
        self._model, self._fleet, self.tensor, self._calibration = model, fleet, tensor, calibration
        self._row_bytes = model.hidden_size * 4
        own = tensor * (stages if fleet.overlaps else 1)
        neighbors = max(1, min(replicas, fleet.devices // (tensor * stages)))
        if calibration is not None:
            costs = with_slower_products(costs, calibration.products)
        self._costs, self._at_work = costs, min(own * neighbors, fleet.devices)
        self.stages = self._balanced(parts, stages)

    @property
    def stage_bytes(self) -> list[int]:
        """Bytes of weights and cache on a device of each stage; embeddings are whole on each of theirs."""
        sizes = []
        for stage in self.stages:
            sizes.append(sum(part.resident_bytes[0] / (1 if part.name == "embd" else self.tensor) for part in stage))
        if len(self.stages) == 1 and any(part.shared and part.shared[0] for part in self.stages[0]):
            sizes[0] -= self.stages[0][0].resident_bytes[0]  # the output reads the embeddings
        return list(map(round, sizes))

    def decode(self, texts: int, cached: int, batch: int | None = None) -> tuple[float, float]:
        """Seconds between two tokens of each of `texts` texts, and the fraction of it that stages work.

        Calls are for at most `batch` texts, by default all.
        """
        stages, sizes = len(self.stages), _call_sizes(texts, batch)
        tasks: list[Task] = []
        streams: dict[int, list[int]] = {}  # stage -> its last task, as a GPU's work is in order
        last: dict[int, list[int]] = {}

        def add(seconds: float, after: list[int], *units: str) -> list[int]:
            tasks.append(Task(seconds, after, dict.fromkeys(units, 1)))
            return [len(tasks) - 1]

        for _ in range(_STEPS):
            for call, size in enumerate(sizes):
                before = call if self._fleet.overlaps else 0  # else a call waits for the last one
                after = last.get(before, [])
                for stage in range(stages):
                    after = after + streams.get(stage, [])
                    after = streams[stage] = add(self.stage_seconds(stage, size, 1, cached), after, str(stage))
                    if stages == 1:
                        continue
                    following = (stage + 1) % stages  # from the last one, tokens go to the first
                    seconds = self._sent_seconds(stage, self._row_bytes * size if following else 8 * size)
                    if following and self._link(stage) is self._fleet.link:  # in order with the work of both
                        after = after + streams.get(following, [])
                        after = streams[stage] = streams[following] = add(seconds, after)
                    else:
                        after = add(seconds, after)
                last[before] = after
        ends = simulate(tasks)
        per_step = len(tasks) // _STEPS
        half = _STEPS // 2
        seconds = (max(ends) - max(ends[: half * per_step])) / (_STEPS - half)
        if self._calibration is not None and self._calibration.host is not None:  # it begins a step during the last one
            host = self._calibration.host
            seconds = max(seconds, sum(host.seconds(size, self.tensor, stages) for size in sizes))
        work = sum(task.seconds for task in tasks[:per_step] if task.units)
        return seconds, work / (seconds * stages)

    def prefill(self, tokens: int, chunk: int) -> float:
        """Seconds of a prompt, whose chunks follow each other, as each returns logits to the host."""
        seconds = 0.0
        for begin in range(0, tokens, chunk):
            rows = min(chunk, tokens - begin)
            seconds += sum(self.stage_seconds(stage, 1, rows, begin) for stage in range(len(self.stages)))
            seconds += sum(self._sent_seconds(stage, self._row_bytes * rows) for stage in range(len(self.stages) - 1))
        return seconds

    def exchanges(self, texts: int, batch: int | None = None) -> Iterator[Exchange]:
        """Exchanges between devices in a decode step."""
        stages, sizes = len(self.stages), _call_sizes(texts, batch)
        calls, size = len(sizes), max(sizes)
        if self.tensor > 1:
            sums = sum(part.name in _SUMMED_PARTS for stage in self.stages for part in stage) * calls
            nbytes = self._row_bytes * size
            yield Exchange("all-reduce", sums, nbytes, sums * self.sum_seconds(nbytes))
            kind, nbytes = self._gathered(size)
            yield Exchange(f"gather of {kind}", calls, nbytes, calls * self.sum_seconds(nbytes))
        if stages > 1:
            nbytes, count = self._row_bytes * size, (stages - 1) * calls
            seconds = calls * sum(self._sent_seconds(stage, nbytes) for stage in range(stages - 1))
            yield Exchange("to the next stage", count, nbytes, seconds)

    def stage_seconds(self, stage: int, texts: int, rows: int, cached: int) -> float:
        """Seconds of a stage for `rows` tokens of each of `texts` texts, which have `cached` tokens already."""
        return self.seconds(self.stages[stage], texts, rows, cached)

    def seconds(self, parts: Sequence[Part], texts: int, rows: int, cached: int) -> float:
        """Seconds of some parts on a group, with their sums, as `stage_seconds`."""
        calibration = self._calibration
        seconds = sum(self._part_seconds(part, texts, rows, cached) for part in parts)
        if calibration is not None and rows == 1:
            short = sum(self._part_seconds(part, texts, 1, 0) for part in parts)
            seconds = short + (seconds - short) / calibration.decode_ratio(texts) * calibration.cached
        if self.tensor == 1:
            return seconds
        step = Step(rows, cached, texts)
        summed = [part.rows_returned(step) for part in parts if part.name in _SUMMED_PARTS]
        seconds += sum(self.sum_seconds(self._row_bytes * texts * count) for count in summed)
        return seconds + any(part.name == "output" for part in parts) * self.sum_seconds(self._gathered(texts)[1])

    def sum_seconds(self, nbytes: float) -> float:
        """Seconds of an all-reduce of `nbytes` in a group; a CPU device reads those of every other one."""
        seconds = nbytes / self._fleet.link.bandwidth
        if self._fleet.sum_seconds is not None:
            return self._fleet.sum_seconds + (self.tensor - 1) * seconds
        return all_reduce_seconds(self.tensor, seconds, nbytes <= max_short_bytes(self.tensor))

    def _gathered(self, texts: int) -> tuple[str, int]:
        """Values that devices exchange to find greedy tokens, and their bytes: the largest logit of each device."""
        if self._model.vocabulary % self.tensor:
            return "logits", 4 * texts * self._model.vocabulary // self.tensor
        return "greedy tokens", 8 * texts

    def _part_seconds(self, part: Part, texts: int, rows: int, cached: int) -> float:
        """Time of a part on a device of a group, corrected by measurements."""
        ratio = reading = 1.0
        if (calibration := self._calibration) is not None:
            ratio = calibration.prefill if rows > 1 else calibration.decode_ratio(texts)
            reading = calibration.reading_ratio(texts * rows)
        device, step = self._costs.devices[0], Step(rows, cached, texts)
        turns, memory, products = self._fleet.slowdowns(device.bandwidth / reading, self._at_work, self.tensor)
        work = ratio * part.work_seconds(0, with_slower_products(self._costs, products), step)
        if memory > 1:  # products hide it as far as they take longer
            work = max(work, reading * memory * part.read_bytes(0, step) / device.bandwidth)
        launches = ratio * KERNELS[part.name] * device.launch
        return turns * work * self._imbalance(part, texts * part.rows_read(step)) / self.tensor + launches

    def _imbalance(self, part: Part, rows: int) -> float:
        """Expected work of the device with the most chosen experts over the mean."""
        if part.name != "experts" or self.tensor == 1:
            return 1.0
        pairs = part.pairs or (1.0,) * self._model.experts
        return _imbalance(pairs, self._model.experts_used, self.tensor, min(rows, 64))

    def _link(self, stage: int) -> LinkCost:
        """Link from a stage to the next one."""
        begin, fleet = stage * self.tensor, self._fleet
        following = (stage + 1) % len(self.stages) * self.tensor
        return fleet.link if begin // fleet.devices == following // fleet.devices else fleet.network

    def _sent_seconds(self, stage: int, nbytes: float) -> float:
        """Seconds of a transfer from a stage to the next one."""
        link = self._link(stage)
        return link.latency + nbytes / link.bandwidth

    def _balanced(self, parts: Sequence[Part], stages: int) -> list[list[Part]]:
        """Consecutive layers for each stage, of nearly equal times of a decode step."""
        ends_of_model = ("embd", "inputs", "output")
        layers = groupby((part for part in parts if part.name not in ends_of_model), key=lambda part: part.layer)
        units = [list(group) for _, group in layers]
        units[0][:0] = [part for part in parts if part.name in ("embd", "inputs")]
        units[-1] += [part for part in parts if part.name == "output"]
        ends = list(accumulate(sum(self._part_seconds(part, 1, 1, 0) for part in unit) for unit in units))
        cuts = [0]
        for number in range(1, stages):
            goal = ends[-1] * number / stages
            nearest = min(range(len(ends)), key=lambda i: abs(ends[i] - goal)) + 1
            cuts.append(min(max(nearest, cuts[-1] + 1), len(units) - (stages - number)))
        cuts.append(len(units))
        return [[part for unit in units[begin:end] for part in unit] for begin, end in pairwise(cuts)]


def _call_sizes(texts: int, batch: int | None) -> list[int]:
    """Texts of each call of a decode step, of at most `batch` each."""
    batch = batch or texts
    return [min(batch, texts - begin) for begin in range(0, texts, batch)]


@lru_cache(maxsize=4096)
def _imbalance(pairs: tuple[float, ...], used: int, devices: int, rows: int) -> float:
    """Most experts that a device reads over the mean of devices, if each row chooses `used`, as frequently as `pairs`.

    A row chooses the experts whose first arrivals, at rates of `pairs`, are the earliest: one after the other, without
    repetition, each with a probability proportional to its rate.
    """
    generator, experts, most, all_touched = np.random.default_rng(0), len(pairs), 0.0, 0.0
    rates = np.maximum(pairs, 1e-9)
    for _ in range(64):
        arrivals = generator.standard_exponential((rows, experts)) / rates
        chosen = arrivals.argpartition(used - 1, axis=1)[:, :used]
        touched = np.bincount(np.unique(chosen) * devices // experts, minlength=devices)
        most, all_touched = most + touched.max(), all_touched + touched.sum() / devices
    return float(most / all_touched)
