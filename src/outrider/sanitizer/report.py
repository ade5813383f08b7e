"""Violations: one message each, which names the invariant, the slot, the writer and the step."""

from __future__ import annotations

import logging
from enum import Enum

from outrider.errors import ConfigError, InvariantViolation
from outrider.kv.layout import KVLayout
from outrider.sanitizer.shadow import NO_WRITER, Writer

log = logging.getLogger("outrider.sanitizer")


class Mode(Enum):
    """What to do on a violation. `off` is for settings only: no sanitizer is created then."""

    OFF = "off"
    LOG = "log"
    RAISE = "raise"


class Reporter:
    """Raises or logs violations; knows the step that is running."""

    def __init__(self, layout: KVLayout, mode: Mode) -> None:
        if mode is Mode.OFF:
            raise ConfigError("a sanitizer that is off would cost as much as one that logs; make none, or use Mode.LOG")
        self.mode = mode
        self.step = -1
        self.violations: list[InvariantViolation] = []
        self._layout = layout

    def fail(
        self,
        invariant: str,
        what: str,
        *,
        request: str = "-",
        group: int = -1,
        position: int = -1,
        page: int = -1,
        writer: Writer = NO_WRITER,
    ) -> None:
        name = f"{group} ({self._layout.groups[group].name})" if group >= 0 else "-"
        violation = InvariantViolation(
            invariant,
            f"{invariant} broken at step {self.step}: {what} [request {request}, group {name}, position "
            f"{position if position >= 0 else '-'}, page {page if page >= 0 else '-'}, last writer: {writer}]",
        )
        self.violations.append(violation)
        if self.mode is Mode.RAISE:
            raise violation
        log.error("%s", violation)
