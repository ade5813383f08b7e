"""A deterministic simulation: the real scheduler, KV manager and transfer logic, under faults."""

from outrider.tools.sim.drawing import draw
from outrider.tools.sim.scenario import Scenario
from outrider.tools.sim.world import Result, World

__all__ = ["Result", "Scenario", "World", "draw"]
