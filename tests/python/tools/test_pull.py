"""relax-hetero pull, from a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from relax_hetero.tools.pull import download

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "original/model.safetensors": b"copy",
    "model.gguf": b"GGUF",
    "README.md": b"text",
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for the model a/b."""

    def do_GET(self):
        path, _, _ = self.path.partition("?")
        if path.startswith("/api/models/a/b/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            return self.answer(json.dumps(entries).encode())
        if path.startswith("/api/models/a/b"):
            siblings = [{"rfilename": name} for name in FILES]
            return self.answer(json.dumps({"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode())
        name = path.removeprefix(f"/a/b/resolve/{COMMIT}/")
        if name in FILES:
            return self.answer(FILES[name])
        return self.answer(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, data, status=200, headers=()):
        self.send_response(status)
        fields = {"Content-Length": str(len(data)), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        for key, value in (fields | {"X-Repo-Commit": COMMIT} | dict(headers)).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def pull(tmp_path_factory):
    """Run the command in a process whose hub is here."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("hub")
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(*arguments):
        command = [sys.executable, "-m", "relax_hetero", "pull", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    yield run
    server.shutdown()


def names_in(path):
    return sorted(file.name for file in path.rglob("*") if file.is_file() and ".cache" not in file.parts)


def test_what_load_reads_is_downloaded(pull, tmp_path):
    result = pull("a/b", "--to", tmp_path / "model")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'model'}\n"
    assert names_in(tmp_path / "model") == ["config.json", "model.safetensors"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"weights"


def test_the_only_gguf_file_is_the_model(pull):
    result = pull("a/b", "--include", "*.gguf")
    assert result.returncode == 0, result.stderr
    path = result.stdout.strip()
    assert path.endswith(f"snapshots/{COMMIT}/model.gguf") and open(path, "rb").read() == b"GGUF"


def test_errors_are_one_line(pull, tmp_path):
    for name, message in (
        ("a/none", "error: a/none: cannot be downloaded: "),
        ("a", "expected the owner and the name"),
    ):
        result = pull(name, "--to", tmp_path)
        assert result.returncode and message in result.stderr and "Traceback" not in result.stderr
    result = pull("a/b", "--include", "*.none", "--to", tmp_path / "none")
    assert result.returncode == 1 and "error: a/b: found no file that matches *.none" in result.stderr


def test_the_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Exception, match="pull needs the package huggingface_hub.*pip install 'relax-hetero"):
        download("a/b", None, (), tmp_path)
