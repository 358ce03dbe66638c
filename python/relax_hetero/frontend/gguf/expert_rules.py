"""Placement rules that select experts: ``blk.*.ffn_*_exps[0-31]``, the first 32 experts of every layer.

Brackets that end a pattern after ``_exps`` are a list of experts, ``[3,7,12-15]``; anywhere else they are a class of
characters, as in all patterns. As for other rules, the first one that matches an expert decides, and the default device
has the experts that none matches. The experts of a layer that a device has are a group, whose variables end in the name
of the device: ``blk.3.ffn_up_exps.cuda_0``. Lists of experts become rules for these names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import tvm

from ...errors import FrontendError
from ...target.mesh import mesh_positions
from ...target.vdevice import VDeviceSpec, default_vdevice, device_identifier, device_name, lookup, vdevice_index
from ..onnx.placement_rules import Patterns, PlacementRules, rule_pairs
from .activation_types import names_of
from .hyperparameters import Hyperparameters

MATRICES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # tensors of a layer's experts

_WITH_LIST = re.compile(r"(.*_exps)\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MAX_SHOWN_RANGES = 8


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of a layer that a device has."""

    suffix: str  # end of the names of its variables: a dot and the name of the device
    experts: tuple[int, ...]  # numbers of the experts, ascending

    @property
    def is_range(self) -> bool:
        """True if the experts are neighbours."""
        return self.experts[-1] - self.experts[0] + 1 == len(self.experts)


