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
from itertools import accumulate, groupby, pairwise, permutations
from typing import Any

import numpy as np
import tvm

from ...artifact.messages import AUTO
from ...display.text import time_text
from ...errors import PlacementError
from ...target.backend import backend_of
from ...target.hosts import hosts_of
from ...tir.cuda.all_reduce import all_reduce_seconds
from ...vm.device.cuda_copies import has_peer_access
from ..auto.cost_model import CostModel, LinkCost
from ..auto.simulate import Task, simulate
from ..paged_cache import PagedCache
from .file import GgufFile
from .hyperparameters import Hyperparameters
from .part_costs import KERNELS, Part, Step
from .place_layers import LayerProblem

_STEPS = 6
"""Simulated decode steps; the first half fills the pipeline."""

MAX_STAGES = 32

_MAX_SHARED_TIME = 0.9
"""Maximum time of a step of GPUs that share all layers, as a fraction of that of layers on single devices."""


@dataclass(frozen=True)
class Fleet:
    """Equal devices on hosts.

    Attributes
    ----------
    hosts, devices : int
        Numbers of hosts, and of devices of each.
    link, network : LinkCost
        Between devices of a host, and between hosts.
    """

    hosts: int
    devices: int
    link: LinkCost
    network: LinkCost


@dataclass(frozen=True)
class Exchange:
    """Values that cross between devices in a step of a replica.

    Attributes
    ----------
    kind : str
        Such as "all-reduce".
    count : int
    bytes : int
        Size of one, to each other device.
    seconds : float
        Time of all of them.
    """

    kind: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Arrangement:
    """A way to use all devices, and its expected speed.

    Attributes
    ----------
    tensor, stages, replicas : int
        Devices of a group, groups of a pipeline, and pipelines.
    texts : int
        Texts that are generated at the same time, by all replicas together.
    token_seconds : float
        Time between two tokens of a text.
    tokens_per_second : float
        Rate of all texts together.
    prefill_seconds : float
        Time of a prompt of `prompt` tokens.
    prompt : int
    device_bytes : int
        Largest memory of a device: weights, cache, activations, context and code.
    busy : float
        Fraction of the time that a stage works, on average.
    exchanges : tuple of Exchange
        Those of a decode step of a replica.
    """

    tensor: int
    stages: int
    replicas: int
    texts: int
    token_seconds: float
    tokens_per_second: float
    prefill_seconds: float
    prompt: int
    device_bytes: int
    busy: float
    exchanges: tuple[Exchange, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        return asdict(self)


def arrangements(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevice: tvm.relax.VDevice,
    costs: CostModel,
    fleet: Fleet,
    texts: int,
    limit: int | None = None,
) -> list[Arrangement]:
    """All arrangements of a model on a fleet that fit, the one with the most tokens per second first.

    Parameters
    ----------
    file, model : GgufFile, Hyperparameters
    cache : PagedCache
        For its context and chunks; replicas have as many sequences as texts, and decode as many rows as their stages
        have at a time.
    vdevice : VDevice
        A device of the fleet.
    costs : CostModel
        Cost model of that device alone.
    fleet : Fleet
    texts : int
        Texts that are generated at the same time.
    limit : int, optional
        Maximum bytes of a device.

    Raises
    ------
    PlacementError
        If the model fits in no arrangement.
    """
    fitting, least = [], math.inf
    for tensor, stages, replicas in group_shapes(model, fleet):
        own = math.ceil(texts / replicas)
        own_cache = replace(cache, batches=(math.ceil(own / stages),), slots=own)  # as `Pipeline.decode` calls
        problem = LayerProblem(file, model, own_cache, [vdevice], costs, {})
        pipeline = Pipeline(problem.search.parts, model, costs, fleet, tensor, stages)
        device_bytes = pipeline.device_bytes + problem.working[0]
        least = min(least, device_bytes)
        if limit is not None and device_bytes > limit:
            continue
        token_seconds, busy = pipeline.decode(own, cache.context // 2)
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
                busy,
                tuple(pipeline.exchanges(own)),
            )
        )
    if not fitting:
        raise PlacementError(
            f"{file.path}: found a limit of {limit:,} bytes for a device, expected at least {int(least):,}, which "
            f"{fleet.hosts * fleet.devices} devices need; raise the limit, or take more devices, fewer texts or a "
            "smaller context"
        )
    return sorted(fitting, key=lambda each: (-each.tokens_per_second, each.token_seconds))


@dataclass(frozen=True)
class SharedLayers:
    """Placement of a model whose layers equal GPUs share (`tensor_parallel`), for ``placement="auto"``.

    Attributes
    ----------
    rules : list of (str, str)
        Patterns and devices.
    reasons : dict from str to str
        Pattern -> reason.
    estimate : dict
        Estimate of a decoded token, in the form of `AutoPlacement.to_json`.
    """

    rules: list[tuple[str, str]]
    reasons: dict[str, str]
    estimate: dict[str, Any]


