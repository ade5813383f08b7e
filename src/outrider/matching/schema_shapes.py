"""Objects and arrays, from the expressions of what is in them. None where there is none of the size asked for."""

from __future__ import annotations

from outrider.matching.ebnf import Rules, either, repeated

COMMA = '", "'


def array_expression(rules: Rules, prefix: list[str], others: str | None, least: int, most: int | None) -> str | None:
    """`prefix` describes the first items, `others` the rest; None: there is no rest."""
    if (others is None and least > len(prefix)) or (most is not None and most < least):
        return None
    rest = ""
    start = len(prefix)
    if others is not None and (most is None or most > start):
        more = None if most is None else most - start
        rest = (
            _list(others, max(0, least - start), more)
            if start == 0
            else (repeated(f"{COMMA} {others}", max(0, least - start), more))
        )
    for number in reversed(range(start)):
        item = f"{COMMA} {prefix[number]}" if number else prefix[number]
        rest = f"{item} {rest}" if number < least else f"({item} {rest})?"
        if len(rest) > 200:
            rest = rules.named(rest)
    return f'"[" {rest} "]"'


def free_object_expression(pair: str, least: int, most: int | None) -> str | None:
    """An object of pairs that are alike."""
    if most is not None and most < least:
        return None
    return f'"{{" {_list(pair, least, most)} "}}"'


def _list(item: str, least: int, most: int | None) -> str:
    more = repeated(f"{COMMA} {item}", max(0, least - 1), None if most is None else most - 1)
    return f"{item} {more}" if least else f"({item} {more})?"


def listed_object_expression(rules: Rules, pairs: list[tuple[str, bool]], least: int, most: int | None) -> str | None:
    """`pairs`: each property, and whether it must be there; in this order.

    One rule for each (properties still to come, properties written), from the last property to the first. Without
    numbers to keep to, only none and some are told apart.
    """
    counted = least > 0 or most is not None
    count_max = len(pairs) if counted else 1
    following: list[str | None] = [
        '"}"' if not counted or (least <= written and (most is None or written <= most)) else None
        for written in range(count_max + 1)
    ]
    for number, (pair, is_required) in reversed(list(enumerate(pairs))):
        now: list[str | None] = []
        for written in range(min(number, count_max) + 1):
            then = following[min(written + 1, count_max)]
            ways = [] if then is None else [f"{COMMA} {pair} {then}" if written else f"{pair} {then}"]
            without = None if is_required else following[written]
            if without is not None:
                ways.append(without)
            now.append(rules.named(either(ways)) if ways else None)
        following = now
    return None if following[0] is None else f'"{{" {following[0]}'
