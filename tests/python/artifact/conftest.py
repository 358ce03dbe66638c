"""Fixture of the chain over two devices that machines are tested with; its executable's metadata is tested here."""

from vm.conftest import chain  # noqa: F401 (a fixture)
