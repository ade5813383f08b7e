"""Model families: how each one's configuration and tensor names are read.

A new family is one file, and one line here or an entry point of another package (see `outrider.extensions`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from outrider.errors import ExtensionError, ModelError
from outrider.extensions import MODELS, extension_names, load_extension, warn_of_claims
from outrider.models.recipes.base import Recipe
from outrider.models.recipes.config import ConfigReader
from outrider.models.recipes.gemma import GEMMA2, GEMMA3, GEMMA3_MULTIMODAL
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
    GEMMA3_MULTIMODAL,
    GPT_OSS,
)


def recipe_for(config: Mapping[str, Any], source: str) -> Recipe:
    """Returns the recipe for a Hugging Face configuration."""
    names = ConfigReader(config, source).text_list("architectures")
    # The class decides if it is given: a model_type also covers classifiers and draft heads.
    wanted = names[0] if names else config.get("model_type")
    if wanted is None:
        raise ModelError(f"{source} has neither architectures nor model_type, so its architecture is unknown")
    found = next((r for r in RECIPES if wanted in (r.architectures if names else r.model_types)), None)
    if found is not None:
        warn_of_claims(MODELS, wanted)
        return found
    if names and (recipe := _registered(wanted)) is not None:
        return recipe
    broken: list[ExtensionError] = []
    found = None if names else next((r for r in _of_other_packages(broken) if wanted in r.model_types), None)
    if found is None:
        raise ModelError(
            f"{source}: architecture {wanted!r} is not supported; supported: {', '.join(architectures())}. For "
            f"others, install a package that registers a recipe for them in {MODELS}{_listed(broken)}"
        )
    return found


def recipe_for_gguf(architecture: object, source: str) -> Recipe:
    """Returns the recipe for the general.architecture of a GGUF file."""
    broken: list[ExtensionError] = []
    recipes = (recipe for recipe in chain(RECIPES, _of_other_packages(broken)) if recipe.gguf is not None)
    found = next((recipe for recipe in recipes if recipe.gguf == architecture), None)
    if found is None:
        known = ", ".join(recipe.gguf for recipe in RECIPES if recipe.gguf is not None)
        raise ModelError(
            f"{source}: GGUF architecture {architecture!r} is not supported; supported: {known}{_listed(broken)}"
        )
    return found


def architectures() -> list[str]:
    """Names of all supported architectures: the built-in ones, then those of other installed packages."""
    built_in = [name for recipe in RECIPES for name in recipe.architectures]
    return [*built_in, *extension_names(MODELS, built_in=built_in)]


def _registered(architecture: str) -> Recipe | None:
    """The recipe that another package registers for an architecture."""
    recipe = load_extension(MODELS, architecture, Recipe)
    if recipe is not None and architecture not in recipe.architectures:
        raise ExtensionError(
            f"an installed package registers {architecture!r} in {MODELS} with a recipe for "
            f"{', '.join(recipe.architectures)}; the name of the entry point must be one of the recipe's architectures"
        )
    return recipe


def _of_other_packages(broken: list[ExtensionError]) -> Iterator[Recipe]:
    """The recipes of other packages. The errors of packages that cannot be used are added to `broken`."""
    for name in extension_names(MODELS):
        try:
            recipe = _registered(name)
        except ExtensionError as problem:
            broken.append(problem)
        else:
            assert recipe is not None
            yield recipe


def _listed(broken: Sequence[ExtensionError]) -> str:
    return "".join(f"; {problem}" for problem in broken)


__all__ = ["RECIPES", "Recipe", "architectures", "recipe_for", "recipe_for_gguf"]
