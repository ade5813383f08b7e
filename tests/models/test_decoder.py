"""A decoder refuses a backend that lacks what its layers need."""

from __future__ import annotations

from typing import Any

import pytest
from tests.backends.cases import decoder_parameters, decoder_spec

from outrider.backends.base import Capability
from outrider.backends.reference.backend import ReferenceBackend
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder

NEEDS: dict[Capability, tuple[dict[str, Any], str]] = {
    Capability.CAUSAL: ({}, "causal attention"),
    Capability.WINDOW: ({"windows": (8, None)}, "sliding windows of 8 tokens"),
    Capability.SINKS: ({"sinks": True}, "attention sinks"),
    Capability.SOFTCAP: ({"attention_softcap": 50.0}, "capped at 50"),
}


class Limited(ReferenceBackend):
    name = "limited"

    def __init__(self, missing: Capability) -> None:
        super().__init__()
        self.capabilities = frozenset(Capability) - {missing}


@pytest.mark.parametrize("missing", NEEDS)
def test_a_missing_capability_is_refused_by_name(missing: Capability) -> None:
    changes, words = NEEDS[missing]
    spec = decoder_spec(**changes)
    with pytest.raises(ConfigError) as caught:
        Decoder(spec, decoder_parameters(spec), Limited(missing), max_position=64)
    assert all(word in str(caught.value) for word in (words, "'limited'", "backend='reference'"))


@pytest.mark.parametrize("missing", [need for need in NEEDS if need is not Capability.CAUSAL])
def test_a_capability_that_no_layer_needs_may_be_missing(missing: Capability) -> None:
    spec = decoder_spec()
    Decoder(spec, decoder_parameters(spec), Limited(missing), max_position=64)
