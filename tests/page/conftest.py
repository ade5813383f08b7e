"""These tests need a browser: scripts/test-page installs one and asks for them; other runs pass them by."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("OUTRIDER_TEST_BROWSER") else ["test_playground.py"]
