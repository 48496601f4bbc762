//! What outlives a server: a file for each device in the runtime directory, by which the next server
//! of the store knows what it takes over, and a link for its users.

use dbs_core::{Error, Result};
use dbs_reactor::ublk::{Control, DeviceState, block_path};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Where links to devices are: `STORE/VOLUME` or `STORE/VOLUME@SNAPSHOT` below it.
pub const LINKS: &str = "/dev/dbs";

/// What the next server must know of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// Number of the device.
    pub id: u32,
    /// What the kernel knows it by: numbers are used again.
    pub mark: u64,
    pub store: PathBuf,
    pub store_uuid: String,
    /// [`dbs_core::Store::key`]: a copy has the same uuid. Older servers left none.
    #[serde(default)]
    pub store_key: String,
    pub volume: String,
    pub volume_uuid: String,
    pub snapshot: Option<String>,
    pub snapshot_uuid: Option<String>,
    pub size: u64,
    pub read_only: bool,
    pub queues: u16,
    pub depth: u16,
    pub link: Option<PathBuf>,
}

/// Whether a device is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A server answers its users.
    Live,
    /// Its users wait for the next server.
    Waiting,
    /// There is no block device, only what is left of one.
    Dead,
    /// Not to be seen from here, without the right to ask.
    Unknown,
}

/// An attached volume or snapshot: the result of `device.attach`, and an item of `device.list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The block device.
    pub device: PathBuf,
    /// The link to it, if there could be one.
    pub link: Option<PathBuf>,
    /// The store's path, as its server was given it.
    pub store: PathBuf,
    /// The store's uuid.
    pub store_uuid: String,
    /// What tells the store from copies of it: `UUID-DEVICE-INODE`, or `UUID-DEVICE`.
    #[serde(default)]
    pub store_key: String,
    /// Volume.
    pub volume: String,
    /// Its snapshot, if one is attached.
    pub snapshot: Option<String>,
    /// Size of the block device in bytes.
    pub size: u64,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Queues.
    pub queues: u16,
    /// Requests of a queue at a time.
    pub depth: u16,
    /// Whether it is served.
    pub state: State,
    /// The process that serves it.
    pub pid: Option<u32>,
}

impl Attached {
    /// `VOLUME` or `VOLUME@SNAPSHOT`.
    #[must_use]
    pub fn spec(&self) -> String {
        spec(&self.volume, self.snapshot.as_deref())
    }
}

/// `VOLUME` or `VOLUME@SNAPSHOT`.
pub(super) fn spec(volume: &str, snapshot: Option<&str>) -> String {
    snapshot.map_or_else(|| volume.to_owned(), |snapshot| format!("{volume}@{snapshot}"))
}

impl Record {
    pub fn spec(&self) -> String {
        spec(&self.volume, self.snapshot.as_deref())
    }

    /// For people and programs.
    pub fn attached(&self, state: State, pid: Option<u32>) -> Attached {
        Attached {
            device: block_path(self.id),
            link: self.link.clone(),
            store: self.store.clone(),
            store_uuid: self.store_uuid.clone(),
            store_key: self.store_key.clone(),
            volume: self.volume.clone(),
            snapshot: self.snapshot.clone(),
            size: self.size,
            read_only: self.read_only,
            queues: self.queues,
            depth: self.depth,
            state,
            pid,
        }
    }

    fn path(&self, runtime_dir: &Path) -> PathBuf {
        let store = if self.store_key.is_empty() { &self.store_uuid } else { &self.store_key };
        runtime_dir.join(format!("{store}.ublk-{}", self.id))
    }

    fn is_of(&self, store_key: &str) -> bool {
        let old = self.store_key.is_empty() && store_key.starts_with(&self.store_uuid);
        old || self.store_key == store_key
    }

    /// Writes it, in one step.
    ///
    /// # Errors
    /// `Io`.
    pub fn save(&self, runtime_dir: &Path) -> Result<()> {
        let path = self.path(runtime_dir);
        let named = |e| Error::io(e, format!("writing {}", path.display()));
        let text = serde_json::to_vec(self).map_err(|e| named(io::Error::other(e)))?;
        let next = path.with_extension(format!("ublk-{}.new", self.id));
        fs::create_dir_all(runtime_dir)
            .and_then(|()| fs::write(&next, text))
            .and_then(|()| fs::rename(&next, &path))
            .map_err(named)
    }

    /// Forgets the device, and its link.
    pub fn forget(&self, runtime_dir: &Path) {
        self.unlink();
        // If it stays, it is seen to be of no device.
        let _ = fs::remove_file(self.path(runtime_dir));
    }

