"""`orbitserve library`, on a directory and on an fsspec URL."""

from __future__ import annotations

import json
import os
import tarfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from kvstore_support import FINGERPRINT, canonical, embedding_of, patch_of
from typer.testing import CliRunner, Result

from kvstore.library import Library
from kvstore.records.keys import DYNAMIC_TENANT
from kvstore.records.record import Record
from kvstore.search.index import Part
from kvstore.search.record import index_record
from kvstore.settings import LibrarySettings
from kvstore.tiers.base import Tier
from kvstore.tiers.paths import fingerprint_digest, path_of, tenant_digest
from kvstore.tiers.stack import tier_for_url
from kvstore.uploads.files import FileStore
from kvstore.uploads.vector_stores import VectorStores
from prefill_workers.engine.fingerprint import fingerprint
from serving.cli.library import parse_bytes
from serving.cli.main import app

MODEL = fingerprint_digest(FINGERPRINT)


def run(*arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(app, ["library", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result


def fill(location: str, records: list[Record]) -> Tier:
    """A library with these records, closed."""
    tier = tier_for_url(location)
    with Library(LibrarySettings(), records[0].fingerprint, [tier]) as library:
        for record in records:
            library.put(record)
    return tier


def spoil(tier: Tier, path: str, place: int = -200) -> None:
    """Flips one bit of a stored blob."""
    data = bytearray(memoryview(tier.get(path)))
    data[place] ^= 1
    tier.put(path, [pa.py_buffer(bytes(data))])


@pytest.fixture(params=["directory", "url"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "library") if request.param == "directory" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def records() -> list[Record]:
    one, two = canonical("one"), canonical("two", tenant="rival")
    return [one, two, patch_of(one, [two.content]), embedding_of(one)]


@pytest.fixture
def tier(location: str, records: list[Record]) -> Tier:
    return fill(location, records)


def listed(location: str, *options: str) -> list[dict[str, Any]]:
    return json.loads(run("ls", "--library", location, "--json", *options).stdout)["records"]


def test_ls_lists_filters_and_adds_up(tier: Tier, location: str, records: list[Record]) -> None:
    document = json.loads(run("ls", "--library", location, "--json").stdout)
    assert {row["key"] for row in document["records"]} == {record.key for record in records}
    assert document["totals"]["canonical"]["records"] == 2
    assert document["totals"]["all"]["bytes"] == tier.size_bytes("records/")
    assert {row["key"] for row in listed(location, "--tenant", "rival")} == {records[1].key}
    assert {row["key"] for row in listed(location, "--kind", "patch")} == {records[2].key}
    assert len(listed(location, "--model", MODEL)) == 4
    assert listed(location, "--model", "0" * 16) == []
    shown = run("ls", "--library", location).output
    assert all(record.key[:16] in shown for record in records)


def test_inspect_tells_everything_about_one_record(tier: Tier, location: str, records: list[Record]) -> None:
    record = records[0]
    document = json.loads(run("inspect", record.key[:20], "--library", location).stdout)
    assert (document["key"], document["tenant"], document["kind"]) == (record.key, "acme", "canonical")
    assert [layer["sound"] for layer in document["layers"]] == [True] * 3
    spoil(tier, path_of(record), place=len(memoryview(tier.get(path_of(record)))) // 2)
    run("inspect", record.key, "--library", location, status=1)
    assert "no record begins" in run("inspect", "f" * 64, "--library", location, status=2).output
    assert "4 records begin" in run("inspect", "", "--library", location, status=2).output


def test_verify_finds_every_damaged_record(tier: Tier, location: str, records: list[Record]) -> None:
    assert "4 sound, 0 corrupt" in run("verify", "--library", location).output
    for record in records[:2]:
        spoil(tier, path_of(record))
    found = run("verify", "--library", location, status=1).output
    assert "2 sound, 2 corrupt" in found
    assert all(record.key in found for record in records[:2])
    assert "quarantine" in run("verify", "--library", location, "--quarantine", status=1).output
    assert "2 sound, 0 corrupt" in run("verify", "--library", location).output
    assert sum(row["quarantined"] for row in listed(location)) == 2


def test_a_record_in_anothers_place_is_corrupt(tier: Tier, location: str, records: list[Record]) -> None:
    stolen = tier.get(path_of(records[0]))
    assert stolen is not None
    tier.put(path_of(canonical("three", tenant="rival")), [stolen])
    assert "another record's place" in run("verify", "--library", location, status=1).output


def test_gc_deletes_what_is_of_no_use_and_nothing_else(tier: Tier, location: str, records: list[Record]) -> None:
    spoil(tier, path_of(records[0]))
    run("verify", "--library", location, "--quarantine", status=1)
    before = sorted(tier.keys())
    shown = run("gc", "--library", location, "--dry-run").output
    assert "quarantined: 1" in shown
    assert sorted(tier.keys()) == before
    run("gc", "--library", location)
    assert {row["key"] for row in listed(location)} == {record.key for record in records[1:]}


def test_gc_removes_markers_whose_record_is_gone(tmp_path: Path, records: list[Record]) -> None:
    tier = fill(str(tmp_path), records)
    tier.delete(path_of(records[1]))
    run("gc", "--library", str(tmp_path))
    orphans = [key for key in tier.keys("by-content/") if records[1].key in key]
    assert orphans, "a marker is written before its record: it may belong to a write under way"
    for key in orphans:
        os.utime(tmp_path / key, (0, time.time() - 7200))
    run("gc", "--library", str(tmp_path))
    assert not [key for key in tier.keys("by-content/") if records[1].key in key]


def test_gc_on_request_takes_idle_foreign_and_least_worthy_records(tmp_path: Path, records: list[Record]) -> None:
    location = str(tmp_path)
    tier = fill(location, records)
    foreign = canonical("one", fingerprint="other-model")
    fill(location, [foreign])
    assert len(listed(location)) == 5
    run("gc", "--library", location, "--foreign", "--model", MODEL)
    assert len(listed(location)) == 4
    os.utime(tmp_path / path_of(records[3]), (0, time.time() - 3 * 86400))
    run("gc", "--library", location, "--unused", "2d")
    assert {row["key"] for row in listed(location)} == {record.key for record in records[:3]}
    size = tier.size_bytes("records/")
    run("gc", "--library", location, "--shrink", str(size - 1))
    assert len(listed(location)) == 2
    run("gc", "--library", location, "--shrink", "0")
    assert listed(location) == []
    assert [key for key in tier.keys("by-content/") if records[3].key in key] == []


def test_gc_takes_nothing_for_idle_where_nobody_tells_what_is_used(records: list[Record]) -> None:
    location = f"memory://{uuid.uuid4().hex}"
    fill(location, records)
    assert "not when it was last used" in run("gc", "--library", location, "--unused", "1s", status=2).output
    assert len(listed(location)) == 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("7", 7), ("7B", 7), ("1K", 1000), ("1kb", 1000), ("20G", 20 * 10**9), ("20 GB", 20 * 10**9)),
        *(("1.5M", 1_500_000), ("2T", 2 * 10**12), ("2TB", 2 * 10**12)),
        *(("1KiB", 1024), ("1Ki", 1024), ("0.5MiB", 1 << 19), ("20GiB", 20 << 30), ("2tib", 2 << 40)),
    ],
)
def test_a_size_is_decimal_as_listings_are_unless_it_says_that_it_is_binary(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "G", "5iB", "5i", "1E", "1 G B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size such as 500M, 20G or 20GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "options",
    [("--shrink", "much"), ("--unused", "soon"), ("--foreign",), ("--foreign", "--model", "nothing")],
    ids=" ".join,
)
def test_gc_says_what_it_does_not_understand(tmp_path: Path, options: tuple[str, ...]) -> None:
    run("gc", "--library", str(tmp_path), *options, status=2)


def test_gc_with_a_configuration_sweeps_what_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config = tmp_path / "orbitserve.yaml"
    settings = {
        "model": {"path": str(tmp_path / "model")},
        "library": {"directory": str(tmp_path / "library")},
        "files_url": str(tmp_path / "files"),
    }
    config.write_text(json.dumps(settings))
    files = FileStore(tmp_path / "files")
    stores = VectorStores(files)
    short = files.create("acme", "a", "vision", b"short", expires_after=10)
    both = files.create("acme", "b", "vision", b"both", expires_after=10)
    again = files.create("acme", "c", "vision", b"both")
    (reference,) = stores.add(stores.create().id, "acme", {short.id: {}})
    name = fingerprint(tmp_path / "model")
    (page,) = files.parts.note(short.content, "acme", "pages-96-1", 1)
    fill(
        str(tmp_path / "library"),
        [
            canonical("p", content=page, fingerprint=name),
            canonical("a", content=short.content, fingerprint=name),
            canonical("b", content=both.content, fingerprint=name),
            canonical("c", tenant=DYNAMIC_TENANT, content=reference.content, fingerprint=name),
        ],
    )
    later = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert run("gc", "--config", str(config), "--unused", "30", status=2).exit_code == 2
    assert "expired: 3" in run("gc", "--config", str(config), "--dry-run").output
    assert len(files.expired()) == 2
    run("gc", "--config", str(config))
    left = json.loads(run("ls", "--config", str(config), "--json").stdout)["records"]
    assert [row["key"] for row in left] == [canonical("b").key]
    assert files.expired() == ()
    assert not stores.has_content(reference.content)
    assert files.get("acme", again.id) == again


# -- export and import ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["tar", "directory", "url"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {
        "tar": str(tmp_path / "records.tar"),
        "directory": str(tmp_path / "exported"),
        "url": f"memory://{uuid.uuid4().hex}",
    }[request.param]


def bring(target: str, library: Path, *options: str, status: int = 0) -> str:
    return run("import", target, "--library", str(library), "--model", MODEL, *options, status=status).output


def test_records_travel_and_are_usable_at_once(
    tier: Tier, location: str, records: list[Record], target: str, tmp_path: Path
) -> None:
    assert "4 records" in run("export", target, "--library", location).output
    assert "4 added, 0 already there" in bring(target, tmp_path / "other")
    assert "0 added, 4 already there" in bring(target, tmp_path / "other")
    other = tier_for_url(str(tmp_path / "other"))
    assert sorted(other.keys()) == sorted(tier.keys())
    with Library(LibrarySettings(), FINGERPRINT, [other]) as library:
        assert library.get_canonical(records[0].key, "acme") is not None
        assert library.delete_content(records[0].content, "acme") == 3


def test_a_selection_travels_alone(
    tier: Tier, location: str, records: list[Record], target: str, tmp_path: Path
) -> None:
    run("export", target, "--library", location, "--tenant", "rival")
    bring(target, tmp_path / "other")
    assert [row["key"] for row in listed(str(tmp_path / "other"))] == [records[1].key]


def test_a_tenant_may_be_called_as_digests_are(tmp_path: Path) -> None:
    record, library, target = canonical("one", tenant=uuid.uuid4().hex), str(tmp_path / "library"), tmp_path / "x.tar"
    fill(library, [record])
    for name in (record.tenant, tenant_digest(record.tenant)):
        assert [row["key"] for row in listed(library, "--tenant", name)] == [record.key]
        assert "1 records" in run("export", str(target), "--library", library, "--tenant", name).output
    target.unlink()
    nobody = uuid.uuid4().hex
    assert "no record" in run("export", str(target), "--library", library, "--tenant", nobody, status=2).output
    assert not target.exists()


@pytest.mark.parametrize("name", ["file/x.tar", "x" * 251 + ".tar.tar"])
def test_an_archive_that_cannot_be_written_is_said_in_words(tmp_path: Path, records: list[Record], name: str) -> None:
    fill(str(tmp_path / "library"), records)
    (tmp_path / "file").write_text("no folder")
    assert "cannot write" in run("export", str(tmp_path / name), "-l", str(tmp_path / "library"), status=2).output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "library"]


