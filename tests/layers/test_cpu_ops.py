"""The compiled operations in a whole decoder, and around it: experts, threads, machines where they do not run."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from tests.kernels.cases import near

from outrider.errors import ConfigError
from outrider.kernels import COMPILING, LOADING
from outrider.kernels.compiling import uninterrupted
from outrider.layers.attention import AttentionRows, PagedKV
from outrider.layers.cpu_ops import NumbaOps, warm_up
from outrider.layers.ops import Ops, TorchOps
from outrider.models.decoder import Decoder, LayerKV
from outrider.models.parameters import DecoderParameters, DenseMLP, ExpertsMLP, LayerParameters, Linear
from outrider.models.spec import Activation, DecoderSpec, ExpertsSpec, LayerSpec, RopeSpec

HIDDEN, INNER, VOCABULARY, PAGE = 48, 80, 101, 8


def _spec(experts: ExpertsSpec | None, activation: Activation = Activation.SILU) -> DecoderSpec:
    layer = LayerSpec(rope=RopeSpec(rotary_dim=16), experts=experts)
    return DecoderSpec(
        family="test",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        heads=4,
        kv_heads=2,
        head_dim=16,
        layers=(layer, layer),
        max_position=64,
        activation=activation,
        post_norms=True,
    )


def _parameters(spec: DecoderSpec, dtype: torch.dtype = torch.float32) -> DecoderParameters:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def norm() -> torch.Tensor:
        return (torch.rand(HIDDEN, generator=generator) + 0.5).to(dtype)

    def mlp(experts: ExpertsSpec | None) -> DenseMLP | ExpertsMLP:
        if experts is None:
            return DenseMLP(gate_up=Linear(weight=random(2 * INNER, HIDDEN)), down=Linear(weight=random(HIDDEN, INNER)))
        return ExpertsMLP(
            router=Linear(weight=random(experts.count, HIDDEN)),
            gate_up=random(experts.count, 2 * INNER, HIDDEN),
            down=random(experts.count, HIDDEN, INNER),
            gate_up_bias=random(experts.count, 2 * INNER),
            down_bias=random(experts.count, HIDDEN),
        )

    def layer(experts: ExpertsSpec | None) -> LayerParameters:
        return LayerParameters(
            input_norm=norm(),
            qkv=Linear(weight=random(8 * 16, HIDDEN)),
            out=Linear(weight=random(HIDDEN, 4 * 16)),
            mlp_norm=norm(),
            mlp=mlp(experts),
            attention_post_norm=norm(),
            mlp_post_norm=norm(),
        )

    embedding = random(VOCABULARY, HIDDEN)
    layers = tuple(layer(each.experts) for each in spec.layers)
    return DecoderParameters(embedding=embedding, layers=layers, final_norm=norm(), head=Linear(weight=embedding))


def _logits(spec: DecoderSpec, parameters: DecoderParameters, ops: Ops, chunks: list[int]) -> torch.Tensor:
    """A prompt's logits, computed in chunks of these sizes."""
    decoder = Decoder(spec, parameters, ops, max_position=64)
    arena = torch.zeros(8, 2, 2, spec.kv_heads, PAGE, spec.head_dim, dtype=parameters.embedding.dtype)
    tokens = torch.arange(sum(chunks)) * 7 % VOCABULARY
    tables = torch.tensor([[5, 2, 7, 1]], dtype=torch.int32)
    results, first = [], 0
    for size in chunks:
        positions = torch.arange(first, first + size)
        rows = AttentionRows(
            positions=positions,
            slots=tables[0, positions // PAGE].long() * PAGE + positions % PAGE,
            sequence=torch.zeros(size, dtype=torch.int32),
            tables=tables,
            first_key=torch.zeros(size, dtype=torch.int32),
            stop_key=(positions + 1).int(),
            most_keys=first + size,
        )
        places = [LayerKV(PagedKV(keys=arena[:, n, 0], values=arena[:, n, 1]), rows) for n in range(len(spec.layers))]
        results.append(decoder.logits(decoder.forward(tokens[first : first + size], places).final))
        first += size
    return torch.cat(results)


EXPERTS = [
    None,
    ExpertsSpec(count=6, per_token=2, intermediate_size=INNER, bias=True),
    ExpertsSpec(count=6, per_token=3, intermediate_size=INNER, softmax_first=False, bias=True),
]


@pytest.mark.parametrize("experts", EXPERTS)
def test_a_whole_decoder_agrees_with_the_plain_one(experts: ExpertsSpec | None) -> None:
    spec = _spec(experts)
    parameters = _parameters(spec)
    assert near(_logits(spec, parameters, NumbaOps(2), [20]), _logits(spec, parameters, TorchOps(), [20]), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", EXPERTS)
def test_chunks_of_any_size_give_the_same_bits(experts: ExpertsSpec | None, dtype: torch.dtype) -> None:
    spec = _spec(experts)
    parameters, ops = _parameters(spec, dtype), NumbaOps(2)
    whole = _logits(spec, parameters, ops, [30])
    for chunks in ([1] * 30, [7, 1, 1, 5, 16], [29, 1]):
        assert torch.equal(_logits(spec, parameters, ops, chunks), whole)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    """They share a pool; each has operations of its own."""
    x, linear = torch.randn(9, 96), Linear(weight=torch.randn(400, 96))
    expected = NumbaOps(1).project(x, linear)
    wrong = []

    def work() -> None:
        ops = NumbaOps(3)
        wrong.extend(round for round in range(300) if not torch.equal(ops.project(x, linear), expected))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_a_forked_process_works_alone() -> None:
    code = """
import os, torch
from outrider.kernels import COMPILING, LOADING
from outrider.layers.cpu_ops import NumbaOps
from outrider.models.parameters import Linear
torch.set_num_threads(1)
ops, x, linear = NumbaOps(2), torch.randn(5, 64), Linear(weight=torch.randn(300, 64))
expected = ops.project(x, linear)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(ops.project(x, linear), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_numba_the_reason_is_told() -> None:
    code = """
import sys
sys.modules["numba"] = None
from outrider.kernels import COMPILING, LOADING
from outrider.layers.cpu_ops import NumbaOps
print(NumbaOps.unavailable())
"""
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert "Numba cannot be imported" in told.stdout


def test_an_older_processor_is_told_apart() -> None:
    code = "from outrider.layers.cpu_ops import NumbaOps; print(NumbaOps.unavailable())"
    older = {**os.environ, "NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}
    told = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120, env=older
    )
    assert "AVX2" in told.stdout


def test_weights_of_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        warm_up([torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 50])
def test_embeddings_are_rows_of_the_matrix(dtype: torch.dtype, width: int) -> None:
    ops, matrix = NumbaOps(threads=2), torch.randn(40, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.tensor([0, 39, 5, 5, 17] * 7)
    assert torch.equal(ops.embed(tokens, matrix, 1.0), matrix.float()[tokens])
    assert torch.equal(ops.embed(tokens, matrix, 5.5), matrix.float()[tokens] * 5.5)


def test_progress_counts_to_the_end() -> None:
    heard: list[tuple[str, int, int]] = []
    warm_up([torch.float32, torch.float32], lambda name, done, total: heard.append((name, done, total)))
    # Twice the same where a kernel is not on disk yet.
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
