"""Text as it grows: whole characters, stop strings across the borders of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.llm.text_stream import TextStream


def piece(token: int) -> bytes:
    return bytes([token])


def written(data: bytes, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(piece, stops)
    texts = []
    for byte in data:
        texts.append(stream.add(byte).text)
        if stream.stopped:
            break
    return [*texts, stream.finish().text], stream


def test_characters_come_whole():
    texts, _ = written("a€😀".encode())
    assert [text for text in texts if text] == ["a", "€", "😀"]


def test_invalid_utf8_becomes_a_replacement():
    assert "".join(written(b"a\xffb\xe2\x82")[0]) == "a\ufffdb\ufffd"


def test_the_begin_of_a_stop_string_is_held_back():
    texts, stream = written(b"one enough END more", ("END", "enough!"))
    assert "".join(texts) == "one enough " and stream.stopped
    assert texts[4:10] == [""] * 6  # as long as it may become "enough!"


@given(st.text("aβ😀", max_size=30), st.lists(st.text("aβ😀", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stops):
    texts, stream = written(text.encode(), tuple(stops))
    ends = {at + len(stop): at for stop in stops for at in [text.find(stop)] if at >= 0}
    if not ends:
        assert "".join(texts) == text and not stream.stopped
        return
    first = min(ends)
    starts = [at for stop in stops for at in [text.find(stop)] if at >= 0 and at + len(stop) == first]
    assert "".join(texts) == text[: min(starts)] and stream.stopped


@given(st.text(max_size=30), st.lists(st.text("aβ", min_size=1, max_size=3), max_size=2))
def test_each_token_is_reported_once_and_in_order(text, stops):
    stream = TextStream(piece, tuple(stops))
    tokens: list[int] = []
    data = text.encode(errors="replace")
    for byte in data:
        tokens += stream.add(byte).tokens
        if stream.stopped:
            break
    tokens += stream.finish().tokens
    assert tokens == list(data[: len(tokens)])
    if not stream.stopped:
        assert len(tokens) == len(data)


def test_tokens_without_text_are_reported_at_the_end():
    stream = TextStream(piece)
    assert stream.add(97).tokens == (97,)
    assert stream.add(98, silent=True).tokens == ()
    assert stream.finish().tokens == (98,)
