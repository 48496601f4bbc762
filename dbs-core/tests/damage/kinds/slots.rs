//! Volume and snapshot slots, the tree, and labels.

use super::{Kind, LABEL, SNAPSHOT, VOLUME, corrupt};
use crate::plant::{LABELS, Plant, VOLUMES, name};

/// Fields of volume slots.
pub fn volumes() -> Vec<Kind> {
    vec![
        corrupt(VOLUME, "a volume without a name", &["name", "cannot be found"], |p| {
            p.volume("beta", |v| (v.name, v.name_bytes) = name(b""))
        }),
        corrupt(VOLUME, "a volume's name not UTF-8", &["name", "cannot be found"], |p| {
            p.volume("beta", |v| (v.name, v.name_bytes) = name(b"\xff\xfe"))
        }),
        corrupt(VOLUME, "a volume's name with `@`", &["name", "cannot be found"], |p| {
            p.volume("beta", |v| (v.name, v.name_bytes) = name(b"a@b"))
        }),
        corrupt(VOLUME, "a volume's name too long", &["name", "cannot be found"], |p| {
            p.volume("beta", |v| v.name_bytes = 300.into())
        }),
        corrupt(VOLUME, "bytes behind a volume's name", &["name", "cannot be found"], |p| {
            p.volume("beta", |v| v.name[200] = 1)
        }),
        corrupt(VOLUME, "two volumes of one name", &["twice", "cannot be found"], |p| {
            let index = p.volume("beta", |v| (v.name, v.name_bytes) = name(b"alpha"));
            index.max(Some(p.volume_slot("alpha")))
        }),
        corrupt(VOLUME, "a volume of no size", &["impossible size 0", "not known"], |p| {
            p.volume("beta", |v| v.size = 0.into())
        }),
        corrupt(VOLUME, "a volume of half a sector", &["impossible size 700"], |p| {
            p.volume("beta", |v| v.size = 700.into())
        }),
        corrupt(VOLUME, "a volume too large", &["impossible size", "not known"], |p| {
            p.volume("beta", |v| v.size = (1 << 60).into())
        }),
        corrupt(VOLUME, "unknown flags of a volume", &["unknown flags 0x80"], |p| {
            p.volume("beta", |v| v.flags = 0x80.into())
        }),
        corrupt(VOLUME, "a volume without a head", &["head", "does not exist", "not known"], |p| {
            p.volume("beta", |v| v.head = 0.into())
        }),
        corrupt(VOLUME, "a head that is a free slot", &["does not exist", "not known"], |p| {
            p.volume("beta", |v| v.head = 16.into())
        }),
        corrupt(VOLUME, "a head behind the table", &["does not exist", "not known"], |p| {
            p.volume("beta", |v| v.head = u32::MAX.into())
        }),
        corrupt(VOLUME, "a head that is a snapshot", &["is not a head of it"], |p| {
            let id = p.snapshot_slot("copy@x") as u32 + 1;
            p.volume("copy", |v| v.head = id.into())
        }),
        corrupt(VOLUME, "another volume's head", &["is not a head of it", "not known"], |p| {
            let id = p.snapshot_slot("alpha") as u32 + 1;
            p.volume("beta", |v| v.head = id.into())
        }),
        corrupt(VOLUME, "a volume behind the table's end", &["behind the table's end"], |p| {
            let bytes = p.get(p.address(VOLUMES, 0, 0) + 64, 504);
            p.seal(VOLUMES, 0, 0, |payload| payload[6 * 504..7 * 504].copy_from_slice(&bytes));
            Some(6)
        }),
    ]
}

/// Fields of snapshot slots, and the tree.
pub fn snapshots() -> Vec<Kind> {
    let mut kinds = snapshot_fields();
    kinds.extend(trees());
    kinds
}

fn snapshot_fields() -> Vec<Kind> {
    vec![
        corrupt(SNAPSHOT, "neither in use nor free", &["neither in use nor free (7)"], |p| {
            p.snapshot("copy@x", |s| s.used = 7)
        }),
        corrupt(SNAPSHOT, "marked free, with content", &["neither in use nor free (0)"], |p| {
            p.snapshot("copy@x", |s| s.used = 0)
        }),
        corrupt(SNAPSHOT, "a snapshot of no size", &["impossible size 0", "not known"], |p| {
            p.snapshot("copy@x", |s| s.size = 0.into())
        }),
        corrupt(SNAPSHOT, "a snapshot too large", &["impossible size", "not known"], |p| {
            p.snapshot("copy@x", |s| s.size = (1 << 50).into())
        }),
        corrupt(VOLUME, "a head of another size", &["has 4096 bytes, not", "not known"], |p| {
            p.snapshot("beta", |s| s.size = 4096.into());
            Some(p.volume_slot("beta"))
        }),
        corrupt(SNAPSHOT, "unknown flags of a snapshot", &["unknown flags 0x4000"], |p| {
            p.snapshot("copy@x", |s| s.flags = (s.flags.get() | 0x4000).into())
        }),
        corrupt(SNAPSHOT, "a deleted head", &["both a head and deleted", "not known"], |p| {
            p.snapshot("beta", |s| s.flags = (s.flags.get() | 8).into())
        }),
        corrupt(SNAPSHOT, "a snapshot without a name", &["name", "cannot be found"], |p| {
            p.snapshot("copy@x", |s| (s.name, s.name_bytes) = name(b""))
        }),
        corrupt(SNAPSHOT, "a snapshot's name not UTF-8", &["name", "cannot be found"], |p| {
            p.snapshot("copy@x", |s| (s.name, s.name_bytes) = name(b"\xc0"))
        }),
        corrupt(SNAPSHOT, "a snapshot's name with spaces", &["name", "cannot be found"], |p| {
            p.snapshot("copy@x", |s| (s.name, s.name_bytes) = name(b" x "))
        }),
        corrupt(SNAPSHOT, "a name on a head", &["a name on a head"], |p| {
            p.snapshot("beta", |s| (s.name, s.name_bytes) = name(b"x"))
        }),
        corrupt(SNAPSHOT, "two snapshots of one name", &["twice", "cannot be found"], |p| {
            let index = p.snapshot("alpha@three", |s| (s.name, s.name_bytes) = name(b"two"));
            index.max(Some(p.snapshot_slot("alpha@two")))
        }),
        corrupt(SNAPSHOT, "a snapshot of no volume", &["volume 0", "nobody can find it"], |p| {
            p.snapshot("copy@x", |s| s.volume = 0.into())
        }),
        corrupt(SNAPSHOT, "a snapshot of a free volume", &["volume 4", "nobody can find"], |p| {
            p.snapshot("copy@x", |s| s.volume = 4.into())
        }),
        corrupt(SNAPSHOT, "a deleted one of a free volume", &["volume 4", "nobody"], |p| {
            p.snapshot("", |s| s.volume = 4.into())
        }),
        corrupt(VOLUME, "a head of another volume", &["is not a head of it", "not known"], |p| {
            let other = p.volume_slot("alpha") as u32 + 1;
            p.snapshot("beta", |s| s.volume = other.into());
            Some(p.volume_slot("beta"))
        }),
    ]
}

