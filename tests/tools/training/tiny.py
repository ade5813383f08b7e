"""A tiny target, text that it wrote itself, and short runs over it."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.engine.tiny import tiny_model, tiny_spec

from outrider.models.load import LoadedModel
from outrider.tools.training.checkpoint import load_state
from outrider.tools.training.corpus import Streams, write_shard
from outrider.tools.training.drafts import DraftPlan, TokenChoices, choose_tokens, make_plan
from outrider.tools.training.generate import Conversation, Lockstep, Opening
from outrider.tools.training.lanes import Lane, open_lanes
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target
from outrider.tools.training.trainer import Trainer

LENGTH = 48
PROMPT = 8
END = 255


@cache
def tiny_loaded() -> LoadedModel:
    return tiny_model(tiny_spec(windows=(None, None, None)))


@cache
def tiny_target() -> Target:
    model = tiny_loaded()
    return Target(model.spec, model.parameters, name=model.name, fingerprint=model.fingerprint)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(END) for _ in range(PROMPT)] for _ in range(count)]


@cache
def greedy_streams(count: int, seed: int = 0, temperature: float = 0.0) -> Streams:
    """Prompts and the target's own answers, to the stream's end."""
    conversation = Conversation(end=END, to_question=(), to_answer=(), single=True)
    lockstep = Lockstep(tiny_target(), streams=count, length=LENGTH, conversation=conversation, seed=seed)
    return lockstep.run([Opening(ids=ids, temperature=temperature) for ids in random_prompts(count, seed)])


def write_corpus(directory: Path, count: int = 8, seed: int = 0) -> Path:
    write_shard(directory, greedy_streams(count, seed))
    return directory


def settings_for(directory: Path, method: str = "dflash", **changes: Any) -> TrainSettings:
    """Of a run in `directory`, whose corpus lies in `directory / "corpus"`."""
    values: dict[str, Any] = {
        "method": method,
        "data": (directory / "corpus",),
        "output": directory / "drafter",
        "steps": 4,
        "layers": 2 if method == "dflash" else 1,
        "k": 3,
        "batch_streams": 4,
        "anchors": 8,
        "pool_streams": 8,
        "reuse": 2,
        "lr": 5e-3,
        "warmup_steps": 2,
        "holdout": 0,
        "compiled": False,
    }
    return TrainSettings(**(values | changes))


def lanes_of(settings: TrainSettings) -> list[Lane]:
    return open_lanes(settings, vocab_size=tiny_target().spec.vocab_size)


def plan_of(settings: TrainSettings, lanes: list[Lane], choices: TokenChoices | None = None) -> DraftPlan:
    target = tiny_target()
    if choices is None:
        choices = choose_tokens(settings, [lane.source.streams for lane in lanes], target.spec.vocab_size)
    return make_plan(settings, target, max(lane.context_tokens for lane in lanes), choices)


def trainer_of(settings: TrainSettings, *, resume: bool = False) -> Trainer:
    """Fresh, or from the state in the output."""
    lanes = lanes_of(settings)
    if not resume:
        return Trainer(settings, tiny_target(), plan_of(settings, lanes), lanes)
    state = load_state(settings.output)
    assert state is not None
    plan = plan_of(settings, lanes, TokenChoices.from_state(state["choices"]))
    trainer = Trainer(settings, tiny_target(), plan, lanes)
    trainer.resume(state)
    return trainer


def assert_resumes_to_the_bit(settings: TrainSettings, *, stopped_after: int) -> None:
    """A run that is saved in the middle and goes on ends where one ends that was left alone."""
    straight = trainer_of(settings)
    steps = settings.steps
    assert steps is not None
    losses = [straight.train_step()["loss"].item() for _ in range(steps)]
    first = trainer_of(settings)
    for _ in range(stopped_after):
        first.train_step()
    first.save()
    second = trainer_of(settings, resume=True)
    assert second.step == stopped_after
    assert [second.train_step()["loss"].item() for _ in range(steps - stopped_after)] == losses[stopped_after:]
    expected = straight.network.state_dict()
    for name, tensor in second.network.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def overfit_settings(directory: Path, method: str, **changes: Any) -> TrainSettings:
    """Few streams, many steps: the drafter should know them by heart."""
    corpus = directory / "corpus"
    values: dict[str, Any] = {"steps": 80, "anchors": 24, "lr": 2e-2, "clip": 10.0, "evaluation": corpus}
    return settings_for(directory, method, **(values | changes))
