"""A reader for checkpoint configurations that checks every field and names it in errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import ModelError
from outrider.models.spec import Activation

LARGEST = 1e300
"""Bound of all numbers in a configuration; larger ones are damage."""
ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A Hugging Face configuration, in which null and a missing field mean the same."""

    fields: Mapping[str, Any]
    source: str
    """File of the configuration, for messages."""

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a whole number; the field is required if no default is given."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        # Python's JSON reader accepts NaN, Infinity, and whole numbers beyond the range of a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise self.wrong(name, "a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, "a number above 0")
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Returns a number of a field in which null means none and a missing field the default."""
        if name not in self.fields:
            return default
        return None if self.fields[name] is None else self.number(name)

    def soft_cap(self, name: str, default: float | None = None) -> float | None:
        """Returns a soft cap; null means none and a missing field the default."""
        value = self.optional_number(name, default)
        if value is not None and value <= 0:
            raise self.wrong(name, "a number above 0, or null for no cap")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer_list(self, name: str) -> list[int]:
        value = self._value(name, [])
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise self.wrong(name, "a list of whole numbers")
        return value

    def text_list(self, name: str) -> list[str] | None:
        value = self.fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(x, str) for x in value):
            raise self.wrong(name, "a list of strings")
        return value

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def activation(self, name: str = "hidden_act", default: str = "silu") -> Activation:
        value = self.fields.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ModelError(
                f"{self.source}: {name} {value!r} is not supported; supported: {', '.join(sorted(ACTIVATIONS))}"
            )
        return ACTIVATIONS[value]

    def inner(self, name: str, fields: Mapping[str, Any]) -> ConfigReader:
        return ConfigReader(fields, f"{self.source}: {name}")

    def section(self, name: str) -> ConfigReader:
        """Returns a nested configuration; an empty one if it is missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "a dictionary")
        return self.inner(name, value or {})

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """Returns the configuration with a family's defaults for missing fields."""
        missing = {name: value for name, value in defaults.items() if not self.has(name)}
        return ConfigReader({**self.fields, **missing}, self.source)

    def wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {name} must be {wanted}, got {self.fields.get(name)!r}")

    def _value(self, name: str, default: object) -> object:
        value = self.fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source} has no {name!r}; is it the configuration of a complete decoder?")
        return value
