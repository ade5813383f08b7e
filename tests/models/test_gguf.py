"""GGUF files: every quantisation, every family, row order undone; what cannot be read is named."""

from __future__ import annotations

import gc
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.models.fakes import gguf_metadata, gguf_tensors, quantised, tiny_model, write_gguf
from tests.models.test_directories import check_parameters

from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.recipes import recipe_for
from outrider.models.spec import RopeScaling
from outrider.models.weights import open_checkpoint
from outrider.models.weights.gguf import SUPPORTED, gguf_name, hf_name
from outrider.models.weights.gguf_file import read_gguf

ARCHITECTURES = {
    "llama": "llama",
    "llama, tied": "llama",
    "llama, biases": "llama",
    "llama, wide heads": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3, biases": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3, one in six": "gemma3",
}
# GGUF does not have it: it is the size of a head.
UNSAID = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3, one in six": {"query_pre_attn_scalar": 16}}


def save_gguf(
    path: Path,
    family: str,
    *,
    metadata: dict[str, Any] | None = None,
    kind: Kind | None = None,
    tensors: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Any, Path]:
    """Writes a random model, with other metadata and tensors where they are given; None leaves one out. `kind` is the
    quantisation of its matrices."""
    architecture = ARCHITECTURES[family]
    model = tiny_model(family, **changes)
    stored: dict[str, Any] = gguf_tensors(model, interleaved=architecture == "llama")
    stored = (stored if kind is None else quantised(stored, kind)) | (tensors or {})
    fields = gguf_metadata(model, architecture) | (metadata or {})
    write_gguf(path, architecture, *({k: v for k, v in each.items() if v is not None} for each in (fields, stored)))
    return model, path


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_tensor_is_in_its_place(family: str, tmp_path: Path) -> None:
    model, path = save_gguf(tmp_path / "tiny.gguf", family)
    loaded = load_model(str(path), dtype=torch.float32)
    assert loaded.name == "tiny"
    check_parameters(loaded.parameters, model)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_description_is_that_of_the_hugging_face_configuration(family: str, tmp_path: Path) -> None:
    # GGUF has no word for it: llama.cpp always scales Qwen3's chosen experts to sum to 1.
    changes = {"norm_topk_prob": True} if family == "qwen3_moe" else UNSAID.get(family, {})
    model, path = save_gguf(tmp_path / "tiny.gguf", family, **changes)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    assert open_checkpoint(path).spec() == recipe_for(config, "here").spec(config, "here")


QUANTISABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]


@pytest.mark.parametrize("kind", QUANTISABLE, ids=lambda kind: kind.name)
def test_quantised_matrices_are_read_and_put_in_order(kind: Kind, tmp_path: Path) -> None:
    model, path = save_gguf(tmp_path / "tiny.gguf", "llama", kind=kind, intermediate_size=64)
    # Rounding is done to rows as they are, so it does not depend on their order.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            stored = gguf.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(np.array(gguf.dequantize(stored, kind)))
    check_parameters(load_model(str(path), dtype=torch.float32).parameters, model)


def test_a_file_is_unmapped_as_soon_as_its_model_is_loaded(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", "llama")[1]
    gc.disable()
    try:
        model = load_model(str(path), dtype=torch.float32)
        assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    finally:
        gc.enable()
    assert model.path == path


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Random stored bytes whose scales are ordinary numbers."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (rows * columns // block_elements, block_bytes), dtype=np.uint8)
    scales = {Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}.get(kind, (0,))
    for at in scales:
        scale = random.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def test_a_quantised_vector_is_refused_by_name(tmp_path: Path) -> None:
    norm = (gguf.quantize(np.ones((1, 32), np.float32), Kind.Q8_0)[0], Kind.Q8_0)
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", tensors={"output_norm.weight": norm})
    with pytest.raises(ModelError, match=r"output_norm\.weight is a vector, but quantised as Q8_0"):
        load_model(str(path), dtype=torch.float32)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.Q5_K], ids=lambda kind: kind.name)
