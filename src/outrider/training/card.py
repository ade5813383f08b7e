"""The model card that goes with a trained drafter."""

from __future__ import annotations

from typing import Any

from outrider.training.drafts import DraftPlan
from outrider.training.settings import TrainSettings
from outrider.training.target import Target

TITLES = {"dflash": "DFlash", "eagle3": "EAGLE-3"}


def model_card(
    settings: TrainSettings,
    target: Target,
    plan: DraftPlan,
    *,
    trained: dict[str, Any],
    evaluation: dict[str, Any] | None,
) -> str:
    title = TITLES[settings.method]
    parameters = sum(parameter.numel() for parameter in plan.network.parameters())
    lines = [
        "---",
        "license: apache-2.0",
        f"base_model: {target.name}",
        "tags: [speculative-decoding, draft-model]",
        "---",
        "",
        f"# A {title} drafter for {target.name}",
        "",
        "It drafts tokens for its target, which verifies them: output is the target's own, only sooner. "
        "It does nothing without the target, whose embeddings it uses.",
        "",
        "## Network",
        "",
        f"{settings.layers} layer(s), {parameters / 1e6:.1f}M trained parameters, bfloat16. It reads what leaves the "
        f"target's layers {', '.join(map(str, plan.taps))} (counted from 0).",
    ]
    if settings.method == "dflash":
        kind = "causal" if settings.causal else "bidirectional"
        lines += [f"Block size {settings.block_size}, {kind} blocks, mask token {plan.mask_token_id}."]
    else:
        lines += [f"Draft vocabulary: {len(plan.head):,} of the target's {target.spec.vocab_size:,} tokens."]
    lines += [
        "",
        "## Data",
        "",
        f"{trained['streams']:,} conversations of {trained['length']} tokens that the target wrote itself: answers and "
        "follow-up questions sampled from it, most of the first questions from public prompt collections "
        "(GSM8K train, MIT; CodeAlpaca, self-instruct and T0 templates, Apache-2.0). Nothing of the evaluation prompts "
        "was trained on.",
        "",
        "## Recipe",
        "",
        f"`outrider train {settings.method}`: {trained['steps']:,} steps, {trained['seconds'] / 60:.1f} minutes on "
        f"{trained['device']}; {settings.batch_streams} streams × {settings.anchors} random anchors × {settings.k} "
        f"drafts per step, labels are the target's most likely tokens"
        + (f", {settings.distil:.0%} of the aim its whole distribution" if settings.distil else "")
        + f"; {settings.optimiser}, learning rate {settings.lr}, weights "
        + (f"exp(-(j-1)/{settings.gamma:g})" if settings.weighting == "decay" else "D-PACE")
        + ".",
        "",
        "## Acceptance",
        "",
    ]
    if evaluation is None:
        lines += ["Not measured."]
    else:
        lines += [
            f"Greedy decoding, k = {evaluation['k']}, mean acceptance length (accepted drafts + 1 per step):",
            "",
            "| prompts | mean acceptance length | tokens |",
            "|---|---|---|",
        ]
        for name, values in evaluation["categories"].items():
            lines += [f"| {name} | {values['mean_acceptance_length']:.2f} | {values['tokens']:,} |"]
    lines += ["", "## Licence", "", "Apache-2.0, as the target's.", ""]
    return "\n".join(lines)
