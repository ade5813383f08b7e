"""Drafters and model families that other installed packages provide, found through their entry points.

A package names them in its pyproject.toml:

    [project.entry-points."outrider.drafters"]
    medusa = "my_package.medusa:METHOD"

    [project.entry-points."outrider.models"]
    MyModelForCausalLM = "my_package.my_model:RECIPE"

Finding the names imports nothing. A package is imported when one of its names is asked for, so a package that cannot
be imported breaks nothing but its own names.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from outrider.errors import ExtensionError

DRAFTERS = "outrider.drafters"
MODELS = "outrider.models"

T = TypeVar("T")


def extension_names(group: str, *, built_in: Collection[str] = ()) -> list[str]:
    """Names that installed packages register in a group, without those that are built in."""
    names = dict.fromkeys(entry.name for entry in entry_points(group=group))
    return [name for name in names if name not in built_in]


def load_extension(group: str, name: str, kind: type[T]) -> T | None:
    """Returns the object that a package registers under this name; None if no package does."""
    claims = list(entry_points(group=group, name=name))
    if not claims:
        return None
    packages = sorted({_package(entry) for entry in claims})
    if len(packages) > 1:
        raise ExtensionError(
            f"{name!r} is registered in {group} by several packages: {', '.join(packages)}; uninstall all but one"
        )
    entry, package = claims[0], packages[0]
    try:
        value = entry.load()
    # Importing a module can fail in any way.
    except Exception as problem:
        raise ExtensionError(
            f"the package {package} registers {name!r} in {group} as {entry.value}, which cannot be imported "
            f"({type(problem).__name__}: {problem}); repair or uninstall the package"
        ) from problem
    if not isinstance(value, kind):
        raise ExtensionError(
            f"the package {package} registers {name!r} in {group} as {entry.value}, which must be a {kind.__name__}, "
            f"not a {type(value).__name__}; repair or uninstall the package"
        )
    return value


def warn_of_claims(group: str, name: str) -> None:
    """Warns of packages that register a name which is built in: the built-in object is the one that is used."""
    packages = sorted({_package(entry) for entry in entry_points(group=group, name=name)})
    if packages:
        warnings.warn(
            f"{name!r} in {group} is built into Outrider; what {', '.join(packages)} registers under this name is not "
            "used: the package must choose another name",
            stacklevel=3,
        )


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name
