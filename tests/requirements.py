"""Optional components that tests need: missing ones skip these tests, unless the environment says that they must run.

OUTRIDER_REQUIRE names such components, separated by commas: OUTRIDER_REQUIRE=nixl,mooncake scripts/test
"""

import os
from importlib.util import find_spec

import pytest


def require(component: str, *modules: str) -> None:
    """Skip the calling test or module unless one of these modules is installed; fail it if it is required."""
    if any(find_spec(module) is not None for module in modules):
        return
    reason = f"{component} is not installed"
    demanded = [name.strip() for name in os.environ.get("OUTRIDER_REQUIRE", "").split(",")]
    if component in demanded:
        pytest.fail(f"{reason}, but OUTRIDER_REQUIRE names it", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
