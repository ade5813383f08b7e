"""Timed runs of one engine, for `scripts/bench-peers`: a program that reads one JSON request per line and answers each.

It runs in the peers' environment as well as in Outrider's, so it imports nothing but the engine that its first
argument names. The second argument holds the settings as JSON: the model's file, the number of threads, the largest
batch, the longest text and, for Outrider, the speculative configuration. Requests:

    {"questions": [text, …]}                        → {"prompts": token ids of each question as a chat}
    {"text": text, "num_tokens": n}                 → {"prompts": the first n token ids of the text, alone in a list}
    {"prompts": [token ids, …], "max_tokens": n}    → {"seconds": time of the call, "token_ids": what was generated}
    {"memory": true}                                → {"peak_mb": largest resident memory so far}

The first two are for Outrider, whose token ids all engines are given. Every engine generates greedily and past the
end-of-text token, and keeps no prefix cache between calls.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from abc import ABC, abstractmethod
from importlib import import_module
from time import perf_counter
from typing import Any

Prompts = list[list[int]]


class Engine(ABC):
    @abstractmethod
    def __init__(self, settings: dict[str, Any]) -> None: ...

    @abstractmethod
    def generate(self, prompts: Prompts, max_tokens: int) -> Prompts:
        """Returns the tokens that follow each prompt."""

    def tokenize(self, request: dict[str, Any]) -> Prompts:
        raise NotImplementedError


class Outrider(Engine):
    def __init__(self, settings: dict[str, Any]) -> None:
        self._package: Any = import_module("outrider")
        self._llm = self._package.LLM(
            settings["model"],
            speculative_config=settings["speculative_config"],
            num_threads=settings["threads"],
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Prompts:
        params = self._package.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params)]

    def tokenize(self, request: dict[str, Any]) -> Prompts:
        if "questions" in request:
            return [self._llm.chat_prompt([{"role": "user", "content": text}]) for text in request["questions"]]
        return [list(self._llm.encode(request["text"])[1])[: request["num_tokens"]]]


class LlamaCpp(Engine):
    """llama.cpp through its C interface, since the Python class of llama-cpp-python serves one text at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._lib: Any = import_module("llama_cpp")
        lib = self._lib
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(settings["model"].encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {settings['model']}")
        params = lib.llama_context_default_params()
        params.n_seq_max = settings["batch"]
        params.n_ctx = settings["batch"] * settings["longest"]
        params.n_batch = self._most_rows = 2048
        params.n_threads = params.n_threads_batch = settings["threads"]
        self._context = lib.llama_init_from_model(self._model, params)
        self._sampler = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(self._most_rows, 0, 1)

    def generate(self, prompts: Prompts, max_tokens: int) -> Prompts:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        texts: Prompts = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            rows = [(number, at, token) for at, token in enumerate(prompt)]
            for start in range(0, len(rows), self._most_rows):
                self._decode(rows[start : start + self._most_rows])
            texts[number].append(self._sample((len(rows) - 1) % self._most_rows))
        for step in range(max_tokens - 1):
            self._decode([(number, len(prompts[number]) + step, text[-1]) for number, text in enumerate(texts)])
            for number, text in enumerate(texts):
                text.append(self._sample(number))
        return texts

    def _decode(self, rows: list[tuple[int, int, int]]) -> None:
        """Runs (sequence, position, token) rows. The last row of each sequence gets logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (sequence, position, token) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index + 1 == len(rows) or rows[index + 1][0] != sequence
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _sample(self, row: int) -> int:
        return int(self._lib.llama_sampler_sample(self._sampler, self._context, row))


class OpenVINO(Engine):
    """OpenVINO GenAI's continuous batching, which serves any number of texts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._openvino: Any = import_module("openvino")
        self._genai: Any = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = settings["batch"]
        scheduler.cache_size = 1
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            settings["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"]}
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Prompts:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        tensors = [self._openvino.Tensor(self._array(prompt)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    @staticmethod
    def _array(prompt: list[int]) -> Any:
        numpy: Any = import_module("numpy")
        return numpy.array([prompt], dtype=numpy.int64)


ENGINES: dict[str, type[Engine]] = {"outrider": Outrider, "llama.cpp": LlamaCpp, "openvino": OpenVINO}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if "memory" in request:
        return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if "prompts" not in request:
        return {"prompts": engine.tokenize(request)}
    gc.collect()
    gc.disable()
    started = perf_counter()
    texts = engine.generate(request["prompts"], request["max_tokens"])
    seconds = perf_counter() - started
    gc.enable()
    return {"seconds": seconds, "token_ids": texts}


def main() -> None:
    # Answers go to the original stdout; whatever a library prints must not get between them.
    answers, sys.stdout = sys.stdout, sys.stderr
    # Run by its path, this file's folder would come first on the path and hide other modules.
    sys.path.pop(0)
    engine = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
