"""What every backend must do: each operation of the interface, on random input, gives what the reference gives.

A new backend is tested by one more line in `BACKENDS`.
"""

from __future__ import annotations

import os
import random as stdlib_random
from dataclasses import fields, replace

import pytest
import torch
from tests.backends.cases import (
    VOCABULARY,
    FakeTables,
    Model,
    decoder_parameters,
    decoder_spec,
    layer,
    mixed_ranges,
    moved,
    near,
    paged,
    random,
)
from tests.backends.draws import random_columns, random_logits, settings
from tests.kv.fakes import drafter, full, sliding

from outrider.backends.attention import AttentionLayer
from outrider.backends.base import Backend, Capability
from outrider.backends.batch import Batch, BatchBuilder, Span
from outrider.backends.reference.backend import ReferenceBackend
from outrider.backends.registry import select_backend
from outrider.errors import ConfigError
from outrider.kv import KVLayout
from outrider.models.parameters import Linear, StoredMatrix
from outrider.models.spec import Activation, ExpertsSpec

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/backends/cuda/test_triton.py runs it on the interpreter"
)
BACKENDS = [
    pytest.param(("cpu", "cpu", 1), id="cpu-1-thread"),
    pytest.param(("cpu", "cpu", 2), id="cpu-2-threads"),
    pytest.param(("cuda", "cuda", None), id="cuda", marks=NEEDS_GPU),
    pytest.param(("cuda", "cpu", None), id="cuda-interpreted", marks=NEEDS_INTERPRETER),
]
REFERENCE = ReferenceBackend()
EPS = 1e-5
SHAPES = [
    (1, 64, 48),
    (3, 37, 50),
    (5, 576, 960),
    (33, 100, 7),
    (64, 13, 129),
    (200, 576, 257),
    (41, 1536, 64),
    (2, 5, 1),
]
"""Rows, inputs, outputs of products."""


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    name, device, threads = request.param
    return select_backend(name, device=torch.device(device), threads=threads)


def linear(outputs: int, inputs: int, *, bias: bool) -> Linear:
    return Linear(weight=random(1, outputs, inputs) / inputs**0.5, bias=random(2, outputs) if bias else None)


# --- layer arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_embed(backend: Backend, scale: float) -> None:
    embedding, token_ids = random(0, 40, 50), torch.tensor([0, 39, 5, 5, 17] * 7)
    found = backend.embed(moved(token_ids, backend.device), moved(embedding, backend.device), scale)
    assert near(found, REFERENCE.embed(token_ids, embedding, scale))


@pytest.mark.parametrize("width", [1, 15, 16, 576, 577])
def test_norm(backend: Backend, width: int) -> None:
    x, weight = random(0, 40, width), random(1, width)
    found = backend.norm(moved(x, backend.device), moved(weight, backend.device), EPS)
    assert near(found, REFERENCE.norm(x, weight, EPS))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_project(backend: Backend, rows: int, inputs: int, outputs: int, bias: bool) -> None:
    x, weights, norm = random(0, rows, inputs), linear(outputs, inputs, bias=bias), random(3, inputs)
    here, there, norm_there = moved(x, backend.device), moved(weights, backend.device), moved(norm, backend.device)
    assert near(backend.project(here, there), REFERENCE.project(x, weights))
    normed = backend.project(here, there, norm=norm_there, eps=EPS)
    assert near(normed, REFERENCE.project(x, weights, norm=norm, eps=EPS))
    assert torch.equal(here.cpu(), x)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("post_norm", [False, True])
def test_project_add(backend: Backend, rows: int, inputs: int, outputs: int, post_norm: bool) -> None:
    x, weights, residual = random(0, rows, inputs), linear(outputs, inputs, bias=True), random(4, rows, outputs)
    norm = random(5, outputs) if post_norm else None
    there = [moved(each, backend.device) for each in (x, weights, residual)]
    found = backend.project_add(*there, post_norm=moved(norm, backend.device), eps=EPS)
    assert near(found, REFERENCE.project_add(x, weights, residual, post_norm=norm, eps=EPS))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("bias", [False, True])
def test_gated(backend: Backend, rows: int, inputs: int, outputs: int, activation: Activation, bias: bool) -> None:
    # Large enough to reach the clamps of the clamped activation.
    x, weights, norm = random(0, rows, inputs) * 4, linear(2 * outputs, inputs, bias=bias), random(3, inputs) * 4
    there, norm_there = moved(weights, backend.device), moved(norm, backend.device)
    found = backend.gated(moved(x, backend.device), there, activation, norm=norm_there, eps=EPS)
    assert near(found, REFERENCE.gated(x, weights, activation, norm=norm, eps=EPS))


