"""API keys of the configuration, and of a file that is read again when it changes.

Keys are kept as SHA-256 digests. An entry `sha256:DIGEST` in place of a key tells no more than that;
`orbitserve hash-key` makes one. A digest protects keys that nobody could guess, such as that command's.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from serving.settings import HASHED, ApiKey, ApiKeys, HttpSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at the file
_FILE: TypeAdapter[ApiKeys] = TypeAdapter(ApiKeys)


class BadKeys(ValueError):
    """Keys that cannot be used; the message names the file, and no key."""


class KeyRing:
    """Owners of API keys.

    A file that cannot be read any more is logged as an error, and its keys of before stay valid. So do they for an
    empty one: it may be about to be written.
    """

    def __init__(self, keys: Mapping[str, ApiKey], file: Path | None = None) -> None:
        """Read the file. Raises BadKeys if it cannot be used."""
        self._given, self._file = _by_digest(keys, "http.api_keys"), file
        self._content: bytes | None = None
        self._problem = ""
        self._due = 0.0
        self._owners = self._given
        if file is not None:
            self._read(file)

    @classmethod
    def of(cls, http: HttpSettings) -> KeyRing:
        """The keys that a configuration names. Raises BadKeys."""
        return cls(http.api_keys, http.api_keys_file)

    @property
    def is_open(self) -> bool:
        """True if no keys are configured."""
        return self._file is None and not self._given

    @property
    def tenants(self) -> frozenset[str]:
        """Tenants that have a key."""
        return frozenset(owner.tenant for owner in self._owners.values())

    def owner(self, key: str) -> ApiKey | None:
        """The owner of a key; None for an unknown one."""
        self._refresh()
        digest, found = _digest(key), None
        for known, owner in self._owners.items():  # every key is compared, so that timing tells nothing
            if hmac.compare_digest(known, digest):
                found = owner
        return found

    def _refresh(self) -> None:
        if self._file is None or time.monotonic() < self._due:
            return
        try:
            self._read(self._file)
            self._problem = ""
        except BadKeys as error:
            if str(error) != self._problem:
                logger.error("%s; the keys of before stay valid", error)
            self._problem = str(error)

    def _read(self, file: Path) -> None:
        """Read the file if its content is another. Raises BadKeys."""
        self._due = time.monotonic() + _LOOK_SECONDS
        try:
            content = file.read_bytes()
            if content == self._content:
                return
            mode = file.stat().st_mode
        except OSError as error:
            raise BadKeys(f"http.api_keys_file: cannot read {file}: {error.strerror}") from error
        found = _by_digest(_parsed(content, file), f"http.api_keys_file: {file}")
        if found.keys() & self._given.keys():
            raise BadKeys(f"http.api_keys_file: {file} has a key that http.api_keys has too")
        if mode & 0o077:
            logger.warning("%s holds API keys, and others may read it: chmod 600 %s", file, file)
        if self._content is not None:
            logger.info("%s has %d API keys now", file, len(found))
        self._content, self._owners = content, {**self._given, **found}


def new_key() -> str:
    """A random key, which nobody could guess."""
    return f"orb-{secrets.token_urlsafe(32)}"


def hashed_entry(key: str, tenant: str, admin: bool) -> str:
    """A file's entry with a key's hash. Raises BadKeys if key or tenant cannot be used."""
    owner = {"tenant": tenant, "admin": admin}
    try:
        _FILE.validate_python({key: owner})
    except ValidationError as error:
        raise BadKeys(error.errors(include_input=False)[0]["msg"]) from None
    return f'"{HASHED}{_digest(key).hex()}": {json.dumps(owner)}'


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _by_digest(keys: Mapping[str, ApiKey], source: str) -> dict[bytes, ApiKey]:
    found = {
        bytes.fromhex(key.removeprefix(HASHED)) if key.startswith(HASHED) else _digest(key): owner
        for key, owner in keys.items()
    }
    if len(found) < len(keys):
        raise BadKeys(f"{source}: a key stands beside its own hash, or a hash twice")
    return found


def _parsed(content: bytes, file: Path) -> ApiKeys:
    """The keys of a file. Raises BadKeys; the parsers' own messages would quote keys."""
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise BadKeys(f"http.api_keys_file: {file} is neither YAML nor JSON{where}") from None
    if not isinstance(values, dict) or not values:
        raise BadKeys(f"http.api_keys_file: {file} has no keys; it takes `KEY: TENANT` as http.api_keys does")
    try:
        return _FILE.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        what = ".".join(("***", *map(str, first["loc"][1:]))) if first["loc"] else "keys"
        raise BadKeys(f"http.api_keys_file: {file}: {what}: {first['msg']}") from None
