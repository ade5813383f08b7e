"""The default model with its drafter writes what was asked for, and the same as without."""

from __future__ import annotations

import pytest
from tests.structured.many import compare


@pytest.mark.slow
def test_outputs_in_many_forms_are_valid_and_the_same_without_drafts() -> None:
    report = compare(10, seed=1)
    assert report.problems == []
    assert report.tokens_a_step > 1
