"""The sampler draws from the distribution its settings describe, and each row is a function of that row alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import pytest
import torch
from tests.runner.chi_square import chi_square_p
from torch import Tensor

from outrider.backends.base import Argmax, Backend
from outrider.backends.reference.backend import ReferenceBackend
from outrider.backends.registry import select_backend
from outrider.errors import ModelError
from outrider.runner.logprobs import ranks, ranks_on_cpu
from outrider.runner.request_sampling import TokenCounts
from outrider.runner.sampler import FAILED, RequestSampling, Sampled, Sampler, SampleRow, token_logprobs
from outrider.sampling import SamplingParams
from outrider.speculative.verify import accept
from outrider.structured.matcher import Matcher

VOCAB = 24
EOS = 0
PROMPT = (3, 5, 5, 9)
P_MIN = 1e-3
DRAWS = 20_000
CPU = ReferenceBackend()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def logits_like(seed: int, num_rows: int = 1, vocab_size: int = VOCAB, scale: float = 1.5) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def request(output: Sequence[int] = (), *, device: str = "cpu", **fields: Any) -> RequestSampling:
    params = SamplingParams(**({"seed": 1, "max_tokens": None} | fields))
    return RequestSampling(params, vocab_size=VOCAB, device=device, prompt=PROMPT, output=output, eos_token_ids=[EOS])


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    return Sampler(logits.shape[-1], backend_on(logits.device)).sample(logits, rows)


@cache
def backend_on(device: torch.device) -> Backend:
    return select_backend("auto", device=device)


class Known(Argmax):
    """The argmax of logits, as a pass may have found it already."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def read(self) -> tuple[list[int], list[float]]:
        return self._logits.argmax(dim=-1).tolist(), self._logits.amax(dim=-1).tolist()

    def probabilities(self) -> list[float]:
        raise AssertionError("a sampler needs no probabilities")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"min_tokens": 30},
        {"logit_bias": {2: 9.0}},
        {"allowed_token_ids": [1, 4]},
        {"repetition_penalty": 3.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
    ],
    ids=str,
)
def test_a_known_argmax_changes_nothing(fields: dict[str, Any]) -> None:
    """Neither for rows of one request, nor beside greedy rows, nor beside rows that are broken."""
    logits = logits_like(5, num_rows=12)
    logits[:, EOS] += 2.0
    logits[7, 3], logits[8], logits[9, 1] = math.nan, -math.inf, math.inf
    asking, plain = request(**({"temperature": 0.0} | fields)), request(temperature=0.0)
    for states in ([asking] * 12, [plain, asking] * 6, [plain] * 12):
        rows = [SampleRow(state, 10 + number) for number, state in enumerate(states)]
        for part in (slice(0, 7), slice(6, 12)):
            sampler = Sampler(VOCAB, CPU)
            one = sampler.sample(logits[part], rows[part])
            other = sampler.sample(logits[part], rows[part], argmax=Known(logits[part]))
            assert (one.tokens, one.logprobs, list(one.failed)) == (other.tokens, other.logprobs, list(other.failed))
            assert [str(error) for error in one.failed.values()] == [str(error) for error in other.failed.values()]


def test_a_known_argmax_does_not_override_a_mask() -> None:
    none = cast(Any, None)
    matcher = Matcher(none, none, eos_ids=(), vocab_size=VOCAB, device=torch.device("cpu"))
    state = RequestSampling(SamplingParams(temperature=0.0), vocab_size=VOCAB, device="cpu", matcher=matcher)
    logits = logits_like(5, num_rows=2)
    masks = torch.ones(2, VOCAB, dtype=torch.bool)
    masks[0, logits[0].argmax()] = False
    rows = [SampleRow(state, 10 + number, (), mask) for number, mask in enumerate(masks)]
    found = Sampler(VOCAB, CPU).sample(logits, rows, argmax=Known(logits))
    assert found.tokens == logits.masked_fill(~masks, -math.inf).argmax(dim=-1).tolist()


# --- the distribution ------------------------------------------------------------------------------------------


