"""A sample of the failure table; scripts/test-faults runs all of it."""

from __future__ import annotations

import os

import pytest
from tests.transfer.faults.running import Case, Sites, cases, run_case

EVERY = 6


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    return Sites(tmp_path_factory.mktemp("sites"))


# One case of every row in some phase under some policy.
SAMPLE = list(cases(1))[::EVERY]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_failure_leaves_the_right_text_or_an_error_and_no_page_behind(case: Case, sites: Sites) -> None:
    run_case(case, sites)


def test_workers_that_are_closed_leave_no_descriptor_behind(sites: Sites) -> None:
    run_case(SAMPLE[0], sites)
    before = len(os.listdir("/proc/self/fd"))
    run_case(SAMPLE[0], sites)
    assert len(os.listdir("/proc/self/fd")) <= before
