"""MTP: a module inside the target's own checkpoint that predicts the token after next, applied k times."""

from __future__ import annotations

from outrider.speculative.drafters.ahead import AheadNetwork, OneLayerAhead
from outrider.speculative.settings import DrafterSettings


class Mtp(OneLayerAhead):
    def __init__(self, network: AheadNetwork, settings: DrafterSettings, *, name: str, fingerprint: str) -> None:
        super().__init__(network, settings, method="mtp", name=name, fingerprint=fingerprint)
