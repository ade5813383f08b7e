"""The time to the first tokens of a prefill and a decode worker over nixl, against one worker, in turns.

    one worker      [ prefill ................ ]①[ step ]②
    P, in its own   [ prefill ................ ]
    process                                     └ticket┐
    D                                            [fetch]①[queued][read][confirmed][ step ]②

① is the first token, which P samples and D passes on; ② is the first that D computes, from the KV that has moved. All
three engines have the same settings and use all cores, one at a time. No prompt is cached anywhere.

    overhead    from P's last prefill step to D's first step, less reading, of which only that counts which exceeds the
                time in which bare calls to NIXL read as many bytes from P's pages into D's, just afterwards
    moved       the part of the time to ② that D spends reading
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec

from outrider.backends import Progress
from outrider.config import EngineConfig, KVTransferConfig
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.outputs import RequestOutput
from outrider.errors import ConfigError, TransferError
from outrider.kv.intervals import page_count
from outrider.models.load import LoadedModel
from outrider.sampling import SamplingParams
from outrider.tools.bench.json_worker import JsonWorker
from outrider.tools.bench.texts import prompts_of
from outrider.tools.bench.transfer_bare import BareReader
from outrider.tools.bench.transfer_links import start_worker
from outrider.tools.bench.transfer_pages import all_spans, prompt_runs
from outrider.tools.bench.transfer_worker import engine_settings
from outrider.transfer.links.memory import MemoryMap, Spans

TOKENS = 8
"""Tokens to generate after each prompt: enough to compare texts."""
LIMIT_S = 300.0
"""Time in which a request must end."""
OVERHEAD_LIMIT_MS = 10.0
"""What a hand-off may cost beyond moving the bytes."""
PHASES = ("prefill", "ticket", "fetch", "queued", "read", "confirmed", "woken", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """One prompt on one worker."""

    first_s: float
    second_s: float
    tokens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class HandedOver:
    """One prompt from a prefill to a decode worker. All times but the first two are parts of the second one."""

    first_s: float
    second_s: float
    tokens: list[int]
    num_bytes: int
    phases_s: dict[str, float]
    """Durations of PHASES, in their order; together they take until the second token."""
    bare_s: float
    """Time in which bare calls read as many bytes."""

    @property
    def overhead_s(self) -> float:
        beyond_bytes = ("ticket", "fetch", "queued", "confirmed", "woken")
        return sum(self.phases_s[name] for name in beyond_bytes) + max(0.0, self.phases_s["read"] - self.bare_s)


class Workers:
    """A single worker and a decode worker in this process, and a prefill worker in another."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        transport: str,
        progress: Progress | None = None,
    ) -> None:
        # Every round computes its prompts anew.
        settings = replace(config, enable_prefix_caching=False)
        transfer = KVTransferConfig(
            kv_transport=transport, held_share=1.0, cluster_key=secrets.token_urlsafe(32), kv_load_failure_policy="fail"
        )
        self.alone = build_engine(settings, model=model, progress=progress)
        given = replace(settings, kv_transfer_config=replace(transfer, kv_role="kv_producer"))
        self._prefill, hello = start_worker({"engine": engine_settings(given)})
        try:
            self.decode = build_engine(
                replace(settings, kv_transfer_config=replace(transfer, kv_role="kv_consumer")), model=self.alone.model
            )
        except BaseException:
            self._prefill.close()
            raise
        self._remote = msgspec.convert(hello["memory"], MemoryMap)
        self._local = self.decode.runner.store.memory_map()
        self._metadata = bytes.fromhex(hello["metadata"])
        self._bare: BareReader | None = None
        self._number = 0

    @property
    def prefill(self) -> JsonWorker:
        return self._prefill

    @property
    def transport(self) -> str:
        """How bytes travel: cma or tcp, once a prompt was handed over."""
        assert self.decode.transfers is not None
        return "cma" if "cma" in self.decode.transfers.link.transport else "tcp"

    def run_alone(self, prompt: list[int]) -> Alone:
        self._number += 1
        name = f"alone {self._number}"
        started = time.monotonic()
        self.alone.add_request(name, prompt, _params())
        output = self.alone.output(name)
        second_s = _run(self.alone, output)
        assert output.metrics.first_token_s is not None
        return Alone(
            first_s=output.metrics.first_token_s - started,
            second_s=second_s - started,
            tokens=output.outputs[0].token_ids,
        )

    def hand_over(self, prompt: list[int]) -> HandedOver:
        self._number += 1
        name = f"handed over {self._number}"
        started = time.monotonic()
        handed = self._prefill.ask({"prompt": prompt, "max_tokens": TOKENS})
        if handed["ticket"] is None:
            raise TransferError(f"the prefill worker has not handed the prompt over: {handed['error'] or 'no room'}")
        asked_s = time.monotonic()
        self.decode.add_request(name, prompt, _params(), ticket=handed["ticket"])
        output = self.decode.output(name)
        second_s = _run(self.decode, output)
        metrics, times = output.metrics, output.metrics.transfer
        if output.error is not None or times is None:
            raise TransferError(f"a hand-off failed: {output.error or 'nothing was moved'}")
        assert metrics.first_token_s is not None and metrics.scheduled_s is not None
        known_s = times.queued_s + times.read_s + times.confirmed_s
        phases = {
            "prefill": handed["ended_s"] - started,
            "ticket": asked_s - handed["ended_s"],
            "fetch": metrics.first_token_s - asked_s,
            "queued": times.queued_s,
            "read": times.read_s,
            "confirmed": times.confirmed_s,
            "woken": metrics.scheduled_s - metrics.first_token_s - known_s,
            "step": second_s - metrics.scheduled_s,
        }
        return HandedOver(
            first_s=metrics.first_token_s - started,
            second_s=second_s - started,
            tokens=output.outputs[0].token_ids,
            num_bytes=times.bytes,
            phases_s=phases,
            bare_s=self.read_bare(len(prompt)),
        )

    def read_bare(self, num_tokens: int) -> float:
        """Read as many bytes as a prompt has with bare calls, from P's pages into D's, which hold no request now.
        Returns the seconds that it takes."""
        if self._bare is None:
            self._bare = BareReader(
                self._local, remote=self._remote, metadata=self._metadata, with_cma=self.transport == "cma"
            )
        self._prefill.ask({"bare": True})
        try:
            return self._bare.read(self._spans(num_tokens))
        finally:
            self._prefill.ask({"stop": True})

    def _spans(self, num_tokens: int) -> Spans:
        tables = []
        taken = [1] * len(self._local.arenas)
        for group in self._local.groups:
            count = page_count(num_tokens, group.page_tokens)
            tables.append(list(range(taken[group.arena], taken[group.arena] + count)))
            taken[group.arena] += count
        runs = prompt_runs(self._remote, tables, self._local, tables, num_tokens)
        return all_spans(self._remote, self._local, runs)

    def close(self) -> None:
        if self._bare is not None:
            self._bare.close()
        self._prefill.close()
        self.decode.close()


