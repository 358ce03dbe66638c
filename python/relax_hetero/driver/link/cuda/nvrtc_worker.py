"""A worker process that compiles CUDA source with NVRTC; a script that starts fast and does not import TVM.

NVRTC's front end runs in one thread at a time, so compiling in parallel needs processes; and its crashes end this
process instead of the user's. Requests and replies are JSON objects on the standard streams, each after its length in
eight bytes; the code follows a reply.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


def read_message(stream: IO[bytes]) -> dict[str, Any] | None:
    """Read the next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    text = stream.read(size)
    if len(text) < size:
        return None
    message: dict[str, Any] = json.loads(text)
    return message


def write_message(stream: IO[bytes], message: dict[str, Any], code: bytes = b"") -> None:
    """Write a message, followed by code."""
    text = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(text)) + text + code)
    stream.flush()


class Nvrtc:
    """NVRTC's functions."""

    def __init__(self, path: str) -> None:
        self._library = library = ctypes.CDLL(path)
        library.nvrtcGetErrorString.restype = c_char_p
        library.nvrtcCreateProgram.argtypes = [
            POINTER(c_void_p),
            c_char_p,
            c_char_p,
            c_int,
            POINTER(c_char_p),
            POINTER(c_char_p),
        ]
        library.nvrtcCompileProgram.argtypes = [c_void_p, c_int, POINTER(c_char_p)]
        library.nvrtcDestroyProgram.argtypes = [POINTER(c_void_p)]
        for name in ("ProgramLog", "CUBIN"):
            getattr(library, f"nvrtcGet{name}Size").argtypes = [c_void_p, POINTER(c_size_t)]
            getattr(library, f"nvrtcGet{name}").argtypes = [c_void_p, c_char_p]

    def description(self) -> dict[str, Any]:
        """NVRTC's version and supported architectures (80 for sm_80)."""
        major, minor, count = c_int(), c_int(), c_int()
        self._check(self._library.nvrtcVersion(byref(major), byref(minor)))
        self._check(self._library.nvrtcGetNumSupportedArchs(byref(count)))
        archs = (c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(archs))
        return {"version": f"{major.value}.{minor.value}", "archs": list(archs)}

    def compile(self, source: str, options: list[str], headers: dict[str, str]) -> tuple[bytes | None, str]:
        """Compile a source; returns machine code, or None for errors, and the log."""
        program = c_void_p()
        names, texts = _texts(headers), _texts(headers.values())
        self._check(
            self._library.nvrtcCreateProgram(byref(program), source.encode(), b"kernels.cu", len(headers), texts, names)
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _texts(options))
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                return None, log or self._library.nvrtcGetErrorString(status).decode()
            return self._bytes(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _bytes(self, program: c_void_p, name: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{name}Size")(program, byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{name}")(program, data))
        return data.raw

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._library.nvrtcGetErrorString(status).decode())


def _texts(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def main(path: str) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    nvrtc = Nvrtc(path)
    write_message(replies, nvrtc.description())
    while (request := read_message(sys.stdin.buffer)) is not None:
        code, log = nvrtc.compile(request["source"], request["options"], request["headers"])
        write_message(replies, {"log": log, "bytes": -1 if code is None else len(code)}, code or b"")


if __name__ == "__main__":
    main(sys.argv[1])
