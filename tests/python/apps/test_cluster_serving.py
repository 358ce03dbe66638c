"""Serving without a cluster: requests are read, refused, gathered into batches, and repeated when a replica dies."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[3]
for folder in ("sentence_similarity", "cluster_serving"):
    sys.path.insert(0, str(ROOT / "apps" / folder))

import replica  # noqa: E402 (found beside the example)
from embeddings import KNOWN, Embedder, Sentences  # noqa: E402
from engine import RefusedError  # noqa: E402
from gateway import Gateway, Limits  # noqa: E402
from load import Load, drive  # noqa: E402
from ray.exceptions import ActorDiedError, RayActorError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402
from starlette.requests import Request  # noqa: E402


@pytest.fixture
def new_replica(monkeypatch):
    """A new class: Ray Serve keeps one queue for a class, which belongs to the loop that used it first."""
    context = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=64))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    return importlib.reload(replica).Replica


class Doubling:
    """An engine and its model, whose items are numbers; it stands for any task other than embeddings."""

    path = "/double"
    most_items = 8
    batch_items = 4

    def __init__(self):
        self.batches = []
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.held = False

    def read(self, request):
        return request["numbers"]

    def write(self, request, results):
        return json.dumps(list(results)).encode()

    def load(self):
        return self

    def run(self, items):
        self.batches.append(list(items))
        if self.held:
            self.begun.release()
            self.go_on.acquire(timeout=60)
        if "fail" in items:
            raise ValueError("no number")
        return [2 * item for item in items]

    def check(self):
        if self.run([1]) != [2]:
            raise RuntimeError("wrong")


class Handle:
    """Handle of a deployment as Ray Serve gives it, with scripted endings."""

    def __init__(self, *endings):
        self.endings = list(endings)
        self.answer = self.process = self
        self.asked = []

    async def remote(self, items=()):
        self.asked.append(items)
        ending = self.endings.pop(0) if self.endings else None
        if isinstance(ending, BaseException):
            raise ending
        if ending is not None:
            await ending
        return [2 * item for item in items]


def ask(gateway, path="/double", body=b'{"numbers": [1, 2]}', method="POST"):
    """Status, JSON and headers of the gateway's answer."""
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    scope["server"] = ("test", 80)

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    response = asyncio.run(gateway(Request(scope, receive)))
    return response.status_code, json.loads(response.body), response.headers


def gateway(*endings, **limits):
    handle = Handle(*endings)
    return Gateway([Doubling()], [handle], Limits(**limits)), handle


def test_a_request_is_answered():
    assert ask(gateway()[0])[:2] == (200, [2, 4])
    assert ask(gateway()[0], "/healthz", b"", "GET")[:2] == (200, {"status": "ok", "paths": ["/double"]})


def test_a_request_that_died_with_its_replica_is_computed_again():
    served, handle = gateway(ActorDiedError(), RayActorError())
    assert ask(served)[:2] == (200, [2, 4])
    assert handle.endings == []


def test_a_request_that_kills_replicas_does_not_kill_all():
    served, handle = gateway(*[ActorDiedError()] * 5, repeats=2)
    status, answer, headers = ask(served)
    assert status == 503 and "no replica" in answer["error"] and headers["retry-after"] == "1"
    assert len(handle.endings) == 2


def test_an_error_of_the_model_is_not_repeated_nor_shown():
    served, handle = gateway(ValueError("secret"), None)
    status, answer, _ = ask(served)
    assert (status, answer) == (500, {"error": "the model failed: ValueError"})
    assert handle.endings == [None]


def test_a_full_queue_and_a_late_answer():
    status, answer, headers = ask(gateway(BackPressureError(9, 8))[0])
    assert status == 503 and "too many" in answer["error"] and headers["retry-after"] == "1"
    status, answer, _ = ask(gateway(asyncio.sleep(60), seconds=0.01)[0])
    assert (status, answer) == (504, {"error": "not answered within 0.01 s"})


@pytest.mark.parametrize(
    "path, body, method, status, message",
    [
        ("/other", b"{}", "POST", 404, "found path /other, expected one of /double, /healthz"),
        ("/double", b"", "GET", 405, "found method GET for /double, expected POST"),
        ("/healthz", b"", "POST", 405, "found method POST for /healthz, expected GET"),
        ("/double", b"{", "POST", 400, "found a body that is no JSON"),
        ("/double", b"[" * 5000, "POST", 400, "found a body that is no JSON"),
        ("/double", b"\xff\xfe{}", "POST", 400, "found a body that is no JSON"),
        ("/double", b"[1]", "POST", 400, "found JSON of type list, expected an object"),
        ("/double", b'{"numbers": []}', "POST", 413, "found 0 items in a request, expected 1 to 8"),
        ("/double", json.dumps({"numbers": [1] * 9}).encode(), "POST", 413, "found 9 items in a request"),
        ("/double", b" " * 200, "POST", 413, "found a body of more than 100 bytes, expected at most 100"),
    ],
)
def test_the_gateway_refuses_malformed_requests(path, body, method, status, message):
    actual, answer, _ = ask(gateway(bytes=100 if len(body) < 1000 else 10_000)[0], path, body, method)
    assert actual == status and message in answer["error"]


