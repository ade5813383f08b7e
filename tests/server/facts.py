"""What an engine says of itself, for tests that need no engine."""

from __future__ import annotations

from outrider.server.messages import Facts, TextFacts

FACTS = Facts(
    model_name="m",
    fingerprint="f",
    max_model_len=64,
    max_num_seqs=4,
    vocab_size=100,
    device="cpu",
    dtype="float32",
    text=TextFacts(
        tokenizer="",
        tokenizer_source="test",
        bos_id=None,
        eos_ids=(),
        templates={},
        template_source="test",
        template_variables={},
    ),
    sampling_defaults={},
    drafter=None,
    drafts_max=0,
    kv_tokens=64,
    supports_grammars=True,
    sanitizer="off",
)
