//! The block devices of one store: attaching, detaching, and taking over what a dead server left.

use super::device::{Device, explain};
use super::held::{check_no_writer, find_again, hold, hold_waiting};
use super::options::{AttachOptions, FLAGS, MAX_IO_BYTES, params};
use super::record::{Attached, LINKS, Record, State, block_size, find, records, spec, state};
use super::volume::{self, Target};
use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind, Result, Store, Volume, format_size};
use dbs_frontend::{Pool, lock};
use dbs_reactor::ublk::{Control, DeviceInfo, NewDevice, Params, block_path};
use dbs_service::log;
use nix::libc;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How long a device waits for who has its volume open for writing.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it looks.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// The devices of one store, in the process that serves it.
pub struct Devices {
    store: Store,
    path: PathBuf,
    runtime_dir: PathBuf,
    reactor: dbs_reactor::Options,
    workers: usize,
    pool: Mutex<Option<Arc<Pool>>>,
    serving: Mutex<BTreeMap<u32, Serving>>,
    /// What devices hold that wait to be taken over, or that could not be, by number.
    left: Mutex<BTreeMap<u32, Volume>>,
    /// Held while devices come and go, which may take long.
    changing: Mutex<()>,
    /// Set when no more is to be waited for.
    leaving: AtomicBool,
    /// Set when somebody was told whether a device is there.
    asked: AtomicBool,
}

struct Serving {
    record: Record,
    volume: Volume,
    device: Device,
}

impl Devices {
    /// None so far. `path` is the store's; what the next server must know is kept in `runtime_dir`.
    #[must_use]
    pub fn new(
        store: Store,
        path: &Path,
        runtime_dir: &Path,
        reactor: dbs_reactor::Options,
        workers: usize,
    ) -> Self {
        Self {
            store,
            path: path.to_owned(),
            runtime_dir: runtime_dir.to_owned(),
            reactor,
            workers: workers.max(1),
            pool: Mutex::default(),
            serving: Mutex::default(),
            left: Mutex::default(),
            changing: Mutex::default(),
            leaving: AtomicBool::new(false),
            asked: AtomicBool::new(false),
        }
    }

    /// Attaches a volume or snapshot. What is attached already, in the same way, is left as it is.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `Busy` if it is attached in another way; those of [`Device::start`].
    pub fn attach(
        &self,
        volume: &str,
        snapshot: Option<&str>,
        options: &AttachOptions,
    ) -> Result<Attached> {
        let attached = self.attach_device(volume, snapshot, options);
        self.asked.store(true, Ordering::SeqCst);
        attached
    }

    fn attach_device(
        &self,
        volume: &str,
        snapshot: Option<&str>,
        options: &AttachOptions,
    ) -> Result<Attached> {
        options.check()?;
        if !options.read_only && snapshot.is_none() {
            self.wait_for_writers(volume);
        }
        let _changing = lock(&self.changing);
        let spec = spec(volume, snapshot);
        let handle = self.store.complete_volume(&spec)?;
        let read_only = options.read_only || handle.read_only();
        if let Some(there) = self.attached_as(&spec) {
            if there.read_only == read_only {
                return Ok(there);
            }
            let device = there.device.display();
            return Err(Error::busy(format!("{spec} is attached already, as {device}")));
        }
        if !read_only {
            check_no_writer(&self.store, volume)?;
        }
        let doing = format!("attaching {spec}");
        let mut control = Control::open().map_err(|e| explain(e, &doing))?;
        let new = NewDevice {
            id: options.id,
            queues: options.queues,
            depth: options.depth,
            max_io_bytes: MAX_IO_BYTES,
            flags: FLAGS,
            mark: fastrand::u64(1..),
        };
        let params = params(handle.size(), read_only);
        let mut record = self.record(volume, snapshot, &new, &params)?;
        self.check_left_over(&record)?;
        let target = self.target(handle, read_only)?;
        // Until then its number is that of nobody, or of another device.
        let recorded = Cell::new(false);
        let mut held = None;
        let device = {
            let (record, held) = (&mut record, &mut held);
            let added = |info: &DeviceInfo| {
                (record.id, record.queues, record.depth) = (info.id, info.queues, info.depth);
                // Before anybody can use it: nobody takes content from its users.
                *held = Some(hold(&self.store, record)?);
                // Who came meanwhile, or sees the device from here on.
                if !read_only {
                    check_no_writer(&self.store, volume)?;
                }
                recorded.set(true);
                // From here on the next server finds it, should this one die.
                record.save(&self.runtime_dir)
            };
            Device::start(&mut control, &new, &params, added, &mut volume::spawner(&target))
        };
        let device = device.map_err(|e| {
            if recorded.get() {
                record.forget(&self.runtime_dir);
            }
            e.context(&doing)
        })?;
        self.relink(&mut record);
        log::info("attached", &[("volume", &spec), ("device", &block_path(record.id).display())]);
        let attached = record.attached(State::Live, Some(std::process::id()));
        let Some(volume) = held else { unreachable!("a device starts when it was added") };
        let serving = Serving { record, volume, device };
        lock(&self.serving).insert(attached_id(&serving), serving);
        Ok(attached)
    }

