"""A drafter and a model family of other packages: installed for real, found by name, lossless, used as they ask."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.engine.lossless import assert_greedy_by_reference, tokens_of
from tests.engine.test_lossless import workload
from tests.engine.tiny import tiny_engine, tiny_model, tiny_spec
from tests.models.fakes import COMMON, save
from tests.speculative.recording import mostly_right

from outrider.api.llm import LLM
from outrider.config import SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.errors import ExtensionError
from outrider.kv.archetypes import ARCHETYPES, DrafterShape, heads, lookup
from outrider.models.kv_groups import layer_groups
from outrider.models.load import LoadedModel, load_model
from outrider.models.recipes import recipe_for
from outrider.sampling import SamplingParams
from outrider.speculative.drafter import Drafter, Proposal, ProposeRow, checked_proposals
from outrider.speculative.method import DrafterMethod
from outrider.speculative.registry import BUILT_IN, drafting_method, guess_method, method_names
from outrider.tools.doctor.model import footprint_text

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "extension_package"
HEADS = 4


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed both packages."""
    place = tmp_path_factory.mktemp("extensions")
    # Building leaves files beside the sources.
    sources = shutil.copytree(SOURCES, place / "sources")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(place / "site")]
    done = subprocess.run([*command, *map(str, sorted(sources.iterdir()))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / "site"


@pytest.fixture
def site(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the installed packages, on sys.path."""
    monkeypatch.syspath_prepend(installed)
    return installed


def medusa_checkpoint(directory: Path, hidden: int, *, accuracy: Sequence[float] | None = None) -> Path:
    """Random heads: small steps away from repeating the token that the target has just written."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for number in range(HEADS):
        tensors[f"heads.{number}.linear.weight"] = 0.1 * torch.randn(hidden, hidden, generator=generator)
        tensors[f"heads.{number}.linear.bias"] = 0.1 * torch.randn(hidden, generator=generator)
    config: dict[str, Any] = {"architectures": ["MedusaHeads"], "num_heads": HEADS, "hidden_size": hidden}
    if accuracy is not None:
        config["head_accuracy"] = list(accuracy)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def medusa_engine(model: LoadedModel, checkpoint: Path, *, confidence: float = 0.0, **settings: Any) -> Engine:
    speculation = SpeculativeConfig(
        method="medusa", model=str(checkpoint), num_speculative_tokens=HEADS, draft_confidence=confidence
    )
    return tiny_engine(model, speculative_config=speculation, **settings)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_model(tiny_spec(windows=(None, 7, None)))


@pytest.fixture(scope="module")
def expected(target: LoadedModel) -> list[list[int]]:
    """What the target says one request at a time, with no cache and no speculation; greedy and seeded requests."""
    llm = LLM.over(tiny_engine(target, enable_prefix_caching=False))
    return [tokens_of(llm.generate([prompt], wanted))[0] for prompt, wanted in zip(*workload(), strict=True)]


@pytest.mark.usefixtures("site")
def test_both_are_found_by_name(tmp_path: Path) -> None:
    assert method_names() == [*BUILT_IN, "medusa"]
    footprint = heads("medusa", DrafterShape(taps=(29,)))
    assert "4 tokens per step from the output of the model's layer 29; it keeps no KV" in footprint_text(footprint, 4)
    assert drafting_method("medusa").title == "Medusa"
    assert guess_method(str(medusa_checkpoint(tmp_path, 32))) == "medusa"
    config = transformers.Phi3Config(**COMMON).to_dict()
    assert recipe_for(config | {"architectures": ["Phi3ForCausalLM"]}, "here").family == "phi3"
    assert recipe_for(config | {"architectures": None}, "here").family == "phi3"


@pytest.mark.usefixtures("site")
def test_drafts_never_change_the_text(target: LoadedModel, expected: list[list[int]], tmp_path: Path) -> None:
    engine = medusa_engine(target, medusa_checkpoint(tmp_path, 32))
    llm = LLM.over(engine)
    assert tokens_of(llm.generate(*workload())) == expected
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens
    # Again, now that everything is cached.
    assert tokens_of(llm.generate(*workload())) == expected
    assert engine.scheduler.kv.hit_tokens > 0


@pytest.mark.usefixtures("site")
def test_small_chunks_and_too_little_memory_give_the_same_text(
    target: LoadedModel, expected: list[list[int]], tmp_path: Path
) -> None:
    slot_bytes = len(target.spec.layers) * 2 * target.spec.kv_size * 4
    engine = medusa_engine(
        target,
        medusa_checkpoint(tmp_path, 32),
        max_model_len=128,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        kv_cache_memory_bytes=180 * slot_bytes,
    )
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected
    assert engine.scheduler.num_preemptions > 0
    assert engine.speculation.draft_tokens > 0


@pytest.mark.usefixtures("site")
def test_heads_read_the_hidden_state_of_the_last_accepted_token(target: LoadedModel, tmp_path: Path) -> None:
    """Heads of zeros repeat what the target's head says there: the token that was sampled from it. Some of the right
    tokens are handed in instead, so that the last accepted token is at another row in every step."""
    checkpoint = medusa_checkpoint(tmp_path, 32)
    tensors = {f"heads.{number}.linear.weight": torch.zeros(32, 32) for number in range(HEADS)}
    tensors |= {f"heads.{number}.linear.bias": torch.zeros(32) for number in range(HEADS)}
    save_file(tensors, checkpoint / "model.safetensors")
    prompts, params = [[5, 6, 7] * 11, [9] * 16, [1]], SamplingParams(temperature=0, max_tokens=20)
    plain = tokens_of(LLM.over(tiny_engine(target)).generate(prompts, params))
    hand_in = mostly_right([prompt + said for prompt, said in zip(prompts, plain, strict=True)])
    engine = medusa_engine(target, checkpoint)
    drafter = engine.runner.drafting._drafter
    assert drafter is not None
    step = drafter.step

    def watched(feeds: Any, taps: Any, rows: Any) -> Any:
        handed = []
        for row, proposal in zip(rows, step(feeds, taps, rows), strict=True):
            drafts, tokens = Proposal.of(proposal).drafts, row.request.tokens.tolist()
            assert drafts == [tokens[row.v]] * row.k
            handed.append(hand_in(tokens, drafts))
        return handed

    drafter.step = watched  # type: ignore[method-assign]
    assert tokens_of(LLM.over(engine).generate(prompts, params)) == plain
    assert 0 < engine.speculation.accepted_tokens < engine.speculation.draft_tokens


@pytest.mark.usefixtures("site")
def test_its_own_confidence_decides_how_many_drafts_are_verified(
    target: LoadedModel, expected: list[list[int]], tmp_path: Path
) -> None:
    # Joint probabilities 0.9, 0.54, 0.27, …: two drafts are likelier than 0.5.
    checkpoint = medusa_checkpoint(tmp_path, 32, accuracy=(0.9, 0.6, 0.5, 0.5))
    engine = medusa_engine(target, checkpoint, confidence=0.5)
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected
    proposals = engine.speculation.drafts
    assert 2 * proposals * 0.9 < engine.speculation.draft_tokens <= 2 * proposals


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([Proposal([1, 2], [0.5])], r"one in \[0, 1\] for each draft"),
        ([Proposal([1, 2], [0.5, 1.5])], r"one in \[0, 1\] for each draft"),
        ([Proposal([1, 2], [float("nan"), 0.5])], r"one in \[0, 1\] for each draft"),
        ([Proposal([1], cast(Any, 0.5))], r"the probabilities 0.5; .*one in \[0, 1\] for each draft"),
        ([Proposal([1], cast(Any, iter([0.5])))], r"one in \[0, 1\] for each draft"),
        ([[1, 2, 3, 4]], "proposed 4 drafts where 3 were asked for"),
        ([[1, 50]], "proposed 50; drafts are token ids from 0 to 49"),
        ([[-1]], "proposed -1"),
        ([[1.0]], "proposed 1.0"),
        ([(1, 2)], "as a list of token ids, not as tuple"),
        ([], "for each of 1 rows, not 0 of them"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_proposal_is_refused_with_the_drafters_name(found: object, words: str) -> None:
    request: Any = None
    with pytest.raises(ExtensionError, match=f"'mine'.*{words}"):
        checked_proposals("mine", found, [ProposeRow(request, 7, 3)], vocab_size=50)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"archetype": "heads"}, "archetype must be"),
        ({"load": None}, "load must be a function"),
        ({"trained_k": 0}, "trained_k"),
        ({"options": frozenset({"modle"})}, "options must be fields"),
    ],
)
def test_a_registration_that_cannot_work_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExtensionError, match=words):
        DrafterMethod(**{"name": "mine", "title": "Mine", "archetype": ARCHETYPES["heads"], "load": print} | changes)


