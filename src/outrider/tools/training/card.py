"""The model card of a trained drafter: its network, data, recipe and acceptance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.tools.training.corpus import CorpusNote, Streams
from outrider.tools.training.drafts import DraftPlan
from outrider.tools.training.settings import TrainSettings
from outrider.tools.training.target import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFacts:
    count: int
    """Number of streams trained on; held-out ones do not count."""
    length: int
    written_fraction: float
    """Fraction of the tokens that the assistant wrote."""

    @classmethod
    def of(cls, streams: Streams) -> StreamFacts:
        return cls(count=len(streams), length=streams.tokens.shape[1], written_fraction=float(streams.roles.mean()))

    def __str__(self) -> str:
        return f"{self.count:,} streams of {self.length:,} tokens, {self.written_fraction:.0%} written by the assistant"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run so far."""

    steps: int
    seconds: float
    device: str
    streams: tuple[StreamFacts, ...]
    """Streams by length, the usual ones first."""
    notes: tuple[CorpusNote, ...]
    """Sources of the corpora, as far as they are recorded."""
    shared_prompts: int
    """Number of evaluation streams that have the prompt of a training stream."""
    evaluation: dict[str, Any] | None
    frequent_tokens: tuple[int, ...]
    """Token ids that the assistant wrote, the most frequent first."""


def model_card(settings: TrainSettings, target: Target, plan: DraftPlan, facts: RunFacts) -> str:
    parts = [
        _front_matter(settings, target),
        f"# {settings.title} drafter for {target.name}",
        "It drafts tokens for its target, which verifies them: output is the target's own, only sooner. "
        "It does nothing without the target, whose embeddings it uses.",
        "## Network",
        _network(settings, target, plan),
        "## Data",
        *_data(settings, facts),
        "## Recipe",
        _recipe(settings, facts),
        "## Acceptance",
        *_acceptance(facts),
    ]
    if settings.licence is not None:
        parts += ["## Licence", settings.licence]
    return "\n\n".join(parts) + "\n"


def _front_matter(settings: TrainSettings, target: Target) -> str:
    lines = ["---"]
    if settings.licence is not None:
        # A JSON string is a YAML string.
        lines += [f"license: {json.dumps(settings.licence, ensure_ascii=False)}"]
    lines += [f"base_model: {json.dumps(target.name, ensure_ascii=False)}"]
    return "\n".join([*lines, "tags: [speculative-decoding, draft-model]", "---"])


def _network(settings: TrainSettings, target: Target, plan: DraftPlan) -> str:
    parameters = sum(parameter.numel() for parameter in plan.network.parameters())
    layers = "1 layer" if settings.layers == 1 else f"{settings.layers} layers"
    text = (
        f"{layers}, {parameters / 1e6:.1f}M trained parameters, bfloat16. It reads what leaves the "
        f"target's layers {', '.join(map(str, plan.taps))} (counted from 0). "
    )
    if settings.in_blocks:
        kind = "causal" if settings.causal else "bidirectional"
        sizes = f"Block size {settings.block_size}"
        if settings.smaller_block is not None:
            sizes += f" and, for up to {settings.smaller_block - 1} drafts, {settings.smaller_block}"
        return text + f"{sizes}, {kind} blocks, mask token {plan.choices.mask_token_id}."
    return text + f"Draft vocabulary: {len(plan.head):,} of the target's {target.spec.vocab_size:,} tokens."


def _data(settings: TrainSettings, facts: RunFacts) -> list[str]:
    parts = [f"{'; '.join(map(str, facts.streams))}. Only what the assistant wrote is learnt."]
    notes = list(facts.notes)
    if settings.data_source is not None or settings.data_licence is not None:
        notes = [CorpusNote(source=settings.data_source, licence=settings.data_licence)]
    sources = [text for note in dict.fromkeys(notes) if (text := _note(note))]
    parts += ["\n".join(f"- {text}" for text in sources) if sources else "Where the data comes from was not recorded."]
    if facts.evaluation is not None:
        parts += [
            "No evaluation prompt begins a training stream."
            if not facts.shared_prompts
            else f"{facts.shared_prompts:,} evaluation streams begin as training streams do."
        ]
    return parts


def _note(note: CorpusNote) -> str:
    parts: Sequence[str | None] = (
        note.source,
        note.written_by and f"written by {note.written_by}",
        note.licence and f"licence: {note.licence}",
    )
    return "; ".join(text for text in parts if text)


def _recipe(settings: TrainSettings, facts: RunFacts) -> str:
    aim = f", {settings.distil:.0%} of the aim its whole distribution" if settings.distil else ""
    begun = "" if settings.init is None else "; begun with the weights of an earlier drafter"
    weights = f"exp(-(j-1)/{settings.gamma:g})" if settings.weighting == "decay" else "D-PACE"
    return (
        f"`outrider train {settings.method}`: {facts.steps:,} steps, {facts.seconds / 60:.1f} minutes on "
        f"{facts.device}; {settings.batch_streams} streams × {settings.anchors} random anchors × {settings.k} "
        f"drafts per step, labels are the target's most likely tokens{aim}; {settings.optimiser}, learning rate "
        f"{settings.lr:g}, weights {weights}{begun}.{_variety(settings, facts)}"
    )


def _variety(settings: TrainSettings, facts: RunFacts) -> str:
    """Describes what differed between steps."""
    text = ""
    if len(facts.streams) > 1:
        joined = f", laid end to end by {settings.long_pack}" if settings.long_pack > 1 else ""
        text += f" {settings.long_share:.0%} of the steps on streams of {facts.streams[1].length:,} tokens{joined}."
    if settings.smaller_block is not None:
        text += f" {settings.smaller_share:.0%} of the steps on blocks of {settings.smaller_block} rows."
    if settings.sure_weight < 1:
        rest = 1 - settings.sure_weight
        text += (
            f" Anchors are drawn with weights {settings.sure_weight:g} + {rest:g} (1 - p), p being the probability of "
            "the anchor's token."
        )
    if settings.loss_vocab_size is not None:
        text += f" The loss of a step is over {settings.loss_vocab_size:,} tokens."
    return text


def _acceptance(facts: RunFacts) -> list[str]:
    evaluation = facts.evaluation
    if evaluation is None:
        return ["Not measured."]
    rows = [
        f"| {name} | {values['mean_acceptance_length']:.2f} | {values['tokens']:,} |"
        for name, values in evaluation["categories"].items()
    ]
    parts = [
        f"Greedy decoding, simulated, k = {evaluation['k']}; mean acceptance length is accepted drafts + 1 per step:",
        "\n".join(["| prompts | mean acceptance length | tokens |", "|---|---|---|", *rows]),
    ]
    if (smaller := evaluation.get("smaller_block")) is not None:
        length = smaller["categories"]["all"]["mean_acceptance_length"]
        parts += [f"With k = {smaller['k']}, from blocks of {smaller['block_size']} rows: {length:.2f}."]
    return parts
