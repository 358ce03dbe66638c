"""The Ray Serve application: a gateway, and replicas of each engine.

Nothing here knows what a model computes; `engine.Engine` is all that serving asks of it.
"""

from __future__ import annotations

# isort: off
import switches  # noqa: F401 (before Ray Serve, which reads them)

# isort: on
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import Engine
from gateway import Gateway, Limits
from ray import serve
from ray.serve.handle import DeploymentHandle
from replica import Replica

NAME = "cluster_serving"
HERE = Path(__file__).resolve().parent
# Folders with the modules of the application, of the model, and of the library.
FOLDERS = (HERE, HERE.parent / "sentence_similarity", HERE.parents[1] / "python")
# Metrics count requests; a log line for each would cost as much as all other work of the gateway on it.
LOGGING = {"enable_access_log": False}


@dataclass(frozen=True)
class Settings:
    """Settings of an application.

    Attributes
    ----------
    replicas : int
        Replicas of each engine; each takes one CPU of Ray's, and computes with one thread.
    gateways : int
        Processes that read and write HTTP; they reserve no CPU.
    wait_s : float
        Seconds that a batch waits for more requests.
    ongoing : int
        Requests that a replica takes at a time: the batch that runs, and those that gather for the next.
    queued : int
        Requests that wait in a gateway for a replica; more are answered with 503.
    health_s : float
        Seconds between two checks of a replica's health, and until a check counts as failed.
    limits : Limits
    """

    replicas: int = 2
    gateways: int = 2
    wait_s: float = 0.002
    ongoing: int = 64
    queued: int = 256
    health_s: float = 10.0
    limits: Limits = field(default_factory=Limits)


def application(engines: Sequence[Engine], settings: Settings) -> serve.Application:
    """Describe the application; `serve.run` starts it.

    Parameters
    ----------
    engines : sequence of Engine
        Each becomes a deployment of its own, called after its path (``embed`` for ``/embed``).
    settings : Settings

    Returns
    -------
    ray.serve.Application
    """
    replicas = [_replicas(engine, settings) for engine in engines]
    gateway = serve.deployment(Gateway).options(
        num_replicas=settings.gateways,
        # More than may wait for replicas, so that the gateway refuses requests itself and gives the reason.
        max_ongoing_requests=2 * (settings.queued + settings.replicas * settings.ongoing),
        ray_actor_options={"num_cpus": 0, "runtime_env": environment()},
        logging_config=LOGGING,
    )
    return gateway.bind(list(engines), replicas, settings.limits)


def deployment_name(engine: Engine) -> str:
    """The name of an engine's deployment."""
    return engine.path.strip("/").replace("/", "-")


def start(engines: Sequence[Engine], settings: Settings, host: str, port: int) -> None:
    """Start Ray Serve in the cluster that this process is connected to, and the application in it.

    Returns when all replicas have passed their first check.

    Parameters
    ----------
    engines : sequence of Engine
    settings : Settings
    host, port
        Address at which each host with a replica or a gateway serves HTTP.
    """
    # The gateway's own limit is reached first: it answers in JSON.
    http = {"host": host, "port": port, "request_timeout_s": settings.limits.seconds + 5}
    serve.start(proxy_location="EveryNode", http_options=http, logging_config=LOGGING)
    serve.run(application(engines, settings), name=NAME)


def replicas_of(engine: Engine) -> DeploymentHandle:
    """A handle that calls an engine's replicas without HTTP."""
    return serve.get_deployment_handle(deployment_name(engine), NAME)


def gateways() -> DeploymentHandle:
    """A handle of the gateways."""
    return serve.get_app_handle(NAME)


def environment(threads: int = 1) -> dict[str, Any]:
    """Ray's runtime environment of a process of the application.

    On other hosts the checkout must be at the same path.
    """
    return {
        "env_vars": {
            "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TVM_NUM_THREADS": str(threads),
            # The tokenizer's own threads would compete with the replicas.
            "TOKENIZERS_PARALLELISM": "false",
        }
    }


def find_modules() -> None:
    """Make the model's modules importable in this process, as they are in the application's."""
    sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]


def _replicas(engine: Engine, settings: Settings) -> serve.Application:
    deployment = serve.deployment(Replica).options(
        name=deployment_name(engine),
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.ongoing,
        max_queued_requests=settings.queued,
        logging_config=LOGGING,
        health_check_period_s=settings.health_s,
        health_check_timeout_s=settings.health_s,
        ray_actor_options={"num_cpus": 1, "runtime_env": environment()},
    )
    return deployment.bind(engine, settings.wait_s)
