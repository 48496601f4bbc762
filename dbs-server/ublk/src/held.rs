//! What devices hold: volumes and snapshots, found by their identity, whatever they are called now.
//!
//! The users of a device that waits for a server go on when there is one, with what they know of the content. So
//! a device holds its volume from before its first user until it is removed: who has the store open takes the
//! holder before anybody can ask for anything, be it a server or a command on an idle store.

use super::record::{Attached, Record, State, block_size, records, state};
use dbs_core::info::{Holder, HolderInfo, HolderKind};
use dbs_core::{Error, Result, Store, Volume};
use dbs_reactor::ublk::{Control, block_path};
use nix::libc;
use std::collections::BTreeMap;
use std::path::Path;

/// Opens what a device was made of, and notes what that is called now.
///
/// # Errors
/// `NotFound` if it is not there any more.
pub(super) fn find_again(store: &Store, record: &mut Record) -> Result<Volume> {
    look_up(store, record)?;
    store.volume(&record.spec())
}

/// As [`find_again`], in the name of the device.
///
/// # Errors
/// As [`find_again`]; `Busy` if the volume is incomplete. A snapshot was complete when its device was made: the
/// device does not end because the volume is rebuilt now. One that is locked is held, too: what its users have not
/// written yet belongs to what is there.
pub(super) fn hold(store: &Store, record: &mut Record) -> Result<Volume> {
    look_up(store, record)?;
    let spec = record.spec();
    let holder = Holder {
        kind: HolderKind::Device,
        who: format!("the block device {}", block_path(record.id).display()),
        id: None,
        writes: !record.read_only,
        alone: !record.read_only,
        remedy: format!("detach it first: `dbs detach {spec}`"),
    };
    let volume = store.volume_for(&spec, holder)?;
    if record.snapshot.is_some() { Ok(volume) } else { volume.whole() }
}

fn look_up(store: &Store, record: &mut Record) -> Result<()> {
    let gone = || {
        Error::not_found(format!(
            "{} is not in the store any more; `dbs detach --force` removes its device",
            block_path(record.id).display()
        ))
    };
    let volumes = store.volumes(false);
    let volume = volumes.into_iter().find(|v| v.uuid == record.volume_uuid).ok_or_else(gone)?;
    let mut found = None;
    if record.snapshot.is_some() {
        let snapshots = store.snapshots(&volume.name, false)?;
        let same = |uuid: &String| record.snapshot_uuid.as_ref() == Some(uuid);
        let snapshot = snapshots.into_iter().find(|s| same(&s.uuid)).ok_or_else(gone)?;
        found = Some(snapshot.name);
    }
    (record.volume, record.snapshot) = (volume.name, found);
    Ok(())
}

/// Holds what the devices of a store are made of that wait for its next server, each under its number. As long as
/// the handles live, nothing takes content from the users of these devices.
#[must_use]
pub fn hold_waiting(store: &Store, runtime_dir: &Path) -> BTreeMap<u32, Volume> {
    let Some(key) = store.key() else { return BTreeMap::new() };
    let found = records(runtime_dir, Some(&key));
    if found.is_empty() {
        return BTreeMap::new();
    }
    let mut control = Control::open().ok();
    hold_those(store, found, |record| is_there(control.as_mut(), record))
}

/// A device of the store with this key that is there, or may be: it would lose its content with the store.
#[must_use]
pub fn first_left(runtime_dir: &Path, store_key: &str) -> Option<Attached> {
    let mut control = Control::open().ok();
    let mut records = records(runtime_dir, Some(store_key)).into_iter();
    let found = records.find(|record| is_there(control.as_mut(), record))?;
    Some(found.attached(State::Unknown, None))
}

/// Refuses to write a volume beside a device that has it to itself.
///
/// # Errors
/// `ReadOnly`, which names the device.
pub fn check_unwritten(store: &Store, volume: &str) -> Result<()> {
    let alone =
        |held: &HolderInfo| held.holder.alone && held.snapshot.is_none() && held.volume == volume;
    match store.holders().into_iter().find(alone) {
        None => Ok(()),
        Some(HolderInfo { holder, .. }) => Err(Error::read_only(format!(
            "volume `{volume}` is written by {} alone; {}",
            holder.who, holder.remedy
        ))),
    }
}

/// Refuses a device that writes a volume which others write: a virtual machine, or an NBD client, which would go on as it
/// began. The kernel keeps what it has read and takes it for what is there.
///
/// # Errors
/// `Busy`, which names who writes.
pub(super) fn check_no_writer(store: &Store, volume: &str) -> Result<()> {
    let writes = |held: &HolderInfo| {
        let Holder { kind, alone, writes, .. } = held.holder;
        let same = held.snapshot.is_none() && held.volume == volume;
        (alone || writes) && kind != HolderKind::Device && same
    };
    match store.holders().into_iter().find(writes) {
        None => Ok(()),
        Some(HolderInfo { holder, .. }) => Err(Error::busy(format!(
            "volume `{volume}` is open for writing by the {}; {}",
            holder.who, holder.remedy
        ))),
    }
}

