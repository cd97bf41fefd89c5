"""vLLM reads its switches when it is imported: put them into the environment before any test module does."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings, strategies

from infra.ray_exit import exit_with
from infra.vllm_env import vllm_environment
from serving.replicas.process import SPIN

os.environ.update(vllm_environment(kv_cache_gib=1))
os.environ.pop("COLUMNS", None)  # of a worker of pytest-xdist: consoles that modules make would keep that width
os.environ.setdefault(*SPIN)  # engines of a test share processors, as roles do

# Tests share processors: how long an example took says nothing of it.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Python 3.11 cannot parse while it prints a traceback (`SystemError: AST constructor recursion depth mismatch`), as
# collected tasks do at any time. pytest parses hypothesis's modules when they are imported: the last one is here.
strategies.from_type(int)

pytest.register_assert_rewrite("tier_conformance")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    """This process starts several Ray clusters."""
    exit_with(int(exitstatus))
