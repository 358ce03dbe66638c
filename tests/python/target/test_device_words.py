"""Hints for names of devices that are not known."""

import pytest

from relax_hetero.target.device_words import device_hint

KINDS = ("c", "cuda", "llvm", "metal", "rocm", "vulkan")
LISTED = ("llvm:0", "cuda:0", "cuda:1")
TAGS = ("nvidia/nvidia-h100", "nvidia/nvidia-h100-nvl", "raspberry-pi/4b-aarch64")
CPU, NVIDIA = "; the CPU is called 'llvm'", "; an NVIDIA GPU is called 'cuda'"


@pytest.mark.parametrize(
    ("text", "among_kinds", "among_devices"),
    [
        ("cpu", CPU, f"{CPU}; did you mean 'llvm:0'?"),
        ("x86_64", CPU, f"{CPU}; did you mean 'llvm:0'?"),
        ("CPUExecutionProvider", CPU, f"{CPU}; did you mean 'llvm:0'?"),
        ("cpu:0", f"{CPU}; did you mean 'llvm:0'?", f"{CPU}; did you mean 'llvm:0'?"),
        ("gpu", NVIDIA, f"{NVIDIA}; did you mean 'cuda:0'?"),
        ("gpu:1", f"{NVIDIA}; did you mean 'cuda:1'?", f"{NVIDIA}; did you mean 'cuda:1'?"),
        ("nvidia 1", f"{NVIDIA}; did you mean 'cuda:1'?", f"{NVIDIA}; did you mean 'cuda:1'?"),
        ("rtx 4090", NVIDIA, f"{NVIDIA}; did you mean 'cuda:0'?"),
        ("CUDA:0", "; did you mean 'cuda:0'?", "; did you mean 'cuda:0'?"),
        ("cuda0", "; did you mean 'cuda:0'?", "; did you mean 'cuda:0'?"),
        ("cuda(1)", "; did you mean 'cuda:1'?", "; did you mean 'cuda:1'?"),
        ("cdua:0", "; did you mean 'cuda:0'?", "; did you mean 'cuda:0'?"),
        ("llvm 0", "; did you mean 'llvm:0'?", "; did you mean 'llvm:0'?"),
        ("LLVM", "; did you mean 'llvm'?", "; did you mean 'llvm:0'?"),
        ("mps:0", "; an Apple GPU is called 'metal'; did you mean 'metal:0'?", "; an Apple GPU is called 'metal'"),
        ("H100", "; did you mean 'nvidia/nvidia-h100'?", ""),
        ("sm_80", '; an NVIDIA GPU of that architecture is {"kind": "cuda", "arch": "sm_80"}', ""),
        (
            "llvm -mcpu=skylake",
            '; a target with attributes is a dict, or in JSON: {"kind": "llvm", "mcpu": "skylake"}',
            "",
        ),
        ("llvm,cuda:0", "; several devices are a list: ['llvm', 'cuda:0']", ""),
        ("tpu", "", ""),
        ("", "", ""),
    ],
)
def test_hints(text, among_kinds, among_devices):
    assert device_hint(text, KINDS, TAGS) == among_kinds
    assert device_hint(text, LISTED) == among_devices


def test_other_names_of_the_cpu_and_hosts():
    assert device_hint("x86", ("cpu", "cuda")) == "; the CPU is called 'cpu'"
    assert device_hint("b/cpu:1", ("a/llvm:0", "b/llvm:0", "b/llvm:1")) == f"{CPU}; did you mean 'b/llvm:1'?"
