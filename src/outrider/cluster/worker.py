"""Our engine as a worker of Dynamo: `outrider worker`. The only module that imports Dynamo."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run as run_worker
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from outrider.api.async_llm import AsyncLLM
from outrider.api.llm import LLM
from outrider.cluster.answers import Chunk, Chunks
from outrider.cluster.environment import setting
from outrider.cluster.figures import Figures
from outrider.cluster.marks import Marks
from outrider.cluster.requests import Order, inexact_after_migration, read_order
from outrider.cluster.router_events import RouterEvents
from outrider.cluster.settings import Role, WorkerSettings
from outrider.config import EngineConfig
from outrider.engine.build import build_engine
from outrider.engine.outputs import RequestOutput
from outrider.engine.step_costs import know_costs
from outrider.errors import ConfigError, NotNowError, RequestError
from outrider.kv.layout import KVLayout
from outrider.server.engine_process.warm_up import warm_up

logger = logging.getLogger("outrider.worker")

SNAPSHOT_INTERVAL_S = 0.2
DRAIN_POLL_S = 0.05


class OutriderEngine(LLMEngine):  # type: ignore[misc]
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._llm: AsyncLLM | None = None
        self._running = 0
        self._draining = False
        self._snapshots: Any = None
        self._reporting: asyncio.Task[None] | None = None
        self._defaults: dict[str, float] = {}
        self._events: RouterEvents | None = None
        self._marks = None if settings.marks is None else Marks(settings.marks)
        self._group = 0
        self.figures = Figures(settings.name)

    # ---- life --------------------------------------------------------------------------------------

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        raise NotImplementedError("workers are made by `serve`")

    async def start(self, worker_id: int) -> Registration:
        settings = self._settings
        config = settings.engine
        if settings.state_file is not None:
            settings.state_file.write_text(f"{worker_id:x}", encoding="ascii")
        self._llm = await asyncio.to_thread(_loaded, config, self._make_events)
        engine = self._llm.engine
        if engine.max_model_len < settings.context_tokens:
            raise ConfigError(
                f"the memory for KV holds texts of {engine.max_model_len} tokens, and the model is to have "
                f"{settings.context_tokens}; raise --kv-cache-memory-bytes, or give all workers the same "
                "--max-model-len"
            )
        self._defaults = {name: value for name, value in asdict(engine.model.generation).items() if value is not None}
        kv = engine.scheduler.kv
        self._group = self._full_group(kv.layout)
        self._reporting = asyncio.create_task(self._report())
        return Registration(
            model=str(settings.files),
            served_model_name=settings.served_model,
            llm=LlmRegistration(
                context_length=settings.context_tokens,
                kv_cache_block_size=kv.layout.groups[self._group].page_tokens,
                total_kv_blocks=kv.pool.arena(self._group).num_pages - 1,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
        )

    async def cleanup(self) -> None:
        self._draining = True
        deadline = time.monotonic() + self._settings.drain_s
        while time.monotonic() < deadline and not await self.is_quiescent():
            await asyncio.sleep(DRAIN_POLL_S)
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)
            llm.engine.close()

    async def is_quiescent(self) -> bool:
        """Whether no request runs and no decode worker may still fetch KV from here."""
        if self._llm is None:
            return True
        return not self._running and not self._llm.engine.transfer_counters().leases

    @staticmethod
    def _full_group(layout: KVLayout) -> int:
        """Returns the group whose pages the router counts: one that reads everything, if there is one."""
        return next((group for group in layout.target_groups if not layout.groups[group].kind.slides), 0)

    # ---- what the cluster is told ------------------------------------------------------------------

    async def kv_event_sources(self) -> list[PushSource]:
        return [] if self._events is None else [PushSource(on_ready=self._events.start, dp_rank=0)]

    def _make_events(self, layout: KVLayout) -> RouterEvents:
        self._events = RouterEvents(layout, self._full_group(layout))
        return self._events

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self.figures.registry)

    async def health_check_payload(self) -> dict[str, Any]:
        assert self._llm is not None
        tokenizer = self._llm.engine.model.tokenizer
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=tokenizer.bos_id or 0)
        return payload

    async def _report(self) -> None:
        while True:
            llm = self._llm
            if llm is not None:
                kv = llm.engine.scheduler.kv
                arena = kv.pool.arena(self._group)
                total = arena.num_pages - 1
                used = total - arena.num_available
                self.figures.read(llm.engine, used_share=used / total)
                if self._snapshots is not None:
                    rate = kv.hit_tokens / kv.queried_tokens if kv.queried_tokens else None
                    self._snapshots.publish(
                        0,
                        ComponentSnapshot(
                            kv_used_blocks=used,
                            kv_total_blocks=total,
                            gpu_cache_usage=used / total,
                            dp_rank=0,
                            kv_cache_hit_rate=rate,
                        ),
                    )
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)

    # ---- requests ----------------------------------------------------------------------------------

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        self._running += 1
        started_s, output, marked, ended = time.time(), None, False, False
        try:
            if self._draining or self._llm is None:
                raise EngineShutdown(f"worker {self._settings.name} is shutting down")
            order = read_order(request, name=context.id(), defaults=self._defaults)
            marked = self._mark(order, context.id())
            hand_over = self._settings.role is Role.PREFILL and not is_probe(request)
            self._log(request, context.id(), event="start", prompt_tokens=len(order.prompt))
            stream = self._outputs(order, hand_over=hand_over)
            chunks = Chunks(self._spell)
            async with aclosing(stream):
                async for output in stream:
                    _raise_if_failed(output)
                    for chunk in chunks.of(output):
                        if hand_over and "finish_reason" in chunk:
                            self._add_ticket(chunk, output)
                        yield chunk
            assert output is not None
            ended = not hand_over
            self.figures.note(output)
            self._log(request, context.id(), event="end", seconds=time.time() - started_s, **_facts(output))
        except (GeneratorExit, asyncio.CancelledError):
            ended = True  # the client is gone
            raise
        except NotNowError as error:
            raise EngineShutdown(str(error)) from None
        except RequestError as error:
            raise InvalidArgument(str(error)) from None
        finally:
            self._running -= 1
            if marked and ended and self._marks is not None:
                self._marks.forget(context.id())

    def _mark(self, order: Order, name: str) -> bool:
        """Mark a request that another worker could not carry on exactly, or refuse to carry it on; returns whether a
        mark was left."""
        settings = inexact_after_migration(order.params)
        if not settings:
            return False
        which = " and ".join(settings)
        if self._marks is None:
            raise RequestError(
                f"{which} cannot be served here: if this worker died, another one could not carry the text on exactly, "
                "and would not notice; give all workers --shared-directory on a file system that they share"
            )
        if self._marks.is_continued(name, order.prompt):
            raise RequestError(
                f"the worker that wrote this text is gone, and with {which} no other one can carry it on exactly; send "
                "the request again"
            )
        return True

    def _outputs(self, order: Order, *, hand_over: bool) -> AsyncGenerator[RequestOutput, None]:
        assert self._llm is not None
        has_peers = self._settings.role is not Role.AGGREGATED
        return self._llm.generate(
            {"prompt_token_ids": order.prompt},
            order.params,
            salt=order.salt,
            hand_over=hand_over,
            ticket=order.ticket if has_peers else None,
            compute_prompt=has_peers and not hand_over and order.ticket is None,
        )

    def _spell(self, token: int) -> str:
        assert self._llm is not None
        return self._llm.engine.model.tokenizer.decode([token], skip_special_tokens=False)

    def _add_ticket(self, chunk: Chunk, output: RequestOutput) -> None:
        """Let the front end carry on to a decode worker, whatever the first token is; where too much KV is held
        already, without a ticket, so that the decode worker computes the prompt."""
        chunk["finish_reason"] = "length"
        chunk["disaggregated_params"] = {} if output.ticket is None else {"ticket": output.ticket}

    def _log(self, request: dict[str, Any], name: str, **facts: Any) -> None:
        path = self._settings.request_log
        if path is None or is_probe(request):
            return
        who = {"worker": self._settings.name, "role": self._settings.role.value, "request": name}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **who, **facts}) + "\n")


def _facts(output: RequestOutput) -> dict[str, int]:
    return {
        "prompt_tokens": output.prompt_len,
        "cached_tokens": output.metrics.cached_tokens,
        "transferred_tokens": output.metrics.transferred_tokens,
        "generated_tokens": sum(continuation.num_tokens for continuation in output.outputs),
        "steps": output.metrics.steps,
    }


def _loaded(config: EngineConfig, events: Callable[[KVLayout], RouterEvents]) -> AsyncLLM:
    engine = build_engine(config, events=events if config.enable_prefix_caching else None)
    warm_up(engine)
    know_costs(engine)
    return AsyncLLM(llm=LLM.over(engine))


def _raise_if_failed(output: RequestOutput) -> None:
    if output.error is None:
        return
    if output.error_is_callers:
        raise InvalidArgument(output.error)
    # The front end lets the request go on elsewhere.
    raise EngineShutdown(output.error)


def worker_config(settings: WorkerSettings) -> WorkerConfig:
    return WorkerConfig(
        namespace=settings.namespace,
        component="prefill" if settings.role is Role.PREFILL else "backend",
        model_name=str(settings.files),
        served_model_name=settings.served_model,
        discovery_backend=setting("DYN_DISCOVERY_BACKEND", "etcd"),
        request_plane=setting("DYN_REQUEST_PLANE", "tcp"),
        event_plane=setting("DYN_EVENT_PLANE", "zmq"),
        disaggregation_mode=DisaggregationMode(settings.role.value),
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def serve(settings: WorkerSettings) -> None:
    """Run one worker until it is told to end."""

    async def made(_argv: list[str] | None) -> tuple[OutriderEngine, WorkerConfig]:
        return OutriderEngine(settings), worker_config(settings)

    run_worker(OutriderEngine, [], made)
