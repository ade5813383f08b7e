"""Options of `outrider serve`. Names, limits and meanings are those of `ServerConfig`, which checks them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.cli.engine_options import byte_count
from outrider.cli.grouped import panel
from outrider.errors import ConfigError
from outrider.server.config import DEFAULT_HOST, DEFAULT_METRICS_PREFIX, DEFAULT_PORT, ServerConfig

http_option = panel("Address and access")
observing_option = panel("Observability")
limit_option = panel("Limits")
API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "OUTRIDER_API_KEY", "OUTRIDER_ADMIN_KEY"

_DEFAULTS = ServerConfig()


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    host: Annotated[str, http_option(help="Address to listen on; 0.0.0.0 means all addresses of this machine.")] = (
        DEFAULT_HOST
    )
    port: Annotated[int, http_option(help="Port to listen on; 0 means any free port.")] = DEFAULT_PORT
    served_model_names: Annotated[
        list[str] | None,
        http_option(
            "--served-model-name", help="Name of the model for clients; may be repeated. Default: the model's own name."
        ),
    ] = None
    api_keys: Annotated[
        list[str] | None,
        http_option(
            "--api-key",
            help="Key that clients must send; may be repeated. Each key has a prefix cache of its own. @FILE reads "
            "one key "
            f"per line; the variable {API_KEY_VARIABLE} may hold one too, hidden from other users.",
            metavar="KEY",
        ),
    ] = None
    admin_keys: Annotated[
        list[str] | None,
        http_option(
            "--admin-key",
            help=f"Key for /admin/…, routes that exist only if there is one. Also read from {ADMIN_KEY_VARIABLE}.",
            metavar="KEY",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        http_option(
            "--allowed-host",
            help="Further host name that a server without keys answers to; may be repeated.",
            metavar="NAME",
        ),
    ] = None
    metrics_prefix: Annotated[
        str, observing_option(help="Prefix of metric names; 'vllm:' makes dashboards for vLLM work.")
    ] = DEFAULT_METRICS_PREFIX
    log_interval_s: Annotated[
        float, observing_option("--log-interval", help="Seconds between log lines with statistics; 0 means none.")
    ] = _DEFAULTS.log_interval_s
    otlp_traces_endpoint: Annotated[
        str | None, observing_option(help="Where to send OpenTelemetry traces; needs the extra 'otel'.", metavar="URL")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    body_bytes_max: Annotated[
        int,
        limit_option(
            "--max-body-bytes",
            help="Largest body of a request. [dim]\\[default: 4M][/dim]",
            parser=byte_count,
            metavar="BYTES",
            show_default=False,
        ),
    ] = _DEFAULTS.body_bytes_max
    prompt_tokens_max: Annotated[
        int | None, limit_option("--max-prompt-tokens", help="Longest prompt. Default: what the context holds.")
    ] = None
    prompts_max: Annotated[int, limit_option("--max-prompts", help="Most prompts in one request for completions.")] = (
        _DEFAULTS.prompts_max
    )
    n_max: Annotated[int, limit_option("--max-n", help="Most continuations of one prompt.")] = _DEFAULTS.n_max
    logprobs_max: Annotated[int, limit_option("--max-logprobs", help="Most log-probabilities for each token.")] = (
        _DEFAULTS.logprobs_max
    )
    stop_strings_max: Annotated[int, limit_option("--max-stop-strings", help="Most stop strings of one request.")] = (
        _DEFAULTS.stop_strings_max
    )
    stop_characters_max: Annotated[int, limit_option("--max-stop-characters", help="Longest stop string.")] = (
        _DEFAULTS.stop_characters_max
    )
    grammar_bytes_max: Annotated[
        int, limit_option("--max-grammar-bytes", help="Largest JSON schema or other grammar.")
    ] = _DEFAULTS.grammar_bytes_max
    render_limit_s: Annotated[
        float, limit_option("--render-limit", help="Seconds to render and tokenize a conversation.")
    ] = _DEFAULTS.render_limit_s
    queue_max: Annotated[
        int, limit_option("--max-queue", help="Most continuations that wait for a place in the batch.")
    ] = _DEFAULTS.queue_max
    request_limit_s: Annotated[float, limit_option("--request-limit", help="Seconds for one request.")] = (
        _DEFAULTS.request_limit_s
    )
    idle_limit_s: Annotated[
        float, limit_option("--idle-limit", help="Seconds for which a client may send and receive nothing.")
    ] = _DEFAULTS.idle_limit_s
    engine_timeout_s: Annotated[
        float,
        limit_option(
            "--engine-timeout", help="Seconds without a finished step after which the engine process is restarted."
        ),
    ] = _DEFAULTS.engine_timeout_s
    drain_limit_s: Annotated[
        float, limit_option("--drain-limit", help="Seconds for which requests may go on after SIGTERM.")
    ] = _DEFAULTS.drain_limit_s


def server_config(access: AccessOptions, limits: LimitOptions) -> ServerConfig:
    lists: dict[str, Any] = {
        "served_model_names": tuple(access.served_model_names or ()),
        "allowed_hosts": tuple(access.allowed_hosts or ()),
        "api_keys": given_keys(access.api_keys, API_KEY_VARIABLE),
        "admin_keys": given_keys(access.admin_keys, ADMIN_KEY_VARIABLE),
    }
    return ServerConfig(**vars(access) | vars(limits) | lists)


def given_keys(given: Sequence[str] | None, variable: str) -> tuple[str, ...]:
    """Returns the keys of an option, whose values may be @FILE, and of a variable of the environment."""
    keys: list[str] = []
    for key in given or ():
        keys += _keys_in_file(key[1:]) if key.startswith("@") else [key]
    if os.environ.get(variable):
        keys.append(os.environ[variable])
    return tuple(dict.fromkeys(keys))


def _keys_in_file(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as problem:
        raise ConfigError(f"cannot read the keys in {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a list of keys: keys are ASCII text") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no key; write one per line")
    return keys
