"""A recorded pass through the layers computes what the calls compute one by one."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.engine.tiny import tiny_model, tiny_spec
from tests.kernels.cases import near
from tests.kernels.test_packed import packed_matrix

from outrider.layers.attention import AttentionRows, PagedKV
from outrider.layers.cpu_ops import NumbaOps, _Buffer
from outrider.layers.cpu_program import Step
from outrider.layers.ops import Ready, Recorded
from outrider.models.decoder import Decoder, Hidden, LayerKV
from outrider.models.packed import Packing
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

PAGES, PAGE_TOKENS = 40, 8


class Calls(NumbaOps):
    """Counts what is recorded, or records nothing."""

    def __init__(self, *, records: bool) -> None:
        super().__init__(threads=2)
        self.records, self.recorded = records, 0

    def record(self, x, rows, body):  # type: ignore[no-untyped-def]
        self.recorded += 1
        return super().record(x, rows, body) if self.records else None


def decoder(ops: NumbaOps, **changes: object) -> Decoder:
    spec = tiny_spec(**changes)
    model = tiny_model(spec=spec)
    parameters = model.parameters
    random = torch.Generator().manual_seed(1)
    more = {}
    if spec.post_norms:
        names = ("attention_post_norm", "mlp_post_norm")
        more |= {name: torch.rand(spec.hidden_size, generator=random) for name in names}
    if spec.qk_norm:
        more |= {name: torch.rand(spec.head_dim, generator=random) for name in ("q_norm", "k_norm")}
    if spec.sinks:
        more["sinks"] = torch.rand(spec.heads, generator=random)
    parameters = replace(parameters, layers=tuple(replace(layer, **more) for layer in parameters.layers))
    return Decoder(spec, parameters, ops, max_position=PAGES * PAGE_TOKENS)


def caches(of: Decoder) -> list[PagedKV]:
    spec = of.spec
    random = torch.Generator().manual_seed(3)
    shape = (PAGES, 2, spec.kv_heads, PAGE_TOKENS, spec.head_dim)
    arenas = [torch.randn(shape, generator=random) for _ in spec.layers]
    return [PagedKV(keys=arena[:, 0], values=arena[:, 1]) for arena in arenas]


def rows(starts: Sequence[int], count: int, window: int | None) -> AttentionRows:
    """`count` rows of each of some sequences, the pages of which lie one after the other."""
    positions = torch.cat([torch.arange(start, start + count) for start in starts])
    sequence = torch.arange(len(starts)).repeat_interleave(count)
    pages = (PAGES - 1) // len(starts)
    tables = 1 + torch.arange(len(starts) * pages, dtype=torch.int32).view(len(starts), pages)
    page = tables[sequence, positions // PAGE_TOKENS].long()
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    return AttentionRows(
        positions=positions,
        slots=page * PAGE_TOKENS + positions % PAGE_TOKENS,
        sequence=sequence,
        tables=tables,
        first_key=first,
        stop_key=positions + 1,
        most_keys=int((positions + 1 - first).max()),
    )


def steps(of: Decoder) -> list[torch.Tensor]:
    """Outputs, taps, logits and caches of steps of various shapes; shapes come back with other rows."""
    kv, seen = caches(of), []
    random = torch.Generator().manual_seed(5)
    for starts, count in (([3], 1), ([9], 4), ([4], 1), ([2, 50, 70], 2), ([30], 16), ([1, 60, 9], 2), ([290], 1)):
        groups = {window: rows(starts, count, window) for window in {layer.window for layer in of.spec.layers}}
        layers = [LayerKV(place, groups[layer.window]) for place, layer in zip(kv, of.spec.layers, strict=True)]
        tokens = torch.randint(0, of.spec.vocab_size, (len(starts) * count,), generator=random)
        hidden = of.forward(tokens, layers, taps=(0, 1), scored=(count // 2, len(tokens)))
        assert hidden.logits is not None
        assert torch.equal(hidden.logits, of.logits(hidden.final[count // 2 :]))
        assert (hidden.greatest is None) == (of.spec.logit_softcap is not None or not of.ops.records)  # type: ignore[attr-defined]
        if hidden.greatest is not None:
            assert hidden.greatest.read()[0] == hidden.logits.argmax(dim=-1).tolist()
        seen += [hidden.final.clone(), hidden.taps.clone(), hidden.logits.clone()]
    return seen + [each.keys for each in kv] + [each.values for each in kv]


GEMMA = {"post_norms": True, "qk_norm": True, "activation": Activation.GELU_TANH, "embedding_scale": 5.5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (6, None, 20)},
        {"post_norms": True},
        {**GEMMA, "windows": (6, 6, None), "attention_softcap": 2.0, "query_scale": 0.2},
        {"logit_softcap": 0.01},
        {"sinks": True, "windows": (6, None, 6), "activation": Activation.CLAMPED_SWIGLU},
    ],
    ids=["plain", "windows", "post norms", "as Gemma", "capped", "sinks"],
)
def test_recorded_steps_are_the_same_to_the_last_bit(changes: dict[str, object]) -> None:
    recorded, called = Calls(records=True), Calls(records=False)
    for one, other in zip(steps(decoder(recorded, **changes)), steps(decoder(called, **changes)), strict=True):
        assert torch.equal(one, other)
    # One for each number of rows: 1, 4, 6 and 16.
    assert recorded.recorded == 4


def test_results_stay_while_another_decoder_runs() -> None:
    """A drafter's passes come between the target's and the end of the step."""
    ops = Calls(records=True)
    target, drafter = decoder(ops), decoder(ops)
    target_kv, drafter_kv = caches(target), caches(drafter)

    def step(of: Decoder, kv: list[PagedKV], token: int) -> Hidden:
        layers = [LayerKV(place, rows([5], 1, None)) for place in kv]
        return of.forward(torch.tensor([token]), layers, taps=(0, 1), scored=(0, 1))

    for token in (1, 2):
        results = step(target, target_kv, token)
        kept = [each.clone() for each in results[:3] if each is not None]
        found = results.greatest.read() if results.greatest is not None else None
        others = step(drafter, drafter_kv, token + 2)
        assert results.greatest is not None
        assert results.greatest.read() == found
        for one, before, other in zip(results[:3], kept, others[:3], strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, before)
            assert not torch.equal(one, other)


def test_a_token_that_is_none_is_refused_by_what_is_recorded_too() -> None:
    of = decoder(Calls(records=True))
    kv = caches(of)
    for _ in range(2):
        for token in (-1, of.spec.vocab_size):
            with pytest.raises(IndexError, match=f"found {token} to {token}"):
                one_step(of, kv, token)
        one_step(of, kv, 3)


def test_what_comes_in_is_read_where_it_lies() -> None:
    """The same tensor with other numbers in it, other tensors, and such as lie otherwise: in turn."""
    results = []
    for records in (True, False):
        of = decoder(Calls(records=records))
        given = rows([5], 3, None)
        layers = [LayerKV(place, given) for place in caches(of)]
        same, other, wide = torch.tensor([1, 2, 3]), torch.tensor([7, 8, 9]), torch.tensor([[4, 0], [5, 0], [6, 0]])
        seen = []
        for tokens in (same, same, other, same, wide[:, 0], same, wide[:, 0], same.int(), same):
            same += 3
            given.positions.add_(1)
            wide += 1
            seen.append(of.forward(tokens, layers).final.clone())
        same[1] = of.spec.vocab_size
        with pytest.raises(IndexError, match="found"):
            of.forward(same, layers)
        results.append(seen)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int64])
def test_numbers_of_any_type_may_be_those_that_are_recorded_with(dtype: torch.dtype) -> None:
    ops = Calls(records=True)
    embedding = torch.randn(50, 16)
    recorded = ops.record(torch.tensor([1, 2], dtype=dtype), [], lambda x: ops.embed(x, embedding, 1.0))
    assert recorded is not None
    for given in (torch.tensor([3, 49], dtype=dtype), torch.tensor([4, 0])):
        assert torch.equal(recorded.run(given, []), embedding[given.long()])


def test_rows_of_another_type_may_be_those_that_are_recorded_with() -> None:
    ops = Calls(records=True)
    weight = Linear(weight=torch.randn(8, 64))
    recorded = ops.record(torch.zeros(2, 64, dtype=torch.bfloat16), [], lambda x: ops.project(x, weight))
    assert recorded is not None
    for x in (torch.randn(2, 64).bfloat16(), torch.randn(2, 64)):
        assert torch.equal(recorded.run(x, []), ops.project(x, weight))


def test_parts_of_what_comes_in_are_read_where_they_lie() -> None:
    ops = Calls(records=True)
    weight, copied = Linear(weight=torch.randn(8, 64)), torch.zeros(3, 64)

    def body(x: torch.Tensor) -> torch.Tensor:
        ops.copy(x, copied)
        return ops.project(x[1:], weight)

    recorded = ops.record(torch.zeros(3, 64), [], body)
    assert recorded is not None
    one, other = torch.randn(3, 64), torch.randn(3, 64)
    for x in (one, other, one):
        assert torch.equal(recorded.run(x, []), ops.project(x[1:], weight))
        assert torch.equal(copied, x)


def test_what_came_in_once_is_not_kept() -> None:
    ops = Calls(records=True)
    weight = Linear(weight=torch.randn(8, 64))
    recorded = ops.record(torch.zeros(2, 64), [], lambda x: ops.project(x, weight))
    assert recorded is not None
    gone = []
    for _ in range(5):
        x = torch.randn(2, 64)
        assert torch.equal(recorded.run(x, []), ops.project(x, weight))
        gone.append(weakref.ref(x))
        del x
    gc.collect()
    # Whether an address is still the right one is known only of what is there: the last one.
    assert [reference() is None for reference in gone] == [True] * 4 + [False]


def test_scratch_memory_that_an_interrupt_keeps_from_growing_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = _Buffer()
    buffer.at_least(100)

    def interrupted(_tensor: torch.Tensor) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "data_ptr", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.at_least(200)
    # The memory of the first call is gone by now.
    assert buffer.at_least(100) == buffer.tensor.data_ptr()


def test_two_passes_in_one_call_are_as_two_calls() -> None:
    """The second reads what the first left behind: a key, and through it a row."""
    seen = [left_and_read(together=together) for together in (True, False)]
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def left_and_read(*, together: bool) -> list[torch.Tensor]:
    ops = Calls(records=True)
    of = decoder(ops)
    kv = caches(of)
    first, second = rows([20], 1, None), rows([21], 2, None)
    layers = [LayerKV(place, second) for place in kv]
    width = of.spec.kv_size * 2
    recorded = ops.record(torch.zeros(1, width), [first], lambda x: ops.store(x, of.attention[0], kv[0], first))
    assert recorded is not None
    results = []
    for number in range(3):
        ready = Ready(recorded, torch.full((1, width), 0.5 + number), [first])
        if not together:
            ready.run()
        hidden = of.forward(torch.tensor([1, 2]), layers, after=ready if together else None)
        results.append(hidden.final.clone())
    assert not torch.equal(results[0], results[1])
    return results


@pytest.mark.parametrize("count", [2, 17])
def test_what_has_to_run_first_runs_where_nothing_is_recorded_too(count: int) -> None:
    ops, ran = Calls(records=False), []

    class Noted(Recorded[None]):
        def run(self, x: torch.Tensor, rows: Sequence[AttentionRows], *, after: Ready | None = None) -> None:
            ran.append(x)

    of = decoder(ops)
    layers = [LayerKV(place, rows([5], count, None)) for place in caches(of)]
    x = torch.zeros(1)
    of.forward(torch.ones(count, dtype=torch.int64), layers, after=Ready(Noted(), x, []))
    assert len(ran) == 1
    assert ran[0] is x


def test_a_few_rows_do_not_keep_those_of_a_prompt() -> None:
    ops = Calls(records=True)
    weight = Linear(weight=torch.randn(8, 64))
    recorded = ops.record(torch.zeros(2, 64), [], lambda x: ops.project(x, weight))
    assert recorded is not None
    for rows_of_step, stays in ((16, True), (100_000, False)):
        x = torch.randn(rows_of_step, 64)
        for first in (0, 5):
            part = x[first : first + 2]
            for _again in range(2):
                assert torch.equal(recorded.run(part, []), ops.project(part, weight))
        gone = weakref.ref(part)
        del part
        gc.collect()
        assert (gone() is not None) == stays


def test_memory_is_used_again_within_a_pass() -> None:
    """Results of a layer are gone when the next one runs, so 12 layers need no more than 3."""
    sizes = []
    for count in (3, 12):
        of = decoder(Calls(records=True), windows=(None,) * count)
        layers = [LayerKV(place, rows([5], 1, None)) for place in caches(of)]
        of.forward(torch.tensor([1]), layers)
        ((program, _layers, _rows),) = of._recorded.values()
        sizes.append(sum(isinstance(kept, torch.Tensor) and kept.shape[0] == 1 for kept in program._kept))
    assert sizes[0] == sizes[1]


def test_a_packed_model_runs_through_all_layers() -> None:
    """Recorded and called: one result, and near to that of the weights written out."""
    plain = decoder(Calls(records=False))
    matrices = {
        "qkv": packed_matrix(Packing.FOUR_BITS, *plain.parameters.layers[0].qkv.weight.shape),
        "out": packed_matrix(Packing.EIGHT_BITS, *plain.parameters.layers[0].out.weight.shape),
    }
    results = {}
    for records in (True, False):
        for packed in (True, False):
            linears = {name: Linear(weight=matrix if packed else matrix.expand()) for name, matrix in matrices.items()}
            layers = tuple(replace(layer, **linears) for layer in plain.parameters.layers)
            parameters = replace(plain.parameters, layers=layers)
            results[records, packed] = steps(
                Decoder(plain.spec, parameters, Calls(records=records), max_position=PAGES * PAGE_TOKENS)
            )
    for packed in (True, False):
        assert all(torch.equal(a, b) for a, b in zip(results[True, packed], results[False, packed], strict=True))
    assert all(near(a, b, 1e-3) for a, b in zip(results[True, True], results[True, False], strict=True))


def one_step(of: Decoder, kv: list[PagedKV], token: int, taps: tuple[int, ...] = ()) -> list[torch.Tensor]:
    layers = [LayerKV(place, rows([5], 1, None)) for place in kv]
    hidden = of.forward(torch.tensor([token]), layers, taps=taps)
    return [hidden.final.clone(), *hidden.taps.clone().unflatten(1, (-1, of.spec.hidden_size)).unbind(1)]


def test_one_decoder_serves_other_memory_in_turn() -> None:
    """What was recorded with one engine's KV is not run on another's."""
    results = []
    for records in (True, False):
        of = decoder(Calls(records=records))
        first, second = caches(of), caches(of)
        for place in second:
            place.keys.neg_()
        seen = [tensor for kv in (first, second, first, second) for tensor in one_step(of, kv, 3)]
        results.append(seen + [place.keys for kv in (first, second) for place in kv])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_memory_of_an_engine_that_is_gone_is_not_kept() -> None:
    """A drafter may serve one engine after the other."""
    of = decoder(Calls(records=True))
    first = caches(of)
    one_step(of, first, 3)
    gone = [weakref.ref(place.keys) for place in first]
    second = caches(of)
    one_step(of, second, 3)
    del first
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_every_choice_of_taps_is_recorded_by_itself() -> None:
    choices: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1), (1,), (1, 0), (), (0, 1))
    results = []
    for records in (True, False):
        of = decoder(Calls(records=records))
        kv = caches(of)
        results.append([one_step(of, kv, 3, taps) for taps in choices])
    for taps, one, other in zip(choices, *results, strict=True):
        assert len(one) == len(other) == 1 + len(taps)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("hidden_size", [20, 34, 40])
def test_taps_of_any_width_are_copied_whole(hidden_size: int) -> None:
    changes = {"hidden_size": hidden_size, "windows": (None,) * 3}
    recorded, called = (steps(decoder(Calls(records=records), **changes)) for records in (True, False))
    for one, other in zip(recorded, called, strict=True):
        assert torch.equal(one, other)


def odd(of: AttentionRows) -> AttentionRows:
    """The same rows as other types, and with gaps in memory."""

    def gaps(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([tensor.to(dtype), torch.full_like(tensor, 77).to(dtype)], dim=-1)[..., 0]

    return replace(
        of,
        positions=gaps(of.positions, torch.int32),
        slots=gaps(of.slots, torch.int32),
        sequence=gaps(of.sequence, torch.int32),
        tables=gaps(of.tables, torch.int64),
        first_key=gaps(of.first_key, torch.int16),
        stop_key=gaps(of.stop_key, torch.int64),
    )


def test_rows_of_other_types_stay_in_memory_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is converted for a step lives as long as its addresses are in use."""
    converted: list[weakref.ref[torch.Tensor]] = []
    set_rows = Step.set
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = to(tensor, dtype)
        converted.append(weakref.ref(result))
        return result

    def set_and_check(self: Step, given: AttentionRows) -> None:
        converted.clear()
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", noted)
            set_rows(self, given)
        gc.collect()
        assert len(converted) == (6 if given.positions.dtype == torch.int32 else 0)
        assert all(reference() is not None for reference in converted)

    monkeypatch.setattr(Step, "set", set_and_check)
    of, plain = decoder(Calls(records=True)), decoder(Calls(records=False))
    kv, other_kv = caches(of), caches(plain)
    for start in (5, 9, 30):
        given = rows([start], 2, None)
        tokens = torch.tensor([start, 7])
        one = of.forward(tokens, [LayerKV(place, odd(given)) for place in kv]).final
        assert torch.equal(one, plain.forward(tokens, [LayerKV(place, given) for place in other_kv]).final)


