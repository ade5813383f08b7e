"""These tests need a browser: scripts/test-page installs one and asks for them; other runs pass them by.

Both servers load while the first tests run: one as `outrider serve` is, one with a key, a short queue and no drafter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.server.running import RunningServer

from outrider.models.resolve import DEFAULT_MODEL

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from tests.page.opened import Opened

BROWSER = os.environ.get("OUTRIDER_TEST_BROWSER")
collect_ignore_glob = [] if BROWSER else ["test_*.py"]

KEY = "key-of-a-person"
NAME_WITH_MARKUP = "<i>model</i>"


@pytest.fixture(scope="session")
def starting() -> Iterator[dict[str, RunningServer]]:
    memory = ("--kv-cache-memory-bytes", "256M")
    drafting = ("--speculative-config", '{"method": "dflash"}', "--sanitizer", "raise")
    guarded = ("--no-speculation", "--api-key", KEY, "--max-num-seqs", "1", "--max-queue", "0")
    servers = {
        "server": RunningServer(DEFAULT_MODEL, *memory, *drafting),
        "guarded": RunningServer(DEFAULT_MODEL, *memory, *guarded, "--served-model-name", NAME_WITH_MARKUP),
    }
    yield servers
    ended = {name: server.stop() for name, server in servers.items()}
    assert "Traceback" not in servers["server"].log, servers["server"].log
    assert ended["server"] == 0, servers["server"].log


@pytest.fixture(scope="session")
def server(starting: dict[str, RunningServer]) -> RunningServer:
    return starting["server"].wait()


@pytest.fixture(scope="session")
def guarded(starting: dict[str, RunningServer]) -> RunningServer:
    """One test ends it; it is the last that may use it."""
    return starting["guarded"].wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A sandbox cannot be made by root, nor in most containers.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, server: RunningServer) -> Iterator[Opened]:
    from tests.page.opened import Opened

    with Opened(browser, server.url) as opened:
        opened.wait_connected()
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Says what could be seen when a test failed: that a wait ran out says little."""
    report: Any = yield
    if report.failed and BROWSER:
        from tests.page import opened

        for page in opened.still_open:
            report.sections.append(("page", page.described()))
        opened.still_open.clear()
        for name, server in item.funcargs.get("starting", {}).items():  # type: ignore[attr-defined]
            report.sections.append((f"log of the {name}", "\n".join(server.lines[-20:])))
    return report  # type: ignore[no-any-return,return-value]
