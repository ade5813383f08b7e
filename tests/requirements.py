"""Optional components that tests need: missing ones skip these tests, unless the environment says that they must run.

OUTRIDER_REQUIRE names such components, separated by commas: OUTRIDER_REQUIRE=nixl,openssl scripts/test
Their names are those in the reasons of skipped tests.
"""

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest


def require(component: str, *modules: str) -> None:
    """Skip the calling test or module unless one of these modules is installed; fail it if it is required."""
    if not any(find_spec(module) is not None for module in modules):
        missing(component, f"{component} is not installed")


def missing(component: str, reason: str) -> NoReturn:
    """Skip the calling test or module for want of this component; fail it if it is required."""
    demanded = [name.strip() for name in os.environ.get("OUTRIDER_REQUIRE", "").split(",")]
    if component in demanded:
        pytest.fail(f"{reason}, but OUTRIDER_REQUIRE names it", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
