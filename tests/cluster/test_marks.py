"""Telling a request that another worker began from a new one."""

from __future__ import annotations

import os
import time
from pathlib import Path

from outrider.cluster.marks import STALE_S, Marks


def test_a_prompt_that_has_grown_is_a_continuation(tmp_path: Path) -> None:
    first, second = Marks(tmp_path), Marks(tmp_path)
    assert not first.is_continued("request", [1, 2, 3])
    assert second.is_continued("request", [1, 2, 3, 4])
    assert not second.is_continued("another", [1, 2, 3, 4])


def test_a_request_of_which_nothing_was_written_may_begin_again(tmp_path: Path) -> None:
    assert not Marks(tmp_path).is_continued("request", [1, 2, 3])
    assert not Marks(tmp_path).is_continued("request", [1, 2, 3])


def test_a_request_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    assert not marks.is_continued("../request", [1])
    marks.forget("../request")
    assert list(tmp_path.iterdir()) == []
    assert not marks.is_continued("../request", [1, 2])


def test_marks_of_requests_that_never_ended_are_thrown_away_in_time(tmp_path: Path) -> None:
    Marks(tmp_path).is_continued("old", [1])
    (mark,) = tmp_path.iterdir()
    long_ago = time.time() - STALE_S - 1
    os.utime(mark, (long_ago, long_ago))
    Marks(tmp_path)
    assert list(tmp_path.iterdir()) == []
