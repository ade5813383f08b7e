"""Messages over a pipe: whole, or not at all."""

from io import BytesIO

import pytest

from outrider.frames import frame, read_frame


def test_messages_come_out_as_they_went_in() -> None:
    stream = BytesIO(frame(b"one") + frame(b"") + frame(b"three"))
    assert [read_frame(stream) for _ in range(4)] == [b"one", b"", b"three", None]


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_message_whose_writer_was_killed_is_the_end(kept: int) -> None:
    assert read_frame(BytesIO(frame(b"one")[:kept])) is None