def exact_distribution(logits: Sequence[float], params: SamplingParams, output: Sequence[int]) -> list[float]:
    """By the book, one token at a time, in the order that vLLM documents."""
    x = list(logits)
    if params.allowed_token_ids is not None:
        x = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(x)]
    if len(output) < params.min_tokens:
        for token in (EOS, *params.stop_tokens):
            x[token] = -math.inf
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    counts = Counter(output)
    for token in {*PROMPT, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in counts.items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    x = [value / params.temperature for value in x]

    def normal(weights: dict[int, float]) -> dict[int, float]:
        return {token: value / sum(weights.values()) for token, value in weights.items()}

    kept = normal({token: math.exp(value - max(x)) for token, value in enumerate(x)})
    kept = {token: value for token, value in kept.items() if value >= params.min_p * max(kept.values())}
    ranked = sorted(kept, key=lambda token: (-x[token], token))
    kept = normal({token: kept[token] for token in ranked[: params.top_k or None]})
    held, nucleus = 0.0, {}
    for token, value in kept.items():  # in the order of their rank
        if held < params.top_p:
            nucleus[token] = value
        held += value
    nucleus = normal(nucleus)
    return [nucleus.get(token, 0.0) for token in range(len(x))]


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "low temperature": {"temperature": 0.4},
    "high temperature": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k of 2, hot": {"top_k": 2, "temperature": 3.0},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p, hot": {"top_p": 0.6, "temperature": 3.0},
    "almost all of top_p": {"top_p": 0.999},
    "min_p": {"min_p": 0.1},
    "min_p, hot": {"min_p": 0.3, "temperature": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition encouraged": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "presence encouraged": {"presence_penalty": -1.0},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "logit_bias": {"logit_bias": {2: 2.5, 7: -3.0, 5: 0.5}},
    "allowed_token_ids": {"allowed_token_ids": [1, 4, 5, 13, 20]},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [5, 11], "logit_bias": {EOS: 4.0}},
    "min_tokens reached": {"min_tokens": 6, "stop_token_ids": [5, 11], "logit_bias": {EOS: 2.0}},
    "the usual": {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    "everything": {
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.85,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {4: 1.0, 6: -1.0},
        "allowed_token_ids": list(range(0, VOCAB, 2)) + [5, 9],
        "min_tokens": 10,
        "stop_token_ids": [8],
    },
}
OUTPUT = (5, 13, 13, 13, 2, 20)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_have_the_distribution_that_the_settings_describe(name: str) -> None:
    fields = SETTINGS[name]
    logits = logits_like(11)
    # Half by seed, half by position; the last output token is assumed rather than committed in every other row.
    whole, split = request(OUTPUT, **fields), request(OUTPUT[:-1], **fields)
    rows = [SampleRow(whole, position) for position in range(DRAWS // 2)]
    for number in range(DRAWS // 2):
        twin = split.fork(number + 1) if split.history is None else split
        rows.append(SampleRow(twin, DRAWS + number, OUTPUT[-1:]))
    tokens = sample(logits.expand(DRAWS, VOCAB), rows).tokens
    expected = exact_distribution(logits[0].tolist(), whole.params, OUTPUT)
    counts = [tokens.count(token) for token in range(VOCAB)]
    assert all(count == 0 for count, share in zip(counts, expected, strict=True) if share == 0.0)
    assert sum(counts) == DRAWS
    assert chi_square_p(counts, [share * DRAWS for share in expected]) > P_MIN


def test_the_test_would_notice_a_slightly_wrong_distribution() -> None:
    logits = logits_like(11)
    state = request(temperature=1.05)
    rows = [SampleRow(state, position) for position in range(DRAWS)]
    tokens = sample(logits.expand(DRAWS, VOCAB), rows).tokens
    expected = exact_distribution(logits[0].tolist(), SamplingParams(), ())
    counts = [tokens.count(token) for token in range(VOCAB)]
    assert chi_square_p(counts, [share * DRAWS for share in expected]) < P_MIN


def test_forks_draw_independently() -> None:
    state = request(seed=4)
    logits = torch.zeros(1, VOCAB)
    twins = (state, state.fork(1))
    rows = [SampleRow(twin, position) for position in range(DRAWS // 2) for twin in twins]
    tokens = [token % 6 for token in sample(logits.expand(len(rows), VOCAB), rows).tokens]
    pairs = Counter(zip(tokens[::2], tokens[1::2], strict=True))
    counts = [pairs[first, second] for first in range(6) for second in range(6)]
    assert chi_square_p(counts, [DRAWS / 2 / 36] * 36) > P_MIN


# --- a row is a function of that row ---------------------------------------------------------------------------


def random_row(rng: random.Random, device: str = "cpu") -> SampleRow:
    fields: dict[str, Any] = {
        "seed": rng.randrange(1 << 40),
        "temperature": rng.choice([0.0, 0.5, 1.0, 3.0]),
        "top_k": rng.choice([0, 0, 3, 10]),
        "top_p": rng.choice([1.0, 0.9, 0.3]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.5]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.7]),
        "logit_bias": rng.choice([None, None, {3: 4.0, 9: -2.0}]),
        "allowed_token_ids": rng.choice([None, None, tuple(range(4, 20))]),
        "min_tokens": rng.choice([0, 5]),
        "stop_token_ids": rng.choice([(), (7, 8)]),
        "logprobs": rng.choice([None, 0, 4]),
    }
    output = [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
    mask = None
    if rng.random() < 0.2:
        mask = torch.tensor([rng.random() < 0.7 or token == 10 for token in range(VOCAB)], device=device)
    assumed = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))
    return SampleRow(request(output, device=device, **fields), rng.randrange(1000), assumed, mask)


@pytest.mark.parametrize("device", DEVICES)
def test_no_row_depends_on_its_neighbours(device: str) -> None:
    rng = random.Random(8)
    rows = [random_row(rng, device) for _ in range(60)]
    logits = logits_like(2, 60, scale=3.0).to(device)
    logits[7, 3] = math.nan  # a broken neighbour too
    together = sample(logits, rows)
    for i in range(60):
        alone = sample(logits[i : i + 1], [rows[i]])
        assert (alone.tokens[0], alone.logprobs[0]) == (together.tokens[i], together.logprobs[i])
        assert (0 in alone.failed) == (i in together.failed)
    order = list(range(60))
    rng.shuffle(order)
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert shuffled.tokens == [together.tokens[i] for i in order]
    assert shuffled.logprobs == [together.logprobs[i] for i in order]


def test_assumed_tokens_count_exactly_like_committed_ones() -> None:
    rng = random.Random(9)
    for number in range(60):
        row = random_row(rng)
        text = [rng.randrange(VOCAB) for _ in range(8)]
        logits = logits_like(number, scale=3.0)
        seen = set()
        for committed in range(9):
            fields = {"params": row.state.params, "vocab_size": VOCAB, "device": "cpu", "prompt": PROMPT}
            state = RequestSampling(**fields, output=text[: committed // 2], eos_token_ids=[EOS])
            state.append(text[committed // 2 : committed])
            assumed = tuple(text[committed:])
            seen.add(tuple(sample(logits, [SampleRow(state, row.position, assumed, row.mask)]).tokens))
        assert len(seen) == 1


def test_generators_are_neither_read_nor_moved() -> None:
    logits = logits_like(1, 30)
    rows = [SampleRow(request(seed=seed), 5) for seed in range(30)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = sample(logits, rows).tokens
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert sample(logits, rows).tokens == first


def test_logits_are_left_as_they_were() -> None:
    rng = random.Random(10)
    logits = logits_like(3, 40)
    before = logits.clone()
    sample(logits, [random_row(rng) for _ in range(40)])
    assert torch.equal(logits, before)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    states = [request(seed=None) for _ in range(3)]
    assert len({state.seed for state in states}) == 3
    resumed = RequestSampling(states[0].params, vocab_size=VOCAB, device="cpu", seed=states[0].request_seed)
    assert resumed.seed == states[0].seed
    assert states[0].fork(2).seed == resumed.fork(2).seed != resumed.seed


def test_a_fork_goes_its_own_way() -> None:
    state = request((4,), frequency_penalty=1.0, repetition_penalty=1.2)
    twin = state.fork(1)
    twin.append([6, 6])
    assert (state.generated, twin.generated) == (1, 3)
    assert state.history is not None
    assert twin.history is not None
    assert [6 in history.after(())[0].tolist() for history in (state.history, twin.history)] == [False, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_chooses_the_same_tokens() -> None:
    logits = logits_like(2, 60, scale=3.0)
    here = sample(logits, [random_row(rng) for rng in [random.Random(8)] for _ in range(60)])
    there = sample(logits.cuda(), [random_row(rng, "cuda") for rng in [random.Random(8)] for _ in range(60)])
    assert there.tokens == here.tokens


# --- edges -----------------------------------------------------------------------------------------------------


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0] + [-0.0, 0.0] * 10])
    assert sample(logits, [SampleRow(request(temperature=0), 5)]).tokens == [1]
    rows = [SampleRow(request(top_k=2, temperature=100.0), position) for position in range(200)]
    assert set(sample(logits.expand(200, VOCAB), rows).tokens) == {1, 2}
    rows = [SampleRow(request(top_p=0.01, temperature=100.0), position) for position in range(200)]
    assert set(sample(logits.expand(200, VOCAB), rows).tokens) == {1}
    zeros = torch.tensor([[-0.0, 0.0] * 12])
    assert sample(zeros, [SampleRow(request(temperature=0), 5)]).tokens == [0]
    assert sample(zeros, [SampleRow(request(top_k=1), 5)]).tokens == [0]


@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 2e-5}]
)
def test_the_narrowest_settings_are_greedy(fields: dict[str, Any]) -> None:
    logits = logits_like(4, 50)
    rows = [SampleRow(request(seed=seed, **fields), 3) for seed in range(50)]
    assert sample(logits, rows).tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_possible_token_is_always_chosen(temperature: float) -> None:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[17] = True
    only = torch.full((1, VOCAB), -torch.inf)
    only[0, 17] = -50.0
    rows = [
        SampleRow(request(allowed_token_ids=[17], temperature=temperature), 3),
        SampleRow(request(temperature=temperature), 3, (), mask),
        SampleRow(request(temperature=temperature, top_k=3, top_p=0.5), 3),
    ]
    assert sample(torch.cat([logits_like(5), logits_like(6), only]), rows).tokens == [17, 17, 17]


def test_huge_logits_are_no_trouble() -> None:
    logits = torch.full((1, VOCAB), -3.4e38)
    logits[0, [4, 6]] = 3.4e38
    rows = [
        SampleRow(request(repetition_penalty=1e-12, temperature=temperature, top_p=0.9), at)
        for at, temperature in enumerate([2e-5, 1.0, 1e9] * 20)
    ]
    sampled = sample(logits.expand(60, VOCAB), rows)
    assert not sampled.failed
    assert {*sampled.tokens[0::3], *sampled.tokens[1::3]} == {4, 6}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_p": 0.5}, {"allowed_token_ids": [1, 2]}])
def test_broken_logits_fail_their_own_row_only(bad: float, fields: dict[str, Any]) -> None:
    logits = logits_like(7, 3)
    clean = sample(logits, [SampleRow(request(**fields), 2)] * 3).tokens
    logits[1, 20] = bad
    sampled = sample(logits, [SampleRow(request(logprobs=1, **fields), 2)] * 3)
    assert sampled.tokens == [clean[0], FAILED, clean[2]]
    assert list(sampled.failed) == [1]
    assert isinstance(sampled.failed[1], ModelError)
    assert "the model returned a logit of" in str(sampled.failed[1])
    assert [entry is None for entry in sampled.logprobs] == [False, True, False]


def test_no_possible_token_fails_its_own_row_with_another_message() -> None:
    state = request(allowed_token_ids=[EOS], min_tokens=1)
    sampled = sample(logits_like(7, 2), [SampleRow(state, 4), SampleRow(state, 5, (3,))])
    assert sampled.tokens == [FAILED, EOS]
    assert "allow more tokens or lower min_tokens" in str(sampled.failed[0])
    dead = sample(torch.full((1, VOCAB), -torch.inf), [SampleRow(request(), 4)])
    assert "no finite logit" in str(dead.failed[0])


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCAB), []).tokens == []


# --- log-probabilities -----------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = logits_like(12)
    logits[0, 8] = logits[0, 15] = logits[0].max() + 1.0
    total = math.log(sum(math.exp(value) for value in logits[0].tolist()))
    ranked = sorted(range(VOCAB), key=lambda token: (-logits[0, token].item(), token))
    assert ranked[:2] == [8, 15]
    for fields in ({}, {"top_k": 3, "temperature": 0.3}, {"logit_bias": {2: 100.0}}):
        sampled = sample(logits, [SampleRow(request(logprobs=5, **fields), 3)])
        entry, token = sampled.logprobs[0], sampled.tokens[0]
        assert entry is not None
        assert (entry.token, entry.rank) == (token, ranked.index(token) + 1)
        assert entry.logprob == pytest.approx(logits[0, token].item() - total, abs=1e-5)
        assert [alternative for alternative, _ in entry.top] == ranked[:5]
        assert [value for _, value in entry.top] == pytest.approx(
            [logits[0, alternative].item() - total for alternative in ranked[:5]], abs=1e-5
        )


def test_only_rows_that_asked_get_logprobs_and_as_many_as_they_asked_for() -> None:
    rows = [SampleRow(request(logprobs=count), 3) for count in (None, 0, 3, 20)]
    found = sample(logits_like(13, 4), rows).logprobs
    assert [entry and len(entry.top) for entry in found] == [None, 0, 3, 20]


def test_ranks_are_the_same_by_either_way() -> None:
    generator = torch.Generator().manual_seed(15)
    for logits in (logits_like(15, 30), logits_like(16, 30).round(), torch.zeros(30, VOCAB)):
        logits[:, 4] = -torch.inf
        logits[:, 5:7] = -0.0
        chosen = torch.randint(VOCAB, (30, 1), generator=generator)
        for width in (0, 1, 7, VOCAB):
            for one, other in zip(ranks(logits, chosen, width), ranks_on_cpu(logits, chosen, width), strict=True):
                assert torch.equal(one, other)


def test_history_grows_with_the_text() -> None:
    rng = random.Random(3)
    text = [rng.randrange(500) for _ in range(900)]
    history = TokenCounts()
    for token in text:
        history.add([token], 1.0)
    tokens, counts = history.after((7, 7, 1000))
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == Counter([*text, 7, 7, 1000])
    assert dict(zip(*(column.tolist() for column in history.after(())), strict=True)) == Counter(text)


def test_prompt_logprobs_of_many_rows_are_those_of_each_row() -> None:
    logits = logits_like(14, 150)
    tokens = [position % VOCAB for position in range(150)]
    found = token_logprobs(logits, tokens, [2] * 150)
    for i in (0, 63, 64, 149):
        assert found[i] == token_logprobs(logits[i : i + 1], tokens[i : i + 1], [2])[0]
    assert sum(math.exp(token_logprobs(logits[:1], [token], [0])[0].logprob) for token in range(VOCAB)) == (
        pytest.approx(1.0, abs=1e-5)
    )


# --- verification ----------------------------------------------------------------------------------------------


def test_the_accept_rule() -> None:
    assert accept((), (7,)) == (7,)
    assert accept((7, 8), (7, 8, 9)) == (7, 8, 9)
    assert accept((7, 8), (7, 5, 9)) == (7, 5)
    assert accept((7, 8), (1, 8, 9)) == (1,)
    assert accept((7, 8), (7, FAILED, 9)) == (7, FAILED)
    assert accept((7, 8), (1, FAILED, FAILED)) == (1,)


@pytest.mark.parametrize("fields", [SETTINGS["everything"], SETTINGS["the usual"], {"temperature": 0}])
def test_text_is_the_same_with_any_drafts(fields: dict[str, Any]) -> None:
    def logits_after(tokens: Sequence[int]) -> Tensor:
        return logits_like(hash(tuple(tokens[-3:])) % 1000, scale=2.0)

    def write(max_drafts: int, luck: float) -> list[int]:
        rng = random.Random(max_drafts)
        state, text = request(**fields), list(PROMPT)
        while len(text) < 60:
            drafts = [
                known[len(text) + ahead]
                if rng.random() < luck and len(known) > len(text) + ahead
                else rng.randrange(VOCAB)
                for ahead in range(rng.randint(0, max_drafts))
            ]
            lines = [[*text, *drafts[:ahead]] for ahead in range(len(drafts) + 1)]
            rows = [SampleRow(state, len(line), tuple(drafts[:ahead])) for ahead, line in enumerate(lines)]
            gained = accept(drafts, sample(torch.cat([logits_after(line) for line in lines]), rows).tokens)
            state.append(gained)
            text += gained
        return text[:60]

    known: list[int] = []
    known = write(0, 0.0)
    assert write(3, 0.7) == write(7, 0.9) == write(1, 0.0) == known
