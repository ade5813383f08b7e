"""Prompts for measurements: prose, text that repeats itself as lists, tables and code do, questions, and requests whose
answers copy from the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING

from outrider.tools.bench.copying import copying_requests

if TYPE_CHECKING:
    # A client of a server does without the libraries that models need.
    from outrider.models.load import LoadedModel
    from outrider.models.tokenizer import Tokenizer

PROSE = (
    "A bridge is a promise made in stone. Whoever builds one says to people not yet born that they will be able to "
    "cross here, dry and in safety, with their carts and their children. Most of the work lies under the water, where "
    "nobody will ever see it: piles of oak driven into the mud, and on top of them a floor of heavy timber.",
    "The baker gets up when the last guests of the inn go to bed. By four o'clock the oven is warm, and the dough that "
    "was set the evening before has risen to the rim of the trough. He cuts it by eye and is seldom wrong by more than "
    "the weight of an egg. The first loaves go to the hospital, the second to the school.",
    "Snow changes the way sound travels through a town. Fresh flakes hold a great deal of air, and the air swallows "
    "the high notes first, so that voices seem to come from behind a curtain. When the surface melts and freezes again "
    "the effect is gone: a crust of ice throws back the noise of every wheel.",
    "For a long time nobody knew where eels came from. They were found in ponds without any stream, and no one had "
    "ever seen one with eggs. Only when ships towed fine nets across the ocean did the larvae turn up, smaller and "
    "smaller towards the west, until the trail ended in a sea that has no shore.",
    "My grandmother kept the accounts of the village shop in a language of her own. A circle stood for a pound of "
    "flour, a cross for a candle, and a small bird for anything that was to be forgotten. After her death we found "
    "whole pages of birds, with the names of half the street written neatly beside them.",
    "The night train leaves from the platform that is furthest from the hall. Travellers drag their bags past the "
    "kiosk, which is closed, and past the clock, which is slow. Inside, the conductor collects the tickets and asks "
    "each of them the same question, whether they would like to be woken before the border or after it.",
    "To sharpen a chisel you need a flat stone, a little water and more patience than strength. Hold the bevel against "
    "the stone until it stops rocking and move it in slow figures of eight. After some minutes a thin wire of steel "
    "can be felt along the edge; turn the blade over, and take it off with a single stroke.",
    "The committee met on the first Monday of every month to decide about the fountain. Some wanted fish in it, others "
    "feared for the fish, and a third party would rather have had a clock. The minutes of those meetings fill eleven "
    "volumes. The fountain itself has been dry since the year in which the first was bound.",
)

ROWS: tuple[Callable[[int], str], ...] = (
    lambda i: f'{{"id": {i}, "status": "done", "retries": 0}}\n',
    lambda i: f"INSERT INTO cities VALUES ({i}, 'city', 'country');\n",
    lambda i: f'<li><a href="/page/{i}">Page {i}</a></li>\n',
    lambda i: f"[INFO] worker {i} started\n[INFO] worker {i} is ready\n",
    lambda i: f"self.field_{i} = field_{i}\n",
    lambda i: "| apple | fruit | red |\n| carrot | vegetable | orange |\n",
    lambda i: f"Question {i}: yes or no? Answer {i}: yes.\n",
    lambda i: "Row, row, row your boat, gently down the stream,\n",
)

QUESTIONS = (
    "Explain to a child why the moon changes its shape.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show your steps.",
    "Write a Python function that returns the second largest number of a list, with a short explanation.",
    "Give me five tips for a first visit to a large museum.",
    "Summarise the advantages and disadvantages of working from home.",
    "Write a short letter to a neighbour whose dog barks at night.",
    "What happens in a cell during photosynthesis?",
    "Compare tea and coffee in a few sentences.",
)

PLAIN_TEXTS = ("ordinary", "repetitive")
TEXTS = (*PLAIN_TEXTS, "chat", "copying")
"""Kinds of prompts; "chat" and "copying" need a model with a chat template."""


CHARACTERS_PER_TOKEN = 4
"""Characters of English in a token, roughly: what a client without the model's tokenizer reckons with."""


def prompt_texts(text: str, *, number: int, tokens: int) -> list[str]:
    """Returns `number` different prompts of a kind in TEXTS, as text without a template; plain texts have about
    `tokens` tokens."""
    if text not in PLAIN_TEXTS:
        return [_numbered(_asked(text), place) for place in range(number)]
    parts = _prose_from if text == "ordinary" else _rows_from
    return [_cut_text(parts(place), CHARACTERS_PER_TOKEN * tokens) for place in range(number)]


def prompts_of(text: str, model: LoadedModel, *, number: int, tokens: int) -> list[list[int]]:
    """Returns `number` different prompts of a kind in TEXTS; all plain texts have exactly `tokens` tokens."""
    if text not in PLAIN_TEXTS:
        return [_question(model, _asked(text), place) for place in range(number)]
    parts = _prose_from if text == "ordinary" else _rows_from
    return [_cut(model.tokenizer, parts(place), tokens) for place in range(number)]


def _asked(text: str) -> tuple[str, ...]:
    return QUESTIONS if text == "chat" else tuple(request.prompt for request in copying_requests())


def _numbered(questions: Sequence[str], place: int) -> str:
    repetition = place // len(questions)
    return questions[place % len(questions)] + (f" (Answer number {repetition + 1}.)" if repetition else "")


def _question(model: LoadedModel, questions: Sequence[str], place: int) -> list[int]:
    assert model.chat_template is not None
    rendered = model.chat_template.render([{"role": "user", "content": _numbered(questions, place)}])
    return model.tokenizer.encode(rendered, add_special_tokens=False)


def _prose_from(place: int) -> Iterator[str]:
    """Yields all paragraphs over and over, starting with number `place`."""
    for number in count(place):
        yield f"{PROSE[number % len(PROSE)]}\n\n"


def _rows_from(place: int) -> Iterator[str]:
    row = ROWS[place % len(ROWS)]
    first = 1 + 100 * (place // len(ROWS))
    return (row(number) for number in count(first))


def _cut(tokenizer: Tokenizer, parts: Iterator[str], tokens: int) -> list[int]:
    text = ""
    ids: list[int] = []
    while len(ids) < tokens:
        text += "".join(islice(parts, 4))
        ids = tokenizer.encode(text)
    return ids[:tokens]


def _cut_text(parts: Iterator[str], characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += next(parts)
    # A blank at the end would be part of the next token.
    return text[:characters].rstrip()
