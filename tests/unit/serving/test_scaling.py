"""Simulation with the service's routing, the planner's answers, and what Serve is told of scaled roles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autoscale.controllers import Oracle, Static
from autoscale.curves import ForwardCost
from autoscale.nodes import AGAIN_S, Bundle, NodeRequests
from autoscale.planner import Plans, Scaled, by_replica
from autoscale.policies import Bounds
from autoscale.settings import AutoscaleSettings, Mode
from autoscale.signals import Role, Window
from autoscale.simulated import Machine
from autoscale.simulator import Limits, Result, Simulation
from autoscale.traces import Chunk, Request, generated
from serving.cli.main import app
from serving.config import OrbitServeConfig
from serving.scaling.logs import logged
from serving.scaling.roles import fixed_bundles, planned, replicas
from serving.scaling.routers import routers
from serving.scaling.study import Study, loads_of

MACHINE = Machine(forward=ForwardCost(100.0, 1e-3), encode_s_per_token=0.0, start_s=30.0, overhead_s=0.0)
LIMITS = Limits(4.0, 0.1)


def simulated(requests: Any, counts: tuple[int, int] = (1, 1), **options: Any) -> Result:
    initial = {Role.PREFILL: counts[0], Role.DECODE: counts[1]}
    controller = options.pop("controller", Static(initial))
    return Simulation(controller, MACHINE, LIMITS, routers, initial=initial, **options).run(requests)


def test_a_request_alone_takes_its_forward_and_its_steps():
    result = simulated([Request(0.0, 900, (), 51)])
    assert result.ttft_s[0] == pytest.approx(1.0), "100 + 900 tokens at 1 ms"
    assert result.itl_s[0] == pytest.approx(MACHINE.step_s + MACHINE.step_s_per_sequence)
    assert result.attainment == 1.0


def test_links_wait_for_each_other_and_two_replicas_share_them():
    crowd = [Request(0.0, 900, (), 2) for _ in range(4)]
    assert sorted(simulated(crowd).ttft_s) == pytest.approx([1, 2, 3, 4])
    assert sorted(simulated(crowd, (2, 1)).ttft_s) == pytest.approx([1, 1, 2, 2])


def test_a_chunk_is_computed_once_behind_a_set_and_found_again_behind_it():
    a, b = Chunk("a", 500), Chunk("b", 500)
    requests = [Request(10.0 * i, 100, chunks, 2) for i, chunks in enumerate([(a, b), (a, b), (b, a), (b, a)])]
    result = simulated(requests)
    assert result.ttft_s == pytest.approx([1.2, 0.2, 0.7, 0.2], abs=0.05), "behind another, b and a are new once each"
    assert result.reused_share == pytest.approx(2500 / 4000)


@pytest.mark.parametrize(("hands_over", "again"), [(True, 0.2), (False, 1.2)])
def test_what_only_the_replica_that_goes_has_is_handed_over(hands_over: bool, again: float):
    class Shrinks(Static):
        def targets(self, view: Any, now: float) -> dict[Role, int]:
            return {Role.PREFILL: 1 if now >= 20 else 2}

    pages = [Chunk(f"page-{i}", 1000) for i in range(2)]
    requests = [Request(0.0, 100, (page,), 2) for page in pages] + [
        Request(40.0 + 5 * i, 100, (page,), 2) for i, page in enumerate(pages)
    ]
    controller = Shrinks({}, period_s=5.0)
    result = simulated(requests, (2, 1), controller=controller, hands_over=hands_over)
    assert max(result.ttft_s[2:]) == pytest.approx(again, abs=0.05)


def test_a_replica_that_goes_is_paid_until_it_has_ended_its_requests_and_handed_over():
    class Shrinks(Static):
        def targets(self, view: Any, now: float) -> dict[Role, int]:
            return {Role.PREFILL: 1 if now >= 20 else 2}

    slow = replace(MACHINE, bytes_per_second=57_344 * 100)  # 100 tokens a second
    pages = [Chunk(f"page-{i}", 1000) for i in range(2)]
    crowd = [Request(0.0, 100, (page,), 2) for page in pages] + [Request(60.0, 100, (), 2)]
    initial, paid = {Role.PREFILL: 2, Role.DECODE: 1}, []
    for hands_over in (True, False):
        shrinks = Shrinks({}, period_s=5.0)
        run = Simulation(shrinks, slow, LIMITS, routers, initial=initial, hands_over=hands_over).run(crowd)
        paid.append(run.replica_seconds["prefill"] - run.seconds)
    assert paid == pytest.approx([30.0, 20.0], abs=1.5), "10 s for its page"


def test_a_start_is_paid_from_when_it_is_asked_for_and_serves_when_it_is_ready():
    class Grows(Static):
        def targets(self, view: Any, now: float) -> dict[Role, int]:
            return {Role.PREFILL: 2}

    requests = [Request(float(i), 400, (), 2) for i in range(100)]
    result = simulated(requests, controller=Grows({}, period_s=10.0, is_instant=False))
    assert result.replica_seconds["prefill"] == pytest.approx(2 * result.seconds - 10.0, abs=3.0)
    assert result.starts == 1


def test_loads_are_the_work_of_a_trace():
    loads = loads_of([Request(float(i), 400, (), 100) for i in range(100)], MACHINE)
    assert loads.peak(Role.PREFILL) == pytest.approx(0.5)
    assert loads.mean_s == pytest.approx(0.5)


def test_the_oracle_is_cheaper_than_static_peak_and_keeps_its_answers():
    def requests() -> Iterator[Request]:
        return generated("diurnal", 3.0, 240.0, 0.0)

    study = Study(requests, MACHINE, LIMITS, 20)
    oracle, static = study.run("oracle"), study.run("static")
    assert isinstance(Oracle({}, 0.9), Oracle)
    assert oracle.attainment >= 0.99 * static.attainment
    assert oracle.total_replica_seconds < static.total_replica_seconds


@pytest.mark.parametrize("policy", ["ray", "hpa", "knative", "saturation", "sla-means"])
def test_policies_of_others_keep_up_with_a_short_load(policy: str):
    study = Study(lambda: generated("steady", 1.0, 120.0, 0.0), MACHINE, LIMITS, 8)
    result = study.run(policy)
    assert result.requests > 80
    assert result.attainment > 0.5


def test_simulate_writes_results_and_a_picture(tmp_path: Path):
    out, picture = tmp_path / "out.json", tmp_path / "plan.svg"
    arguments = [
        "autoscale",
        "simulate",
        "--trace",
        "steady",
        "--rate",
        "1",
        "--hours",
        "0.1",
        "--policy",
        "static,ours",
    ]
    ran = CliRunner().invoke(app, [*arguments, "--json", str(out), "--plot", str(picture)])
    assert ran.exit_code == 0, ran.output
    policies = json.loads(out.read_text())["policies"]
    assert policies["static"]["attainment"] > 0.9
    assert len(policies["ours"]["timeline"]["prefill"]) == 6
    assert "<svg" in picture.read_text()[:500]
    wrong = CliRunner().invoke(app, ["autoscale", "simulate", "--trace", "steady", "--policy", "magic"])
    assert wrong.exit_code == 2
    assert "no policy 'magic'" in wrong.output


def test_an_access_log_is_replayed_and_checked(tmp_path: Path):
    chunk = {"content": "c-1", "modality": "text", "tokens": 300, "point": "exact"}
    lines = [
        {
            "v": 1, "time": 100.0 + i, "model": "m", "tenant": "t", "mode": "auto", "sample": 1.0, "prefix": "p",
            "computed": 100 + 10 * (i % 5), "forward_ms": 200.0 + 10 * (i % 5), "ttft_ms": 250.0 + 10 * (i % 5),
            "tokens": 400, "chunks": [chunk],
        }
        for i in range(40)
    ]  # fmt: skip
    path = tmp_path / "access-1.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = list(logged(path))
    assert (requests[0].text, requests[0].chunks[0].tokens, requests[-1].at) == (100, 300, pytest.approx(39.0, abs=0.1))
    out = tmp_path / "check.json"
    ran = CliRunner().invoke(app, ["autoscale", "check", str(path), "--json", str(out)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(out.read_text())
    assert found["predicted_ms"]["p50"] == pytest.approx(found["measured_ms"]["p50"], rel=0.05)
    assert CliRunner().invoke(app, ["autoscale", "check", str(tmp_path / "no")]).exit_code == 2


def config(**sections: Any) -> OrbitServeConfig:
    return OrbitServeConfig.model_validate({"model": {"path": "/m"}, "vision": {"replicas": 0}, **sections})


def test_a_range_of_replicas_is_scaled_in_act_alone():
    between = {"replicas": {"min": 1, "max": 3}}
    acts = config(prefill=between, autoscale={"mode": "act"})
    options = replicas(acts, "PrefillWorker", acts.prefill)
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.upscale_delay_s, scaling.downscale_delay_s) == (
        1,
        3,
        0,
        0,
    )
    assert scaling.policy.policy_function == "autoscale.serve:RolePolicy"
    assert options["graceful_shutdown_timeout_s"] == acts.http.request_timeout_s
    assert replicas(acts, "DecodeWorker", acts.decode)["num_replicas"] == 1
    advises = config(prefill=between)
    assert replicas(advises, "PrefillWorker", advises.prefill)["num_replicas"] == 1
    assert planned(acts)[Role.PREFILL] == Scaled("PrefillWorker", Bounds(1, 3), 0, Bundle({"CPU": 0.1}))
    with pytest.raises(ValueError, match=r"min \(3\) is more than max \(2\)"):
        config(decode={"replicas": {"min": 3, "max": 2}})


def busy(now: float, load: float) -> dict[str, float]:
    work = load * now
    done = {"links": work, "compute_s": work, "compute_s2": work, "load_s": 0.0, "queued_s": 0.0, "waiting": 0.0}
    return {"clock": now + 1, "age_s": now, "ready_s": 20.0, **done}


def test_the_planner_tells_targets_with_reasons_and_nothing_when_it_is_late(tmp_path: Path):
    settings = AutoscaleSettings(mode=Mode.ACT, ttft_s=4.0, log=tmp_path / "plans" / "log.jsonl")
    plans = Plans({Role.PREFILL: Scaled("PrefillWorker", Bounds(1, 8))}, settings)
    assert plans.target(Role.PREFILL, 1, 1, 0.0) is None, "no plan yet"
    for now in range(0, 60, 2):
        plans.target(Role.PREFILL, 1, 1, now)
        plans.plan({Role.PREFILL: {"a": busy(now, 3.0)}}, now, 1e9 + now)
    target = plans.target(Role.PREFILL, 1, 1, 59.0)
    assert target is not None
    assert target >= 4
    assert plans.target(Role.PREFILL, 1, 1, 99.0) is None, "the last plan is old"
    assert plans.target(Role.DECODE, 1, 1, 59.0) is None
    status = plans.status()["roles"]["prefill"]
    assert (status["target"], status["ready"], status["min"], status["max"]) == (target, 1, 1, 8)
    assert status["reasons"]["unknown"] >= 1
    lines = [json.loads(line) for line in settings.log.read_text().splitlines()]  # type: ignore[union-attr]
    assert lines[0]["reason"] == "unknown"
    assert lines[-1]["signals"]["a"]["ready_s"] == 20.0


def test_a_replica_that_is_late_once_loses_nothing_that_it_has_counted():
    """As on a busy host, where every third round an answer does not come in time."""
    signals = by_replica([("a", busy(0, 1.0)), TimeoutError(), TimeoutError()], {"a", "b"})
    assert signals == {"a": busy(0, 1.0), "b": {}, "lost-1": {}}
    window, known = Window(Role.PREFILL), set[str]()
    for now in range(0, 120, 2):
        answers = [("a", busy(now, 0.5)), TimeoutError() if now % 6 == 4 else ("b", busy(now, 0.5))]
        window.observe(now, by_replica(answers, known))
        known = {"a", "b"}
    assert window.demand is not None
    assert window.demand.load == pytest.approx(1.0, abs=0.02)
    assert not window.demand.is_partial, "it is not stale yet"


def test_bounds_that_are_moved_steer_a_role_whatever_its_load():
    settings = AutoscaleSettings(mode=Mode.ACT, ttft_s=4.0)
    plans = Plans({Role.PREFILL: Scaled("PrefillWorker", Bounds(1, 8))}, settings)

    def told(now: float, running: int) -> int | None:
        plans.target(Role.PREFILL, running, running, now)
        plans.plan({Role.PREFILL: {"a": busy(now, 0.1)}}, now, 1e9 + now)
        return plans.target(Role.PREFILL, running, running, now)

    plans.bound(Role.PREFILL, Bounds(3, 3))
    assert told(2.0, 1) == 3
    status = plans.status()["roles"]["prefill"]
    assert (status["min"], status["max"], status["reason"]) == (3, 3, "bounds")
    plans.bound(Role.PREFILL, Bounds(1, 1))
    assert told(4.0, 3) == 1, "at once"
    with pytest.raises(ValueError, match="0 to 8 replicas of prefill are not within 1 to 8"):
        plans.bound(Role.PREFILL, Bounds(0, 8))
    with pytest.raises(ValueError, match="decode is not planned for; prefill are"):
        plans.bound(Role.DECODE, Bounds(1, 1))


class Asked:
    """Ray's `request_resources`: what was asked for; while `broken`, it raises."""

    def __init__(self) -> None:
        self.bundles: list[list[tuple[dict[str, float], dict[str, str]]]] = []
        self.broken = False

    def __call__(self, bundles: list[dict[str, float]], bundle_label_selectors: list[dict[str, str]]) -> None:
        if self.broken:
            raise ConnectionError("the head starts anew")
        self.bundles.append(list(zip(bundles, bundle_label_selectors, strict=True)))


