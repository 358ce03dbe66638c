"""Data-parallel replicas of a server on Ray Serve, which balances requests among them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp

from ...backends.cuda import CudaBackend
from ...errors import HeteroError, pip_install
from ...target.backend import backend_of
from .app import Settings, make_app

NAME = "relax_hetero_llm"


def run_replicas(
    # Called in each replica; returns its `engine`, chat `template` and, optionally, `encoder` and `sampling_defaults`
    # of the settings.
    load: Callable[[], Mapping[str, Any]],
    settings: Settings,
    replicas: int,
    # Address that Ray Serve listens on.
    host: str,
    port: int,
    on_ready: Callable[[str], None] | None = None,  # called with the URL once all replicas are ready
    # GPUs of each replica, which sees no others; a fraction is a share of one. Those of a replica access each other's
    # memory where enough GPUs do, unless Ray runs already.
    gpus: float = 0,
) -> None:
    """Serve with several replicas until Ctrl-C.

    Each replica is a Ray process with an engine of its own; limits apply per replica. Raises HeteroError if Ray Serve
    is not installed, or a replica does not start.
    """
    serve = _ray_serve()

    def build() -> ASGIApp:
        model = load()
        own = replace(settings, sampling_defaults=model.get("sampling_defaults", {}))
        return make_app(model["engine"], own, model["template"], model.get("encoder"))

    deployment = serve.deployment(serve.ingress(build)()).options(
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=settings.limits.in_flight,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus, "runtime_env": _runtime_environment()},
        logging_config={"enable_access_log": False},
    )
    http = {"host": host, "port": port, "request_timeout_s": settings.limits.seconds + 5}
    try:
        with _gpus_in_order_of_links(int(gpus)):
            serve.start(http_options=http, logging_config={"enable_access_log": False})
        serve.run(deployment.bind(), name=NAME)
    except (RuntimeError, ValueError) as error:
        serve.shutdown()
        raise HeteroError(f"Ray Serve could not start {replicas} replicas: {error}") from error
    try:
        if on_ready is not None:
            on_ready(f"http://{host}:{port}")
        while True:
            time.sleep(3600)
    finally:
        serve.shutdown()


_VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def _gpus_in_order_of_links(count: int) -> Iterator[None]:
    """Let a Ray that starts here give each replica `count` GPUs that access each other's memory, if there are such.

    Ray assigns GPUs in their order in the environment.
    """
    outer, backend = os.environ.get(_VISIBLE), backend_of(CudaBackend.KIND)
    names = [str(gpu) for gpu in range(backend.count())] if outer is None else outer.split(",")
    order = backend.in_order_of_links(count) if count > 1 else []
    if order == sorted(order):
        yield
        return
    os.environ[_VISIBLE] = ",".join(names[gpu] for gpu in order)
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE)
        if outer is not None:
            os.environ[_VISIBLE] = outer


def _runtime_environment() -> dict[str, Any]:
    """Environment variables of this process that replicas need."""
    names = ("PYTHONPATH", "TVM_NUM_THREADS", "RELAX_HETERO_CACHE")
    return {"env_vars": {name: os.environ[name] for name in names if name in os.environ}}


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise HeteroError(f"--replicas needs Ray Serve; {pip_install('cluster')}") from error
    return serve
