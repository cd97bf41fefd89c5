"""`orbitserve library`: commands over a library's tier.

`kvstore.catalog.inventory` and `kvstore.catalog.archive` do the work.

Heavy modules are imported inside the commands, so that `orbitserve --help` stays fast.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

if TYPE_CHECKING:
    from kvstore.catalog.inventory import Contents, Item, Removal, Selection
    from kvstore.settings import LibrarySettings
    from kvstore.tiers.base import Tier
    from serving.config import OrbitServeConfig

app = typer.Typer(help="Look into a library and look after it, also while it is in service.", no_args_is_help=True)
console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True)

Location = Annotated[
    str | None, typer.Option("--library", "-l", help="Directory or fsspec URL of the tier; else the configuration's.")
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML of an OrbitServeConfig; see `config`.")]
Remote = Annotated[bool, typer.Option("--remote", help="The configuration's library.url instead of its directory.")]
Tenant = Annotated[str | None, typer.Option(help="Only this tenant's records, by name or digest.")]
Kind = Annotated[
    Literal["canonical", "patch", "embedding", "basis"] | None, typer.Option(help="Only records of this kind.")
]
Model = Annotated[str | None, typer.Option(help="Only records of this model: a checkpoint's directory, or a digest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?", re.IGNORECASE)
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SPAN_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass
class _Place:
    """The tier that a command works on, and the configuration it came from, if any."""

    tier: Tier
    library: LibrarySettings
    config: OrbitServeConfig | None

    def tenants(self, *more: str | None) -> dict[str, str]:
        """Digest to name, of the tenants whose names are known here."""
        from kvstore.records.keys import DYNAMIC_TENANT
        from kvstore.tiers.paths import tenant_digest
        from serving.api_keys import KeyRing

        names = {"local", DYNAMIC_TENANT, *(name for name in more if name)}
        if self.config is not None:
            names |= KeyRing.of(self.config.http).tenants
        return {tenant_digest(name): name for name in names} | {tenant_digest(""): "(every tenant)"}  # a model's basis

    def model(self, name: str | None) -> str | None:
        """Digest of a checkpoint's fingerprint: of `name`, else the configuration's, if there is one."""
        from kvstore.tiers.paths import fingerprint_digest
        from prefill_workers.engine.fingerprint import fingerprint

        if name is None:
            if self.config is None:
                return None
            model = self.config.model
            return fingerprint_digest(fingerprint(model.path, model.load_format))
        if (Path(name) / "config.json").exists():
            return fingerprint_digest(fingerprint(Path(name)))
        if re.fullmatch(r"[0-9a-f]{16}", name):
            return name
        raise typer.BadParameter(f"{name!r} is neither a checkpoint's directory nor a digest of 16 digits")


@contextmanager
def _opened(location: str | None, config: Path | None, remote: bool, make: bool = False) -> Iterator[_Place]:
    """The tier that the options name; errors of the store end the command with a message and status 2.

    `make`: a directory that does not exist yet is made.
    """
    from kvstore.errors import StoreError
    from kvstore.settings import LibrarySettings
    from serving.config import ConfigError, OrbitServeConfig

    try:
        settings = None if config is None else OrbitServeConfig.load(config)
        library = LibrarySettings() if settings is None else settings.library
        directory = None if library.directory is None else str(library.directory)
        place = location or (library.url if remote else directory)
        if place is None:
            raise ConfigError(f"the configuration names no {'library.url' if remote else 'library.directory'}")
        if make and "://" not in place:
            _make(Path(place))
        if "://" not in place and not Path(place).is_dir():
            raise ConfigError(f"there is no library at {place}")
        yield _Place(_tier(place, library), library, settings)
    except (StoreError, ConfigError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def _make(directory: Path) -> None:
    from kvstore.private_files import make_private_folder
    from serving.config import ConfigError

    try:
        make_private_folder(directory)
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}") from error


def _tier(location: str, library: LibrarySettings) -> Tier:
    """The tier at a directory or URL, reached with the library's storage options."""
    from kvstore.tiers.stack import tier_for_url
    from serving.config import ConfigError

    try:
        return tier_for_url(location, library.storage_options)
    except (ValueError, ImportError) as error:  # an unknown scheme, or its file system is not installed
        raise ConfigError(f"{location}: {error}") from error


