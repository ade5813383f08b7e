"""vLLM's client is run as it should be, and its figures are read; a stand-in takes its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tools.bench.fake_openai import FakeServer, fake_server

from outrider.errors import ConfigError, RequestError
from outrider.models.resolve import DEFAULT_MODEL
from outrider.tools.bench import vllm_client
from outrider.tools.bench.vllm_client import checked, model_text, prompts, run, write_tokenizer

# Writes its arguments and a result as the client does; the speeds are those of the number of clients.
STAND_IN = """#!{python}
import json, pathlib, sys
arguments = sys.argv[3:]
options = {{name: value for name, value in zip(arguments, arguments[1:]) if name.startswith("--")}}
with open({log!r}, "a") as log:
    log.write(json.dumps([arguments, open(options["--dataset-path"]).read().splitlines()]) + "\\n")
speculates = json.loads(options["--extra-body"]).get("speculate", True)
clients = int(options["--max-concurrency"])
result = {{"completed": 4, "failed": 1, "total_output_tokens": 32, "duration": 1.0}}
result["output_throughput"] = 100.0 * clients * (1.5 if speculates else 1.0)
for name in {figures!r}:
    result.setdefault(name, 10.0 if speculates else 20.0)
result |= {more!r}
pathlib.Path(options["--result-dir"], options["--result-filename"]).write_text(json.dumps(result))
sys.exit({status})
"""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_server() as server:
        server.models = {"data": [{"id": "ours", "owned_by": "outrider", "drafter": "dflash"}]}
        yield server


class StandIn:
    def __init__(self, folder: Path, *, more: dict[str, Any] | None = None, status: int = 0) -> None:
        self._log = folder / "log"
        self.program = folder / "python"
        self.program.write_text(
            STAND_IN.format(
                python=sys.executable,
                log=str(self._log),
                figures=vllm_client.FIGURES,
                more=more or {},
                status=status,
            )
        )
        self.program.chmod(0o755)

    @property
    def calls(self) -> list[tuple[list[str], list[str]]]:
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]


def bench(stand_in: StandIn, url: str, *more: str) -> int:
    options = ("--vllm-python", str(stand_in.program), "--url", url, "--concurrency", "1,4", "--tokens", "16")
    return run([*options, *more])


def test_speculation_alternates_and_the_ratios_are_those_of_the_pairs(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandIn(tmp_path)
    assert bench(stand_in, fake.url, "--json", str(tmp_path / "report.json")) == 0
    bodies = [json.loads(call[call.index("--extra-body") + 1]) for call, _prompts in stand_in.calls]
    clients = [int(call[call.index("--max-concurrency") + 1]) for call, _prompts in stand_in.calls]
    assert [body["speculate"] for body in bodies] == [True, False, *[True, False] * 2, *[False, True] * 2]
    assert clients == [4, 4, 1, 1, 4, 4, 1, 1, 4, 4]
    assert len({body["cache_salt"] for body in bodies}) == len(bodies)
    for call, asked in stand_in.calls[2:]:
        number = int(call[call.index("--num-prompts") + 1])
        assert len(set(asked)) == number == 4 * int(call[call.index("--max-concurrency") + 1])
        assert "--ignore-eos" in call
    out = capsys.readouterr().out
    assert "1.50x (1.50-1.50)  2.00x (2.00-2.00)  2.00x (2.00-2.00)      2" in out
    cases = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert [(case["clients"], case["speculation"], len(case["rounds"])) for case in cases] == [
        (1, "on", 2),
        (1, "off", 2),
        (4, "on", 2),
        (4, "off", 2),
    ]


def test_other_servers_are_measured_as_they_are(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.models = {"data": [{"id": "theirs"}]}
    fake.refused_fields = ("ignore_eos", "cache_salt")
    stand_in = StandIn(tmp_path)
    assert bench(stand_in, fake.url, "--quick", "--api-key", "secret") == 0
    assert len(stand_in.calls) == 3
    for call, _prompts in stand_in.calls:
        assert json.loads(call[call.index("--extra-body") + 1]) == {}
        assert "--ignore-eos" not in call
        assert "Authorization=Bearer secret" in call
    assert "relative to none" not in capsys.readouterr().out


def test_a_client_that_fails_is_an_error_with_the_end_of_its_output(fake: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="failed with status 3"):
        bench(StandIn(tmp_path, status=3), fake.url)


def test_a_client_that_is_not_installed_is_an_error_that_names_the_script(fake: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scripts/bench-vllm-client installs it"):
        run(["--vllm-python", str(tmp_path / "nowhere"), "--url", fake.url])


def test_a_run_without_an_answer_is_an_error(fake: FakeServer, tmp_path: Path) -> None:
    more = {"completed": 0, "failed": 4, "errors": ["", "Traceback\n  refused: too long"]}
    with pytest.raises(RequestError, match="refused: too long"):
        bench(StandIn(tmp_path, more=more), fake.url)


def test_a_result_without_its_figures_is_an_error() -> None:
    with pytest.raises(RequestError, match="reports no output_throughput"):
        checked({"completed": 1})


def test_the_tokenizer_that_is_written_is_the_models_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = model_text(DEFAULT_MODEL)
    write_tokenizer(text, tmp_path)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path)
    asked = prompts(text, "chat", 2)
    assert asked[0] != asked[1]
    for prompt in (*asked, "In 1984, 2.5 eels."):
        assert written(prompt, add_special_tokens=False).input_ids == text.tokenizer.encode(
            prompt, add_special_tokens=False
        )


def test_questions_are_put_into_the_chat_template() -> None:
    text = model_text(DEFAULT_MODEL)
    assert prompts(text, "chat", 1)[0].endswith("<|im_start|>assistant\n")
    assert "<|im_start|>" not in prompts(text, "ordinary", 1)[0]
