"""A hand-off gives the decode worker exactly the positions it lacks, and the text of a single worker."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from tests.transfer.workers import (
    DRAFTERS,
    WINDOWS,
    ask,
    assert_nothing_left,
    make_model,
    make_worker,
    run,
    slots_of,
)

from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams
from outrider.scheduler import State

PAGES = (8, 16, 32)
EVERY = 1 if os.environ.get("OUTRIDER_ALL_COMBINATIONS") else 5
"""One in how many combinations is tried: scripts/test-faults tries all of them, which takes minutes."""
PARAMS = SamplingParams(temperature=0, max_tokens=6)


class Workers:
    """A prefill and a decode worker for each page size, and a single worker."""

    def __init__(self, windows: str, drafter: str, directory: Path) -> None:
        model = make_model(windows)
        self.windows = windows
        self.single = make_worker(model, drafter, directory, None)
        self.prefill = {size: make_worker(model, drafter, directory, "kv_producer", block_size=size) for size in PAGES}
        self.decode = {size: make_worker(model, drafter, directory, "kv_consumer", block_size=size) for size in PAGES}

    def close(self) -> None:
        for engine in (*self.prefill.values(), *self.decode.values()):
            assert_nothing_left(engine)
            engine.close()


@pytest.fixture(scope="module", params=list(product(WINDOWS, DRAFTERS)), ids=lambda case: "-".join(case))
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    windows, drafter = request.param
    made = Workers(windows, drafter, tmp_path_factory.mktemp("drafter"))
    yield made
    made.close()


def hand_off(
    prefill: Engine, decode: Engine, name: str, prompt: list[int], *, p_looks_ahead: bool, d_looks_ahead: bool
) -> tuple[list[int], int, int]:
    """Returns the text, and how much of the prompt was cached and moved. Compares every slot with its source."""
    prefill.reset_prefix_cache()
    prefill.add_request(name, prompt, PARAMS, hand_over=True, speculate=p_looks_ahead)
    handed = run(prefill, name)
    assert handed.ticket is not None
    (held,) = [request for request in prefill.scheduler.requests.values() if request.state is State.HELD]
    sent = slots_of(prefill, held.id)
    decode.add_request(name, prompt, PARAMS, ticket=handed.ticket, speculate=d_looks_ahead)
    output = decode.output(name)
    (sequence_id,) = decode.scheduler.requests
    request = decode.scheduler.requests[sequence_id]
    run(decode, name, until=lambda _: request.state in (State.PREFILLING, State.DECODING))
    if not output.finished and not request.generated > 1:
        arrived = slots_of(decode, sequence_id)
        for index, group in enumerate(decode.scheduler.kv.layout.groups):
            needed = group.kind.needed(len(prompt))
            own = arrived.get(group.name, {})
            if index < decode.scheduler.kv.layout.num_target:
                assert set(range(needed.start, needed.end)) <= set(own)
            # What the worker had cached itself is equal to the source's as well.
            assert all(sent[group.name].get(position, slot) == slot for position, slot in own.items())
    run(decode, name)
    assert output.error is None
    return output.outputs[0].token_ids, output.metrics.cached_tokens, output.metrics.transferred_tokens


@pytest.mark.parametrize("p_page", PAGES)
@pytest.mark.parametrize("d_page", PAGES)
def test_every_combination_moves_what_is_missing_and_gives_one_workers_text(
    workers: Workers, p_page: int, d_page: int
) -> None:
    prefill, decode = workers.prefill[p_page], workers.decode[d_page]
    rng = random.Random(f"{p_page} {d_page}")
    whole = 2 * max(p_page, d_page)
    combinations = list(product((whole - 1, whole, whole + 1), (True, False), (True, False), (False, True)))
    hits, first = 0, rng.randrange(EVERY)
    for number, (length, p_ahead, d_ahead, local_hit) in list(enumerate(combinations))[first::EVERY]:
        prompt = [rng.randrange(256) for _ in range(length)]
        expected = ask(workers.single, f"{p_page} {d_page} {number}", prompt, PARAMS).outputs[0].token_ids
        decode.reset_prefix_cache()
        if local_hit:
            ask(decode, f"warm {number}", prompt[: whole // 2 + 1], SamplingParams(temperature=0, max_tokens=1))
        text, cached, moved = hand_off(
            prefill, decode, f"r{number}", prompt, p_looks_ahead=p_ahead, d_looks_ahead=d_ahead
        )
        assert text == expected
        # What the decode worker has cached is not moved; everything else of the prompt is.
        assert cached + moved == length
        assert local_hit or not cached
        hits += cached > 0
    assert hits > 0 or workers.windows != "full"


def test_the_reported_block_boundary_moves_the_prompts_block(tmp_path: Path) -> None:
    """Page size 16, prompt 16, one token ahead on P: b0 goes into a0, not the speculated token's b1."""
    model = make_model("full")
    prefill = make_worker(model, "eagle3", tmp_path, "kv_producer")
    decode = make_worker(model, "eagle3", tmp_path, "kv_consumer")
    prompt = list(range(16))
    prefill.add_request("a", prompt, PARAMS, hand_over=True)
    run(prefill, "a")
    (held,) = prefill.scheduler.requests.values()
    assert len(held.kv.groups[1].held()) == 2, "the prefill worker holds a page of scratch after the prompt's"
    prefill.scheduler.abort(held.id)
    prefill.tend()
    text, _cached, moved = hand_off(prefill, decode, "b", prompt, p_looks_ahead=True, d_looks_ahead=False)
    assert moved == 16
    assert text == ask(make_worker(model, "none", tmp_path, None), "c", prompt, PARAMS).outputs[0].token_ids
    prefill.close()
    decode.close()


