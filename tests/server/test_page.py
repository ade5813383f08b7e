"""The playground as files: what may be fetched, by whom, and that nothing in it comes from elsewhere.

What it does in a browser is tested by scripts/test-page.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from tests.server.running import RunningServer

from outrider.server import page
from outrider.server.config import ServerConfig
from outrider.server.http.keys import Keys

FOLDER = Path(page.__file__).parent
ELSEWHERE = re.compile(r"(?:https?:)?//[\w-]+\.|@import|url\(")
FROM_TEXT = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function")
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=")


def test_every_file_of_the_page_is_served_as_what_it_is(tiny: RunningServer) -> None:
    http = tiny.http()
    for path, file in page.FILES.items():
        answer = http.get(path)
        assert (answer.status_code, answer.content) == (200, file.content), path
        assert answer.headers["content-type"] == file.media_type
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "text/html" in http.get("/").headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/page/__init__.py", "/page/../config.py", "/page/%2e%2e/config.py", "/page/", "/page"]
)
def test_nothing_else_can_be_fetched_from_its_folder(tiny: RunningServer, path: str) -> None:
    assert tiny.http().get(path).status_code == 404


def test_every_file_in_the_folder_is_known_and_none_is_large() -> None:
    present = {path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"}
    assert present == {Path(path).name or "index.html" for path in page.FILES}
    assert sum(len(file.content) for file in page.FILES.values()) < 64 << 10
    for path, file in page.FILES.items():
        assert len(file.content.splitlines()) <= 500, path


def test_the_page_needs_nothing_from_elsewhere_and_makes_no_markup_from_text() -> None:
    for path, file in page.FILES.items():
        text = file.content.decode()
        found = [match[0] for match in ELSEWHERE.finditer(text.replace("http://www.w3.org/2000/svg", ""))]
        assert not found, (path, found)
        assert not FROM_TEXT.search(text), path
    assert not INLINE.search(page.FILES["/"].content.decode())
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.FILES["/"].content.decode()):
        assert f"/{name}" in page.FILES


async def asked(path: str, *headers: tuple[bytes, bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of what the doorman of a server with a key says."""
    sent: list[dict[str, object]] = []

    async def app(scope: object, receive: object, send: object) -> None:
        sent.append({"status": 200, "headers": []})

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    keys = Keys(app, ServerConfig(api_keys=("secret",)))
    await keys({"type": "http", "path": path, "headers": list(headers)}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"])  # type: ignore[call-overload,return-value]


def test_a_script_that_lacks_a_key_is_not_answered_with_the_browsers_own_prompt() -> None:
    script = asyncio.run(asked("/kv", (b"sec-fetch-mode", b"cors")))[1]
    person = asyncio.run(asked("/kv", (b"sec-fetch-mode", b"navigate")))[1]
    other = asyncio.run(asked("/kv"))[1]
    assert script[b"www-authenticate"] == b"Bearer"
    assert b"Basic" in person[b"www-authenticate"]
    assert b"Basic" in other[b"www-authenticate"]
