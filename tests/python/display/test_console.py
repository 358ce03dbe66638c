"""Text goes to people as it is."""

import io

from relax_hetero.display.console import console


def test_devices_are_not_emoji():
    file = io.StringIO()
    console(file=file).print("vdevice='cuda:-1:global' on cuda:100:", markup=False)
    assert file.getvalue() == "vdevice='cuda:-1:global' on cuda:100:\n"
