"""Reports from other engines about prefill/decode disaggregation (docs/lineage.md, R1 to R4), on real workers."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.transfer.workers import CLUSTER_KEY, WINDOWS, ask, assert_nothing_left, make_model, make_worker, run

from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.errors import RequestError
from outrider.sampling import SamplingParams
from outrider.tools.bench.server_process import wait_until
from outrider.transfer.links.local import LocalLink

PARAMS = SamplingParams(temperature=0, max_tokens=6)
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def prompt_of(seed: object, length: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.randrange(256) for _ in range(length)]


def tokens(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


# ---- R1: a connector through which nothing moves changes no hit ------------------------------------


def conversation(engine: Engine) -> list[tuple[int, list[int]]]:
    """What was cached of each prompt, and the text: whole and part repetitions, turns, neighbours, and one with n."""
    found = []
    first = prompt_of("first", 90)
    branch = first[:50] + prompt_of("branch", 40)
    turn = list(first)
    prompts = [first, first, branch, first[:33], branch[:66]]
    for number, prompt in enumerate(prompts):
        output = ask(engine, f"r{number}", prompt, PARAMS)
        found.append((output.metrics.cached_tokens, tokens(output)))
    for number in range(2):
        output = ask(engine, f"t{number}", turn, PARAMS)
        found.append((output.metrics.cached_tokens, tokens(output)))
        turn += tokens(output) + prompt_of(number, 9)
    output = ask(engine, "n", turn, SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=5))
    found.append((output.metrics.cached_tokens, output.outputs[1].token_ids))
    return found


CASES = [
    (windows, drafter, ROLES[(row + column) % len(ROLES)])
    for row, windows in enumerate(WINDOWS)
    for column, drafter in enumerate(("none", "draft model", "eagle3"))
]
"""Every kind of windows and of drafter with every role."""


@pytest.mark.parametrize(("windows", "drafter", "role"), CASES, ids=map("-".join, CASES))
def test_r1_a_connector_that_moves_nothing_changes_no_hit(
    windows: str, drafter: str, role: str, tmp_path: Path
) -> None:
    model = make_model(windows)
    alone = conversation(make_worker(model, drafter, tmp_path, None, max_num_seqs=8, max_num_batched_tokens=24))
    engine = make_worker(model, drafter, tmp_path, role, max_num_seqs=8, max_num_batched_tokens=24)
    assert conversation(engine) == alone
    assert any(cached for cached, _text in alone)
    assert_nothing_left(engine)
    engine.close()


# ---- R2: a stale or foreign ticket never answers with another prompt's text ------------------------


class Pair:
    """A prefill worker, a decode worker, and a single worker that says what is right."""

    def __init__(
        self,
        directory: Path,
        *,
        drafter: str = "eagle3",
        policy: str = "recompute",
        sanitizer_level: str = "bytes",
        **settings: Any,
    ) -> None:
        model, given = make_model("mixed"), {"sanitizer_level": sanitizer_level}
        of_prefill = {"answer_limit_s": 0.5, **settings}
        of_decode = {**of_prefill, "kv_load_failure_policy": policy}
        self.prefill = make_worker(model, drafter, directory, "kv_producer", transfer=of_prefill, **given)
        self.decode = make_worker(model, drafter, directory, "kv_consumer", transfer=of_decode, **given)
        self._single = make_worker(model, drafter, directory, None)
        self._asked = 0

    def right(self, prompt: list[int]) -> list[int]:
        self._asked += 1
        return tokens(ask(self._single, f"right {self._asked}", prompt, PARAMS))

    def ticket(self, name: str, prompt: list[int], **more: Any) -> str:
        ticket = ask(self.prefill, name, prompt, PARAMS, hand_over=True, **more).ticket
        assert ticket is not None
        return ticket

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            for request in list(engine.scheduler.requests):
                engine.scheduler.abort(request)
            engine.close()


def stale_tickets(pair: Pair, other: list[int]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Tickets that must not be used for a prompt, each with what the request says besides."""
    used = pair.ticket("used", other)
    assert tokens(ask(pair.decode, "used", other, PARAMS, ticket=used)) == pair.right(other)
    return {
        "another prompt": (pair.ticket("another", other), {}),
        "used before": (used, {}),
        "longer": (pair.ticket("longer", other + [1]), {}),
        "shorter": (pair.ticket("shorter", other[:-1]), {}),
    }


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_r2_a_ticket_serves_only_the_prompt_it_was_made_for(policy: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, policy=policy)
    other = prompt_of("other", 40)
    for name, (ticket, more) in stale_tickets(pair, other).items():
        prompt = other if name == "used before" else other[:39] + [200]
        pair.decode.reset_prefix_cache()
        output = ask(pair.decode, name, prompt, PARAMS, ticket=ticket, **more)
        assert output.metrics.transferred_tokens == 0, name
        if policy == "recompute":
            assert tokens(output) == pair.right(prompt), name
        else:
            assert output.error_code == "kv_transfer_failed", name
            assert not output.outputs[0].token_ids, name
    pair.close()


