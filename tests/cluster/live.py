"""A real cluster of two workers, for tests/cluster/test_live.py: prints what happened, as JSON.

A program of its own, since it runs in a network namespace: python -m tests.cluster.live DIRECTORY
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from outrider.tools.fleet.chats import ENGINE, chats, right_answers
from outrider.tools.fleet.client import Streamed, ask
from outrider.tools.fleet.network import enter_own_network
from outrider.tools.fleet.process import ClusterProcess

QUESTION = [{"role": "user", "content": "Write a long story about a fox."}]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**SCHEMA, "additionalProperties": False}}}


def main() -> None:
    directory = Path(sys.argv[1])
    enter_own_network("-m", "tests.cluster.live", str(directory))
    # With a fixed number of drafts, workers need not learn first what steps cost.
    drafting = '{"method": "dflash", "num_speculative_tokens": 7}'
    options = {**ENGINE, "num_threads": 1, "speculative_config": drafting}
    cluster = ClusterProcess({"replicas": 2, "worker": options}, directory)
    try:
        cluster.wait_ready()
        report = look(cluster)
        last: list[Streamed] = []
        begun = threading.Event()
        options = {"max_tokens": 150, "on_text": lambda _answer: begun.set()}
        stream = threading.Thread(target=lambda: last.append(ask(cluster.url, QUESTION, **options)))
        stream.start()
        begun.wait(60)
    finally:
        status = cluster.stop()
    stream.join()
    report["ended_meanwhile"] = {"error": last[0].error, "finish_reason": last[0].finish_reason}
    wanted = chats(4, tokens=40)
    report["right"] = right_answers(wanted)
    report["status"] = status
    print(json.dumps(report))


def look(cluster: ClusterProcess) -> dict[str, Any]:
    answers = [ask(cluster.url, chat.messages, **chat.settings) for chat in chats(4, tokens=40)]
    salted = [ask(cluster.url, QUESTION, max_tokens=2, nvext={"cache_salt": salt}) for salt in ("one", "one", "two")]
    report: dict[str, Any] = {
        "texts": [answer.text for answer in answers],
        "salted": [answer.cached_tokens for answer in salted],
        "json": ask(cluster.url, QUESTION, max_tokens=40, response_format=FORM).text,
        "several": ask(cluster.url, QUESTION, max_tokens=4, n=2, temperature=1.0).error,
        "stopped": ask(cluster.url, QUESTION, max_tokens=60, stop=["."]).text,
    }
    sampled = {"max_tokens": 160, "temperature": 0.8, "seed": 5}
    report["undisturbed"] = ask(cluster.url, QUESTION, **sampled).text
    report["killed"] = while_killing(cluster, **sampled).text
    report["moved"] = len({entry["worker"] for entry in starts_of_last(cluster)})
    cluster.wait_ready()
    penalised = while_killing(cluster, frequency_penalty=0.5, **sampled)
    report["penalised"] = {"error": penalised.error, "text": penalised.text}
    cluster.wait_ready()
    report["penalised_again"] = ask(cluster.url, QUESTION, frequency_penalty=0.5, **sampled).text
    report["marks"] = len(list((directory_of(cluster) / "outrider-requests").iterdir()))
    report["restarts"] = sum(member["restarts"] for member in cluster.state["members"])
    return report


def directory_of(cluster: ClusterProcess) -> Path:
    return cluster.directory / "run" / "discovery"


def starts_of_last(cluster: ClusterProcess) -> list[dict[str, Any]]:
    log = cluster.log_of_requests()
    last = log[-1]["request"]
    return [entry for entry in log if entry["request"] == last and entry["event"] == "start"]


def while_killing(cluster: ClusterProcess, **settings: Any) -> Streamed:
    """Returns an answer whose first worker is killed in its middle."""
    enough = threading.Event()

    def note(answer: Streamed) -> None:
        if len(answer.text) > 60 and not enough.is_set():
            enough.set()
            cluster.kill(next(reversed(cluster.busy_with("agg").values())))

    return ask(cluster.url, QUESTION, on_text=note, **settings)


if __name__ == "__main__":
    main()
