"""The files under deploy/: whether the programs that they start take these options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli.app import app
from outrider.config import KVTransferConfig

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def containers() -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yields the name, the command line and the settings of each container."""
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        yield f"compose {name}", [*service.get("entrypoint", ["outrider"]), *service["command"]], service
    graph, _claim = yaml.safe_load_all((DEPLOY / "kubernetes" / "outrider.yaml").read_text())
    for component in graph["spec"]["components"]:
        for container in component["podTemplate"]["spec"]["containers"]:
            yield f"kubernetes {component['name']}", [*container["command"], *container["args"]], component


CONTAINERS = list(containers())


@pytest.mark.parametrize(
    ("command", "_settings"), [each[1:] for each in CONTAINERS], ids=[each[0] for each in CONTAINERS]
)
def test_every_option_is_one_that_the_program_has(command: list[str], _settings: Any) -> None:
    program, *arguments = command
    if program != "outrider":
        pytest.importorskip("dynamo.frontend.main", reason="dynamo is not installed")
        import sys

        from dynamo.frontend.main import parse_args

        before, sys.argv = sys.argv, ["frontend", *arguments[2:]]
        try:
            parse_args()
        finally:
            sys.argv = before
        return
    worker: Any = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
    context = worker.make_context("worker", list(arguments[1:]))
    assert context.params["role"] in ("prefill", "decode", "stand-in")


def test_workers_on_kubernetes_reach_each_other_and_may_finish_what_they_do() -> None:
    found = {name: component for name, _command, component in CONTAINERS if name.startswith("kubernetes ")}
    for name in ("kubernetes Prefill", "kubernetes Decode"):
        spec = found[name]["podTemplate"]["spec"]
        (container,) = spec["containers"]
        arguments = dict(zip(container["args"], container["args"][1:], strict=False))
        config = KVTransferConfig.of(__import__("json").loads(arguments["--kv-transfer-config"]))
        assert config is not None
        assert config.kv_ip == "$(POD_IP)"
        assert float(arguments["--drain-limit"]) < spec["terminationGracePeriodSeconds"]
        assert int(arguments["--system-port"]) == container["readinessProbe"]["httpGet"]["port"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in spec["volumes"]}
    roles = [command[3] for name, command, _ in CONTAINERS if "Prefill" in name or "Decode" in name]
    assert sorted(roles) == ["decode", "prefill"]


def test_all_workers_describe_the_model_alike() -> None:
    """The front end refuses workers whose descriptions differ."""
    for file in ("compose", "kubernetes"):
        lengths = {
            command[command.index("--max-model-len") + 1]
            for name, command, _ in CONTAINERS
            if name.startswith(file) and command[0] == "outrider"
        }
        assert len(lengths) == 1
