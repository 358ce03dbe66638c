"""Language models over meshes of devices: ``{"*": "cuda[0:2]"}``, or ``tensor_parallel=2``.

`PartitionByMesh` splits attention by heads, feed-forward networks by columns and rows, and logits by the vocabulary,
which follows from the rules of ops. This module says what those rules cannot know: experts are dealt to the devices of
their mesh, whole ones to each; a layer's cache is given in parts, one for the heads of each device; logits are returned
in parts, those of each device's vocabulary; and GPUs get a copy each of the integer inputs, and return one each of the
greedy tokens, so that no call begins or ends with transfers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tvm

from ...encoding.pages import LayerCache
from ...encoding.token_masks import MASK_BITS
from ...errors import FrontendError
from ...target.mesh import mesh_of, mesh_positions
from ...target.vdevice import device_name, is_cpu, lookup, vdevice_index
from ...transform.ir.rewriting import copy_module
from ...transform.shard.partition_by_mesh import SPLIT_PARAMETERS
from ..onnx.placement_rules import Patterns, PlacementRules, rule_pairs
from .activation_types import ActivationTypes, names_of
from .hyperparameters import Hyperparameters

if TYPE_CHECKING:
    from ...target.vdevice import VDeviceSpec


def dealt_rules(
    rules: PlacementRules, model: Hyperparameters, vdevices: Sequence[tvm.relax.VDevice] | None
) -> list[tuple[str, VDeviceSpec]]:
    """Rules in which a mesh has an equal share of a layer's experts on each of its devices."""
    pairs = rule_pairs(rules)
    meshes = [mesh_of(lookup(device, vdevices)) if vdevices else None for _, device in pairs]
    for (pattern, _), mesh in zip(pairs, meshes, strict=True):
        if mesh is not None and len(mesh.shape) > 1:
            raise FrontendError(
                f"placement rule {pattern!r} names a mesh of shape {mesh.shape}; expected a mesh of one axis for "
                "layers of language models"
            )
    if not model.experts or not any(meshes):
        return pairs
    patterns, dealt = Patterns(pattern for pattern, _ in pairs), []
    for layer in range(model.dense_layers, model.layers):
        matching = patterns.matching(names_of(f"blk.{layer}.ffn_up_exps"))
        if any("_exps[" in pattern for pattern, _ in pairs):
            break  # the caller deals them
        if not matching or not (mesh := meshes[min(matching)]):
            continue
        bounds = [model.experts * number // len(mesh) for number in range(len(mesh) + 1)]
        if min(end - begin for begin, end in zip(bounds, bounds[1:], strict=False)) < 1:
            continue
        dealt += [
            (f"blk.{layer}.ffn_*_exps[{begin}-{end - 1}]", vdevices[device])  # type: ignore[index]
            for device, begin, end in zip(mesh, bounds, bounds[1:], strict=False)
        ]
    return [*dealt, *pairs]


def cache_parts(model: Hyperparameters, types: ActivationTypes) -> list[tuple[int, ...]]:
    """Positions of the devices that have a part of each cache; () for a cache that one device has.

    The first layers have a cache each, which later ones share (`Hyperparameters.cache_index`).
    """
    return [mesh_positions(types.device_of(f"blk.{layer}.attn")) for layer in range(len(model.caches))]


def split_caches(
    model: Hyperparameters, rules: PlacementRules, vdevices: Sequence[tvm.relax.VDevice]
) -> tuple[tuple[LayerCache, ...], tuple[int, ...]]:
    """Caches as functions take them, and the number of parts of each layer's cache.

    `rules`, `vdevices`: placement rules and devices. Raises FrontendError if the heads of a layer over a mesh cannot be
    split.
    """
    parts = cache_parts(model, ActivationTypes(None, "float32", rules, vdevices))
    caches: list[LayerCache] = []
    for index, (cache, mesh) in enumerate(zip(model.caches, parts, strict=True)):
        count = len(mesh) or 1
        if count > 1 and (cache.state or cache.shared or cache.kv_heads % count):
            heads = "heads of keys and values"
            if cache.state or cache.shared:
                problem = f"{'a state' if cache.state else 'keys that are values'}, expected {heads}"
                remedy = "place its layers on one device each"
            else:
                problem = f"{cache.kv_heads} {heads}, expected a multiple of {count}"
                remedy = "take fewer devices, or place its layers on one device each"
            names = ", ".join(device_name(vdevices[device], vdevices) for device in mesh)
            raise FrontendError(f"cache {index} of {model.name} has {problem}, which {names} share; {remedy}")
        caches += [replace(cache, kv_heads=cache.kv_heads // count)] * count
    return tuple(caches), tuple(len(mesh) or 1 for mesh in parts)


def with_split_parameters(
    mod: tvm.IRModule, model: Hyperparameters, types: ActivationTypes, vdevices: Sequence[tvm.relax.VDevice]
) -> tvm.IRModule:
    """Say which parameters and results of a model's functions are in parts; the module itself if there are none.

    Each of several GPUs has a copy of the integers, which the host sends to all.
    """
    parts = cache_parts(model, types)
    results = _result_parts(model, types, vdevices)
    used: set[int] = set()
    split: dict[str, dict[str, Any]] = {}
    number = 0
    for index, mesh in enumerate(parts):
        count = len(mesh) or 1
        names = [f"pages_{number + part}" for part in range(count)]
        number += count
        device = types.device_of(f"blk.{index}.attn")
        placed = list(mesh) or [0 if device is None else vdevice_index(device, vdevices)]
        split[f"pages_{index}"] = {"placement": "S[1]" if mesh else "R", "names": names, "mesh": placed}
        used |= set(mesh if any(parts) else placed)
    on_gpus = len(used) > 1 and not any(is_cpu(vdevices[device]) for device in used)
    if not any(parts) and not results and not on_gpus:
        return mod
    functions = dict(mod.functions.items())
    for gv, func in mod.functions.items():
        names = [str(param.name) for param in func.params] if isinstance(func, tvm.relax.Function) else []
        outputs = [str(name) for name in (func.attrs or {}).get("output_names", ())]
        own = {name: split[name] for name in names if name in split}
        own |= {name: part for name, part in results.items() if name in names or name in outputs}
        if on_gpus and any(name.startswith("pages_") for name in names):
            own |= {name: _copies(name, sorted(used)) for name in names if not name.startswith("pages_")}
        if own:
            functions[gv] = func.with_attr(SPLIT_PARAMETERS, json.dumps(own))
    return copy_module(mod, functions)


def _result_parts(
    model: Hyperparameters, types: ActivationTypes, vdevices: Sequence[tvm.relax.VDevice]
) -> dict[str, dict[str, Any]]:
    """Parts of the logits, and of masks of tokens, of a mesh that divides them, and copies of the tokens on GPUs."""
    mesh = mesh_positions(types.device_of("output"))
    if not mesh or model.vocabulary % len(mesh):
        return {}
    divided = ["logits"] if model.vocabulary % (MASK_BITS * len(mesh)) else ["logits", "masks"]
    parts = {name: {**_copies(name, mesh), "placement": "S[1]"} for name in divided}
    if not any(is_cpu(vdevices[device]) for device in mesh):
        parts["greedy_tokens"] = _copies("greedy_tokens", mesh)
    return parts


def _copies(name: str, mesh: Sequence[int]) -> dict[str, Any]:
    """Copies of a parameter or result on each device of a mesh."""
    names = [f"{name}@{device}" if device != mesh[0] else name for device in mesh]
    return {"placement": "R", "names": names, "mesh": list(mesh)}
