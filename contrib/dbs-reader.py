#!/usr/bin/env python3
"""Lists and exports what is in a DBS store (format 2.0). It needs nothing but Python's standard library, never writes to
the store, and shares no code with `dbs`: it was written from docs/format.md alone, whose sections the comments name."""

import argparse
import hashlib
import json
import os
import struct
import sys
import uuid

BLOCK, SPARE_BASE, SEQUENCE_MAX, FRAME = 4096, 1 << 30, 1 << 62, 16384
HEAD, DELETED, LABELLED, BACKED = 0x1, 0x8, 0x10, 0x40
VOLUMES, SNAPSHOTS, LABELS, JOURNAL, SPARES, EXTENTS, DATA, SUMS = 1, 2, 3, 4, 5, 6, 7, 8
MARKED = {VOLUMES: b"DBSv", SNAPSHOTS: b"DBSs", SPARES: b"DBSz", EXTENTS: b"DBSe"}


TABLE = list(range(256))
for _ in range(8):
    TABLE = [word >> 1 ^ (0x82F63B78 if word & 1 else 0) for word in TABLE]


class Damage(Exception):
    """The store is not as the document demands, or is no store."""


def need(condition, what):
    if not condition:
        raise Damage(what)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def lz4(data):
    """Expands a block of LZ4: literals, and matches of what is there by then."""

    def more(length, at):
        while length >= 15 and data[at] == 255:
            length, at = length + 255, at + 1
        return (length + data[at], at + 1) if length >= 15 else (length, at)

    out, at = bytearray(), 0
    while True:
        token = data[at]
        count, at = more(token >> 4, at + 1)
        out += data[at : at + count]
        at += count
        if at >= len(data):
            return bytes(out)
        distance = data[at] | data[at + 1] << 8
        count, at = more(token & 15, at + 2)
        need(0 < distance <= len(out) and len(out) <= FRAME, "a frame that is no LZ4")
        for _ in range(count + 4):
            out.append(out[-distance])


