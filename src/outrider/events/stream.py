"""From the engine's steps to a thread that tells routers: notes in, differences out."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.events.servable import Changes, Note, ServablePages
from outrider.kv.layout import KVLayout
from outrider.kv.observer import IndexListener, PublishedPage

CLOSE_LIMIT_S = 5.0


class KVEvents(Protocol):
    """What an engine needs of whatever tells routers about its cache."""

    @property
    def pages(self) -> IndexListener:
        """What the prefix index reports to."""

    def flush(self) -> None:
        """Hand over what has changed; called by the engine's thread between moves."""

    def close(self) -> None: ...


class EventStream:
    """Notes of the engine, worked off in a thread: `send` gets the changes in their order."""

    def __init__(self, layout: KVLayout, *, queue_size: int = 0) -> None:
        self.pages = ServablePages(layout)
        self._queue: queue.Queue[list[Note] | None] = queue.Queue(queue_size)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, daemon=True, name="kv-events")
        self._thread.start()

    def flush(self) -> None:
        """Hand over what has changed; called by the engine's thread between moves."""
        notes = self.pages.take_notes()
        if notes:
            self._queue.put(notes)
            os.eventfd_write(self._wake, 1)

    @property
    def file(self) -> int:
        """A descriptor that can be read while notes wait."""
        return self._wake

    def waiting(self) -> Sequence[Changes] | None:
        """Returns the changes that were handed over and not taken yet; None once the stream has been closed."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return ()
        changes: list[Changes] = []
        while True:
            try:
                notes = self._queue.get_nowait()
            except queue.Empty:
                return changes
            if notes is None:
                return None
            changes.append(self.pages.work_off(notes))

    def close(self) -> None:
        """End the thread."""
        if self._thread is None:
            return
        self._queue.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_LIMIT_S)
        self._thread = None


class Together:
    """Several of them at once."""

    def __init__(self, members: Sequence[KVEvents]) -> None:
        self._members = members

    @property
    def pages(self) -> IndexListener:
        return self

    def entered(self, group: int, namespace: tuple[str, str], pages: Sequence[PublishedPage]) -> None:
        for member in self._members:
            member.pages.entered(group, namespace, pages)

    def left(self, group: int, keys: Sequence[bytes]) -> None:
        for member in self._members:
            member.pages.left(group, keys)

    def cleared(self) -> None:
        for member in self._members:
            member.pages.cleared()

    def flush(self) -> None:
        for member in self._members:
            member.flush()

    def close(self) -> None:
        for member in self._members:
            member.close()
