"""From a drafting method's name to its drafter. A new drafter is one file, and one line here or an entry point.

Importing this module imports neither torch nor any drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from outrider.config import SpeculativeConfig
from outrider.errors import ConfigError, ExtensionError, ModelError
from outrider.extensions import DRAFTERS, extension_names, load_extension, warn_of_claims
from outrider.models.resolve import ModelKind, resolve_model
from outrider.speculative.method import DrafterMethod

if TYPE_CHECKING:
    from outrider.speculative.drafter import Drafter
    from outrider.speculative.settings import DrafterSettings

BUILT_IN: Mapping[str, str] = {
    "ngram": "outrider.speculative.drafters.ngram:NGRAM",
    "dflash": "outrider.speculative.drafters.dflash:DFLASH",
    "eagle3": "outrider.speculative.drafters.eagle:EAGLE3",
    "eagle": "outrider.speculative.drafters.eagle:EAGLE",
    "mtp": "outrider.speculative.drafters.mtp:MTP",
    "draft_model": "outrider.speculative.drafters.draft_model:DRAFT_MODEL",
}
"""Where the registration of each built-in drafter lies, as module:attribute."""


def method_names() -> list[str]:
    """Names of all drafting methods: the built-in ones, then those of other installed packages."""
    return [*BUILT_IN, *extension_names(DRAFTERS, built_in=BUILT_IN)]


def drafting_method(name: str) -> DrafterMethod:
    """The registration of a drafting method; imports the drafter's module."""
    if name in BUILT_IN:
        warn_of_claims(DRAFTERS, name)
        return _built_in(name)
    method = load_extension(DRAFTERS, name, DrafterMethod)
    if method is None:
        raise ConfigError(
            f"unknown drafting method {name!r}; known methods: {', '.join(method_names())}. Drafters of other "
            f"packages are found once the package is installed, by its entry points in {DRAFTERS}"
        )
    if method.name != name:
        raise ExtensionError(
            f"an installed package registers the drafter {method.name!r} under the name {name!r} in {DRAFTERS}; "
            "its entry point and its DrafterMethod must have the same name"
        )
    return method


def _built_in(name: str) -> DrafterMethod:
    module, _, attribute = BUILT_IN[name].partition(":")
    method = getattr(import_module(module), attribute)
    assert isinstance(method, DrafterMethod)
    assert method.name == name
    return method


def load_drafter(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
    method = drafting_method(config.method)
    method.check_options(config)
    drafter = method.load(config, settings)
    method.check_loaded(drafter, target_layers=len(settings.target.spec.layers))
    return drafter


def guess_method(name: str) -> str:
    """The method that a drafter's checkpoint is for, judged by its configuration and its tensors. `name` is a path or
    a hub id."""
    from outrider.speculative.checkpoints.source import open_drafter

    broken: list[ExtensionError] = []
    methods = _methods(broken)
    if resolve_model(name).kind is not ModelKind.DIRECTORY:
        found = next((method for method in methods if method.reads_gguf), None)
        assert found is not None
        return found.name
    files = open_drafter(name).files
    for method in methods:
        try:
            recognised = method.recognises is not None and method.recognises(files)
        # A package's own code can fail in any way, and must not keep other methods from being asked.
        except Exception as problem:
            broken.append(ExtensionError(f"the drafter {method.name!r} failed to look at it: {problem!r}"))
            continue
        if recognised:
            return method.name
    unasked = "".join(f"; {problem}" for problem in broken)
    raise ModelError(
        f"{files.config.source} does not say what kind of drafter this is (architecture {files.architecture!r}); "
        f"name the method: {', '.join(method_names())}{unasked}"
    )


def _methods(broken: list[ExtensionError]) -> Iterator[DrafterMethod]:
    """All methods, the built-in ones first. The errors of packages that cannot be used are added to `broken`."""
    yield from map(_built_in, BUILT_IN)
    for name in extension_names(DRAFTERS, built_in=BUILT_IN):
        try:
            yield drafting_method(name)
        except ExtensionError as problem:
            broken.append(problem)


def written_layer_ids(config: SpeculativeConfig, settings: DrafterSettings, taps: Sequence[int]) -> str | None:
    """The line of the drafter's config.json that would name these taps; None if no file says which layers are read."""
    from outrider.speculative.checkpoints.source import named_checkpoint, open_drafter

    method = drafting_method(config.method)
    if method.layer_ids is None:
        return None
    ids = method.layer_ids(open_drafter(named_checkpoint(config, settings)).files)
    return None if ids is None else ids.written(taps)
