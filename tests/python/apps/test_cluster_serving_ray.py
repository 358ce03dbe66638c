"""The service in a Ray cluster: it gives ONNX Runtime's numbers, counts requests, and survives killed replicas."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from one_service import one_service

pytest.importorskip("ray.serve")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[3]
APP = ROOT / "apps" / "cluster_serving"
for folder in ("sentence_similarity", "cluster_serving"):
    sys.path.insert(0, str(ROOT / "apps" / folder))

from load import drive  # noqa: E402 (found beside the example)
from minilm import SentenceTokenizer, default_cache, onnx_path  # noqa: E402

pytestmark = pytest.mark.slow

# Ray, and a service for the tests of this file: in a process of its own, as Ray's switches are read at its import.
SERVER = """
import sys
sys.path[:0] = [{app!r}]
import run
sys.exit(run.main(["--port", "8521", "--metrics-port", "8522", "--queued", "4", "--gateways", "1"]))
"""
URL = "http://127.0.0.1:8521"
SENTENCES = ["That is a happy person", "Today is a sunny day", "A much longer sentence than all of the others here."]


@pytest.fixture(scope="module")
def server():
    """The process; it answers."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TVM_NUM_THREADS": "1"}
    environment.pop("RELAX_HETERO_CACHE", None)
    command = [sys.executable, "-c", SERVER.format(app=str(APP))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with one_service(), subprocess.Popen(command, env=environment, **pipes) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "The cat sleeps" in line:
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def post(body: dict[str, object]) -> tuple[int, dict[str, object]]:
    """Status and JSON of an answer."""
    import requests

    answer = requests.post(f"{URL}/embed", json=body, timeout=60)
    return answer.status_code, answer.json()


def test_embeddings_are_those_of_onnx_runtime(server):
    cache = default_cache()
    session = onnxruntime.InferenceSession(str(onnx_path(cache, "batch", "sequence")))
    expected = session.run(None, SentenceTokenizer(cache, 32)(SENTENCES))[0]
    status, answer = post({"sentences": SENTENCES})
    assert status == 200
    np.testing.assert_allclose(answer["embeddings"], expected, atol=1e-5)


def test_a_request_of_many_batches_comes_back_in_order(server):
    status, answer = post({"sentences": [SENTENCES[index % 3] for index in range(50)]})
    assert status == 200
    _, once = post({"sentences": SENTENCES})
    np.testing.assert_allclose(answer["embeddings"], [once["embeddings"][index % 3] for index in range(50)], atol=1e-5)


def test_errors_keep_their_status_on_the_way(server):
    status, answer = post({"sentences": ["a"] * 65})
    assert (status, answer) == (413, {"error": "found 65 sentences, expected at most 64"})


def test_it_is_healthy_and_counts(server):
    import requests

    assert requests.get(f"{URL}/healthz", timeout=60).json() == {"status": "ok", "paths": ["/embed"]}
    names = {"ray_cluster_serving_answers_total", "ray_cluster_serving_batch_items_bucket"}
    end = time.monotonic() + 60  # metrics are collected every few seconds
    while names:
        assert time.monotonic() < end, f"not exported: {names}"
        text = requests.get("http://127.0.0.1:8522/metrics", timeout=60).text
        names -= {name for name in names if f"\n{name}{{" in text}
        time.sleep(0.2)


def test_more_requests_than_the_queue_holds_are_refused(server):
    """Two replicas take 64 requests each, and four wait in the gateway; all others are refused."""
    import aiohttp

    left = iter([True] * 250)
    body = json.dumps({"sentences": SENTENCES * 4}).encode()

    async def attack():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send(number):
                async with session.post(f"{URL}/embed", data=body) as answer:
                    content = await answer.json()
                    return "ok" if answer.status == 200 else f"{answer.status} {content['error'][:22]}"

            return await drive(send, 250, lambda: next(left, False))

    endings = asyncio.run(attack()).endings
    assert set(endings) == {"ok", "503 too many requests wait"}
    assert endings["ok"] >= 64


def test_nothing_is_lost_while_a_replica_is_killed():
    command = [sys.executable, APP / "measure.py", "--smoke", "--kills", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "TVM_NUM_THREADS": "1"}
    environment.pop("RELAX_HETERO_CACHE", None)
    # The other service of this file has the usual ports.
    environment |= {"RAY_SERVE_HAPROXY_METRICS_PORT": "9121", "RAY_SERVE_HAPROXY_STATS_PORT": "8424"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kills"]["killed"] == 1 and report["kills"]["lost"] == 0
    assert report["kills"]["requests"] > 4
