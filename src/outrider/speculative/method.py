"""What a drafter's file says about itself, in one object: how it is loaded, recognised, configured and trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, ExtensionError
from outrider.kv.archetypes import Archetype
from outrider.kv.checked import whole_number
from outrider.kv.footprint import KVFootprint

if TYPE_CHECKING:
    from outrider.speculative.checkpoints.fit import LayerIds
    from outrider.speculative.checkpoints.source import DrafterFiles
    from outrider.speculative.drafter import Drafter
    from outrider.speculative.settings import DrafterSettings

COMMON_OPTIONS = frozenset({"method", "num_speculative_tokens", "lookup"})
"""Fields of SpeculativeConfig that every drafter takes."""


class Training(Enum):
    """The ways of training a drafter that `outrider train` knows."""

    BLOCK = "block"
    """Masks behind an anchor, all predicted in one pass."""
    CHAIN = "chain"
    """One layer, unrolled over its own predictions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterMethod:
    """A drafter's registration. Each drafter's file ends with one for each of its names."""

    name: str
    """The `method` of a SpeculativeConfig, and the name of the entry point in packages other than Outrider."""
    title: str
    """The drafter's name in prose."""
    archetype: Archetype
    """How it treats KV: the kind of footprint that it declares when it is loaded."""
    load: Callable[[SpeculativeConfig, DrafterSettings], Drafter]
    options: frozenset[str] = frozenset()
    """Fields of SpeculativeConfig that it takes besides COMMON_OPTIONS. All others are refused if they are set."""
    trained_k: int = 4
    """Number of drafts that public checkpoints of this kind were trained to make."""
    recognises: Callable[[DrafterFiles], bool] | None = None
    """Whether a directory of safetensors is a checkpoint of this kind; None if it has no checkpoint of its own."""
    reads_gguf: bool = False
    """Whether the checkpoint may be a GGUF file."""
    layer_ids: Callable[[DrafterFiles], LayerIds | None] | None = None
    """How its config.json names the target layers that it reads; None if it does not name any."""
    training: Training | None = None
    """How `outrider train` makes it; None if it cannot be trained here."""

    def __post_init__(self) -> None:
        known = {field.name for field in fields(SpeculativeConfig)}
        wrong = {
            "archetype must be one of kv.archetypes.ARCHETYPES": not isinstance(self.archetype, Archetype),
            "load must be a function of (SpeculativeConfig, DrafterSettings)": not callable(self.load),
            "trained_k must be at least 1": self.trained_k < 1,
            f"options must be fields of SpeculativeConfig: {', '.join(sorted(known))}": not self.options <= known,
        }
        for requirement, broken in wrong.items():
            if broken:
                raise ExtensionError(f"the drafting method {self.name!r}: {requirement}")

    def check_loaded(self, drafter: object, *, target_layers: int) -> None:
        """Refuses what `load` returned if it is no drafter of this archetype for a target of so many layers."""
        # Torch and all that is built on it load slowly, and a registration is needed without them.
        from outrider.speculative.drafter import Drafter

        footprint = getattr(drafter, "footprint", None)
        if not isinstance(drafter, Drafter) or not isinstance(footprint, KVFootprint):
            raise ExtensionError(
                f"the drafting method {self.name!r}: load returned {type(drafter).__name__}, not a Drafter "
                "with a footprint"
            )
        if (bool(footprint.groups), bool(footprint.taps)) != (self.archetype.owns_kv, self.archetype.reads_taps):
            raise ExtensionError(
                f"the drafting method {self.name!r}: the footprint of the loaded drafter is not of the archetype "
                "that it is registered with; register the right one"
            )
        missing = [tap for tap in footprint.taps if tap >= target_layers]
        if missing:
            raise ExtensionError(
                f"the drafting method {self.name!r}: the drafter reads target layer {missing[0]}, but the target "
                f"has the layers 0 to {target_layers - 1}"
            )
        groups = () if drafter.layer_groups is None else drafter.layer_groups.specs
        if groups != footprint.groups:
            raise ExtensionError(
                f"the drafting method {self.name!r}: the groups of the footprint are not those of layer_groups, in "
                "which its layers lie; declare the footprint with groups=layer_groups.specs"
            )
        whole_number(
            drafter.default_k, f"the drafting method {self.name!r}: default_k", at_least=1, error=ExtensionError
        )

    def check_options(self, config: SpeculativeConfig) -> None:
        """Refuses options that this drafter does not take. Zero, false and None ask for nothing and are accepted."""
        for field in fields(config):
            if field.name in COMMON_OPTIONS | self.options:
                continue
            value = getattr(config, field.name)
            if value and (field.default is MISSING or value != field.default):
                raise ConfigError(
                    f"speculative_config: {field.name} is {value!r}, which method {self.name!r} does not take; "
                    f"leave {field.name} out"
                )
