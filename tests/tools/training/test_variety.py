"""Steps that are not all alike: longer streams, smaller blocks, anchors where it is hard, a part of the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny import tiny_engine
from tests.tools.training.tiny import (
    END,
    LENGTH,
    PROMPT,
    assert_resumes_to_the_bit,
    greedy_streams,
    overfit_settings,
    settings_for,
    tiny_loaded,
    tiny_target,
    trainer_of,
    write_corpus,
)
from torch import Tensor

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.tools.training.batches import Batch, Pool, anchor_weights, eligible_anchors, known_counts, make_batch
from outrider.tools.training.corpus import Streams, write_shard
from outrider.tools.training.drafts import choose_tokens
from outrider.tools.training.head_part import HeadPart
from outrider.tools.training.loss import LossResult
from outrider.tools.training.pooling import StreamSource, best_and_probability, best_tokens
from outrider.tools.training.run import train_for
from outrider.tools.training.trainer import Trainer

VARIED: dict[str, Any] = {
    "k": 5,
    "anchors": 6,
    "smaller_block": 3,
    "smaller_share": 0.5,
    "long_share": 0.5,
    "long_pack": 2,
    "sure_weight": 0.15,
    "loss_vocab_size": 128,
}


def quiet(_line: str) -> None:
    pass


def write_long_corpus(directory: Path, count: int = 8) -> Path:
    """Twice as long: the target's answers, and again."""
    streams = greedy_streams(count)
    write_shard(
        directory,
        Streams(tokens=np.tile(streams.tokens, (1, 2)), roles=np.tile(streams.roles, (1, 2))),
    )
    return directory


def varied(directory: Path, **changes: Any) -> Any:
    write_corpus(directory / "corpus", 8)
    long = write_long_corpus(directory / "long")
    return settings_for(directory, "dflash", **(VARIED | {"long_data": (long,)} | changes))


def a_pool(count: int = 4, *, with_probability: bool = True) -> Pool:
    """What the tiny target thinks of its own text."""
    target = tiny_target()
    streams = greedy_streams(count)
    tokens = torch.from_numpy(streams.tokens.astype(np.int64))
    states = target.states(tokens, (1,))
    best, sure = best_and_probability(target, states.final, tokens)
    return Pool(
        tokens=tokens,
        best=best,
        roles=torch.from_numpy(streams.roles),
        taps=states.taps,
        final=states.final,
        probability=sure if with_probability else None,
    )


# ---- anchors -------------------------------------------------------------------------------------------


def test_how_sure_the_target_was_is_the_probability_of_the_token() -> None:
    target = tiny_target()
    tokens = torch.from_numpy(greedy_streams(4).tokens.astype(np.int64))
    final = target.states(tokens, (1,)).final
    best, sure = best_and_probability(target, final, tokens)
    assert torch.equal(best, best_tokens(target, final))
    chances = torch.softmax(final.float() @ target.head.float().T, dim=-1)
    for stream in range(4):
        assert sure[stream, 0] == 1.0
        for place in (1, 2, PROMPT, LENGTH - 1):
            expected = chances[stream, place - 1, tokens[stream, place]]
            assert sure[stream, place].item() == pytest.approx(expected.item(), rel=1e-4)


def test_anchors_lie_where_the_target_was_unsure_and_on_first_tokens() -> None:
    pool = a_pool()
    assert pool.probability is not None
    counts = known_counts(pool, 3).float()
    weights = anchor_weights(pool, 3, 0.25)
    assert (weights[:, PROMPT] == counts[:, PROMPT]).all()
    inside = eligible_anchors(pool.roles)
    inside[:, PROMPT] = False
    expected = counts * (0.25 + 0.75 * (1 - pool.probability))
    assert torch.allclose(weights[inside], expected[inside])
    assert weights[inside].unique().numel() > 10
    assert torch.equal(anchor_weights(a_pool(with_probability=False), 3, 0.25), counts)


