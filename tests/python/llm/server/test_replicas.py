"""Replicas of a server by Ray Serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hetero.target.backend import backend_of

httpx = pytest.importorskip("httpx")
pytest.importorskip("ray")

FOLDERS = [str(Path(__file__).resolve().parents[4] / "python"), str(Path(__file__).resolve().parents[2])]


@pytest.mark.parametrize(
    ("outer", "gpus", "expected"),
    [(None, 2, "0,2,1,3"), ("5,6,7,9", 2, "5,7,6,9"), ("5,6,7,9", 0.5, "5,6,7,9"), (None, 1, None), (None, 4, None)],
)
def test_ray_assigns_gpus_with_links(outer, gpus, expected, monkeypatch):
    """GPUs 0 and 2 have a link, and 1 and 3; Ray gives each replica the next ones of the environment."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    from relax_hetero.llm.server import replicas
    from relax_hetero.llm.server.app import Settings

    started, backend = [], type(backend_of("cuda"))
    monkeypatch.setattr(backend, "count", lambda self: 4)
    monkeypatch.setattr(backend, "accesses_peer", lambda self, index, peer: (index - peer) % 2 == 0)

    class Serve:
        """Ray Serve, which runs until Ctrl-C."""

        ingress = staticmethod(lambda app: lambda: app)
        shutdown = staticmethod(lambda: None)

        def deployment(self, _):
            return SimpleNamespace(options=lambda **_: SimpleNamespace(bind=lambda: None))

        def start(self, **_):
            started.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

        def run(self, *_, **__):
            started.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
            raise KeyboardInterrupt

    monkeypatch.setattr(replicas, "_ray_serve", Serve)
    with pytest.raises(KeyboardInterrupt):
        replicas.run_replicas(dict, Settings("toy"), 2, "127.0.0.1", 1, gpus=gpus)
    assert started == [expected, outer]


@pytest.mark.slow
def test_two_replicas_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = f"""
        from llm.toy_model import ToyCodec, ToyModel
        from relax_hetero.llm import Engine
        from relax_hetero.llm.server.app import Settings
        from relax_hetero.llm.server.replicas import run_replicas

        def load():
            return {{"engine": Engine(ToyModel(ends=False), ToyCodec()), "template": None}}

        run_replicas(load, Settings("toy"), 2, "127.0.0.1", {port}, lambda url: print("ready", flush=True))
    """
    paths = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as server:
        assert server.stdout is not None
        assert any(line.startswith("ready") for line in server.stdout)
        url, body = f"http://127.0.0.1:{port}", {"prompt": "Once", "temperature": 0, "max_tokens": 9}
        texts = {httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(8)}
        assert len(texts) == 1 and len(texts.pop()) == 9
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as streamed:
            assert [line for line in streamed.iter_lines() if line][-1] == "data: [DONE]"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": 7}).status_code == 400
        server.send_signal(signal.SIGINT)
        server.wait(60)