def test_rows_of_a_wider_tensor_are_read_in_place(backend: Backend) -> None:
    wide, weights = moved(random(0, 6, 80), backend.device), moved(linear(24, 40, bias=False), backend.device)
    assert near(backend.project(wide[:, 20:60], weights), backend.project(wide[:, 20:60].contiguous(), weights))


EXPERTS = [
    None,
    ExpertsSpec(count=6, per_token=2, intermediate_size=96),
    ExpertsSpec(count=6, per_token=3, intermediate_size=96, softmax_first=False),
]


@pytest.mark.parametrize("experts", EXPERTS[1:], ids=["softmax first", "softmax of the chosen"])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.CLAMPED_SWIGLU])
def test_experts(backend: Backend, experts: ExpertsSpec, activation: Activation) -> None:
    mlp = decoder_parameters(decoder_spec(experts=experts)).layers[0].mlp
    x, norm = random(0, 9, 64), random(1, 64)
    there, norm_there = moved(mlp, backend.device), moved(norm, backend.device)
    found = backend.experts(moved(x, backend.device), there, experts, activation, norm=norm_there, eps=EPS)  # type: ignore[arg-type]
    assert near(found, REFERENCE.experts(x, mlp, experts, activation, norm=norm, eps=EPS))  # type: ignore[arg-type]


def test_compacted_and_kept_matrices_stand_for_nearly_the_same_numbers(backend: Backend) -> None:
    x, matrix = random(0, 9, 96), random(1, 48, 96).bfloat16()
    compact = backend.keep(backend.compact(moved(matrix, backend.device)))
    assert isinstance(compact, StoredMatrix) == backend.compacts
    expected = REFERENCE.project(x, Linear(weight=matrix.float()))
    if backend.compacts:
        assert near(backend.project(moved(x, backend.device), Linear(weight=compact)), expected, 2e-2)


# --- attention -------------------------------------------------------------------------------------------------


def check_attention(backend: Backend, of: AttentionLayer, page_tokens: int = 16) -> None:
    ranges = mixed_ranges()
    kv, rows = paged(of, ranges, page_tokens)
    qkv = random(8, len(ranges), (of.heads + 2 * of.kv_heads) * of.head_dim)
    there_kv, there_qkv = moved(kv, backend.device), moved(qkv, backend.device)
    prepared = backend.prepare_attention(moved(of, backend.device))
    found = backend.attend(there_qkv, prepared, there_kv, moved(rows, backend.device))
    assert torch.equal(there_qkv.cpu(), qkv)
    expected = REFERENCE.attend(qkv, of, kv, rows)
    assert near(there_kv.keys, kv.keys)
    assert torch.equal(there_kv.values.cpu(), kv.values)
    assert near(found, expected)


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 24, 32, 300])
def test_attend_over_pages_of_any_size(backend: Backend, page_tokens: int) -> None:
    check_attention(backend, layer(), page_tokens)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 3), (9, 3), (8, 2), (8, 1), (10, 2), (7, 1)])
def test_attend_with_heads_that_share_keys(backend: Backend, heads: int, kv_heads: int) -> None:
    check_attention(backend, layer(heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("dim", [2, 8, 20, 64, 72, 80, 96, 128, 256])
def test_attend_with_heads_of_any_size(backend: Backend, dim: int) -> None:
    check_attention(backend, layer(heads=3, kv_heads=1, dim=dim))


@pytest.mark.parametrize("rotary_dim", [2, 16, 24, 62])
@pytest.mark.parametrize("head_norms", [False, True])
def test_attend_with_partial_rotation_and_head_norms(backend: Backend, rotary_dim: int, head_norms: bool) -> None:
    check_attention(backend, layer(dim=64, rotary_dim=rotary_dim, head_norms=head_norms))


@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (50.0, False), (None, True), (1.5, True)])
def test_attend_with_softcap_and_sinks(backend: Backend, softcap: float | None, sinks: bool) -> None:
    if not {Capability.SOFTCAP, Capability.SINKS} <= backend.capabilities:
        pytest.skip("the backend declares that it cannot")
    check_attention(backend, layer(softcap=softcap, sinks=sinks))


