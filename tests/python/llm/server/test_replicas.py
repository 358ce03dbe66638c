"""Replicas of a server by Ray Serve."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("ray")

FOLDERS = [str(Path(__file__).resolve().parents[4] / "python"), str(Path(__file__).resolve().parents[2])]


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
