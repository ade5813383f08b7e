"""`outrider doctor` finds what is wrong, and only that."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.cli.cli import Outrider
from tests.engine.tiny import tiny_engine, tiny_model

from outrider.api.llm import LLM
from outrider.engine.engine import Engine
from outrider.models.parameters import Linear
from outrider.tools.doctor import environment
from outrider.tools.doctor.findings import Status, bytes_text
from outrider.tools.doctor.lossless import CheckPlan, Comparison, check_prompts, compare_all

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'
PLAN = CheckPlan(prompts=check_prompts(3), max_tokens=10)


def compared(drafted: Engine) -> list[Comparison]:
    return list(compare_all(tiny_engine(), [("drafter", lambda: drafted)], PLAN))


def test_a_healthy_engine_gets_its_certificate(tiny: Outrider) -> None:
    run = tiny("doctor", "--speculative-config", NGRAM)
    assert run.status == 0, run.out + run.err
    for part in ("torch", "cores", "memory", "parameters", "KV", "backend", "reference", "ngram", "greedy", "seeded"):
        assert part in run.out
    assert "lossless: 48 tokens compared" in run.out
    assert "\x1b" not in run.out


def test_what_serve_takes_is_looked_at_unless_told_otherwise(tiny: Outrider) -> None:
    run = tiny("doctor")
    assert run.status == 0, run.out + run.err
    said = " ".join(run.out.split())
    assert "ngram drafts up to 4 tokens per step" in said
    assert "`outrider serve` uses it for this model by default" in said
    assert "per token, none for ngram" in said
    named = " ".join(tiny("doctor", "--speculative-config", NGRAM).out.split())
    assert "ngram drafts up to 3 tokens per step" in named
    assert "outrider serve" not in named
    plain = tiny("doctor", "--no-speculation")
    assert plain.status == 0
    assert "per token without a drafter" in " ".join(plain.out.split())
    assert "nothing to compare" in plain.out
    assert "ngram" not in plain.out


def test_a_drafter_that_cannot_be_loaded_is_not_blamed_on_the_model(tiny: Outrider) -> None:
    run = tiny("doctor", "--speculative-config", '{"method": "dflash", "model": "nowhere"}')
    assert run.status == 2
    assert run.err.startswith("error: drafter 'nowhere' is not known")
    assert "problem" not in run.out


def test_json_has_the_counts_of_the_certificate(tiny: Outrider) -> None:
    run = tiny("doctor", "--lossless", "--prompts", 4, "--max-tokens", 16, "--speculative-config", NGRAM, "--json")
    report = json.loads(run.out)
    assert run.status == 0
    assert report["healthy"]
    assert [(each["drafter"], each["sampling"]) for each in report["lossless"]] == [
        ("ngram", "greedy"),
        ("ngram", "seeded"),
    ]
    for each in report["lossless"]:
        assert (each["prompts"], each["tokens"]) == (4, 64)
        assert (each["exact"], each["proven_ties"], each["failures"]) == (4, 0, 0)
        assert each["draft_tokens"] > 0
    assert {finding["status"] for finding in report["model"]} <= {"ok", "note"}


def test_a_drafted_text_that_differs_is_a_failure() -> None:
    """The fault that makes the check fire: the engine with the drafter has other weights."""
    comparisons = compared(tiny_engine(tiny_model(seed=1), speculate=True))
    assert all(comparison.failures for comparison in comparisons)
    assert all(not comparison.ties for comparison in comparisons)
    assert "without drafts" in str(comparisons[0].failures[0])


def test_a_failure_is_exit_status_1(tiny: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli import cli

    plain = cli.chat_model()
    wrong = replace(tiny_model(seed=1), chat_template=plain.chat_template)
    models = iter([plain, wrong])
    monkeypatch.setattr(cli, "chat_model", lambda: next(models))
    run = tiny("doctor", "--speculative-config", NGRAM)
    assert run.status == 1
    assert "NOT lossless" in run.out


def test_texts_that_part_at_a_tie_are_compared_to_their_ends() -> None:
    """Two tokens have the same logit everywhere; the second engine prefers the other of them."""
    model = tiny_model()
    weight = model.parameters.head.weight
    plain_tokens = _plain_texts(tiny_engine(model))
    favourite = plain_tokens[0][0]
    spare = next(token for token in range(favourite) if all(token not in text for text in plain_tokens))
    tied = weight.clone()
    tied[spare] = weight[favourite] * (1 + 1e-7)
    other = replace(model, parameters=replace(model.parameters, head=Linear(weight=tied)))
    plain_weight = weight.clone()
    plain_weight[spare] = weight[favourite] * (1 - 1e-6)
    plain = replace(model, parameters=replace(model.parameters, head=Linear(weight=plain_weight)))
    greedy = next(iter(compare_all(tiny_engine(plain), [("d", lambda: tiny_engine(other, speculate=True))], PLAN)))
    assert greedy.ties
    assert not greedy.failures
    assert greedy.exact < greedy.prompts


def _plain_texts(engine: Engine) -> list[list[int]]:

    return [
        output.outputs[0].token_ids
        for output in LLM.over(engine).generate(list(PLAN.prompts), PLAN.samplings["greedy"])
    ]


def test_a_missing_model_is_a_line_with_advice(outrider: Outrider) -> None:
    run = outrider("doctor", "--model", "nowhere", "--backend", "reference")
    assert run.status == 1
    assert "problem" in run.out
    assert "nowhere" in run.out
    assert "--model" in run.out
    assert "Traceback" not in run.err


def test_a_broken_environment_is_lines_not_tracebacks(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "REQUIRED", ("torch", "no-such-library"))
    run = outrider("doctor")
    assert run.status == 1
    assert "not installed" in run.out
    assert "pip install no-such-library" in run.out
    report = json.loads(outrider("doctor", "--json").out)
    assert not report["healthy"]
    assert report["model"] == []


def test_a_library_that_cannot_be_imported_is_told_from_one_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("lib.so: cannot open shared object file\nand more")

    monkeypatch.setattr(environment.importlib, "import_module", broken)
    finding = environment._library("torch", "pip install torch", Status.PROBLEM)
    assert finding.status is Status.PROBLEM
    assert "cannot be imported: lib.so: cannot open shared object file" in finding.text


def test_prompts_are_as_many_as_asked_for_and_all_different() -> None:
    prompts = check_prompts(20)
    assert len(set(prompts)) == 20
    assert check_prompts(3) == prompts[:3]


@pytest.mark.parametrize(("count", "text"), [(512, "512 bytes"), (46_080, "45.0 KiB"), (3 << 30, "3.0 GiB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.slow
def test_the_default_model_is_lossless_with_every_drafter(outrider: Outrider) -> None:
    run = outrider("doctor", "--lossless", "--prompts", 1, "--max-tokens", 6, "--max-model-len", 128, "--json")
    report = json.loads(run.out)
    assert run.status == 0, report
    assert {each["drafter"] for each in report["lossless"]} == {"ngram", "draft_model, 10L", "dflash", "eagle3"}
    assert all(each["tokens"] == 6 and not each["failures"] for each in report["lossless"])