def test_slots_that_a_row_does_not_read_cannot_spoil_it(backend: Backend) -> None:
    """They hold what other requests have left there, which may be no numbers."""
    of, ranges = layer(), mixed_ranges()
    kv, rows = paged(of, ranges, 16)
    qkv = random(8, len(ranges), (of.heads + 2 * of.kv_heads) * of.head_dim)
    expected = REFERENCE.attend(qkv, of, moved(kv, torch.device("cpu")), rows)
    read = torch.zeros(kv.keys.shape[0], 16, dtype=torch.bool)
    for table_row, _position, first, stop in ranges:
        at = torch.arange(first, stop)
        read[rows.block_tables[table_row, at // 16].long(), at % 16] = True
    for part in (kv.keys, kv.values):
        part.permute(0, 2, 1, 3)[~read] = float("nan")
    assert torch.equal(REFERENCE.attend(qkv, of, moved(kv, torch.device("cpu")), rows), expected)
    prepared = backend.prepare_attention(moved(of, backend.device))
    found = backend.attend(moved(qkv, backend.device), prepared, moved(kv, backend.device), moved(rows, backend.device))
    assert near(found, expected)


@pytest.mark.parametrize("head_norms", [False, True])
def test_store_writes_what_attend_writes(backend: Backend, head_norms: bool) -> None:
    of = layer(head_norms=head_norms)
    kv, rows = paged(of, [(0, 5, 0, 6), (0, 6, 0, 7), (1, 3, 0, 4), (1, 4, 0, 5)], 4)
    qkv, pair = random(8, 4, (of.heads + 2 * of.kv_heads) * of.head_dim), 2 * of.kv_heads * of.head_dim
    there_kv = moved(kv, backend.device)
    prepared = backend.prepare_attention(moved(of, backend.device))
    # A part of wider rows, as drafters have it.
    backend.store(moved(qkv, backend.device)[:, -pair:], prepared, there_kv, moved(rows, backend.device))
    REFERENCE.attend(qkv, of, kv, rows)
    assert near(there_kv.keys, kv.keys)
    assert torch.equal(there_kv.values.cpu(), kv.values)


# --- passes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 17])
def test_what_is_enqueued_runs_before_the_next_operation_and_at_the_end_of_a_step(backend: Backend, rows: int) -> None:
    of = backend.prepare_attention(moved(layer(), backend.device))
    kv, places = paged(layer(), [(0, position, 0, position + 1) for position in range(30, 30 + rows)], 16)
    kv, places, expected = moved(kv, backend.device), moved(places, backend.device), moved(kv, torch.device("cpu"))
    width = 2 * of.kv_heads * of.head_dim
    feed = backend.compile_pass(lambda x, groups, _options: backend.store(x, of, kv, groups[0]))
    read = backend.compile_pass(lambda x, groups, _options: backend.attend(x, of, kv, groups[0]))
    for seed in range(2):
        pairs, qkv = random(seed, rows, width), random(seed, 1, width + of.heads * of.head_dim)
        _, reads = paged(layer(), [(0, 60, 0, 61)], 16)
        REFERENCE.store(pairs, layer(), expected, moved(places, torch.device("cpu")))
        plain = REFERENCE.attend(qkv, layer(), expected, reads)
        for passes in (True, False):
            with backend.step():
                feed.enqueue(moved(pairs, backend.device), (places,), 0)
                there, rows_there = moved(qkv, backend.device), moved(reads, backend.device)
                if passes:
                    found = read.run(there, (rows_there,), 0)
                else:
                    found = backend.attend(there, of, kv, rows_there)
            assert near(found, plain)
    with backend.step():
        feed.enqueue(moved(random(9, rows, width), backend.device), (places,), 0)
    backend.settle()
    REFERENCE.store(random(9, rows, width), layer(), expected, moved(places, torch.device("cpu")))
    assert near(kv.keys, expected.keys)


# --- whole decoders --------------------------------------------------------------------------------------------

GEMMA = {"post_norms": True, "qk_norm": True, "activation": Activation.GELU_TANH, "embedding_scale": 5.5}
DECODERS = [
    {},
    {"windows": (6, None, 20)},
    {**GEMMA, "windows": (6, 6, None), "attention_softcap": 2.0, "query_scale": 0.2, "logit_softcap": 3.0},
    {"sinks": True, "windows": (6, None, 6), "activation": Activation.CLAMPED_SWIGLU},
    *({"experts": each, "post_norms": True} for each in EXPERTS[1:]),
]


@pytest.mark.parametrize("changes", DECODERS)
def test_a_decoder_gives_what_it_gives_by_the_reference(backend: Backend, changes: dict[str, object]) -> None:
    if backend.device.type != "cpu":
        pytest.skip("decoders on a GPU are tested with the engine")
    fast, plain = (Model(each, decoder_spec(**changes)) for each in (backend, REFERENCE))  # type: ignore[arg-type]
    for number, (starts, count) in enumerate((((0,), 30), ((30,), 1), ((31,), 4), ((2, 50, 70), 2), ((40,), 16)) * 2):
        token_ids = [(7 + number) * row % VOCABULARY for row in range(count * len(starts))]
        found, expected = (
            model.paged.forward(
                model.batch(token_ids, *starts), taps=(0, 1), scored=(count // 2, len(token_ids)), probabilities=True
            )
            for model in (fast, plain)
        )
        assert found.argmax is not None
        assert expected.argmax is not None
        for name in ("logits", "taps", "hidden"):
            assert near(getattr(found, name), getattr(expected, name), 1e-4)
        assert found.argmax.read()[0] == expected.argmax.read()[0]
        assert found.argmax.probabilities() == pytest.approx(expected.argmax.probabilities(), rel=1e-3)
    assert all(near(one.keys, other.keys, 1e-4) for one, other in zip(fast.kv, plain.kv, strict=True))


# --- batches and sampling --------------------------------------------------------------------------------------


def same_batch(one: Batch, other: Batch) -> None:
    assert torch.equal(one.token_ids.cpu(), other.token_ids)
    assert one.first_rows == other.first_rows
    for a, b in zip(one.groups, other.groups, strict=True):
        assert a.max_keys >= int((b.stop_key - b.first_key).max())
        for field in fields(a):
            if field.name != "max_keys":
                x, y = getattr(a, field.name), getattr(b, field.name)
                assert x.dtype == y.dtype, field.name
                assert torch.equal(x.cpu(), y), field.name


def batch_layout() -> KVLayout:
    target = (full("a", page=4), sliding(6, "b", page=3))
    draft = [replace(group, causal=False) for group in (full("c", page=8), sliding(6, "d", page=5))]
    return KVLayout(target=target, footprint=drafter("block_from_taps", *draft))


def random_span(rng: stdlib_random.Random) -> Span:
    start, count = rng.randrange(0, 150), rng.choice((1, 2, 5, 16, 17))
    block = rng.random() < 0.5
    return Span(
        table_row=rng.randrange(2),
        start=start,
        token_ids=[rng.randrange(256) for _ in range(count)],
        kept_from=rng.choice((0, start + rng.randint(0, count))),
        sees_to=start + count if block else 0,
        anchored=block and rng.random() < 0.5,
    )


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_those_of_the_plain_builder(backend: Backend, seed: int) -> None:
    rng, layout = stdlib_random.Random(seed), batch_layout()
    tables = FakeTables(layout, requests=2, max_model_len=200, seed=seed)
    built, plain = backend.batch_builder(layout, tables), BatchBuilder(layout, tables, torch.device("cpu"))
    for _ in range(12):
        spans = [random_span(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
        for groups in (range(2), range(2, 4)):
            same_batch(built.build(spans, groups), plain.build(spans, groups))


@pytest.mark.parametrize("vocabulary", [1, 17, 1025, 49_157])
def test_argmax(backend: Backend, vocabulary: int) -> None:
    logits = random(vocabulary, 6, vocabulary)
    logits[1], logits[2, vocabulary // 2] = 0.0, 100.0
    logits[3, vocabulary // 3], logits[4, vocabulary // 2] = float("nan"), float("inf")
    token_ids, values = backend.argmax(moved(logits, backend.device)).read()
    expected_ids, expected = REFERENCE.argmax(logits).read()
    assert token_ids == expected_ids
    assert values == pytest.approx(expected, nan_ok=True)
    finite = [0, 1, 2, 5]
    found = backend.argmax(moved(logits[finite], backend.device), probabilities=True).probabilities()
    assert found == pytest.approx(logits[finite].softmax(dim=-1).amax(dim=-1).tolist(), rel=1e-4)


@pytest.mark.parametrize(("vocabulary", "rounds"), [(1, 2), (2, 10), (7, 40), (256, 30), (257, 30), (5000, 6)])
def test_draw(backend: Backend, vocabulary: int, rounds: int) -> None:
    """The very same tokens on every backend, or the text of a seed would depend on the machine."""
    rng = stdlib_random.Random(vocabulary)
    for number in range(rounds):
        logits = random_logits(rng, 24, vocabulary)
        columns = random_columns(rng, 24, vocabulary)
        if number % 3 == 2:
            columns |= {"top_k": [0] * 24, "top_p": [1.0] * 24}
        found = backend.draw(moved(logits, backend.device), moved(settings(columns), backend.device))
        assert found.tolist() == REFERENCE.draw(logits, settings(columns)).tolist()


# --- memory ----------------------------------------------------------------------------------------------------


def test_pages_begin_as_zeros_and_a_budget_that_cannot_be_met_is_refused(backend: Backend) -> None:
    pages = backend.zeros((3, 512), torch.bfloat16)
    assert (pages.shape, pages.dtype, pages.device.type) == ((3, 512), torch.bfloat16, backend.device.type)
    assert not pages.any()
    assert backend.free_kv_bytes(0.9) > 0
    backend.check_kv_bytes(1 << 20)
    if backend.device.type == "cpu":
        with pytest.raises(ConfigError, match="lower it"):
            backend.check_kv_bytes(1 << 60)
