"""Two commits are compared in turns, by ratios of pairs that are above 1 where HEAD is better."""

import subprocess
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.tools.bench import compare
from outrider.tools.bench.checkouts import Checkout, Worker, checkouts
from outrider.tools.bench.compare import Plan, measure
from outrider.tools.bench.comparison import BASE, HEAD, Comparison, table

PACKAGE = """
import sys, time
from types import SimpleNamespace

def SamplingParams(**settings):
    return SimpleNamespace(**settings)

class LLM:
    def __init__(self, **settings):
        print("a library that prints")
    def chat_prompt(self, messages):
        return [len(messages[0]["content"])]
    def encode(self, text):
        return text, list(range(len(text)))
    def generate(self, prompts, params):
        time.sleep({seconds} * params.max_tokens / 128)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[{token}] * params.max_tokens)]) for _ in prompts]
"""


def fake_checkout(folder: Path, side: str, *, seconds: float = 0.0, token: int = 7) -> Checkout:
    package = folder / side / "src" / "outrider"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE.replace("{seconds}", str(seconds)).replace("{token}", str(token)))
    return Checkout(side, "0123456789abcdef", folder / side)


def test_ratios_above_one_are_better_and_bad_or_noisy_ones_are_marked() -> None:
    comparison = Comparison()
    for base, head in ((100.0, 90.0), (100.0, 91.0), (200.0, 180.0)):
        comparison.add("speed", "tokens/s", {BASE: base, HEAD: head}, more_is_better=True)
    for base, head in ((100.0, 50.0), (100.0, 100.0), (100.0, 25.0)):
        comparison.add("memory", "MB", {BASE: base, HEAD: head}, more_is_better=False)
    speed, memory = comparison.measures.values()
    # The median of the pairs, not the ratio of the medians, which would be 0.91.
    assert (speed.ratio, memory.ratio) == (0.9, 2.0)
    assert memory.spread == (1.5, 3.0)
    assert (speed.remark, memory.remark) == ("below 0.97", "noisy")
    assert [one.name for one in comparison.too_slow(0.95)] == ["speed"]
    assert comparison.too_slow(0.85) == comparison.too_slow(None) == []
    lines = table(comparison).splitlines()
    assert ["0.900" in lines[1], "2.000" in lines[2]] == [True, True]


def test_engines_take_turns_and_their_texts_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "ENGINES", {"plain": None})
    sides = {BASE: fake_checkout(tmp_path, BASE, seconds=0.05), HEAD: fake_checkout(tmp_path, HEAD, token=8)}
    plan = Plan(parts=("decode", "prompt"), rounds=1, turns=2, model=None)
    comparison = measure(plan, sides, lambda what: None)
    assert list(comparison.measures) == [
        "decode, plain, batch 1",
        "decode, plain, batch 8",
        "prompt of 512, plain",
        "prompt of 2,048, plain",
    ]
    one, eight, *_prompts = comparison.measures.values()
    assert len(one.pairs) == 2
    assert one.ratio > 1 < eight.ratio
    # Eight times the tokens in the same time.
    assert eight.pairs[0][0] == pytest.approx(8 * one.pairs[0][0], rel=0.5)
    assert comparison.texts == comparison.texts_that_differ == 2 * (1 + 8 + 1 + 1)
    assert compare.sides_in_order(0) != compare.sides_in_order(1)


def test_a_worker_that_fails_or_imports_another_package_is_refused_with_its_reason(tmp_path: Path) -> None:
    broken = fake_checkout(tmp_path, BASE)
    (broken.path / "src" / "outrider" / "__init__.py").write_text("raise OSError('no space left')")
    empty = Checkout(HEAD, "0123456789abcdef", tmp_path / HEAD)
    empty.path.mkdir()
    for checkout, reason in ((broken, "BASE (.*)no space left"), (empty, "HEAD")):
        worker = Worker(checkout, {})
        with pytest.raises(ConfigError, match=f"(?s){reason}"):
            worker.wait_ready()
        worker.close()


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_each_commit_gets_a_checkout_that_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    for number in range(2):
        (tmp_path / "file").write_text(str(number))
        git(tmp_path, "add", "file")
        git(tmp_path, "commit", "--quiet", "--message", "change")
    with checkouts({BASE: "HEAD~1", HEAD: "HEAD"}) as sides:
        assert [(sides[side].path / "file").read_text() for side in (BASE, HEAD)] == ["0", "1"]
    assert not sides[BASE].path.exists()
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1
    with pytest.raises(ConfigError, match="no-such-commit"), checkouts({BASE: "no-such-commit"}):
        pass


def test_the_exit_status_says_whether_a_ratio_is_below_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_arguments: object) -> Comparison:
        comparison = Comparison()
        comparison.add("speed", "tokens/s", {BASE: 100.0, HEAD: 90.0}, more_is_better=True)
        return comparison

    monkeypatch.setattr(compare, "measure", measured)
    monkeypatch.chdir(Path(__file__).parent)
    assert compare.run(["HEAD", "HEAD", "--least", "0.95"]) == 1
    assert compare.run(["HEAD", "HEAD", "--least", "0.85", "--json", str(tmp_path / "figures.json")]) == 0
    assert '"ratio": 0.9' in (tmp_path / "figures.json").read_text()
