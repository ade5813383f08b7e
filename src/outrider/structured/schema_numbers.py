"""Numbers within bounds, in the form in which llguidance enforces them.

Bounded numbers have a limited number of digits, so that a weak model cannot write digits for ever.
"""

from __future__ import annotations

import json
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from math import copysign, inf, nextafter
from typing import Any, NamedTuple

from outrider.errors import RequestError
from outrider.structured.schema_values import EXACT_MAX, as_llguidance_reads

NUMBER_KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
INTEGER_MAX = 10**18
NUMBER_MAX = 10**15
"""Bounds beyond these are drawn in to them: llguidance can enforce none that are larger."""
STEP = 1e-9
"""The last decimal place of a number with bounds."""
STEP_MAX = 1000
"""The largest multipleOf, in units of its last decimal place. llguidance keeps a state for each remainder: larger ones
make it give up within a number, or compile for a minute."""
LISTED_MAX = 1000
"""How many multiples of a larger number are listed instead."""


class _Bounds(NamedTuple):
    least: Decimal | None
    most: Decimal | None
    above: bool
    """Whether `least` itself is excluded."""
    below: bool
    """Whether `most` itself is excluded."""


def written_number(kind: str, schema: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the schema of an integer or a number, or raises RequestError if none is within its bounds."""
    bounds, step = _bounds(schema, where), _step(schema, where)
    if kind == "integer" or (step is not None and step == int(step)):
        return _integer(bounds, step, where)
    if bounds.least is None and bounds.most is None and step is None:
        return {"type": "number"}
    least = Decimal(-NUMBER_MAX) if bounds.least is None else max(bounds.least, Decimal(-NUMBER_MAX))
    most = Decimal(NUMBER_MAX) if bounds.most is None else min(bounds.most, Decimal(NUMBER_MAX))
    _check_range(kind, least, most, bounds.above or bounds.below, where)
    step = STEP if step is None else step
    if int("".join(map(str, Decimal(repr(step)).as_tuple().digits))) > STEP_MAX:
        raise RequestError(
            f"{where}: multipleOf {step} has too many remainders to follow; choose a number of at most three digits"
        )
    return {
        "type": "number",
        "multipleOf": step,
        **_bound("inimum", least, bounds.above, step),
        **_bound("aximum", most, bounds.below, -step),
    }


def _bound(name: str, value: Decimal, is_excluded: bool, inwards: float) -> dict[str, int | float]:
    if is_excluded and not value:
        # llguidance lets 0 and -0 through where 0 is excluded.
        return {f"m{name}": inwards}
    written = _plain(value)
    if isinstance(written, float):
        bound = written
        while _is_outside(as_llguidance_reads(written), bound, inwards):
            written = nextafter(written, copysign(inf, inwards))
    return {f"exclusiveM{name}" if is_excluded else f"m{name}": written}


def _is_outside(read: float | Decimal, bound: float | Decimal, inwards: float) -> bool:
    return read < bound if inwards > 0 else read > bound


def _integer(bounds: _Bounds, step: float | int | None, where: str) -> dict[str, Any]:
    least, most = Decimal(-INTEGER_MAX), Decimal(INTEGER_MAX)
    if bounds.least is not None:
        whole = bounds.least.to_integral_value(ROUND_CEILING)
        least = max(least, whole + 1 if bounds.above and whole == bounds.least else whole)
    if bounds.most is not None:
        whole = bounds.most.to_integral_value(ROUND_FLOOR)
        most = min(most, whole - 1 if bounds.below and whole == bounds.most else whole)
    least, most = _as_double(least, inf), _as_double(most, -inf)
    _check_range("integer", least, most, False, where)
    written: dict[str, Any] = {"type": "integer", "minimum": int(least), "maximum": int(most)}
    if step is None:
        return written
    # The integers among the multiples of 1.5 are the multiples of 3.
    whole_step = Fraction(repr(step)).numerator
    if whole_step > STEP_MAX:
        return {"enum": _listed_multiples(whole_step, int(least), int(most), where)}
    return written | {"multipleOf": whole_step}


def _listed_multiples(step: int, least: int, most: int, where: str) -> list[int]:
    """Returns the multiples of `step` within the bounds, as far as they are written exactly."""
    first, last = -(-max(least, -EXACT_MAX) // step), min(most, EXACT_MAX) // step
    if first > last:
        raise RequestError(f"{where}: no multiple of {step} that can be written is within these bounds; widen them")
    if last - first >= LISTED_MAX:
        raise RequestError(
            f"{where}: multipleOf {step} has too many remainders to follow; choose at most {STEP_MAX}, or set minimum "
            f"and maximum so that at most {LISTED_MAX} multiples are within them"
        )
    return [number * step for number in range(first, last + 1)]


def _as_double(bound: Decimal, inwards: float) -> Decimal:
    """Returns the first whole number from `bound` inwards that a double holds: llguidance reads bounds as doubles, and
    one that were rounded outwards would let wrong integers through."""
    double = float(bound)
    if _is_outside(Decimal(double), bound, inwards):
        double = nextafter(double, inwards)
    return Decimal(double)


def _bounds(schema: dict[str, Any], where: str) -> _Bounds:
    found: dict[str, Decimal] = {}
    for name in (NUMBER_KEYWORDS - {"multipleOf"}) & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
            raise RequestError(f"{where}: {name} is a number up to 1e300, got {json.dumps(value)[:60]}")
        found[name] = Decimal(repr(value))
    least, most = found.get("minimum"), found.get("maximum")
    over, under = found.get("exclusiveMinimum"), found.get("exclusiveMaximum")
    above = over is not None and (least is None or over >= least)
    below = under is not None and (most is None or under <= most)
    return _Bounds(over if above else least, under if below else most, above, below)


def _step(schema: dict[str, Any], where: str) -> float | int | None:
    step = schema.get("multipleOf")
    if "multipleOf" not in schema:
        return None
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < 1e300:
        raise RequestError(f"{where}: multipleOf is a number above 0, got {json.dumps(step)[:60]}")
    return step


def _check_range(kind: str, least: Decimal, most: Decimal, is_open: bool, where: str) -> None:
    if least > most or (least == most and is_open):
        raise RequestError(f"{where}: no {kind} that can be written is within these bounds; widen them")


def _plain(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
