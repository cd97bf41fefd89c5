"""Videos in the offline caching job, up to what its engine computes."""

from __future__ import annotations

from typing import Any

import pytest
from video_support import animation, video

from infra.reference import WEIGHTS
from prefill_workers.protocol import LinkRequest
from serving.config import OrbitServeConfig
from serving.offline.precompute_manifest import Entry, ImageSource
from serving.offline.precompute_prepare import EntryError, Preparer


class Offline:
    """`OfflineWorker` without an engine: a record's name is all that its key depends on."""

    capacity = 4096

    def wanted(self, request: LinkRequest, patches: Any) -> list[Any]:
        ids = request.token_ids
        return [
            (
                "canonical",
                (span.content, tuple(ids[span.start : span.first]), tuple(ids[span.first + span.count : span.stop])),
            )
            for span in request.chunks
        ]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OrbitServeConfig:
    model = {"path": WEIGHTS / request.param, "dtype": "float32", "max_model_len": 4096}
    return OrbitServeConfig.model_validate({"model": model, "files_url": str(tmp_path_factory.mktemp("files"))})


async def test_a_video_is_segments_whose_names_are_known_before_it_is_decoded(config: OrbitServeConfig):
    looked_for: list[Any] = []
    preparer = await Preparer.create(config, Offline(), lambda names, tenant: looked_for.append(names))
    sources = (ImageSource(data=video()), ImageSource(data=animation("GIF", 1)))
    entry = Entry(0, "clip", sources, video='{"segment_seconds": 4}')
    task = await preparer.task(entry)
    assert task is not None
    assert [span.modality for span in task.request.chunks] == ["video"] * 3 + ["image"]
    assert looked_for == [task.wanted]

    with pytest.raises(EntryError, match="inline image: the video cannot be read: it is truncated"):
        await preparer.task(Entry(1, "cut", (ImageSource(data=video()[:400]),)))
    orbit = Entry(2, "many", (ImageSource(data=video()),), patches="orbit", video='{"segment_seconds": 2}')
    with pytest.raises(EntryError, match="orbit patches of 6 images and clips: at most 5"):
        await preparer.task(orbit)
