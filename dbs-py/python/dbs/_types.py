"""What a store tells about itself. All sizes are bytes, all times aware and UTC."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _time(nanoseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=nanoseconds // 1000)


class _Record:
    """Made of JSON; members that a newer server sends are passed over."""

    @classmethod
    def _of(cls, members: Mapping[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in members.items() if name in known})


@dataclass(frozen=True, slots=True)
class Usage(_Record):
    """Space of a volume or snapshot, exact at the time of the call."""

    referenced: int
    """Bytes of data visible through it."""
    exclusive: int
    """Of those, bytes visible through nothing else (for a volume: nothing outside it)."""
    shared: int
    """The others: ``referenced - exclusive``."""
    allocated: int
    """Bytes of extents that its own layers hold (for a volume: head and snapshots)."""
    reclaimable: int
    """Bytes of extents that deleting it would free."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a volume, of a snapshot, or of a difference."""

    offset: int
    """Where it begins, in bytes."""
    length: int
    """Its bytes, not 0."""
    state: Literal["data", "zero", "hole"]
    """``"data"``, ``"zero"`` (stored as zeros) or ``"hole"`` (never written); both read as zeros."""

    @property
    def end(self) -> int:
        """Where the next one begins, in bytes."""
        return self.offset + self.length

    @property
    def is_data(self) -> bool:
        """Whether there are bytes to read, or only zeros."""
        return self.state == "data"


@dataclass(frozen=True, slots=True)
class ChecksumInfo(_Record):
    """What checksums of data have told since the store was opened."""

    verified: int
    """Blocks read whose checksum was compared."""
    unknown: int
    """Blocks read of which none was known."""
    mismatches: int
    """Times that a damaged block was met."""
    untrusted: int
    """Pages of checksums that said nothing after a crash."""
    memory: int
    """Bytes of memory for them."""


@dataclass(frozen=True, slots=True)
class StoreInfo(_Record):
    """Facts about a store."""

    format: str
    """Version of the format on the device."""
    uuid: str
    """Identity, chosen at init."""
    size: int
    """Bytes of the device or file."""
    max_size: int
    """Bytes it can grow to."""
    extent_size: int
    """Unit of allocation."""
    extents_total: int
    """Data extents in all."""
    extents_free: int
    """Data extents that can be allocated now."""
    extents_pending: int
    """Data extents freed, but not yet reusable."""
    allocated: int
    """Bytes of data extents in use."""
    free: int
    """Bytes of data extents that can be allocated now."""
    metadata: int
    """Bytes before the data."""
    volumes: int
    """Volumes in use."""
    volumes_max: int
    """Room for volumes."""
    snapshots: int
    """Snapshots in use, heads of volumes and hidden ones included."""
    snapshots_max: int
    """Room for snapshots."""
    snapshots_deleting: int
    """Snapshots deleted whose space has not all come back yet."""
    snapshots_put_off: int
    """Of those, the ones that are not merged for now: what the merge needs cannot be read or written."""
    work_remaining: int
    """Steps of background work known to remain."""
    sequence: int
    """Number of the last durable commit."""
    read_only: bool
    """Whether it is open for reading only."""
    driver: str
    """``"io_uring"`` or ``"pread"``."""
    tail: bool
    """Whether what is acknowledged survives ``kill -9`` without a commit for each allocation."""
    warnings: list[str]
    """What the operator should know."""
    checksums: ChecksumInfo | None = None
    """Of a store that keeps checksums of its data."""

    @classmethod
    def _of(cls, members: Mapping[str, Any]) -> Self:
        sums = members.get("checksums")
        sums = None if sums is None else ChecksumInfo._of(sums)
        return super(StoreInfo, cls)._of({**members, "checksums": sums})


@dataclass(frozen=True, slots=True)
class Encryption(_Record):
    """How a volume is encrypted."""

    secret: Literal["passphrase", "key file", "lost"]
    """What unlocks it; ``"lost"`` if nothing does any more."""
    locked: bool
    """Whether it cannot be read or written until it is unlocked."""
    family: str
    """Which key it has: a volume and its clones share one."""


@dataclass(frozen=True, slots=True)
class VolumeInfo(_Record):
    """Facts about a volume."""

    name: str
    """Name, unique in the store."""
    uuid: str
    """Identity."""
    size: int
    """Provisioned bytes."""
    created: datetime
    """When it was made."""
    parent: str | None
    """The snapshot it is based on, as ``"volume@snapshot"``, if any."""
    origin: str | None
    """The snapshot of another volume that it was cloned from and still depends on."""
    snapshots: int
    """Number of its snapshots."""
    depth: int
    """Layers from the head to the root."""
    open: bool
    """Whether somebody holds it open: a server, a device, or this program."""
    rebuilding: bool
    """Whether its content is incomplete: somebody is still filling it."""
    usage: Usage
    """Space."""
    encryption: Encryption | None = None
    """Of an encrypted volume."""

    @classmethod
    def _of(cls, members: Mapping[str, Any]) -> Self:
        how = members.get("encryption")
        how = None if how is None else Encryption._of(how)
        return super(VolumeInfo, cls)._of(_refined({**members, "encryption": how}))