    /// Gives those a moment who have the volume open for writing: the server may be about to hear that one has gone.
    fn wait_for_writers(&self, volume: &str) {
        let begun = Instant::now();
        while check_no_writer(&self.store, volume).is_err()
            && begun.elapsed() < PATIENCE
            && !self.leaving.load(Ordering::SeqCst)
        {
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Detaches what `target` names: a volume, a snapshot, or a device.
    ///
    /// # Errors
    /// `NotFound`; the kernel's.
    pub fn detach(&self, target: &str) -> Result<Attached> {
        let _changing = lock(&self.changing);
        let found = find(&self.list(), target)?;
        let id = lock(&self.serving)
            .iter()
            .find(|(_, serving)| block_path(serving.record.id) == found.device)
            .map(|(id, _)| *id);
        let mut control =
            Control::open().map_err(|e| explain(e, &format!("detaching {target}")))?;
        let Some(serving) = id.and_then(|id| lock(&self.serving).remove(&id)) else {
            return Err(Error::not_found(format!("{target} is not attached")));
        };
        let result = serving.device.remove(&mut control);
        match &result {
            Ok(()) => serving.record.forget(&self.runtime_dir),
            // It may be there still, with users who wait.
            Err(_) => drop(lock(&self.left).insert(serving.record.id, serving.volume)),
        }
        // Its users' last requests are answered: what they wrote is to be durable.
        let flushed = if self.store.info().read_only { Ok(()) } else { self.store.flush() };
        log::info("detached", &[("volume", &found.spec()), ("device", &found.device.display())]);
        result.and(flushed).map(|()| Attached { state: State::Dead, pid: None, ..found })
    }

    /// What is attached, by this server.
    #[must_use]
    pub fn list(&self) -> Vec<Attached> {
        self.release_removed();
        let pid = Some(std::process::id());
        let attached = |serving: &Serving| {
            let state = if serving.device.failure().is_some() { State::Dead } else { State::Live };
            let mut attached = serving.record.attached(state, pid);
            attached.size = block_size(serving.record.id).unwrap_or(attached.size);
            attached
        };
        lock(&self.serving).values().map(attached).collect()
    }

    /// The size of a volume's block device, if it has one.
    #[must_use]
    pub fn size(&self, volume: &str) -> Option<u64> {
        self.attached_as(volume).map(|attached| attached.size)
    }

    /// Whether nothing is attached, and nothing being so.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.changing.try_lock().is_ok() && lock(&self.serving).is_empty()
    }

    /// Whether somebody has asked for a device, and was answered.
    #[must_use]
    pub fn were_asked_for(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Waits, before a command that takes content from a volume or renames it, until no devices are coming or
    /// going, or being taken over. Until the guard is dropped, none do.
    #[must_use]
    pub fn settle_before(&self, request: &Request) -> Option<MutexGuard<'_, ()>> {
        let takes = matches!(
            request,
            Request::VolumeResize { shrink: true, .. }
                | Request::VolumeDelete { .. }
                | Request::VolumeRename { .. }
                | Request::SnapshotRollback { .. }
                | Request::SnapshotDelete { .. }
                | Request::SnapshotRename { .. }
        );
        takes.then(|| {
            self.release_removed();
            lock(&self.changing)
        })
    }

    /// Follows a command that succeeded, for which devices have `settled`: a new size reaches the device, a new
    /// name its link.
    pub fn follow(&self, request: &Request, settled: Option<MutexGuard<'_, ()>>) {
        let named = match request {
            Request::VolumeResize { volume, .. } => volume,
            Request::VolumeRename { new, .. } => new,
            Request::SnapshotRename { volume, .. } => volume,
            _ => return,
        };
        let _changing = settled.unwrap_or_else(|| lock(&self.changing));
        let mut serving = lock(&self.serving);
        for serving in serving.values_mut() {
            if let Request::VolumeRename { volume, new } = request
                && serving.record.volume == *volume
            {
                serving.record.volume.clone_from(new);
                self.relink(&mut serving.record);
            }
            if let Request::SnapshotRename { snapshot, new, .. } = request
                && serving.record.volume == *named
                && serving.record.snapshot.as_ref() == Some(snapshot)
            {
                serving.record.snapshot = Some(new.clone());
                self.relink(&mut serving.record);
            }
            if serving.record.volume == *named && serving.record.snapshot.is_none() {
                self.resize(serving);
            }
        }
    }

    /// Holds what the devices are made of that the last server has left, so that nobody takes content from
    /// their users, or writes beside them, before they are taken over: to be called before anybody can ask
    /// for anything.
    pub fn hold_left_over(&self) {
        *lock(&self.left) = hold_waiting(&self.store, &self.runtime_dir);
    }

    /// Lets go of what devices held that are not left any more.
    fn release_removed(&self) {
        if lock(&self.left).is_empty() {
            return;
        }
        let records = records(&self.runtime_dir, self.store.key().as_deref());
        lock(&self.left).retain(|id, _| records.iter().any(|record| record.id == *id));
    }

    /// Begins to take over the devices of the store whose server is gone, which may take a while if
    /// it died a moment ago. Devices come and go only when that is done.
    ///
    /// # Errors
    /// `Io` if there is no thread for it.
    pub fn recover(self: &Arc<Self>) -> Result<()> {
        let (devices, (begun, began)) = (Arc::clone(self), mpsc::sync_channel(1));
        let thread = thread::Builder::new().name("ublk-recover".to_owned()).spawn(move || {
            let _changing = lock(&devices.changing);
            let _waited_for = begun.send(());
            devices.recover_all();
        });
        thread.map_err(|e| Error::io(e, "starting a thread to take over block devices"))?;
        let _nothing_to_wait_for = began.recv();
        Ok(())
    }

    /// As [`Devices::recover`], if there are devices that could not be taken over: what stood in the way may be gone.
    ///
    /// # Errors
    /// As there.
    pub fn recover_left(self: &Arc<Self>) -> Result<()> {
        let any = !lock(&self.left).is_empty();
        if any { self.recover() } else { Ok(()) }
    }

    fn recover_all(&self) {
        let Some(key) = self.store.key() else { return };
        for record in records(&self.runtime_dir, Some(&key)) {
            let (id, device) = (record.id, block_path(record.id));
            if lock(&self.serving).contains_key(&id) {
                continue;
            }
            let spec = record.spec();
            let fields: [(&str, &dyn std::fmt::Display); 2] =
                [("volume", &spec), ("device", &device.display())];
            match self.recover_one(record) {
                Ok(true) => log::info("taken_over", &fields),
                Ok(false) => {}
                // Its users wait still: what it holds is kept for them.
                Err(error) => {
                    log::error("taken_over", &[fields[0], fields[1], ("error", &error)]);
                    continue;
                }
            }
            lock(&self.left).remove(&id);
        }
    }

    /// Stops serving; the devices and their users wait for the next server.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::SeqCst);
        let _changing = lock(&self.changing);
        let serving = std::mem::take(&mut *lock(&self.serving));
        for (_, serving) in serving {
            let device = block_path(serving.record.id);
            serving.device.leave();
            log::info("left", &[("volume", &serving.record.spec()), ("device", &device.display())]);
        }
        lock(&self.left).clear();
        if let Some(pool) = lock(&self.pool).take() {
            pool.stop();
        }
    }

