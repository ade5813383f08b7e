"""Settings under which drafters are loaded for tiny targets."""

from __future__ import annotations

from typing import Any

import torch

from outrider.backends.reference.backend import ReferenceBackend
from outrider.models.load import LoadedModel
from outrider.speculative.settings import DrafterSettings


def settings_for(target: LoadedModel, **changes: Any) -> DrafterSettings:
    settings: dict[str, Any] = {
        "target": target,
        "backend": ReferenceBackend(),
        "page_tokens": 16,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "max_model_len": 256,
    }
    return DrafterSettings(**(settings | changes))
