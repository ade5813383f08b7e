"""The option of `outrider serve` and `outrider worker` that tells routers what the prefix cache holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated

from outrider.cli.grouped import panel
from outrider.errors import ConfigError
from outrider.events.config import EXAMPLE, KVEventsConfig
from outrider.events.publisher import default_topic

event_option = panel("KV events")


@dataclass(frozen=True, kw_only=True)
class EventOptions:
    kv_events_config: Annotated[
        str | None,
        event_option(
            help=f"Publish what the prefix cache holds, for routers, as JSON with vLLM's fields: '{EXAMPLE}'. "
            "replay_endpoint lets subscribers ask for what they missed. Events contain prompts: do not publish them "
            "outside a private network.",
            metavar="JSON",
        ),
    ] = None

    def config(self, *, served_model: str | None) -> KVEventsConfig | None:
        """Returns the settings; None if nothing is published. The topic names the model as clients do."""
        if self.kv_events_config is None:
            return None
        try:
            value = json.loads(self.kv_events_config)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"--kv-events-config is not valid JSON ({problem}); write '{EXAMPLE}'") from None
        if not isinstance(value, dict):
            raise ConfigError(f"--kv-events-config must be a JSON object such as '{EXAMPLE}'")
        config = KVEventsConfig.of(value)
        assert config is not None
        if served_model is not None and not config.topic:
            config = replace(config, topic=default_topic(served_model))
        return config
