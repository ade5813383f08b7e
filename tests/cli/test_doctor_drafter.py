"""`outrider doctor --drafter` tells a drafter that fits from one that is weak, misread, foreign or fed stale KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Outrider, chat_model
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.speculative.block_cases import BlockCase
from tests.speculative.cases import CASES
from tests.speculative.recording import Recorder
from tests.speculative.tiny import settings_for
from torch import Tensor

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelError
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.speculative import registry
from outrider.speculative.drafter import Drafter, FeedRow, ProposeRow
from outrider.speculative.drafters import dflash
from outrider.speculative.registry import guess_method, load_drafter, written_layer_ids
from outrider.speculative.settings import DrafterSettings
from outrider.tools.bench.acceptance import Tally
from outrider.tools.doctor import drafter as doctor
from outrider.tools.doctor.drafter import Compared, Diagnosis, Figures, examine_drafter, judge, misread_taps
from outrider.tools.doctor.findings import Status

LAYERS = 5
RIGHT = (1, 3)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    model = tiny_model(tiny_spec(windows=(None,) * LAYERS))
    return replace(model, chat_template=chat_model().chat_template)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TOKENS", 12)
    monkeypatch.setattr(doctor, "PROMPTS", doctor.PROMPTS[:3])


# ---- the judgement, on figures --------------------------------------------------------------------------


def compared(length: float, cold: float, *, better: int = 6, worse: int = 2) -> Compared:
    return Compared(length=length, cold_length=cold, better=better, worse=worse, taps=(1, 2))


def figures(cold: float, *, warm: float | None = None, chance: float | None = 1.05, **changes: Any) -> Figures:
    shifts = {1: changes.pop("up", cold * 0.9), -1: changes.pop("down", cold * 0.85)}
    settings: dict[str, Any] = {
        "k": 7,
        "taps": (0, 1),
        "chats": 8,
        "tokens": 700,
        "drafts": 300,
        "cold": cold,
        "warm": compared(cold if warm is None else warm, cold),
        "shifted": {shift: compared(length, cold) for shift, length in shifts.items()},
        "chance": None if chance is None else compared(chance, cold),
    }
    return Figures(**(settings | changes))


@pytest.mark.parametrize(
    ("measured", "diagnosis"),
    [
        (figures(2.8), Diagnosis.FITS),
        (figures(2.0), Diagnosis.FITS),
        (figures(1.9), Diagnosis.WEAK),
        (figures(1.6, k=1), Diagnosis.FITS),
        (figures(1.4, k=1), Diagnosis.WEAK),
        # A shift that is a little better, or better in one odd chat only, is chance.
        (figures(1.7, up=1.75), Diagnosis.WEAK),
        (figures(2.8, shifted={1: compared(3.1, 2.8, better=1, worse=7)}), Diagnosis.FITS),
        (figures(2.4, up=2.7), Diagnosis.WRONG_LAYERS),
        (figures(1.2, down=1.6), Diagnosis.WRONG_LAYERS),
        (figures(1.05), Diagnosis.WRONG_TARGET),
        (figures(1.0, up=1.07), Diagnosis.WRONG_TARGET),
        # What a drafter guesses from the tokens alone can be a good deal; taps must add to it.
        (figures(1.4, chance=1.35), Diagnosis.WRONG_TARGET),
        (figures(1.6, chance=1.35), Diagnosis.WEAK),
        (figures(2.8, warm=2.7), Diagnosis.STALE),
        (figures(2.8, warm=2.9, up=3.5), Diagnosis.STALE),
        (figures(2.8, warm=2.77), Diagnosis.FITS),
        (figures(1.01, chance=None, shifted={}, taps=()), Diagnosis.WEAK),
    ],
)
def test_figures_are_judged(measured: Figures, diagnosis: Diagnosis) -> None:
    assert judge(measured) is diagnosis
    text, status, advice = doctor._describe(diagnosis, measured, lambda taps: f"ids {list(taps)}")
    assert status is {Diagnosis.FITS: Status.OK, Diagnosis.WEAK: Status.NOTE}.get(diagnosis, Status.PROBLEM)
    assert "acceptance length" in text
    assert (advice is None) == (diagnosis is Diagnosis.FITS)


def test_only_chats_with_the_same_text_are_compared() -> None:
    def tally(accepted: int, answer: int) -> Tally:
        result = Tally(prompts=1, turns=1, answers=[[answer]])
        result.speculation.count(4, accepted)
        return result

    cold, other = [tally(1, 0), tally(4, 1)], [tally(2, 0), tally(0, 2)]
    found = doctor.compare(cold, other, ())
    assert found == Compared(length=3.0, cold_length=2.0, better=1, worse=0)
    assert doctor.compare(cold, [tally(2, 8), tally(0, 9)], ()) is None


def test_chance_reads_other_layers_or_is_left_out() -> None:
    assert misread_taps((1, 8, 14)) == (14, 8, 1)
    assert misread_taps((29,)) == (0,)
    assert misread_taps((0,)) is None
    assert misread_taps(()) is None


# ---- reading other layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "speculators", "eagle", "eagle3", "eagle3, speculators"])
def test_a_drafter_is_recognised_and_can_be_loaded_with_other_taps(
    name: str, target: LoadedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    config = SpeculativeConfig(method=case.method, model=str(case.save(tmp_path, target)))
    assert guess_method(str(config.model)) == case.method
    plain = load_drafter(config, settings_for(target)).footprint
    moved = tuple(tap + (1 if max(plain.taps) + 1 < LAYERS else -1) for tap in plain.taps)
    shifted = load_drafter(config, settings_for(target, taps=moved)).footprint
    assert shifted.taps == moved != plain.taps
    # Its KV is another: it must not be taken for that of the drafter as it is.
    assert shifted.fingerprint != plain.fingerprint
    for wrong in ((*moved, 0), (LAYERS,) * len(moved)):
        with pytest.raises((ConfigError, ModelError), match="cannot replace"):
            load_drafter(config, settings_for(target, taps=wrong))


def test_a_module_of_the_target_can_read_another_layer(target: LoadedModel, tmp_path: Path) -> None:
    case = CASES["mtp, qwen"]
    plain = case.load(tmp_path, target, settings_for(target)).footprint
    shifted = case.load(tmp_path, target, settings_for(target, taps=(LAYERS - 2,))).footprint
    assert (plain.taps, shifted.taps) == ((LAYERS - 1,), (LAYERS - 2,))
    assert shifted.fingerprint != plain.fingerprint
    assert written_layer_ids(SpeculativeConfig(method="mtp"), settings_for(target), (LAYERS - 2,)) is None


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("full", '"target_layer_ids": [1, 3]'),
        ("speculators", '"aux_hidden_state_layer_ids": [2, 4]'),
        ("eagle3", '"eagle_aux_hidden_state_layer_ids": [2, 4]'),
        ("eagle", None),
    ],
)
def test_layer_ids_are_written_as_the_layout_counts_them(
    name: str, line: str | None, target: LoadedModel, tmp_path: Path
) -> None:
    case = CASES[name]
    config = SpeculativeConfig(method=case.method, model=str(case.save(tmp_path, target)))
    assert written_layer_ids(config, settings_for(target), RIGHT) == line


def test_a_checkpoint_that_says_nothing_asks_for_the_method(target: LoadedModel, tmp_path: Path) -> None:
    path = CASES["full"].save(tmp_path, target)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["SomethingElse"]}))
    with pytest.raises(ModelError, match="name the method: ngram"):
        guess_method(str(path))


# ---- measured on an engine ------------------------------------------------------------------------------


class Knowing(Recorder):
    """Proposes what the target will say, as far as `knows(taps)` allows."""

    def __init__(self, inner: Drafter, texts: Sequence[Sequence[int]], knows: Callable[[tuple[int, ...]], int]) -> None:
        super().__init__(inner)
        self._texts, self._right = texts, knows(inner.footprint.taps)

    def step(self, feeds: Sequence[FeedRow], taps: Tensor, proposals: Sequence[ProposeRow]) -> list[list[int]]:
        found = super().step(feeds, taps, proposals)
        return [self._partly(list(row.request.tokens), drafts) for row, drafts in zip(proposals, found, strict=True)]

    def _partly(self, tokens: list[int], drafts: list[int]) -> list[int]:
        text = next(text for text in self._texts if list(text[: len(tokens)]) == tokens)
        right = list(text[len(tokens) : len(tokens) + len(drafts)])
        wrong = [(token + 1) % 256 for token in right]
        return right[: self._right] + wrong[self._right :]


@pytest.fixture
def examined(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[tuple[int, ...]], int]], doctor.DrafterReport]:
    """Examines a DFlash checkpoint that names the layers 2 and 4, with a drafter that knows as much as it is told."""
    plain: Engine = tiny_engine(target, max_num_batched_tokens=512)
    llm = LLM.over(plain)
    prompts = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in doctor.PROMPTS]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    texts = [prompt + answer.outputs[0].token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    path = BlockCase(layout="z-lab", taps=(2, 4)).save(tmp_path, target)
    real = registry.drafting_method("dflash")

    def examine(knows: Callable[[tuple[int, ...]], int]) -> doctor.DrafterReport:
        def load(config: SpeculativeConfig, settings: DrafterSettings) -> Drafter:
            return Knowing(real.load(config, settings), texts, knows)

        monkeypatch.setattr(dflash, "DFLASH", replace(real, load=load))
        config = SpeculativeConfig(method="dflash", model=str(path), num_speculative_tokens=4)
        return examine_drafter(plain, config)

    return examine


def test_a_drafter_that_knows_its_target_fits(examined: Any) -> None:
    report = examined(lambda taps: 4 if taps == (2, 4) else 1)
    assert report.diagnosis is Diagnosis.FITS
    assert report.healthy
    assert report.figures.warm.ratio == 1
    # +1 would lead past the last layer.
    assert list(report.figures.shifted) == [-1]
    assert report.figures.shifted[-1].taps == (1, 3)
    assert report.figures.chance.taps == (4, 2)


def test_a_shift_that_is_better_names_the_ids_to_write(examined: Any) -> None:
    report = examined(lambda taps: {(2, 4): 2, RIGHT: 4}.get(taps, 0))
    assert report.diagnosis is Diagnosis.WRONG_LAYERS
    assert not report.healthy
    assert '"target_layer_ids": [1, 3]' in report.finding.advice
    assert "1, 3 in place of 2, 4" in report.finding.text
    json.dumps(report.as_json())


@pytest.mark.parametrize(("knows", "diagnosis"), [(0, Diagnosis.WRONG_TARGET), (1, Diagnosis.WEAK)])
def test_a_drafter_that_knows_little_is_weak_and_one_that_knows_nothing_another_s(
    examined: Any, knows: int, diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LEAST_GOOD_LENGTH", 2.5)
    report = examined(lambda taps: knows if taps == (2, 4) else 0)
    assert report.diagnosis is diagnosis
    assert report.healthy == (diagnosis is Diagnosis.WEAK)


def test_a_drafter_that_drafts_worse_from_the_cache_has_stale_kv(
    examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = Knowing._partly, []

    def forgetful(self: Knowing, tokens: list[int], drafts: list[int]) -> list[int]:
        # Each text begins once per run: from the second run on less is known.
        runs.append(tuple(tokens))
        self._right = 2 if runs.count(tuple(tokens)) > 1 else self._right
        return real(self, tokens, drafts)

    monkeypatch.setattr(Knowing, "_partly", forgetful)
    report = examined(lambda taps: 4)
    assert report.diagnosis is Diagnosis.STALE
    assert "--sanitizer raise" in report.finding.advice


@pytest.mark.parametrize("caches", [True, False])
def test_without_taps_only_the_cache_is_examined_if_there_is_one(target: LoadedModel, caches: bool) -> None:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    report = examine_drafter(tiny_engine(target, enable_prefix_caching=caches), speculation)
    assert report.diagnosis in (Diagnosis.FITS, Diagnosis.WEAK)
    assert report.figures is not None
    assert (report.figures.warm is not None) == caches
    assert (report.figures.shifted, report.figures.chance, report.figures.taps) == ({}, None, ())


# ---- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return BlockCase(layout="z-lab", taps=(0, 1)).save(tmp_path, chat_model())


def test_the_command_measures_says_what_it_is_and_checks_the_text(tiny: Outrider, checkpoint: Path) -> None:
    run = tiny("doctor", "--drafter", checkpoint)
    # Random weights.
    assert run.status == 1
    for part in ("as it is, cold", "from a warm prefix cache", "layers reversed", "wrong target", "trained for this"):
        assert part in run.out
    assert "7 drafts per step" in run.out
    assert "dflash drafts up to 7 tokens per step in 1 pass of 8 rows; it keeps KV of its own" in " ".join(
        run.out.split()
    )
    assert "lossless: 48 tokens compared" in run.out
    assert "\x1b" not in run.out


def test_json_has_the_figures_and_the_diagnosis(tiny: Outrider, checkpoint: Path) -> None:
    run = tiny("doctor", "--drafter", checkpoint, "--json")
    report = json.loads(run.out)
    assert run.status == 1
    assert not report["healthy"]
    drafter = report["drafter"]
    assert (drafter["method"], drafter["diagnosis"]) == ("dflash", "wrong target")
    assert drafter["figures"]["taps"] == [0, 1]
    assert drafter["figures"]["cold"] >= 1
    assert json.loads(tiny("doctor", "--json").out)["drafter"] is None


def test_a_weak_drafter_is_no_failure(tiny: Outrider) -> None:
    run = tiny("doctor", "--method", "ngram")
    assert run.status == 0, run.out
    assert "acceptance of ngram" in run.out
    # Whoever asks about a drafter has read the rest already, or asks without --method.
    assert "environment" not in run.out
    assert "Python" not in run.out
    assert "environment" in tiny("doctor").out


def test_what_is_wrong_with_the_environment_is_shown_beside_a_drafter(
    tiny: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.tools.doctor.environment.REQUIRED", ("torch", "no-such-library"))
    run = tiny("doctor", "--method", "ngram")
    assert run.status == 1
    assert "pip install no-such-library" in run.out
    assert "Python" not in run.out


def test_a_drafter_that_is_refused_is_a_finding_with_the_reason(
    tiny: Outrider, checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_target_layers": 9}))
    for arguments, reason in (
        (("--drafter", checkpoint), "num_target_layers is 9"),
        (("--drafter", tmp_path / "nowhere"), "not known"),
        (("--drafter", checkpoint, "--method", "eagle3"), "not an EAGLE drafter"),
        (("--method", "mtp"), "not a directory of safetensors"),
    ):
        run = tiny("doctor", *arguments)
        assert run.status == 1
        assert "refused" in run.out
        assert reason in " ".join(run.out.split())
        assert "Traceback" not in run.err