@pytest.mark.parametrize("drafter", ["ngram", "draft model", "full", "eagle3"])
def test_the_decode_workers_steps_are_a_single_workers(drafter: str, tmp_path: Path) -> None:
    """The first token and the drafts after it come with the KV, cut to what the request may still write."""
    model = make_model("mixed")
    prefill = make_worker(model, drafter, tmp_path, "kv_producer")
    decode = make_worker(model, drafter, tmp_path, "kv_consumer")
    single = make_worker(model, drafter, tmp_path, None)
    rng, verified = random.Random(drafter), 0
    for number, length in enumerate((*range(1, 8), 90)):
        # With few tokens to choose from, a look-up finds something.
        few = (5, 6, 7) if drafter == "ngram" else None
        prompt = [rng.choice(few or range(256)) for _ in range(28)]
        params = SamplingParams(
            temperature=0.9, seed=number, max_tokens=length, logprobs=2, presence_penalty=0.3, allowed_token_ids=few
        )
        name = f"r{number}"
        handed = ask(prefill, name, prompt, params, hand_over=True)
        taken, alone = ask(decode, name, prompt, params, ticket=handed.ticket), ask(single, name, prompt, params)
        (one,), (other,) = taken.outputs, alone.outputs
        assert (one.token_ids, one.origins, one.finish_reason) == (other.token_ids, other.origins, other.finish_reason)
        assert taken.metrics.speculation == alone.metrics.speculation
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [score.token for score in one.logprobs] == [score.token for score in other.logprobs]
        assert [score.logprob for score in one.logprobs] == pytest.approx([score.logprob for score in other.logprobs])
        verified += taken.metrics.speculation.draft_tokens
    assert verified > 0
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()


def test_several_continuations_and_scores_of_the_prompt_are_made_on_the_decode_worker(tmp_path: Path) -> None:
    model = make_model("mixed")
    prefill = make_worker(model, "eagle3", tmp_path, "kv_producer")
    decode = make_worker(model, "eagle3", tmp_path, "kv_consumer")
    single = make_worker(model, "eagle3", tmp_path, None)
    for name, params in {
        "n": SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=9),
        "scores": SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1),
    }.items():
        prompt = list(range(3, 36))
        handed = ask(prefill, name, prompt, params, hand_over=True)
        taken, alone = ask(decode, name, prompt, params, ticket=handed.ticket), ask(single, name, prompt, params)
        assert [output.token_ids for output in taken.outputs] == [output.token_ids for output in alone.outputs]
        assert (taken.prompt_logprobs is None) == (alone.prompt_logprobs is None)
        decode.reset_prefix_cache()
        single.reset_prefix_cache()
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()


def test_a_prefill_worker_without_a_drafter_takes_requests_that_ask_for_drafts(tmp_path: Path) -> None:
    """The decode worker verifies, so it says whether it can verify so many."""
    model = make_model("full")
    prefill = make_worker(model, "none", tmp_path, "kv_producer")
    decode = make_worker(model, "ngram", tmp_path, "kv_consumer")
    prompt = [1, 2, 3, 4] * 6
    ticket = ask(prefill, "a", prompt, PARAMS, hand_over=True, num_speculative_tokens=2).ticket
    output = ask(decode, "a", prompt, PARAMS, ticket=ticket, num_speculative_tokens=2)
    assert (
        output.outputs[0].token_ids
        == ask(make_worker(model, "none", tmp_path, None), "b", prompt, PARAMS).outputs[0].token_ids
    )
    assert len(output.metrics.speculation.accepted_at) <= 2
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()