@pytest.mark.parametrize(
    ("footprint", "words"),
    [
        (None, "not a Drafter with a footprint"),
        (lookup("mine", DrafterShape()), "not of the archetype"),
        (heads("mine", DrafterShape(taps=(3,))), "reads target layer 3, but the target has the layers 0 to 2"),
    ],
)
def test_a_drafter_that_does_not_fit_its_registration_or_target_is_refused(footprint: Any, words: str) -> None:
    with pytest.raises(ExtensionError, match=words):
        registration("heads").check_loaded(drafter_with(footprint), target_layers=3)


def registration(archetype: str) -> DrafterMethod:
    return DrafterMethod(name="mine", title="Mine", archetype=ARCHETYPES[archetype], load=cast(Any, print))


def drafter_with(footprint: Any, **attributes: Any) -> Drafter:
    drafter = Drafter()
    vars(drafter).update(attributes, footprint=footprint)
    return drafter


def test_what_is_no_drafter_is_refused() -> None:
    footprint = lookup("mine", DrafterShape())
    registration("lookup").check_loaded(drafter_with(footprint), target_layers=3)
    with pytest.raises(ExtensionError, match="load returned SimpleNamespace, not a Drafter"):
        registration("lookup").check_loaded(SimpleNamespace(footprint=footprint, layer_groups=None), target_layers=3)