    fn recover_one(&self, mut record: Record) -> Result<bool> {
        let doing = format!("taking {} over", record.spec());
        let mut control = Control::open().map_err(|e| explain(e, &doing))?;
        match control.info(record.id) {
            Ok(info) if info.mark == record.mark => {
                let alive = Path::new("/proc").join(info.pid.to_string()).exists();
                if self.store.info().read_only && state(info.state) == State::Live && alive {
                    // Several may serve a store that nobody writes.
                    return Ok(false);
                }
                if state(info.state) == State::Dead {
                    // It was not started, or not removed to the end.
                    control.delete(record.id).map_err(|e| explain(e, &doing))?;
                    record.forget(&self.runtime_dir);
                    return Ok(false);
                }
            }
            Ok(_) => {
                record.forget(&self.runtime_dir);
                return Ok(false);
            }
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {
                record.forget(&self.runtime_dir);
                return Ok(false);
            }
            Err(error) => return Err(explain(error, &doing)),
        }
        let handle = find_again(&self.store, &mut record)?;
        let held = lock(&self.left).get(&record.id).cloned();
        let volume = match held {
            Some(volume) => volume,
            None => hold(&self.store, &mut record)?,
        };
        if let Err(locked) = volume.check_not_locked() {
            // Its users wait until somebody unlocks it: they would get errors else.
            lock(&self.left).insert(record.id, volume);
            return Err(locked);
        }
        let target = self.target(handle, record.read_only)?;
        if self.store.lost_tail().is_some() {
            target.lost.store(true, Ordering::SeqCst);
            let lost = "the server before may have lost what it acknowledged: the next flush of the device fails";
            log::error("lost", &[("volume", &record.spec()), ("what", &lost)]);
        }
        let give_up = || self.leaving.load(Ordering::SeqCst);
        let device =
            Device::recover(&mut control, record.id, &give_up, &mut volume::spawner(&target))?;
        self.relink(&mut record);
        let mut serving = Serving { record, volume, device };
        // A resize may have been what the old server did last.
        self.resize(&mut serving);
        lock(&self.serving).insert(attached_id(&serving), serving);
        Ok(true)
    }

