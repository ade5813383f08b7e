"""A recorded pass computes to the last bit what its calls compute one by one, whatever comes between its runs."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from tests.backends.cases import Model, decoder_parameters, decoder_spec, layer, near, paged, random
from tests.backends.cpu.test_packed import packed_matrix
from torch import Tensor

from outrider.backends import cpu
from outrider.backends.attention import AttentionMetadata
from outrider.backends.base import Body, EagerPass, Options, Pass, Result
from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels.pool import BEGUN, BUSY, DONE, THREADS, TICKET
from outrider.backends.cpu.kernels.threads import Threads
from outrider.backends.cpu.packed import Packing
from outrider.backends.cpu.passes import PROGRAMS_MAX
from outrider.backends.cpu.program import RECORDED_ROWS_MAX
from outrider.models.decoder import DecoderOutput
from outrider.models.parameters import Linear
from outrider.models.spec import Activation

NO_GROUPS: tuple[AttentionMetadata, ...] = ()


class Eager(CPUBackend):
    """Records nothing."""

    def compile_pass(self, body: Body[Options, Result], *, static: bool = True) -> Pass[Options, Result]:
        return EagerPass(body)


def both() -> tuple[CPUBackend, CPUBackend]:
    return CPUBackend(threads=2), Eager(threads=2)


def models(**changes: Any) -> list[Model]:
    return [Model(backend, decoder_spec(**changes)) for backend in both()]


def copied(output: DecoderOutput) -> list[Any]:
    argmax = [] if output.argmax is None else [*output.argmax.read()]
    return [output.hidden.clone(), output.taps.clone(), *([] if output.logits is None else [output.logits.clone()])] + (
        argmax
    )


def equal(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


STEPS = (
    *(((3,), 1), ((9,), 4), ((4,), 1), ((2, 50, 70), 2), ((30,), 16), ((1, 60, 9), 2), ((290,), 1), ((31,), 17)),
    *(((5, 90), 32), ((2, 50, 70), 2), ((7,), RECORDED_ROWS_MAX + 1)),
)


def steps(model: Model) -> list[Any]:
    """Returns the results of steps of various shapes, which come back with other rows, and then the pages."""
    seen: list[Any] = []
    generator = torch.Generator().manual_seed(5)
    for starts, count in STEPS:
        token_ids = torch.randint(0, model.spec.vocab_size, (len(starts) * count,), generator=generator)
        batch = model.batch(token_ids, *starts)
        output = model.paged.forward(batch, taps=(0, 1), scored=(count // 2, len(token_ids)), probabilities=True)
        assert output.logits is not None
        assert output.argmax is not None
        assert torch.equal(output.logits, model.decoder.logits(output.hidden[count // 2 :]))
        assert output.argmax.read()[0] == output.logits.argmax(dim=-1).tolist()
        seen += [*copied(output), output.argmax.probabilities()]
    return seen + [each.keys for each in model.kv] + [each.values for each in model.kv]


GEMMA = {"post_norms": True, "qk_norm": True, "activation": Activation.GELU_TANH, "embedding_scale": 5.5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": (6, None, 20)},
        {"hidden_size": 20},
        {"hidden_size": 34, "post_norms": True},
        {**GEMMA, "windows": (6, 6, None), "attention_softcap": 2.0, "query_scale": 0.2},
        {"logit_softcap": 0.01},
        {"sinks": True, "windows": (6, None, 6), "activation": Activation.CLAMPED_SWIGLU},
    ],
    ids=["plain", "windows", "20 wide", "34 wide", "like Gemma", "capped", "sinks"],
)
def test_recorded_steps_are_the_same_to_the_last_bit(changes: dict[str, Any]) -> None:
    recorded, eager = models(**changes)
    assert equal(steps(recorded), steps(eager))


def test_a_packed_model_is_recorded_exactly_and_near_to_its_expanded_weights() -> None:
    spec = decoder_spec()
    parameters = decoder_parameters(spec)
    first = parameters.layers[0]
    matrices = {
        "qkv": packed_matrix(Packing.FOUR_BITS, *first.qkv.weight.shape),
        "out": packed_matrix(Packing.EIGHT_BITS, *first.out.weight.shape),
    }
    results = []
    for backend, packed in zip((*both(), CPUBackend(threads=2)), (True, True, False), strict=True):
        linears = {name: Linear(weight=matrix if packed else matrix.expand()) for name, matrix in matrices.items()}
        layers = tuple(replace(layer, **linears) for layer in parameters.layers)
        results.append(steps(Model(backend, spec, replace(parameters, layers=layers))))
    recorded, eager, expanded = results
    assert equal(recorded, eager)
    assert all(near(a, b, 1e-3) for a, b in zip(recorded, expanded, strict=True) if isinstance(a, Tensor))


def test_every_choice_of_taps_and_scored_rows_gives_its_own_results() -> None:
    recorded, eager = models()
    choices: list[dict[str, Any]] = [{"taps": taps} for taps in ((), (0,), (0, 1), (1,), (1, 0), (), (0, 1))]
    choices += [{"scored": scored} for scored in ((0, 4), (3, 4), (1, 3), None, (2, 4), (0, 4))]
    for choice in choices:
        one, other = (m.paged.forward(m.batch([1, 2, 3, 4], 5), **choice) for m in (recorded, eager))
        assert equal(copied(one), copied(other)), choice
        assert one.taps.shape[1] == len(choice.get("taps", ())) * recorded.spec.hidden_size


def test_a_program_that_gave_way_to_others_is_recorded_again() -> None:
    backend, weights = CPUBackend(threads=1), Linear(weight=random(1, 8, 64))
    x = random(2, 3, 64)
    compiled = backend.compile_pass(lambda x, _groups, scale: backend.project(x, weights, norm=x[0], eps=scale))
    expected = [backend.project(x, weights, norm=x[0], eps=float(eps)) for eps in range(1, PROGRAMS_MAX + 3)]
    for eps in (1, *range(2, PROGRAMS_MAX + 3), 1, 2):
        assert torch.equal(compiled.run(x, NO_GROUPS, float(eps)), expected[eps - 1])


def test_results_stay_valid_while_another_decoder_runs() -> None:
    """A drafter's passes come between the target's pass and the end of the step."""
    backend = CPUBackend(threads=2)
    target, drafter = Model(backend, decoder_spec()), Model(backend, decoder_spec())
    for token_id in (1, 2):
        results = target.paged.forward(target.batch([token_id], 5), taps=(0, 1), scored=(0, 1))
        before = copied(results)
        others = drafter.paged.forward(drafter.batch([token_id + 2], 5), taps=(0, 1), scored=(0, 1))
        assert equal(copied(results), before)
        assert not torch.equal(results.hidden, others.hidden)


def test_a_decoder_bound_to_other_pages_runs_on_those() -> None:
    results = []
    for model in models():
        other_kv, other = model.bind(seed=20)
        seen = []
        for decoder in (model.paged, other, model.paged, other):
            seen += copied(decoder.forward(model.batch([3], 5), taps=(1,)))
        results.append(seen + [each.keys for each in (*model.kv, *other_kv)])
    assert equal(*results)


# --- input -----------------------------------------------------------------------------------------------------


def test_input_is_read_as_it_is_at_each_run() -> None:
    """The same tensor with other numbers in it, other tensors, and tensors of other types or with gaps, in turn."""
    results = []
    for model in models():
        batch = model.batch([1, 2, 3], 5)
        same, other, gaps = batch.token_ids, torch.tensor([7, 8, 9]), torch.tensor([[4, 0], [5, 0], [6, 0]])
        seen = []
        for token_ids in (same, same, other, same, gaps[:, 0], same, gaps[:, 0], same.int(), same):
            same += 3
            gaps += 1
            batch.groups[0].positions.add_(1)
            seen += copied(model.paged.forward(batch._replace(token_ids=token_ids)))
        results.append(seen)
    assert equal(*results)


@pytest.mark.parametrize("token_id", [-1, 101])
def test_a_token_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    for model in models():
        for _ in range(2):
            with pytest.raises(IndexError, match=f"found {token_id} to {token_id}"):
                model.paged.forward(model.batch([token_id], 5))
            model.paged.forward(model.batch([3], 5))


def test_rows_of_any_type_and_parts_of_them_are_read() -> None:
    backend, out = CPUBackend(threads=2), torch.zeros(3, 64)
    weights = Linear(weight=random(1, 8, 64))

    def body(x: Tensor, _groups: tuple[AttentionMetadata, ...], _options: int) -> Tensor:
        backend.copy(x, out)
        return backend.project(x[1:], weights)

    compiled = backend.compile_pass(body)
    one, other = random(2, 3, 64), random(3, 3, 64)
    for x in (one.bfloat16(), one, other, one, other.bfloat16()):
        assert torch.equal(compiled.run(x, NO_GROUPS, 0), backend.project(x[1:], weights))
        assert torch.equal(out, x.float())


# --- enqueued passes -------------------------------------------------------------------------------------------


class Feed:
    """A pass that writes keys and values, as a drafter's prefill does, and how to see what it has written."""

    def __init__(self, backend: CPUBackend, rows: int = 1) -> None:
        self.backend, self.layer = backend, backend.prepare_attention(layer())
        self.kv, self.rows = paged(self.layer, [(0, position, 0, position + 1) for position in range(20, 20 + rows)], 8)
        self.compiled = backend.compile_pass(lambda x, groups, _: backend.store(x, self.layer, self.kv, groups[0]))

    def enqueue(self, value: float) -> None:
        width = 2 * self.layer.kv_heads * self.layer.head_dim
        self.compiled.enqueue(torch.full((len(self.rows.positions), width), value), (self.rows,), 0)

    @property
    def written(self) -> float:
        slot = int(self.rows.slot_mapping[0])
        return float(self.kv.values[slot // 8, 0, slot % 8, 0])


def test_an_enqueued_pass_runs_before_every_kind_of_operation() -> None:
    backend = CPUBackend(threads=2)
    feed, of = Feed(backend), layer()
    kv, rows = paged(of, [(0, 3, 0, 4)], 8)
    x, linear = random(0, 1, 64), Linear(weight=random(1, 8, 64))
    qkv = random(2, 1, (of.heads + 2 * of.kv_heads) * of.head_dim)
    compiled = backend.compile_pass(lambda x, _groups, _options: backend.project(x, linear))
    wide = backend.compile_pass(lambda x, _groups, _options: backend.project(x, linear))
    operations: list[Callable[[], object]] = [
        lambda: backend.embed(torch.tensor([1]), linear.weight, 1.0),
        lambda: backend.norm(x, x[0], 1e-5),
        lambda: backend.project(x, linear),
        lambda: backend.attend(qkv, of, kv, rows),
        lambda: backend.store(qkv[:, : 2 * of.kv_heads * of.head_dim], of, kv, rows),
        lambda: compiled.run(x, NO_GROUPS, 0),
        lambda: wide.run(x.expand(RECORDED_ROWS_MAX + 1, -1), NO_GROUPS, 0),
        lambda: feed.enqueue(-1.0),
    ]
    with backend.step():
        for number, operation in enumerate(operations):
            feed.enqueue(float(number))
            operation()
            assert feed.written == float(number)


def fail_after(call: Callable[[], object]) -> None:
    call()
    raise RuntimeError


def test_a_step_that_fails_drops_what_it_enqueued() -> None:
    """Its pages may belong to another request by the next step."""
    backend = CPUBackend(threads=2)
    feed, threads = Feed(backend), torch.get_num_threads()
    with backend.step():
        feed.enqueue(1.0)
    with pytest.raises(RuntimeError), backend.step():
        fail_after(lambda: feed.enqueue(2.0))
    with backend.step():
        backend.norm(random(0, 1, 64), random(1, 64), 1e-5)
    assert feed.written == 1.0
    assert torch.get_num_threads() == threads


# --- passes that are left at the end of a step ------------------------------------------------------------------


def in_use(threads: Threads) -> bool:
    """Whether the threads are kept for a program that was left to them."""
    return bool(word_of(threads, BUSY))


def word_of(threads: Threads, place: int) -> int:
    return ctypes.c_int64.from_address(threads.address + place).value


def set_word(threads: Threads, place: int, value: int) -> None:
    ctypes.c_int64.from_address(threads.address + place).value = value


def is_left(backend: CPUBackend) -> bool:
    """Whether threads got what the last step left: otherwise it has run before the step ended."""
    return bool(backend.replays._job.words.cast("q")[BEGUN])


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """Threads that the backends of a test share with nobody else."""
    own = Threads(getattr(request, "param", 2))
    monkeypatch.setattr("outrider.backends.cpu.backend.shared_threads", lambda _count: own)
    yield own
    own.close()


def left_by_a_step(backend: CPUBackend, value: float) -> Feed:
    feed = Feed(backend, rows=5)
    with backend.step():
        feed.enqueue(value)
    return feed


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_what_a_step_leaves_has_ended_when_the_next_one_begins_or_it_is_waited_for(threads: Threads) -> None:
    backend = CPUBackend()
    for number in range(1, 200):
        feed = left_by_a_step(backend, float(number))
        assert in_use(threads) == (threads.count > 1)
        if number % 2:
            with backend.step():
                assert feed.written == float(number)
        else:
            backend.settle()
            assert feed.written == float(number)
        assert not in_use(threads)


def test_other_engines_compute_while_a_step_has_left_something(threads: Threads) -> None:
    backend, other = CPUBackend(), CPUBackend()
    x, linear = random(0, 40, 64), Linear(weight=random(1, 200, 64))
    expected = other.project(x, linear)
    for number in range(50):
        feed = left_by_a_step(backend, float(number))
        assert torch.equal(other.project(x, linear), expected)
        another = left_by_a_step(other, float(-number))
        for each in (backend, other):
            each.settle()
        assert (feed.written, another.written) == (float(number), float(-number))
    assert not in_use(threads)


def test_what_has_ended_keeps_the_threads_from_no_other_engine(threads: Threads) -> None:
    backend, other = CPUBackend(), CPUBackend()
    for number in range(1, 50):
        feed = left_by_a_step(backend, float(number))
        deadline = time.monotonic() + 60
        while not word_of(threads, DONE):
            assert time.monotonic() < deadline
            time.sleep(0)
        assert feed.written == float(number)
        another = left_by_a_step(other, float(-number))
        assert is_left(backend)
        assert is_left(other)
        # The pool is the other's by now.
        backend.settle()
        assert in_use(threads)
        assert not is_left(backend)
        other.settle()
        assert another.written == float(-number)
        assert not in_use(threads)


def test_after_an_interrupt_at_any_line_of_a_step_the_next_feed_is_right(threads: Threads) -> None:
    backend = CPUBackend()
    feed = Feed(backend, rows=5)
    line, interrupted = 0, True

    def step() -> None:
        with backend.step():
            feed.enqueue(-1.0)
        backend.settle()

    while interrupted:
        line += 1
        interrupted = interrupted_at(line, step)
        with backend.step():
            feed.enqueue(float(line))
        assert is_left(backend)
        backend.settle()
        assert feed.written == float(line)
        assert not in_use(threads)
    assert line > 10


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_an_operation_after_a_step_sees_what_it_left(threads: Threads) -> None:
    # A second thread that never runs: only who waits for what was left does it.
    set_word(threads, THREADS, 2)
    backend, x, linear = CPUBackend(), random(0, 1, 64), Linear(weight=random(1, 8, 64))
    compiled = backend.compile_pass(lambda x, _groups, _options: backend.project(x, linear))
    operations: list[Callable[[], object]] = [
        lambda: backend.norm(x, x[0], 1e-5),
        lambda: compiled.run(x, NO_GROUPS, 0),
        lambda: left_by_a_step(backend, -1.0),
        backend.settle,
    ]
    for number, operation in enumerate(operations, 1):
        feed = left_by_a_step(backend, float(number))
        assert is_left(backend)
        assert feed.written != float(number)
        operation()
        assert feed.written == float(number)


def test_a_caller_that_finds_the_threads_in_use_leaves_them_alone(threads: Threads) -> None:
    backend, x, linear = CPUBackend(), random(0, 40, 64), Linear(weight=random(1, 200, 64))
    expected = backend.project(x, linear)
    set_word(threads, BUSY, 1)
    ticket = word_of(threads, TICKET)
    assert torch.equal(backend.project(x, linear), expected)
    feed = left_by_a_step(backend, 3.0)
    assert not is_left(backend)
    assert feed.written == 3.0
    assert (word_of(threads, TICKET), word_of(threads, BUSY)) == (ticket, 1)
    set_word(threads, BUSY, 0)


def test_a_backend_that_goes_waits_for_what_its_last_step_left(threads: Threads) -> None:
    for number in range(50):
        backend = CPUBackend()
        feed = left_by_a_step(backend, float(number))
        assert in_use(threads)
        del feed.backend, feed.compiled, backend
        assert feed.written == float(number)
        assert not in_use(threads)


# --- interrupts ------------------------------------------------------------------------------------------------


def interrupted_at(line: int, call: Callable[[], object]) -> bool:
    """Whether a call was interrupted at this line of the backend's Python code, counted as they are run."""
    left, folder = line, str(cpu.__path__[0])

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        file = frame.f_code.co_filename
        if not file.startswith(folder) or "kernels" in file.removeprefix(folder):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("recorded_before", [True, False], ids=["replaying", "recording"])
def test_after_an_interrupt_at_any_line_the_next_run_is_right(recorded_before: bool) -> None:
    backend = CPUBackend(threads=1)
    of = layer()
    kv, _ = paged(of, [(0, 3, 0, 4)], 8)
    weights = Linear(weight=random(1, (of.heads + 2 * of.kv_heads) * of.head_dim, 64))
    inputs = [random(seed, 2, 64) for seed in (2, 3)]
    groups = [paged(of, [(0, start, 0, start + 1), (0, start + 1, 0, start + 2)], 8)[1] for start in (30, 40)]

    def body(x: Tensor, given: tuple[AttentionMetadata, ...], _options: int) -> Tensor:
        return backend.attend(backend.project(x, weights), of, kv, given[0])

    expected = [body(x, (rows,), 0) for x, rows in zip(inputs, groups, strict=True)]
    line, interrupted = 0, True
    compiled = backend.compile_pass(body)
    compiled.run(inputs[0], (groups[0],), 0)
    while interrupted:
        line += 1
        if not recorded_before:
            compiled = backend.compile_pass(body)
        interrupted = interrupted_at(line, lambda: compiled.run(inputs[1], (groups[1],), 0))  # noqa: B023
        with backend.step():
            # The input of the run before the interrupt comes first and last: the next interrupt finds it in place.
            for number in (0, 1, 0):
                assert torch.equal(compiled.run(inputs[number], (groups[number],), 0), expected[number]), line
                assert torch.equal(body(inputs[number], (groups[number],), 0), expected[number]), line
    assert line > 10


def test_after_an_interrupt_at_any_line_scratch_memory_is_right() -> None:
    """Scratch memory grows with the rows: what lay at its old address is gone."""
    weights = packed_matrix(Packing.EIGHT_BITS, 32, 64)
    small, large, norm = random(2, 2, 64), random(3, 40, 64), random(4, 64)
    expected = [CPUBackend(threads=1).project(x, Linear(weight=weights), norm=norm, eps=1e-5) for x in (small, large)]
    line, interrupted = 0, True
    while interrupted:
        line += 1
        backend = CPUBackend(threads=1)

        def project(x: Tensor, backend: CPUBackend = backend) -> Tensor:
            return backend.project(x, Linear(weight=weights), norm=norm, eps=1e-5)

        project(small)
        interrupted = interrupted_at(line, lambda: project(large))
        for x, wanted in zip((small, large), expected, strict=True):
            assert torch.equal(project(x), wanted), line
    assert line > 10