def shared_layers(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevices: Sequence[tvm.relax.VDevice],
    costs: CostModel,
    limits: Mapping[int, int],
) -> SharedLayers | None:
    """Share all layers among the devices, if these are GPUs that can, the model fits, and that is faster.

    Parameters
    ----------
    file, model, cache, vdevices, costs, limits
        As for `place_layers`.

    Returns
    -------
    SharedLayers or None
        None if layers, or parts of them, are on single devices.
    """
    count, indices = len(vdevices), [int(vdevice.vdevice_id) for vdevice in vdevices]
    is_alike = len({str(vdevice.target) for vdevice in vdevices}) == 1 and len(set(indices)) == count > 1
    if not is_alike or not backend_of(vdevices[0].target).records_graphs or hosts_of(vdevices):
        return None
    if not _can_share(model, count):
        return None
    if not all(has_peer_access(a, b) for a, b in permutations(indices, 2)):
        return None
    problem = LayerProblem(file, model, cache, vdevices, costs, limits)
    group = Pipeline.of_mesh(problem, model, count)
    if any(group.device_bytes + problem.working[device] > limit for device, limit in limits.items()):
        return None
    seconds, _ = group.decode(1, problem.search.step.cached)
    try:
        alone = problem.best().seconds
    except PlacementError:
        alone = math.inf
    if seconds > _MAX_SHARED_TIME * alone:
        return None
    other = "no layers on single devices fit" if math.isinf(alone) else f"{time_text(alone)} on single devices"
    estimate = problem.estimate(seconds, dict.fromkeys(problem.names, seconds))
    reason = f"{AUTO}sharing each layer is fastest: {time_text(seconds)} a token, {other}"
    return SharedLayers([("*", f"vdevice[0:{count}]")], {"*": reason}, estimate)


def _can_share(model: Hyperparameters, count: int) -> bool:
    """Return whether devices can share each layer, as `tensor_parallel.split_caches` and dealt experts demand."""
    heads = math.gcd(model.heads, *(own.kv_heads for own in model.caches))
    return not (heads % count or any(own.state or own.shared for own in model.caches) or 0 < model.experts < count)