@dataclass(frozen=True, slots=True)
class SnapshotInfo(_Record):
    """Facts about a snapshot."""

    volume: str
    """Volume it belongs to."""
    name: str
    """Name, unique in the volume."""
    uuid: str
    """Identity."""
    size: int
    """Bytes of the volume when it was taken."""
    created: datetime
    """When it was taken."""
    parent: str | None
    """The snapshot below it, as ``"volume@snapshot"``, if any."""
    children: list[str]
    """Volumes and snapshots based on it."""
    protected: bool
    """Whether it refuses to be deleted."""
    user_created: bool
    """Taken by a person, not by the system."""
    retired: bool
    """Whether its content is no longer kept."""
    labels: dict[str, str]
    """Labels."""
    usage: Usage
    """Space."""

    @classmethod
    def _of(cls, members: Mapping[str, Any]) -> Self:
        return super(SnapshotInfo, cls)._of(_refined(members))


@dataclass(frozen=True, slots=True)
class Finding(_Record):
    """One thing that a check found."""

    severity: Literal["note", "leak", "corrupt"]
    """``"note"`` (healed or harmless), ``"leak"`` (unused space) or ``"corrupt"``."""
    region: str
    """Where in the store."""
    index: int | None
    """Which block, slot or extent there, if one can be named."""
    message: str
    """What is wrong, and what follows from it."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check looked at, and found."""

    findings: list[Finding]
    """Everything found, worst first."""
    blocks_checked: int
    """Metadata blocks read."""
    extents_checked: int
    """Extents in use."""
    volumes_checked: int
    """Volumes in use."""
    snapshots_checked: int
    """Snapshots in use."""
    checksums_open: int = 0
    """Of an idle store: bytes of data, at most, of which no checksums are known since a crash."""

    @property
    def ok(self) -> bool:
        """Whether the store can be trusted: there is at most a note."""
        return all(finding.severity == "note" for finding in self.findings)


@dataclass(frozen=True, slots=True)
class DamagedRange(_Record):
    """Data that is not what was written."""

    volume: str | None
    """Volume; none if it was deleted and a clone still needs this."""
    snapshot: str | None
    """Snapshot; none for the present content, ``"(deleted)"`` for one that was deleted."""
    offset: int
    """Where it begins, in bytes."""
    length: int
    """Its bytes."""


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """How far a scrub has come, and what it found. All numbers are bytes."""

    checked: int
    """Data read."""
    learnt: int
    """Of that, data of which no checksum was known: it is known now."""
    damaged: int
    """Data that differs from its checksums, or that the device does not read."""
    ranges: list[DamagedRange]
    """Where; at most a thousand."""
    done: int
    """How much of `total` is done; an earlier call may have done some."""
    total: int
    """All there is to look at."""

    @property
    def ok(self) -> bool:
        """Whether nothing was damaged."""
        return self.damaged == 0


@dataclass(frozen=True, slots=True)
class TrimReport(_Record):
    """What a trim of a volume found. All numbers are bytes."""

    checked: int
    """Data read."""
    zeros: int
    """Of that, blocks that hold nothing but zeros."""
    freed: int
    """Extents that hold nothing any more."""
    unreadable: int
    """Data that was left alone, as some of it is damaged."""


@dataclass(frozen=True, slots=True)
class BackupVolume(_Record):
    """A volume in a backup store. Times are texts, as the backup store has them: RFC 3339, UTC."""

    url: str
    """What names it."""
    volume: str
    """Its name there."""
    size: int
    """Bytes."""
    created: str
    """When its first backup was asked for."""
    backups: int
    """How many there are, complete or not."""
    last_backup: str | None
    """The last complete one."""
    last_backup_at: str | None
    """When that was asked for."""
    blocks: int
    """Blocks that it has."""
    compression: str
    """How they are compressed."""
    labels: Mapping[str, str]
    """Labels of the last backup."""
    problem: str | None
    """Why its facts cannot be read; the others may be empty then."""


