"""Words that people write for devices, and the names that this library has for them; needs nothing of TVM.

The one table of aliases behind every error about a device's name: `vdevices=`, placement values, hints and transfers,
annotations in TVMScript, devices of a machine, limits of memory and the options of the command line.
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
    """The description of each kind, and the kinds that each word may mean, the usual first."""
    described: dict[str, str] = {}
    families: dict[str, tuple[str, ...]] = {}
    cpus: list[str] = []
    gpus: list[str] = []
    for backend in backends():
        if backend.description:
            described.update({name: backend.description for name in (backend.kind, backend.type_name)})
        if backend.device_type == CPU or backend.is_gpu:
            (gpus if backend.is_gpu else cpus).append(backend.kind)
        families.update(dict.fromkeys([backend.kind, *backend.words.split()], (backend.kind,)))
    of_cpus = (cpus[0], "cpu", *cpus[1:])
    families.update({word: of_cpus for word, kinds in families.items() if kinds[0] in cpus} | {"cpu": of_cpus})
    families.update(dict.fromkeys([*_GPU_WORDS.split(), *gpus], tuple(gpus)))
    return described, families


def device_hint(text: str, known: Sequence[str], tags: Sequence[str] = ()) -> str:
    """End of an error about an unknown name of a device.

    Parameters
    ----------
    text : str
        The unknown name.
    known : sequence of str
        Names that are valid here, with or without numbers: ``("llvm", "c")``, ``("llvm:0", "b/cuda:0")``.
    tags : sequence of str
        Names of whole targets, such as ``"nvidia/nvidia-h100"``.

    Returns
    -------
    str
        Begins with "; "; empty where nothing known is near.
    """
    called_by, families = _names()
    host, slash, rest = text.rpartition("/")
    lower = " ".join(rest.lower().split())
    numbered = any(":" in name for name in known)
    words = list(dict.fromkeys(name.rpartition("/")[2].partition(":")[0] for name in known))
    parts = _PARTS.fullmatch(lower)
    word, number = (lower, "") if parts is None or lower in families else (parts[1], parts[2])
    number = number if len(number) < 3 else ""  # a longer one is a model's
    if word not in words and word not in families:
        whole = "" if numbered else _whole_target(lower, known, tags)
        near = difflib.get_close_matches(word, [*words, *families], n=1, cutoff=0.7)
        if whole or not near:
            return whole
        word = near[0]
    family = families.get(word, ())
    kind = word if word in words else next((name for name in family if name in words), None)
    called = kind or next((name for name in family if name in called_by), "")
    told = f"; {called_by[called]} is called {called!r}" if called in called_by and word != called else ""
    if kind is None or (told and not number and not numbered):
        return told
    meant = f"{host}{slash}{kind}:{int(number)}" if number else f"{host}{slash}{kind}"
    if numbered:
        fitting = [name for name in known if name.rpartition("/")[2].partition(":")[0] == kind]
        meant = meant if meant in known else fitting[0]
    return f"{told}; did you mean {meant!r}?"


def _whole_target(lower: str, known: Sequence[str], tags: Sequence[str]) -> str:
    """A hint for text that describes a whole target, or several."""
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