def test_an_archive_may_have_a_long_name(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    run("export", str(tmp_path / ("x" * 240 + ".tar")), "--library", str(tmp_path / "library"))


def test_an_interrupted_import_goes_on(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    run("export", str(tmp_path / "x.tar"), "--library", str(tmp_path / "library"))
    bring(str(tmp_path / "x.tar"), tmp_path / "other")
    tier_for_url(str(tmp_path / "other")).delete(path_of(records[2]))
    assert "1 added, 3 already there" in bring(str(tmp_path / "x.tar"), tmp_path / "other")


def test_another_models_records_are_refused_by_name(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    foreign = canonical("one", fingerprint="other-model")
    fill(str(tmp_path / "library"), [foreign])
    run("export", str(tmp_path / "x.tar"), "--library", str(tmp_path / "library"))
    shown = bring(str(tmp_path / "x.tar"), tmp_path / "other", status=1)
    assert "4 added, 0 already there, 1 refused" in shown
    assert f"{path_of(foreign)}: of another model" in shown
    run("import", str(tmp_path / "x.tar"), "--library", str(tmp_path / "other"), "--any-model")
    assert len(listed(str(tmp_path / "other"))) == 5


def test_the_configured_directory_is_made(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    run("export", str(tmp_path / "x.tar"), "--library", str(tmp_path / "library"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    config, library = tmp_path / "config.yaml", tmp_path / "new" / "library"
    config.write_text(f"model: {{path: {tmp_path}/model}}\nlibrary: {{directory: {library}}}\n")
    shown = run("import", str(tmp_path / "x.tar"), "--config", str(config), status=1).output
    assert "0 added, 0 already there, 4 refused" in shown, "they are of another model"
    run("import", str(tmp_path / "x.tar"), "--config", str(config), "--any-model")
    assert len(listed(str(library))) == 4
    (tmp_path / "file").write_text("no directory")
    assert "cannot make" in run("import", "x.tar", "--library", str(tmp_path / "file" / "x"), status=2).output


def test_damaged_records_are_refused_by_name(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    run("export", str(tmp_path / "exported"), "--library", str(tmp_path / "library"))
    exported = tier_for_url(str(tmp_path / "exported"))
    spoil(exported, path_of(records[0]))
    exported.delete(path_of(records[1]))
    shown = bring(str(tmp_path / "exported"), tmp_path / "other", status=1)
    assert "2 added, 0 already there, 2 refused" in shown
    assert f"{path_of(records[0])}: does not match" in shown
    assert f"{path_of(records[1])}: listed, but not in the archive" in shown


def test_a_manifest_cannot_place_a_record_elsewhere(tmp_path: Path, records: list[Record]) -> None:
    fill(str(tmp_path / "library"), records)
    run("export", str(tmp_path / "exported"), "--library", str(tmp_path / "library"))
    manifest = tmp_path / "exported" / "manifest.json"
    document = json.loads(manifest.read_text())
    genuine = document["records"][0]["path"]
    stolen = genuine.replace(tenant_digest("acme"), "0" * 32).replace(tenant_digest("rival"), "0" * 32)
    (tmp_path / "exported" / stolen).parent.mkdir(parents=True)
    (tmp_path / "exported" / genuine).rename(tmp_path / "exported" / stolen)
    document["records"][0]["path"] = stolen
    document["records"][1]["path"] = "../../outside"
    manifest.write_text(json.dumps(document))
    shown = bring(str(tmp_path / "exported"), tmp_path / "other", status=1)
    assert f"{stolen}: the record lies in another record's place" in shown
    assert "../../outside: not a record's path" in shown


def test_a_corrupt_record_stops_an_export_and_leaves_no_archive(tmp_path: Path, records: list[Record]) -> None:
    tier = fill(str(tmp_path / "library"), records)
    spoil(tier, path_of(records[0]))
    shown = run("export", str(tmp_path / "x.tar"), "--library", str(tmp_path / "library"), status=2).output
    assert records[0].key in shown
    assert [path.name for path in tmp_path.iterdir()] == ["library"]


def no_tar(path: Path) -> None:
    path.write_bytes(b"no tar at all")


def no_manifest(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("records/x"))


def broken_off(path: Path) -> None:
    library = path.parent / "library"
    fill(str(library), [canonical()])
    run("export", str(path), "--library", str(library))
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize("write", [no_tar, no_manifest, broken_off, None])
def test_what_is_no_finished_archive_is_refused(tmp_path: Path, write: Callable[[Path], None] | None) -> None:
    if write is not None:
        write(tmp_path / "x.tar")
    shown = bring(str(tmp_path / "x.tar"), tmp_path / "other", status=2)
    assert "x.tar" in shown or "manifest.json" in shown
    assert listed(str(tmp_path / "other")) == []


def test_a_place_that_is_none_is_named(tmp_path: Path) -> None:
    assert "no library at" in run("ls", "--library", str(tmp_path / "nowhere"), status=2).output
    assert "none.yaml" in run("ls", "--config", str(tmp_path / "none.yaml"), status=2).output
    assert "nosuch" in run("ls", "--library", "nosuch://place", status=2).output


def test_gc_spares_the_indices_of_files(tmp_path: Path) -> None:
    part = Part(0, "a", "text")
    record = index_record([part], None, content="c", owner="acme", embedder="lexical", form="f", seconds=1.0)
    fill(str(tmp_path), [record])
    os.utime(tmp_path / path_of(record), (0, time.time() - 3 * 86400))
    run("gc", "--library", str(tmp_path), "--foreign", "--model", MODEL, "--unused", "2d")
    assert [row["key"] for row in listed(str(tmp_path))] == [record.key]
