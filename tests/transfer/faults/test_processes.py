"""A sample of the failure table between processes; scripts/test-faults runs all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.requirements import require

require("nixl", "nixl_cu12", "nixl_cu13")

from tests.transfer.faults.process_rows import Crew, ProcessCase, process_cases, run_process_case  # noqa: E402

SAMPLE = list(process_cases())[::12]


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("crew"))
    yield made
    made.close()


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_failure_of_a_process_leaves_the_right_text_or_an_error(case: ProcessCase, crew: Crew) -> None:
    run_process_case(case, crew)