    /// Refuses to attach what a device that could not be taken over is of.
    fn check_left_over(&self, new: &Record) -> Result<()> {
        let same = |record: &Record| {
            record.volume_uuid == new.volume_uuid && record.snapshot_uuid == new.snapshot_uuid
        };
        let left = records(&self.runtime_dir, Some(&new.store_key)).into_iter().find(same);
        match left {
            None => Ok(()),
            Some(record) => Err(Error::busy(format!(
                "{} is attached as {}, which this server could not take over (its log says why): \
                 start it again, or remove the device with `dbs detach --force`",
                new.spec(),
                block_path(record.id).display()
            ))),
        }
    }

    fn record(
        &self,
        volume: &str,
        snapshot: Option<&str>,
        new: &NewDevice,
        params: &Params,
    ) -> Result<Record> {
        let gone = || Error::not_found(format!("no volume {volume}"));
        let volumes = self.store.volumes(false);
        let found = volumes.into_iter().find(|v| v.name == volume).ok_or_else(gone)?;
        let snapshot_uuid = match snapshot {
            Some(name) => {
                let snapshots = self.store.snapshots(volume, false)?;
                snapshots.into_iter().find(|s| s.name == name).map(|s| s.uuid)
            }
            None => None,
        };
        Ok(Record {
            id: 0,
            mark: new.mark,
            store: self.path.clone(),
            store_uuid: self.store.info().uuid,
            store_key: self.store.key().unwrap_or_default(),
            volume: volume.to_owned(),
            volume_uuid: found.uuid,
            snapshot: snapshot.map(str::to_owned),
            snapshot_uuid,
            size: params.size,
            read_only: params.read_only,
            queues: new.queues,
            depth: new.depth,
            link: None,
        })
    }

    fn target(&self, volume: Volume, read_only: bool) -> Result<Target> {
        let mut pool = lock(&self.pool);
        let pool = match &*pool {
            Some(pool) => Arc::clone(pool),
            None => {
                let started = volume::start_pool(self.workers)
                    .map_err(|e| Error::io(e, "starting the threads of block devices"))?;
                Arc::clone(pool.insert(Arc::new(started)))
            }
        };
        let (store, reactor) = (self.store.clone(), self.reactor.clone());
        Ok(Target { store, volume, read_only, pool, reactor, lost: Arc::default() })
    }

    fn attached_as(&self, spec: &str) -> Option<Attached> {
        self.list().into_iter().find(|attached| attached.spec() == spec)
    }

    /// Makes or renews the link, which a device can do without.
    fn relink(&self, record: &mut Record) {
        if let Err(error) = record.link(Path::new(LINKS)) {
            log::warn("link", &[("volume", &record.spec()), ("error", &error)]);
        }
        if let Err(error) = record.save(&self.runtime_dir) {
            log::error("attached", &[("volume", &record.spec()), ("error", &error)]);
        }
    }

