"""What a hit ought to be: the rules of docs/architecture.md, slot by slot, without an index.

Written apart from outrider.kv.search, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.kv.intervals import Interval
from outrider.kv.layout import KVLayout
from outrider.kv.observer import Hit
from outrider.kv.prefix import Media
from outrider.sanitizer.shadow import shows_media


class ExpectedHits:
    def __init__(
        self,
        layout: KVLayout,
        available: Sequence[dict[int, int]],
        divisible: Sequence[dict[int, int]],
        tier_holds: Callable[[int, int], bool],
    ) -> None:
        self._layout = layout
        self._available = available
        self._divisible = divisible
        self._tier_holds = tier_holds

    def search(
        self, hashes: Sequence[int], limit: int, *, draft: bool, tiers: bool = True, media: Sequence[Media] = ()
    ) -> Hit:
        layout, footprint = self._layout, self._layout.footprint
        groups = range(len(layout.groups) if draft else layout.num_target)
        runs = {group: self._runs(group, hashes, limit, tiers, media) for group in groups}
        end = self._longest(layout.target_groups, runs, limit)
        if not draft:
            return Hit(end, 0, ())
        kinds = {group: layout.groups[group].kind for group in layout.draft_groups}
        if footprint.rebuild:
            start = self._longest(layout.draft_groups, runs, end)
            return Hit(end, 0, tuple(Interval(kind.needed(start).start, start) for kind in kinds.values()))
        found: dict[int, Interval | None] = {}
        for group, kind in kinds.items():
            found[group] = None
            if kind.needed(end).empty:
                continue
            for stop in range(end, max(0, end - footprint.token_reach - 1), -1):
                if runs[group][stop] < stop and not (
                    footprint.feed_reads_kv and runs[group][stop] > kind.needed(stop).start
                ):
                    size = layout.groups[group].page_tokens
                    floor = kind.needed(stop).start // size * size
                    found[group] = Interval(max(runs[group][stop], floor), stop)
                    break
        fed_from = min(
            (run.end for run in found.values() if run is not None),
            default=end if end > footprint.token_reach else 0,
        )
        tap_rows = end - fed_from
        if tap_rows and any(
            runs[g][end] > layout.groups[g].kind.needed(end, tap_rows).start for g in layout.target_groups
        ):
            found = {group: run if run is not None and run.end == end else None for group, run in found.items()}
            fed_from = end
        return Hit(
            end,
            end - fed_from,
            tuple(Interval(fed_from if run is None else min(run.start, fed_from), fed_from) for run in found.values()),
        )

    def _runs(self, group: int, hashes: Sequence[int], limit: int, tiers: bool, media: Sequence[Media]) -> list[int]:
        """Returns, for every end, the start of the run of available slots that stops there.

        A slot is available with its whole page, or alone where neither page shows media.
        """
        layout = self._layout
        size, available, divisible = layout.groups[group].page_tokens, self._available[group], self._divisible[group]
        reach = layout.footprint.token_reach if group >= layout.num_target else 0
        starts = [0]
        for position in range(limit):
            first = position // size * size
            place, last = position + 1 + reach, first + size + reach
            held = place < len(hashes) and hashes[place] in divisible and not shows_media(media, first, last)
            if not held and last < len(hashes):
                held = hashes[last] in available or (tiers and self._tier_holds(group, hashes[last]))
            starts.append(starts[-1] if held else position + 1)
        return starts

    def _longest(self, groups: Sequence[int], runs: dict[int, list[int]], limit: int) -> int:
        layout = self._layout
        for end in range(limit, 0, -1):
            needs = [(layout.groups[group].kind.needed(end), runs[group][end]) for group in groups]
            if all(need.empty or start <= need.start for need, start in needs):
                return end
        return 0

    def shared_end(self, hashes: Sequence[int], limit: int, *, tiers: bool, media: Sequence[Media]) -> int:
        """Returns how much of the sequence the full groups hold from its beginning on."""
        ends = [limit]
        kinds = [(g, self._layout.groups[g].kind) for g in self._layout.target_groups]
        reading_all = [g for g, kind in kinds if kind.needed(limit + 1).start == 0 and not kind.slides]
        for group in reading_all:
            starts = self._runs(group, hashes, limit, tiers, media)
            ends.append(max(end for end in range(limit + 1) if starts[end] == 0))
        return min(ends) if reading_all else 0