@pytest.mark.parametrize(
    "request_, status, message",
    [
        ({"sentences": 3}, 400, "found int as sentences, expected a list of 1 to 4 texts"),
        ({"sentences": []}, 400, "found none as sentences"),
        ({}, 400, "found none as sentences"),
        ({"sentences": "one"}, 400, "found str as sentences"),
        ({"sentences": ["a", 3]}, 400, "found int as sentence 1, expected a text"),
        ({"sentences": ["a"], "model": "x"}, 400, "found fields model, expected sentences and encoding"),
        ({"sentences": ["a"], "encoding": "png"}, 400, "found encoding 'png', expected one of float, base64"),
        ({"sentences": ["a"], "encoding": []}, 400, "found encoding [], expected one of float, base64"),
        ({"sentences": ["a"] * 5}, 413, "found 5 sentences, expected at most 4"),
        ({"sentences": ["a" * 11]}, 413, "found 11 characters in sentence 0, expected at most 10"),
    ],
)
def test_embeddings_refuse_malformed_requests(request_, status, message):
    with pytest.raises(RefusedError) as refusal:
        Embedder(most_items=4, characters=10).read(request_)
    assert refusal.value.status == status and message in str(refusal.value)


def test_embeddings_in_both_encodings():
    rows = np.random.default_rng(0).standard_normal((2, 384)).astype("float32")
    engine = Embedder()
    assert engine.read({"sentences": ["a", "b"], "encoding": "base64"}) == ["a", "b"]
    numbers = json.loads(engine.write({}, rows))["embeddings"]
    texts = json.loads(engine.write({"encoding": "base64"}, rows))["embeddings"]
    np.testing.assert_array_equal(np.array(numbers, "float32"), rows)
    np.testing.assert_array_equal([np.frombuffer(base64.b64decode(text), "<f4") for text in texts], rows)


@pytest.mark.parametrize("cosine, healthy", [(0.943, True), (0.9, False), (float("nan"), False)])
def test_a_model_that_computes_something_else_is_not_healthy(cosine, healthy):
    def tokens(sentences):
        assert tuple(sentences) == KNOWN
        return {"input_ids": None, "attention_mask": None}

    rows = np.array([[1, 0], [cosine, np.sqrt(1 - cosine**2)]], "float32")
    model = Sentences(tokens, {"main": lambda ids, mask: rows})
    if healthy:
        model.check()
    else:
        with pytest.raises(RuntimeError, match="similarity"):
            model.check()


def test_requests_that_come_together_share_a_batch(new_replica):
    engine = Doubling()

    async def ask_replica():
        replica = new_replica(engine, wait_s=0.001)
        engine.held = True
        requests = [[1], [2], [3, 4], [5, 6], [7]]
        first = asyncio.create_task(replica.answer(requests[0]))
        assert await asyncio.to_thread(engine.begun.acquire, timeout=60)
        tasks = [asyncio.create_task(replica.answer(request)) for request in requests[1:]]
        await asyncio.sleep(0)  # they enter the queue
        engine.held = False
        engine.go_on.release()
        return await asyncio.gather(first, *tasks)

    assert asyncio.run(ask_replica()) == [[2], [4], [6, 8], [10, 12], [14]]
    assert engine.batches[0] == [1]
    # As many requests as fit into four items; a request that did not fit may be overtaken by the next one.
    assert all(len(batch) <= 4 for batch in engine.batches)
    assert engine.batches[1] == [2, 3, 4]
    assert sorted(sum(engine.batches, [])) == [1, 2, 3, 4, 5, 6, 7]


def test_a_request_larger_than_a_batch_is_cut():
    served, handle = gateway(ActorDiedError())
    assert ask(served, body=b'{"numbers": [1, 2, 3, 4, 5, 6]}')[:2] == (200, [2, 4, 6, 8, 10, 12])
    assert sorted(handle.asked) == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6]]


def test_a_replica_refuses_more_than_a_batch(new_replica):
    async def ask_replica():
        replica = new_replica(Doubling())
        with pytest.raises(ValueError, match="found 5 items, expected at most 4"):
            await replica.answer([1] * 5)
        return await replica.answer([1] * 4)

    assert asyncio.run(ask_replica()) == [2] * 4


def test_a_replica_is_healthy_as_long_as_its_model_is(new_replica):
    engine = Doubling()

    async def check():
        replica = new_replica(engine)
        await replica.check_health()
        engine.check = lambda: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await replica.check_health()

    asyncio.run(check())


def test_load_counts_every_ending():
    async def send(number):
        if number == 2:
            raise OSError("gone")
        return "ok" if number != 3 else "wrong result"

    left = iter([True] * 6)
    load = asyncio.run(drive(send, 2, lambda: next(left, False)))
    assert load.endings == {"ok": 4, "OSError: gone": 1, "wrong result": 1}
    assert load.lost == 2 and load.rate == 4 / load.seconds
    assert Load(latencies=[3.0, 1.0, 2.0]).percentile(0.5) == 2.0
    assert Load(latencies=[3.0, 1.0, 2.0]).percentile(0.99) == 3.0
