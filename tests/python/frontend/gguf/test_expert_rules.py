"""Lists of experts in placement rules: groups of devices, and errors that name what is wrong."""

from dataclasses import replace

import pytest

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from relax_hetero.frontend.gguf.activation_types import ActivationTypes
from relax_hetero.frontend.gguf.expert_rules import shown, split_rules
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.frontend.gguf.hyperparameters import hyperparameters_of
from relax_hetero.target.make_vdevice import parse_vdevices

DEVICES = parse_vdevices(["llvm", "llvm", {"kind": "cuda", "arch": "sm_90a"}])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    sizes = replace(MODELS["glm4moe"], layers=3)  # layer 0 has no experts
    return read_gguf(write_gguf(tmp_path_factory.mktemp("experts") / "model.gguf", sizes))


def groups_of(file, rules):
    groups = split_rules(rules, hyperparameters_of(file), DEVICES).groups
    return {prefix: {group.suffix: list(group.experts) for group in own} for prefix, own in groups.items()}


def test_the_first_rule_that_matches_an_expert_decides(file):
    rules = {
        "blk.2.ffn_*_exps[6,7]": "cuda",
        "blk.*.ffn_*_exps[ 1 , 3-4, 6]": "llvm:1",
        "blk.2.*": "llvm:0",
        "*": "cuda",
    }
    assert groups_of(file, rules) == {
        "blk.1": {".llvm_1": [1, 3, 4, 6], ".cuda_0": [0, 2, 5, 7]},
        "blk.2": {".llvm_0": [0, 2, 5], ".llvm_1": [1, 3, 4], ".cuda_0": [6, 7]},
    }


def test_other_layers_have_no_groups(file):
    """Experts that no rule matches are on the default device; brackets elsewhere are classes of characters."""
    assert groups_of(file, {"blk.2.ffn_*_exps[0]": "cuda"}) == {"blk.2": {".llvm_0": [*range(1, 8)], ".cuda_0": [0]}}
    assert groups_of(file, {"blk.[0-1].ffn_*_exps": "cuda"}) == {}


def test_patterns_of_groups_stand_for_the_rules_with_lists(file):
    """Each layer has the reasons of its own experts only."""
    rules = {"blk.*.ffn_*_exps[0-1]": "cuda", "blk.2.ffn_*_exps[4]": "cuda", "blk.*.attn*": "llvm:1"}
    split = split_rules(rules, hyperparameters_of(file), DEVICES)
    patterns = [f"blk.{layer}.ffn_*.{device}" for layer in (1, 2) for device in ("llvm_0", "cuda_0")]
    assert [pattern for pattern, _ in split.rules] == [*patterns, "blk.*.attn*"]
    assert split.reasons({"blk.2.ffn_*_exps[4]": "auto, as it fits"}) == {
        "blk.2.ffn_*_exps[4]": "auto, as it fits",
        "blk.1.ffn_*.llvm_0": "no rule matches: default device",
        "blk.1.ffn_*.cuda_0": "rule 'blk.*.ffn_*_exps[0-1]'",
        "blk.2.ffn_*.llvm_0": "no rule matches: default device",
        "blk.2.ffn_*.cuda_0": "rule 'blk.*.ffn_*_exps[0-1]'; auto, as it fits",
    }


def test_patterns_of_groups_match_their_device_only(file):
    """The name of the second of eleven devices begins that of the last."""
    devices = parse_vdevices(["llvm"] * 11)
    rules = {"blk.*.ffn_*_exps[0]": "llvm:1", "blk.*.ffn_*_exps[1]": "llvm:10"}
    types = ActivationTypes(None, "float16", split_rules(rules, hyperparameters_of(file), devices).rules, devices)
    for device in (1, 10):
        for end in ("", ".stacked"):
            assert types.device_of(f"blk.1.ffn_up_exps.llvm_{device}{end}") == devices[device]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"blk.*.ffn_*_exps[0-8]": "cuda"}, r"found expert 8, but the model has experts 0 to 7"),
        ({"blk.*.ffn_*_exps[3-1]": "cuda"}, r"found '3-1' in the list of experts, expected numbers and ascending"),
        ({"blk.*.ffn_*_exps[!0]": "cuda"}, r"found '!0' in the list"),
        ({"blk.*.ffn_*_exps[]": "cuda"}, r"found '' in the list"),
        ({"blk.*.ffn_*_exps[0-3,2]": "cuda"}, r"found expert 2 more than once"),
        ({"blk.*.ffn_*_exps[0-3].weight": "cuda"}, r"found a list of experts before the end, expected it last"),
        ({"blk.0.ffn_*_exps[0-3]": "cuda"}, r"'blk.0.ffn_\*_exps\[0-3\]' decides for no expert; expected"),
        (
            {"blk.*.ffn_*": "llvm:1", "blk.1.ffn_*_exps[0-3]": "cuda"},
            r"decides for no expert; .*, or move it before 'blk.\*.ffn_\*'",
        ),
        (
            {"blk.*.ffn_*_exps[0-3]": "cuda", "blk.*.ffn_*_exps[2-5]": "llvm:1"},
            r"put experts 2-3 on cuda:0 and on llvm:1; expected each expert in one list",
        ),
        (
            {"blk.*.ffn_up_exps[0-3]": "cuda"},
            r"expert 0 of blk.1 has ffn_gate_exps on llvm:0 \(the default device\), ffn_up_exps on cuda:0 "
            r"\(rule 'blk.\*.ffn_up_exps\[0-3\]'\), .* expected the matrices of an expert on one device",
        ),
        ({"blk.*.ffn_*_exps[0-3]": "cuda:1"}, r"cuda:1"),
    ],
)
def test_errors(file, rules, message):
    with pytest.raises(rh.HeteroError, match=message):
        rh.from_gguf(file, DEVICES, rules)


def test_a_list_for_a_model_without_experts(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"])
    with pytest.raises(rh.FrontendError, match="found expert 0, but the model has no experts"):
        rh.from_gguf(path, ["llvm", "llvm"], {"blk.*.ffn_*_exps[0]": "llvm:1"})


def test_lists_in_messages_are_ranges():
    assert shown([0, 1, 2, 5, 7, 8]) == "experts 0-2, 5, 7-8"
    assert shown([4]) == "expert 4"
    assert shown(range(0, 40, 2)).endswith("14 and 12 more ranges")
