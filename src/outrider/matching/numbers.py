"""Numbers within bounds, digit by digit.

Without bounds a number is as long as a double is exact, so that a weak model cannot write digits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from outrider.matching.ebnf import either, quoted

INTEGER_DIGITS_MAX = 40
FRACTION_DIGITS_MAX = 17
INTEGER = f'"-"? ("0" | [1-9] [0-9]{{0,{INTEGER_DIGITS_MAX - 1}}})'
FRACTION = f'("." [0-9]{{1,{FRACTION_DIGITS_MAX}}})?'
NUMBER = f"{INTEGER} {FRACTION} ([eE] [-+]? [0-9]{{1,2}})?"
FREE = f"[0-9]{{0,{FRACTION_DIGITS_MAX}}}"
ZEROS = f'"0"{{0,{FRACTION_DIGITS_MAX}}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    least: Decimal | None = None
    most: Decimal | None = None
    above: bool = False
    """`least` itself is outside."""
    below: bool = False

    @property
    def empty(self) -> bool:
        if self.least is None or self.most is None:
            return False
        return self.least > self.most or (self.least == self.most and (self.above or self.below))

    @property
    def free(self) -> bool:
        return self.least is None and self.most is None


def integers(bounds: Bounds) -> str | None:
    """None if there is none; `bounds` are whole and inclusive."""
    return _signed(bounds, _whole_magnitudes)


def numbers(bounds: Bounds) -> str | None:
    return _signed(bounds, _magnitudes)


def _signed(bounds: Bounds, magnitudes: object) -> str | None:
    assert callable(magnitudes)
    zero, ways = Decimal(0), []
    if bounds.most is None or bounds.most >= 0:
        at_least = (
            bounds if bounds.least is not None and bounds.least >= 0 else replace(bounds, least=zero, above=False)
        )
        ways.append(magnitudes(at_least))
    if bounds.least is None or bounds.least < 0:
        turned = Bounds(
            least=None if bounds.most is None else -bounds.most,
            most=None if bounds.least is None else -bounds.least,
            above=bounds.below,
            below=bounds.above,
        )
        if turned.least is None or turned.least < 0:
            turned = replace(turned, least=zero, above=False)
        found = magnitudes(turned)
        ways.append(None if found is None else f'"-" {found}')
    possible = [way for way in ways if way is not None]
    return either(possible) if possible else None


def _whole_magnitudes(bounds: Bounds) -> str | None:
    assert bounds.least is not None
    return _whole(int(bounds.least), None if bounds.most is None else int(bounds.most))


def _whole(least: int, most: int | None) -> str | None:
    """Whole numbers from `least` (0 or more) to `most`."""
    if most is not None and least > most:
        return None
    low = str(least)
    if most is not None and len(str(most)) == len(low):
        return _same_length(low, str(most))
    ways = [_same_length(low, "9" * len(low))]
    # All that have more digits than the one bound and fewer than the other.
    longest = max(INTEGER_DIGITS_MAX, len(low) + 1) if most is None else len(str(most)) - 1
    if longest > len(low):
        ways.append(f"[1-9] [0-9]{{{len(low)},{longest - 1}}}")
    if most is not None:
        ways.append(_same_length("1" + "0" * (len(str(most)) - 1), str(most)))
    return either(ways)


def _same_length(low: str, high: str) -> str:
    if not low:
        return '""'
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f"{quoted(low[0])} {_same_length(low[1:], high[1:])}"
    rest = len(low) - 1
    ways = [
        f"{quoted(low[0])} {_same_length(low[1:], '9' * rest)}",
        f"{quoted(high[0])} {_same_length('0' * rest, high[1:])}",
    ]
    if int(high[0]) - int(low[0]) > 1:
        ways.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{rest}}}")
    return either(ways)


def _magnitudes(bounds: Bounds) -> str | None:
    """Numbers of which `least` is 0 or more."""
    assert bounds.least is not None
    if bounds.empty:
        return None
    low_whole, low_digits = _split(bounds.least)
    high_whole, high_digits = (None, "") if bounds.most is None else _split(bounds.most)
    size = max(len(low_digits), len(high_digits))
    fraction = _Fractions(low_digits.ljust(size, "0"), high_digits.ljust(size, "0"), bounds)
    if low_whole == high_whole:
        found = fraction.after_whole(low=True, high=True)
        return None if found is None else f"{quoted(str(low_whole))} {found}"
    ways = [f"{quoted(str(low_whole))} {fraction.after_whole(low=True, high=False)}"]
    between = _whole(low_whole + 1, None if high_whole is None else high_whole - 1)
    if between is not None:
        ways.append(f"{between} {FRACTION}")
    last = None if high_whole is None else fraction.after_whole(low=False, high=True)
    if last is not None:
        ways.append(f"{quoted(str(high_whole))} {last}")
    return either(ways)


def _split(number: Decimal) -> tuple[int, str]:
    whole, _, digits = f"{number:f}".partition(".")
    return int(whole), digits.rstrip("0")


class _Fractions:
    """Digits after the point, where the digits before them are those of a bound."""

    def __init__(self, low: str, high: str, bounds: Bounds) -> None:
        self._low = low
        self._high = high
        self._bounds = bounds

    def after_whole(self, *, low: bool, high: bool) -> str | None:
        """None if no number begins like this."""
        digits = self._digits(0, low, high)
        written = None if digits is None else f'"." {digits}'
        if self._may_end(0, low, high):
            return '""' if written is None else f"({written})?"
        return written

    def _may_end(self, at: int, low: bool, high: bool) -> bool:
        """Is the number written so far within the bounds? `low`, `high`: its digits are those of that bound."""
        if low and (self._low[at:].strip("0") or self._bounds.above):
            return False
        return not high or bool(self._high[at:].strip("0")) or not self._bounds.below

    def _digits(self, at: int, low: bool, high: bool) -> str | None:
        """At least one more digit."""
        if not low and not high:
            return f"[0-9] {FREE}"
        if at == len(self._low):
            if high:
                return None if self._bounds.below or (low and self._bounds.above) else f'"0" {ZEROS}'
            return f"{ZEROS} [1-9] {FREE}" if self._bounds.above else f"[0-9] {FREE}"
        first = int(self._low[at]) if low else 0
        last = int(self._high[at]) if high else 9
        ways = []
        for digit in range(first, last + 1):
            still_low, still_high = low and digit == first, high and digit == last
            if not still_low and not still_high:
                continue
            more = self._digits(at + 1, still_low, still_high)
            if self._may_end(at + 1, still_low, still_high):
                ways.append(f"{quoted(str(digit))} {'' if more is None else f'({more})?'}")
            elif more is not None:
                ways.append(f"{quoted(str(digit))} {more}")
        inner = range(first + low, last + 1 - high)
        if inner:
            ways.append(f"[{inner[0]}-{inner[-1]}] {FREE}")
        return either(ways) if ways else None
