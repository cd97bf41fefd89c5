"""Simulated beside measured: an access log replayed with the costs that it tells itself.

A request's work is what it did compute and encode. Costs of a forward are fitted to what forwards took; what a request
costs besides is the least that any took. What is predicted is how long requests wait for each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from autoscale.controllers import Static
from autoscale.curves import ForwardCost
from autoscale.signals import Role
from autoscale.simulated import Machine
from autoscale.simulator import Limits, Simulation
from autoscale.traces import Request
from serving.access_log import BadLog, LoggedRequest
from serving.scaling.logs import arrived, in_order
from serving.scaling.routers import routers

_FEW = 20
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def compared(path: Path, prefill: int, decode: int, seconds: float) -> dict[str, Any]:
    """Quantiles of the TTFT [ms], predicted and measured, of a log's last `seconds`.

    Raises:
        BadLog: too few requests of the log tell when their first token came.
    """
    lines = [line for line in in_order(path) if line.ttft_ms is not None]
    lines = [line for line in lines if arrived(line) >= arrived(lines[-1]) - seconds] if lines else []
    if len(lines) < _FEW:
        raise BadLog(f"{path}: {len(lines)} streamed requests with their time to the first token, {_FEW} are needed")
    measured = np.array([line.ttft_ms for line in lines], dtype=float)
    machine = fitted(lines)
    counts = {Role.PREFILL: prefill, Role.DECODE: decode}
    simulation = Simulation(Static(counts), machine, Limits(60.0, 60.0), routers, initial=counts, shared=True)
    first = arrived(lines[0])
    requests = [Request(arrived(line) - first, max(1, line.computed), (), 64) for line in lines]
    predicted = simulation.run(requests).ttft_s * 1e3
    return {
        "requests": len(lines),
        "seconds": arrived(lines[-1]) - first,
        "fixed_tokens": machine.forward.fixed_tokens,
        "seconds_per_token": machine.forward.seconds_per_token,
        "overhead_s": machine.overhead_s,
        "predicted_ms": {name: float(np.quantile(predicted, share)) for name, share in _SHARES.items()},
        "measured_ms": {name: float(np.quantile(measured, share)) for name, share in _SHARES.items()},
    }


def fitted(lines: list[LoggedRequest]) -> Machine:
    """Costs of forwards and of all else, as requests tell them."""
    computed = np.array([line.computed for line in lines], dtype=float)
    took = np.array([line.forward_ms + line.vision_ms for line in lines]) / 1e3
    per_token = max(float(np.polyfit(computed, took, 1)[0]) if np.ptp(computed) else 0.0, 1e-9)
    if per_token <= 1e-9:
        per_token = max(float(took.sum() / max(computed.sum(), 1.0)), 1e-9)
    fixed = max(float(np.median(took - per_token * computed)) / per_token, 0.0)
    besides = np.array([line.ttft_ms or 0.0 for line in lines]) / 1e3 - took
    return Machine(forward=ForwardCost(fixed, per_token), overhead_s=max(0.0, float(np.quantile(besides, 0.1))))