@dataclass(frozen=True)
class SplitRules:
    """Rules without lists of experts."""

    rules: list[tuple[str, VDeviceSpec]]  # patterns of groups, then the other patterns
    groups: Mapping[str, tuple[ExpertGroup, ...]]  # groups of each split layer, by its prefix, ``blk.3``
    # Pattern of groups -> the patterns that it stands for; none for the default device.
    replaced: Mapping[str, tuple[str, ...]]

    def reasons(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Reasons for patterns, given those of generated rules: patterns of groups have those of what they replace."""
        of_groups = {}
        for pattern, sources in self.replaced.items():
            texts = dict.fromkeys(reasons.get(source, f"rule {source!r}") for source in sources)
            of_groups[pattern] = "; ".join(texts) or "no rule matches: default device"
        return {**reasons, **of_groups}


@dataclass(frozen=True)
class _Rule:
    """A rule: its pattern, that without a list of experts, the list (None: all), and the index of its device."""

    pattern: str
    name: str
    experts: tuple[int, ...] | None
    device: int


def split_rules(
    placement: PlacementRules, model: Hyperparameters, vdevices: Sequence[tvm.relax.VDevice] | None
) -> SplitRules:
    """Replace lists of experts in placement rules.

    Raises FrontendError if a list is malformed, names experts that the model lacks, selects no experts, or contradicts
    another one, or if matrices of an expert are on different devices, and VDeviceError if a device string is not in
    `vdevices`.
    """
    pairs = rule_pairs(placement)
    if not vdevices or not any("_exps[" in pattern for pattern, _ in pairs):
        return SplitRules(pairs, {}, {})
    # Meshes, which are in no list, follow the devices.
    meshes = [device for _, spec in pairs if mesh_positions(device := lookup(spec, vdevices))]
    vdevices = [*vdevices, *meshes]
    rules = [_parse(pattern, vdevice_index(lookup(device, vdevices), vdevices), model) for pattern, device in pairs]
    _check_overlaps(rules, vdevices)
    default = _Rule("", "", None, vdevice_index(default_vdevice(vdevices), vdevices))
    suffixes = [f".{device_identifier(vdevice, vdevices)}" for vdevice in vdevices]
    deciding: dict[_Rule, None] = {}
    groups: dict[str, tuple[ExpertGroup, ...]] = {}
    new_rules: list[tuple[str, VDeviceSpec]] = []
    replaced = {}
    for layer in range(model.dense_layers, model.layers):
        prefix = f"blk.{layer}"
        by_expert = _rules_of_layer(prefix, rules, default, model, vdevices)
        deciding |= dict.fromkeys(by_expert)
        if any(rule.experts is not None for rule in by_expert):
            own = {
                device: tuple(expert for expert, rule in enumerate(by_expert) if rule.device == device)
                for device in sorted({rule.device for rule in by_expert})
            }
            groups[prefix] = tuple(ExpertGroup(suffixes[device], experts) for device, experts in own.items())
            for device, experts in own.items():
                pattern = f"{prefix}.ffn_*{suffixes[device]}"
                new_rules.append((pattern, vdevices[device]))
                sources = dict.fromkeys(by_expert[expert].pattern for expert in experts)
                replaced[pattern] = tuple(filter(None, sources))
    _check_unused(rules, deciding)
    others = [pair for pair, rule in zip(pairs, rules, strict=True) if rule.experts is None]
    return SplitRules([*new_rules, *others], groups, replaced)


def _parse(pattern: str, device: int, model: Hyperparameters) -> _Rule:
    match = _WITH_LIST.fullmatch(pattern)
    if match is None or "_exps[" in match[1]:
        if "_exps[" in pattern:
            raise FrontendError(
                f"placement pattern {pattern!r}: found a list of experts before the end, expected it last, as in "
                "'blk.*.ffn_*_exps[0-31]'"
            )
        return _Rule(pattern, pattern, None, device)
    experts: list[int] = []
    for part in match[2].split(","):
        numbers = _RANGE.fullmatch(part.strip())
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if first > last:
            raise FrontendError(
                f"placement pattern {pattern!r}: found {part!r} in the list of experts, expected numbers and ascending "
                "ranges, as in '[3,7,12-15]'"
            )
        if last >= model.experts:
            has = f"experts 0 to {model.experts - 1}" if model.experts else "no experts"
            raise FrontendError(f"placement pattern {pattern!r}: found expert {last}, but the model has {has}")
        experts += range(first, last + 1)
    twice = {expert for expert in experts if experts.count(expert) > 1}
    if twice:
        raise FrontendError(
            f"placement pattern {pattern!r}: found {shown(sorted(twice))} more than once, expected each expert once"
        )
    return _Rule(pattern, match[1], tuple(sorted(experts)), device)


def _check_overlaps(rules: Sequence[_Rule], vdevices: Sequence[tvm.relax.VDevice]) -> None:
    """Raise FrontendError if lists of one pattern put an expert on two devices."""
    for index, rule in enumerate(rules):
        for other in rules[:index]:
            common = set(rule.experts or ()) & set(other.experts or ())
            if common and rule.name == other.name and rule.device != other.device:
                names = [device_name(vdevices[each.device], vdevices) for each in (other, rule)]
                raise FrontendError(
                    f"placement patterns {other.pattern!r} and {rule.pattern!r} put {shown(sorted(common))} on "
                    f"{names[0]} and on {names[1]}; expected each expert in one list"
                )


def _check_unused(rules: Sequence[_Rule], deciding: Mapping[_Rule, None]) -> None:
    for index, rule in enumerate(rules):
        if rule.experts is not None and rule not in deciding:
            before = ", ".join(repr(each.pattern) for each in rules[:index])
            hint = f", or move it before {before}" if before else ""
            raise FrontendError(
                f"placement pattern {rule.pattern!r} decides for no expert; expected the names of tensors that have "
                f"experts, such as 'blk.*.ffn_*_exps'{hint}"
            )


def _rules_of_layer(
    prefix: str, rules: Sequence[_Rule], default: _Rule, model: Hyperparameters, vdevices: Sequence[tvm.relax.VDevice]
) -> list[_Rule]:
    """The rule that decides for each expert of a layer, whose matrices have to be on one device."""
    by_matrix = []
    patterns = Patterns(rule.name for rule in rules)
    for matrix in MATRICES:
        matching = [rules[index] for index in sorted(patterns.matching(names_of(f"{prefix}.{matrix}")))]
        by_matrix.append(
            [
                next((rule for rule in matching if rule.experts is None or expert in rule.experts), default)
                for expert in range(model.experts)
            ]
        )
    is_split = any(rule.experts is not None for matrix_rules in by_matrix for rule in matrix_rules)
    for expert, chosen in enumerate(zip(*by_matrix, strict=True)):
        if is_split and len({rule.device for rule in chosen}) > 1:
            places = ", ".join(
                f"{matrix} on {device_name(vdevices[rule.device], vdevices)} ({_reason(rule)})"
                for matrix, rule in zip(MATRICES, chosen, strict=True)
            )
            raise FrontendError(
                f"placement: expert {expert} of {prefix} has {places}; expected the matrices of an expert on one "
                "device: use patterns that match all, such as 'blk.*.ffn_*_exps[0-31]'"
            )
    return by_matrix[0]


def _reason(rule: _Rule) -> str:
    return f"rule {rule.pattern!r}" if rule.pattern else "the default device"


def shown(experts: Sequence[int]) -> str:
    """Ascending numbers of experts for messages: ``experts 0-3, 7``."""
    parts = ranges(experts)
    more = f" and {len(parts) - _MAX_SHOWN_RANGES} more ranges" if len(parts) > _MAX_SHOWN_RANGES else ""
    return f"{'experts' if len(experts) > 1 else 'expert'} {', '.join(parts[:_MAX_SHOWN_RANGES])}{more}"


def ranges(experts: Sequence[int]) -> list[str]:
    """Ascending numbers as the parts of a list in a rule: ``0-3``, ``7``."""
    runs = [list(run) for _, run in groupby(enumerate(experts), lambda pair: pair[1] - pair[0])]
    return [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
