"""Chat templates: rendered as transformers renders them, in a sandbox, within limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.models.fakes import save, tiny_model, tiny_tokenizer, tiny_vocabulary

from outrider.errors import ModelError, RequestError
from outrider.models.chat import ChatTemplate
from outrider.models.text import text_of_directory, text_of_gguf
from outrider.models.weights.gguf_file import GGUFFile

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Hi — 你好"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2 + 2?"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"é": {}}}}}
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "whitespace is trimmed around blocks": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n    {% endif %}\n{% endfor %}"
    ),
    "tools as JSON": "{% if tools %}{{ tools | tojson }}|{{ tools[0] | tojson(indent=2) }}{% endif %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation tags": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %},{% endfor %}{{ bos_token }}"
    ),
    "namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "missing things are empty": "{{ messages[0].nothing }}{{ nowhere }}{% if documents is none %}none{% endif %}",
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_transformers_does(name: str, prompt: bool, tools: Any) -> None:
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token="!")
    expected = reference.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    template = ChatTemplate(TEMPLATES[name], source="here", variables={"bos_token": "!"})
    assert template.render(CHAT, tools=tools, add_generation_prompt=prompt) == expected


def test_extra_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ bos_token }}", source="here", variables={"bos_token": "<s>"})
    assert template.render(CHAT, enable_thinking=False) == "False <s>"


def test_a_template_for_tools_is_used_when_there_are_some() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, source="here")
    assert (template.render(CHAT), template.render(CHAT, tools=TOOLS)) == ("plain", "tools")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "does not accept"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "does not accept"),
        ("{{ messages.append(1) }}", "does not accept"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "does not accept"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_the_requests_fault(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ChatTemplate(text, source="here").render(CHAT)


def test_text_without_end_is_cut_off() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    template = ChatTemplate(endless, source="here", characters_max=10_000)
    with pytest.raises(RequestError, match="10,000 characters"):
        template.render(CHAT)


def test_only_plain_data_reaches_the_template() -> None:
    with pytest.raises(RequestError, match="PosixPath"):
        ChatTemplate("{{ messages[0].content }}", source="here").render([{"role": "user", "content": Path("/")}])


def test_a_template_that_is_no_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"here: the chat template is not valid: line 2"):
        ChatTemplate("\n{% if %}", source="here")
    with pytest.raises(ModelError, match=r"'default'.*rag"):
        ChatTemplate({"rag": ""}, source="here")


# --- where templates come from ----------------------------------------------------------------------


def directory_with(tmp_path: Path, settings: dict[str, Any], jinja: str | None = None) -> Path:
    directory = save(tiny_model("llama"), tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (directory / "chat_template.jinja").write_text(jinja)
    return directory


def test_a_file_of_its_own_wins(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, {"chat_template": "config"}, jinja="file")
    template = text_of_directory(directory, {}).chat_template
    assert template is not None
    assert template.render([]) == "file"
    assert text_of_directory(directory_with(tmp_path / "none", {}), {}).chat_template is None


def test_templates_in_the_tokenizers_settings(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "{{ bos_token }}"}, {"name": "tool_use", "template": "tools"}]
    directory = directory_with(tmp_path, {"chat_template": named, "bos_token": {"content": "<s>"}})
    template = text_of_directory(directory, {}).chat_template
    assert template is not None
    assert (template.render([]), template.render([], tools=TOOLS)) == ("<s>", "tools")


@pytest.mark.parametrize("broken", [5, [{"name": "default"}], ["default"]])
def test_broken_settings_are_named(broken: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template"):
        text_of_directory(directory_with(tmp_path, {"chat_template": broken}), {})


def test_the_template_of_a_gguf_file_knows_its_special_tokens(tmp_path: Path) -> None:
    metadata = tiny_vocabulary() | {
        "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}",
        "tokenizer.ggml.bos_token_id": 1,
        "general.sampling.temp": 0.5,
    }
    text = text_of_gguf(GGUFFile(tmp_path / "a.gguf", metadata, {}, None))  # type: ignore[arg-type]
    assert text.chat_template is not None
    assert text.chat_template.render([]) == '"!'
    assert text.generation.temperature == 0.5
