"""Model families: how each one's configuration and tensor names are read. A new family is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelError
from outrider.models.recipes.base import Recipe
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.gemma import GEMMA2, GEMMA3, GEMMA3_BESIDE_IMAGES
from outrider.models.recipes.gpt_oss import GPT_OSS
from outrider.models.recipes.llama import LLAMA, MISTRAL
from outrider.models.recipes.qwen2 import QWEN2
from outrider.models.recipes.qwen3 import QWEN3
from outrider.models.recipes.qwen3_moe import QWEN3_MOE

RECIPES: tuple[Recipe, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    GEMMA3_BESIDE_IMAGES,
    GPT_OSS,
)


def recipe_for(config: Mapping[str, Any], source: str) -> Recipe:
    """The recipe of a Hugging Face configuration."""
    names = ConfigReader(config, source).text_list("architectures")
    # The class decides where it is given: the same model_type also covers classifiers and draft heads.
    wanted = names[0] if names else config.get("model_type")
    if wanted is None:
        raise ModelError(f"{source} has neither architectures nor model_type, so it does not say what it is")
    found = next((r for r in RECIPES if wanted in (r.architectures if names else r.model_types)), None)
    if found is None:
        known = ", ".join(name for recipe in RECIPES for name in recipe.architectures)
        raise ModelError(f"{source}: architecture {wanted!r} is not supported; supported: {known}")
    return found


def recipe_for_gguf(architecture: object, source: str) -> Recipe:
    """The recipe of a GGUF file's general.architecture."""
    found = next((recipe for recipe in RECIPES if recipe.gguf is not None and recipe.gguf == architecture), None)
    if found is None:
        known = ", ".join(recipe.gguf for recipe in RECIPES if recipe.gguf is not None)
        raise ModelError(f"{source}: GGUF architecture {architecture!r} is not supported; supported: {known}")
    return found


__all__ = ["RECIPES", "Recipe", "recipe_for", "recipe_for_gguf"]
