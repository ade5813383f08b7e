"""The kernels of layers against the reference, with guards around their outputs: on a GPU, or on the interpreter."""

from __future__ import annotations

import pytest
import torch
from tests.backends.cases import moved, near, random
from torch import Tensor

from outrider.backends.cuda.kernels import linear as products
from outrider.backends.cuda.kernels import rows as of_rows
from outrider.backends.cuda.kernels.argmax import argmax
from outrider.backends.reference.backend import ReferenceBackend, activate
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceBackend()
GUARD, EPS = 7.0, 1e-5
TYPES = [torch.float32, torch.float16]


def guarded(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole = torch.full((rows + 2, width + 5), GUARD, dtype=dtype, device=DEVICE)
    return whole, whole[1:-1, 2:-3]


def untouched(whole: Tensor) -> bool:
    edges = (whole[0], whole[-1], whole[:, :2], whole[:, -3:])
    return all(bool((edge == GUARD).all()) for edge in edges)


def tolerance(dtype: torch.dtype) -> float:
    return 2e-5 if dtype is torch.float32 else 4e-3


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "k", "outputs"), [(1, 64, 40), (7, 576, 96), (33, 100, 130), (64, 200, 17)])
@pytest.mark.parametrize("what", ["plain", "residual", *Activation])
def test_products(rows: int, k: int, outputs: int, what: str | Activation, dtype: torch.dtype) -> None:
    activation = what if isinstance(what, Activation) else None
    x = random(0, rows, k).to(dtype)
    weight = (random(1, outputs * (2 if activation else 1), k) / k**0.5).to(dtype)
    bias = random(2, len(weight)).to(dtype) if rows % 2 else None
    residual = random(4, rows, outputs).to(dtype) if what == "residual" else None
    wide = Linear(weight=weight.float(), bias=None if bias is None else bias.float())
    expected = REFERENCE.project(x.float(), wide)
    if activation is not None:
        expected = activate(*expected.chunk(2, dim=-1), activation)
    if residual is not None:
        expected = expected + residual.float()
    whole, out = guarded(rows, outputs, dtype)
    products.linear(
        moved(x, DEVICE),
        moved(weight, DEVICE),
        moved(bias, DEVICE),
        out,
        residual=moved(residual, DEVICE),
        activation=activation,
    )
    assert near(out, expected, tolerance(dtype))
    assert untouched(whole)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter's products are NumPy's, whose order is not fixed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = random(0, products.ROWS_MAX, 576).to(DEVICE, dtype), random(1, 960, 576).to(DEVICE, dtype)
    outs = []
    for rows in (1, 3, 16, 17, 33, products.ROWS_MAX):
        out = x.new_empty(rows, 960)
        products.linear(x[:rows], weight, None, out)
        outs.append(out)
    assert all(torch.equal(out, outs[-1][: len(out)]) for out in outs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 40, 576])
def test_norms_and_residuals(width: int, dtype: torch.dtype) -> None:
    x, weight, residual = random(0, 9, width).to(dtype), random(1, width), random(2, 9, width).to(dtype)
    for add in (None, residual):
        whole, out = guarded(9, width, dtype)
        of_rows.norm(moved(x, DEVICE), moved(weight, DEVICE), EPS, out, residual=moved(add, DEVICE))
        expected = REFERENCE.norm(x.float(), weight, EPS) + (0 if add is None else add.float())
        assert near(out, expected, tolerance(dtype))
        assert untouched(whole)


@pytest.mark.parametrize("activation", list(Activation))
def test_gates(activation: Activation) -> None:
    gate_up = random(0, 70, 2 * 37) * 5
    whole, out = guarded(70, 37, torch.float32)
    of_rows.gate(moved(gate_up, DEVICE), activation, out)
    assert near(out, activate(*gate_up.chunk(2, dim=-1), activation))
    assert untouched(whole)


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_embeddings_read_nothing_outside_their_table(scale: float) -> None:
    table, token_ids = random(0, 40, 50), torch.tensor([0, 39, 40, -1, 1 << 40, 7])
    whole, out = guarded(6, 50, torch.float32)
    of_rows.embed(moved(token_ids, DEVICE), moved(table, DEVICE), scale, out)
    assert near(out[[0, 1, 5]], table[[0, 39, 7]] * scale)
    assert out[2:5].isnan().all()
    assert untouched(whole)


@pytest.mark.parametrize("vocab", [1, 5, 300, 5000])
def test_argmax_of_hard_rows(vocab: int) -> None:
    logits = random(vocab, 8, vocab)
    logits[0] = logits[0].round()  # many that are largest
    logits[1], logits[2], logits[3] = -torch.inf, 0.0, -0.0
    logits[4, vocab // 2], logits[5, vocab // 3] = torch.nan, -torch.nan
    logits[3, vocab // 2] = 0.0
    found = argmax(moved(logits, DEVICE), probabilities=True).cpu()
    expected = [int(row.argmax()) for row in logits]
    expected[1:4] = [0, 0, 0]
    assert found[:, 0].tolist() == expected
    finite = [0, 2, 3, 6, 7]
    assert near(found[finite, 2].float(), logits[finite].softmax(-1).amax(-1))
