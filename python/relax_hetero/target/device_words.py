"""Words that people write for devices, and the names that this library has for them; needs nothing of TVM.

The one table of aliases behind every error about a device's name: `vdevices=`, placement values, hints and transfers,
annotations in TVMScript, devices of a machine, limits of memory and the options of the command line.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence

# What a kind of target, or a type of device at run time, is called in a sentence.
_CALLED = {
    "llvm": "the CPU",
    "cpu": "the CPU",
    "cuda": "an NVIDIA GPU",
    "rocm": "an AMD GPU",
    "metal": "an Apple GPU",
}
# Names of one family, the usual first, and other words for it.
_CPU = ("llvm", "cpu", "c")
_GPUS = ("cuda", "rocm", "metal", "vulkan", "opencl", "webgpu")
_WORDS: dict[tuple[str, ...], str] = {
    _CPU: """c++ host native x86 x86_64 x86-64 x64 i386 amd64 arm arm64 arm64v8 armv8 aarch64 riscv riscv64 intel core
        cores processor mkl onednn openmp sse avx avx2 avx512 avx512f amx neon sve cpuexecutionprovider""",
    ("cuda",): """nvidia geforce rtx gtx tesla quadro hopper blackwell ada ampere volta turing tensorrt trt
        cudnn cublas cudaexecutionprovider tensorrtexecutionprovider nvtensorrtrtxexecutionprovider""",
    ("rocm",): "amd amdgpu radeon hip gfx90a mi250 mi300 rocmexecutionprovider migraphx migraphxexecutionprovider",
    ("metal",): "mps apple coreml coremlexecutionprovider mlx",
    ("vulkan",): "vk",
    ("opencl",): "cl ocl",
    _GPUS: "gpu gpus xpu accelerator accel device dml directml dmlexecutionprovider graphics",
}
_FAMILIES = {word: names for names, words in _WORDS.items() for word in (*words.split(), *names)}

_PARTS = re.compile(r"(.*?[a-z])[\s:=(\[_#]*([0-9]*)[)\]]*")
_CUDA_ARCH = re.compile(r"(?:cuda|nvidia)?[\s:_-]*(?:sm|compute)[\s_-]?([0-9]{2,3}[af]?)")
_OLD_TARGET = re.compile(r"([a-z_]+)((?:\s+-{1,2}[a-z_-]+=\S+)+)")
_SEVERAL = re.compile(r"[^,;{}]+([,;][^,;{}]+)+")


def device_hint(text: str, known: Sequence[str], tags: Sequence[str] = ()) -> str:
    """End of an error about an unknown name of a device.

    Parameters
    ----------
    text : str
        The unknown name.
    known : sequence of str
        Names that are valid here: ``("llvm", "cuda")``, or with numbers, ``("llvm:0", "b/cuda:0")``.
    tags : sequence of str
        Names of whole targets, such as ``"nvidia/nvidia-h100"``.

    Returns
    -------
    str
        Begins with "; "; empty where nothing known is near.
    """
    host, slash, rest = text.rpartition("/")
    lower = " ".join(rest.lower().split())
    numbered = any(":" in name for name in known)
    words = list(dict.fromkeys(name.rpartition("/")[2].partition(":")[0] for name in known))
    parts = _PARTS.fullmatch(lower)
    word, number = (lower, "") if parts is None or lower in _FAMILIES else (parts[1], parts[2])
    number = number if len(number) < 3 else ""  # a longer one is a model's
    if word not in words and word not in _FAMILIES:
        whole = "" if numbered else _whole_target(lower, known, tags)
        near = difflib.get_close_matches(word, [*words, *_FAMILIES], n=1, cutoff=0.7)
        if whole or not near:
            return whole
        word = near[0]
    family = _FAMILIES.get(word, ())
    kind = word if word in words else next((name for name in family if name in words), None)
    called = kind or next((name for name in family if name in _CALLED), "")
    told = f"; {_CALLED[called]} is called {called!r}" if called in _CALLED and word != called else ""
    if kind is None or (told and not number and not numbered):
        return told
    meant = f"{host}{slash}{kind}:{int(number)}" if number else f"{host}{slash}{kind}"
    if numbered:
        fitting = [name for name in known if name.rpartition("/")[2].partition(":")[0] == kind]
        meant = meant if meant in known else fitting[0]
    return f"{told}; did you mean {meant!r}?"


def _whole_target(lower: str, known: Sequence[str], tags: Sequence[str]) -> str:
    """A hint for text that describes a whole target, or several."""
    arch = _CUDA_ARCH.fullmatch(lower)
    if arch is not None and "cuda" in known:
        return f"; an NVIDIA GPU of that architecture is {json.dumps({'kind': 'cuda', 'arch': f'sm_{arch[1]}'})}"
    old = _OLD_TARGET.fullmatch(lower)
    if old is not None:
        pairs = (option.strip("- ").partition("=") for option in old[2].split())
        options = {name: value.split(",") if name == "mattr" else value for name, _, value in pairs}
        return f"; a target with attributes is a dict, or in JSON: {json.dumps({'kind': old[1], **options})}"
    if _SEVERAL.fullmatch(lower):
        return f"; several devices are a list: {[part.strip() for part in re.split('[,;]', lower)]}"
    ends = [tag for tag in tags if lower and re.search(rf"(^|[/-]){re.escape(lower)}($|-)", tag)]
    return f"; did you mean {min(ends, key=len)!r}?" if ends else ""