def test_nodes_are_asked_for_as_soon_as_replicas_are_planned_and_kept_while_they_are_there():
    scaled = config(
        prefill={
            "replicas": {"min": 1, "max": 8},
            "num_cpus": 2,
            "num_gpus": 1,
            "reserved_memory_bytes": 1 << 30,
            "resources": {"prefill": 1},
            "label_selector": {"role": "prefill"},
        },
        decode={"replicas": {"min": 2, "max": 4}},
        autoscale={"mode": "act", "nodes": True},
    )
    plans = Plans(planned(scaled), scaled.autoscale)
    asked = Asked()
    nodes = NodeRequests(asked)
    prefill = {"CPU": 2.0, "GPU": 1.0, "memory": float(1 << 30), "prefill": 1.0}, {"role": "prefill"}
    for now in range(0, 60, 2):
        plans.target(Role.PREFILL, 1, 1, now)
        plans.plan({Role.PREFILL: {"a": busy(now, 3.0)}}, now, 1e9 + now)
        nodes.want([*fixed_bundles(scaled), *plans.bundles()], now)
    assert asked.bundles[0].count(prefill) == 1
    assert asked.bundles[0].count(({"CPU": 0.1}, {})) == 2 + 4, "decode's least; keeper, compiler, ingress, retriever"
    target = plans.target(Role.PREFILL, 1, 1, 59.0)
    assert target is not None
    assert asked.bundles[-1].count(prefill) == target > 3
    assert len(asked.bundles) == 2, "only what is new is asked for"
    nodes.want([Bundle({"CPU": 1})], 61.0)
    nodes.want([Bundle({"CPU": 1})], 62.0)
    nodes.want([Bundle({"CPU": 1})], 61.0 + AGAIN_S)
    assert len(asked.bundles) == 4, "and now and then the same, lest others' request has taken its place"


def test_a_request_that_fails_is_made_again_and_the_end_withdraws_it():
    asked = Asked()
    nodes = NodeRequests(asked)
    nodes.withdraw()
    assert asked.bundles == [], "there is none"
    asked.broken = True
    nodes.want([Bundle({"CPU": 1.0}), Bundle()], 0.0)
    asked.broken = False
    nodes.want([Bundle({"CPU": 1.0}), Bundle()], 2.0)
    assert asked.bundles == [[({"CPU": 1.0}, {})]], "what reserves nothing needs no node"
    nodes.withdraw()
    assert asked.bundles[-1] == []