@dataclass(frozen=True, slots=True)
class Backup(_Record):
    """A backup. Times are texts, as the backup store has them: RFC 3339, UTC."""

    url: str
    """What names it."""
    volume: str
    """Its volume."""
    backup: str
    """Its name."""
    state: Literal["complete", "in_progress", "damaged"]
    """``"in_progress"`` is also one that was cut off; of a damaged one `problem` says why."""
    snapshot: str
    """The snapshot that it is of."""
    asked_at: str
    """When it was asked for."""
    created: str
    """When it was complete."""
    size: int
    """Bytes of its blocks."""
    block_size: int
    """Bytes of one."""
    incremental: bool
    """Whether only the differences to an earlier one were read. It is whole all the same."""
    uploaded: int
    """Bytes that were written for it."""
    compression: str
    """How blocks are compressed."""
    labels: Mapping[str, str]
    """Labels."""
    parameters: Mapping[str, str]
    """How it was made."""
    problem: str | None
    """Why its facts cannot be read; the others may be empty then."""


@dataclass(frozen=True, slots=True)
class CreatedBackup(_Record):
    """A backup that was made."""

    url: str
    """What names it."""
    volume: str
    """Its volume in the backup store."""
    backup: str
    """Its name."""
    base: str | None
    """The backup to which only the differences were read."""
    size: int
    """Bytes of its blocks."""
    read: int
    """Bytes that were read from the volume."""
    uploaded: int
    """Bytes that were written to the backup store, compressed."""


@dataclass(frozen=True, slots=True)
class BadBlock(_Record):
    """A block of a backup that is missing or damaged."""

    offset: int
    """The first place in the volume that needs it."""
    block: str
    """Its name."""
    problem: str
    """What is wrong."""


@dataclass(frozen=True, slots=True)
class BackupReport:
    """What the verification of a backup found."""

    blocks: int
    """Blocks of the backup."""
    different: int
    """Different ones."""
    read: int
    """Bytes that were read and compared."""
    bad: list[BadBlock]
    """What is missing or damaged."""
    damaged_packs: list[str]
    """Objects of a repository in which something is damaged, perhaps only what others have, too."""

    @property
    def ok(self) -> bool:
        """Whether it can be restored."""
        return not self.bad


@dataclass(frozen=True, slots=True)
class JudgedBackup(_Record):
    """A backup, and the rules that keep it."""

    backup: str
    """Its name."""
    snapshot: str
    """The snapshot that it is of."""
    asked_at: str
    """When it was asked for."""
    kept_by: list[str]
    """``"last"``, ``"daily"`` and so on; empty for one that is deleted."""


@dataclass(frozen=True, slots=True)
class Collected(_Record):
    """What a collection in a repository did. A *pack* is an object with many blocks."""

    backups: int
    """Backups that are there."""
    packs: int
    """Packs that are kept."""
    bytes: int
    """Bytes of these."""
    removed: int
    """Packs that were removed."""
    removed_bytes: int
    """Bytes of these."""
    condemned: int
    """Packs that no backup needs, and that a later call removes."""
    condemned_bytes: int
    """Bytes of these."""
    rewritten: int
    """Of these, packs of which others have now the little that was needed."""
    rewritten_bytes: int
    """Bytes that were written for that."""
    next_seconds: int | None
    """After so many seconds a call removes some of them; none if nothing is condemned."""


@dataclass(frozen=True, slots=True)
class BackupKey(_Record):
    """A key that opens an encrypted repository."""

    id: str
    """What names it."""
    kind: Literal["passphrase", "key-file"] | None
    """What it is; none if it cannot be read."""
    added: str
    """When it was added."""
    used: bool
    """Whether the store was opened with it."""
    problem: str | None
    """Why it cannot be read."""


def backup_report(members: Mapping[str, Any]) -> BackupReport:
    """A report of its JSON."""
    return BackupReport(
        blocks=members["blocks"],
        different=members["different"],
        read=members["read"],
        bad=[BadBlock._of(block) for block in members["bad"]],
        damaged_packs=list(members["damaged_packs"]),
    )


def _refined(members: Mapping[str, Any]) -> dict[str, Any]:
    """Times and usage as their types."""
    return {
        **members,
        "created": _time(members["created_ns"]),
        "usage": Usage._of(members["usage"]),
    }


def check_report(members: Mapping[str, Any]) -> CheckReport:
    """A report of its JSON."""
    findings = [Finding._of(finding) for finding in members["findings"]]
    counts = ("blocks_checked", "extents_checked", "volumes_checked", "snapshots_checked")
    values = [members[count] for count in counts]
    # Servers of before have none.
    values.append(members.get("checksums_open", 0))
    return CheckReport(findings, *values)


def scrub_report(members: Mapping[str, Any]) -> ScrubReport:
    """A report of its JSON."""
    ranges = [DamagedRange._of(damaged) for damaged in members["ranges"]]
    counts = (members[count] for count in ("done", "total"))
    return ScrubReport(
        members["checked"], members["learnt"], members["damaged"], ranges, *counts
    )
