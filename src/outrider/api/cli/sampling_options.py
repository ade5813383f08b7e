"""Options that say how tokens are chosen. Names, limits and meanings are those of `SamplingParams`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.models.text import GenerationDefaults

SAMPLING = "Sampling"
GENERATE_MAX_TOKENS, CHAT_MAX_TOKENS = 128, 512


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help=f"Most tokens of one answer. Default: {GENERATE_MAX_TOKENS} for generate, {CHAT_MAX_TOKENS} for chat.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0: always the most likely token. Default: what the model recommends, else 0.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the most likely tokens that hold this share.", show_default=False, rich_help_panel=SAMPLING
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Keep this many most likely tokens.", show_default=False, rich_help_panel=SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less likely than this share of the likeliest.",
            show_default=False,
            rich_help_panel=SAMPLING,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1: fewer repeats of anything.", show_default=False, rich_help_panel=SAMPLING),
    ] = None
    presence_penalty: Annotated[
        float, typer.Option(help="Off each token written before.", show_default=False, rich_help_panel=SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Off for each time it was written.", show_default=False, rich_help_panel=SAMPLING)
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Equal seeds give equal text, with any drafter or none.", show_default=False, rich_help_panel=SAMPLING
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the answer before this text; may be repeated.", rich_help_panel=SAMPLING),
    ] = None
    min_tokens: Annotated[
        int, typer.Option(help="Fewest tokens of one answer.", show_default=False, rich_help_panel=SAMPLING)
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past end-of-text.", rich_help_panel=SAMPLING)
    ] = False

    def check(self, **more: Any) -> None:
        """Refuse wrong values before anything is loaded."""
        SamplingParams(**(self._given() | more))

    def params(self, defaults: GenerationDefaults, *, max_tokens: int, **more: Any) -> SamplingParams:
        """What was given; where nothing was, what the model's makers recommend; else greedy."""
        recommended = {name: value for name, value in asdict(defaults).items() if value is not None}
        if self.temperature is not None:
            # Recommendations belong together: whoever sets the temperature has other plans.
            recommended = {}
        base: dict[str, Any] = {"temperature": 0.0, "max_tokens": max(max_tokens, self.min_tokens)}
        return SamplingParams(**(base | recommended | self._given() | more))

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
