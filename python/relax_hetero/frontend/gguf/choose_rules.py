"""``placement="auto"`` of a language model: layers on single devices, or on groups of GPUs that share each layer.

The rules with the least estimated time of a decoded token are chosen: those of `place_layers`, or those of one group of
equal GPUs (`tensor_parallel`), or, if that exceeds their memory, of consecutive layers on several groups. A server may
have several replicas, and many texts: for it, the arrangement with the most tokens per second is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import tvm

from ...artifact.messages import AUTO
from ...display.text import plural, time_text
from ...errors import PlacementError
from ...target.backend import backend_of
from ...target.hosts import hosts_of
from ...vm.device.cuda_copies import has_peer_access
from ..auto.cost_model import CostModel
from ..paged_cache import PagedCache
from .file import GgufFile
from .hyperparameters import Hyperparameters
from .place_experts import ExpertPlan
from .place_layers import LayerProblem
from .plan_layers import LayerPlan
from .scaling import Arrangement, Fleet, Pipeline, arrangements, can_share, max_stages

_MAX_SHARED_TIME = 0.9
"""Maximum time of a token of GPUs that share layers, as a fraction of that of layers on single devices."""


class ChosenRules(dict[str, str]):
    """Placement rules that were chosen by cost: patterns and devices, in order.

    `reasons`: pattern -> reason; `estimate`: estimate of a decoded token, in the form of `AutoPlacement.to_json`;
    `groups`: groups of devices that share layers, None if each layer, or part of one, is on one device; `excluded`: a
    faster plan that needs links which the GPUs lack, empty without one.
    """

    def __init__(
        self,
        rules: Mapping[str, str],
        reasons: dict[str, str],
        estimate: dict[str, Any],
        groups: Pipeline | None,
        excluded: str = "",
    ) -> None:
        super().__init__(rules)
        self.reasons = {key: f"{text}; {excluded}" if excluded else text for key, text in reasons.items()}
        self.estimate, self.groups, self.excluded = estimate, groups, excluded


def choose_rules(problem: LayerProblem, may_share: bool = True) -> ChosenRules:
    """Find the rules with the least time of a decoded token.

    `may_share`: false if no layer may be on several devices. Raises PlacementError if the model does not fit; the text
    has the required bytes.
    """
    possible = _groups(problem) if may_share else ()
    timed = [(groups.decode(1, problem.search.step.cached)[0], groups) for groups in possible]
    timed.sort(key=lambda each: each[0])
    obstacles = {groups: _missing_link(problem.vdevices, groups) for _, groups in timed}
    shared = [(seconds, groups) for seconds, groups in timed if not obstacles[groups]]
    try:
        alone = problem.best()
    except PlacementError as error:
        if timed and not shared:
            groups = timed[0][1]
            raise PlacementError(f"{error}; {_text_of(groups)} fit, but {obstacles[groups]}") from error
        if not shared:
            raise
        alone = None
    is_alone = alone is not None and not (shared and shared[0][0] <= _MAX_SHARED_TIME * alone.seconds)
    chosen_seconds = alone.seconds if alone is not None and is_alone else shared[0][0]
    excluded = ""
    if timed and (obstacle := obstacles[timed[0][1]]) and timed[0][0] <= _MAX_SHARED_TIME * chosen_seconds:
        excluded = f"{_text_of(timed[0][1])} would take {time_text(timed[0][0])} a token, but {obstacle}"
    if alone is not None and is_alone:
        return _on_single_devices(problem, alone, shared, excluded)
    seconds, groups = shared[0]
    others = [f"{_text_of(other)} take {time_text(time)}" for time, other in shared[1:2]]
    others.append("layers on single devices " + (f"take {time_text(alone.seconds)}" if alone else "do not fit"))
    reason = f"{AUTO}fastest are {_text_of(groups)}: {time_text(seconds)} a token; {', '.join(others)}"
    rules = rules_of(groups)
    used = groups.tensor * len(groups.stages)
    busy = {name: seconds / len(groups.stages) * (index < used) for index, name in enumerate(problem.names)}
    return ChosenRules(rules, dict.fromkeys(rules, reason), problem.estimate(seconds, busy), groups, excluded)


def _on_single_devices(
    problem: LayerProblem, plan: LayerPlan | ExpertPlan, shared: Sequence[tuple[float, Pipeline]], excluded: str
) -> ChosenRules:
    """Rules of a plan without groups; the groups that are not faster are part of the reasons."""
    costs, step = problem.search.costs, problem.search.step
    if isinstance(plan, ExpertPlan):
        busy = dict(zip(problem.names, plan.busy_seconds, strict=True))
    else:
        busy = dict.fromkeys(problem.names, 0.0)
        for part, device in zip(problem.search.parts, plan.devices, strict=True):
            busy[problem.names[device]] += part.seconds(device, costs, step)
    rules = problem.rules(plan)
    other = ""
    if shared:
        seconds, groups = shared[0]
        other = f"; {_text_of(groups)} take {time_text(seconds)} a token, this plan {time_text(plan.seconds)}"
        if seconds < plan.seconds:
            other += f"; groups are chosen if they take less than {_MAX_SHARED_TIME:g} of its time"
    reasons = {pattern: reason + other for pattern, _, reason in rules}
    chosen = {pattern: device for pattern, device, _ in rules}
    return ChosenRules(chosen, reasons, problem.estimate(plan.seconds, busy), None, excluded)


def _groups(problem: LayerProblem) -> Iterator[Pipeline]:
    """Yield, for each number of equal GPUs that can share a layer, the fewest groups of that size that fit."""
    model, vdevices = problem.model, problem.vdevices
    count, indices = len(vdevices), {int(vdevice.vdevice_id) for vdevice in vdevices}
    is_alike = len({str(vdevice.target) for vdevice in vdevices}) == 1 and len(indices) == count > 1
    if not is_alike or not backend_of(vdevices[0].target).records_graphs or hosts_of(vdevices):
        return
    costs = problem.search.costs
    fleet = Fleet.of_vdevices(vdevices, costs)
    for tensor in range(2, count + 1):
        if not can_share(model, tensor):
            continue
        for stages in range(1, min(count // tensor, max_stages(model)) + 1):
            groups = Pipeline(problem.search.parts, model, costs, fleet, tensor, stages)
            used = range(tensor * stages)
            needed = [groups.stage_bytes[device // tensor] + problem.working[device] for device in used]
            if any(needed[device] > limit for device, limit in problem.limits.items() if device in used):
                continue
            yield groups
            break


def _missing_link(vdevices: Sequence[tvm.relax.VDevice], groups: Pipeline) -> str:
    """Two GPUs of a group that do not reach each other's memory, in words; empty if all do."""
    indices = [int(vdevice.vdevice_id) for vdevice in vdevices[: groups.tensor * len(groups.stages)]]
    if (pair := _unlinked(indices, groups.tensor)) is None:
        return ""
    names = [f"{vdevices[0].target.kind.name}:{index}" for index in pair]
    return (
        f"{names[0]} does not access the memory of {names[1]} on this machine; a mesh in placement=, such as "
        f"{mesh_of(groups, 0)!r}, asks for it nevertheless"
    )


