"""Options for sampling. Names, limits and meanings are those of `SamplingParams`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.grouped import panel
from outrider.sampling import SamplingParams

if TYPE_CHECKING:
    from outrider.models.text import GenerationDefaults

sampling_option = panel("Sampling")
GENERATE_MAX_TOKENS, CHAT_MAX_TOKENS = 128, 512


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    max_tokens: Annotated[
        int | None,
        sampling_option(
            help=f"Most tokens of one answer. Default: {GENERATE_MAX_TOKENS} for generate, {CHAT_MAX_TOKENS} for chat."
        ),
    ] = None
    temperature: Annotated[
        float | None, sampling_option(help="0 takes the most likely token. Default: what the model recommends, else 0.")
    ] = None
    top_p: Annotated[
        float | None, sampling_option(help="Sample from the most likely tokens whose probabilities add up to this.")
    ] = None
    top_k: Annotated[int | None, sampling_option(help="Sample from this many of the most likely tokens.")] = None
    min_p: Annotated[
        float | None, sampling_option(help="Drop tokens less likely than this fraction of the most likely one.")
    ] = None
    repetition_penalty: Annotated[
        float | None, sampling_option(help="Above 1: fewer repetitions of the prompt and the output.")
    ] = None
    presence_penalty: Annotated[
        float,
        sampling_option(help="Subtracted from the logit of every token in the output so far.", show_default=False),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        sampling_option(help="Subtracted once for each time a token is in the output so far.", show_default=False),
    ] = 0.0
    seed: Annotated[int | None, sampling_option(help="Equal seeds give equal text, with any drafter or none.")] = None
    stop: Annotated[list[str] | None, sampling_option(help="End the answer before this text; may be repeated.")] = None
    min_tokens: Annotated[int, sampling_option(help="Fewest tokens of one answer.", show_default=False)] = 0
    ignore_eos: Annotated[bool, sampling_option("--ignore-eos", help="Go on past the end-of-text token.")] = False

    def check(self, **more: Any) -> None:
        """Refuses wrong values before a model is loaded."""
        SamplingParams(**(self._given() | more))

    def params(self, defaults: GenerationDefaults, *, max_tokens: int, **more: Any) -> SamplingParams:
        """Returns the options that were given; for the others the model's recommendations, or else greedy sampling."""
        recommended = {name: value for name, value in asdict(defaults).items() if value is not None}
        if self.temperature is not None:
            # Recommended settings belong together: a request with its own temperature does not want the rest of them.
            recommended = {}
        base: dict[str, Any] = {"temperature": 0.0, "max_tokens": max(max_tokens, self.min_tokens)}
        return SamplingParams(**(base | recommended | self._given() | more))

    def _given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}
