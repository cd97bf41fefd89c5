"""Manifests in every form: what they say, what is wrong with them, and that reading streams."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_mock import s3_mock

from serving.offline.precompute_manifest import (
    Entry,
    ImageSource,
    Manifest,
    ManifestError,
    Owners,
    file_system,
    from_table,
    to_table,
)


def write_lines(folder: Path, *lines: object) -> str:
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def only(location: str) -> Entry:
    (entry,) = Manifest(location).entries()
    return entry


def test_a_folder_is_every_image_and_video_in_it(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.png", "A.JPG", "deep/er/c.webp", "d.mp4", "notes.txt"):
        (tmp_path / name).touch()
    manifest = Manifest(str(tmp_path))
    entries = list(manifest.entries())
    assert manifest.count() == 4
    assert [entry.name for entry in entries] == ["A.JPG", "b.png", "d.mp4", "deep/er/c.webp"]
    assert [entry.images[0].location for entry in entries] == [f"file://{tmp_path}/{entry.name}" for entry in entries]
    assert {(entry.patches, entry.prefix, entry.tenant) for entry in entries} == {("own", "", "local")}


def test_a_line_names_one_image_or_a_set(tmp_path: Path):
    location = write_lines(
        tmp_path,
        {"path": "pages/1.png"},
        "",
        {"id": 7, "images": ["1.png", {"url": "s3://bucket/2.png"}, {"path": "/3.png"}], "prefix": "Be brief."},
        {"url": "data:image/png;base64,AAAA", "tenant": "alice", "tools": [{"type": "function"}], "patches": "orbit"},
        {"bytes": base64.b64encode(b"pixels").decode(), "tenant": None},
        {"image": {"bytes": base64.b64encode(b"pixels").decode(), "path": "its name"}},
        {"path": "/a.mp4", "video": {"segment_seconds": 4}},
    )
    manifest = Manifest(location)
    assert manifest.count() == 6
    assert list(manifest.entries()) == [
        Entry(0, "manifest.jsonl:1", (ImageSource(f"file://{tmp_path}/pages/1.png"),)),
        Entry(
            1,
            "7",
            (ImageSource(f"file://{tmp_path}/1.png"), ImageSource("s3://bucket/2.png"), ImageSource("/3.png")),
            prefix="Be brief.",
        ),
        Entry(
            2,
            "manifest.jsonl:4",
            (ImageSource("data:image/png;base64,AAAA"),),
            tenant="alice",
            tools='[{"type": "function"}]',
            patches="orbit",
        ),
        Entry(3, "manifest.jsonl:5", (ImageSource(data=b"pixels"),)),
        Entry(4, "manifest.jsonl:6", (ImageSource(data=b"pixels"),)),
        Entry(5, "manifest.jsonl:7", (ImageSource("/a.mp4"),), video='{"segment_seconds":4.0}'),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "Expecting property name"),
        ("[1, 2]", "an entry is an object, not list"),
        ({}, "an image has a path, a url or bytes"),
        ({"path": "a.png", "url": "b.png"}, "not several"),
        ({"path": "a.png", "images": ["b.png"]}, "give one of path, url, bytes, image and images"),
        ({"images": []}, "images: List should have at least 1 item"),
        ({"images": ["a.png", {"file": "b.png"}]}, r"images.1.*"),
        ({"path": "a.png", "patchs": "orbit"}, "patchs: Extra inputs are not permitted"),
        ({"path": "a.mp4", "video": {"segment_seconds": 0.1}}, "video.segment_seconds: Input should be greater"),
        ({"path": "a.png", "patches": "all"}, "patches: Input should be 'own', 'orbit' or 'none'"),
        ({"path": "a.png", "tenant": ""}, "tenant: String should have at least 1 character"),
        ({"bytes": "not base64!"}, "bytes: .*base64"),
        ({"path": "a.png", "tools": "turn"}, "tools: .*Expecting value"),
        ({"path": "a.png", "tools": [{"name": "\ud800"}]}, "tools: .*surrogates not allowed"),
        ({"path": "a.png", "tools": {"name": "turn"}}, "tools: Input should be a valid list"),
        ('{"path": "\\ud800.png"}', "path: .*surrogates not allowed"),
    ],
)
def test_a_bad_entry_says_what_is_wrong_and_the_next_one_is_read(tmp_path: Path, line: object, reason: str):
    location = write_lines(tmp_path, line, {"path": "good.png"})
    bad, good = Manifest(location).entries()
    assert bad.name == "manifest.jsonl:1"
    assert bad.error is not None
    assert re.search(reason, bad.error)
    assert good.error is None


def test_what_names_no_tenant_is_the_jobs_and_what_no_key_reaches_is_refused(tmp_path: Path):
    (tmp_path / "a.png").touch()
    lines = ({"path": "1.png", "tenant": who} for who in (None, "bob", "dynamic-library", "carol"))
    location = write_lines(tmp_path, *lines)
    owners = Owners("alice", frozenset({"alice", "bob"}))
    *good, bad = Manifest(location, owners=owners).entries()
    assert [(entry.tenant, entry.error) for entry in good] == [(t, None) for t in ("alice", "bob", "dynamic-library")]
    assert bad.error is not None
    assert "no API key is of tenant 'carol'" in bad.error
    assert [entry.tenant for entry in Manifest(str(tmp_path), owners=owners).entries()] == ["alice"]
    assert [entry.tenant for entry in Manifest(str(tmp_path), owners=Owners("carol")).entries()] == ["carol"]
    with pytest.raises(ManifestError, match=r"no API key is of tenant 'local': .* name one of alice, bob, dynamic"):
        Manifest(str(tmp_path), owners=Owners(known=owners.known))


def test_a_row_names_one_image_or_a_set_and_may_carry_it(tmp_path: Path):
    path = tmp_path / "manifest.parquet"
    rows = [
        {"id": "a", "image": {"bytes": b"one", "path": "one.png"}, "images": None, "tools": "[{}]", "caption": "no"},
        {"id": None, "image": None, "images": ["two.png", "three.png"], "caption": "either"},
        {"id": None, "image": None, "images": None, "caption": "nothing"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    manifest = Manifest(str(path))
    first, second, third = manifest.entries()
    assert manifest.count() == 3
    assert first == Entry(0, "a", (ImageSource(data=b"one"),), tools="[{}]")
    assert [image.location for image in second.images] == [f"file://{tmp_path}/{n}.png" for n in ("two", "three")]
    assert (third.name, third.error) == ("manifest.parquet:2", "an image has a path, a url or bytes")


def test_tools_in_parquet_are_text(tmp_path: Path):
    """Rows of a structured column have one another's fields, as nulls that no request has."""
    path = tmp_path / "manifest.parquet"
    pq.write_table(pa.Table.from_pylist([{"path": "a.png", "tools": [{"type": "function"}]}]), path)
    for read in (lambda: Manifest(str(path)).count(), lambda: list(Manifest(str(path)).entries())):
        with pytest.raises(ManifestError, match=r"the column tools is list.* not JSON text"):
            read()
    pq.write_table(pa.Table.from_pylist([{"path": "a.png", "tools": ""}, {"path": "b.png", "tools": None}]), path)
    assert [entry.tools for entry in Manifest(str(path)).entries()] == ["", ""]