@pytest.mark.parametrize("records", [True, False])
def test_rows_of_other_types_may_change_where_they_lie(records: bool) -> None:
    of, plain = decoder(Calls(records=records)), decoder(Calls(records=False))
    given = odd(rows([5], 2, None))
    layers = [LayerKV(place, given) for place in caches(of)]
    other_kv = caches(plain)
    for start in (6, 7):
        given.positions.add_(1)
        same = replace(rows([5], 2, None), positions=torch.tensor([start, start + 1]))
        expected = plain.forward(torch.tensor([1, 2]), [LayerKV(place, same) for place in other_kv]).final
        assert torch.equal(of.forward(torch.tensor([1, 2]), layers).final, expected)


def test_every_choice_of_scored_rows_is_recorded_by_itself() -> None:
    of = decoder(Calls(records=True))
    layers = [LayerKV(place, rows([5], 4, None)) for place in caches(of)]
    for scored in ((0, 4), (3, 4), (1, 3), None, (2, 4), (0, 4)):
        hidden = of.forward(torch.tensor([1, 2, 3, 4]), layers, scored=scored)
        if scored is None:
            assert hidden.logits is None
        else:
            assert hidden.logits is not None
            assert torch.equal(hidden.logits, of.logits(hidden.final[scored[0] : scored[1]]))
