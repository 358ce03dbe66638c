"""Errors with ONNX Runtime's names, codes and texts; each is a `HeteroError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relax_hetero.errors import BindingError, FrontendError, HeteroError


class _StatusError(HeteroError):
    """An error with a status code of ONNX Runtime."""

    code = 1
    status = "FAIL"

    @classmethod
    def of(cls, text: str) -> _StatusError:
        """The error with ONNX Runtime's prefix before `text`."""
        return cls(f"[ONNXRuntimeError] : {cls.code} : {cls.status} : {text}")


class Fail(_StatusError):
    """A model or call that fails."""


class InvalidArgument(_StatusError, ValueError):
    """Arguments that do not fit the model."""

    code, status = 2, "INVALID_ARGUMENT"


class NoSuchFile(_StatusError):
    """A model file that cannot be read."""

    code, status = 3, "NO_SUCHFILE"


class NoModel(_StatusError):
    """A session without a model."""

    code, status = 4, "NO_MODEL"


class EngineError(_StatusError):
    """An error of a device."""

    code, status = 5, "ENGINE_ERROR"


class RuntimeException(_StatusError):
    """A call that fails while it runs."""

    code, status = 6, "RUNTIME_EXCEPTION"


class InvalidProtobuf(_StatusError):
    """A file that is not an ONNX model."""

    code, status = 7, "INVALID_PROTOBUF"


class ModelLoaded(_StatusError):
    """A session that has a model already."""

    code, status = 8, "MODEL_LOADED"


class NotImplemented(_StatusError):  # noqa: A001 (the interface's name)
    """An op or option that is not supported."""

    code, status = 9, "NOT_IMPLEMENTED"


class InvalidGraph(_StatusError):
    """A model that is not valid."""

    code, status = 10, "INVALID_GRAPH"


class EPFail(_StatusError):
    """An error of an execution provider."""

    code, status = 11, "EP_FAIL"


@contextmanager
def as_errors_of_onnxruntime(kind: type[_StatusError]) -> Iterator[None]:
    """Convert errors of this library into the matching class: `kind`, or that of bad arguments and models."""
    try:
        yield
    except _StatusError:
        raise
    except BindingError as error:
        raise InvalidArgument.of(str(error)) from error
    except FrontendError as error:
        text = str(error)
        wrong_form = InvalidProtobuf if "is not an ONNX model" in text else kind
        raise (NoSuchFile if "cannot read the ONNX file" in text else wrong_form).of(text) from error
    except HeteroError as error:
        raise kind.of(str(error)) from error
