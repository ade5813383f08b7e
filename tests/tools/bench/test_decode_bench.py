"""The decoding benchmark measures what it says: same prompts, same tokens, all in turns. Never the time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.engine.tiny import tiny_model, tiny_spec
from tests.models.fakes import save
from tests.models.fakes import tiny_model as reference_of
from tests.tools.bench.pictures import texts_in

from outrider.backends.torch_threads import torch_threads
from outrider.cli.engine_options import packaged_speculations
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.build import build_engine
from outrider.errors import ConfigError
from outrider.models.chat import ChatTemplate
from outrider.models.load import LoadedModel, load_model
from outrider.models.resolve import DEFAULT_MODEL
from outrider.tools.bench import decode
from outrider.tools.bench.contestants import OutriderContestant, TransformersContestant
from outrider.tools.bench.decode import DecodeBenchConfig, measure, measurements, prepare
from outrider.tools.bench.reference import reference_model, why_no_reference
from outrider.tools.bench.texts import PLAIN_TEXTS, QUESTIONS, prompts_of

pytest.importorskip("transformers")

CONFIG = DecodeBenchConfig(
    engine=EngineConfig(backend="reference", num_threads=1, max_model_len=128, kv_cache_memory_bytes=1 << 23),
    speculations=(SpeculativeConfig(method="ngram", num_speculative_tokens=3),),
    batches=(1, 2),
    prompt_tokens=12,
    tokens=10,
    rounds=2,
)


@cache
def llama() -> LoadedModel:
    return tiny_model(tiny_spec(family="llama"))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    reported: list[str] = []
    contest = prepare(CONFIG, model=llama())
    result = measure(CONFIG, contest, reported.append)
    assert len(reported) == measurements(CONFIG, contest)
    json.dumps(result)
    return result | {"reported": reported}


def test_every_contestant_runs_in_every_case_it_can(report: dict[str, Any]) -> None:
    cases = {(case["batch"], case["text"]): set(case["contestants"]) for case in report["cases"]}
    assert set(cases) == {(batch, text) for batch in (1, 2) for text in PLAIN_TEXTS}
    for (batch, _text), names in cases.items():
        lookup = {"transformers, prompt lookup"} if batch == 1 else set()
        assert names == {"outrider", "outrider, ngram, k = 3", "transformers"} | lookup


def test_contestants_take_turns(report: dict[str, Any]) -> None:
    rounds = [
        line for line in report["reported"] if line.startswith("round ") and line.endswith("batch 2, ordinary text")
    ]
    names = [line.split(": ")[1].removesuffix(", batch 2, ordinary text") for line in rounds]
    there = ["outrider", "outrider, ngram, k = 3", "transformers"]
    assert names == [*there, *reversed(there)]
    assert sum(line.startswith("warming up") for line in report["reported"]) == 7


def test_figures_are_complete_and_all_write_the_same_tokens(report: dict[str, Any]) -> None:
    for case in report["cases"]:
        for name, entry in case["contestants"].items():
            assert entry["texts"] == case["batch"]
            assert entry["texts_that_differ"] == entry["at_a_proven_tie"] == 0
            for figure in ("tokens_per_s", "best_tokens_per_s", "step_ms", "prompt_ms", "ratio", "ratio_to_plain"):
                assert entry[figure] > 0
            assert entry["tokens_per_step"] == 1 or "," in name
        assert case["contestants"]["transformers"]["ratio"] == 1
        assert case["contestants"]["outrider"]["ratio_to_plain"] == 1
    assert report["memory_mb"]["peak"] > 0
    assert report["note"] is None


def test_speculation_yields_several_tokens_a_step_where_text_repeats() -> None:
    # A head that knows one token only makes the text repeat for certain.
    model = llama()
    parameters = replace(model.parameters, head=replace(model.parameters.head, weight=torch.zeros(256, 32)))
    contest = prepare(CONFIG, model=replace(model, parameters=parameters))
    run = contest.contestants[1].run([[1, 2, 3]], 12)
    assert run.tokens == [[0] * 12]
    assert run.tokens_per_step > 1.5
    assert run.acceptance_length is not None
    assert run.acceptance_length > 2


def test_a_text_that_differs_is_counted() -> None:
    contest = prepare(CONFIG, model=llama())
    other = tiny_model(tiny_spec(family="llama"), seed=1)
    wrong = TransformersContestant("transformers", reference_model(other), 1)
    contestants = [wrong if each.name == "transformers" else each for each in contest.contestants]
    case = measure(replace(CONFIG, batches=(1,), rounds=1), contest._replace(contestants=contestants))["cases"][0]
    assert case["contestants"]["outrider"]["texts_that_differ"] == 1
    assert case["contestants"]["outrider"]["at_a_proven_tie"] == 0


@pytest.mark.parametrize("name", ["llama", "gemma3, one in six"])
def test_transformers_writes_for_prompts_of_different_lengths_what_it_writes_for_each_alone(
    name: str, tmp_path: Path
) -> None:
    model = llama() if name == "llama" else load_model(str(save(reference_of(name), tmp_path)), dtype=torch.float32)
    contestant = TransformersContestant("transformers", reference_model(model), 1)
    prompts = [[5, 7, 11], list(range(1, 41)), [3] * 17]
    together = contestant.run(prompts, 24)
    assert together.tokens == [contestant.run([prompt], 24).tokens[0] for prompt in prompts]
    assert len(together.steps_s) == 23


def test_the_reference_of_a_model_with_windows_says_what_its_own_says(tmp_path: Path) -> None:
    own = reference_of("gemma3, one in six")
    reference = reference_model(load_model(str(save(own, tmp_path)), dtype=torch.float32))
    tokens = torch.arange(100)[None] % 60
    torch.testing.assert_close(reference(tokens).logits, own(tokens).logits)


def test_models_that_are_no_plain_llama_are_measured_alone() -> None:
    assert why_no_reference(tiny_spec(family="llama", qk_norm=True)) is not None
    assert why_no_reference(tiny_spec(family="llama", windows=(8, None))) is not None
    config = replace(CONFIG, batches=(1,), rounds=1)
    contest = prepare(config, model=tiny_model())
    result = measure(config, contest)
    assert "plain Llama" in result["note"]
    assert {name for case in result["cases"] for name in case["contestants"]} == {"outrider", "outrider, ngram, k = 3"}
    assert all(entry["ratio"] is None for case in result["cases"] for entry in case["contestants"].values())


@pytest.mark.parametrize("text", PLAIN_TEXTS)
@pytest.mark.parametrize("tokens", [1, 64, 5000])
def test_prompts_have_exactly_the_length_asked_for_and_differ(text: str, tokens: int) -> None:
    prompts = prompts_of(text, llama(), number=10, tokens=tokens)
    assert [len(prompt) for prompt in prompts] == [tokens] * 10
    if tokens > 1:
        assert len({tuple(prompt) for prompt in prompts[:8]}) == 8


def test_questions_are_chats_and_differ() -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>", source="test"
    )
    model = replace(llama(), chat_template=template)
    prompts = prompts_of("chat", model, number=2 * len(QUESTIONS), tokens=7)
    assert len({tuple(prompt) for prompt in prompts}) == 2 * len(QUESTIONS)
    text = model.tokenizer.decode(prompts[1])
    assert text == f"<user>{QUESTIONS[1]}<assistant>"


def test_several_drafters_take_part_beside_each_other() -> None:
    """Each with its own number of drafts; a model that is made for conversations is asked questions too."""
    speculations = tuple(SpeculativeConfig(method="ngram", num_speculative_tokens=k) for k in (1, 4))
    config = replace(CONFIG, speculations=speculations, rounds=1, batches=(1,), texts=("repetitive",))
    result = measure(config, prepare(config, model=llama()))
    (case,) = result["cases"]
    assert {"outrider", "outrider, ngram, k = 1", "outrider, ngram, k = 4"} < set(case["contestants"])
    assert result["draft_kv_share"] == {"outrider": 0, "outrider, ngram, k = 1": 0, "outrider, ngram, k = 4": 0}


@cache
def auto_report() -> dict[str, Any]:
    config = replace(
        CONFIG,
        speculations=(SpeculativeConfig(method="ngram"),),
        fixed_drafts=(1, 3),
        reference=False,
        rounds=3,
        texts=("repetitive",),
    )
    contest = prepare(config, model=llama())
    drafts = [getattr(each, "drafts", None) for each in contest.contestants]
    assert drafts == [None, None, 1, 3]
    plain, auto, one, three = (contestant.engine for contestant in contest.contestants)  # type: ignore[attr-defined]
    # The engine that chooses learns from its own steps alone.
    assert one is three is not auto is not plain
    return measure(config, contest)


def test_the_choice_of_the_number_of_drafts_is_compared_with_fixed_ones_in_the_same_rounds() -> None:
    for case in auto_report()["cases"]:
        figures = case["contestants"]
        assert list(figures) == ["outrider", "outrider, ngram", "outrider, ngram, k = 1", "outrider, ngram, k = 3"]
        (choice,) = case["auto"]
        assert choice["contestant"] == "outrider, ngram"
        fixed = {name: figures[name]["tokens_per_s"] for name in list(figures)[2:]}
        assert choice["best_fixed"] == max(fixed, key=lambda name: fixed[name])
        auto = figures["outrider, ngram"]["tokens_per_s_by_round"]
        for other, measured in (("outrider", "to_plain"), (choice["best_fixed"], "to_best_fixed")):
            base = figures[other]["tokens_per_s_by_round"]
            assert choice[measured]["pairs"] == [list(pair) for pair in zip(base, auto, strict=True)]
            assert choice[measured]["ratio"] == pytest.approx(median(b / a for a, b in zip(base, auto, strict=True)))


def test_what_the_engine_learnt_of_costs_is_reported() -> None:
    (curves,) = auto_report()["cost_curves"].values()
    rows = [rows for rows, _seconds in curves["target"]]
    assert rows == sorted(set(rows))
    assert rows
    assert all(seconds > 0 for _rows, seconds in curves["target"])


def test_more_drafts_than_the_drafter_makes_are_refused() -> None:
    config = replace(CONFIG, speculations=(SpeculativeConfig(method="ngram"),), fixed_drafts=(1_000,), reference=False)
    with pytest.raises(ConfigError, match="drafts at most"):
        prepare(config, model=llama())


def test_no_round_copies_from_the_texts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was written before would otherwise be the best draft of itself."""
    engine = build_engine(CONFIG.engine, model=llama())
    add_request, salts = engine.add_request, []

    def noting(*given: Any, **options: Any) -> None:
        salts.append(options["salt"])
        add_request(*given, **options)

    monkeypatch.setattr(engine, "add_request", noting)
    contestants = [OutriderContestant(name, engine, speculate=True) for name in "ab"]
    for contestant in (*contestants, *contestants):
        contestant.run([[1, 2, 3], [4, 5, 6]], 4)
    # One salt for each run, since the requests of a batch do share what they write.
    assert len(salts) == 8
    assert len(set(salts)) == 4