def test_large_blocks_are_read(kind: Kind, tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    stored = random_blocks(kind, 256, 256)
    _, path = save_gguf(tmp_path / "tiny.gguf", "qwen2", tensors={"blk.0.ffn_down.weight": (stored, kind)}, **shape)
    found = open_checkpoint(path).tensor("model.layers.0.mlp.down_proj.weight")
    assert torch.equal(found, torch.from_numpy(gguf.dequantize(stored, kind)))


def test_tensors_longer_than_a_chunk_are_read_whole(tmp_path: Path) -> None:
    model, path = save_gguf(tmp_path / "tiny.gguf", "llama", intermediate_size=5000, vocab_size=3001)
    check_parameters(load_model(str(path), dtype=torch.float32).parameters, model)


def test_another_dtype_is_rounded_once(tmp_path: Path) -> None:
    model, path = save_gguf(tmp_path / "tiny.gguf", "llama")
    check_parameters(load_model(str(path), dtype=torch.bfloat16).parameters, model.bfloat16())


def test_names_are_translated_both_ways() -> None:
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.12.attn_q.bias": "model.layers.12.self_attn.q_proj.bias",
        "blk.0.ffn_gate_exps.weight": "model.layers.0.mlp.experts.gate_proj",
        "blk.0.ffn_gate_inp.weight": "model.layers.0.mlp.gate.weight",
    }
    for theirs, ours in pairs.items():
        assert hf_name(theirs) == ours
        assert gguf_name(ours) == theirs
    assert hf_name("blk.0.something.weight") == "blk.0.something.weight"


# --- metadata ---------------------------------------------------------------------------------------


def rope_of(path: Path) -> Any:
    return open_checkpoint(path).spec().layers[0].rope


@pytest.mark.parametrize("extra", [None, 0.5])
def test_yarn_scaling(extra: float | None, tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 32,
    }
    if extra is not None:
        scaling["qwen2.rope.scaling.attn_factor"] = extra
    rope = rope_of(save_gguf(tmp_path / "tiny.gguf", "qwen2", metadata=scaling)[1])
    assert (rope.scaling, rope.factor, rope.original_max_position) == (RopeScaling.YARN, 4.0, 32)
    assert rope.attention_factor == pytest.approx((extra or 1.0) * (0.1 * np.log(4.0) + 1.0))