@pytest.mark.parametrize("default_k", [0, -1, None, "3", 2.5, True])
def test_a_default_number_of_drafts_that_is_none_is_refused(default_k: Any) -> None:
    drafter = drafter_with(lookup("mine", DrafterShape()), default_k=default_k)
    with pytest.raises(ExtensionError, match="'mine': default_k must be a whole number of at least 1"):
        registration("lookup").check_loaded(drafter, target_layers=3)


def test_a_footprint_with_other_groups_than_the_layers_is_refused() -> None:
    groups = layer_groups(tiny_spec(), owner="draft", page_tokens=16, item_bytes=4)
    longer = tuple(replace(group, page_tokens=32) for group in groups.specs)
    for declared, laid_out in ((groups.specs, None), (longer, groups), (groups.specs * 0, groups)):
        taps = (0,) if declared else ()
        archetype = "chain_from_taps" if declared else "lookup"
        footprint = ARCHETYPES[archetype].declare("mine", DrafterShape(groups=declared, taps=taps))
        with pytest.raises(ExtensionError, match="not those of layer_groups"):
            registration(archetype).check_loaded(drafter_with(footprint, layer_groups=laid_out), target_layers=3)
    footprint = ARCHETYPES["chain_from_taps"].declare("mine", DrafterShape(groups=groups.specs, taps=(0,)))
    registration("chain_from_taps").check_loaded(drafter_with(footprint, layer_groups=groups), target_layers=3)


class Careless(Drafter):
    """A look-up that uses one list for all its drafts, changes it whenever it is called, and fails to forget."""

    def __init__(self) -> None:
        self.footprint = lookup("careless", DrafterShape())
        self._drafts: list[int] = []

    def propose(self, rows: Sequence[ProposeRow]) -> list[list[int]]:
        self._drafts[:] = [rows[0].request.tokens[-1]]
        return [self._drafts] * len(rows)

    def forget(self, request_id: str) -> None:
        self._drafts.clear()
        raise LookupError(request_id)


def test_a_drafter_that_fails_to_forget_ends_no_request_and_keeps_none(
    target: LoadedModel, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = tiny_engine(target, drafter=Careless(), k=3)
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected
    assert engine.speculation.draft_tokens > 0
    assert "the drafter 'careless' failed to forget request" in caplog.text
    # All requests of a step that fails end, and an abort is not tried again for ever.
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=4))
    engine.abort("a")
    engine.step()
    engine.add_request("c", [1, 2, 3], SamplingParams(max_tokens=4))
    run, engine.runner.run = engine.runner.run, cast(Any, None)
    with pytest.raises(TypeError):
        engine.step()
    engine.runner.run = run  # type: ignore[method-assign]
    assert not engine.has_work
    assert tokens_of(LLM.over(engine).generate(*workload())) == expected


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("window", [None, 16])
def test_the_model_family_agrees_with_its_reference(window: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**COMMON, sliding_window=window, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = load_model(str(save(reference, tmp_path / "model")), dtype=torch.float32)
    assert model.spec.family == "phi3"
    engine = medusa_engine(model, medusa_checkpoint(tmp_path / "heads", 32), max_model_len=128)
    prompts = [[3, 4, 5] * 12, [7], list(range(40))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for prompt, said in zip(prompts, tokens_of(LLM.over(engine).generate(prompts, params)), strict=True):
        assert_greedy_by_reference(reference, prompt, said)
    assert engine.speculation.draft_tokens > 0


def test_documentation_shows_the_files_that_are_installed_here() -> None:
    document = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = [*SOURCES.glob("*/*.toml"), *SOURCES.glob("*/*.py")]
    assert len(files) == 4
    for path in files:
        language = {".py": "python", ".toml": "toml"}[path.suffix]
        assert f"```{language}\n{path.read_text(encoding='utf-8')}```" in document, path