def test_r2_a_tenants_ticket_is_worth_nothing_to_another_tenant(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    prompt = prompt_of("same", 40)
    ticket = pair.ticket("a", prompt, salt="tenant a")
    output = ask(pair.decode, "b", prompt, PARAMS, ticket=ticket, salt="tenant b")
    assert (output.metrics.transferred_tokens, tokens(output)) == (0, pair.right(prompt))
    pair.close()


def test_r2_a_ticket_of_a_worker_that_was_restarted_or_reset_is_stale_or_whole(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    prompt = prompt_of("p", 40)
    reset, gone = pair.ticket("reset", prompt), pair.ticket("gone", prompt)
    # A reset of the cache has no effect on pages that are held.
    pair.prefill.reset_prefix_cache()
    output = ask(pair.decode, "reset", prompt, PARAMS, ticket=reset)
    assert (output.metrics.transferred_tokens, tokens(output)) == (40, pair.right(prompt))
    pair.decode.reset_prefix_cache()
    pair.prefill.close()
    output = ask(pair.decode, "gone", prompt, PARAMS, ticket=gone)
    assert (output.metrics.transferred_tokens, tokens(output)) == (0, pair.right(prompt))
    pair.decode.close()


def test_r2_a_ticket_of_another_cluster_is_refused(tmp_path: Path) -> None:
    pair, foreign = Pair(tmp_path), Pair(tmp_path, cluster_key=CLUSTER_KEY + " of others")
    prompt = prompt_of("p", 40)
    for ticket in (foreign.ticket("x", prompt), pair.ticket("y", prompt)[:-5] + "AAAA=", "", "x" * 9000):
        with pytest.raises(RequestError, match="not from a worker of this cluster"):
            pair.decode.add_request("x", prompt, PARAMS, ticket=ticket)
    pair.close()
    foreign.close()


# ---- R3: a lease that ends while its pages are read ------------------------------------------------


def lease_has_ended(engine: Engine) -> bool:
    engine.tend()
    return not engine.scheduler.kv.sequences


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_r3_what_is_read_after_the_end_of_a_lease_is_not_used(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At level bytes both sides would compare what was read, and nothing would depend on the lease.
    pair = Pair(tmp_path, policy=policy, lease_s=0.4, sanitizer_level="plan")
    prompt, copied, overwritten = prompt_of("p", 40), [], threading.Event()
    ticket = pair.ticket("a", prompt)
    copy = LocalLink._copy

    def late(link: LocalLink, peer: str, number: int, wanted: Any) -> None:
        """The bytes are copied when the lease has ended and other prompts have the pages."""
        if not copied:
            copied.append(number)
            assert wait_until(lambda: lease_has_ended(pair.prefill), 20), "the pages are still held"
            pair.prefill.reset_prefix_cache()
            for number_of_other in range(4):
                tokens(ask(pair.prefill, f"other {number_of_other}", prompt_of(number_of_other, 60), PARAMS))
        copy(link, peer, number, wanted)
        overwritten.set()

    monkeypatch.setattr(LocalLink, "_copy", late)
    pair.decode.add_request("a", prompt, PARAMS, ticket=ticket)
    # The decode worker is busy, and does not prolong the lease.
    while not copied:
        pair.decode.step()
    assert overwritten.wait(60)
    output = run(pair.decode, "a")
    counters = pair.decode.transfer_counters()
    assert (counters.fetches, counters.fetch_failures, output.metrics.transferred_tokens) == (1, 1, 0)
    if policy == "recompute":
        assert tokens(output) == pair.right(prompt)
    else:
        assert output.error_code == "kv_transfer_failed"
    assert pair.prefill.transfer_counters().leases_expired == 1
    assert_nothing_left(pair.decode)
    pair.close()


# ---- R4: draft KV moves with the target's, or is counted as missing --------------------------------


@pytest.mark.parametrize("drafter", ["draft model", "full", "eagle3", "mtp, qwen"])
def test_r4_draft_kv_is_transferred(drafter: str, tmp_path: Path) -> None:
    pair, plain = Pair(tmp_path, drafter=drafter), Pair(tmp_path, drafter="none")
    prompt, moved = prompt_of("p", 60), []
    for each in (pair, plain):
        output = ask(each.decode, "a", prompt, PARAMS, ticket=each.ticket("a", prompt))
        assert tokens(output) == each.right(prompt)
        assert output.metrics.transferred_tokens == 60
        assert each.decode.transfer_counters().draft_groups_missing == 0
        assert output.metrics.transfer is not None
        moved.append(output.metrics.transfer.bytes)
    assert moved[0] > moved[1], "the drafter's KV did not come"
    pair.close()
    plain.close()


@pytest.mark.parametrize("drafter", ["draft model", "full", "eagle3"])
def test_r4_draft_kv_that_a_prefill_worker_lacks_is_counted(drafter: str, tmp_path: Path) -> None:
    model = make_model("mixed")
    prefill = make_worker(model, "none", tmp_path, "kv_producer")
    decode = make_worker(model, drafter, tmp_path, "kv_consumer")
    prompt = prompt_of("p", 60)
    params = SamplingParams(temperature=0, max_tokens=20)
    ticket = ask(prefill, "a", prompt, params, hand_over=True).ticket
    output = ask(decode, "a", prompt, params, ticket=ticket)
    assert tokens(output) == tokens(ask(make_worker(model, "none", tmp_path, None), "a", prompt, params))
    assert output.metrics.transferred_tokens == 60
    assert decode.transfer_counters().draft_groups_missing == 1
    # Drafting goes on with what the drafter sees from here on.
    assert output.metrics.speculation.draft_tokens > 0
    for engine in (prefill, decode):
        assert_nothing_left(engine)
        engine.close()