fn trees() -> Vec<Kind> {
    vec![
        corrupt(SNAPSHOT, "a parent that is free", &["parent", "does not exist", "shows"], |p| {
            p.snapshot("copy@x", |s| s.parent = 16.into())
        }),
        corrupt(SNAPSHOT, "a parent behind the table", &["parent", "does not exist"], |p| {
            p.snapshot("copy@x", |s| s.parent = 77_777.into())
        }),
        corrupt(SNAPSHOT, "its own parent", &["loop", "not known"], |p| {
            let own = p.snapshot_slot("copy@x") as u32 + 1;
            p.snapshot("copy@x", |s| s.parent = own.into())
        }),
        corrupt(SNAPSHOT, "a loop of three", &["loop", "not known"], |p| {
            let top = p.snapshot_slot("alpha@three") as u32 + 1;
            p.snapshot("", |s| s.parent = top.into());
            let slots = ["", "alpha@two", "alpha@three"].map(|spec| p.snapshot_slot(spec));
            slots.into_iter().min()
        }),
        corrupt(VOLUME, "a parent that is a head", &["has children", "would change"], |p| {
            let head = p.snapshot_slot("beta") as u32 + 1;
            p.snapshot("copy@x", |s| s.parent = head.into());
            Some(p.volume_slot("beta"))
        }),
        corrupt(SNAPSHOT, "a second head", &["a head of no volume", "nobody can find"], |p| {
            p.snapshot("alpha@three", |s| {
                s.flags = 1.into();
                (s.name, s.name_bytes) = name(b"");
            })
        }),
        corrupt(VOLUME, "a head without its flag", &["is not a head of it"], |p| {
            p.snapshot("beta", |s| {
                s.flags = 0.into();
                (s.name, s.name_bytes) = name(b"top");
            });
            Some(p.volume_slot("beta"))
        }),
        corrupt(VOLUME, "a head without its slot", &["does not exist", "not known"], |p| {
            p.snapshot("beta", |s| *s = zerocopy::FromZeros::new_zeroed());
            Some(p.volume_slot("beta"))
        }),
        corrupt(SNAPSHOT, "a parent without its slot", &["does not exist", "not known"], |p| {
            p.snapshot("", |s| *s = zerocopy::FromZeros::new_zeroed());
            Some(p.snapshot_slot("alpha@two").min(p.snapshot_slot("copy@x")))
        }),
        corrupt(SNAPSHOT, "a volume without its slot", &["does not exist", "nobody"], |p| {
            p.volume("beta", |v| *v = zerocopy::FromZeros::new_zeroed());
            Some(p.snapshot_slot("beta"))
        }),
    ]
}

pub fn labels() -> Vec<Kind> {
    fn edit(p: &Plant<'_>, at: usize, bytes: &[u8]) -> Option<u64> {
        let block = 2 * p.snapshot_slot("alpha@two");
        p.seal(LABELS, block, 0, |payload| payload[at..at + bytes.len()].copy_from_slice(bytes));
        Some(block)
    }
    vec![
        corrupt(LABEL, "labels too long", &["impossible labels", "lost"], |p| {
            edit(p, 0, &9000u32.to_le_bytes())
        }),
        corrupt(LABEL, "labels cut off", &["impossible labels", "lost"], |p| {
            edit(p, 0, &7u32.to_le_bytes())
        }),
        corrupt(LABEL, "more labels than there are", &["impossible labels", "lost"], |p| {
            edit(p, 4, &9u32.to_le_bytes())
        }),
        corrupt(LABEL, "a label not UTF-8", &["impossible labels", "lost"], |p| {
            edit(p, 10, &[0xff])
        }),
        corrupt(LABEL, "labelled without labels", &["impossible labels", "lost"], |p| {
            p.snapshot("copy@x", |s| s.flags = (s.flags.get() | 16).into());
            Some(2 * p.snapshot_slot("copy@x"))
        }),
    ]
}