    /// Tells the kernel a volume's size, if it does not know it.
    fn resize(&self, serving: &mut Serving) {
        let (id, size) = (serving.record.id, serving.volume.size());
        if block_size(id).unwrap_or(serving.record.size) == size {
            return;
        }
        let updated = Control::open().and_then(|mut control| control.update_size(id, size));
        match updated {
            Ok(()) => {
                serving.record.size = size;
                self.relink(&mut serving.record);
                log::info(
                    "resized",
                    &[("device", &block_path(id).display()), ("size", &format_size(size))],
                );
            }
            Err(error) => {
                let hint = "the device gets the new size when it is detached and attached again; \
                            Linux 6.16 can change the size in use";
                let error = explain(error, "changing the size of the block device");
                let device = block_path(id);
                let fields: [(&str, &dyn std::fmt::Display); 3] =
                    [("device", &device.display()), ("error", &error), ("hint", &hint)];
                log::warn("resized", &fields);
            }
        }
    }
}

fn attached_id(serving: &Serving) -> u32 {
    serving.device.info().id
}

/// Removes a device that no server serves: its users' requests fail.
///
/// # Errors
/// `NotFound`; the kernel's.
pub fn remove_unserved(runtime_dir: &Path, attached: &Attached) -> Result<()> {
    let doing = format!("removing {}", attached.device.display());
    let all = records(runtime_dir, Some(&attached.store_key));
    let record = all.into_iter().find(|record| block_path(record.id) == attached.device);
    let Some(record) = record else { return Err(Error::not_found(doing)) };
    let mut control = Control::open().map_err(|e| explain(e, &doing))?;
    let info = control.info(record.id).map_err(|e| explain(e, &doing))?;
    if info.mark != record.mark {
        return Err(Error::new(ErrorKind::NotFound, format!("{doing}: it is another device now")));
    }
    control.delete(record.id).map_err(|e| explain(e, &doing))?;
    record.forget(runtime_dir);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dbs_core::info::{Holder, HolderKind};
    use dbs_core::{InitOptions, OpenOptions};

    fn devices(dir: &Path) -> Arc<Devices> {
        let path = dir.join("store");
        let options = InitOptions { size: Some(64 << 20), ..InitOptions::default() };
        Store::init(&path, &options).unwrap();
        let store = Store::open(&path, &OpenOptions::default()).unwrap();
        store.create_volume("a", 8 << 20).unwrap();
        let reactor = dbs_reactor::Options::default();
        Arc::new(Devices::new(store, &path, &dir.join("run"), reactor, 2))
    }

    /// Device 12 of volume `a`.
    fn record(devices: &Devices) -> Record {
        Record {
            id: 12,
            mark: 1,
            store: "s".into(),
            store_uuid: devices.store.info().uuid,
            store_key: devices.store.key().unwrap(),
            volume: "a".to_owned(),
            volume_uuid: devices.store.volumes(false)[0].uuid.clone(),
            snapshot: None,
            snapshot_uuid: None,
            size: 8 << 20,
            read_only: false,
            queues: 1,
            depth: 1,
            link: None,
        }
    }

    #[test]
    fn what_cannot_be_is_refused_before_anything_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        let attach = |volume: &str, options: AttachOptions| {
            devices.attach(volume, None, &options).unwrap_err().kind()
        };
        let options = AttachOptions::default();
        assert_eq!(attach("missing", options.clone()), ErrorKind::NotFound);
        assert_eq!(attach("a", AttachOptions { queues: 0, ..options.clone() }), ErrorKind::Invalid);
        assert_eq!(attach("a", AttachOptions { depth: 5000, ..options }), ErrorKind::Invalid);
        assert_eq!(devices.detach("a").unwrap_err().kind(), ErrorKind::NotFound);
        assert!(devices.list().is_empty() && devices.store.holders().is_empty());
        devices.leave();
    }

    /// Found by review: both wrote, and destroyed the file system.
    #[test]
    fn a_volume_that_somebody_writes_is_not_attached_to_be_written() {
        use HolderKind::{Nbd, NvmeTcp, VhostUser};
        for (kind, alone) in [(VhostUser, true), (NvmeTcp, true), (Nbd, false)] {
            let dir = tempfile::tempdir().unwrap();
            let devices = devices(dir.path());
            let holder = |writes| Holder {
                kind,
                who: "user of a".to_owned(),
                id: Some(3),
                writes,
                alone: alone && writes,
                remedy: "stop it first".to_owned(),
            };
            let writer = devices.store.volume_for("a", holder(true)).unwrap();
            let attach = |read_only| {
                let options =
                    AttachOptions { read_only, queues: 1, depth: 1, ..Default::default() };
                devices.attach("a", None, &options).map(|_| devices.leave())
            };
            let refused = attach(false).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Busy);
            assert!(refused.to_string().contains("writing by the user of a; stop"), "{refused}");
            let busy = |result: Result<()>| result.is_err_and(|e| e.kind() == ErrorKind::Busy);
            if !Path::new(dbs_reactor::ublk::CONTROL_PATH).exists() {
                assert!(!busy(attach(true)));
                // One that is just going is waited for, and who only reads is no matter.
                let _reader = devices.store.volume_for("a", holder(false)).unwrap();
                thread::scope(|scope| {
                    let waits = scope.spawn(|| busy(attach(false)));
                    thread::sleep(Duration::from_millis(200));
                    drop(writer);
                    assert!(!waits.join().unwrap());
                });
            }
        }
    }

    #[test]
    fn without_the_driver_the_error_names_the_way_out() {
        if Path::new(dbs_reactor::ublk::CONTROL_PATH).exists() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        let error = devices.attach("a", None, &AttachOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(text.contains("attaching a") && text.contains("modprobe ublk_drv"), "{text}");
        assert!(text.contains("--nbd"), "{text}");
        assert!(records(&dir.path().join("run"), None).is_empty());
        // Nor does a record of an earlier boot hold anything up.
        let record = record(&devices);
        record.save(&dir.path().join("run")).unwrap();
        devices.recover().unwrap();
        assert!(devices.list().is_empty());
        // Nobody knows whether it is still there.
        let refused = devices.check_left_over(&record).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
        let other = Record { volume_uuid: "other".to_owned(), ..record };
        devices.check_left_over(&other).unwrap();
    }

    #[test]
    fn commands_that_take_content_wait_for_devices_that_come_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        let shrink =
            Request::VolumeResize { volume: "a".to_owned(), size: 4096, shrink: true, uuid: None };
        let settled = devices.settle_before(&shrink);
        assert!(settled.is_some() && devices.changing.try_lock().is_err(), "no attach meanwhile");
        drop(settled);
        // A device that is taken over is looked up by name.
        let rename = Request::VolumeRename { volume: "a".to_owned(), new: "b".to_owned() };
        let settled = devices.settle_before(&rename);
        assert!(settled.is_some());
        devices.follow(&rename, settled);
        assert!(devices.settle_before(&Request::Info).is_none());
        assert!(devices.changing.try_lock().is_ok());
        devices.follow(&shrink, None);
    }

    #[test]
    fn what_could_not_be_taken_over_is_held_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        let mut record = record(&devices);
        record.save(&devices.runtime_dir).unwrap();
        let held = hold(&devices.store, &mut record).unwrap();
        lock(&devices.left).insert(record.id, held);
        // There is no driver here, or no such device.
        if !Path::new(dbs_reactor::ublk::CONTROL_PATH).exists() {
            devices.recover_all();
        }
        let delete =
            Request::VolumeDelete { volume: "a".to_owned(), uuid: None, rebuilding: false };
        drop(devices.settle_before(&delete));
        assert_eq!(devices.store.delete_volume("a").unwrap_err().kind(), ErrorKind::Busy);
        // As `dbs detach --force` does, in another process.
        record.forget(&devices.runtime_dir);
        drop(devices.settle_before(&delete));
        devices.store.delete_volume("a").unwrap();
    }

    #[test]
    fn what_is_attached_is_neither_rolled_back_nor_shrunk_nor_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let devices = devices(dir.path());
        devices.store.create_snapshot("a", "s", &Default::default()).unwrap();
        let held = hold(&devices.store, &mut record(&devices)).unwrap();
        for refused in [
            devices.store.rollback("a", "s"),
            devices.store.resize_volume("a", 4096),
            devices.store.delete_volume("a"),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            let text = error.to_string();
            assert!(text.contains("/dev/ublkb12") && text.contains("`dbs detach a`"), "{text}");
        }
        drop(held);
        devices.store.rollback("a", "s").unwrap();
    }
}
