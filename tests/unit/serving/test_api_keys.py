"""API keys from a file: read again when it changes, kept as they were when it cannot be, never quoted."""

from __future__ import annotations

import logging
import re
import traceback
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from serving import api_keys
from serving.api_keys import BadKeys, KeyRing
from serving.cli.main import app
from serving.config import ConfigError, OrbitServeConfig
from serving.settings import ApiKey, HttpSettings

DIGEST = f"sha256:{sha256(b'hush').hexdigest()}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one tenant's key, at which every question looks again."""
    monkeypatch.setattr(api_keys, "_LOOK_SECONDS", 0.0)
    path = tmp_path / "keys.yaml"
    write(path, "one: acme\n")
    return path


def write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def tenants(ring: KeyRing, *keys: str) -> list[str | None]:
    return [owner and owner.tenant for owner in map(ring.owner, keys)]


@pytest.mark.parametrize(
    "text", ["one: acme\ntwo: {tenant: ops, admin: true}\n", '{"one": "acme", "two": {"tenant": "ops", "admin": true}}']
)
def test_a_files_keys_stand_beside_the_configurations(file: Path, text: str):
    write(file, text)
    ring = KeyRing.of(HttpSettings.model_validate({"api_keys": {"three": "other"}, "api_keys_file": file}))
    assert tenants(ring, "one", "two", "three", "four", "") == ["acme", "ops", "other", None, None]
    assert ring.owner("two") == ApiKey(tenant="ops", admin=True)
    assert ring.tenants == {"acme", "ops", "other"}
    assert not ring.is_open


def test_a_change_is_seen_and_only_after_a_while(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    ring = KeyRing({}, file)
    write(file, "two: acme\n")  # as long as before
    assert tenants(ring, "one", "two") == [None, "acme"]
    (tmp_path / "fresh").write_text("three: acme\n")
    (tmp_path / "fresh").rename(file)
    assert tenants(ring, "two", "three") == [None, "acme"]
    monkeypatch.setattr(api_keys, "_LOOK_SECONDS", 1000.0)
    ring.owner("three")
    write(file, "four: acme\n")
    assert tenants(ring, "four") == [None]


@pytest.mark.parametrize(
    "text",
    ["", "# nothing\n", "one: [", "- one\n", "one: {tenant: acme, admn: true}\n", "a key: acme\n", "sha256:12: acme\n",
     "7: acme\n", "one: dynamic-library\n", "configured: acme\n", f"hush: acme\n{DIGEST}: acme\n", "\x00", None],
)  # fmt: skip
def test_a_file_that_cannot_be_used_keeps_the_keys_of_before_and_is_told_once(
    file: Path, caplog: pytest.LogCaptureFixture, text: str | None
):
    ring = KeyRing({"configured": ApiKey(tenant="other")}, file)
    file.unlink()
    if text is not None:
        write(file, text)
    with caplog.at_level(logging.ERROR):
        assert [tenants(ring, "one", "configured") for _ in range(3)] == [["acme", "other"]] * 3
    (record,) = caplog.records
    assert str(file) in record.message
    assert "stay valid" in record.message
    write(file, "two: acme\n")
    assert tenants(ring, "one", "two", "configured") == [None, "acme", "other"]
    file.unlink()
    if text is not None:
        write(file, text)
    with pytest.raises(BadKeys, match=re.escape(str(file))):
        KeyRing({"configured": ApiKey(tenant="other")}, file)


@pytest.mark.parametrize(
    "text", ["hush: [", "hush", "hush: {admin: true}", "hush-ü: acme", "{hush: acme, hush", "hush hush: acme"]
)
def test_no_error_says_a_key(file: Path, text: str):
    write(file, text)
    with pytest.raises(BadKeys) as caught:
        KeyRing({}, file)
    assert "hush" not in "".join(traceback.format_exception(caught.value)).replace(str(file), "")


def test_a_hash_stands_for_its_key_and_is_none(file: Path):
    write(file, f"{DIGEST}: acme\n")
    for ring in (KeyRing({}, file), KeyRing({DIGEST.upper().replace("SHA", "sha"): ApiKey(tenant="acme")})):
        assert tenants(ring, "hush", DIGEST, DIGEST.removeprefix("sha256:"), "Hush") == ["acme", None, None, None]


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    ring = KeyRing({str(n): ApiKey(tenant="acme") for n in range(5)})
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    for key in ("0", "none"):
        compared.clear()
        ring.owner(key)
        assert len(compared) == 5
        assert {len(side) for pair in compared for side in pair} == {32}


def test_a_file_that_others_may_read_costs_a_warning(file: Path, caplog: pytest.LogCaptureFixture):
    KeyRing({}, file)
    assert not caplog.records
    file.chmod(0o640)
    KeyRing({}, file)
    assert "others may read it" in caplog.text


def test_a_configuration_whose_keys_cannot_be_read_does_not_start(tmp_path: Path):
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"http\.api_keys_file: cannot read .*none\.yaml"):
        OrbitServeConfig.load(None, {"model.path": checkpoint, "http.api_keys_file": tmp_path / "none.yaml"})


def test_the_administrators_paths_and_tls_are_whole():
    for values, words in (
        ({"admin_paths": ["/metrics"]}, "need api_keys"),
        ({"admin_paths": ["/health"], "api_keys": {"one": "acme"}}, "admin_paths"),
        ({"tls_key": "key.pem"}, "need one another"),
        ({"api_keys": {"sha256:12": "acme"}}, "64 hexadecimal digits"),
    ):
        with pytest.raises(ValidationError, match=words):
            HttpSettings.model_validate(values)


def test_the_command_makes_a_key_whose_entry_can_be_appended_to_a_file(file: Path):
    ring = KeyRing({}, file)
    made = [CliRunner().invoke(app, ["hash-key", "acme", *options]) for options in ([], ["--admin"])]
    for result, admin in zip(made, (False, True), strict=True):
        assert result.exit_code == 0
        key = result.stderr.strip()
        assert len(key) > 40
        assert key not in result.stdout
        with file.open("a") as keys:
            keys.write(result.stdout)
        assert ring.owner(key) == ApiKey(tenant="acme", admin=admin)
    assert made[0].stderr != made[1].stderr
    given = CliRunner().invoke(app, ["hash-key", "acme", "--stdin"], input="hush\n")
    assert (yaml.safe_load(given.stdout), given.stderr) == ({DIGEST: {"tenant": "acme", "admin": False}}, "")
    refused = CliRunner().invoke(app, ["hash-key", "dynamic-library"])
    assert refused.exit_code == 2
    assert "names the dynamic library" in refused.output
