"""Errors of relax_hetero: one base class, one subclass per stage a user can be in."""


class HeteroError(Exception):
    """Base of every error this library raises.

    The message names what it is about (op, variable, file), what was found and what was expected.
    """


class VDeviceError(HeteroError):
    """A device string, object or list that names no device."""


class PlacementError(HeteroError):
    """Values or ops that cannot be placed as asked, or a module that is not fully placed."""


class EncodingError(HeteroError):
    """An encoding that an op does not understand, or that no resolver can lay out."""


class FrontendError(HeteroError):
    """A model that cannot be imported; names the node and its op type."""


class BuildError(HeteroError):
    """A module that cannot be lowered, compiled, exported or loaded."""


class BindingError(HeteroError):
    """Arguments, devices or bindings that do not fit what the executable expects."""
