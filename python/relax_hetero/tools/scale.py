"""``relax-hetero scale``: the expected speed of a language model for each arrangement of many equal devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..display.console import console, print_json, show, table
from ..display.text import bytes_text, plural, time_text
from .command import command, json_option
from .models import has_weights
from .placement_options import VDeviceParam

if TYPE_CHECKING:
    from ..frontend.auto.cost_model import CostModel, LinkCost
    from ..frontend.gguf.scaling import Arrangement, Fleet

_SHOWN = 12
"""Arrangements in the table; --json has all."""


@command("scale")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--vdevice", type=VDeviceParam(), required=True, help="A device of the fleet.")
@click.option("--devices", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of each host.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--texts",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Texts that are generated at the same time.",
)
@click.option("--context", type=click.IntRange(min=2), metavar="TOKENS", help="Tokens of a text; default as of chat.")
@click.option(
    "--memory-limit", metavar="SIZE", help="Memory of a device, such as 80GiB; default that of this machine's."
)
@click.option(
    "--network",
    nargs=2,
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB/S MICROSECONDS",
    help="Rate and latency between hosts; default 10 Gb/s Ethernet, 1.25 and 1000.",
)
@json_option
def scale_command(
    model: Path,
    vdevice: str | dict[str, Any],
    devices: int,
    hosts: int,
    texts: int,
    context: int | None,
    memory_limit: str | None,
    network: tuple[float, float] | None,
    as_json: bool,
) -> None:
    """Simulate MODEL, a GGUF file or a folder of Hugging Face, on HOSTS times DEVICES equal devices.

    Arrangements are replicas of pipelines of tensor-parallel groups. Nothing is compiled. Rates are measured if the
    device, and for those between devices another one, is in this machine.

    \b
    relax-hetero scale model.gguf --vdevice cuda --devices 8 --texts 256
    relax-hetero scale model.gguf --vdevice cuda --devices 8 --hosts 16 --texts 4096 --network 50 10
    """
    from ..frontend.auto.auto_placement import memory_limits
    from ..frontend.auto.cost_model import LinkCost
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.scaling import Fleet, arrangements
    from ..frontend.language_model_files import read_language_model
    from ..frontend.paged_cache import PagedCache
    from ..llm.model_loader import BATCHES, CONTEXT, default_chunks
    from ..target.hosts import NETWORK_BYTES_PER_SECOND, NETWORK_LATENCY_SECONDS
    from ..target.make_vdevice import parse_vdevices

    if not has_weights(model):
        raise click.UsageError(f"{model} is no language model; expected a GGUF file or a folder of Hugging Face")
    vdevices = parse_vdevices([vdevice])
    file = read_language_model(model)
    sizes = hyperparameters_of(file)
    context = context or min(sizes.context, CONTEXT)
    cache = PagedCache(BATCHES, default_chunks(sizes, vdevices, context), texts, context)
    with console(stderr=True).status("Measuring the devices"):
        costs, link = costs_of(vdevice)
    rate, latency = network or (NETWORK_BYTES_PER_SECOND / 1e9, NETWORK_LATENCY_SECONDS * 1e6)
    fleet = Fleet(hosts, devices, link, LinkCost(rate * 1e9, latency * 1e-6))
    limit = memory_limits(memory_limit, vdevices).get(0)
    fitting = arrangements(file, sizes, cache, vdevices[0], costs, fleet, texts, limit)
    if as_json:
        print_json({"figures": costs.figures, "arrangements": [each.to_json() for each in fitting]})
    else:
        show(_tables(fitting, model.name, costs, fleet))


def costs_of(vdevice: str | dict[str, Any]) -> tuple[CostModel, LinkCost]:
    """Costs of a device, and of the link to another one like it; measured if they are in this machine."""
    from ..frontend.auto.cost_model import CostModel
    from ..target.make_vdevice import parse_vdevices

    kind = vdevice.partition(":")[0] if isinstance(vdevice, str) else vdevice  # two devices, not one twice
    costs = CostModel.measured(parse_vdevices([kind] * 2), "throughput")
    return costs, costs.links[0, 1]


def _tables(fitting: list[Arrangement], name: str, costs: CostModel, fleet: Fleet) -> Any:
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
    yield f"Rates {source}; that of sums, and waits, are simulated. Nothing was compiled."
