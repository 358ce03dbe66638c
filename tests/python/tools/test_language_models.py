"""relax-hetero chat and serve, over a model that computes nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import relax_hetero as rh
import relax_hetero.llm as llm
from llm.gguf_files import MODELS, write_gguf
from llm.toy_model import ToyCodec, ToyModel, alone
from relax_hetero.display.console import console
from relax_hetero.errors import EncoderError
from relax_hetero.frontend.gguf.choose_rules import ChosenReplicas
from relax_hetero.llm import ChatTemplate, TokenizerError
from relax_hetero.llm.expert_counts import ExpertCounts
from relax_hetero.report.page import data_of
from relax_hetero.target.backend import backend_of
from relax_hetero.target.cpu_cores import num_threads
from relax_hetero.tools.cli import cli
from relax_hetero.tools.language_model import LoadingParts
from relax_hetero.transform.pipeline import pipeline_steps


class Codec(ToyCodec):
    """Tokenizer like that of a file."""

    names = tuple(f"<{token}>" for token in range(300))
    begin_id = None
    sampling_defaults = {"temperature": 0.0}  # noqa: RUF012
    chat_template: str | None = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"

    def token(self, name: str) -> None:
        return None


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[dict]]:
    """A file that counts as a model, and the options of its loading."""
    calls: list[dict] = []

    def load(path: Path, **options):
        progress = options.pop("progress")
        for stage, done, total in [("passes", 1, 2), ("passes", 2, 2), ("kernels", 1, 2), ("kernels", 2, 2)]:
            progress(stage, done, total)
        calls.append(options)
        return ToyModel(ends=False, context=options.get("context", 512)), Codec()

    monkeypatch.setattr(llm, "load", load, raising=False)
    path = tmp_path / "toy.gguf"
    path.touch()
    return path, calls


def answer_text(prompt: str, count: int) -> str:
    return ToyCodec().decode(alone(ToyModel(ends=False), list(prompt.encode()), count))


def invoke(*arguments: object, text: str | None = None):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=text)


def test_a_prompt_is_answered(loaded):
    path, calls = loaded
    result = invoke("chat", path, "-p", "Hi", "--temperature", 0, "--max-tokens", 9, "--system", "Be brief")
    assert result.exit_code == 0, result.output
    assert result.stdout == answer_text("s:Be brief;u:Hi;a:", 9) + "\n"
    assert "9 tokens" in result.stderr and "tokens/s" in result.stderr
    assert calls == [{}]


def test_parts_of_loading_without_a_terminal(loaded):
    lines = invoke("chat", loaded[0], "-p", "Hi", "--max-tokens", 1).stderr.splitlines()
    parts = ["reading the file", "lowering the model", "compiling kernels", "linking"]
    assert lines[:4] == [f"toy.gguf: {part}" for part in parts]
    seconds = ", ".join(rf"{part} \d+\.\d s" for part in ("file", "passes", "kernels", "linking"))
    assert re.fullmatch(r"Loaded toy.gguf in \d+\.\d s: " + seconds, lines[4])


def test_seconds_of_parts(monkeypatch):
    """Packing is the time of the passes that pack; what comes from the cache has no other parts."""
    names = [step.name for step in pipeline_steps()]
    packing = names.index("FormQuantizedMatmuls") + 1
    clock = iter([0.0, 1.0, 3.0, 7.0, 7.5, 8.0, 8.5, 9.5, 9.75])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    parts = LoadingParts("a", console(stderr=True).status(""))
    for done in (1, packing - 1, packing, len(names)):
        parts("passes", done, len(names))
    parts("kernels", 9, 9)
    for done in (1, 2):
        parts("CUDA kernels", done, 2)
    parts.end()
    first = {"file": 1.0, "passes": 2.5, "packing": 4.0}
    assert parts.seconds == {**first, "kernels": 0.5, "CUDA kernels": 1.5, "linking": 0.25}
    clock = iter([0.0, 1.5])
    cached = LoadingParts("a", console(stderr=True).status(""))
    cached.end()
    assert cached.seconds == {"file": 1.5}


def test_a_conversation_goes_on_until_it_is_reset(loaded):
    path, _ = loaded
    lines = "Hi\nMore\n/reset\nHi\n/what\n\n/exit\nnever\n"
    result = invoke("chat", path, "--temperature", 0, "--max-tokens", 5, text=lines)
    first = answer_text("u:Hi;a:", 5)
    assert result.stdout.split() == [first, answer_text(f"u:Hi;a:{first};u:More;a:", 5), first]
    assert result.exit_code == 0 and "/reset starts a new conversation" in result.stderr


def test_texts_are_gone_on_with_as_they_are(loaded):
    path, _ = loaded
    result = invoke("chat", path, "--raw", "--temperature", 0, "--max-tokens", 5, "-p", "Once")
    assert result.stdout == answer_text("Once", 5) + "\n"


def test_a_page_has_the_times_of_each_answer(loaded, tmp_path):
    page = tmp_path / "timings.html"
    options = ["--temperature", 0, "--max-tokens", 5, "--html", page]
    assert invoke("chat", loaded[0], *options, text="Hi\nMore\n").exit_code == 0
    data = data_of(page.read_text())
    first, second = data["chat"]["answers"]
    assert (data["kind"], data["title"]) == ("chat", "toy")
    assert "".join(piece["text"] for piece in first["pieces"]) == answer_text("u:Hi;a:", 5)
    for answer in (first, second):
        assert answer["tokens"] == sum(piece["tokens"] for piece in answer["pieces"]) == 5
        assert 0 < answer["first_token_seconds"] <= sum(piece["seconds"] for piece in answer["pieces"])
        assert answer["tokens_per_second"] > 0 and answer["prompt_tokens_per_second"] > 0
    assert (first["prompt_tokens"], first["new_tokens"]) == (len("u:Hi;a:"),) * 2


def test_a_page_that_cannot_be_written_is_refused_before_the_model_is_loaded(loaded, tmp_path):
    result = invoke("chat", loaded[0], "-p", "Hi", "--html", tmp_path / "absent" / "page.html")
    assert result.exit_code == 1 and "there is no folder" in result.stderr and loaded[1] == []


def test_errors_end_a_prompt_but_not_a_conversation(loaded):
    path, _ = loaded
    result = invoke("chat", path, "--context", 20, "--temperature", 0, "--max-tokens", 2, text="a" * 50 + "\nHi\n")
    assert "expected at most 19" in result.stderr and result.stdout == answer_text("u:Hi;a:", 2) + "\n"
    result = invoke("chat", path, "-p", "a" * 600)
    assert result.exit_code == 1 and result.stderr.splitlines()[-1].startswith("error: prompt: found 605 tokens")


def test_options_reach_the_model(loaded):
    path, calls = loaded
    placing = ["--vdevice", "llvm", "--vdevice", json.dumps({"kind": "llvm"})]
    rules = ["--placement", "blk.[0-8].*=llvm:1", "--placement", "*=llvm:0"]
    result = invoke("chat", path, *placing, *rules, "--slots", 3, "-p", "Hi", "--max-tokens", 1)
    assert result.exit_code == 0, result.output
    assert invoke("chat", path, "--placement", "auto", "-p", "Hi", "--max-tokens", 1).exit_code == 0
    assert invoke("chat", path, "--memory-limit", "cuda=24GiB", "-p", "Hi", "--max-tokens", 1).exit_code == 0
    assert calls == [
        {
            "vdevices": ["llvm", {"kind": "llvm"}],
            "placement": {"blk.[0-8].*": "llvm:1", "*": "llvm:0"},
            "slots": 3,
        },
        {"placement": "auto"},
        {"placement": "auto", "memory_limit": {"cuda": "24GiB"}},
    ]


def test_threads_are_set_before_the_model_is_loaded(loaded, monkeypatch):
    path, calls = loaded
    monkeypatch.setenv("TVM_NUM_THREADS", "7")
    seen = []
    loading = llm.load
    monkeypatch.setattr(llm, "load", lambda *args, **options: seen.append(num_threads()) or loading(*args, **options))
    assert invoke("chat", path, "--threads", 1, "-p", "Hi", "--max-tokens", 1).exit_code == 0
    assert seen == [1] and len(calls) == 1
    assert invoke("chat", path, "--threads", 0, "-p", "Hi").exit_code == 2


def test_options_reach_the_draft_model(loaded):
    path, calls = loaded
    drafts = ["--model-draft", path, "--draft-vdevice", "llvm", "--draft-placement", "*=llvm", "--verify-drafts"]
    assert invoke("chat", path, *drafts, "-p", "Hi", "--max-tokens", 1).exit_code == 0
    expected = {"draft": path, "draft_vdevices": ["llvm"], "draft_placement": {"*": "llvm"}, "verify_drafts": True}
    assert calls == [expected]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--placement", "auto", "--placement", "a=llvm"], "exclude each other"),
        (["--placement", "blk"], "is not PATTERN=DEVICE"),
        (["--placement", "a=llvm", "--memory-limit", "llvm=1GiB"], "excludes rules"),
        (["--memory-limit", "cuda=1GiB", "--memory-limit", "cuda=2GiB"], "--memory-limit names 'cuda' twice"),
        (["--expert-counts", __file__], "--expert-counts is for --placement auto"),
        (["--placement", "a=llvm", "--placement", "a=cuda"], "twice"),
        (["--draft-vdevice", "cuda"], "--draft-vdevice and --draft-placement are for the model of --draft"),
        (["--draft", __file__, "--draft-placement", "auto", "--draft-placement", "auto"], "--draft-placement auto and"),
        (["--raw", "--system", "a"], "--raw works without a chat template"),
    ],
)
def test_options_that_exclude_each_other(loaded, arguments, message):
    result = invoke("chat", loaded[0], *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_wrong_parameters_are_refused_before_anything_is_loaded(loaded):
    path, calls = loaded
    result = invoke("chat", path, "--top-p", 2)
    assert (result.exit_code, calls) == (1, []) and "top_p: found 2, expected 0 to 1" in result.stderr


def test_a_template_of_ones_own(loaded, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("[{{ messages[-1].content }}]")
    options = ["--temperature", 0, "--max-tokens", 5, "-p", "Hi"]
    assert invoke("chat", loaded[0], "--chat-template", template, *options).stdout == answer_text("[Hi]", 5) + "\n"
    template.write_text("{% if %}")
    result = invoke("chat", loaded[0], "--chat-template", template, *options)
    assert result.exit_code == 1 and "the chat template is invalid" in result.stderr


def test_models_without_a_template(loaded, monkeypatch):
    monkeypatch.setattr(Codec, "chat_template", None)
    result = invoke("chat", loaded[0], "-p", "Hi")
    assert result.exit_code == 1 and "found no chat template" in result.stderr
    with pytest.raises(TokenizerError):
        ChatTemplate.from_tokenizer(Codec())
    monkeypatch.setattr(Codec, "token", lambda self, name: 7 if name == "<|im_start|>" else None)
    result = invoke("chat", loaded[0], "-p", "Hi", "--max-tokens", 1)
    first = "The chat template is guessed from the token <|im_start|>, since the file has none; "
    assert result.exit_code == 0 and any(line.startswith(first) for line in result.stderr.splitlines())
    assert ChatTemplate.from_tokenizer(Codec(), "{{ messages }}").guessed_from is None


def test_many_slots_have_large_batches(loaded):
    for slots, batches in ((12, None), (16, (1, 2, 4, 8, 16)), (40, (1, 2, 4, 8, 16, 32))):
        assert invoke("chat", loaded[0], "--slots", slots, "-p", "Hi", "--max-tokens", 1).exit_code == 0
        assert loaded[1][-1].get("batches") == batches


def test_the_server_answers_until_it_is_stopped(loaded, monkeypatch, tmp_path):
    import relax_hetero.llm.server.serve as run

    servers, ready = [], threading.Event()
    make = run.make_server
    monkeypatch.setattr(
        run, "make_server", lambda *given, **options: servers.append(make(*given, **options)) or servers[-1]
    )
    serve = run.serve
    address: list[str] = []

    def watched(engine, settings, template, host, port, on_ready, encoder):
        def told(url: str) -> None:
            on_ready(url)
            address.append(url)
            ready.set()

        serve(engine, settings, template, host, port, told, encoder)

    monkeypatch.setattr(run, "serve", watched)
    results = []
    counts = tmp_path / "counts.json"
    monkeypatch.setattr(ToyModel, "expert_counts", ExpertCounts([], []), raising=False)
    arguments = ["serve", loaded[0], "--port", 0, "--api-key", "secret", "--max-tokens", 7, "--count-experts", counts]
    work = threading.Thread(target=lambda: results.append(invoke(*arguments)))
    work.start()
    assert ready.wait(60)
    url, headers = f"{address[0]}/v1/completions", {"authorization": "Bearer secret"}
    answer = httpx.post(url, json={"prompt": "Once", "max_tokens": 7}, headers=headers)  # greedy by default
    assert answer.json()["model"] == "toy" and answer.json()["choices"][0]["text"] == answer_text("Once", 7)
    assert httpx.post(url, json={"prompt": "Once"}).status_code == 401
    counts.unlink()  # written when the server starts, and again when it ends
    servers[0].should_exit = True
    work.join(60)
    assert results[0].exit_code == 0 and f"toy: {address[0]}/v1" in results[0].stderr
    assert json.loads(counts.read_text()) == {"expert_counts": {}} and loaded[1][0]["count_experts"]


def test_encoders_are_served(loaded, monkeypatch):
    """Options of texts that are generated do not apply to them."""
    import relax_hetero.llm.server.serve as run

    def load(path, **options):
        raise EncoderError("encodes texts")

    served = []
    monkeypatch.setattr(llm, "load", load)
    monkeypatch.setattr(llm, "Encoder", lambda *given: given, raising=False)
    monkeypatch.setattr(run, "serve", lambda *given: served.append(given))
    for options in (["--context", 9], ["--embedding-model", loaded[0]], ["--draft", loaded[0]], ["--verify-drafts"]):
        result = invoke("serve", loaded[0], *options)
        assert result.exit_code == 1 and f"found {options[0]}, which does not apply to an encoder" in result.stderr
    result = invoke("serve", loaded[0], "--placement", "*=llvm", "--generation-config", "none")
    assert result.exit_code == 0, result.output
    [(engine, settings, template, *_, encoder)] = served
    assert (engine, template, settings.sampling_defaults) == (None, None, {})
    assert encoder == (loaded[0], None, {"*": "llvm"})


def test_experts_are_counted_in_one_process(loaded):
    result = invoke("serve", loaded[0], "--replicas", 2, "--count-experts", "counts.json")
    assert result.exit_code == 2 and "expected it without --replicas" in result.output


def test_a_port_that_is_taken(loaded):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        result = invoke("serve", loaded[0], "--port", listener.getsockname()[1])
    assert result.exit_code == 1 and "cannot listen there" in result.stderr


def test_packages_that_are_not_installed(loaded, monkeypatch):
    import builtins

    plain = builtins.__import__

    def without(name, *arguments, **options):
        if name == "fastapi":
            raise ImportError("no fastapi", name="fastapi")
        return plain(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    result = invoke("serve", loaded[0])
    assert result.exit_code == 1 and "pip install 'relax-hetero[llm,serve]'" in result.stderr


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A small model, and two GPUs that are not there; options of a served model, and arguments of replicas."""
    import relax_hetero.llm.server.replicas as replicas
    import relax_hetero.llm.server.serve as run

    path, served = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16", sparse=True), []
    for kind in ("cuda", "opencl"):
        monkeypatch.setattr(type(backend_of(kind)), "count", lambda self: 2)
    monkeypatch.setattr(replicas, "run_replicas", lambda loader, *given: served.append((loader.model_options, *given)))
    monkeypatch.setattr("relax_hetero.tools.serve._Loader.__call__", lambda self: _served(self, served))
    monkeypatch.setattr(run, "serve", lambda *given: None)
    return path, served


