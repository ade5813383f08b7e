"""Mutations of what routers are told about the prefix cache, with their patches."""

from __future__ import annotations

from typing import Any

from outrider.tools.sim.mutation import Mutation, needs


def announce_whatever_is_cached(original: Any) -> Any:
    def can_serve(self: Any, page: Any) -> bool:
        return bool(page.is_indexed)

    return can_serve


def announce_without_windows(original: Any) -> Any:
    def is_met(self: Any, group: int, end: int, run: int) -> bool:
        return self._kinds[group].slides or bool(original(self, group, end, run))

    return is_met


def keep_evicted_announced(original: Any) -> Any:
    def left(self: Any, group: int, keys: Any) -> None:
        original(self, group, list(keys)[1:])

    return left


EVENT_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="unservable_page_announced",
        invariant="I13",
        story="routers are told of a page although nothing before it is cached any more",
        where="outrider.events.servable:ServablePages._can_serve",
        change=announce_whatever_is_cached,
        lineage="R22",
    ),
    Mutation(
        name="page_behind_a_lost_window_announced",
        invariant="I13",
        story="routers are told of pages of a full group where the windows beside them are not cached",
        where="outrider.events.servable:ServablePages._is_met",
        change=announce_without_windows,
        needs=needs("sliding"),
        lineage="R22",
    ),
    Mutation(
        name="evicted_page_stays_announced",
        invariant="I13",
        story="routers are not told that a page was evicted",
        where="outrider.events.servable:ServablePages.left",
        change=keep_evicted_announced,
    ),
)
