"""The mean of several drafters: runs that began with the same weights end around an optimum that lies between them."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.speculative.checkpoints.frequent import FREQUENT_TOKENS
from outrider.speculative.checkpoints.source import OpenedDrafter, open_drafter
from outrider.tools.training.export import CARD, CONFIG, make_directory, write_file, write_tensors

Report = Callable[[str], None]


def average_drafters(
    names: Sequence[str],
    output: Path,
    *,
    weights: Sequence[float] | None = None,
    shard_mib: int | None = None,
    report: Report,
) -> None:
    """Averages drafters of one network, given by directory or installed name; by default all have the same weight.

    Configuration and frequent tokens are taken from the first.
    """
    fractions = _fractions(names, weights)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} already exists and is not an empty directory; name a new one")
    drafters = [open_drafter(name) for name in names]
    for other in drafters[1:]:
        _refuse_another_network(drafters[0], other)
    files = drafters[0].files
    make_directory(output)
    tensors = {files.stored_name(name): _mean(drafters, fractions, name) for name in files.tensors}
    for name in (CONFIG, FREQUENT_TOKENS):
        if (files.path / name).exists():
            shutil.copyfile(files.path / name, output / name)
    write_tensors(output, tensors, shard_mib=shard_mib)
    write_file(output / CARD, _card(drafters, fractions).encode())
    where = shlex.quote(str(output))
    report(f"the mean of {len(names)} drafters is in {output}; measure it: outrider doctor --drafter {where}")


def _fractions(names: Sequence[str], weights: Sequence[float] | None) -> list[float]:
    """Returns the weights of the drafters, scaled to a sum of 1."""
    if len(names) < 2:
        raise ConfigError("a mean needs at least two drafters")
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(f"there are {len(names)} drafters and {len(weights)} shares; give one for each")
    total = sum(weights)
    # The sum of finite numbers may overflow.
    if not all(weight > 0 for weight in weights) or not total < math.inf:
        raise ConfigError("shares must be more than 0, and their sum a finite number")
    return [weight / total for weight in weights]


def _refuse_another_network(first: OpenedDrafter, other: OpenedDrafter) -> None:
    here, there = first.files, other.files
    fields = (here.config.fields, there.config.fields)
    different = sorted(name for name in {*fields[0], *fields[1]} if fields[0].get(name) != fields[1].get(name))
    different += sorted(
        name
        for name in {*here.tensors, *there.tensors}
        if name not in here.tensors or name not in there.tensors or here.shape(name) != there.shape(name)
    )
    # Tables of token ids cannot be averaged.
    different += [
        name
        for name in here.tensors
        if name not in different
        and not (here.table(name).is_floating_point() and there.table(name).is_floating_point())
        and not torch.equal(here.table(name), there.table(name))
    ]
    if different:
        raise ConfigError(
            f"{there.path} is another network than {here.path} (they differ in {', '.join(different[:5])}): "
            "average only drafters that were trained from the same one"
        )


def _mean(drafters: Sequence[OpenedDrafter], fractions: Sequence[float], name: str) -> Tensor:
    first = drafters[0].files.table(name)
    if not first.is_floating_point():
        return first.clone()
    total = torch.zeros_like(first, dtype=torch.float64)
    for drafter, fraction in zip(drafters, fractions, strict=True):
        total += fraction * drafter.files.table(name).double()
    return total.to(first.dtype)


def _card(drafters: Sequence[OpenedDrafter], fractions: Sequence[float]) -> str:
    # Only the names: paths of this machine mean nothing elsewhere.
    parts = "\n".join(
        f"- {fraction:.1%} {json.dumps(drafter.files.path.name, ensure_ascii=False)}"
        for drafter, fraction in zip(drafters, fractions, strict=True)
    )
    return "\n".join(
        [
            *("---", *_agreed([drafter.files.path / CARD for drafter in drafters])),
            "tags: [speculative-decoding, draft-model]\n---\n\n# A mean of drafters\n",
            "`outrider train average` made it from the weights of these drafters, in these proportions; their cards "
            f"name their training data and licences:\n\n{parts}\n\nNothing has been measured yet.\n",
        ]
    )


def _agreed(cards: Sequence[Path]) -> list[str]:
    """Returns the licence and target lines on which all cards agree."""
    found = [_front_matter(card) for card in cards]
    return [
        f"{name}: {found[0][name]}"
        for name in ("license", "base_model")
        if len({fields.get(name, "").casefold() for fields in found}) == 1 and found[0].get(name)
    ]


def _front_matter(card: Path) -> dict[str, str]:
    """Returns the "name: value" lines between the dashes at the top of a card."""
    try:
        text = card.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    opening, _, rest = text.partition("---\n")
    if opening or not rest:
        return {}
    pairs = (line.partition(":") for line in rest.partition("\n---")[0].splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}
