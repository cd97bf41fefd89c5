"""Patches compiled from an access log alone: the keys are those of serving, and later requests are linked by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from rich.console import Console
from rig import BLOCK_SIZE, MAX_MODEL_LEN, Linked, Page, Part, Rig

from infra.checkpoints import checkpoint_path
from kvstore.library import Library
from kvstore.operator.patch import PatchKind
from prefill_workers.modes import Text
from prefill_workers.patches.offline_paths import Compiled, PathWorker
from prefill_workers.patches.offline_paths import Path as PatchPath
from serving.access_log import AccessLog, read
from serving.config import OrbitServeConfig
from serving.offline.compile_plan import Kind
from serving.offline.compile_trace import Choice, Planner, Report, compile_paths, compile_trace
from serving.settings import AccessLogSettings

pytestmark = pytest.mark.engine

MODEL = "qwen2_5_vl-tiny"
SYSTEM = "Answer in one word."
PAGES: list[Part] = [1, Page(2), 4]


def config_of(rig: Rig, **prefill: object) -> OrbitServeConfig:
    return OrbitServeConfig.model_validate(
        {
            "model": {
                "path": checkpoint_path(MODEL).absolute(),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
            },
            "prefill": {"block_size": BLOCK_SIZE, "self_check": False, **prefill},
            "patch": {"rank": None, "factors": "model"},
            "library": {"directory": rig.library.settings.directory},
        }
    )


def logged(folder: Path, links: Sequence[Linked], *, free: bool = False, sample: float = 1.0) -> Path:
    log = AccessLog(AccessLogSettings(directory=folder / "logs", sample=sample), "one", MODEL, lambda: 0.0)
    for link in links:
        log.offer(link.plan.request, [0] * len(link.plan.chunks) if free else [], link.result)
    log.close()
    assert (log.written, log.dropped) == (len(links), 0)
    return folder / "logs"


def compiled(rig: Rig, log: Path, choice: Choice, **prefill: object) -> Report:
    """Plan and compile on the rig's engine, as the command does on one of its own."""
    planner = Planner(config_of(rig, **prefill), choice)
    trace = planner.trace(read(log))
    report = planner.report(trace)
    worker = PathWorker(rig.engine, planner.library, planner.form, budget=100)
    for one in compile_paths(worker, planner.library, planner.paths(report.chosen, trace)):
        report.statuses[one.status] += 1
        report.tokens += one.tokens
        report.not_compiled[one.reason] += 1
    planner.library.close()
    return report


def forget_patches(rig: Rig, linked: Linked) -> None:
    rig.settle()
    for chunk in linked.plan.chunks:
        assert rig.library.delete("patch", chunk.keys.own_patch, "local")


def forget_all_patches(rig: Rig) -> None:
    rig.settle()
    directory = rig.library.settings.directory
    assert directory is not None
    stored = list(directory.glob("records/*/patch/*/*/*.arrow"))
    assert stored
    for path in stored:
        rig.library.delete("patch", path.stem, "local")


def test_a_set_is_compiled_from_its_log_under_the_keys_of_serving(make_rig: Callable[..., Rig], tmp_path: Path):
    rig = make_rig(orbit_chunks=0)
    prefix = tuple(rig.engine._llm.get_tokenizer().encode(SYSTEM, add_special_tokens=False))
    served = rig.link([SYSTEM, *PAGES, "?"], prefix=prefix)
    log = logged(tmp_path, [served])
    forget_patches(rig, served)
    assert rig.link([SYSTEM, *PAGES, "?"], prefix=prefix).points == ["recomputed"] * 3
    forget_patches(rig, served)

    unknown = compiled(rig, log, Choice(min_uses=1))
    assert (unknown.chosen.patches, list(unknown.skipped.values())) == ((), [3])
    report = compiled(rig, log, Choice(min_uses=1, kind=Kind.sets, prefixes=[SYSTEM]))
    assert report.statuses == {"stored": 3}
    once = len(prefix) + sum(len(chunk.span) for chunk in served.plan.chunks)
    assert once < report.tokens < once + 32, "each once, behind the prefix as the chat template writes it"
    assert all(rig.library.persisted("patch", chunk.keys.own_patch, "local") for chunk in served.plan.chunks)
    again = compiled(rig, log, Choice(min_uses=1, kind=Kind.sets, prefixes=[SYSTEM]))
    assert (again.statuses, again.tokens) == ({"present": 3}, 0)
    assert (report.chosen.cost.seconds > 0, again.chosen.cost.seconds) == (True, 0)

    linked = rig.link([SYSTEM, "Look: ", *PAGES, "?"], prefix=prefix)
    assert linked.points == ["patched"] * 3
    assert {chunk.kind for chunk in linked.result.chunks} == {PatchKind.own}
    exact = rig.link([SYSTEM, "Look: ", *PAGES, "?"], "exact", prefix=prefix)
    blind = rig.link([SYSTEM, "Look: ", *PAGES, "?"], "full-reuse", prefix=prefix)
    for i in (1, 2):
        assert (linked.chunk_kv(i) - exact.chunk_kv(i)).norm() < 0.5 * (blind.chunk_kv(i) - exact.chunk_kv(i)).norm()


