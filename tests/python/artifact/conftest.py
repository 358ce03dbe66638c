"""The chain over two devices that machines are tested with: what its executable says of itself is tested here."""

from vm.conftest import chain  # noqa: F401 (a fixture)
