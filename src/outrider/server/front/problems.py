"""Errors as clients see them: OpenAI's error object and an HTTP status."""

from __future__ import annotations

from typing import Any

from outrider.errors import OutriderError


class Problem(OutriderError):
    """A request cannot be served. `status` is the HTTP status; the other fields are OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def unavailable(why: str, *, retry_after_s: int = 2) -> Problem:
    return Problem(why, status=503, type="server_error", code="unavailable", retry_after_s=retry_after_s)


def server_ends() -> Problem:
    return unavailable("the server is shutting down; send the request to another server")


def engine_died() -> Problem:
    return unavailable("the engine has stopped and is being restarted; the request is lost, send it again")


def engine_hung(silent_s: float) -> Problem:
    return unavailable(
        f"the engine has made no progress for {silent_s:g} s and is being restarted; the request is lost, send it again"
    )


def transfer_failed(why: str) -> Problem:
    return Problem(why, status=503, type="server_error", code="kv_transfer_failed", retry_after_s=1)


def queue_full(waiting: int) -> Problem:
    return Problem(
        f"the queue is full ({waiting} continuations are open); try again in a moment",
        status=429,
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=1,
    )
