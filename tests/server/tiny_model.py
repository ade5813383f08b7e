"""A random model of a few layers with the default model's real tokenizer, as a directory: it loads in no time."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
import transformers

from outrider.models.load import text_of_gguf
from outrider.models.resolve import DEFAULT_MODEL, resolve_model
from outrider.models.text import ModelText
from outrider.models.weights import open_checkpoint
from outrider.server.messages import TextFacts
from outrider.server.text_process.worker import TextWorker

CONTEXT = 512
# Knows tools as Qwen's templates do, how much to think as gpt-oss', and has a loop that a client can make endless.
TEMPLATE = (
    "{%- if slow is defined %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{%- if reasoning_effort is defined %}<|im_start|>effort\n{{ reasoning_effort }}<|im_end|>\n{% endif %}"
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def real_text() -> ModelText:
    """Tokenizer and template of the default model."""
    checkpoint = open_checkpoint(resolve_model(DEFAULT_MODEL).path)
    return text_of_gguf(checkpoint.file)  # type: ignore[attr-defined]


def text_worker(template: str) -> TextWorker:
    """A worker with the default model's tokenizer and this chat template, in this process."""
    return TextWorker(
        TextFacts(
            tokenizer=real_text().tokenizer.to_json(),
            tokenizer_source="test",
            bos_id=None,
            eos_ids=(),
            templates={"default": template},
            template_source="test",
            template_variables={},
        )
    )


def save_tiny_model(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = real_text().tokenizer
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}), encoding="utf-8")
    return directory
