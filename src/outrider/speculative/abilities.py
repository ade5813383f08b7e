"""What a drafter's layers ask of attention, checked before anything runs, whichever way they attend."""

from __future__ import annotations

from outrider.errors import ConfigError
from outrider.layers.ops import Ability, Ops
from outrider.models.kv_groups import LayerGroups

PLAIN = {
    Ability.CAUSAL: "attends causally",
    Ability.NON_CAUSAL: "attends both ways inside its block",
    Ability.WINDOW: "attends within a window",
}


def needed(groups: LayerGroups, layer: int) -> frozenset[Ability]:
    """What one layer needs."""
    spec = groups.specs[groups.place[layer][0]]
    direction = Ability.CAUSAL if spec.causal else Ability.NON_CAUSAL
    return frozenset({direction, Ability.WINDOW} if spec.kind.freed_at(0) is not None else {direction})


def check_abilities(ops: Ops, groups: LayerGroups, drafter: str) -> None:
    """Refuse a drafter that asks for more than these operations can do."""
    for layer in range(len(groups.place)):
        missing = sorted(needed(groups, layer) - ops.abilities, key=lambda ability: ability.value)
        if missing:
            what = " and ".join(PLAIN[ability] for ability in missing)
            can = ", ".join(sorted(ability.value for ability in ops.abilities)) or "nothing"
            raise ConfigError(
                f"layer {layer} of the drafter {drafter} {what}, which the operations {ops.name!r} cannot do "
                f"(they can: {can}); choose others (ops='torch' can do it), or another drafter"
            )