def _served(loader, served):
    served.append((loader.model_options,))
    return {"engine": None, "template": None, "encoder": None, "sampling_defaults": {}}


def test_replicas_are_chosen(two_gpus, monkeypatch):
    """Two GPUs of a small model have a replica each; where shared layers are faster, there is one process."""
    path, served = two_gpus
    arguments = ["serve", path, "--vdevice", "cuda", "--replicas", "auto", "--slots", 10]
    result = invoke(*arguments, "--memory-limit", "cuda=20GiB")
    assert result.exit_code == 0, result.output
    assert "2 replicas of 1 device, about " in result.stderr and "of 10 texts at the same time" in result.stderr
    options, _, count, *_, gpus = served.pop()
    assert (count, gpus, options.vdevices, options.placement, options.slots) == (2, 1.0, ["cuda"], None, 5)
    assert options.memory_limit is None
    chosen = ChosenReplicas(1, 2, 10, 5, {"*": "vdevice[0:2]"}, "shared")
    monkeypatch.setattr("relax_hetero.frontend.gguf.choose_rules.choose_replicas", lambda *_: chosen)
    assert invoke(*arguments).exit_code == 0
    ((options,),) = served
    assert [str(vdevice.target.kind.name) for vdevice in options.vdevices] == ["cuda", "cuda"]
    assert options.placement == {"*": "vdevice[0:2]"} and (options.slots, options.max_batch) == (10, 5)
    monkeypatch.setattr(type(backend_of("cuda")), "count", lambda self: 4)
    monkeypatch.setattr(type(backend_of("cuda")), "accesses_peer", lambda self, *pair: sorted(pair) == [1, 3])
    served.clear()
    assert invoke(*arguments).exit_code == 0
    assert [vdevice.vdevice_id for vdevice in served.pop()[0].vdevices] == [1, 3]  # which have a link
    loads = []
    monkeypatch.setattr(llm, "load", lambda path, **given: loads.append(given.get("batches")))
    for batch in (5, 8, 1, 100):
        dataclasses.replace(options, max_batch=batch, slots=200).load()
    assert loads == [(1, 2, 4, 5), None, (1,), (1, 2, 4, 8, 16, 32, 64, 100)]