def _params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def _run(engine: Engine, output: RequestOutput) -> float:
    """Step until a request has ended, as a server does; returns when it had tokens after the first one."""
    second_s = 0.0
    limit_s = time.monotonic() + LIMIT_S
    while not output.finished:
        engine.step()
        if not second_s and output.outputs[0].num_tokens > 1:
            second_s = time.monotonic()
        if engine.waits:
            engine.wait()
        if time.monotonic() > limit_s:
            engine.abort(output.request_id)
            raise TransferError(f"a request of the benchmark has not ended within {LIMIT_S:.0f} s")
    return second_s


def fitting_lengths(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns the lengths of prompts, all of which must fit into the context."""
    too_long = [length for length in lengths if length + TOKENS > longest]
    if too_long:
        raise ConfigError(
            f"prompts of {', '.join(f'{length:,}' for length in too_long)} tokens and {TOKENS} more exceed the context "
            f"of {longest:,} tokens; give shorter ones with --prompt-tokens"
        )
    return tuple(sorted(set(lengths)))


def measure_first_tokens(
    workers: Workers, *, prompt_tokens: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    lengths = fitting_lengths(prompt_tokens, workers.alone.max_model_len)
    prompts = {length: prompts_of("ordinary", workers.alone.model, number=1, tokens=length)[0] for length in lengths}
    progress("first tokens: warming up")
    # The decode worker meets its peer here, once and for all.
    first = workers.hand_over(prompts[lengths[0]])
    workers.run_alone(prompts[lengths[0]])
    # Its pages, which the system provides when they are first written, are those of a cache that is in use.
    workers.read_bare(lengths[-1])
    pairs: dict[int, list[tuple[Alone, HandedOver]]] = {length: [] for length in lengths}
    for number in range(rounds):
        for length in lengths:
            progress(f"first tokens: round {number + 1}, prompt of {length:,} tokens")
            if number % 2:
                handed = workers.hand_over(prompts[length])
                alone = workers.run_alone(prompts[length])
            else:
                alone = workers.run_alone(prompts[length])
                handed = workers.hand_over(prompts[length])
            pairs[length].append((alone, handed))
    every = [handed.overhead_s for found in pairs.values() for _alone, handed in found]
    return {
        "transport": workers.transport,
        "first_contact_ms": 1000 * first.overhead_s,
        "overhead_ms": 1000 * median(every),
        "overhead_limit_ms": OVERHEAD_LIMIT_MS,
        "overhead_within_limit": 1000 * median(every) <= OVERHEAD_LIMIT_MS,
        "prompts": [_report(length, found) for length, found in pairs.items()],
    }


def _report(length: int, pairs: Sequence[tuple[Alone, HandedOver]]) -> dict[str, Any]:
    alone, handed = [one for one, _other in pairs], [other for _one, other in pairs]
    return {
        "prompt_tokens": length,
        "bytes": handed[0].num_bytes,
        "alone_first_token_ms": 1000 * median(run.first_s for run in alone),
        "alone_second_token_ms": 1000 * median(run.second_s for run in alone),
        "first_token_ms": 1000 * median(run.first_s for run in handed),
        "second_token_ms": 1000 * median(run.second_s for run in handed),
        "first_token_ratio": median(b.first_s / a.first_s for a, b in pairs),
        "second_token_ratio": median(b.second_s / a.second_s for a, b in pairs),
        "moved_share": median(run.phases_s["read"] / run.second_s for run in handed),
        "phases_ms": {name: 1000 * median(run.phases_s[name] for run in handed) for name in PHASES},
        "bare_read_ms": 1000 * median(run.bare_s for run in handed),
        "overhead_ms": 1000 * median(run.overhead_s for run in handed),
        "texts": len(pairs),
        "texts_that_differ": sum(a.tokens != b.tokens for a, b in pairs),
    }