def test_the_reference_can_be_left_out() -> None:
    assert all(entry["ratio"] is None for case in auto_report()["cases"] for entry in case["contestants"].values())
    assert auto_report()["note"] is None


def test_a_drafter_with_settings_of_its_own_is_not_auto() -> None:
    config = replace(CONFIG, fixed_drafts=(1,), reference=False, rounds=1, batches=(1,), texts=("ordinary",))
    (case,) = measure(config, prepare(config, model=llama()))["cases"]
    assert case["auto"] == []
    assert list(case["contestants"]) == ["outrider", "outrider, ngram, k = 3"]


def test_decoding_is_timed_after_all_prompts_are_in() -> None:
    """Prompts that take a step each: those that are in first decode while the others wait, and end first."""
    engine = build_engine(
        replace(CONFIG.engine, max_num_seqs=3, max_num_batched_tokens=16, enable_prefix_caching=False), model=llama()
    )
    run = OutriderContestant("x", engine, speculate=False).run([[7] * 12, [8] * 12, [9] * 12], 8)
    assert len(run.steps_s) == 7
    # The requests have 3, 2 and 1 tokens at the end of the step in which the last prompt is in, and the first one ends
    # five steps later.
    assert run.decoded_tokens == 3 * 5
    assert run.whole_s > run.decode_s
    assert run.tokens_per_s == pytest.approx(run.decoded_tokens / run.decode_s)


