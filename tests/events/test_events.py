"""KV events of real engines over real sockets, read by a subscriber that knows only llm-d's rules."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from socket import socket
from typing import Any

import pytest
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.events.llmd_reader import Reader

from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.events.config import KVEventsConfig
from outrider.sampling import SamplingParams

PLAIN = (None, None)
HYBRID = (24, 24, 24, None)
SIZE = 16
Start = Callable[..., tuple[Engine, Reader]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    closing: list[Any] = []

    def make(windows: tuple[int | None, ...] = PLAIN, *, buffer_steps: int = 1000, **settings: Any) -> Any:
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{tmp_path}/events",
            replay_endpoint=f"ipc://{tmp_path}/replay",
            buffer_steps=buffer_steps,
        )
        engine = tiny_engine(tiny_model(tiny_spec(windows=windows)), kv_events_config=events, **settings)
        reader = make_reader()
        closing.append(engine)
        return engine, reader

    def make_reader() -> Reader:
        reader = Reader(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
        closing.append(reader)
        reader.replay()
        return reader

    make.reader = make_reader  # type: ignore[attr-defined]
    yield make
    for thing in reversed(closing):
        thing.close()


def ask(engine: Engine, prompt: list[int], *, tokens: int = 8, salt: str = "") -> tuple[list[int], int]:
    """Returns the tokens of an answer, and how many tokens of its prompt were cached."""
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=tokens), salt=salt)
    output = engine.output("r")
    while engine.has_work:
        engine.step()
    return list(output.outputs[0].token_ids), output.metrics.cached_tokens


def conversations(engine: Engine, *, rounds: int, seed: int = 1) -> None:
    """Texts that share beginnings, more of them than the cache holds."""
    draw, texts = Random(seed), [[Random(seed).randrange(256) for _ in range(40)]]
    for _ in range(rounds):
        text = draw.choice(texts)[: draw.randrange(16, 120)]
        prompt = (text + [draw.randrange(256) for _ in range(draw.randrange(1, 60))])[:180]
        answer, _cached = ask(engine, prompt, tokens=draw.randrange(1, 20))
        texts.append(prompt + answer)


def check_against_hits(engine: Engine, reader: Reader) -> None:
    """Every announced text that no other one continues is one that the engine finds to the last block."""
    assert reader.texts
    assert reader.problems == []
    kv = engine.scheduler.kv
    block = kv.layout.groups[_full_group(engine)].page_tokens
    continued = {text[:-block] for text in reader.texts.values()}
    for text in [text for text in reader.texts.values() if text not in continued]:
        salt = text[0][0] if text[0] else ""
        tokens = array("i", [*text[1:], 255])
        sequence = kv.open("probe", tokens, total_tokens=len(tokens) + 1, salt=salt)
        hit, _views = kv.search(sequence, len(tokens) - 1, draft=False)
        kv.close(sequence)
        assert hit.end > len(tokens) - 1 - block, f"{hit.end} of {len(tokens) - 1} tokens are found"


def _full_group(engine: Engine) -> int:
    layout = engine.scheduler.kv.layout
    return next(group for group in layout.target_groups if not layout.groups[group].kind.slides)


def test_blocks_chain_and_removals_match_while_texts_come_and_go(start: Start) -> None:
    engine, reader = start(kv_cache_memory_bytes=60 * SIZE * 256)
    conversations(engine, rounds=30)
    reader.read()
    assert reader.kinds == {0: "full_attention"}
    assert next(iter(reader.topics)).endswith("@tiny-0")
    check_against_hits(engine, reader)


@pytest.mark.parametrize("retention", ["dense", "tail", "64"])
def test_a_hybrid_model_announces_only_what_its_windows_let_it_serve(start: Start, retention: str) -> None:
    engine, reader = start(HYBRID, kv_retention=retention, kv_cache_memory_bytes=60 * SIZE * 512)
    conversations(engine, rounds=15)
    reader.read()
    assert set(reader.kinds.values()) == {"full_attention", "sliding_window"}
    assert set(reader.windows.values()) == {24}
    check_against_hits(engine, reader)


def test_blocks_of_a_full_group_whose_window_is_lost_are_withdrawn(start: Start) -> None:
    engine, reader = start(HYBRID, kv_retention="tail")
    prompt = [Random(3).randrange(256) for _ in range(150)]
    ask(engine, prompt, tokens=1)
    reader.read()
    assert reader.texts
    kv = engine.scheduler.kv
    sliding = next(group for group in kv.layout.target_groups if kv.layout.groups[group].kind.slides)
    arena, index = kv.pool.arena(sliding), kv.pool.indexes[sliding]
    lost = list(index.pages.values())
    kv.pool._evict(arena.index, lost)
    for page in lost:
        arena.published[page] = 0
    engine._publish_events()
    reader.read()
    assert reader.texts == {}
    assert reader.problems == []


def test_a_router_that_comes_late_learns_everything_although_old_batches_are_gone(start: Start) -> None:
    engine, reader = start(buffer_steps=5, kv_cache_memory_bytes=60 * SIZE * 256)
    conversations(engine, rounds=20)
    reader.read()
    late = start.reader()  # type: ignore[attr-defined]
    assert late.problems == []
    assert late.texts == reader.texts


def test_a_router_that_was_away_goes_on_where_it_was(start: Start) -> None:
    engine, reader = start(HYBRID, kv_cache_memory_bytes=60 * SIZE * 512)
    conversations(engine, rounds=5)
    reader.read()
    before = reader.last
    reader._socket.disconnect(reader.endpoint)
    conversations(engine, rounds=8, seed=2)
    reader._socket.connect(reader.endpoint)
    reader.replay()
    assert before is not None
    assert reader.last is not None
    assert reader.last > before
    check_against_hits(engine, reader)
    fresh = start.reader()  # type: ignore[attr-defined]
    assert fresh.texts == reader.texts
    assert fresh.skipped == reader.skipped


def test_an_emptied_cache_is_announced_at_once(start: Start) -> None:
    engine, reader = start()
    conversations(engine, rounds=3)
    reader.read()
    assert reader.texts
    engine.reset_prefix_cache()
    reader.read()
    assert reader.texts == {}


def test_the_salt_of_a_tenant_stands_beside_its_first_block(start: Start) -> None:
    engine, reader = start()
    prompt = list(range(60))
    ask(engine, prompt, salt="tenant")
    ask(engine, prompt)
    reader.read()
    assert sorted(text[0] for text in reader.texts.values() if len(text) == 1 + SIZE) == [(), ("tenant",)]
    assert reader.problems == []


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "endpoint"),
        ({"publisher": "nats"}, "publisher"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"end_point": "tcp://*:1"}, "endpoint"),
        ("tcp://*:1", "mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        KVEventsConfig.of(given)


def test_an_address_that_is_taken_is_refused() -> None:
    with socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=address)
        with pytest.raises(ConfigError, match=address):
            tiny_engine(kv_events_config=config)


def test_events_need_a_prefix_cache() -> None:
    config = KVEventsConfig(enable_kv_cache_events=True)
    with pytest.raises(ConfigError, match="prefix cach"):
        tiny_engine(kv_events_config=config, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/events", True),
        ("tcp://router.internal:5557", False),
        ("tcp://10.0.0.3:5557", False),
    ],
)
def test_addresses_of_this_machine_are_bound_and_others_connected_to(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).binds is binds
