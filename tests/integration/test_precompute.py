"""The offline caching job on real parts: killed and resumed, shared by two workers, and linked by a first request."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray.data import DataContext
from rig import BLOCK_SIZE, MAX_MODEL_LEN, Rig, image
from video_support import video
from vllm.outputs import CompletionOutput, RequestOutput

from infra.checkpoints import checkpoint_path
from kvstore.library import Library, LibrarySettings
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.patches.patch_compiler import load_form
from serving.api.app import build_api
from serving.config import OrbitServeConfig
from serving.engine_spec import front_end_config
from serving.frontend.engine_client import LinkedEngineClient
from serving.offline.precompute import outcomes
from serving.offline.precompute_ledger import Outcome
from serving.offline.precompute_manifest import Manifest
from serving.settings import HttpSettings

pytestmark = [pytest.mark.engine, pytest.mark.cluster]

PREFIX = "Answer in one word."
TOOLS = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object", "properties": {}}}}]
STORED_WITHIN_SECONDS = 300
SINGLE = range(24)  # images that are entries of their own
SEGMENTS = {"segment_seconds": 4}  # three of the video
BAD = {"broken.png": "not an image", "missing.png": "no such file", "empty.png": "0 bytes"}


@dataclass(frozen=True)
class Job:
    """A job that was killed, and run again by two workers until it was done."""

    folder: Path
    config: OrbitServeConfig
    before: dict[str, int]  # files of the records that the killed job left, with their inodes
    after: dict[str, int]
    outcomes: dict[str, Outcome]


def records(library: Path) -> dict[str, int]:
    return {str(path.relative_to(library)): path.stat().st_ino for path in library.glob("records/*/*/*/*/*.arrow")}


def kinds(paths: Sequence[str]) -> Counter[str]:
    return Counter(path.split("/")[2] for path in paths)


def write_manifest(folder: Path) -> Path:
    for number in SINGLE:
        image(number).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n")
    (folder / "empty.png").touch()
    lines: list[Any] = [{"id": str(number), "path": f"{number}.png"} for number in SINGLE]
    # Each entry twice, far apart: they are likely to meet in two workers at once.
    sets = [
        {"id": "own", "images": ["1.png", "2.png"], "prefix": PREFIX},
        {"id": "orbit", "images": ["3.png", "4.png", "5.png"], "prefix": PREFIX, "patches": "orbit"},
        {"id": "tools", "path": "2.png", "prefix": PREFIX, "tools": TOOLS},
        {"id": "alice", "images": ["1.png", "2.png"], "tenant": "alice", "patches": "none"},
    ]
    lines[8:8] = [*sets, *({"id": name, "path": name} for name in BAD), "not an object"]
    lines += [{**entry, "id": f"{entry['id']} again"} for entry in sets]
    (folder / "clip.mp4").write_bytes(video())
    lines.append({"id": "clip", "path": "clip.mp4", "video": SEGMENTS})
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("precompute")
    manifest = write_manifest(folder)
    library = folder / "library"
    config = OrbitServeConfig.model_validate(
        {
            "model": {
                "path": checkpoint_path("qwen2_5_vl-tiny").absolute(),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
            },
            "prefill": {"block_size": BLOCK_SIZE, "self_check": False},
            "library": {"directory": library},
            "files_url": str(folder / "files"),
            "precompute": {"workers": 2, "images_in_memory": 3},
        }
    )
    (folder / "config.yaml").write_text(config.to_yaml())
    kill_once_it_has_stored(6, manifest, folder / "config.yaml", library)
    before = records(library)
    DataContext.get_current().wait_for_min_actors_s = 120  # neither worker begins before the other is up
    source = Manifest(str(manifest))
    done = {outcome.name: outcome for outcome in outcomes(config, source, source.count())}
    return Job(folder, config, before, records(library), done)


def kill_once_it_has_stored(patches: int, manifest: Path, config: Path, library: Path) -> None:
    """Run the command and kill it, with -9, when so many patches are stored; then wait until its workers are gone.

    However that goes, nothing of it is left running.
    """
    command = [sys.executable, "-c", "from serving.cli.main import main; main()", "precompute", str(manifest)]
    process = subprocess.Popen([*command, "--config", str(config), "--workers", "1"])
    family: list[psutil.Process] = []
    deadline = time.monotonic() + STORED_WITHIN_SECONDS
    try:
        while kinds(list(records(library)))["patch"] < patches:
            assert process.poll() is None, "the job ended by itself"
            assert time.monotonic() < deadline, f"in {STORED_WITHIN_SECONDS} s it has not stored {patches} patches"
            time.sleep(0.005)
        family = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in family if "Worker" in child.name()]
        assert workers
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive, "workers survived the job"
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for agent in family:  # of Ray; they would notice within a minute
            with suppress(psutil.NoSuchProcess):
                agent.kill()


def test_every_good_entry_is_done_and_every_bad_one_named_with_its_reason(job: Job):
    failed = {name: outcome.reason or "" for name, outcome in job.outcomes.items() if outcome.status == "failed"}
    assert {name: reason in failed[name] for name, reason in BAD.items()} == dict.fromkeys(BAD, True)
    assert failed["manifest.jsonl:16"] == "an entry is an object, not str"
    assert len(failed) == len(BAD) + 1
    assert len(job.outcomes) == len((job.folder / "manifest.jsonl").read_text().splitlines())


def test_what_was_stored_before_the_kill_is_not_computed_again(job: Job):
    assert job.before, "the job was killed before it had stored anything"
    assert len(job.before) < len(job.after), "the job was killed when it was done"
    assert {path: job.after[path] for path in job.before} == job.before  # the same files, not written again
    assert {outcome.status for outcome in job.outcomes.values()} == {"stored", "present", "failed"}


def test_two_workers_compute_nothing_twice(job: Job):
    computed = Counter(
        {
            "canonical": sum(outcome.canonicals for outcome in job.outcomes.values()),
            "embedding": sum(outcome.embeddings for outcome in job.outcomes.values()),
            "patch": sum(outcome.patches for outcome in job.outcomes.values()),
        }
    )
    assert computed == kinds([path for path in job.after if path not in job.before])
    chunks, sets = len(SINGLE) + 3, 3 + 3 * 4
    wanted = Counter({"canonical": chunks + 2, "embedding": chunks + 2, "patch": chunks + sets})
    assert kinds(list(job.after)) == wanted


class RigRoles:
    """`serving.frontend.roles.Roles` on a rig: real links, a canned answer."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    async def prefetch(self, request: Any) -> Sequence[str]:
        self._rig.linker.prefetch(request)
        return ()

    async def encode(self, items: Any) -> Any:
        return self._rig.engine.encode(items)

    async def link(self, request: Any, indices: Sequence[int], embeddings: Any) -> Any:
        plan = self._rig.linker.plan(request, dict(zip(indices, embeddings, strict=True)))
        result = self._rig.loop.submit(plan).result(60)
        self._rig.loop.abandon(result.lease)
        return result

    async def generate(self, token_ids: list[int], *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        answer = CompletionOutput(0, "yes", [1], None, None, finish_reason="stop")
        yield RequestOutput("canned", None, token_ids, None, [answer], finished=True)

    async def renew(self, lease: str) -> Any:
        return self._rig.loop.renew(lease)

    async def keep_answer(self, lease: str, token_ids: Sequence[int], offer: Any = None) -> None:
        self._rig.loop.keep_answer(lease, token_ids)

    async def abandon(self, *_: Any) -> None:
        pass


@pytest.fixture
def ask(job: Job, fp32: PrefillEngine) -> Any:
    """Asks the HTTP application about images and videos, over the job's library; returns the `orbit` report."""
    library = Library(LibrarySettings(directory=job.folder / "library"), fp32.fingerprint)
    rig = Rig(fp32, job.folder / "library", library=library, form=load_form(job.config.patch, library))

    async def ask(
        shown: Sequence[int | str], prefix: str | None, config: OrbitServeConfig = job.config, **fields: Any
    ) -> dict[str, Any]:
        client = LinkedEngineClient(front_end_config(config.model, 0.1), RigRoles(rig))
        api = await build_api(client, config, on_delete=lambda *_: None)
        content: list[Any] = [{"type": "text", "text": "Look at "}]
        for one in shown:
            kind, name, media = ("image", f"{one}.png", "png") if isinstance(one, int) else ("video", one, "mp4")
            data = base64.b64encode((job.folder / name).read_bytes()).decode()
            url = f"data:{kind}/{media};base64,{data}"
            content.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
        messages = [{"role": "system", "content": prefix}] if prefix else []
        body = {"model": "qwen2_5_vl-tiny", "messages": [*messages, {"role": "user", "content": content}], **fields}
        headers = {"Authorization": "Bearer alices"} if config.http.api_keys else {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://test") as http:
            response = await http.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()["orbit"]

    ask.rig = rig  # type: ignore[attr-defined]
    yield ask
    rig.close()


@pytest.mark.parametrize(
    ("numbers", "prefix", "kinds"),
    [
        ([0], None, ["own"]),
        ([1, 2], PREFIX, ["own", "own"]),
        ([3, 4, 5], PREFIX, ["orbit", "pair", "orbit"]),
        ([5, 3, 4], PREFIX, ["orbit", "pair", "orbit"]),
    ],
)
async def test_a_first_request_over_precomputed_images_is_a_pure_link(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, numbers: list[int], prefix: str | None, kinds: list[str]
):
    monkeypatch.setattr(ask.rig.library, "get_embedding", pytest.fail)  # type: ignore[attr-defined]
    report = await ask(numbers, prefix)
    assert [chunk["operating_point"] for chunk in report["chunks"]] == ["patched"] * len(numbers)
    reasons = [chunk["reason"] for chunk in report["chunks"]]
    assert reasons == [f"stored {kind} patch for these antecedents" for kind in kinds]
    assert report["tokens_reused"] == sum(chunk["tokens"] for chunk in report["chunks"])
    assert report["vision_tokens_encoded"] == 0


async def test_segments_of_a_precomputed_video_are_linked_and_a_later_window_encodes_nothing(ask: Callable[..., Any]):
    whole = await ask(["clip.mp4"], None, orbit={"video": SEGMENTS})
    assert [chunk["operating_point"] for chunk in whole["chunks"]] == ["patched"] * 3
    later = await ask(["clip.mp4"], None, orbit={"video": {**SEGMENTS, "start_seconds": 4}})
    assert len(later["chunks"]) == 2
    assert (whole["vision_tokens_encoded"], later["vision_tokens_encoded"]) == (0, 0)


async def test_what_was_stored_behind_tools_is_found_by_requests_that_bring_them(ask: Callable[..., Any]):
    (found,) = (await ask([2], PREFIX, tools=TOOLS))["chunks"]
    assert found["operating_point"] == "patched"
    (without,) = (await ask([4], PREFIX, tools=TOOLS))["chunks"]
    assert without["operating_point"] == "recomputed"


async def test_content_is_its_tenants_and_without_patches_only_the_encoder_is_spared(ask: Callable[..., Any], job: Job):
    alices = job.config.model_copy(update={"http": HttpSettings.model_validate({"api_keys": {"alices": "alice"}})})
    report = await ask([1, 2], None, alices)
    assert [chunk["operating_point"] for chunk in report["chunks"]] == ["recomputed"] * 2
    assert report["vision_tokens_encoded"] == 0
    (not_hers,) = (await ask([3], None, alices))["chunks"]
    assert not_hers["operating_point"] == "encoded"
