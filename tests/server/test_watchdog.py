"""What counts as progress, and what as time."""

from __future__ import annotations

from outrider.server.front.watchdog import START_LIMIT_S, Watchdog
from outrider.server.messages import Pong


def ready(limit_s: float) -> Watchdog:
    watchdog = Watchdog(limit_s)
    watchdog.begin()
    watchdog.became_ready()
    return watchdog


def seconds_until_hung(watchdog: Watchdog, *answers: Pong) -> int:
    """With one of the answers each second, and none after them; at most 1000."""
    for second in range(1000):
        if second < len(answers):
            watchdog.answered(answers[second])
        if watchdog.is_hung(1.0):
            return second
    return 1000


def test_steps_are_progress_and_so_is_having_nothing_to_do() -> None:
    busy = [Pong(steps=step, has_work=True) for step in range(30)]
    idle = [Pong(steps=7, has_work=False)] * 30
    stuck = [Pong(steps=7, has_work=True)] * 30
    assert seconds_until_hung(ready(10)) == 10
    assert seconds_until_hung(ready(10), *busy) == 39
    assert seconds_until_hung(ready(10), *idle) == 39
    # It answers, but its steps never come to an end.
    assert seconds_until_hung(ready(10), *stuck) == 10


def test_loading_gets_more_time_than_a_step() -> None:
    watchdog = ready(10)
    watchdog.begin()
    assert seconds_until_hung(watchdog) == START_LIMIT_S
    watchdog.loaded_some()
    assert not watchdog.is_hung(1.0)


def test_time_during_which_the_front_end_itself_was_stopped_does_not_count() -> None:
    watchdog = ready(10)
    assert not watchdog.is_hung(3600.0)
    assert seconds_until_hung(watchdog) == 8
