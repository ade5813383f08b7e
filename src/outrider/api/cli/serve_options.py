"""Options of `outrider serve`. Names, limits and meanings are those of `ServerConfig`, which checks them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from outrider.api.cli.engine_options import byte_count
from outrider.server.config import DEFAULT_HOST, DEFAULT_METRICS_PREFIX, DEFAULT_PORT, ServerConfig

HTTP = "Where and for whom"
OBSERVING = "Observing"
LIMITS = "Limits"
API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "OUTRIDER_API_KEY", "OUTRIDER_ADMIN_KEY"

_DEFAULTS = ServerConfig()


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: all of this machine's.", rich_help_panel=HTTP)
    ] = DEFAULT_HOST
    port: Annotated[int, typer.Option(help="0: any that is free.", rich_help_panel=HTTP)] = DEFAULT_PORT
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be repeated. Default: its own name.",
            show_default=False,
            rich_help_panel=HTTP,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Whoever has one of these keys is served, with a prefix cache of its own; may be repeated. @FILE "
            f"reads one key per line; {API_KEY_VARIABLE} holds one too, out of sight of other users.",
            metavar="KEY",
            show_default=False,
            rich_help_panel=HTTP,
        ),
    ] = None
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"For /admin/…; without one there are no such routes. Also {ADMIN_KEY_VARIABLE}.",
            metavar="KEY",
            show_default=False,
            rich_help_panel=HTTP,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name that clients may reach a server without keys by; may be repeated.",
            metavar="NAME",
            show_default=False,
            rich_help_panel=HTTP,
        ),
    ] = None
    metrics_prefix: Annotated[
        str, typer.Option(help="'vllm:' makes dashboards for vLLM work.", rich_help_panel=OBSERVING)
    ] = DEFAULT_METRICS_PREFIX
    log_interval: Annotated[
        float, typer.Option(help="Seconds between lines with figures; 0: none.", rich_help_panel=OBSERVING)
    ] = _DEFAULTS.log_interval_s
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry traces there; needs the extra 'otel'.",
            metavar="URL",
            show_default=False,
            rich_help_panel=OBSERVING,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    max_body_bytes: Annotated[
        int,
        typer.Option(
            help="Of one request. [dim]\\[default: 4M][/dim]",
            parser=byte_count,
            metavar="BYTES",
            show_default=False,
            rich_help_panel=LIMITS,
        ),
    ] = _DEFAULTS.body_bytes_max
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Default: what the context holds.", show_default=False, rich_help_panel=LIMITS),
    ] = None
    max_prompts: Annotated[int, typer.Option(help="In one request for completions.", rich_help_panel=LIMITS)] = (
        _DEFAULTS.prompts_max
    )
    max_n: Annotated[int, typer.Option(help="Continuations of one prompt.", rich_help_panel=LIMITS)] = _DEFAULTS.n_max
    max_logprobs: Annotated[int, typer.Option(help="For each token.", rich_help_panel=LIMITS)] = _DEFAULTS.logprobs_max
    max_stop_strings: Annotated[int, typer.Option(help="Of one request.", rich_help_panel=LIMITS)] = (
        _DEFAULTS.stop_strings_max
    )
    max_stop_characters: Annotated[int, typer.Option(help="Of one stop string.", rich_help_panel=LIMITS)] = (
        _DEFAULTS.stop_characters_max
    )
    max_grammar_bytes: Annotated[
        int, typer.Option(help="Of a JSON schema or another grammar.", rich_help_panel=LIMITS)
    ] = _DEFAULTS.grammar_bytes_max
    grammar_compile_limit: Annotated[float, typer.Option(help="Seconds for one grammar.", rich_help_panel=LIMITS)] = (
        _DEFAULTS.grammar_compile_limit_s
    )
    render_limit: Annotated[
        float, typer.Option(help="Seconds for a conversation to become tokens.", rich_help_panel=LIMITS)
    ] = _DEFAULTS.render_limit_s
    max_queue: Annotated[
        int, typer.Option(help="Continuations that may wait beyond those that run.", rich_help_panel=LIMITS)
    ] = _DEFAULTS.queue_max
    request_limit: Annotated[float, typer.Option(help="Seconds for one request.", rich_help_panel=LIMITS)] = (
        _DEFAULTS.request_limit_s
    )
    idle_limit: Annotated[
        float, typer.Option(help="Seconds a client may take or send nothing.", rich_help_panel=LIMITS)
    ] = _DEFAULTS.idle_limit_s
    engine_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a finished step after which the engine process is replaced.", rich_help_panel=LIMITS
        ),
    ] = _DEFAULTS.engine_timeout_s
    drain_limit: Annotated[
        float, typer.Option(help="Seconds that requests may go on after SIGTERM.", rich_help_panel=LIMITS)
    ] = _DEFAULTS.drain_limit_s


def server_config(access: AccessOptions, limits: LimitOptions) -> ServerConfig:
    settings: dict[str, Any] = {
        "host": access.host,
        "port": access.port,
        "served_model_names": tuple(access.served_model_name or ()),
        "api_keys": _keys(access.api_key, API_KEY_VARIABLE),
        "admin_keys": _keys(access.admin_key, ADMIN_KEY_VARIABLE),
        "allowed_hosts": tuple(access.allowed_host or ()),
        "metrics_prefix": access.metrics_prefix,
        "log_interval_s": access.log_interval,
        "otlp_traces_endpoint": access.otlp_traces_endpoint,
        "body_bytes_max": limits.max_body_bytes,
        "prompt_tokens_max": limits.max_prompt_tokens,
        "prompts_max": limits.max_prompts,
        "n_max": limits.max_n,
        "logprobs_max": limits.max_logprobs,
        "stop_strings_max": limits.max_stop_strings,
        "stop_characters_max": limits.max_stop_characters,
        "grammar_bytes_max": limits.max_grammar_bytes,
        "grammar_compile_limit_s": limits.grammar_compile_limit,
        "render_limit_s": limits.render_limit,
        "queue_max": limits.max_queue,
        "request_limit_s": limits.request_limit,
        "idle_limit_s": limits.idle_limit,
        "engine_timeout_s": limits.engine_timeout,
        "drain_limit_s": limits.drain_limit,
    }
    return ServerConfig(**settings)


def _keys(given: list[str] | None, variable: str) -> tuple[str, ...]:
    keys: list[str] = []
    for key in given or ():
        keys += _keys_of_file(key[1:]) if key.startswith("@") else [key]
    if os.environ.get(variable):
        keys.append(os.environ[variable])
    return tuple(dict.fromkeys(keys))


def _keys_of_file(path: str) -> list[str]:
    from pathlib import Path

    from outrider.errors import ConfigError

    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError as problem:
        raise ConfigError(f"cannot read the keys in {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no list of keys: it holds more than ASCII") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{path} holds no key; write one per line")
    return keys
