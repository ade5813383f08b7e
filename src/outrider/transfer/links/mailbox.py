"""A queue between two threads with a descriptor to wait on."""

from __future__ import annotations

import os
from collections import deque
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items from one thread for another. The descriptor is readable exactly while there are items, or after `alarm`."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._lock = Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True
        self._is_alarmed = False

    def put(self, item: Item) -> None:
        with self._lock:
            if self._is_open:
                self._items.append(item)
                os.eventfd_write(self._descriptor, 1)

    def take(self) -> list[Item]:
        """Returns all items, oldest first."""
        # Most calls find nothing, and a deque may be tested without the lock.
        if not self._items:
            return []
        with self._lock:
            if not self._is_open:
                return []
            if not self._is_alarmed:
                os.eventfd_read(self._descriptor)
            items = list(self._items)
            self._items.clear()
            return items

    def alarm(self) -> None:
        """Make the descriptor readable for ever, so that a thread that waits on it looks at what has happened."""
        with self._lock:
            if self._is_open:
                self._is_alarmed = True
                os.eventfd_write(self._descriptor, 1)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._items.clear()
                os.close(self._descriptor)
