"""What `outrider proxy` says when it starts, and to options that make no sense."""

from __future__ import annotations

import pytest
from tests.cli.cli import Outrider

from outrider.cli.proxy import _announce
from outrider.proxy.config import ProxyConfig
from outrider.proxy.workers import State, Workers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--decode", "http://d"), "at least one prefill worker; give its URL with --prefill"),
        (("--prefill", "http://p"), "at least one decode worker; give its URL with --decode"),
        (("--prefill", "p:8000", "--decode", "http://d"), "--prefill takes the URL of a worker"),
        (("--prefill", "http://p/v1", "--decode", "http://d"), "without anything after the port"),
        (("--prefill", "http://p", "--decode", "http://d", "--port", "99999"), "port must be at most 65535"),
        (("--prefill", "http://p", "--decode", "http://d", "--request-limit", "0"), "above 0"),
        (("--prefill", "http://p", "--decode", "http://d", "--host", "no such host"), "--host takes an address"),
    ],
)
def test_mistakes_are_one_line(options: tuple[str, ...], said: str, outrider: Outrider) -> None:
    done = outrider("proxy", *options)
    assert done.status == 2
    assert said in done.err
    assert done.err.count("\n") == 1


def announced(capsys: pytest.CaptureFixture[str], *, host: str, needs_key: bool) -> str:
    config = ProxyConfig(prefill=("http://p1", "http://p2"), decode=("http://d",), host=host)
    workers = Workers(config)
    workers.prefill[0].become(State.READY)
    workers.decode[0].become(State.READY)
    workers.decode[0].needs_key = needs_key
    _announce("http://127.0.0.1:8000", workers, config)
    return capsys.readouterr().err


def test_it_says_which_workers_serve_and_whether_a_key_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    said = announced(capsys, host="127.0.0.1", needs_key=False)
    assert "serving 3 workers at http://127.0.0.1:8000/v1 · 1 of 2 prefill workers ready" in said
    assert "1 of 1 decode worker ready · no API key needed" in said
    assert "warning" not in said


def test_an_open_address_without_keys_is_worth_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert "warning: any client" in announced(capsys, host="0.0.0.0", needs_key=False)
    assert "warning" not in announced(capsys, host="0.0.0.0", needs_key=True)
