"""What a violation says, and what the modes do with it."""

from __future__ import annotations

import logging
from array import array

import pytest

from outrider.errors import InvariantViolation
from outrider.kv import Full, GroupSpec, Interval, KVConfig, KVLayout, KVManager
from outrider.sanitizer import Mode, Sanitizer


def watched(mode: Mode) -> tuple[KVManager, Sanitizer]:
    layout = KVLayout(target=(GroupSpec(name="layers", kind=Full(), page_tokens=4),))
    config = KVConfig(arena_pages=(20,))
    sanitizer = Sanitizer(layout, config, mode=mode)
    manager = KVManager(layout, config, observer=sanitizer)
    sanitizer.bind(manager)
    return manager, sanitizer


def write_past_the_reservation(manager: KVManager, sanitizer: Sanitizer) -> None:
    tokens = array("I", range(8))
    sequence = manager.open("r1", tokens, total_tokens=20)
    sanitizer.track("r1", tokens, ("", ""))
    manager.admit(sequence)
    manager.reserve(sequence, 4, 0)
    sanitizer.steps.begin(7)
    sanitizer.steps.write("r1", 0, Interval(2, 6), sequence.groups[0].pages, "target rows")


def test_a_violation_names_invariant_request_group_position_page_writer_and_step() -> None:
    with pytest.raises(InvariantViolation) as caught:
        write_past_the_reservation(*watched(Mode.RAISE))
    message = str(caught.value)
    assert caught.value.invariant == "I1"
    for part in ("I1", "step 7", "request r1", "group 0 (layers)", "position 4", "page 0", "last writer"):
        assert part in message
    assert "\n" not in message


def test_log_mode_reports_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    manager, sanitizer = watched(Mode.LOG)
    with caplog.at_level(logging.ERROR, logger="outrider.sanitizer"):
        write_past_the_reservation(manager, sanitizer)
    assert [violation.invariant for violation in sanitizer.violations] == ["I1"]
    assert "outside the writer's reservation" in caplog.text


def test_a_read_of_a_slot_that_was_not_written_is_reported_with_its_position() -> None:
    manager, sanitizer = watched(Mode.RAISE)
    tokens = array("I", range(8))
    sequence = manager.open("r1", tokens, total_tokens=20)
    sanitizer.track("r1", tokens, ("", ""))
    manager.admit(sequence)
    manager.reserve(sequence, 8, 0)
    table = sequence.groups[0].pages
    sanitizer.steps.begin(0)
    ids = sanitizer.steps.identities("r1", 0, Interval(0, 3))
    sanitizer.steps.write("r1", 0, Interval(0, 3), table, "target rows", ids=ids, durable=True)
    sanitizer.steps.read("r1", 0, Interval(0, 3), table, scratch_from=3)
    with pytest.raises(InvariantViolation, match="position 3") as caught:
        sanitizer.steps.read("r1", 0, Interval(0, 5), table, scratch_from=5)
    assert caught.value.invariant == "I3"