    /// Makes the link to the block device, where another device's is not; says where.
    ///
    /// # Errors
    /// Why there can be none, which is no reason not to attach.
    pub fn link(&mut self, links: &Path) -> io::Result<()> {
        self.unlink();
        let device = block_path(self.id);
        let mut result = Err(io::ErrorKind::AlreadyExists.into());
        for store in store_names(&self.store, &self.store_uuid) {
            let directory = links.join(store);
            let path = directory.join(component(&self.spec()));
            result = make_link(&directory, &path, &device);
            if result.is_ok() {
                self.link = Some(path);
                break;
            }
        }
        result
    }

    /// Takes the link away, if it is this device's.
    fn unlink(&self) {
        let Some(link) = &self.link else { return };
        if fs::read_link(link).is_ok_and(|target| target == block_path(self.id)) {
            let _ = fs::remove_file(link);
        }
        if let Some(directory) = link.parent() {
            // Not while there are others in it.
            let _ = fs::remove_dir(directory);
        }
    }
}

/// Names for a store below [`LINKS`]: the last component of its path, and if another store's volume
/// is there already, that with the beginning of its uuid.
fn store_names(store: &Path, uuid: &str) -> [String; 2] {
    let last = store.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = component(last.as_deref().unwrap_or(uuid));
    let short: String = uuid.chars().take(8).collect();
    [name.clone(), format!("{name}-{short}")]
}

/// A name as a component of a path that needs no quoting: letters, digits and `-_.@+:,=` stay,
/// any other byte becomes `%` and its two hexadecimal digits; so does a dot in front.
fn component(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for (index, byte) in name.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || b"-_.@+:,=".contains(&byte);
        if plain && !(index == 0 && byte == b'.') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Links `path` to `device`, unless it is something else that is in use.
fn make_link(directory: &Path, path: &Path, device: &Path) -> io::Result<()> {
    match fs::read_link(path) {
        Ok(target) if target != device && target.exists() => {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok(_) | Err(_) => {}
    }
    fs::create_dir_all(directory)?;
    // No volume's link begins with a dot.
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    let next = path.with_file_name(name);
    let _left_behind = fs::remove_file(&next);
    symlink(device, &next)?;
    fs::rename(&next, path)
}

/// What servers have left to be known of devices, of one store or of all.
pub(super) fn records(runtime_dir: &Path, store_key: Option<&str>) -> Vec<Record> {
    let Ok(entries) = fs::read_dir(runtime_dir) else { return Vec::new() };
    let mut found: Vec<Record> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            path.extension()?.to_str()?.strip_prefix("ublk-")?.parse::<u32>().ok()?;
            serde_json::from_slice(&fs::read(&path).ok()?).ok()
        })
        .filter(|record: &Record| store_key.is_none_or(|key| record.is_of(key)))
        .collect();
    found.sort_by_key(|record| record.id);
    found
}

/// The devices of one store, or of all whose servers use this runtime directory, whether served or
/// waiting for a server.
#[must_use]
pub fn list(runtime_dir: &Path, store_key: Option<&str>) -> Vec<Attached> {
    let mut control = Control::open().ok();
    let look = |record: Record| {
        let Some(control) = &mut control else {
            return Some(record.attached(State::Unknown, None));
        };
        match control.info(record.id) {
            Ok(info) if info.mark != record.mark => None,
            Ok(info) => {
                let mut attached = record.attached(state(info.state), u32::try_from(info.pid).ok());
                if let Ok((params, _)) = control.params(record.id) {
                    attached.size = block_size(record.id).unwrap_or(params.size);
                }
                Some(attached)
            }
            Err(error) if error.raw_os_error() == Some(nix::libc::ENODEV) => None,
            Err(_) => Some(record.attached(State::Unknown, None)),
        }
    };
    records(runtime_dir, store_key).into_iter().filter_map(look).collect()
}

pub(super) fn state(state: DeviceState) -> State {
    match state {
        DeviceState::Live => State::Live,
        DeviceState::Quiesced | DeviceState::Failing => State::Waiting,
        DeviceState::Dead => State::Dead,
        DeviceState::Other(_) => State::Unknown,
    }
}

/// The size of a block device in bytes, as its users see it.
pub(super) fn block_size(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/sys/class/block/ublkb{id}/size")).ok()?;
    text.trim().parse::<u64>().ok()?.checked_mul(512)
}