def group_shapes(model: Hyperparameters, fleet: Fleet) -> Iterator[tuple[int, int, int]]:
    """Devices of a group, stages and replicas of each arrangement."""
    total = fleet.hosts * fleet.devices
    for tensor in range(1, fleet.devices + 1):
        if fleet.devices % tensor or (tensor > 1 and not _can_share(model, tensor)):
            continue
        for stages in range(1, min(model.layers, MAX_STAGES, total // tensor) + 1):
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
    tensor, stages : int
        Devices of a group, and groups.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        model: Hyperparameters,
        costs: CostModel,
        fleet: Fleet,
        tensor: int,
        stages: int,
    ) -> None:
        self._model, self._costs, self._fleet, self._tensor = model, costs, fleet, tensor
        self._row_bytes = model.hidden_size * 4
        self._stages = self._balanced(parts, stages)

    @classmethod
    def of_mesh(cls, problem: LayerProblem, model: Hyperparameters, count: int) -> Pipeline:
        """All layers on the first `count` devices of a problem, which are equal, and share them."""
        costs = problem.search.costs
        return cls(problem.search.parts, model, costs, Fleet(1, count, costs.links[0, 1], costs.links[0, 1]), count, 1)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and cache on a device of the largest stage; embeddings are whole on each device."""
        sizes = []
        for stage in self._stages:
            sizes.append(sum(part.resident_bytes[0] / (1 if part.name == "embd" else self._tensor) for part in stage))
        if len(self._stages) == 1 and any(part.shared and part.shared[0] for part in self._stages[0]):
            sizes[0] -= self._stages[0][0].resident_bytes[0]  # the output reads the embeddings
        return round(max(sizes))

    def decode(self, texts: int, cached: int) -> tuple[float, float]:
        """Time between two tokens of each of `texts` texts, and the fraction of it that stages work."""
        stages = len(self._stages)
        groups = min(stages, texts)
        sizes = [texts // groups + (group < texts % groups) for group in range(groups)]
        tasks: list[Task] = []
        last: dict[int, int] = {}
        for _ in range(_STEPS):
            for group, size in enumerate(sizes):
                for stage in range(stages):
                    seconds = self.stage_seconds(stage, size, 1, cached)
                    after = [last[group]] if group in last else []
                    tasks.append(Task(seconds, after, {str(stage): 1}))
                    if stages > 1:  # to the next stage; from the last one, tokens to the first
                        sent = self._row_bytes * size if stage < stages - 1 else 8 * size
                        tasks.append(Task(self._sent_seconds(stage, sent), [len(tasks) - 1]))
                    last[group] = len(tasks) - 1
        ends = simulate(tasks)
        per_step = len(tasks) // _STEPS
        half = _STEPS // 2
        seconds = (max(ends) - max(ends[: half * per_step])) / (_STEPS - half)
        work = sum(task.seconds for task in tasks[:per_step] if task.units)
        return seconds, work / (seconds * stages)

    def prefill(self, tokens: int, chunk: int) -> float:
        """Time of a prompt, whose chunks follow each other through the stages."""
        tasks: list[Task] = []
        for begin in range(0, tokens, chunk):
            rows = min(chunk, tokens - begin)
            for stage in range(len(self._stages)):
                after = [len(tasks) - 1] if stage else []
                tasks.append(Task(self.stage_seconds(stage, 1, rows, begin), after, {str(stage): 1}))
                if stage < len(self._stages) - 1:
                    tasks.append(Task(self._sent_seconds(stage, self._row_bytes * rows), [len(tasks) - 1]))
        return max(simulate(tasks))

    def exchanges(self, texts: int) -> Iterator[Exchange]:
        """Exchanges between devices in a decode step."""
        stages, size = len(self._stages), math.ceil(texts / min(len(self._stages), texts))
        groups = min(stages, texts)
        if self._tensor > 1:
            sums = sum(self._sums(stage) for stage in self._stages) * groups
            nbytes = self._row_bytes * size
            yield Exchange("all-reduce", sums, nbytes, sums * self.sum_seconds(nbytes))
            nbytes = 4 * size * self._model.vocabulary // self._tensor
            yield Exchange("gather of logits", groups, nbytes, groups * self._gather_seconds(size))
        if stages > 1:
            nbytes, count = self._row_bytes * size, (stages - 1) * groups
            seconds = groups * sum(self._sent_seconds(stage, nbytes) for stage in range(stages - 1))
            yield Exchange("to the next stage", count, nbytes, seconds)

    def stage_seconds(self, stage: int, texts: int, rows: int, cached: int) -> float:
        """Time of a stage for `rows` tokens of each of `texts` texts."""
        return self.seconds(self._stages[stage], texts, rows, cached)

    def seconds(self, parts: Sequence[Part], texts: int, rows: int, cached: int) -> float:
        """Time of some parts on a group, with their sums."""
        seconds = sum(self._part_seconds(part, texts, rows, cached) for part in parts)
        if self._tensor == 1:
            return seconds
        seconds += self._sums(parts) * self.sum_seconds(self._row_bytes * texts * rows)
        return seconds + any(part.name == "output" for part in parts) * self._gather_seconds(texts)

    def sum_seconds(self, nbytes: float) -> float:
        """Time of an all-reduce in a group: each device writes its part to every other one."""
        return all_reduce_seconds(self._tensor, nbytes / self._fleet.link.bandwidth)

    def _gather_seconds(self, texts: int) -> float:
        link = self._fleet.link
        nbytes = 4 * texts * self._model.vocabulary / self._tensor
        return link.latency + (self._tensor - 1) * nbytes / link.bandwidth

    def _part_seconds(self, part: Part, texts: int, rows: int, cached: int) -> float:
        work = part.work_seconds(0, self._costs, Step(rows, cached, texts))
        launches = KERNELS[part.name] * self._costs.devices[0].launch
        return work * self._imbalance(part, texts * rows) / self._tensor + launches

    def _imbalance(self, part: Part, rows: int) -> float:
        """Expected work of the device with the most chosen experts over the mean."""
        if part.name != "experts" or self._tensor == 1:
            return 1.0
        return _imbalance(self._model.experts, self._model.experts_used, self._tensor, min(rows, 64))

    def _sums(self, parts: Sequence[Part]) -> int:
        return sum(part.name in ("attn", "ffn", "experts") for part in parts)

    def _sent_seconds(self, stage: int, nbytes: float) -> float:
        """Time of a transfer from a stage to the next one."""
        begin, fleet = stage * self._tensor, self._fleet
        following = (stage + 1) % len(self._stages) * self._tensor
        link = fleet.link if begin // fleet.devices == following // fleet.devices else fleet.network
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


@lru_cache(maxsize=256)
def _imbalance(experts: int, used: int, devices: int, rows: int) -> float:
    """Most experts that a device reads over the mean of devices, if each row chooses `used` of `experts` at random."""
    generator, most, all_touched = np.random.default_rng(0), 0.0, 0.0
    for _ in range(64):
        chosen = generator.random((rows, experts)).argpartition(used - 1, axis=1)[:, :used]
        touched = np.bincount(np.unique(chosen) * devices // experts, minlength=devices)
        most, all_touched = most + touched.max(), all_touched + touched.sum() / devices
    return float(most / all_touched)