def test_pairs_equal_those_that_serving_forms_and_are_summed(
    make_rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terms = Planner.terms  # of this model's few layers the first two are too many to be worth it
    monkeypatch.setattr(Planner, "terms", lambda planner: replace(terms(planner), first_layers=0.0))
    rig = make_rig(orbit_chunks=2, compose_up_to=3)
    head = rig.plan([1, "?"]).request.chunks[0].start
    links = [rig.link([*pages, "?"], head=head) for pages in ([1, Page(2)], [1, 4], [Page(2), 4], PAGES)]
    pairs = [rig.linker.keys(link.plan.request)[1].set_patch for link in links[:3]]
    formed = [rig.library.get_patch(key, "local") for key in pairs]
    forget_all_patches(rig)
    log = logged(tmp_path, links)

    report = compiled(rig, log, Choice(min_uses=1, kind=Kind.pairs), compose_up_to=3)
    assert report.statuses == {"stored": len(report.chosen.patches)}
    assert compiled(rig, log, Choice(min_uses=1, kind=Kind.pairs), compose_up_to=3).chosen.cost.seconds == 0
    for key, record in zip(pairs, formed, strict=True):
        found = rig.library.get_patch(key, "local")
        assert record is not None
        assert found is not None
        assert (found.key, found.antecedents, found.patch.kind) == (key, record.antecedents, PatchKind.pair)
        torch.testing.assert_close(found.patch.dense(), record.patch.dense(), rtol=1e-3, atol=1e-3)
    linked = rig.link([*PAGES, "?"])
    assert linked.points == ["patched", "patched", "composed"]
    assert linked.result.chunks[2].reason == "weighted sum of the stored pair patches behind 2 antecedents"


def test_free_requests_share_compiled_beginnings_and_the_plan_that_saves_more_is_compiled(
    make_rig: Callable[..., Rig], tmp_path: Path
):
    rig = make_rig(orbit_chunks=0, compose_up_to=3)
    links = [rig.link([*pages, "?"]) for pages in ([1, Page(2), 4], [Page(2), 1, 4], [3, 1, Page(2)])]
    forget_all_patches(rig)
    report = compiled(rig, logged(tmp_path, links, free=True), Choice())
    sets, pairs = report.plans
    assert (sets.kind, pairs.kind) == (Kind.sets, Kind.pairs)
    assert sets.saves > pairs.saves > 0, "two of three requests begin alike, and a sum has to be weighed"
    assert report.chosen is sets
    assert report.statuses["stored"] == len(report.chosen.patches) > 0
    assert sets.saves <= sets.most <= sets.possible * (1 + 1e-9)


def test_requests_whose_patches_text_keys_are_skipped_with_the_reason(make_rig: Callable[..., Rig], tmp_path: Path):
    rig = make_rig(orbit_chunks=0)
    long = "which was printed before this one: "
    links = [rig.link([1, long, Page(2), "?"], text=text) for text in (Text.AUTO, Text.FREE)]
    links.append(rig.link([1, " ", Page(2), "?"], text=Text.STRICT))
    report = compiled(rig, logged(tmp_path, links), Choice(min_uses=1, kind=Kind.sets))
    assert report.skipped == {"text keys its patches (orbit.text, prefill.free_text), and is not logged": 4}
    assert len(report.chosen.patches) > 0, "of the request that no text matters to"


def test_a_chunk_whose_embeddings_or_tokens_are_gone_is_skipped_with_the_reason(
    make_rig: Callable[..., Rig], tmp_path: Path
):
    rig = make_rig(orbit_chunks=0)
    served = rig.link([1, 4, Page(2), "?"])
    log = logged(tmp_path, [served])
    forget_patches(rig, served)
    first, second, text = rig.linker.keys(served.plan.request)
    record = rig.library.get_canonical(text.canonical, "local")
    assert record is not None
    assert record.token_ids == tuple(rig.engine._llm.get_tokenizer().encode(Page(2).text, add_special_tokens=False))
    assert rig.library.delete("canonical", text.canonical, "local")
    rig.library.put(replace(record, token_ids=None))  # as libraries of before have it
    rig.settle()
    planner = Planner(config_of(rig), Choice(min_uses=1, kind=Kind.sets))
    trace = planner.trace(read(log))
    assert trace.skipped == {"the tokens of a text document are not stored": 1}
    paths = list(planner.paths(planner.report(trace).chosen, trace))
    assert len(paths) == 2

    assert second.embedding is not None
    rig.library.delete("canonical", first.canonical, "local")  # evicted: computed again
    rig.library.delete("embedding", second.embedding, "local")  # since the plan was made
    worker = PathWorker(rig.engine, planner.library, planner.form, budget=100)
    one, two = compile_paths(worker, planner.library, paths)
    assert (one.status, two.status, two.reason) == ("stored", "skipped", "its embeddings are not stored")
    assert rig.library.persisted("canonical", first.canonical, "local")
    planner.library.close()
    again = compiled(rig, log, Choice(min_uses=1))
    assert again.skipped == {"embeddings are not stored": 2}  # and what stands behind it


def test_a_dry_run_prints_the_plan_and_computes_nothing(
    make_rig: Callable[..., Rig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rig = make_rig(orbit_chunks=0)
    served = rig.link([1, 4, "?"])
    forget_patches(rig, served)
    log = logged(tmp_path, [served])
    done = compile_trace(
        config_of(rig), log, Choice(min_uses=1, kind=Kind.sets), Console(width=200), dry_run=True, json_file=None
    )
    assert done
    text = capsys.readouterr().out
    assert "sets: saves" in text
    assert "dry run: nothing was compiled" in text
    assert not any(rig.library.has("patch", chunk.keys.own_patch, "local") for chunk in served.plan.chunks)


def test_patches_that_are_not_there_in_the_end_are_no_success(
    make_rig: Callable[..., Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rig = make_rig(orbit_chunks=0)
    served = rig.link([1, 4, "?"])
    forget_patches(rig, served)
    log = logged(tmp_path, [served])

    class Evicting(PathWorker):
        """Of a library that makes room for the second patch by taking the first."""

        def compile(self, path: PatchPath) -> Compiled:
            found = super().compile(path)
            self._library.flush()
            if len(path.chunks) == 2:
                forget(self._library)
            return found

    def forget(library: Library) -> None:
        chunk = served.plan.chunks[0]
        assert library.delete("patch", chunk.keys.own_patch, "local")

    monkeypatch.setattr(
        "serving.offline.compile_trace._worker",
        lambda planner: Evicting(rig.engine, planner.library, planner.form, budget=100),
    )
    json_file = tmp_path / "report.json"
    choice = Choice(min_uses=1, kind=Kind.sets)
    asked = (config_of(rig), log, choice, Console(width=200))
    assert not compile_trace(*asked, dry_run=False, json_file=json_file)
    assert json.loads(json_file.read_text())["compiled"] == {"stored": 2, "tokens": ANY, "unwritten": 0, "absent": 1}
    assert "1 patches are not there any more" in capsys.readouterr().out
