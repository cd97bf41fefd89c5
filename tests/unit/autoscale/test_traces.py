"""Traces: public formats, generated shapes, and what is no trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from autoscale.traces import BadTrace, generated, opened, servegen

TRACES = Path(os.environ.get("ORBITSERVE_TRACES", "/nowhere"))


def test_mooncake_blocks_name_what_stands_before_them(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 11]}
    path.write_text(json.dumps(row) + "\n")
    (request,) = opened(path)
    assert (request.at, request.text, request.output) == (1.5, 1100 - 1024, 7)
    assert [(chunk.content, chunk.tokens, chunk.is_prefix) for chunk in request.chunks] == [
        ("block-4", 512, True),
        ("block-9", 512, True),
    ]
    assert request.prompt == 1100


def test_azure_rows_count_from_the_first(tmp_path: Path):
    path = tmp_path / "conv.csv"
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    ]
    path.write_text("\n".join(rows) + "\n")
    first, second = opened(path)
    assert (first.at, first.text, first.output) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.31458, abs=1e-4)


def test_servegen_draws_rates_sizes_and_repeats(tmp_path: Path):
    (tmp_path / "chunk-0-trace.csv").write_text("0,2.0,1.0,Gamma,1.0,0.5\n600,0,0,,,\n1200,4.0,1.0,Weibull,1.0,0.25\n")
    fields = {
        "text_tokens": "{100: 1.0}",
        "image_tokens": "{600: 0.5, 0: 0.5}",
        "image_count": "{2: 1.0}",
        "output_tokens": "{9: 1.0}",
    }
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": fields}))
    requests = list(servegen(tmp_path, 0.5, seconds=1800.0))
    assert len([one for one in requests if one.at < 600]) == pytest.approx(1200, rel=0.15)
    assert not [one for one in requests if 600 <= one.at < 1200]
    assert len([one for one in requests if one.at >= 1200]) == pytest.approx(2400, rel=0.15)
    images = [chunk for one in requests for chunk in one.chunks]
    assert {len(one.chunks) for one in requests} == {0, 2}
    assert {image.tokens for image in images} == {300}
    assert len({image.content for image in images}) / len(images) == pytest.approx(0.5, abs=0.05)
    assert list(servegen(tmp_path, 0.5, seconds=1800.0)) == requests, "the same seed draws the same"


def test_a_bursty_shape_follows_its_rates():
    requests = list(generated("bursty", 15.0, 600.0, seed=1))
    counts = [sum(100 * i <= one.at < 100 * (i + 1) for one in requests) / 100 for i in range(6)]
    assert counts == pytest.approx([15, 2, 10, 15, 5, 2], rel=0.25)


def test_a_wavering_shape_stays_within_a_twentieth_of_its_mean():
    times = [one.at for one in generated("wavering", 21.0, 600.0, seed=1)]
    waves = np.array([np.exp(12j * np.pi * at / 600.0) for at in times])
    assert len(times) == pytest.approx(12_000, rel=0.03)
    assert 2 * abs(waves.mean()) == pytest.approx(0.05, abs=0.03), "0.1 of 2"


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", '{"hash_ids": 3}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"]
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "what.csv"
    path.write_text(text)
    with pytest.raises(BadTrace, match=r"what\.csv"):
        list(opened(path))
    with pytest.raises(BadTrace, match="no shape 'square'"):
        list(generated("square", 1.0, 1.0))
    with pytest.raises(BadTrace, match="of ServeGen in this folder"):
        list(servegen(tmp_path, 0.1))


@pytest.mark.skipif(not TRACES.is_dir(), reason="ORBITSERVE_TRACES names no folder of public traces")
def test_the_public_files_are_read():
    assert sum(1 for _ in opened(TRACES / "mooncake" / "conversation_trace.jsonl")) == 12_031
    assert sum(1 for _ in opened(TRACES / "azure-2023" / "code.csv")) == 8_819
