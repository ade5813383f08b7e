"""Drafters of 16 bits are kept in 8 where compiled kernels read them; the text stays the target's."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.lossless import tokens_of
from tests.engine.tiny import tiny_engine
from tests.speculative.cases import CASES, GREEDY, prompts, three_layers

from outrider.api.llm import LLM
from outrider.backends.cpu.packed import PackedMatrix
from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.models.load import LoadedModel
from outrider.models.parameters import DenseMLP, Linear, Matrix
from outrider.sampling import SamplingParams
from outrider.speculative.drafters.ahead import OneLayerAhead
from outrider.speculative.drafters.dflash import DFlash

NAMES = ("full", "eagle", "eagle3")


def in_16_bits(name: str, directory: Path, target: LoadedModel) -> Path:
    path = CASES[name].save(directory, target)
    tensors = load_file(path / "model.safetensors")
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}, path / "model.safetensors")
    return path


def engine_over(name: str, path: Path, target: LoadedModel, *, backend: str = "cpu", **wish: Any) -> Engine:
    expanded = wish.pop("expand_weights", False)
    speculation = SpeculativeConfig(method=CASES[name].method, model=str(path), num_speculative_tokens=3, **wish)
    return tiny_engine(
        target, backend=backend, num_threads=1, block_size=8, speculative_config=speculation, expand_weights=expanded
    )


def matrices(engine: Engine) -> list[Matrix]:
    """All matrices of the drafter's own whose rows are whole blocks."""
    drafter = engine.runner.drafting._drafter
    assert isinstance(drafter, DFlash | OneLayerAhead)
    found: list[Matrix] = []
    for layer in drafter._decoder.parameters.layers:
        assert isinstance(layer.mlp, DenseMLP)
        found += [layer.qkv.weight, layer.out.weight, layer.mlp.gate_up.weight]
    if isinstance(drafter, DFlash):
        return [*found, drafter._fuse.weight, drafter._context.weight]
    entrance = drafter._network.entrance
    parts = [getattr(entrance, field.name) for field in fields(entrance)]  # type: ignore[arg-type]
    return [*found, drafter._pair.weight, *[part.weight for part in parts if isinstance(part, Linear)]]


def kinds(engine: Engine) -> set[object]:
    """How the drafter's matrices are stored: packed, or in which type."""
    return {PackedMatrix if isinstance(matrix, PackedMatrix) else matrix.dtype for matrix in matrices(engine)}


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_of_16_bits_is_packed_and_the_text_stays(name: str, tmp_path: Path) -> None:
    target = three_layers()
    path = in_16_bits(name, tmp_path, target)
    packed, kept = engine_over(name, path, target), engine_over(name, path, target, pack_weights=False)
    assert len(matrices(packed)) > 4
    assert kinds(packed) == {PackedMatrix}
    assert kinds(kept) == {torch.bfloat16}
    # KV that one of them left in a cache does not serve the other.
    prints = [engine.runner._footprint.fingerprint for engine in (packed, kept)]
    assert prints[0] != prints[1]
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=2, max_tokens=16)):
        plain = tokens_of(LLM.over(tiny_engine(target, backend="cpu", num_threads=1)).generate(prompts(), params))
        for engine in (packed, kept):
            assert tokens_of(LLM.over(engine).generate(prompts(), params)) == plain
    assert packed.speculation.draft_tokens > 0


@pytest.mark.parametrize("otherwise", [{"backend": "reference"}, {"expand_weights": True}])
def test_weights_are_not_packed_where_no_kernel_reads_them(otherwise: dict[str, Any], tmp_path: Path) -> None:
    target = three_layers()
    path = in_16_bits("full", tmp_path, target)
    assert kinds(engine_over("full", path, target, **otherwise)) == {torch.float32}
    with pytest.raises(ConfigError, match="pack_weights is for CPU kernels that read packed weights"):
        engine_over("full", path, target, pack_weights=True, **otherwise)
