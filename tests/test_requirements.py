"""A component that tests need and that is missing skips them, or fails them where it is required."""

from __future__ import annotations

import pytest
from tests.requirements import missing, require


@pytest.mark.parametrize("required", ["", "nixl", "nixl2,nix"])
def test_what_is_missing_skips_a_test(required: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_REQUIRE", required)
    with pytest.raises(pytest.skip.Exception, match="the program ip is not installed"):
        missing("ip", "the program ip is not installed")
    with pytest.raises(pytest.skip.Exception, match="ip is not installed"):
        require("ip", "no_module_of_this_name")


@pytest.mark.parametrize("required", ["ip", "nixl, ip"])
def test_what_is_missing_and_required_fails_a_test(required: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_REQUIRE", required)
    with pytest.raises(pytest.fail.Exception, match="OUTRIDER_REQUIRE names it"):
        missing("ip", "the program ip is not installed")
    with pytest.raises(pytest.fail.Exception, match="ip is not installed"):
        require("ip", "no_module_of_this_name")


def test_what_is_there_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_REQUIRE", "pytest")
    require("pytest", "no_module_of_this_name", "pytest")