def _unlinked(indices: Sequence[int], tensor: int) -> tuple[int, int] | None:
    """The first two of some GPUs, in groups of consecutive ones, that do not reach each other's memory."""
    groups = [indices[begin : begin + tensor] for begin in range(0, len(indices), tensor)]
    pairs = ((a, b) for group in groups for a, b in permutations(group, 2))
    return next((pair for pair in pairs if not has_peer_access(*pair)), None)


@dataclass(frozen=True)
class ChosenReplicas:
    """Replicas of a model on equal GPUs, for many texts at the same time."""

    # Number of replicas, and devices and sequences of each.
    replicas: int
    devices: int
    slots: int
    batch: int  # texts of a decode call, so that calls of a step fill all stages
    rules: dict[str, str] | None  # placement rules of a replica; None for one device
    reason: str


def choose_replicas(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevices: Sequence[tvm.relax.VDevice],  # equal GPUs of this machine
    costs: CostModel,  # cost model of these devices
    limit: int | None,  # maximum bytes of a device
    texts: int,  # texts that are generated at the same time, by all replicas together
) -> ChosenReplicas:
    """Find the replicas, on GPUs that share layers or have some each, that generate the most tokens per second.

    Raises PlacementError if the model fits in no arrangement.
    """
    fleet, indices = Fleet.of_vdevices(vdevices, costs), [int(vdevice.vdevice_id) for vdevice in vdevices]
    fitting = arrangements(file, model, cache, vdevices[0], costs, fleet, texts, limit)
    unlinked = {each: _unlinked(indices, each.tensor) for each in fitting}
    possible = [each for each in fitting if unlinked[each] is None]
    if not possible:
        raise PlacementError(
            f"{file.path}: fits only if devices share layers, and these GPUs do not reach each other's memory; "
            "expected a higher memory limit, fewer slots or a smaller context"
        )
    best, *others = (replace(each, replicas=min(each.replicas, texts)) for each in possible)  # others would be idle
    slots = -(-texts // best.replicas)
    problem = LayerProblem(file, model, replace(cache, batches=(slots,), slots=slots), vdevices[:1], costs, {})
    groups = Pipeline(problem.search.parts, model, costs, fleet, best.tensor, best.stages, best.replicas)
    devices = best.tensor * best.stages
    reason = f"{_rate_of(best)} of {plural(texts, 'text')} at the same time"
    reason += f"; next best: {_rate_of(others[0])}" if others else ""
    if (pair := unlinked[fitting[0]]) is not None:
        reason += (
            f"; {_rate_of(fitting[0])}, need GPUs that reach each other's memory, and {pair[0]} and {pair[1]} do not"
        )
    batch, rules = -(-slots // best.stages), rules_of(groups) if devices > 1 else None
    return ChosenReplicas(best.replicas, devices, slots, batch, rules, reason)


def _rate_of(each: Arrangement) -> str:
    devices = f"{each.tensor} devices that share each layer" if each.tensor > 1 else "1 device"
    stages = f"{each.stages} stages of " if each.stages > 1 else ""
    return f"{plural(each.replicas, 'replica')} of {stages}{devices}, about {each.tokens_per_second:,.0f} tokens/s"


def rules_of(groups: Pipeline) -> dict[str, str]:
    """Rules that put the layers of each stage on its group."""
    rules: dict[str, str] = {}
    for stage, parts in enumerate(groups.stages[1:], 1):
        mesh = mesh_of(groups, stage)
        rules |= {f"blk.{part.layer}.*": mesh for part in parts if part.name != "output"}
        if parts[-1].name == "output":
            rules["output*"] = mesh
    return {**rules, "*": mesh_of(groups, 0)}


def mesh_of(groups: Pipeline, stage: int) -> str:
    """The device of a stage, or those that share its layers."""
    if groups.tensor == 1:
        return f"vdevice:{stage}"
    return f"vdevice[{stage * groups.tensor}:{(stage + 1) * groups.tensor}]"


def _text_of(groups: Pipeline) -> str:
    """Such as "layers shared by 2 devices, in 4 stages"."""
    stages = f", in {len(groups.stages)} stages" if len(groups.stages) > 1 else ""
    return f"layers shared by {groups.tensor} devices{stages}"
