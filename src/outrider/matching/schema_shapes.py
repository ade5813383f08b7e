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

    One rule for each (properties still to come, properties written) that can be reached: compiled grammars grow with
    the square of their rules. Without numbers to keep to, only none and some are told apart.
    """
    counted = least > 0 or most is not None
    reached: list[set[int]] = [{0}]
    for _, is_required in pairs:
        before = reached[-1]
        after = {written + 1 if counted else 1 for written in before if most is None or written < most}
        reached.append(after if is_required else after | before)
    following: dict[int, str] = {
        written: '"}"'
        for written in reached[-1]
        if not counted or least <= written <= (len(pairs) if most is None else most)
    }
    for number, (pair, is_required) in reversed(list(enumerate(pairs))):
        now: dict[int, str] = {}
        for written in reached[number]:
            then = following.get(written + 1 if counted else 1) if most is None or written < most else None
            ways = [] if then is None else [f"{COMMA} {pair} {then}" if written else f"{pair} {then}"]
            if not is_required and written in following:
                ways.append(following[written])
            if ways:
                # One way is no choice, and needs no rule.
                now[written] = ways[0] if len(ways) == 1 else rules.named(either(ways))
        following = now
    return f'"{{" {following[0]}' if 0 in following else None
