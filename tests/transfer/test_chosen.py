"""Workers that choose how much to draft hand requests over as others do: the text is that of a single worker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.pacing import choose_at_random
from tests.transfer.workers import DRAFTERS, K, ask, assert_nothing_left, make_model, make_worker, run

from outrider.sampling import SamplingParams

DRAFTING = [drafter for drafter in DRAFTERS if drafter != "none"]


def asked() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(4)
    lengths = (1, 17, 40)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths] + [[1, 2, 3, 4, 5, 6] * 6]
    return [
        (prompt, SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=12, presence_penalty=0.4))
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("drafter", "prefill_k", "decode_k"),
    [
        *((drafter, None, None) for drafter in DRAFTING),
        ("draft model", K, None),
        ("full", K, None),
        ("draft model", None, K),
    ],
)
def test_the_text_is_that_of_a_single_worker(
    drafter: str, prefill_k: int | None, decode_k: int | None, tmp_path: Path
) -> None:
    model = make_model("mixed")
    single = make_worker(model, "none", tmp_path, None)
    expected = [ask(single, "r", prompt, params).outputs[0].token_ids for prompt, params in asked()]
    texts = [prompt + said for (prompt, _params), said in zip(asked(), expected, strict=True)]
    prefill = make_worker(model, drafter, tmp_path, "kv_producer", k=prefill_k)
    decode = make_worker(model, drafter, tmp_path, "kv_consumer", k=decode_k, block_size=8)
    for engine in (prefill, decode):
        if engine.pacer is not None:
            choose_at_random(engine, texts, seed=drafter == "full")
    names = []
    for number, (prompt, params) in enumerate(asked()):
        handed = ask(prefill, "r", prompt, params, hand_over=True)
        assert handed.ticket is not None
        names.append(f"d{number}")
        decode.add_request(names[-1], prompt, params, ticket=handed.ticket)
    # They are verified in one batch, with drafts that came along and drafts of this worker's own.
    outputs = [decode.output(name) for name in names]
    for name, output in zip(names, outputs, strict=True):
        if not output.finished:
            run(decode, name)
    assert [output.error for output in outputs] == [None] * len(outputs)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert decode.speculation.accepted_tokens > 0
    assert decode.transfer_counters().transferred_tokens > 0
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()
