"""The process that compiles grammars: `python -m outrider.matching`. It ends with its standard input, and at once when
whoever started it dies: it may be in native code for minutes, and would not look at its input until then."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

import xgrammar

from outrider.errors import RequestError
from outrider.frames import read_frame
from outrider.matching.messages import BadGrammar, Done, UseTokens, decode_order, framed
from outrider.matching.native import compile_grammar, native_tokens

MEMORY_BYTES_MAX = 1 << 30
"""Address space for compiling, beyond what the libraries take."""
PR_SET_PDEATHSIG = 1
"""Linux's prctl: which signal the kernel sends when the thread that started this process is gone."""


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_memory()
    compiler = None
    while (body := read_frame(sys.stdin.buffer)) is not None:
        order = decode_order(body)
        answer: Done | BadGrammar
        if isinstance(order, UseTokens):
            # One thread: the engine needs the other cores. No cache: the engine has one.
            tokens = native_tokens(order.spelling, order.eos_ids)
            compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
            answer = Done()
        else:
            try:
                answer = Done(compiled=compile_grammar(compiler, order.grammar).serialize_json())
            except RequestError as problem:
                answer = BadGrammar(message=str(problem))
        answers.write(framed(answer))
        answers.flush()
    return 0


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    raise SystemExit(main())
