"""Suggestions for unknown device names in error messages, from words that people use; independent of TVM.

All errors about device names use them: `vdevices=`, placement values, hints and transfers, annotations in TVMScript,
devices of a machine, memory limits and command-line options.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence

from .backend import CPU, backends

# Words for a GPU of any kind.
_GPU_WORDS = "gpu gpus xpu accelerator accel device dml directml dmlexecutionprovider graphics"

_PARTS = re.compile(r"(.*?[a-z])[\s:=(\[_#]*([0-9]*)[)\]]*")
_OLD_TARGET = re.compile(r"([a-z_]+)((?:\s+-{1,2}[a-z_-]+=\S+)+)")
_SEVERAL = re.compile(r"[^,;{}]+([,;][^,;{}]+)+")


def _names() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The description of each kind, and the kinds that each word may refer to, the most common first."""
    descriptions: dict[str, str] = {}
    families: dict[str, tuple[str, ...]] = {}
    cpus: list[str] = []
    gpus: list[str] = []
    for backend in backends():
        if backend.description:
            descriptions.update({name: backend.description for name in (backend.kind, backend.type_name)})
        if backend.device_type == CPU or backend.is_gpu:
            (gpus if backend.is_gpu else cpus).append(backend.kind)
        families.update(dict.fromkeys([backend.kind, *backend.words.split()], (backend.kind,)))
    cpu_family = (cpus[0], "cpu", *cpus[1:])
    families.update({word: cpu_family for word, kinds in families.items() if kinds[0] in cpus} | {"cpu": cpu_family})
    families.update(dict.fromkeys([*_GPU_WORDS.split(), *gpus], tuple(gpus)))
    return descriptions, families


def device_hint(
    text: str,  # the unknown name
    known: Sequence[str],  # valid names, with or without numbers: ``("llvm", "c")``, ``("llvm:0", "b/cuda:0")``
    tags: Sequence[str] = (),  # names of whole targets, such as ``"nvidia/nvidia-h100"``
) -> str:
    """End of an error message about an unknown device name.

    Returns the text that begins with "; ", or empty if no name is similar.
    """
    descriptions, families = _names()
    host, slash, rest = text.rpartition("/")
    lower = " ".join(rest.lower().split())
    numbered = any(":" in name for name in known)
    words = list(dict.fromkeys(name.rpartition("/")[2].partition(":")[0] for name in known))
    parts = _PARTS.fullmatch(lower)
    word, number = (lower, "") if parts is None or lower in families else (parts[1], parts[2])
    number = number if len(number) < 3 else ""  # a longer number is part of a product name
    if word not in words and word not in families:
        target_hint = "" if numbered else _whole_target(lower, known, tags)
        similar = difflib.get_close_matches(word, [*words, *families], n=1, cutoff=0.7)
        if target_hint or not similar:
            return target_hint
        word = similar[0]
    family = families.get(word, ())
    kind = word if word in words else next((name for name in family if name in words), None)
    described_kind = kind or next((name for name in family if name in descriptions), "")
    explanation = (
        f"; {descriptions[described_kind]} is called {described_kind!r}"
        if described_kind in descriptions and word != described_kind
        else ""
    )
    if kind is None or (explanation and not number and not numbered):
        return explanation
    suggestion = f"{host}{slash}{kind}:{int(number)}" if number else f"{host}{slash}{kind}"
    if numbered:
        same_kind = [name for name in known if name.rpartition("/")[2].partition(":")[0] == kind]
        suggestion = suggestion if suggestion in known else same_kind[0]
    return f"{explanation}; did you mean {suggestion!r}?"


def _whole_target(lower: str, known: Sequence[str], tags: Sequence[str]) -> str:
    """Advice for text that describes a whole target, or several."""
    for backend in backends():
        if backend.kind in known and (hint := backend.target_hint(lower)):
            return hint
    old = _OLD_TARGET.fullmatch(lower)
    if old is not None:
        pairs = (option.strip("- ").partition("=") for option in old[2].split())
        options = {name: value.split(",") if name == "mattr" else value for name, _, value in pairs}
        return f"; a target with attributes is a dict, or in JSON: {json.dumps({'kind': old[1], **options})}"
    if _SEVERAL.fullmatch(lower):
        return f"; several devices are a list: {[part.strip() for part in re.split('[,;]', lower)]}"
    ends = [tag for tag in tags if lower and re.search(rf"(^|[/-]){re.escape(lower)}($|-)", tag)]
    return f"; did you mean {min(ends, key=len)!r}?" if ends else ""