class Backing:
    """Section 6: a file that volumes may rest on, and the text that identifies it."""

    def __init__(self, path):
        self.path, self.file = path, open(path, "rb")
        self.size = length = self.file.seek(0, os.SEEK_END)
        need(self.at(0, 4) != b"QFI\xfb", f"{path}: this is a qcow2 file, and only raw ones are read here")
        parts = [(0, length)]
        if length > 1179648:
            parts = [(65536 + i * ((length - 131072) // 256), BLOCK) for i in range(256)]
            parts = [(0, 65536), *parts, (length - 65536, 65536)]
        digest = hashlib.sha256(b"".join(self.at(*part) for part in parts)).hexdigest()
        self.identity = f"raw, {length} bytes, {length} of content, sha256 of parts {digest}"

    def at(self, offset, length):
        self.file.seek(offset)
        data = self.file.read(length)
        need(len(data) == max(0, min(length, self.size - offset)), f"{self.path}: it is shorter than it was")
        return data


class Superblock:
    """Section 4: one copy. `fault` says why it does not count; `uuid` and `sequence` are there if its checksum is right."""

    def __init__(self, block, address):
        self.uuid, self.sequence, self.fault = None, 0, None
        try:
            self.decode(block, address)
        except Damage as fault:
            self.fault = fault

    def decode(self, block, address):
        need(block[:8] == b"DBS@393!", "not a DBS store: no magic")
        version, crc = struct.unpack_from("<II", block, 8)
        need(version == 0x20000, f"format {version >> 16}.{version >> 8 & 255}.{version & 255}, not 2.0.0")
        need(crc32c(block[:12] + bytes(4) + block[16:]) == crc, "superblock: checksum")
        self.uuid = block[16:32]
        self.sequence, place, _, self.features, incompat, _, self.size, self.extent = struct.unpack_from("<8Q", block, 32)
        self.clean, *self.marks = struct.unpack_from("<Q4I", block, 120)
        need(place == address, "superblock: written for another place")
        need(incompat & ~45 == 0, f"superblock: unknown features {incompat:#x}, or a repair that was cut off")
        need(1 <= self.sequence <= SEQUENCE_MAX and self.clean <= SEQUENCE_MAX, "superblock: sequence")
        need(self.extent in [1 << n for n in range(16, 23)], "superblock: extent size")
        table = {kind: struct.unpack_from("<IIQQ", block, 120 + 24 * kind) for kind in range(1, 17)}
        self.regions, end = {kind: region[2:] for kind, region in table.items() if region[0]}, 65536
        need(all(region[0] in (0, kind) for kind, region in table.items()), "superblock: regions")
        for offset, length in sorted(self.regions.values()):
            need(end <= offset and offset + length <= self.size - BLOCK, "superblock: regions")
            need(offset % BLOCK == length % BLOCK == 0, "superblock: regions")
            end = offset + length
        need(all(kind in self.regions for kind in range(1, 8)), "superblock: a region is missing")


class Store:
    def __init__(self, path, tail=None, verify=True, backing=()):
        self.file = os.open(path, os.O_RDONLY)
        self.given, self.labels, self.expanded = [Backing(each) for each in backing], {}, (None, b"")
        self.find_superblock(os.lseek(self.file, 0, os.SEEK_END))
        self.per_extent = self.super.extent // BLOCK
        self.entry = 16 + self.per_extent // 4
        self.verify, self.pages = verify and self.super.features & 1, {}
        self.recover(tail)
        self.find_layers()

    def read(self, offset, length):
        data = os.pread(self.file, length, offset)
        return data + bytes(length - len(data))

    def find_superblock(self, device):
        copies = [Superblock(self.read(at, BLOCK), at) for at in (0, BLOCK, device // BLOCK * BLOCK - BLOCK)]
        good = [copy for copy in copies if not copy.fault]
        need(good, copies[0].fault)
        best = max((copy for copy in good if copy.uuid == good[0].uuid), key=lambda copy: copy.sequence)
        for copy in copies if copies[0].fault else []:
            need(not copy.fault or copy.uuid != best.uuid or copy.sequence <= best.sequence, copy.fault)
        need(best.size <= device, f"the store is cut off: {device} of {best.size} bytes are there")
        self.super = best

    def header(self, block, kind, address):
        """Section 5: `lsn` and `extra` of a good copy, else None."""
        found, crc, place, lsn, store, extra = struct.unpack_from("<4sIQQ16s24s", block)
        good = (found, place, store) == (kind, address, self.super.uuid)
        return (lsn, extra) if good and crc32c(block[:4] + bytes(4) + block[8:]) == crc else None

    def mirrored(self, region, index):
        offset, length = self.super.regions[region]
        need(index < length // 2 // BLOCK, f"region {region}: block {index} is outside")
        copies = []
        for address in (offset + BLOCK * index, offset + length // 2 + BLOCK * index):
            block = self.read(address, BLOCK)
            head = self.header(block, MARKED.get(region, b"DBSl"), address)
            copies += [[head[0], bytearray(block[64:])]] if head else []
        need(copies, f"region {region}: both copies of block {index} are damaged")
        return max(copies, key=lambda copy: copy[0])

    def scan(self):
        """Section 8: the complete groups of the ring by sequence, and the rules of section 11, step 3."""
        offset, length = self.super.regions[JOURNAL]
        good, bad, groups = {}, [], {}
        for index in range(length // BLOCK):
            block = self.read(offset + BLOCK * index, BLOCK)
            if any(block):
                sectors = [block[at : at + 512] for at in range(0, BLOCK, 512)]
                head = self.header(b"".join(s[:504] + bytes(8) for s in sectors), b"DBSj", offset + BLOCK * index)
                if head:
                    payload = sectors[0][64:504] + b"".join(s[:504] for s in sectors[1:])
                    good[index] = (head[0], *struct.unpack("<IIIIQ", head[1]), payload)
                else:
                    bad.append(sectors)
        for index, (lsn, place, count, crc, used, session, _) in good.items():
            parts = [good.get(index + i) for i in range(min(count, len(good) + 1))] if place == 0 else [None]
            if all(part and part[:6] == (lsn, i, count, crc, used, session) for i, part in enumerate(parts)):
                payload = b"".join(part[6] for part in parts)[:used]
                if len(payload) == used and crc32c(payload) == crc:
                    groups[lsn] = (session, payload)
        last = max([*groups, self.super.clean])
        need(all(block[0] <= last + 1 for block in good.values()), "journal: a group is missing")
        for sectors in bad:
            stamps = [struct.unpack("<II", s[504:]) for s in sectors]
            right = [crc32c(s[:508]) == stamp[1] for s, stamp in zip(sectors, stamps)]
            damaged = any(any(s) and not ok for s, ok in zip(sectors, right))
            named = any(ok and stamp[0] == (last + 1) % (1 << 32) for ok, stamp in zip(right, stamps))
            need(not (damaged and named), f"journal: group {last + 1} is damaged")
        return groups

    def recover(self, tail):
        """Section 11: the state as of the last durable group, and the tail on top."""
        groups, clean, marks = self.scan(), self.super.clean, self.super.marks
        newest, redo = max(groups, default=0), range(0)
        durable = max(newest, clean)
        if newest > clean:
            checkpoint = self.checkpoint(groups[newest][1])[0]
            need(checkpoint < newest, "journal: checkpoint")
            redo = range(max(checkpoint, clean) + 1, newest + 1)
            need(all(group in groups for group in redo), "journal: a group is missing")
            if checkpoint > clean:
                marks = self.checkpoint(groups[redo[0]][1])[1:]
        self.blocks = {r: {i: self.mirrored(r, i) for i in range(mark)} for r, mark in zip(MARKED, marks)}
        for region, blocks in self.blocks.items():
            need(all(lsn <= durable for lsn, _ in blocks.values()), f"region {region}: newer than the journal")
        for group in redo:
            self.redo(group, groups[group][1])
        if tail and newest > clean:
            for frame in self.frames(tail, groups[newest][0], durable):
                self.redo(durable + 1, frame)

    def checkpoint(self, payload):
        tag, body = next(self.records(payload))
        need(tag == 1 and len(body) == 41, "journal: a group without a checkpoint")
        return struct.unpack_from("<Q4I", body)

    def records(self, payload):
        """Section 9."""
        at = 0
        while at < len(payload):
            tag, zero, length = struct.unpack("<BBH", payload[at : at + 4].ljust(4, b"\xff"))
            at += 4 + length
            need(zero == 0 and at <= len(payload), "records: length")
            yield tag, payload[at - length : at]

    def redo(self, group, payload):
        half, entry = self.per_extent // 8, self.entry
        for tag, body in self.records(payload):
            # Length of the body; region and size of the item that is changed.
            slots = {2: (508, VOLUMES, 504), 3: (508, SNAPSHOTS, 504), 10: (8, SNAPSHOTS, 504)}
            entries = {5: (4 + entry, EXTENTS, entry), 7: (9, EXTENTS, entry), 8: (4, EXTENTS, entry)}
            length, region, size = (slots | entries | {1: (41, 0, 0), 9: (5, 0, 0)}).get(tag, (len(body), 0, 0))
            need(len(body) == length and (tag in (1, 4, 9) or region), f"records: tag {tag} with {len(body)} bytes")
            (index,) = struct.unpack_from("<I", body)
            if tag == 9:
                need(body[4] < 4, "records: mark")
                for new in range(index):
                    self.blocks[list(MARKED)[body[4]]].setdefault(new, [0, bytearray(4032)])
            if tag == 4:
                self.labels[index] = body[4:].ljust(4032, b"\0")
            if not region:
                continue
            if tag in entries and index >= SPARE_BASE:
                region, index = SPARES, index - SPARE_BASE
            lsn, items = self.blocks[region].get(index // (4032 // size)) or need(0, "records: behind the mark")
            at = index % (4032 // size) * size
            if lsn >= group:
                continue
            if tag in (2, 3, 5):
                items[at : at + size] = body[4:]
            elif tag == 8:
                items[at : at + size] = bytes(size)
            elif tag == 10:
                items[at + 40 : at + 44] = body[4:]
                struct.pack_into("<IH", items, at + 48, DELETED, 0)
                items[at + 64 : at + 320] = bytes(256)
            else:
                start, count, state = struct.unpack_from("<HHB", body, 4)
                need(start + count <= self.per_extent and state <= 2, "records: fill")
                mask = ((1 << count) - 1) << start
                for bitmap, first in ((1, at + 16), (2, at + 16 + half)):
                    old = int.from_bytes(items[first : first + half], "little") & ~mask
                    items[first : first + half] = (old | mask * (state == bitmap)).to_bytes(half, "little")

    def frames(self, path, session, durable):
        """Section 12."""
        with open(path, "rb") as file, open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            data, boot = file.read(), uuid.UUID(boot.read().strip()).bytes
        key = b"DBStail2" + self.super.uuid + boot + struct.pack("<Q", session)
        if data[:52] != key + struct.pack("<I", crc32c(key[8:])):
            return []
        size, frames = (len(data) - BLOCK) // 2, []
        for wanted in (durable + 1, durable + 2):
            half = data[BLOCK + wanted % 2 * size :][:size]
            group, used = struct.unpack_from("<QQ", half)
            at = 64
            while group == wanted and at < 64 + used:
                length, crc = struct.unpack_from("<II", half.ljust(at + 8, b"\0"), at)
                frames.append(half[at + 8 : at + 8 + length])
                at += 8 + length
                if at > min(64 + used, size) or crc32c(frames[-1]) != crc:
                    return []
        return frames

    def items(self, region, size):
        """Items in use: number, bytes."""
        for index, (_, items) in sorted(self.blocks[region].items()):
            for place in range(4032 // size):
                item = bytes(items[place * size : place * size + size])
                if any(item):
                    yield index * (4032 // size) + place, item

    def find_layers(self):
        """Sections 6 and 7."""
        self.volumes, self.snapshots, self.layers, self.bases, self.stored = {}, {}, {}, {}, {}
        for number, slot in self.items(VOLUMES, 504):
            uid, size, made, _, head, _, length = struct.unpack_from("<16sQQQIIH", slot)
            self.volumes[slot[64 : 64 + length].decode()] = (number + 1, head, size, made, uid)
        for number, slot in self.items(SNAPSHOTS, 504):
            uid, size, made, _, volume, parent, flags, length = struct.unpack_from("<16sQQQIIIH", slot)
            named = slot[64 : 64 + length].decode() if not flags & (HEAD | DELETED) else None
            self.snapshots[number + 1] = (volume, parent, named, size, made, uid)
            self.layers[number + 1] = ({}, [])
            if flags & BACKED:
                label = self.label(number) if flags & LABELLED else "which one is lost"
                found = [each for each in self.given if each.identity == label]
                self.bases[number + 1] = (size // BLOCK, label, (found or [None])[0])
        labels = sorted({label for _, label, _ in self.bases.values()})
        for each in self.given:
            need(each.identity in labels, f"{each.path}: no volume rests on this file ({each.identity}), but on {labels}")
        half = self.per_extent // 8
        for region in (EXTENTS, SPARES):
            for number, item in self.items(region, self.entry):
                owner, logical, run, state = struct.unpack_from("<4I", item)
                entries, runs = self.layers.get(owner, ({}, []))
                if run:
                    runs.append((logical, logical + run, state))
                    continue
                data, zero = (int.from_bytes(bits, "little") for bits in (item[16 : 16 + half], item[16 + half :]))
                need(data & zero == 0 and logical not in entries, f"region {region}: entry {number}")
                need(state == 0 or (region == EXTENTS and state & 0xFFFF == 1), f"region {region}: state of entry {number}")
                entries[logical] = (number, data, zero)
                if state:
                    self.stored[number] = state >> 16

    def label(self, slot):
        """Section 6: the text of a base's only label."""
        count, data = 0, b""
        for index in (2 * slot, 2 * slot + 1):
            if len(data) <= count:
                data += self.labels[index] if index in self.labels else bytes(self.mirrored(LABELS, index)[1])
                count = 4 + struct.unpack_from("<I", data)[0]
        need(data[4:14] == struct.pack("<IH4s", 1, 4, b"file"), f"snapshot {slot + 1}: the labels of a base")
        (length,) = struct.unpack_from("<H", data, 14)
        return data[16 : 16 + length].decode()

    def shown(self, snapshot, logical):
        """Section 10: the data of a volume extent, as (first block, blocks, data extent, or minus a base for its file)."""
        left, steps = (1 << self.per_extent) - 1, 0
        while snapshot and left:
            need(snapshot in self.snapshots and steps < len(self.snapshots), "snapshot table: parents")
            entries, runs = self.layers[snapshot]
            if logical in entries:
                extent, data, zero = entries[logical]
                rest = data & left
                while rest:
                    block = (rest & -rest).bit_length() - 1
                    count = (~(rest >> block) & (rest >> block) + 1).bit_length() - 1
                    yield block, count, extent
                    rest &= ~(((1 << count) - 1) << block)
                left &= ~(data | zero)
            else:
                states = [state for start, end, state in runs if start <= logical < end]
                need(1 not in states, f"what volume extent {logical} held is lost")
                if states:
                    return
            for block in range(self.per_extent if snapshot in self.bases else 0):
                if left >> block & 1 and logical * self.per_extent + block < self.bases[snapshot][0]:
                    yield block, 1, -snapshot
            snapshot, steps = self.snapshots[snapshot][1], steps + 1

    def sums(self, page):
        """Section 21: the sums of a page; all unknown if the page, or the leader of its group, says that they do not count."""
        found = []
        for each in (page, page // 16 * 16):
            address = self.super.regions[SUMS][0] + BLOCK * each
            block = self.read(address, BLOCK)
            head = self.header(block, b"DBSc", address)
            state, group = struct.unpack_from("<II", head[1]) if head else (0, 0)
            found.append((state if group in (0, 1) else 0, group, block))
        (state, _, block), (leader, group, first) = found
        counts = state == 2 and (leader in (1, 2) and group == 0 or not any(first))
        return struct.unpack_from("<1008I", block, 64) if counts else [0] * 1008

    def compare(self, first, data):
        """Section 21: blocks of the data region, from `first` on, with what their pages say."""
        for block, at in enumerate(range(0, len(data), BLOCK), first):
            if block // 1008 not in self.pages:
                self.pages[block // 1008] = self.sums(block // 1008)
            wanted = self.pages[block // 1008][block % 1008]
            need(wanted in (0, crc32c(data[at : at + BLOCK]) or 1), f"data region: block {block} is not what was written")

    def blocks_of(self, extent, block, count):
        first = extent * self.per_extent + block
        data = self.read(self.super.regions[DATA][0] + BLOCK * first, BLOCK * count)
        if self.verify:
            self.compare(first, data)
        return data

    def expand(self, extent):
        """Section 24: what a compressed extent holds. The last one is remembered."""
        if self.expanded[0] != extent:
            stored, frames = self.blocks_of(extent, 0, self.stored[extent]), self.super.extent // FRAME
            magic, crc, count = struct.unpack_from("<4sII", stored)
            right = (magic, count) == (b"DBSi", frames) and crc32c(stored[:4] + bytes(4) + stored[8:BLOCK]) == crc
            need(right, f"data region: extent {extent}: no index of what is compressed")
            out, at = [], BLOCK
            for frame in range(frames):
                crc, length = struct.unpack_from("<IH", stored, 16 + 8 * frame)
                data = stored[at : at + length]
                try:
                    out.append(bytes(FRAME) if length == 0 else data if length == FRAME else lz4(data))
                except IndexError:
                    out.append(b"")
                need(len(out[-1]) == FRAME and crc32c(out[-1]) == crc, f"data region: extent {extent}: frame {frame} is damaged")
                at += length
            self.expanded = (extent, b"".join(out))
        return self.expanded[1]

    def export(self, snapshot, size, path):
        with open(path, "xb") as file:
            try:
                self.fill(file, snapshot, size)
            except (Damage, OSError):
                os.unlink(path)
                raise

    def fill(self, file, snapshot, size):
        file.truncate(size)
        for logical in range(-(-size // self.super.extent)):
            for block, count, extent in self.shown(snapshot, logical):
                at = logical * self.super.extent + BLOCK * block
                if extent < 0:
                    _, label, found = self.bases[-extent]
                    need(found, f"what byte {at} holds is in a backing file, give it with --backing: {label}")
                    os.pwrite(file.fileno(), found.at(at, BLOCK * count)[: max(0, size - at)], at)
                    continue
                if extent in self.stored:
                    data = self.expand(extent)[BLOCK * block : BLOCK * (block + count)]
                else:
                    data = self.blocks_of(extent, block, count)
                os.pwrite(file.fileno(), data[: max(0, size - at)], at)

    def all(self):
        """Every volume and snapshot: name, snapshot to read, size, time, uuid."""
        for name, (number, head, *facts) in sorted(self.volumes.items()):
            yield (name, head, *facts)
            for snapshot, (volume, _, named, *facts) in self.snapshots.items():
                if volume == number and named is not None:
                    yield (f"{name}@{named}", snapshot, *facts)


def main():
    args = argparse.ArgumentParser(description="Lists what is in a DBS store as JSON, or exports it as raw images.")
    args.add_argument("store", help="file or block device; it is only read")
    args.add_argument("names", nargs="*", metavar="VOLUME[@SNAPSHOT]", help="all, if none is given")
    args.add_argument("--export", metavar="DIRECTORY", help="raw images go here, as NAME.raw; none is written over")
    args.add_argument("--tail", metavar="FILE", help="the tail of the last process, if it was killed in this boot")
    args.add_argument("--backing", metavar="FILE", action="append", default=[], help="a raw file that volumes rest on")
    args.add_argument("--no-verify", action="store_true", help="do not compare data with its checksums")
    args = args.parse_args()
    try:
        store = Store(args.store, args.tail, not args.no_verify, args.backing)
        found = [each for each in store.all() if each[0] in args.names or not args.names]
        need(len(found) >= len(args.names), "no such volume or snapshot; without names all are listed")
        for name, snapshot, size, *_ in found if args.export else []:
            file = name.replace("%", "%25").replace("/", "%2F") + ".raw"
            store.export(snapshot, size, os.path.join(args.export, file))
        facts = [(n, size, made, str(uuid.UUID(bytes=uid))) for n, _, size, made, uid in found]
        print(json.dumps([dict(zip(("name", "size", "created_ns", "uuid"), each)) for each in facts], indent=1))
    except (Damage, OSError, UnicodeError) as error:
        sys.exit(f"dbs-reader: {args.store}: {error}")


if __name__ == "__main__":
    main()