def llama3_table(factor: float, *, head_dim: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter writes it."""
    low, high, original = 1.0, 4.0, 8192
    table = []
    for frequency in 1.0 / (theta ** (np.arange(0, head_dim, 2) / head_dim)):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            table.append(1.0)
        elif wavelength > original / low:
            table.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            table.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(table, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_recognised_by_its_table(factor: float, tmp_path: Path) -> None:
    def scaled_by(table: np.ndarray) -> Any:
        base, tensors = {"llama.rope.freq_base": 500_000.0}, {"rope_freqs.weight": table}
        return rope_of(save_gguf(tmp_path / "tiny.gguf", "llama", metadata=base, tensors=tensors, head_dim=64)[1])

    table = llama3_table(factor, head_dim=64, theta=500_000.0)
    rope = scaled_by(table)
    assert (rope.scaling, rope.factor, rope.original_max_position) == (RopeScaling.LLAMA3, factor, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.theta) == (1.0, 4.0, 500_000.0)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not the table of Llama 3"):
        scaled_by(table[::-1].copy())


def test_windows_are_read(tmp_path: Path) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", "qwen3_moe", metadata={"qwen3moe.attention.sliding_window": 16})
    assert [layer.window for layer in open_checkpoint(path).spec().layers] == [16] * 3


def gemma3_windows(tmp_path: Path, **metadata: Any) -> list[int | None]:
    fields = {f"gemma3.{name.replace('__', '.')}": value for name, value in metadata.items()}
    _, path = save_gguf(tmp_path / "tiny.gguf", "gemma3, one in six", metadata=fields, num_hidden_layers=6)
    return [layer.window for layer in open_checkpoint(path).spec().layers]


def test_the_pattern_of_windows_is_read_where_a_file_has_it(tmp_path: Path) -> None:
    assert gemma3_windows(tmp_path) == [16] * 5 + [None]
    assert gemma3_windows(tmp_path, attention__sliding_window_pattern=3) == [16, 16, None] * 2
    flags = [True, False, False, True, True, True]
    assert gemma3_windows(tmp_path, attention__sliding_window_pattern=flags) == [16, None, None, 16, 16, 16]


def test_bases_of_both_kinds_of_layer_are_read(tmp_path: Path) -> None:
    base = {"gemma3.rope.freq_base": 5e5, "gemma3.rope.freq_base_swa": 2e4, "gemma3.rope.scaling.type": "none"}
    _, path = save_gguf(tmp_path / "tiny.gguf", "gemma3, one in six", metadata=base)
    layers = open_checkpoint(path).spec().layers
    assert (layers[0].rope.theta, layers[5].rope.theta) == (2e4, 5e5)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3, one in six", 62)])
def test_the_largest_gemma_scales_by_the_width_that_its_heads_share(family: str, layers: int, tmp_path: Path) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", family, num_hidden_layers=layers)
    assert open_checkpoint(path).spec().score_scale == (32 / 4) ** -0.5
    _, path = save_gguf(tmp_path / "tiny.gguf", family, num_hidden_layers=layers - 1)
    assert open_checkpoint(path).spec().score_scale == 16**-0.5


def test_numbers_of_metadata_are_the_decimals_they_were_written_as(tmp_path: Path) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", metadata={"llama.attention.layer_norm_rms_epsilon": 1e-5})
    assert open_checkpoint(path).spec().norm_eps == 1e-5


def test_every_kind_of_metadata_is_read(tmp_path: Path) -> None:
    numbers = {"uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "int32": -5, "uint64": 1 << 60}
    numbers |= {"int64": -(1 << 60), "float64": 0.1, "bool": True}
    arrays = {"numbers": [1, -2, 3], "flags": [True, False], "lists": [[1, 2], [3]], "texts": ["ä", ""]}
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(kind, value)
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf(tmp_path / "a.gguf").metadata == {"general.architecture": "llama", **numbers, **arrays}


# --- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"split.count": 3}, ("one of 3 parts", "--merge")),
        ({"llama.expert_count": 8}, ("mixtures of experts",)),
        ({"llama.rope.dimension_count": 4}, ("only 4 of 8 elements",)),
        ({"llama.rope.scaling.type": "longrope"}, ("'longrope'",)),
        ({"llama.attention.head_count_kv": [2, 1, 2]}, ("head_count_kv", "layer to layer")),
        ({"llama.attention.head_count_kv": 3}, ("4 query heads", "3 key/value heads")),
        ({"tokenizer.ggml.model": "bert"}, ("tokenizer 'bert'",)),
        ({"llama.embedding_length": None}, ("no metadata llama.embedding_length",)),
    ],
)
def test_metadata_that_cannot_be_run_is_refused(
    metadata: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", metadata=metadata)
    with pytest.raises(ModelError) as caught:
        load_model(str(path), dtype=torch.float32)
    assert all(word in str(caught.value) for word in (*words, "tiny.gguf"))


def test_tensors_that_do_not_fit_are_named_as_the_file_names_them(tmp_path: Path) -> None:
    norm = np.ones(31, np.float32)
    tensors = {"blk.1.attn_k.weight": None, "output_norm.weight": norm, "blk.2.attn_sinks.weight": norm}
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", tensors=tensors)
    with pytest.raises(ModelError) as caught:
        load_model(str(path), dtype=torch.float32)
    for words in (
        "missing blk.1.attn_k.weight",
        "misshapen output_norm.weight (found [31], expected [32])",
        "unexpected blk.2.attn_sinks.weight",
    ):
        assert words in str(caught.value)


def test_other_quantisations_are_named(tmp_path: Path) -> None:
    values = {"blk.0.attn_v.weight": (np.zeros((128, 66), dtype=np.uint8), Kind.IQ2_XXS)}
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama", tensors=values, hidden_size=256, head_dim=64)
    with pytest.raises(ModelError) as caught:
        load_model(str(path), dtype=torch.float32)
    assert all(word in str(caught.value) for word in ("blk.0.attn_v.weight", "IQ2_XXS", *(k.name for k in SUPPORTED)))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "mamba", {}, {})
    with pytest.raises(ModelError, match=r"tiny\.gguf: GGUF architecture 'mamba'.*llama"):
        load_model(str(path), dtype=torch.float32)


def test_a_file_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama")
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(content) - 64, 997)]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"^[^\n]*cut\.gguf[^\n]*$"):
            load_model(str(cut), dtype=torch.float32)


def test_a_damaged_header_never_fails_in_any_other_way(tmp_path: Path) -> None:
    _, path = save_gguf(tmp_path / "tiny.gguf", "llama")
    content = bytearray(path.read_bytes())
    header = read_gguf(path).tensors["token_embd.weight"].start
    damaged = tmp_path / "damaged.gguf"
    random = np.random.default_rng(1)
    for _ in range(150):
        copy = bytearray(content)
        for at in random.integers(0, header, 3):
            copy[at] = random.integers(0, 256)
        damaged.write_bytes(copy)
        # Damage may go unnoticed (a token spelt differently), but it may not raise anything else.
        with suppress(ModelError):
            load_model(str(damaged), dtype=torch.float32)


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelError, match=r"not a GGUF file"):
        load_model(str(path), dtype=torch.float32)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ModelError, match="big-endian"):
        load_model(str(path), dtype=torch.float32)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelError, match="version 1"):
        load_model(str(path), dtype=torch.float32)
