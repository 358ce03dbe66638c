"""Numbers as people read them."""

from relax_hetero.display.text import bytes_text


def test_bytes_are_written_for_people():
    assert [bytes_text(count) for count in (None, 3, 2048, 3 << 20, 5 << 30)] == [
        *("?", "3 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"),
    ]