def test_an_anchor_is_not_drawn_again_while_others_wait(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    trainer = trainer_of(settings_for(tmp_path, pool_streams=4, reuse=4, anchors=8))
    lane = trainer.lanes[0]
    for _ in range(4):
        trainer._next_batch()
    assert lane._times is not None
    assert lane._times.sum().item() == 4 * 4 * 8
    # 8 of some 39 places four times over: by chance 34 would come again.
    assert (lane._times > 1).sum().item() < 10


# ---- streams end to end --------------------------------------------------------------------------------


def test_streams_laid_end_to_end_keep_their_labels_and_look_back_farther() -> None:
    pool = a_pool(4)
    anchors = torch.tensor([[9, 12], [10, 20], [11, 30], [8, 40]])
    batch = make_batch(pool, anchors, torch.ones_like(anchors, dtype=torch.bool), 3)
    joined = batch.end_to_end(2)
    assert joined.tokens.shape == (2, 2 * LENGTH)
    assert joined.anchors.tolist() == [[9, 12, 10 + LENGTH, 20 + LENGTH], [11, 30, 8 + LENGTH, 40 + LENGTH]]
    for stream in range(2):
        for number, anchor in enumerate(joined.anchors[stream].tolist()):
            known = joined.known[stream, number]
            text = joined.tokens[stream, anchor + 1 : anchor + 4]
            # The tiny target wrote the text greedily: labels are what follows.
            assert torch.equal(joined.labels[stream, number][known], text[: int(known.sum())])
            assert known.any()
    assert joined.teacher is not None
    assert batch.teacher is not None
    assert torch.equal(joined.teacher[1, 2], batch.teacher[3, 0])
    assert torch.equal(joined.taps[0, LENGTH + 5], batch.taps[1, 5])


def test_every_kind_of_step_is_taken_and_has_as_many_rows(tmp_path: Path) -> None:
    trainer = trainer_of(varied(tmp_path))
    kinds: dict[tuple[int, int], set[int]] = {}
    for _ in range(24):
        batch = trainer._next_batch()
        trainer.scale = torch.ones(1) if trainer.scale is None else trainer.scale
        rows = batch.anchors.numel() * (batch.k + 1)
        kinds.setdefault((batch.tokens.shape[1], batch.k), set()).add(rows)
    assert set(kinds) == {(LENGTH, 5), (LENGTH, 2), (4 * LENGTH, 5), (4 * LENGTH, 2)}
    assert {rows for each in kinds.values() for rows in each} == {4 * 6 * 6}


# ---- a part of the head --------------------------------------------------------------------------------


def test_a_part_of_the_head_has_the_frequent_tokens_and_every_label() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(100, 8, generator=generator)
    part = HeadPart(head, np.arange(100)[::-1].copy(), 40)
    # More labels than there is room for, of which few are known.
    labels = torch.cat([torch.tensor([3]), torch.arange(40, 100)])
    known = (labels == 3) | (labels == 70) | (labels == 99)
    seen: set[int] = set()
    for _ in range(20):
        rows, place = part.choose(labels, known, generator)
        assert rows.shape == (40, 8)
        inside = (place >= 0).nonzero().flatten()
        assert sorted(place[inside].tolist()) == list(range(40))
        assert torch.equal(rows[place[inside]], head[inside])
        assert {*range(30), 70, 99} <= set(inside.tolist())
        seen |= set(inside.tolist())
    # The others change.
    assert len(seen) > 90


def watched_step(trainer: Trainer) -> tuple[Batch, Tensor, Tensor, dict[str, Tensor]]:
    """(batch, places of its labels, the part of the head, what the step reports) of one step."""
    batches, scored = [], []
    next_batch, head_loss = trainer._next_batch, trainer.head_loss

    def watched_batch() -> Batch:
        batches.append(next_batch())
        return batches[-1]

    def watched_loss(rows: Tensor, labels: Tensor, *more: Any, part: Tensor) -> LossResult:
        scored.append((labels, part))
        return head_loss(rows, labels, *more, part=part)

    trainer._next_batch = watched_batch  # type: ignore[method-assign]
    trainer.head_loss = watched_loss  # type: ignore[assignment]
    values = trainer.train_step()
    return batches[0], *scored[0], values


def test_a_step_finds_its_labels_in_the_part(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    trainer = trainer_of(settings_for(tmp_path, loss_vocab_size=128))
    batch, places, part, values = watched_step(trainer)
    known = batch.known.flatten()
    assert known.sum() > 40
    assert torch.equal(part[places[known]], trainer.plan.head[batch.labels.flatten()[known]])
    assert values["known"].item() == pytest.approx(batch.known.float().mean().item())


def test_labels_for_which_the_part_has_no_room_do_not_count(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    trainer = trainer_of(settings_for(tmp_path, loss_vocab_size=4))
    batch, places, part, values = watched_step(trainer)
    head, labels = trainer.plan.head, batch.labels.flatten()
    found = batch.known.flatten() & (part[places] == head[labels]).all(-1)
    assert 0 < found.sum() < batch.known.sum()
    assert values["known"].item() == pytest.approx(found.float().mean().item())


# ---- whole runs ----------------------------------------------------------------------------------------


def test_a_varied_run_that_is_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    assert_resumes_to_the_bit(varied(tmp_path, steps=14, distil=0.3), stopped_after=5)


def test_smaller_blocks_are_learnt_told_and_used_by_the_engine(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 4)
    settings = overfit_settings(
        tmp_path, "dflash", k=5, anchors=16, smaller_block=3, smaller_share=0.5, steps=160, sure_weight=0.5
    )
    lines: list[str] = []
    found = train_for(settings, tiny_target(), report=lines.append)
    assert found is not None
    smaller = found["smaller_block"]
    assert (smaller["block_size"], smaller["k"]) == (3, 2)
    assert smaller["categories"]["all"]["mean_acceptance_length"] > 2.2
    assert "2 drafts from blocks of 3 rows" in lines[-2]
    assert json.loads((settings.output / "config.json").read_text())["smaller_block_sizes"] == [3]
    card = (settings.output / "README.md").read_text()
    assert "for up to 2 drafts, 3" in card
    assert "50% of the steps on blocks of 3 rows" in card

    config = SpeculativeConfig(method="dflash", model=str(settings.output), num_speculative_tokens=2)
    engine = tiny_engine(tiny_loaded(), speculative_config=config)
    prompts = greedy_streams(4).tokens[:, :PROMPT].tolist()
    LLM.over(engine).generate(prompts, SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT))
    assert engine.runner._footprint.block_sizes == (3,)
    simulated = smaller["categories"]["all"]["mean_acceptance_length"]
    assert engine.speculation.mean_acceptance_length == pytest.approx(simulated, abs=0.3)


def test_no_stream_of_any_length_has_the_mask_token(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    free = choose_tokens(settings_for(tmp_path), [greedy_streams(8)], END + 1).mask_token_id
    long = np.tile(greedy_streams(4).tokens, (1, 2))
    long[:, 3] = free
    write_shard(tmp_path / "long", Streams(tokens=long, roles=np.ones_like(long, dtype=np.bool_)))
    settings = settings_for(tmp_path, long_data=(tmp_path / "long",), steps=1)
    train_for(settings, tiny_target(), report=quiet)
    mask = json.loads((settings.output / "config.json").read_text())["dflash_config"]["mask_token_id"]
    assert mask not in greedy_streams(8).tokens
    assert mask not in long


def test_the_card_tells_of_both_lengths(tmp_path: Path) -> None:
    settings = varied(tmp_path, steps=3, holdout=2)
    train_for(settings, tiny_target(), report=quiet)
    card = (settings.output / "README.md").read_text()
    assert f"streams of {LENGTH} tokens" in card
    assert f"8 streams of {2 * LENGTH} tokens" in card
    assert f"50% of the steps on streams of {2 * LENGTH} tokens, laid end to end by 2." in card
    assert "weights 0.15 + 0.85 (1 - p)" in card
    assert "The loss of a step is over 128 tokens." in card


def test_streams_that_are_added_come_before_any_is_seen_again(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 8)
    source = StreamSource((corpus,), vocab_size=END + 1, holdout=0, seed=0, watch=True)
    seen = source.next(4).tolist()
    write_shard(corpus, greedy_streams(8, seed=1))
    seen += source.next(12).tolist()
    assert sorted(seen) == list(range(16))


def test_long_streams_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 8)
    long = write_long_corpus(tmp_path / "long")
    train_for(settings_for(tmp_path, steps=1), tiny_target(), report=quiet)
    with pytest.raises(ConfigError, match="long was False, now True"):
        train_for(settings_for(tmp_path, steps=2, long_data=(long,)), tiny_target(), report=quiet)


# ---- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("eagle3", {"smaller_block": 2}, "leave smaller_block out"),
        ("dflash", {"smaller_block": 4}, "2 to 3"),
        ("dflash", {"smaller_block": 1}, "2 to 3"),
        ("dflash", {"sure_weight": 0.0}, "sure_weight"),
        ("dflash", {"sure_weight": float("nan")}, "sure_weight"),
        ("dflash", {"long_share": 1.5}, "long_share"),
        ("dflash", {"smaller_share": -0.1}, "smaller_share"),
        ("dflash", {"long_pack": 0}, "long_pack"),
        ("dflash", {"loss_vocab_size": 0}, "loss_vocab_size"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    method: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_for(tmp_path, method, **changes)


def test_long_streams_must_be_longer_and_a_part_smaller(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 8)
    with pytest.raises(ConfigError, match="long_data must have the longer ones"):
        trainer_of(settings_for(tmp_path, long_data=(corpus,)))
    with pytest.raises(ConfigError, match="must be less than the 256 tokens"):
        trainer_of(settings_for(tmp_path, loss_vocab_size=256))
    with pytest.raises(ConfigError, match="does not exist; make a corpus first"):
        train_for(settings_for(tmp_path, long_data=(tmp_path / "none",)), tiny_target(), report=quiet)
