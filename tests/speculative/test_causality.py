"""Which way a block attends comes from the checkpoint, per layer, and operations that cannot do it are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tiny import tiny_spec
from tests.speculative.block_cases import BlockCase
from tests.speculative.cases import (
    CASES,
    GREEDY,
    Case,
    engine_with,
    furthest_from_reference,
    plain_texts,
    prompts,
    three_layers,
)
from tests.speculative.tiny import settings_for
from torch import Tensor

from outrider.api.llm import LLM
from outrider.backends.attention import AttentionLayer, AttentionMetadata, PagedKV
from outrider.backends.base import Capability
from outrider.backends.reference.backend import ReferenceBackend
from outrider.engine.ties import TIE_TOLERANCE
from outrider.errors import ConfigError
from outrider.models.recipes.config import ConfigReader
from outrider.speculative import abilities
from outrider.speculative.drafters import dflash

BOTH_WAYS = {name: case for name, case in CASES.items() if isinstance(case, BlockCase) and not all(case.causal)}
ONE_WAY = {name: case for name, case in CASES.items() if isinstance(case, BlockCase) and any(case.causal)}


@pytest.mark.parametrize(
    ("top", "inner", "windows", "expected"),
    [
        ({}, {}, (None, None), (False, False)),
        ({}, {}, (6, None), (True, False)),
        ({}, {}, (6, 6), (True, True)),
        ({}, {"causal": False}, (6, None), (False, False)),
        ({}, {"causal": True}, (6, None), (True, True)),
        ({"is_causal": False}, {"causal": True}, (6, None), (False, False)),
        ({"is_causal": True}, {"causal": False}, (None, None), (True, True)),
        ({"is_causal": None}, {"causal": None}, (None, 6), (False, True)),
    ],
)
def test_causality_is_resolved_per_layer(
    top: dict[str, Any], inner: dict[str, Any], windows: tuple[int | None, ...], expected: tuple[bool, ...]
) -> None:
    body = tiny_spec(windows=windows)
    assert dflash.causality(ConfigReader(top, "top"), ConfigReader(inner, "inner"), body) == expected


def drafts_of(case: Case, tmp_path: Path, **more: Any) -> float:
    target = three_layers()
    engine, recorder = engine_with(case, target, tmp_path, plain_texts(target), **more)
    LLM.over(engine).generate(prompts(), GREEDY)
    return furthest_from_reference(case, target, recorder)


@pytest.mark.parametrize("name", [*BOTH_WAYS, *ONE_WAY])
def test_ignoring_causality_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug put back: every block attends the other way."""
    right = dflash.block_groups

    def wrong(spec: dflash.DFlashSpec, **sizes: int) -> Any:
        groups = right(spec, **sizes)
        return replace(groups, specs=tuple(replace(group, causal=not group.causal) for group in groups.specs))

    monkeypatch.setattr(dflash, "block_groups", wrong)
    assert drafts_of(CASES[name], tmp_path) > TIE_TOLERANCE


@pytest.mark.parametrize("name", ["full", "speculators", "eagle3", "eagle3, speculators"])
def test_layer_ids_that_are_off_by_one_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.speculative.checkpoints import fit

    def wrong(config: Any, field: str, ids: Any, offset: int, settings: Any) -> tuple[int, ...]:
        return tuple((number - offset + 1) % len(settings.target.spec.layers) for number in ids)

    monkeypatch.setattr(fit, "checked_taps", wrong)
    assert drafts_of(CASES[name], tmp_path) > TIE_TOLERANCE


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("name", ["sliding", "speculators, sliding"])
def test_windows_that_are_off_by_one_are_seen(name: str, shift: int, tmp_path: Path) -> None:
    case = CASES[name]
    assert isinstance(case, BlockCase)
    off = replace(case, windows=tuple(window and window + shift for window in case.windows))
    target = three_layers()
    engine, recorder = engine_with(off, target, tmp_path, plain_texts(target))
    LLM.over(engine).generate(prompts(), GREEDY)
    assert furthest_from_reference(case, target, recorder) > TIE_TOLERANCE


# ---- operations that cannot do everything ----------------------------------------------------------------


class CausalBackend(ReferenceBackend):
    """Reads no key past a row's own, whatever it is told."""

    name = "causal only"
    capabilities = frozenset({Capability.CAUSAL, Capability.WINDOW})

    def attend(self, qkv: Tensor, layer: AttentionLayer, kv: PagedKV, metadata: AttentionMetadata) -> Tensor:
        stops = torch.minimum(metadata.stop_key, metadata.positions + 1)
        return super().attend(qkv, layer, kv, replace(metadata, stop_key=stops))


class BothWaysBackend(ReferenceBackend):
    """Has no causal mask: rows of one block always see each other."""

    name = "both ways only"
    capabilities = frozenset({Capability.NON_CAUSAL, Capability.WINDOW})


class FullBackend(ReferenceBackend):
    name = "no windows"
    capabilities = frozenset({Capability.CAUSAL, Capability.NON_CAUSAL})


@pytest.mark.parametrize(
    ("name", "backend", "parts"),
    [
        ("full", CausalBackend(), ("layer 0", "both ways", "'causal only'", "causal, window", "'reference'")),
        ("mixed", CausalBackend(), ("layer 1", "both ways")),
        ("full, causal inside", BothWaysBackend(), ("layer 0", "attends causally", "'both ways only'", "'reference'")),
        ("mixed", BothWaysBackend(), ("layer 0", "attends causally")),
        ("sliding", FullBackend(), ("layer 0", "within a window", "'no windows'", "causal, non-causal")),
        ("speculators, sliding", FullBackend(), ("layer 0", "within a window")),
        ("eagle3", BothWaysBackend(), ("layer 0", "attends causally")),
        ("mtp, qwen", BothWaysBackend(), ("layer 0", "attends causally")),
    ],
)
def test_what_the_operations_cannot_do_is_refused(
    name: str, backend: ReferenceBackend, parts: tuple[str, ...], tmp_path: Path
) -> None:
    target = three_layers()
    with pytest.raises(ConfigError) as refusal:
        CASES[name].load(tmp_path, target, settings_for(target, backend=backend))
    for part in parts:
        assert part in str(refusal.value)


@pytest.mark.parametrize("name", ["full, causal inside", "sliding", "eagle3", "mtp, qwen"])
def test_what_they_can_do_is_not(name: str, tmp_path: Path) -> None:
    assert drafts_of(CASES[name], tmp_path, drafter_backend=CausalBackend()) < TIE_TOLERANCE


def test_a_check_that_is_skipped_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug put back: a block that attends both ways on operations that cannot."""
    monkeypatch.setattr(abilities, "needed", lambda groups, layer: frozenset())
    assert drafts_of(CASES["full"], tmp_path, drafter_backend=CausalBackend()) > TIE_TOLERANCE