def test_a_manifest_may_lie_behind_a_url_and_its_images_beside_it():
    with fsspec.open("memory://precompute-manifest/list.jsonl", "w") as file:
        file.write('{"path": "1.png"}\n')
    assert only("memory://precompute-manifest/list.jsonl").images[0].location == "memory:///precompute-manifest/1.png"


def test_a_manifest_on_s3_is_read_with_the_options_of_its_protocol():
    with s3_mock() as server:
        options = {"s3": server}
        bucket, _ = file_system("s3://pages/", options)
        bucket.mkdir("pages")
        bucket.pipe_file("pages/list.jsonl", b'{"path": "deep/1.png"}\n{"path": "s3://other/2.png"}\n')
        bucket.pipe_file("pages/deep/1.png", b"pixels")
        lines = [entry.images[0].location for entry in Manifest("s3://pages/list.jsonl", options).entries()]
        assert lines == ["s3://pages/deep/1.png", "s3://other/2.png"]
        assert [entry.name for entry in Manifest("s3://pages", options).entries()] == ["deep/1.png"]
        with pytest.raises(ManifestError, match=r"s3://pages/missing\.jsonl: there is no such manifest"):
            Manifest("s3://pages/missing.jsonl", options)


def test_the_first_entries_alone_are_read_when_no_more_are_asked_for(tmp_path: Path):
    path = tmp_path / "manifest.jsonl"
    path.write_bytes(b'{"path": "1.png"}\n' * 3 + b"\xff\n")
    manifest = Manifest(str(path))
    assert [entry.number for entry in manifest.entries(limit=2)] == [0, 1]
    assert manifest.count(limit=2) == 2
    assert [entry.error is None for entry in manifest.entries()] == [True, True, True, False]


def test_entries_travel_as_arrow(tmp_path: Path):
    entries = [
        Entry(0, "a", (ImageSource("x"), ImageSource(data=b"y")), "alice", "Be brief.", "orbit"),
        Entry(1, "b", error="bad"),
    ]
    assert from_table(to_table(entries)) == entries


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("nothing.jsonl", None, "there is no such manifest"),
        ("list.txt", b"a.png", "a manifest is a folder of images and videos, or a file .jsonl"),
        ("empty.jsonl", b"\n", "the manifest is empty"),
        ("broken.parquet", b"PAR1", "cannot be read"),
    ],
)
def test_an_unusable_manifest_is_refused_with_its_name(tmp_path: Path, name: str, content: bytes | None, reason: str):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ManifestError, match=f"{name}: .*{reason}"):
        Manifest(str(tmp_path / name)).count()


def test_a_parquet_file_without_images_and_an_unknown_protocol_are_refused(tmp_path: Path):
    pq.write_table(pa.table({"caption": ["x"]}), tmp_path / "captions.parquet")
    with pytest.raises(ManifestError, match=r"no column names images .* there are caption"):
        Manifest(str(tmp_path / "captions.parquet")).count()
    with pytest.raises(ManifestError, match=r"nonesuch://bucket/list.jsonl: .*nonesuch"):
        Manifest("nonesuch://bucket/list.jsonl")
    with pytest.raises(ManifestError, match="the folder holds no images"):
        Manifest(str(tmp_path)).count()