def _selected(place: _Place, tenant: str | None, kind: str | None, model: str | None, key: str = "") -> Selection:
    from kvstore.catalog.inventory import Selection
    from kvstore.tiers.paths import tenant_digest

    digests = None if tenant is None else (tenant, tenant_digest(tenant))  # it may be named by either
    return Selection(digests, kind, None if model is None else place.model(model), key)


@app.command("ls")
def listing(
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
    tenant: Tenant = None,
    kind: Kind = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """List records: kind, owner, size, when last used, and totals."""
    from kvstore.catalog.inventory import contents

    with _opened(location, config, remote) as place:
        items = _selected(place, tenant, kind, model).of(contents(place.tier).items)
        names, now = place.tenants(tenant), time.time()
        rows = [_row(item, names, now) for item in sorted(items, key=lambda item: (item.kind, -item.used))]
    groups = {name: [row for row in rows if _group(row) == name] for name in sorted(map(_group, rows))}
    totals = {
        name: {"records": len(group), "bytes": sum(row["size"] for row in group)}
        for name, group in (groups | {"all": rows}).items()
    }
    if as_json:
        typer.echo(json.dumps({"records": rows, "totals": totals}, indent=1))
        return
    table = Table("key", "kind", "tenant", "model", "size", "idle", "recompute", box=None)
    for row in rows:
        kind_shown = f"{row['kind']} [red](quarantined)[/red]" if row["quarantined"] else row["kind"]
        table.add_row(
            row["key"][:16],
            kind_shown,
            row["tenant"][:16],
            row["model"],
            decimal(row["size"]),
            _span(row["idle_seconds"]),
            f"{row['recompute_seconds']:.2f} s",
        )
    console.print(table)
    for name, total in totals.items():
        console.print(f"{name}: {total['records']} records, {decimal(total['bytes'])}", highlight=False)


def _row(item: Item, names: dict[str, str], now: float) -> dict[str, Any]:
    return {
        "key": item.key,
        "kind": item.kind,
        "tenant": names.get(item.tenant, item.tenant),
        "model": item.fingerprint,
        "size": item.size,
        "used": item.used,
        "idle_seconds": max(0.0, now - item.used),
        "recompute_seconds": item.recompute_seconds,
        "quarantined": item.quarantined,
    }


def _group(row: dict[str, Any]) -> str:
    return "quarantined" if row["quarantined"] else row["kind"]


@app.command()
def inspect(
    key: Annotated[str, typer.Argument(help="A record's key, or as much of its beginning as tells it apart.")],
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
) -> None:
    """Print all that a record says of itself, and check each layer against its checksum."""
    from kvstore.catalog.inventory import contents
    from kvstore.catalog.inventory import inspect as look_into
    from kvstore.errors import CorruptRecord

    with _opened(location, config, remote) as place:
        found = _selected(place, None, None, None, key).of(contents(place.tier).items)
        if len({item.key for item in found}) != 1:
            what = f"{len(found)} records begin" if found else "no record begins"
            errors.print(f"[red]error:[/red] {what} with {key}")
            raise typer.Exit(2)
        sound = True
        for item in found:
            try:
                document = look_into(place.tier, item)
            except CorruptRecord as error:
                document = {"path": item.path, "size": item.size, "corrupt": str(error)}
            if document is not None:
                typer.echo(json.dumps(document, indent=1))
                sound = sound and all(layer["sound"] for layer in document.get("layers", [{"sound": False}]))
    if not sound:
        raise typer.Exit(1)


@app.command()
def verify(
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
    tenant: Tenant = None,
    kind: Kind = None,
    model: Model = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move corrupt records aside.")] = False,
) -> None:
    """Read every record and check every byte; ends with status 1 if one was corrupt."""
    from kvstore.catalog import inventory

    with _opened(location, config, remote) as place:
        chosen = _selected(place, tenant, kind, model).of(inventory.contents(place.tier).items)
        items = [item for item in chosen if not item.quarantined]
        with _progress("verifying", sum(item.size for item in items)) as advance:
            outcome = inventory.verify(place.tier, items, quarantine, advance)
    for item, problem in outcome.corrupt:
        console.print(f"[red]corrupt[/red] {item.path}: {problem}", highlight=False)
    moved = ", moved to quarantine" if quarantine and outcome.corrupt else ""
    vanished = f"; {outcome.vanished} vanished meanwhile" if outcome.vanished else ""
    console.print(f"{outcome.sound} sound, {len(outcome.corrupt)} corrupt{moved}{vanished}", highlight=False)
    if outcome.corrupt:
        raise typer.Exit(1)


@app.command()
def gc(
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
    foreign: Annotated[bool, typer.Option("--foreign", help="Also records of other models than --model.")] = False,
    model: Annotated[str | None, typer.Option(help="The model to keep; default: the configuration's.")] = None,
    unused: Annotated[str | None, typer.Option(help="Also records idle for longer: 12h, 30d, 2w (on disk).")] = None,
    shrink: Annotated[
        str | None,
        typer.Option(help="Also the least worthy until the rest fits: 20G (GB, of 1000), 20GiB (of 1024), ..."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
) -> None:
    """Delete expired and quarantined records, orphaned markers, and more on request.

    What expired is known with --config only.
    """
    from kvstore.catalog import inventory
    from serving.config import ConfigError

    unused_seconds = None if unused is None else _seconds(unused)
    max_bytes = None if shrink is None else parse_bytes(shrink)
    with _opened(location, config, remote) as place:
        if unused and not place.tier.tells_use:
            raise ConfigError("an object store tells when a record was written, not when it was last used: no --unused")
        keep = place.model(model) if foreign else None
        if foreign and keep is None:
            raise typer.BadParameter("--foreign needs --model or --config, to know which model to keep")
        found = inventory.contents(place.tier)
        removals = _expired(place, found, dry_run)
        gone = {removal.path for removal in removals}
        left = inventory.Contents(tuple(item for item in found.items if item.path not in gone), found.orphans)
        removals += inventory.garbage(
            left,
            fingerprint=keep,
            unused_seconds=unused_seconds,
            max_bytes=max_bytes,
            indices=inventory.index_paths(place.tier, left, keep) if foreign or unused or shrink else (),
        )
        if not dry_run:
            with _progress("deleting", sum(removal.size for removal in removals)) as advance:
                inventory.remove(place.tier, removals, advance)
    verb = "would be deleted" if dry_run else "deleted"
    for reason in sorted({removal.reason for removal in removals}):
        group = [removal for removal in removals if removal.reason == reason]
        console.print(f"{reason}: {len(group)}, {decimal(sum(r.size for r in group))}", highlight=False)
    console.print(f"{verb}: {len(removals)}, {decimal(sum(r.size for r in removals))}", highlight=False)


def _expired(place: _Place, found: Contents, dry_run: bool) -> list[Removal]:
    """Removals of all that derives from expired files and vector stores, which are swept.

    Their deletion stays owed: the service has it in its memory too, and there may be another tier.
    """
    from kvstore.catalog.inventory import derived_from
    from kvstore.records.keys import DYNAMIC_TENANT
    from kvstore.uploads.files import FileStore
    from kvstore.uploads.vector_stores import VectorStores

    if place.config is None:
        return []
    files = FileStore(place.config.files_url, place.config.files)
    stores = VectorStores(files)
    expired = files.expired()
    held = {tenant: files.contents(tenant) for tenant in {file.tenant for file in expired}}
    unheld = {(DYNAMIC_TENANT, content) for content in stores.overdue()}
    unheld |= {(file.tenant, file.content) for file in expired if file.content not in held[file.tenant]}
    unheld |= {(owner, content) for content, owner in stores.unheld()}
    if not dry_run:
        files.sweep()
        stores.sweep()
    removals = [
        removal
        for owner, content in unheld
        for one in (content, *files.parts.of(content, owner))
        for removal in derived_from(place.tier, found, one, owner, "expired")
    ]
    return list({removal.path: removal for removal in removals}.values())


@app.command("export")
def export_records(
    target: Annotated[str, typer.Argument(help="A new .tar file, or a directory or fsspec URL.")],
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
    tenant: Tenant = None,
    kind: Kind = None,
    model: Model = None,
) -> None:
    """Copy records, verified and checksummed, into a tar file or another place, with a manifest."""
    from kvstore.catalog import archive, inventory
    from serving.config import ConfigError

    with _opened(location, config, remote) as place:
        chosen = _selected(place, tenant, kind, model).of(inventory.contents(place.tier).items)
        items = [item for item in chosen if not item.quarantined]
        if not items and any((tenant, kind, model)):
            raise ConfigError("no record is of that tenant, kind and model: nothing is exported")
        with _progress("exporting", sum(item.size for item in items)) as advance:
            if target.endswith(".tar") and "://" not in target:
                with archive.tar_writer(Path(target)) as put:
                    listed = archive.export(place.tier, items, put, advance)
            else:
                there = _tier(target, place.library)
                listed = archive.export(place.tier, items, lambda key, buffer: there.put(key, [buffer]), advance)
    console.print(f"{len(listed)} records, {decimal(sum(entry.size for entry in listed))}", highlight=False)


@app.command("import")
def import_records(
    source: Annotated[str, typer.Argument(help="What `export` wrote: a .tar file, or a directory or fsspec URL.")],
    location: Location = None,
    config: Config = None,
    remote: Remote = False,
    model: Annotated[
        str | None, typer.Option(help="The model records must be of; default: the configuration's.")
    ] = None,
    any_model: Annotated[bool, typer.Option("--any-model", help="Take records of whatever model.")] = False,
) -> None:
    """Store records that a library lacks, each verified; may be interrupted and run again.

    Corrupt records and those of another model are refused by name; then the command ends with status 1.
    """
    from kvstore.catalog import archive

    with _opened(location, config, remote, make=True) as place:
        expected = None if any_model else place.model(model)
        if expected is None and not any_model:
            raise typer.BadParameter("--model or --config is needed to know which records fit; or --any-model")

        def take_in(origin: archive.Archive) -> archive.Imported:
            listed = archive.manifest_of(origin)
            with _progress("importing", sum(entry.size for entry in listed)) as advance:
                return archive.take_in(place.tier, origin, listed, expected, advance)

        if source.endswith(".tar") and "://" not in source:
            with archive.tar_reader(Path(source)) as tar:
                outcome = take_in(tar)
        elif "://" in source or Path(source).is_dir():
            outcome = take_in(_tier(source, place.library))
        else:
            raise archive.BadArchive(f"there is no export at {source}")
    for path, reason in outcome.refused:
        console.print(f"[red]refused[/red] {path}: {reason}", highlight=False)
    console.print(
        f"{outcome.added} added, {outcome.present} already there, {len(outcome.refused)} refused", highlight=False
    )
    if outcome.refused:
        raise typer.Exit(1)


@contextmanager
def _progress(verb: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes, with rate and time left, on the error stream; yields what advances it."""
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(verb, total=total)
        yield lambda size: progress.advance(task, size)


def parse_bytes(text: str) -> int:
    """Bytes of a size: 500M and 500MB are powers of 1000, 500MiB of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 500M, 20G or 20GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()))


def _seconds(text: str) -> float:
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 12h, 30d or 2w")
    return float(match[1]) * _SPAN_SECONDS[match[2]]


def _span(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SPAN_SECONDS[unit]:
            return f"{seconds / _SPAN_SECONDS[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"