@pytest.mark.parametrize(
    ("devices", "replicas", "gpus"),
    [
        *((["cuda"], 2, 1.0), (["cuda"], 3, 0.5), (["cuda"], 4, 0.5), (["cuda", "cuda"], 1, 2.0)),
        *((["cuda:1"], 2, 0), (["opencl"], 2, 0), (["llvm"], 2, 0)),
    ],
)
def test_gpus_of_replicas(devices, replicas, gpus, two_gpus):
    """Ray hides other GPUs from a replica, whose first one is cuda:0; three shares of 2/3 would not fit on two."""
    path, served = two_gpus
    named = [part for device in devices for part in ("--vdevice", device)]
    assert invoke("serve", path, *named, "--replicas", replicas).exit_code == 0
    assert served[0][-1] == gpus


def test_replicas_that_need_more_gpus_than_there_are(two_gpus):
    result = invoke("serve", two_gpus[0], "--vdevice", "cuda", "--vdevice", "cuda", "--replicas", 2)
    assert result.exit_code == 2 and not two_gpus[1]
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert "--replicas 2 with 2 devices of cuda each need 4, found 2" in shown


def test_replicas_are_chosen_for_equal_gpus(two_gpus, monkeypatch):
    archs = {"cuda:0": "sm_90a", "cuda:1": "sm_80"}
    parse = lambda names: [rh.VDevice({"kind": "cuda", "arch": archs[name]}, int(name[-1])) for name in names]  # noqa: E731
    monkeypatch.setattr("relax_hetero.target.make_vdevice.parse_vdevices", parse)
    result = invoke("serve", two_gpus[0], "--vdevice", "cuda", "--replicas", "auto")
    shown = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 1 and "found GPUs of different kinds" in shown and "sm_80" in shown, shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "chooses among all GPUs of a kind, found --vdevice llvm"),
        (["--vdevice", "cuda:0"], "found --vdevice ['cuda:0']"),
        (["--vdevice", "cuda", "--placement", "*=cuda"], "which chooses the placement"),
        (["--vdevice", "cuda", "--count-experts", "counts.json"], "expected it without --replicas"),
        (["--vdevice", "cuda", "--memory-limit", "cuda=1000"], "found a limit of 1,000 bytes for a device"),
    ],
)
def test_errors_of_replicas(options, message, two_gpus):
    result = invoke("serve", two_gpus[0], "--replicas", "auto", *options)
    assert result.exit_code in (1, 2) and message in " ".join(result.stderr.replace("│", " ").split())


def test_replicas_of_what_is_no_model(two_gpus, tmp_path):
    """It is refused before Ray starts."""
    (tmp_path / "other.gguf").write_bytes(b"other")
    (tmp_path / "folder").mkdir()
    for name, message in (("other.gguf", "found b'othe'"), ("folder", "expected a folder with config.json")):
        result = invoke("serve", tmp_path / name, "--replicas", 2)
        assert result.exit_code == 1 and message in " ".join(result.stderr.split()) and not two_gpus[1]
    result = invoke("serve", two_gpus[0], "--replicas", "few")
    assert result.exit_code == 2 and "'few' is not a number of replicas, or auto" in result.stderr


@pytest.mark.parametrize("replicas", ["auto", 2])
def test_replicas_without_a_gpu(replicas, two_gpus, monkeypatch):
    monkeypatch.setattr(type(backend_of("cuda")), "count", lambda self: 0)
    result = invoke("serve", two_gpus[0], "--vdevice", "cuda", "--replicas", replicas)
    assert result.exit_code == 1 and "found no cuda device, expected one or more" in result.stderr
