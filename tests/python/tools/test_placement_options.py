"""Options that say what goes where."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from relax_hetero.tools.placement_options import PlacementOptions, placement_options


def parse(*arguments: str) -> PlacementOptions:
    placings: list[PlacementOptions] = []

    @click.command()
    @placement_options
    def command(placing: PlacementOptions) -> None:
        placings.append(placing)

    result = CliRunner().invoke(command, arguments)
    if result.exit_code != 0:
        raise click.UsageError(result.output)
    return placings[0]


def test_nothing_given_is_the_native_cpu():
    assert parse().import_options() == {"vdevices": ["llvm"], "placement": None, "shapes": None}
    assert not parse().is_given


def test_devices_keep_their_order_and_json_is_a_target():
    placing = parse("--vdevice", "llvm", "--vdevice", '{"kind": "llvm", "mcpu": "x86-64-v3"}', "--vdevice", "cuda:1")
    assert placing.vdevices == ("llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}, "cuda:1")


def test_rules_keep_their_order_and_the_last_equals_sign_divides():
    placing = parse("--place", "/a=b/*=cuda:0", "--place", "MatMul=llvm")
    assert list(placing.import_options()["placement"].items()) == [("/a=b/*", "cuda:0"), ("MatMul", "llvm")]


def test_place_auto():
    assert parse("--place-auto").import_options()["placement"] == "auto"


def test_objective():
    assert "objective" not in parse("--place-auto").import_options()
    assert parse("--place-auto", "--objective", "throughput").import_options()["objective"] == "throughput"


def test_shapes():
    placing = parse("--shape", "x=1x128", "--shape", "scalar=", "--shape", "input.1=3")
    assert placing.import_options(inputs=["x", "scalar", "input.1"])["shapes"] == {
        "x": [1, 128],
        "scalar": [],
        "input.1": [3],
    }


def test_a_single_extent_of_a_name_that_is_not_an_input_sizes_a_dimension():
    placing = parse("--shape", "x=3", "--shape", "batch=8")
    assert placing.import_options(inputs=["x"])["shapes"] == {"x": [3], "batch": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vdevice", '{"kind": '], "is not JSON"),
        (["--place", "no-device"], "PATTERN=DEVICE"),
        (["--place", "=cuda"], "PATTERN=DEVICE"),
        (["--place", "a=llvm", "--place", "a=cuda"], "names 'a' twice"),
        (["--place", "a=llvm", "--place-auto"], "exclude each other"),
        (["--objective", "throughput"], "--objective needs --place-auto"),
        (["--place-auto", "--objective", "speed"], "'latency', 'throughput'"),
        (["--shape", "x=1xn"], "NAME=SHAPE"),
        (["--shape", "1x2"], "NAME=SHAPE"),
        (["--shape", "x=-1"], "NAME=SHAPE"),
        (["--shape", "x=1", "--shape", "x=2"], "names 'x' twice"),
    ],
)
def test_wrong_usage_says_what_was_expected(arguments: list[str], message: str):
    with pytest.raises(click.UsageError, match=message):
        parse(*arguments)
