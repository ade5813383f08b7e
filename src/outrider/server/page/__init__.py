"""The playground at / of `outrider serve`: static files, read once, that load nothing from other servers.

index.html · style.css · icon.svg
app.js       settings, key, conversation, and which part is shown
answer.js    one answer: its tokens by origin, and its statistics
api.js       requests, event streams and error messages
choice_view.js   how much is speculated, and why
kv_view.js   arenas, page counts and cache hits, live
page_map.js  the pages of one arena, drawn on a canvas
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
_NAMES = ("app.js", "answer.js", "api.js", "choice_view.js", "kv_view.js", "page_map.js", "style.css", "icon.svg")


def _read(name: str) -> PageFile:
    return PageFile((files(__name__) / name).read_bytes(), _TYPES[name.rpartition(".")[2]])


FILES = {"/": _read("index.html"), **{f"/page/{name}": _read(name) for name in _NAMES}}
"""The files by path. Only these can be requested; a client's path never reaches the file system."""
