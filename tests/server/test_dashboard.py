"""The dashboard in deploy/grafana asks for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.running import RunningServer
from tests.server.test_observing import CHOICE, LAST

from outrider.server.config import DEFAULT_METRICS_PREFIX
from outrider.server.messages import Counters, StepReport
from outrider.server.observe.figures import Figures
from outrider.server.observe.metrics import Metrics

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy/grafana/outrider.json").read_text("utf-8"))
ASKED = re.compile(r"\$\{prefix\}(\w+)(?:\{(\w+)=~)?")
GROUPED = re.compile(r"by \((\w+)\)")


def queries() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def exposed(prefix: str) -> dict[str, set[str]]:
    """Labels by the name of a sample, once everything has happened at least once."""
    figures = Figures()
    metrics = Metrics(prefix, figures, "m")
    counters = Counters(
        accepted_at=[3, 1],
        aborted=1,
        choice=CHOICE,
        offered_by_source=[1] * 4,
        verified_by_source=[1] * 4,
        accepted_by_source=[1] * 4,
    )
    figures.take(StepReport(deltas=[LAST], counters=counters, gaps_s=[0.01]))
    metrics.count_http("/v1/models", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def exposed_by(server: RunningServer) -> set[str]:
    """Names of samples that a server really gives, once it has answered."""
    http = server.http()
    # Long enough for the text to repeat itself: figures of drafts appear when one has been accepted.
    body = {"prompt": "a b a b", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {sample.name for family in families for sample in family.samples}


def test_a_running_server_has_every_metric_of_the_dashboard(tiny: RunningServer, choosing: RunningServer) -> None:
    # Figures of the choice are those of a server that chooses; that one need not have found drafts worth verifying.
    known = exposed_by(tiny) | exposed_by(choosing)
    asked = {DEFAULT_METRICS_PREFIX + name for _, query in queries() for name, _ in ASKED.findall(query)}
    assert len(asked) > 20
    assert asked <= known, asked - known


@pytest.mark.parametrize("prefix", [DEFAULT_METRICS_PREFIX, "vllm:"])
def test_every_metric_and_label_of_the_dashboard_is_exposed(prefix: str) -> None:
    known = exposed(prefix)
    asked = 0
    for where, query in queries():
        names = ASKED.findall(query)
        assert names, f"{where} asks for nothing behind the prefix: {query}"
        for name, label in names:
            asked += 1
            assert prefix + name in known, f"{where} asks for {name}, which /metrics does not have"
            assert not label or label in known[prefix + name], f"{where}: {name} has no label {label}"
        for label in GROUPED.findall(query):
            assert any(label in known[prefix + name] for name, _ in names), f"{where}: no label {label}"
    assert asked > 30


def test_the_prefix_is_a_variable_with_the_servers_default() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["prefix"]["query"] == DEFAULT_METRICS_PREFIX
    text = json.dumps(DASHBOARD["panels"])
    assert DEFAULT_METRICS_PREFIX not in text
    assert "vllm:" not in text


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
