"""Program that renders an untrusted chat template.

It runs in a process of its own with limited memory and time, and imports nothing of this package. The parent restarts
it when it has exited.

It reads requests from stdin, writes an answer to each to stdout, and exits at the end of stdin. The first request is
the template: ``{"path", "source"}``, answered with the template's string literals; all others are values of a call,
answered with the prompt. Requests are a length and JSON, answers a status, a length, and text.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_MEMORY_BYTES = 512 << 20  # limit of the process's address space
MEMORY_TEXT = f"takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
MAX_PROMPT = 16 << 20  # maximum number of characters of a prompt
MAX_ANSWER = 4 * MAX_PROMPT  # maximum number of bytes of an answer
MAX_ERROR = 500  # maximum number of characters of an error's message
_MAX_LITERALS, MAX_LITERAL = 1000, 64
"""Maximum number of a template's literals, and of characters of one; texts that templates search for are short."""
REQUEST, ANSWER = struct.Struct("<Q"), struct.Struct("<BQ")
DONE, REFUSED, FAILED, BEYOND_LIMITS = range(4)
"""Statuses: success; refusal by the template (``raise_exception``); error in the template; exceeded limit."""
BEYOND_MEMORY = 3  # exit code of a process that has seen itself use more than `MAX_MEMORY_BYTES`
_WATCH_SECONDS = 0.01  # interval at which a process watches its memory where the system does not limit it
_ESCAPED = re.compile("[^\x00-\x7f\ufdd0-\ufdef]")
_PARENT_SECONDS = 5.0
"""Interval at which an idle process checks that its parent lives, in case another process holds the pipe open."""


class Refusal(Exception):
    """Raised by ``raise_exception`` of a template."""


class BeyondLimits(Exception):
    """The prompt is too long."""


def main() -> None:
    """Answer requests until the end of stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    render: Callable[[dict[str, Any]], str] | None = None
    seconds = list(map(float, sys.argv[1:]))  # limits of a request: processor time, wall time
    # Their signals, SIGPROF and SIGALRM, kill the process. Windows has neither: `ChatTemplate` refuses to start there.
    timers = (signal.ITIMER_PROF, signal.ITIMER_REAL)
    parent = os.getppid()
    while (request := _read(parent)) is not None:
        for timer, limit in zip(timers, seconds, strict=True):
            signal.setitimer(timer, limit)
        status, answer = DONE, ""
        try:
            values = json.loads(request)
            if render is None:
                render, literals = _compile(values)
                answer = json.dumps(literals)
            else:
                answer = render(values)
        except Refusal as error:
            status, answer = REFUSED, str(error)[:MAX_ERROR]
        except MemoryError:
            status, answer = BEYOND_LIMITS, MEMORY_TEXT
        except BeyondLimits as error:
            status, answer = BEYOND_LIMITS, str(error)
        except Exception as error:
            name = type(error).__name__
            line = f" in line {getattr(error, 'lineno', 0)}" if name == "TemplateSyntaxError" else ""
            status, answer = FAILED, f"{name}{line}: {error}"[:MAX_ERROR]
        data = answer.encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(ANSWER.pack(status, len(data)) + data)
        sys.stdout.buffer.flush()
        for timer in timers:
            signal.setitimer(timer, 0)


def _read(parent: int) -> bytes | None:
    """Read the next request; None at the end of stdin, or if the parent has exited."""
    while not select.select([0], [], [], _PARENT_SECONDS)[0]:
        if os.getppid() != parent:
            return None
    head = sys.stdin.buffer.read(REQUEST.size)
    return sys.stdin.buffer.read(*REQUEST.unpack(head)) if len(head) == REQUEST.size else None


def _compile(setup: dict[str, Any]) -> tuple[Callable[[dict[str, Any]], str], list[str]]:
    """Compile a template; return a function that renders it, and the literals of its expressions."""
    sys.path += setup["path"]
    import jinja2.nodes
    import jinja2.sandbox

    _limit_memory()
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_extension()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    tree = environment.parse(setup["source"])
    values = [node.value for node in tree.find_all(jinja2.nodes.Const)]
    literals = {value for value in values if isinstance(value, str) and len(value) <= MAX_LITERAL}
    template = environment.from_string(tree)

    def render(values: dict[str, Any]) -> str:
        now = datetime.datetime.now()  # the same time for all uses in the template
        parts: list[str] = []
        length = 0
        for part in template.generate({"strftime_now": now.strftime, **values}):
            length += len(part)
            if length > MAX_PROMPT:
                raise BeyondLimits(f"makes a prompt of more than {MAX_PROMPT:,} characters")
            parts.append(part)
        return "".join(parts)

    return render, sorted(literals)[:_MAX_LITERALS]


def _limit_memory() -> None:
    """Limit the memory of this process, and keep it from writing files."""
    import resource

    for limit, value in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MAX_MEMORY_BYTES)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except ValueError:  # macOS reserves more address space than that, and so refuses the last one
            threading.Thread(target=_watch_memory, daemon=True).start()


def _watch_memory() -> None:
    """End this process when it has used too much memory."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1 << 10
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit <= MAX_MEMORY_BYTES:
        time.sleep(_WATCH_SECONDS)
    os._exit(BEYOND_MEMORY)


def _generation_extension() -> type:
    """Extension for the tag ``{% generation %}`` of transformers, which matters in training only."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> list[Node]:
            next(parser.stream)
            body: list[Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    return Generation


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without jinja2's HTML escapes; markers of user text are not escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, **options)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    raise Refusal(message)


if __name__ == "__main__":
    main()
