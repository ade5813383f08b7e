"""Bad input gets a typed error that names the value and says what to do next."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from tests.kv.fakes import drafter, full, make_manager

from outrider import errors
from outrider.errors import (
    AdmissionError,
    ConfigError,
    FootprintError,
    OutOfPages,
    OutriderError,
    RequestError,
)
from outrider.kv import (
    KVConfig,
    KVFootprint,
    KVLayout,
    KVManager,
    Proposing,
    Sliding,
    group_kind,
)
from outrider.kv.prefix import Media
from outrider.sanitizer import Mode, Sanitizer
from outrider.scheduler import LoadFailure, RequestSpec, Role, Scheduler, SchedulerConfig


def scheduler(**config: Any) -> Scheduler:
    kv = make_manager(full(page=8), footprint=drafter("chain_from_taps"), pages=20, max_model_len=100, keep_margin=2)
    return Scheduler(SchedulerConfig(**config), kv)


def add(**fields: Any) -> Callable[[], object]:
    spec = {"id": "mine", "prompt": [1, 2, 3], "max_tokens": 4} | fields
    return lambda: scheduler().add(RequestSpec(**spec))


def add_twice() -> None:
    here = scheduler()
    for _ in range(2):
        here.add(RequestSpec(id="mine", prompt=[1, 2], max_tokens=2))


def kv_config(**fields: Any) -> KVConfig:
    return KVConfig(**({"arena_pages": (8,)} | fields))


CASES: dict[str, tuple[type[OutriderError], Callable[[], object], tuple[str, ...]]] = {
    # ---- groups and layouts ----
    "page size 0": (ConfigError, lambda: full("mine", page=0), ("mine", "page_tokens", "at least 1", "0")),
    "slot of no bytes": (ConfigError, lambda: full("mine", slot_bytes=0), ("mine", "slot_bytes", "at least 1")),
    "window 0": (ConfigError, lambda: Sliding(0), ("window", "at least 1", "0", "full group")),
    "unknown group kind": (ConfigError, lambda: group_kind("ring", {}), ("ring", "full", "sliding")),
    "unknown field of a kind": (ConfigError, lambda: group_kind("sliding", {"size": 4}), ("sliding", "size")),
    "field of a kind without any": (ConfigError, lambda: group_kind("full", {"window": 4}), ("full", "window")),
    "missing field of a kind": (ConfigError, lambda: group_kind("sliding", {}), ("sliding", "window")),
    "no target group": (ConfigError, lambda: KVLayout(target=()), ("at least one target group",)),
    "two groups of one name": (ConfigError, lambda: KVLayout(target=(full("x"), full("x"))), ("differ", "x")),
    "draft group named like a target group": (
        ConfigError,
        lambda: KVLayout(target=(full("x"),), footprint=drafter("chain_from_taps", full("x"))),
        ("differ", "x"),
    ),
    "group without a name": (ConfigError, lambda: full(""), ("name of a group", "not empty")),
    # ---- memory ----
    "arena of one page": (ConfigError, lambda: make_manager(pages=0), ("arena 0", "at least 2", "null page", "memory")),
    "too few arenas": (
        ConfigError,
        lambda: KVManager(KVLayout(target=(full("a"), full("b", slot_bytes=2))), kv_config()),
        ("2 arena(s)", "arena_pages", "1"),
    ),
    "model limit 0": (ConfigError, lambda: kv_config(max_model_len=0), ("max_model_len", "at least 1", "0")),
    "step of nothing": (ConfigError, lambda: kv_config(step_tokens=0), ("step_tokens", "at least 1")),
    "three steps ahead": (ConfigError, lambda: kv_config(steps_ahead=3), ("steps_ahead", "1 or 2", "3")),
    # ---- drafters ----
    "negative tap": (
        FootprintError,
        lambda: KVFootprint(name="mine", proposing=Proposing.CHAIN, groups=(full(),), taps=(3, -1)),
        ("mine", "taps", "-1", "target layer"),
    ),
    "passes for a negative k": (
        FootprintError,
        lambda: drafter("chain_from_taps").passes(-1),
        ("chain_from_taps", "k ", "-1", "at least 0"),
    ),
    # ---- the scheduler ----
    "pages for smaller steps than are planned": (
        ConfigError,
        lambda: Scheduler(SchedulerConfig(max_chunk_tokens=64), make_manager(step_tokens=32)),
        ("advance 64 tokens", "max_chunk_tokens 64", "KVConfig.step_tokens", "is 32", "raise it"),
    ),
    "a prefill worker that keeps too little for its peer": (
        ConfigError,
        lambda: Scheduler(SchedulerConfig(role=Role.PREFILL), make_manager(keep_margin=1)),
        ("prefill worker keeps 2", "KVConfig.keep_margin is 1", "KVLayout.margin"),
    ),
    "two steps with pages for one": (
        ConfigError,
        lambda: Scheduler(SchedulerConfig(step_in_flight=True), make_manager()),
        ("step_in_flight", "KVConfig.steps_ahead is 1", "set it to 2"),
    ),
    "a sanitizer that is off": (
        ConfigError,
        lambda: Sanitizer(KVLayout(target=(full(),)), kv_config(), mode=Mode.OFF),
        ("off", "make none", "Mode.LOG"),
    ),
    "no seats": (ConfigError, lambda: SchedulerConfig(max_num_seqs=0), ("max_num_seqs", "at least 1", "0")),
    "no protection": (
        ConfigError,
        lambda: SchedulerConfig(protect_after_preemptions=0),
        ("protect_after_preemptions", "at least 1"),
    ),
    "chunk of nothing": (ConfigError, lambda: SchedulerConfig(max_chunk_tokens=0), ("max_chunk_tokens",)),
    "fewer rows than seats": (
        ConfigError,
        lambda: SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8),
        ("max_num_batched_tokens", "8", "larger than max_num_seqs"),
    ),
    # ---- requests ----
    "id that is empty": (RequestError, add(id=""), ("id", "not empty")),
    "media past the prompt": (RequestError, add(media=(Media(1, 9, b"x"),)), ("mine", "media at [1, 9)", "3 tokens")),
    "media over each other": (
        RequestError,
        add(media=(Media(0, 2, b"x"), Media(1, 3, b"y"))),
        ("mine", "media at [1, 3)", "overlaps", "in order"),
    ),
    "media without content": (RequestError, add(media=(Media(0, 2, b""),)), ("mine", "media", "digest")),
    "empty prompt": (RequestError, add(prompt=[]), ("mine", "empty", "at least one token")),
    "max_tokens 0": (RequestError, add(max_tokens=0), ("mine", "max_tokens", "at least 1", "0")),
    "k below 0": (RequestError, add(k=-1), ("mine", "k ", "-1", "0 turns drafting off")),
    "negative token id": (RequestError, add(prompt=[1, -2]), ("mine", "token id", "0 to 4294967295")),
    "token id that is a fraction": (RequestError, add(prompt=[1, 2.5]), ("mine", "token id", "whole number")),
    "token id that is a word": (RequestError, add(prompt=["hello"]), ("mine", "token id", "whole number")),
    "prompt longer than the model's limit": (
        RequestError,
        add(prompt=[1] * 100),
        ("mine", "100 tokens", "limit is 100", "shorten the prompt"),
    ),
    "duplicate id": (RequestError, add_twice, ("mine", "in use", "choose another")),
    "more than the arena holds": (
        AdmissionError,
        lambda: Scheduler(SchedulerConfig(), make_manager(full(page=8), pages=4)).add(
            RequestSpec(id="mine", prompt=[1] * 20, max_tokens=100)
        ),
        ("mine", "120 tokens", "16 pages", "has 4", "shorten the prompt", "lower max_tokens", "more memory"),
    ),
    # ---- roles ----
    "handed over again": (
        RequestError,
        add(hand_over=True, awaits_peer=True),
        ("mine", "another worker has computed", "cannot be handed over again"),
    ),
    "several continuations on a prefill worker": (
        RequestError,
        lambda: scheduler(role=Role.PREFILL).add(
            RequestSpec(id="mine", prompt=[1], max_tokens=2, sequence_ids=("a", "b"), hand_over=True)
        ),
        ("mine", "n = 2", "ask the decode worker"),
    ),
    "a hand-over to a worker that cannot be one": (
        RequestError,
        lambda: scheduler(role=Role.DECODE).add(RequestSpec(id="mine", prompt=[1], max_tokens=2, hand_over=True)),
        ("mine", "hands nothing over", "send it to a prefill worker"),
    ),
    "a hand-over to a worker without the margin": (
        RequestError,
        lambda: Scheduler(SchedulerConfig(), make_manager(keep_margin=1)).add(
            RequestSpec(id="mine", prompt=[1], max_tokens=2, hand_over=True)
        ),
        ("mine", "hands nothing over", "send it to a prefill worker"),
    ),
    "another worker's KV for a prefill worker": (
        RequestError,
        lambda: scheduler(role=Role.PREFILL).add(RequestSpec(id="mine", prompt=[1], max_tokens=2, awaits_peer=True)),
        ("mine", "only computes prompts", "send it to a decode worker"),
    ),
    "a plain prompt for a worker that computes none": (
        RequestError,
        lambda: scheduler(role=Role.DECODE, load_failure=LoadFailure.FAIL).add(
            RequestSpec(id="mine", prompt=[1], max_tokens=2)
        ),
        ("mine", "no KV from a prefill worker", "prefill worker first", "kv_load_failure_policy recompute"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_a_typed_error_that_says_what_to_do(case: str) -> None:
    kind, attempt, words = CASES[case]
    with pytest.raises(OutriderError) as refused:
        attempt()
    assert type(refused.value) is kind
    for word in words:
        assert word in str(refused.value), f"{word!r} is not in: {refused.value}"
    assert "\n" not in str(refused.value)


def test_a_refused_request_leaves_nothing_behind() -> None:
    here = scheduler()
    for fields in ({"prompt": [1, -2]}, {"prompt": [1] * 100}, {"prompt": [1] * 90, "max_tokens": 10**6}):
        spec = {"id": "mine", "max_tokens": 4} | fields
        try:
            here.add(RequestSpec(**spec))
            here.abort("mine")
        except OutriderError:
            pass
    assert here.requests == {}
    assert here.kv.sequences == {}
    assert here.num_waiting == 0
    here.add(RequestSpec(id="mine", prompt=array("I", [1, 2]), max_tokens=2))


def test_a_wrong_request_is_also_a_value_error() -> None:
    """Callers who know nothing of this library catch it with what they have."""
    for kind in (ConfigError, RequestError):
        assert issubclass(kind, ValueError)
    assert not issubclass(OutOfPages, ValueError)


def test_every_error_has_one_base_and_a_place_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    for kind in kinds:
        assert issubclass(kind, OutriderError)
        assert kind.__name__ in errors.__doc__
        assert kind.__doc__


@pytest.mark.parametrize(
    ("build", "error", "says"),
    [
        (lambda: KVConfig(arena_page=(8,)), ConfigError, "did you mean 'arena_pages'?"),
        (lambda: KVConfig(), ConfigError, "arena_pages"),
        (lambda: SchedulerConfig(max_num_seq=4), ConfigError, "did you mean 'max_num_seqs'?"),
        (lambda: SchedulerConfig(colour="red"), ConfigError, "known fields: max_num_seqs"),
        (lambda: RequestSpec(id="a", prompt=[1], max_token=3), RequestError, "did you mean 'max_tokens'?"),
        (lambda: KVFootprint(name="x", proposing=Proposing.LOOKUP, taps_at=(1,)), FootprintError, "no field 'taps_at'"),
    ],
)
def test_an_unknown_or_missing_field_is_named_with_what_is_known(
    build: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as refused:
        build()
    assert says in str(refused.value)
