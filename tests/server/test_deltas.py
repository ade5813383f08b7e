"""What the front end is told, delta by delta, adds up to the output."""

from __future__ import annotations

import pytest
from tests.engine.tiny import tiny_engine

from outrider.sampling import SamplingParams
from outrider.server.engine_process.deltas import RequestReporter


@pytest.mark.parametrize("stop", [None, "e", "ab", "zz"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_deltas_add_up(stop: str | None, stream: bool, seed: int) -> None:
    # Letters only, so that stop strings occur and are held back half-way.
    letters = [ord(letter) - ord("!") for letter in "abcdez"]
    params = SamplingParams(
        n=2, seed=seed, max_tokens=40, stop=stop, logprobs=1, allowed_token_ids=letters, min_tokens=2
    )
    engine = tiny_engine(speculate=True)
    engine.add_request("r", [1, 2, 3], params)
    output = engine.output("r")
    reporter = RequestReporter(output, arrival_s=0.0, stream=stream)
    deltas = []
    while engine.has_work:
        engine.step()
        new = reporter.deltas()
        assert stream or output.finished or not new
        deltas += new
    for index, continuation in enumerate(output.outputs):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == continuation.text
        assert all("".join(delta.pieces) == delta.text for delta in mine)
        assert [token for delta in mine for token in delta.token_ids] == continuation.token_ids
        assert [scored.token for delta in mine for scored in delta.logprobs or ()] == continuation.token_ids
        assert "".join(delta.origins for delta in mine) == "".join(o.value[0] for o in continuation.origins)
        assert [delta.finish_reason for delta in mine][-1] == continuation.finish_reason
        assert all(delta.finish_reason is None for delta in mine[:-1])
    assert [delta.ending is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].ending.generated_tokens == sum(len(each.token_ids) for each in output.outputs)  # type: ignore
