"""The benchmarks' harness: fair turns, a complete report; and what is recorded in the repository is such a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from serving.bench import harness, models
from serving.bench.command import bench_command
from serving.bench.harness import Arm, Benchmark, Outcome, in_turns
from serving.loadtest import records
from tests.benchmarks import servers
from tests.benchmarks.catalogue import BENCHMARKS

app = typer.Typer()
app.command()(bench_command("python -m tests.benchmarks", "tests.benchmarks.catalogue"))
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
FIELDS = {"name", "command", "versions", "machine", "workload", "arms", "figures"}


def outcome(*_: object) -> Outcome:
    arms = [Arm("ours", "", {"1": [1.0, 3.0, 2.0]}), Arm("theirs", "", {"1": [8.0, 9.0, 7.0]})]
    return Outcome({"turns": 3}, arms, {"speedup": 4.0})


def test_arms_take_turns_and_the_order_reverses():
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "abc"}
    samples = in_turns(arms, 3)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert samples["a"] == [1.0, 6.0, 7.0]


def test_a_report_has_every_field_and_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    benchmark = Benchmark("demo", "", outcome, {"speedup": (">=", 5)})
    document = harness.report(benchmark, outcome(), "orbitserve bench demo", quick=True)
    assert document.keys() >= FIELDS
    assert document["arms"][0]["median_ms"] == {"1": 2.0}
    records.write(document, tmp_path / "deep" / "report.json")
    assert json.loads((tmp_path / "deep" / "report.json").read_text()) == document
    harness.plot(document, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    harness.show(benchmark, document, Console())
    shown = capsys.readouterr().out
    assert "speedup = 4" in shown
    assert "missed" in shown
    assert "quick" in shown


def test_on_a_gpu_roles_share_it_and_what_a_benchmark_asks_for_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "on_gpu", lambda: False)
    alone = servers.bench_config(tmp_path, tmp_path, vision={"replicas": 0})
    assert (alone.prefill.kv_cache_gib, alone.vision.replicas, alone.model.load_format) == (None, 0, "dummy")
    monkeypatch.setattr(servers, "on_gpu", lambda: True)
    shared = servers.bench_config(tmp_path, tmp_path, vision={"replicas": 0}, prefill={"max_queue": 9})
    assert shared.vision.replicas == 0
    assert (shared.prefill.max_queue, shared.prefill.fidelity.share) == (9, 0)
    for role in (shared.prefill, shared.decode, shared.vision):
        assert (role.gpus, role.gpu_memory_utilization) == (servers.GPU_PART,) * 2
    assert shared.prefill.kv_cache_gib == shared.decode.kv_cache_gib == models.GPU_POOL_GIB


def test_a_checkpoint_without_weights_is_given_some(tmp_path: Path):
    assert models.load_format(tmp_path) == "dummy"
    (tmp_path / "model.safetensors").touch()
    assert models.load_format(tmp_path) == "auto"


def test_tables_are_reported_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    benchmark = Benchmark("demo", "", outcome, {})
    measured = Outcome({}, [], {"small": 0.0000123449}, {"loss": {"own": {"8": 0.25, "full": 1.23456e-7}}})
    document = harness.report(benchmark, measured, "orbitserve bench demo", quick=False)
    assert document["tables"] == {"loss": {"own": {"8": 0.25, "full": 1.235e-7}}}
    assert document["figures"] == {"small": 1.234e-5}
    harness.show(benchmark, document, Console())
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("loss", "own", "full", "1.23e-07"))
    harness.plot(document, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_only_some_benchmarks_take_a_model(tmp_path: Path):
    assert BENCHMARKS["patch-rank"].takes_model
    refused = CliRunner().invoke(app, ["patch-form", "--model", str(tmp_path)])
    assert refused.exit_code == 2
    assert "takes no --model" in refused.output
    missing = CliRunner().invoke(app, ["patch-rank", "--model", str(tmp_path)])
    assert missing.exit_code == 2
    assert "config.json" in missing.output
    (tmp_path / "config.json").touch()
    another = CliRunner().invoke(app, ["fidelity", "--model", str(tmp_path)])
    assert another.exit_code == 2
    assert "qwen2_5_vl or qwen3_vl" in " ".join(another.output.split())


def test_sections_are_those_of_the_benchmark():
    for name, said in (("fidelity", "there are splits, shape, orders, drift"), ("patch-form", "takes no --only")):
        refused = CliRunner().invoke(app, [name, "--only", "composition", "--only", "nothing"])
        assert refused.exit_code == 2
        assert said in " ".join(refused.output.split())


def test_the_command_lists_benchmarks_and_refuses_unknown_ones():
    listed = CliRunner().invoke(app, ["list"])
    assert listed.exit_code == 0
    unknown = CliRunner().invoke(app, ["nonsense"])
    assert unknown.exit_code == 2


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_recorded_result_is_a_whole_report_of_a_benchmark_that_exists(path: Path):
    document = json.loads(path.read_text())
    assert document.keys() >= FIELDS
    assert not document["quick"], "quick runs are not to be quoted"
    assert BENCHMARKS[document["name"]].targets_of(document["figures"]).keys() <= document["figures"].keys()


def test_every_benchmark_has_a_recorded_result():
    recorded = {json.loads(path.read_text())["name"] for path in RESULTS}
    assert recorded == BENCHMARKS.keys()


def test_tables_are_written_as_markdown_with_their_uncertainty():
    tables = {
        "accuracy": {"ours": {"one": 0.5, "one ±": 0.1, "two": float("nan")}, "theirs": {"one": 1.0, "two": 0.25}}
    }
    document = harness.report(
        Benchmark("demo", "", outcome, {}), Outcome({}, [], {}, tables), "bench demo", quick=False
    )
    assert "two" not in document["tables"]["accuracy"]["ours"]
    lines = harness.markdown(document).splitlines()
    assert "| | one | two |" in lines
    assert "| ours | 0.5 ± 0.1 |  |" in lines
    assert "| theirs | 1 | 0.25 |" in lines
