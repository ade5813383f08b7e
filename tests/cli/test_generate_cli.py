"""`outrider generate` as a person or a script calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli import Outrider

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3}'


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_stdout_is_the_text_and_stderr_the_summary(tiny: Outrider) -> None:
    run = tiny("generate", "abcabcabc", "--max-tokens", 12, "--speculative-config", NGRAM)
    assert run.status == 0, run.err
    (expected,) = records(tiny("generate", "abcabcabc", "--max-tokens", 12, "--json").out)
    assert run.out == expected["text"] + "\n"
    for part in ("12 tokens", "tokens/s", "0 of 9 prompt tokens cached"):
        assert part in run.err


def test_json_has_everything_about_each_continuation(tiny: Outrider) -> None:
    run = tiny(
        "generate", "abcabc", "xyxyxy", "--n", 2, "--temperature", 0.7, "--seed", 5, "--max-tokens", 6, "--json",
        "--speculative-config", NGRAM,
    )  # fmt: skip
    found = records(run.out)
    assert [(each["prompt"], each["index"]) for each in found] == [
        ("abcabc", 0),
        ("abcabc", 1),
        ("xyxyxy", 0),
        ("xyxyxy", 1),
    ]
    for each in found:
        assert len(each["token_ids"]) == len(each["origins"]) == 6
        assert each["finish_reason"] == "length"
        assert each["metrics"]["prompt_tokens"] == 6
        assert each["speculation"]["mean_acceptance_length"] >= 1
        assert each["error"] is None


def test_speculation_does_not_change_the_text(tiny: Outrider) -> None:
    arguments = ("generate", "abcabcabc", "one two one two", "--temperature", 0.8, "--seed", 1, "--json")
    arguments += ("--max-tokens", 24)
    plain = records(tiny(*arguments, "--no-speculation").out)
    assert {origin for each in plain for origin in each["origins"]} == {"plain"}
    # Without a word about it, too.
    for chosen in (("--speculative-config", NGRAM, "--sanitizer", "raise"), ()):
        drafted = records(tiny(*arguments, *chosen).out)
        assert [each["token_ids"] for each in plain] == [each["token_ids"] for each in drafted]
        assert sum(each["speculation"]["draft_tokens"] for each in drafted) > 0


def test_many_results_are_told_apart(tiny: Outrider) -> None:
    run = tiny("generate", "first prompt", "second prompt", "--max-tokens", 3)
    assert "[1/2] first prompt" in run.out
    assert "[2/2] second prompt" in run.out


FILES = {
    "lines.txt": "one\n\ntwo\n",
    "objects.jsonl": '{"prompt": "one"}\n{"prompt": "two", "id": 7}\n',
    "objects": '{"prompt": "one"}\n{"prompt": "two"}',
}


@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES)
def test_prompts_come_from_a_file(tiny: Outrider, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    run = tiny("generate", "--file", tmp_path / name, "--max-tokens", 2, "--json")
    assert [each["prompt"] for each in records(run.out)] == ["one", "two"]


@pytest.mark.parametrize("line", ['{"text": "two"}', '{"prompt": ' + "[" * 100_000], ids=["no prompt", "too deep"])
def test_a_broken_line_of_a_file_is_named(line: str, tiny: Outrider, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "one"}}\n{line}\n')
    run = tiny("generate", "--file", tmp_path / "a.jsonl")
    assert run.status == 2
    assert "a.jsonl, line 2" in run.err


def test_a_pipe_is_one_prompt_and_a_dash_one_per_line(tiny: Outrider) -> None:
    whole = tiny("generate", "--max-tokens", 2, "--json", stdin="one\ntwo\n")
    assert [each["prompt"] for each in records(whole.out)] == ["one\ntwo"]
    lines = tiny("generate", "--file", "-", "--max-tokens", 2, "--json", stdin="one\ntwo\n")
    assert [each["prompt"] for each in records(lines.out)] == ["one", "two"]


def test_chat_applies_the_template(tiny: Outrider) -> None:
    raw, chat = (tiny("generate", flag, "hi", "--max-tokens", 2, "--json") for flag in ("--raw", "--chat"))
    assert records(chat.out)[0]["metrics"]["prompt_tokens"] > records(raw.out)[0]["metrics"]["prompt_tokens"]


def test_one_prompt_too_long_leaves_the_others_served(tiny: Outrider) -> None:
    run = tiny("generate", "short", "x" * 100, "--max-model-len", 32, "--max-tokens", 2, "--json")
    assert run.status == 1
    served, refused = records(run.out)
    assert served["finish_reason"] == "length"
    assert refused["finish_reason"] == "error"
    assert "100 tokens" in refused["error"]
    assert "error: " in run.err


@pytest.mark.parametrize(
    "arguments", [("x", "--kv-cache-memory-bytes", "12q"), ("x", "--top-k", "many"), ("x", "--nonsense")]
)
def test_what_typer_refuses_is_status_2_as_well(tiny: Outrider, arguments: tuple[str, ...]) -> None:
    run = tiny("generate", *arguments)
    assert run.status == 2
    assert "Traceback" not in run.err


@pytest.mark.parametrize(("text", "count"), [("2G", 2 << 30), ("1.5K", 1536), ("500m", 500_000_000), ("4096", 4096)])
def test_bytes_may_have_units(text: str, count: int) -> None:
    from outrider.cli.engine_options import byte_count

    assert byte_count(text) == count


def test_the_command_line_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['outrider', 'generate', '--help']\n"
        "from outrider.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'numba', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_default_model_knows_the_capital_of_france(outrider: Outrider) -> None:
    arguments = ("generate", "The capital of France is", "--max-tokens", 4, "--max-model-len", 128, "--json")
    drafted, plain = (outrider(*arguments, *more) for more in ((), ("--no-speculation",)))
    assert drafted.status == plain.status == 0, drafted.err + plain.err
    (with_drafts,), (without,) = records(drafted.out), records(plain.out)
    assert with_drafts["text"] == without["text"]
    assert with_drafts["text"].startswith(" Paris")
    # By the drafter that is made for it: look-up would find nothing in this text.
    assert with_drafts["speculation"]["draft_tokens"] > 0 == without["speculation"]["draft_tokens"]
