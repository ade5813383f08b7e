"""Continuous batching: from waiting requests to one frozen StepPlan, and from a Verdict back."""

from outrider.scheduler.config import LoadFailure, Role, SchedulerConfig
from outrider.scheduler.plan import ScheduledRequest, StepPlan, Update, Verdict
from outrider.scheduler.request import Request, RequestSpec, State
from outrider.scheduler.scheduler import Scheduler

__all__ = [
    "LoadFailure",
    "Request",
    "RequestSpec",
    "Role",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "State",
    "StepPlan",
    "Update",
    "Verdict",
]