def test_a_model_brings_its_drafters() -> None:
    found = [json.loads(text)["method"] for text in packaged_speculations(DEFAULT_MODEL)]
    assert found == ["dflash", "eagle3"]
    assert packaged_speculations("some/other-model") == []


def test_threads_of_torch_are_put_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"rounds": 0},
        {"batches": ()},
        {"batches": (0,)},
        {"fixed_drafts": (0,)},
        {"texts": ("poems",)},
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(CONFIG, **changes)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceed the context"):
        prepare(replace(CONFIG, tokens=1000), model=llama())


def test_chats_need_a_template() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        prepare(replace(CONFIG, texts=("chat",)), model=llama())


def test_the_command_takes_lists_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.cli.cli import run_main

    monkeypatch.setattr(
        decode, "build_engine", lambda config, **given: build_engine(config, **(given | {"model": llama()}))
    )
    picture = tmp_path / "decode.svg"
    sizes = ("--batch", "1,2", "--batch", "3", "--prompt-tokens", 8, "--tokens", 4, "--rounds", 2, "--k", "1,2")
    engine = ("--speculative-config", '{"method": "ngram"}', "--backend", "reference", "--num-threads", 1)
    more = ("--no-reference", "--text", "repetitive", "--plot", picture)
    run = run_main(monkeypatch, capsys, ("bench", "decode", *sizes, *engine, *more), "")
    assert run.status == 0, run.err
    assert "Transformers" not in run.out
    for words in ("batch 3, repetitive text", "relative to plain decoding", "relative to the best fixed k"):
        assert words in run.out
    assert max(map(len, run.out.splitlines())) <= 80
    assert {"Repetitive text", "ngram, auto", "ngram, k = 2", "plain", "1", "2", "3"} <= set(
        texts_in(picture.read_text())
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_prints_tables_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    from tests.cli.cli import run_main

    monkeypatch.setattr(
        decode, "build_engine", lambda config, **given: build_engine(config, **(given | {"model": llama()}))
    )
    sizes = ("--batch", 1, "--prompt-tokens", 8, "--tokens", 4, "--rounds", 1)
    sizes += ("--speculative-config", '{"method": "ngram"}')
    arguments = (
        "bench",
        "decode",
        *sizes,
        "--backend",
        "reference",
        "--num-threads",
        1,
        *(["--json"] if as_json else []),
    )
    run = run_main(monkeypatch, capsys, arguments, "")
    assert run.status == 0, run.err
    if as_json:
        assert json.loads(run.out)["config"]["tokens"] == 4
    else:
        for part in ("batch 1, ordinary text", "batch 1, repetitive text", "Transformers in 8 of 8 texts", "peak"):
            assert part in run.out


def test_wrong_numbers_are_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.cli.cli import run_main

    assert run_main(monkeypatch, capsys, ("bench", "decode", "--tokens", 1), "").status == 2
    assert run_main(monkeypatch, capsys, ("bench", "decode", "--speculative-config", "{"), "").status == 2
    for option in ("--batch", "--k"):
        assert run_main(monkeypatch, capsys, ("bench", "decode", option, "1,x"), "").status == 2
