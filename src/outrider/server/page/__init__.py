"""The playground that `outrider serve` shows at /: plain files, read once. Nothing in them comes from elsewhere.

index.html · style.css · icon.svg
app.js       the wiring: settings, key, conversation, what is shown when
answer.js    one answer: its tokens by origin, and its figures
api.js       requests, event streams, and errors in words
kv_view.js   arenas, counts and hits as they happen
page_map.js  one arena on a canvas, however many pages it has
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


class PageFile(NamedTuple):
    content: bytes
    media_type: str


_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NAMES = ("app.js", "answer.js", "api.js", "kv_view.js", "page_map.js", "style.css", "icon.svg")


def _read(name: str) -> PageFile:
    return PageFile((files(__name__) / name).read_bytes(), _TYPES[name.rpartition(".")[2]])


FILES = {"/": _read("index.html"), **{f"/page/{name}": _read(name) for name in _NAMES}}
"""By path. Only what is in this table can be asked for: no path of a client ever reaches a file system."""
