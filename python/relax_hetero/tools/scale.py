"""``relax-hetero scale``: the expected speed of a language model for each arrangement of many equal devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ..display.console import console, print_json, show, table
from ..display.text import bytes_text, plural, time_text
from .command import INPUT, INPUT_FILE, command, json_option
from .models import has_weights
from .placement_options import VDeviceParam

if TYPE_CHECKING:
    import tvm

    from ..frontend.auto.cost_model import CostModel, LinkCost
    from ..frontend.gguf.scaling import Arrangement, Calibration, Fleet

_SHOWN = 12
"""Arrangements in the table; --json has all."""
_PROBES = 4
"""Measurements of memory that devices share, before that of the model, and after."""
_MAX_SPREAD = 1.15
"""Highest over lowest of them; a machine beyond it changes its speed."""


@command("scale")
@click.argument("model", type=INPUT)
@click.option("--vdevice", "given", type=VDeviceParam(), required=True, multiple=True, help="A device of the fleet.")
@click.option("--devices", type=click.IntRange(min=1), default=8, help="Devices of each host.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, help="Hosts, with as many devices each.")
@click.option("--texts", type=click.IntRange(min=1), default=32, help="Texts that are generated at the same time.")
@click.option(
    "--context", type=click.IntRange(min=2), metavar="TOKENS", help="Tokens of a text; the default is that of chat."
)
@click.option(
    "--memory-limit", metavar="SIZE", help="Memory of a device, such as 80GiB; the default is that of this machine's."
)
@click.option(
    "--network",
    nargs=2,
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S MICROSECONDS",
    help="Rate and latency between hosts; the default is 10 Gb/s Ethernet, 1.25 and 1000.",
)
@click.option(
    "--link",
    nargs=2,
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S MICROSECONDS",
    help="Rate and latency between devices of a host; the default is measured if two are in this machine, else that of "
    "NVLink.",
)
@click.option(
    "--expert-counts",
    type=INPUT_FILE,
    metavar="FILE",
    help="Tokens that chose each expert, a file of relax-hetero serve --count-experts; by default all experts are "
    "equally frequent.",
)
@click.option(
    "--measure",
    is_flag=True,
    help="Compile some layers of MODEL, and time them on the device first, which must be in this machine; estimates "
    "follow from these times. It takes a minute or more.",
)
@json_option
def scale_command(
    model: Path,
    given: tuple[str | dict[str, Any], ...],
    devices: int,
    hosts: int,
    texts: int,
    context: int | None,
    memory_limit: str | None,
    network: tuple[float, float] | None,
    link: tuple[float, float] | None,
    expert_counts: Path | None,
    measure: bool,
    as_json: bool,
) -> None:
    """Simulate MODEL, a GGUF file or a folder of Hugging Face, on HOSTS times DEVICES equal devices.

    Arrangements are replicas of pipelines of tensor-parallel groups. Nothing is compiled without --measure. Rates are
    measured if the device, and for those between devices another one, is in this machine.

    \b
    relax-hetero scale model.gguf --vdevice cuda --devices 8 --texts 256 --measure
    relax-hetero scale model.gguf --vdevice cuda --devices 8 --hosts 16 --texts 4096 --network 50 10
    """
    from ..frontend.auto.auto_placement import memory_limits
    from ..frontend.auto.cost_model import LinkCost
    from ..frontend.auto.measure_devices import SharedBandwidth
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.place_experts import read_expert_counts
    from ..frontend.gguf.scaling import arrangements
    from ..frontend.language_model_files import read_language_model
    from ..llm.model_loader import default_cache
    from ..target.hosts import NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS

    if not has_weights(model):
        raise click.UsageError(f"{model} is not a language model; expected a GGUF file or a folder of Hugging Face")
    if len(given) > 1:
        raise click.UsageError(
            f"found --vdevice {len(given)} times, expected one: the devices of a fleet are equal, and --devices and "
            "--hosts say how many there are"
        )
    (vdevice,) = given
    file = read_language_model(model)
    sizes = hyperparameters_of(file)
    counts = read_expert_counts(expert_counts, sizes)
    rate, latency = network or (NETWORK_BYTES_PER_SECOND / 1e9, NETWORK_LATENCY_SECONDS * 1e6)
    with console(stderr=True).status("Measuring the devices"):
        vdevices, costs, fleet = fleet_of(vdevice, hosts, devices, LinkCost(rate * 1e9, latency * 1e-6), measure)
        if link is not None:
            fleet = fleet.with_link(LinkCost(link[0] * 1e9, link[1] * 1e-6))
        shared = SharedBandwidth.of(vdevices[0]) if measure else None
        rates = [] if shared is None else [shared.measure() for _ in range(_PROBES)]
    cache = default_cache(sizes, vdevices[:1], context, texts)
    calibration = None
    if measure:
        from ..llm.calibrate import calibrate

        with console(stderr=True).status(f"Measuring layers of {model.name}"):
            calibration = calibrate(file, cache, vdevices, costs, texts)
            rates += [] if shared is None else [shared.measure() for _ in range(_PROBES)]
    if rates:  # those that are stored may be of another time
        fleet = replace(fleet, shared_bandwidth=median(rates))
    limit = memory_limits(memory_limit, vdevices[:1]).get(0)
    fitting = arrangements(file, sizes, cache, vdevices[0], costs, fleet, texts, limit, calibration, counts)
    is_link_known = link is not None or devices == 1 or not is_alone(vdevices)
    if as_json:
        measured = None if calibration is None else asdict(calibration)
        rows = [each.to_json() for each in fitting]
        sources = costs.figures if is_link_known else f"{costs.figures}, links from tables"
        figures = {"figures": sources, "measured_over_expected": measured, "shared_bandwidths": rates}
        print_json({**figures, "arrangements": rows})
    else:
        show(_tables(fitting, model.name, costs, fleet, calibration, rates, is_link_known))


def fleet_of(
    vdevice: str | dict[str, Any], hosts: int, devices: int, network: LinkCost, measure: bool = False
) -> tuple[list[tvm.relax.VDevice], CostModel, Fleet]:
    """Two devices like one, their costs, and the fleet.

    Rates are measured if the devices are in this machine; `measure` also measures CPU devices that share its cores.
    """
    import tvm

    from ..frontend.auto.cost_model import CostModel, with_figures_of
    from ..frontend.auto.measure_devices import sharing_figures_of
    from ..frontend.gguf.scaling import Fleet
    from ..target.make_vdevice import parse_vdevices
    from ..target.vdevice import is_cpu

    kind = vdevice.partition(":")[0] if isinstance(vdevice, str) else vdevice  # two devices, not one twice
    target = parse_vdevices(kind)[0].target
    pair = [tvm.relax.VDevice(target, index, "global") for index in range(2)]
    costs = CostModel.measured(pair, "throughput")
    if is_alone(pair):
        costs = with_figures_of(costs, pair[0])
    sharing = sharing_figures_of(pair[0]) if measure and is_cpu(pair[0]) else None
    fleet = Fleet.of_vdevices(pair, costs, hosts, network, sharing)
    return pair, costs, replace(fleet, devices=devices)


def is_alone(vdevices: Sequence[tvm.relax.VDevice]) -> bool:
    """Return whether this machine has only the first of some devices, which are not CPUs."""
    from ..frontend.auto.measure_devices import are_present
    from ..target.vdevice import is_cpu

    return not is_cpu(vdevices[0]) and are_present(vdevices[:1]) and not are_present(vdevices)


def _tables(
    fitting: list[Arrangement],
    name: str,
    costs: CostModel,
    fleet: Fleet,
    calibration: Calibration | None,
    rates: list[float],
    is_link_known: bool,
) -> Any:
    columns = ["tensor", "stages", "replicas", "tokens/s", "a token", "prompt", "memory", "busy", "exchanges of a step"]
    rows = [
        [
            *(f"{count}" for count in (each.tensor, each.stages, each.replicas)),
            f"{each.tokens_per_second:,.0f}",
            time_text(each.token_seconds),
            time_text(each.prefill_seconds),
            bytes_text(each.device_bytes),
            f"{each.busy:.0%}",
            ", ".join(
                f"{exchange.count:,} {exchange.kind} of {bytes_text(exchange.bytes)}: {time_text(exchange.seconds)}"
                for exchange in each.exchanges
            )
            or "-",
        ]
        for each in fitting[:_SHOWN]
    ]
    yield table("Arrangements", columns, rows, columns[:-1])
    best = fitting[0]
    yield (
        f"{name} on {plural(fleet.hosts, 'host')} of {plural(fleet.devices, 'device')}, "
        f"{plural(best.texts, 'text')} at the same time, prompts of {best.prompt:,} tokens. Devices of a group share "
        "each op, stages have consecutive layers, replicas have texts of their own; memory is of one device."
    )
    if best.replicas == 1 and best.stages == 1 and fleet.hosts == 1:
        yield f"The first one is rh.llm.load(..., tensor_parallel={best.tensor})."
    if len(fitting) > _SHOWN:
        yield f"{plural(len(fitting) - _SHOWN, 'slower arrangement')} not shown; --json has all."
    source = "were measured on this machine" if costs.figures != "tables" else "are assumed (tables), not measured"
    yield f"Rates {source}; that of sums, and waits, are simulated."
    if not is_link_known:
        yield (
            "The rate between devices is assumed (tables): found 1 of these devices in this machine, expected 2 to "
            "measure it; give it as --link GB/S MICROSECONDS."
        )
    if calibration is None:
        yield "Nothing was compiled; --measure corrects the estimates by the times of some layers on this machine."
    else:
        ratios = [f"of {plural(texts, 'text')} {ratio:.2f}" for texts, ratio in calibration.decode.items()]
        yield (
            f"Estimates are corrected by layers that were measured: products take {calibration.products:.2f} of the "
            f"expected time, and with that, decode steps {', '.join(ratios)}, those of cached tokens "
            f"{calibration.cached:.2f}, prefill {calibration.prefill:.2f} of the times that are expected of their "
            "parts."
        )
        if (host := calibration.host) is not None:
            further = {"text": host.text, "device of a group": host.device, "stage": host.stage}
            times = [f"{time_text(host.call)} for a step of one text on one device"]
            times += [f"{time_text(seconds)} for each further {what}" for what, seconds in further.items() if seconds]
            unknown = " or ".join(what for what, seconds in further.items() if not seconds)
            yield (
                f"The host takes {', '.join(times)}; a step takes as long at least."
                + f" No time was measured, and none is assumed, for each further {unknown}." * bool(unknown)
            )
    if rates:
        low, high = min(rates), max(rates)
        yield (
            f"Devices that work at the same time read {median(rates) / 1e9:.1f} GB/s each, {low / 1e9:.1f} to "
            f"{high / 1e9:.1f} in {len(rates)} measurements."
            + " This machine changes its speed, so repeat the command: estimates of several devices are as uncertain."
            * (high > _MAX_SPREAD * low)
        )
