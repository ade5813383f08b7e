"""Timed runs of one checkout, for `scripts/compare`: a program that reads one JSON request per line and answers each.

It runs under commits with other module paths, so it uses nothing but what the package exports: `LLM` and
`SamplingParams`. The first argument holds the settings of `LLM` as JSON. Requests:

    {"questions": [text, …]}                          → {"prompts": token ids of each question as a chat}
    {"text": text, "num_tokens": n}                   → {"prompts": the first n token ids of the text, alone in a list}
    {"prompts": [token ids, …], "max_tokens": n}      → {"seconds": time of the call, "token_ids": what was generated}
"""

from __future__ import annotations

import gc
import json
import sys
from time import perf_counter
from typing import Any


def answer(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "questions" in request:
        return {"prompts": [llm.chat_prompt([{"role": "user", "content": text}]) for text in request["questions"]]}
    if "text" in request:
        return {"prompts": [list(llm.encode(request["text"])[1])[: request["num_tokens"]]]}
    from outrider import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
    gc.collect()
    gc.disable()
    started = perf_counter()
    outputs = llm.generate(request["prompts"], params)
    seconds = perf_counter() - started
    gc.enable()
    return {"seconds": seconds, "token_ids": [output.outputs[0].token_ids for output in outputs]}


def main() -> None:
    # Answers go to the original stdout; whatever a library prints must not get between them.
    answers, sys.stdout = sys.stdout, sys.stderr
    # Run by its path, this file's folder would come first on the path and hide other modules.
    sys.path.pop(0)
    import outrider

    llm = outrider.LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"package": outrider.__file__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