fn hold_those(
    store: &Store,
    records: Vec<Record>,
    mut is_there: impl FnMut(&Record) -> bool,
) -> BTreeMap<u32, Volume> {
    let hold = |mut record: Record| {
        // What is not in the store any more, nobody can take.
        is_there(&record).then(|| hold(store, &mut record).ok()).flatten().map(|v| (record.id, v))
    };
    records.into_iter().filter_map(hold).collect()
}

/// Whether a record's device is there, or may be, and can have users.
fn is_there(control: Option<&mut Control>, record: &Record) -> bool {
    // Without the right to ask, what everybody sees must do.
    let seen = || block_size(record.id).is_some();
    match control.map(|control| control.info(record.id)) {
        Some(Ok(info)) => info.mark == record.mark && state(info.state) != State::Dead,
        Some(Err(error)) => error.raw_os_error() != Some(libc::ENODEV) && seen(),
        None => seen(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::{ErrorKind, InitOptions, OpenOptions};

    fn store(dir: &Path) -> Store {
        let path = dir.join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("a", 8 << 20).unwrap();
        store.create_snapshot("a", "s", &Default::default()).unwrap();
        store
    }

    fn record(store: &Store, id: u32, snapshot: Option<&str>) -> Record {
        let uuid = |name: &str| store.snapshot_info("a", name).unwrap().uuid;
        Record {
            id,
            mark: 1,
            store: "s".into(),
            store_uuid: store.info().uuid,
            store_key: store.key().unwrap(),
            volume: "a".to_owned(),
            volume_uuid: store.volume_info("a").unwrap().uuid,
            snapshot: snapshot.map(str::to_owned),
            snapshot_uuid: snapshot.map(uuid),
            size: 8 << 20,
            read_only: snapshot.is_some(),
            queues: 1,
            depth: 1,
            link: None,
        }
    }

    #[test]
    fn a_device_that_waits_keeps_its_content_whatever_it_is_called_by_now() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let records = vec![record(&store, 12, None), record(&store, 13, Some("s"))];
        // Renamed since, and the old name is that of another by now.
        store.rename_volume("a", "b").unwrap();
        store.rename_snapshot("b", "s", "t").unwrap();
        store.create_volume("a", 8 << 20).unwrap();
        let held = hold_those(&store, records.clone(), |_| true);
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), [12, 13]);
        for refused in [
            store.rollback("b", "t"),
            store.resize_volume("b", 4096),
            store.delete_volume("b"),
            store.delete_snapshot("b", "t"),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            let text = error.to_string();
            assert!(text.contains("/dev/ublkb1") && text.contains("`dbs detach b"), "{text}");
        }
        let refused = check_unwritten(&store, "b").unwrap_err();
        assert!(refused.kind() == ErrorKind::ReadOnly && refused.to_string().contains("ublkb12"));
        check_unwritten(&store, "a").unwrap();
        check_unwritten(&store, "b@t").unwrap();
        store.delete_volume("a").unwrap();
        drop(held);
        check_unwritten(&store, "b").unwrap();
        store.rollback("b", "t").unwrap();
        // Nobody waits at what is not there.
        assert!(hold_those(&store, records.clone(), |_| false).is_empty());
        store.delete_volume("b").unwrap();
        assert!(hold_those(&store, records, |_| true).is_empty());
    }

    #[test]
    fn a_device_that_waits_keeps_a_volume_that_is_locked() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        store.delete_volume("a").unwrap();
        store.create_encrypted("a", 8 << 20, &dbs_core::Secret::KeyFile([1; 32].into())).unwrap();
        store.create_snapshot("a", "s", &Default::default()).unwrap();
        store.lock("a").unwrap();
        let records = vec![record(&store, 12, None), record(&store, 13, Some("s"))];
        let held = hold_those(&store, records, |_| true);
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), [12, 13]);
        // No key is needed for these.
        for refused in
            [store.rollback("a", "s"), store.resize_volume("a", 4096), store.delete_volume("a")]
        {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Busy);
        }
        assert!(check_unwritten(&store, "a").is_err());
        assert_eq!(held[&12].check_not_locked().unwrap_err().kind(), ErrorKind::Locked);
    }

    #[test]
    fn a_record_of_an_earlier_boot_holds_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let run = dir.path().join("run");
        let record = record(&store, 999_999, None);
        record.save(&run).unwrap();
        assert!(!is_there(None, &record));
        assert!(hold_waiting(&store, &run).is_empty() && store.holders().is_empty());
    }
}
