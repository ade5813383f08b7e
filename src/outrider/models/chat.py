"""Conversations to text, with the chat template of the model.

Templates are untrusted programs: they run in a sandbox, see plain data only, and may write a limited amount of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ModelError, RequestError

RENDERED_CHARACTERS_MAX = 16_000_000
DEFAULT, WITH_TOOLS = "default", "tool_use"


class ChatTemplate:
    """A model's chat templates: a default one, and possibly one for requests with tools."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        *,
        source: str,
        variables: Mapping[str, str] | None = None,
        characters_max: int = RENDERED_CHARACTERS_MAX,
    ) -> None:
        named = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        if DEFAULT not in named:
            raise ModelError(f"{source}: no chat template is named {DEFAULT!r}; there are: {', '.join(sorted(named))}")
        self.source = source
        self.templates = named
        """Sources of the templates by name, from which another process can make an equal ChatTemplate."""
        self.variables = dict(variables or {})
        """Texts of special tokens by their names in templates: bos_token, eos_token and so on."""
        self.characters_max = characters_max
        self._compiled = {name: _compile(text, source) for name, text in named.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns the text of a conversation. It contains its special tokens: encode it without adding any.

        Raises RequestError if the template refuses the conversation.
        """
        name = WITH_TOOLS if tools and WITH_TOOLS in self._compiled else DEFAULT
        values = self.variables | {
            "messages": _plain(messages),
            "tools": _plain(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{key: _plain(value) for key, value in variables.items()},
        }
        try:
            return self._limited(self._compiled[name], values)
        except RequestError:
            raise
        # A template is a program that can fail in any way.
        except Exception as problem:
            raise RequestError(f"the model's chat template does not accept this conversation: {problem}") from None

    def _limited(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        parts, length = [], 0
        for part in template.generate(values):
            length += len(part)
            if length > self.characters_max:
                raise RequestError(
                    f"the conversation is longer than {self.characters_max:,} characters once rendered; shorten it"
                )
            parts.append(part)
        return "".join(parts)


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(text: str, source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as problem:
        raise ModelError(
            f"{source}: the chat template is not valid: line {problem.lineno}: {problem.message}"
        ) from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _plain(value: Any) -> Any:
    """Returns a copy made of plain types, because a template could call the methods of any other object."""
    match value:
        case None | bool():
            return value
        # Subclasses, such as enumerations, become the plain type.
        case str():
            return str.__str__(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise RequestError(
                f"a conversation consists of text, numbers, lists and objects, not {type(value).__name__}"
            )