/// The device that `target` means: its path or that of a link to it, or `VOLUME[@SNAPSHOT]`.
///
/// # Errors
/// `NotFound`; `Invalid` if several stores have such a volume attached.
pub fn find(devices: &[Attached], target: &str) -> Result<Attached> {
    let path = Path::new(target);
    let real = fs::canonicalize(path).ok().filter(|_| path.is_absolute());
    let fits = |item: &&Attached| {
        item.spec() == target
            || item.device == path
            || item.link.as_deref() == Some(path)
            || real.as_ref() == Some(&item.device)
    };
    let mut found = devices.iter().filter(fits);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one.clone()),
        (None, _) => {
            Err(Error::not_found(format!("{target} is not attached; `dbs attached` lists what is")))
        }
        (Some(_), Some(_)) => Err(Error::invalid(format!(
            "volumes called {target} of several stores are attached: name the device, or the store \
             with --store"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u32, store: &str, volume: &str) -> Record {
        Record {
            id,
            mark: 5,
            store: store.into(),
            store_uuid: "one-uuid".to_owned(),
            store_key: format!("one-uuid-{store}").replace('/', "_"),
            volume: volume.to_owned(),
            volume_uuid: "v".to_owned(),
            snapshot: None,
            snapshot_uuid: None,
            size: 1 << 20,
            read_only: false,
            queues: 1,
            depth: 128,
            link: None,
        }
    }

    #[test]
    fn names_become_components() {
        assert_eq!(component("data-1_x.y"), "data-1_x.y");
        assert_eq!(component("a@b"), "a@b");
        assert_eq!(component("a/b c%"), "a%2Fb%20c%25");
        assert_eq!(component(".."), "%2E.");
        assert_eq!(component("ä"), "%C3%A4");
    }

    #[test]
    fn records_are_kept_by_store() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (record(3, "/x/one", "a"), record(1, "/x/two", "b"));
        one.save(dir.path()).unwrap();
        two.save(dir.path()).unwrap();
        fs::write(dir.path().join("junk.ublk-9"), "{").unwrap();
        fs::write(dir.path().join(format!("{}.sock", one.store_key)), "").unwrap();
        assert_eq!(records(dir.path(), None), [two.clone(), one.clone()]);
        let of_one = records(dir.path(), Some(&one.store_key));
        assert_eq!(of_one, std::slice::from_ref(&one));
        one.forget(dir.path());
        assert_eq!(records(dir.path(), None), [two]);
        assert!(records(&dir.path().join("none"), None).is_empty());
        // What a server has left that knew no keys.
        let old = Record { store_key: String::new(), ..record(4, "/x/one", "c") };
        old.save(dir.path()).unwrap();
        assert_eq!(records(dir.path(), Some(&one.store_key)), std::slice::from_ref(&old));
        old.forget(dir.path());
        assert!(records(dir.path(), Some(&one.store_key)).is_empty());
    }

    #[test]
    fn links_are_stable_and_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = record(70_001, "/x/one", "a b");
        one.link(dir.path()).unwrap();
        let link = one.link.clone().unwrap();
        assert_eq!(link, dir.path().join("one/a%20b"));
        assert_eq!(fs::read_link(&link).unwrap(), block_path(70_001));
        // What a device that is gone has left is replaced.
        let mut again = record(70_002, "/y/one", "a b");
        again.link(dir.path()).unwrap();
        assert_eq!(again.link.as_deref(), Some(link.as_path()));
        // What is no link, or leads to something that exists, is not.
        fs::remove_file(&link).unwrap();
        symlink("/dev/null", &link).unwrap();
        let mut third = record(70_003, "/y/one", "a b");
        third.link(dir.path()).unwrap();
        let short: String = third.store_uuid.chars().take(8).collect();
        assert_eq!(third.link, Some(dir.path().join(format!("one-{short}/a%20b"))));
        third.unlink();
        assert!(!third.link.as_ref().unwrap().parent().unwrap().exists());
        one.unlink();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/null"));
    }

    /// Found by review: a link was made under a name that another volume may have, `.new` behind it, and renamed.
    #[test]
    fn a_link_is_made_without_touching_another_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let names = ["disk.new", ".disk", "disk.tmp", "disk"];
        let mut records = names
            .iter()
            .zip(70_004..)
            .map(|(name, id)| record(id, "/x/one", name))
            .collect::<Vec<_>>();
        for record in &mut records {
            record.link(dir.path()).unwrap();
        }
        for record in &records {
            let link = record.link.as_ref().unwrap();
            assert_eq!(fs::read_link(link).unwrap(), block_path(record.id), "{}", link.display());
        }
        assert_eq!(fs::read_dir(dir.path().join("one")).unwrap().count(), names.len());
    }

    #[test]
    fn targets_are_found_by_any_name() {
        let mut one = record(4, "/x/one", "a").attached(State::Live, Some(1));
        one.link = Some("/dev/dbs/one/a".into());
        let two = record(5, "/x/two", "b").attached(State::Live, None);
        let all = [one.clone(), two.clone()];
        for target in ["a", "/dev/ublkb4", "/dev/dbs/one/a"] {
            assert_eq!(find(&all, target).unwrap(), one, "{target}");
        }
        assert_eq!(find(&all, "b").unwrap(), two);
        assert_eq!(find(&all, "c").unwrap_err().kind(), dbs_core::ErrorKind::NotFound);
        let twice = [one, record(6, "/y/one", "a").attached(State::Dead, None)];
        assert_eq!(find(&twice, "a").unwrap_err().kind(), dbs_core::ErrorKind::Invalid);
    }
}
