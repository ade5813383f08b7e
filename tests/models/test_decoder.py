"""A decoder refuses operations that cannot do what its layers ask for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec

from outrider.errors import ConfigError
from outrider.layers.ops import Ability, TorchOps
from outrider.models.decoder import Decoder

NEEDS: dict[Ability, tuple[dict[str, Any], str]] = {
    Ability.CAUSAL: ({}, "causal attention"),
    Ability.WINDOW: ({"windows": (8, None)}, "sliding windows of 8 tokens"),
    Ability.SINKS: ({"sinks": True}, "attention sinks"),
    Ability.SOFTCAP: ({"attention_softcap": 50.0}, "capped at 50"),
}


class Limited(TorchOps):
    name = "limited"

    def __init__(self, missing: Ability) -> None:
        self.abilities = frozenset(Ability) - {missing}


@pytest.mark.parametrize("missing", NEEDS)
def test_what_operations_cannot_do_is_refused_by_name(missing: Ability) -> None:
    changes, words = NEEDS[missing]
    model = tiny_model(tiny_spec(**changes))
    with pytest.raises(ConfigError) as caught:
        Decoder(model.spec, model.parameters, Limited(missing), max_position=64)
    assert all(word in str(caught.value) for word in (words, "'limited'", "ops='torch'"))


def test_what_is_not_asked_for_need_not_be_there() -> None:
    model = tiny_model()
    for missing in NEEDS.keys() - {Ability.CAUSAL}:
        Decoder(model.spec, model.parameters, Limited(missing), max_position=64)


def test_an_engine_refuses_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchOps, "abilities", frozenset(Ability) - {Ability.WINDOW})
    with pytest.raises(ConfigError, match="sliding windows of 8 tokens"):
        tiny_engine(tiny_model(tiny_spec(windows=(8, None))))
