"""The CPU backend around its kernels: exactness, threads, machines where it does not run, loading."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from tests.backends.cases import Model, decoder_parameters, decoder_spec, random
from tests.backends.test_contract import EXPERTS

from outrider.backends import COMPILING
from outrider.backends.cpu.backend import CPUBackend
from outrider.backends.cpu.kernels.compiling import LOADING, uninterrupted
from outrider.backends.cpu.loading import warm_up
from outrider.errors import ConfigError
from outrider.models.parameters import Linear
from outrider.models.spec import ExpertsSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", EXPERTS)
def test_chunks_of_any_size_give_the_same_bits(experts: ExpertsSpec | None, dtype: torch.dtype) -> None:
    spec = decoder_spec(experts=experts, post_norms=True)
    parameters, backend = decoder_parameters(spec, dtype), CPUBackend(2)
    token_ids = (torch.arange(30) * 7 % spec.vocab_size).tolist()
    results = []
    for chunks in ([30], [1] * 30, [7, 1, 1, 5, 16], [29, 1]):
        model, first, hidden = Model(backend, spec, parameters), 0, []
        for size in chunks:
            with backend.step():
                batch = model.batch(token_ids[first : first + size], first)
                hidden.append(model.paged.forward(batch).hidden.clone())
            first += size
        results.append(torch.cat(hidden))
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_threads_may_call_backends_of_their_own() -> None:
    """They share a pool."""
    x, linear = random(0, 9, 96), Linear(weight=random(1, 400, 96))
    expected = CPUBackend(1).project(x, linear)
    wrong = []

    def work() -> None:
        backend = CPUBackend(3)
        wrong.extend(round for round in range(300) if not torch.equal(backend.project(x, linear), expected))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def printed(code: str, **environment: str) -> str:
    """Returns what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_process_works_alone() -> None:
    code = """
import os, torch
from outrider.backends.cpu.backend import CPUBackend
from outrider.models.parameters import Linear
torch.set_num_threads(1)
backend, x, linear = CPUBackend(2), torch.randn(5, 64), Linear(weight=torch.randn(300, 64))
expected = backend.project(x, linear)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(backend.project(x, linear), expected) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert printed(code) == "0\n"


AVAILABLE = """
import torch
from outrider.backends.registry import BackendSettings, select_backend
from outrider.backends.cpu.backend import unavailable
print(unavailable(BackendSettings(torch.device("cpu"))))
print(select_backend("auto", device=torch.device("cpu")).name)
"""


def test_without_numba_the_reason_is_given_and_the_reference_is_used() -> None:
    reason, name = printed("import sys\nsys.modules['numba'] = None" + AVAILABLE).splitlines()
    assert "Numba cannot be imported" in reason
    assert name == "reference"


def test_an_older_processor_uses_the_reference() -> None:
    reason, name = printed(AVAILABLE, NUMBA_CPU_NAME="nehalem", NUMBA_CPU_FEATURES="+sse4.2").splitlines()
    assert "AVX2" in reason
    assert name == "reference"


def test_weights_of_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        warm_up([torch.float64])
    parameters = decoder_parameters(decoder_spec())
    with pytest.raises(ConfigError, match="float64"):
        CPUBackend(1).prepare(replace(parameters, embedding=random(0, 101, 64).double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 50])
def test_embeddings_are_rows_of_the_matrix(dtype: torch.dtype, width: int) -> None:
    backend, matrix = CPUBackend(threads=2), random(1, 40, width).to(dtype)
    token_ids = torch.tensor([0, 39, 5, 5, 17] * 7)
    for scale in (1.0, 5.5):
        assert torch.equal(backend.embed(token_ids, matrix, scale), matrix.float()[token_ids] * scale)


def test_torch_has_one_thread_in_a_step_and_while_weights_are_loaded() -> None:
    """Its threads would spin on the cores that the kernels need."""
    backend, before = CPUBackend(threads=2), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for surrounding in (backend.step, backend.exclusive_threads):
            with surrounding():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_progress_counts_to_the_end() -> None:
    heard: list[tuple[str, int, int]] = []
    warm_up([torch.float32, torch.float32], lambda name, done, total: heard.append((name, done, total)))
    # A kernel that is not on disk is reported twice.
    assert list(dict.fromkeys(done for _, done, _ in heard)) == [0, 1, 2, 3, 4, 5, 6]
    assert {total for _, _, total in heard} == {6}
    assert {what for what, _, _ in heard} <= {LOADING, COMPILING}


def test_an_interrupt_waits_until_kernels_are_loaded() -> None:
    done = []

    def load() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("loaded")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load()
        assert done == ["loaded"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
