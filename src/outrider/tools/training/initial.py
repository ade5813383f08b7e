"""Initial weights of a run, from a drafter that was exported before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError, ModelError
from outrider.speculative.checkpoints.source import DrafterFiles, open_drafter
from outrider.tools.training.drafts import DraftPlan, TokenChoices, choose_taps
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target

# Relative distance between the stored head and the target's: it was rounded to 16 bits when exported.
HEAD_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InitialDrafter:
    """An exported drafter whose configuration fits the run; `weights_for` checks its tensors."""

    files: DrafterFiles
    choices: TokenChoices

    def weights_for(self, plan: DraftPlan) -> dict[str, Tensor]:
        """Returns the weights in float32 by name, as exported: with the scale of the taps folded into `fc`."""
        wanted = plan.network.state_dict()
        stored = self.files.tensors
        wrong = {
            name: (list(stored[name].shape) if name in stored else "missing", list(tensor.shape))
            for name, tensor in wanted.items()
            if name not in stored or tuple(stored[name].shape) != tuple(tensor.shape)
        }
        _refuse(self.files, wrong)
        if "lm_head.weight" in stored:
            head, own = self.files.table("lm_head.weight").float(), plan.head.detach().float().cpu()
            if head.shape != own.shape or float((head - own).norm()) > HEAD_TOLERANCE * float(own.norm()):
                raise ConfigError(
                    f"{self.files.path} has a head that is not the target's, so it cannot be trained further; choose "
                    "another --init"
                )
        return {name: self.files.table(name).float().clone() for name in wanted}


def open_initial(settings: TrainSettings, target: Target) -> InitialDrafter:
    """Opens a drafter in one of the layouts that we export: z-lab's for DFlash, speculators' for EAGLE-3."""
    assert settings.init is not None
    files = open_drafter(str(settings.init)).files
    try:
        if settings.in_blocks:
            return _dflash(settings, target, files)
        return _eagle3(settings, target, files)
    except ModelError as problem:
        raise ConfigError(f"{files.path} cannot be used as --init: {problem}") from None


def _dflash(settings: TrainSettings, target: Target, files: DrafterFiles) -> InitialDrafter:
    config = files.config
    inner = config.fields.get("dflash_config")
    if not isinstance(inner, dict):
        raise ConfigError(
            f"{files.path} is not a DFlash drafter in z-lab's layout: its config.json has no dflash_config"
        )
    fields = config.inner("dflash_config", inner)
    mask = fields.integer("mask_token_id")
    found = {
        "layers": config.integer("num_hidden_layers"),
        "taps": list(fields.integer_list("target_layer_ids")),
        "causal": fields.flag("causal", False),
        "mask_token_id": mask,
    }
    wanted = {
        "layers": settings.layers,
        "taps": list(choose_taps(settings, len(target.spec.layers))),
        "causal": settings.causal,
        "mask_token_id": mask if settings.mask_token_id is None else settings.mask_token_id,
    }
    _compare(files, found, wanted)
    return InitialDrafter(files=files, choices=TokenChoices(mask_token_id=mask, kept=None))


def _eagle3(settings: TrainSettings, target: Target, files: DrafterFiles) -> InitialDrafter:
    config = files.config
    if config.fields.get("speculators_model_type") != "eagle3":
        raise ConfigError(f"{files.path} is not an EAGLE-3 drafter in the speculators layout")
    kept = _kept(files)
    size = target.spec.vocab_size if kept is None else len(kept)
    found = {
        "taps": [number - 1 for number in config.integer_list("eagle_aux_hidden_state_layer_ids")],
        "draft_vocab_size": size,
    }
    wanted = {
        "taps": list(choose_taps(settings, len(target.spec.layers))),
        "draft_vocab_size": size if settings.draft_vocab_size is None else settings.draft_vocab_size,
    }
    _compare(files, found, wanted)
    if kept is not None and not 0 <= min(kept) <= max(kept) < target.spec.vocab_size:
        raise ConfigError(f"{files.path}: d2t names tokens outside the vocabulary of the target")
    return InitialDrafter(files=files, choices=TokenChoices(mask_token_id=None, kept=kept))


def _kept(files: DrafterFiles) -> tuple[int, ...] | None:
    if "d2t" not in files.tensors:
        return None
    offsets = files.table("d2t").to(torch.int64)
    return tuple((offsets + torch.arange(len(offsets))).tolist())


def _compare(files: DrafterFiles, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    _refuse(files, {name: (found[name], wanted[name]) for name in wanted if found[name] != wanted[name]})


def _refuse(files: DrafterFiles, different: dict[str, tuple[Any, Any]]) -> None:
    if different:
        listed = ", ".join(f"{name} is {there}, wanted {here}" for name, (there, here) in different.items())
        raise ConfigError(f"{files.path} has another shape than the drafter to train ({listed})")
