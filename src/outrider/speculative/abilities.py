"""Whether the operations in use can compute the attention of a drafter's layers, checked before anything runs."""

from __future__ import annotations

from outrider.backends.base import Backend, Capability
from outrider.errors import ConfigError
from outrider.models.kv_groups import LayerGroups

PLAIN = {
    Capability.CAUSAL: "attends causally",
    Capability.NON_CAUSAL: "attends both ways inside its block",
    Capability.WINDOW: "attends within a window",
}


def needed(groups: LayerGroups, layer: int) -> frozenset[Capability]:
    """Returns what the attention of one layer needs."""
    spec = groups.specs[groups.place[layer][0]]
    direction = Capability.CAUSAL if spec.causal else Capability.NON_CAUSAL
    return frozenset({direction, Capability.WINDOW} if spec.kind.slides else {direction})


def check_abilities(backend: Backend, groups: LayerGroups, drafter: str) -> None:
    """Refuses a drafter whose layers need more of attention than the backend can do."""
    for layer in range(len(groups.place)):
        missing = sorted(needed(groups, layer) - backend.capabilities, key=lambda ability: ability.value)
        if missing:
            what = " and ".join(PLAIN[ability] for ability in missing)
            can = ", ".join(sorted(ability.value for ability in backend.capabilities)) or "nothing"
            raise ConfigError(
                f"layer {layer} of the drafter {drafter} {what}, which the backend {backend.name!r} cannot do "
                f"(it can: {can}); choose another backend ('reference' can do it), or another drafter"
            )
