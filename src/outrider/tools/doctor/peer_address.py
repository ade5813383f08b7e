"""What answers at a peer's addresses: its HTTP route, and the endpoint at which it exchanges control messages."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from enum import Enum
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import msgspec

from outrider.tools.doctor.findings import Finding, Status

ROUTE = "/kv_transfer"
HTTP_LIMIT_S = 10.0
CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 3.0
ANSWER_BYTES_MAX = 1 << 20
MECHANISM = slice(12, 32)
"""Where a ZMTP greeting names how its connections are protected."""
START_ADVICE = 'start it with --kv-transfer-config \'{"kv_role": "kv_producer"}\' and the --cluster-key of all workers'


class Unusable(Exception):
    """Nothing more can be found out about a peer."""

    def __init__(self, name: str, text: str, advice: str) -> None:
        super().__init__(text)
        self.finding = Finding(name, text, Status.PROBLEM, advice)


class PeerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself over HTTP; other fields are left out."""

    role: str
    connector: str
    endpoint: str
    engine_id: str
    protocol: int
    layout_digest: str
    transport: str = ""


def ask_http(url: str, api_key: str | None) -> PeerFacts:
    """Returns what the worker at a URL says about itself. Raises Unusable if it says nothing of use."""
    where = url.rstrip("/").removesuffix(ROUTE).removesuffix("/v1") + ROUTE
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    # Workers are on a private network, which a proxy of the environment does not lead to.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(where, headers=headers)
        with opener.open(request, timeout=HTTP_LIMIT_S) as answer:
            body = answer.read(ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(where, error.code, error.read(ANSWER_BYTES_MAX), has_key=api_key is not None) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "check the address and the port, and that the server is running and no firewall is between"
        if _is_endpoint(url):
            advice = f"this is a worker's KV endpoint: write {urlsplit(url).netloc}, without http://"
        raise Unusable("HTTP", f"no HTTP answer from {where}: {reason}", advice) from None
    except Exception as error:
        # http.client raises errors of its own for what is no HTTP.
        raise Unusable(
            "HTTP", f"{where} does not answer in HTTP: {error!r}", "name the address of `outrider serve`"
        ) from None
    try:
        return msgspec.json.decode(body, type=PeerFacts)
    except msgspec.MsgspecError:
        raise _stranger(where) from None


def _is_endpoint(url: str) -> bool:
    """Whether a URL names the endpoint of a worker instead of its HTTP address."""
    try:
        where = urlsplit(url)
        if where.hostname is None or where.port is None:
            return False
        return what_speaks(where.hostname, where.port) is Speaks.CURVE
    except (OSError, ValueError):
        return False


def _stranger(where: str) -> Unusable:
    return Unusable(
        "HTTP",
        f"what answers at {where} is no worker of Outrider, or one of another version",
        "name the worker itself, not a proxy before it, and run the same version on all workers",
    )


def _refused(where: str, status: int, body: bytes, *, has_key: bool) -> Unusable:
    """Returns what an HTTP status other than 200 means."""
    problem = _problem_of(body)
    if status in (401, 403):
        sent = "the key that was sent is not one of its keys" if has_key else "it asks for an API key"
        return Unusable("HTTP", f"{where}: {sent}", "give one of its keys with --api-key KEY or --api-key @FILE")
    if problem.get("code") == "kv_transfer_not_configured":
        return Unusable("HTTP", "the worker exchanges no KV with others", START_ADVICE)
    if status == 404 and problem:
        return Unusable(
            "HTTP",
            f"the server has no route {ROUTE}",
            f"if it is a worker of Outrider, run the same version there, and {START_ADVICE}",
        )
    if status == 503 and problem:
        text = str(problem.get("message", "it is not ready"))
        return Unusable("HTTP", f"the worker is not ready: {text}", "wait until its route /ready answers with 200")
    if problem:
        return Unusable("HTTP", f"{where} answers with status {status}: {problem.get('message')}", "see its log")
    return _stranger(where)


def _problem_of(body: bytes) -> dict[str, Any]:
    """Returns the error in a body of OpenAI's form; empty if it has none."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


class Speaks(Enum):
    """What a port turns out to be."""

    CURVE = "answers as a worker does"
    OTHER_ZMQ = "speaks ZMQ, but without encryption"
    HTTP = "speaks HTTP"
    NOTHING = "accepts connections, but answers nothing"
    UNKNOWN = "speaks another protocol"


OUR_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""The first bytes of the protocol that carries control messages (ZMTP, RFC 23). They come before any key."""


def what_speaks(host: str, port: int) -> Speaks:
    """Returns what a port answers to greetings. Raises OSError if there is no connection."""
    received = _answer_to(OUR_GREETING, host, port)
    # A server waits for the end of a request's line, which the greeting does not have.
    if not received and _answer_to(b"HEAD / HTTP/1.0\r\n\r\n", host, port).startswith(b"HTTP/"):
        return Speaks.HTTP
    if not received:
        return Speaks.NOTHING
    if received.startswith(b"HTTP/"):
        return Speaks.HTTP
    if received[:1] != OUR_GREETING[:1] or len(received) < len(OUR_GREETING):
        return Speaks.UNKNOWN
    return Speaks.CURVE if received[MECHANISM].rstrip(b"\0") == b"CURVE" else Speaks.OTHER_ZMQ


def _answer_to(sent: bytes, host: str, port: int) -> bytes:
    """Returns the first bytes that a port answers, at most as many as a greeting has."""
    received = b""
    with socket.create_connection((host, port), timeout=CONNECT_LIMIT_S) as connection:
        connection.settimeout(ANSWER_LIMIT_S)
        try:
            connection.sendall(sent)
            while len(received) < len(OUR_GREETING) and (more := connection.recv(len(OUR_GREETING))):
                received += more
        except OSError:
            pass  # What came before says enough.
    return received


def check_endpoint(endpoint: str) -> None:
    """Raises Unusable unless a worker of some cluster listens at this endpoint, which is HOST:PORT."""
    host, port = endpoint_parts(endpoint)
    try:
        speaks = what_speaks(host, port)
    except OSError as error:
        raise Unusable(
            "endpoint",
            f"no connection to {endpoint}, where the worker takes control messages: {error}",
            "check that the worker is running, that kv_ip in its --kv-transfer-config is an address that this machine "
            "reaches, and that a firewall lets the port through (kv_port fixes it)",
        ) from None
    if speaks is Speaks.CURVE:
        return
    advice = {
        Speaks.HTTP: f"this is a worker's HTTP address: write http://{endpoint}",
        Speaks.NOTHING: "the process is stopped or overloaded, or it is no worker: look at it, or restart it",
    }.get(speaks, "name the HTTP address of a worker, or the endpoint that its /kv_transfer shows")
    raise Unusable("endpoint", f"{endpoint} {speaks.value}", advice)


def endpoint_parts(endpoint: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT. Raises Unusable for anything else."""
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port, more = parts.hostname, parts.port, parts.path or parts.query
    except ValueError:
        host = port = more = None
    if not host or not port or more:
        raise Unusable(
            "address", f"{endpoint!r} is no address of a worker", "write http://HOST:PORT, or HOST:PORT of its endpoint"
        )
    return host, port


def check_reach(url: str, endpoint: str) -> None:
    """Raises Unusable if a worker on another machine names an endpoint that leads back to this one."""
    named, (host, _port) = urlsplit(url).hostname, endpoint_parts(endpoint)
    if named is None or not _is_loopback(host) or _is_this_machine(named):
        return
    raise Unusable(
        "endpoint",
        f"the worker at {named} takes control messages at {endpoint}, which only processes of its machine can reach",
        'start it with its address on the private network: --kv-transfer-config \'{"kv_ip": "ADDRESS", …}\'',
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _is_this_machine(host: str) -> bool:
    """Whether an address is one that this machine could listen on."""
    try:
        address = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
