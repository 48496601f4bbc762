//! The frontends `vhost-user` and `nvme-tcp`: the volume as a disk that its user asks for again when the controller has
//! died, or was replaced by a newer one.
//!
//! A virtual machine comes again with the requests that were not answered, and so does a host. Both know the disk by its
//! uuid. A file says which that is, another one which replicas may go on with it ([`Ledger`]). If the replicas may lack
//! what was acknowledged, or another controller or frontend has used the volume meanwhile, the disk gets another uuid: who
//! knows the one before is refused, and sees no old data. A host is told that there is no such subsystem; the hypervisor
//! of a machine tries again for ever, and the machine waits until it is shut down. An end in good order is the end of the
//! disk, too.
//!
//! Who used the disk *on this frontend* is not known to the next controller: if another machine or host was faster
//! than the one that comes again, both have the same uuid.

use super::device::{began, hang_up, has_ended, is_running};
use super::ledger::{Ledger, write_durably};
use super::running::Running;
use dbs_core::{Error, ErrorKind, Result};
use dbs_frontend::Listen;
use dbs_service::log;
use longhorn_controller::frontend::{NvmeFrontend, NvmeOptions, VhostFrontend};
use longhorn_controller::path::Path;
use longhorn_controller::volume::{Frontend, Offer};
use serde::{Deserialize, Serialize};
use std::error::Error as _;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// The names of the frontends.
pub(super) const VHOST_USER: &str = "vhost-user";
pub(super) const NVME_TCP: &str = "nvme-tcp";

/// How long a port that something else has is waited for, and how often it is looked at.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What the next controller must know of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    uuid: String,
    /// Who serves it, and when that process began, in ticks: numbers are used again.
    pid: u32,
    began: u64,
    /// The port that a host asks.
    port: u16,
}

impl Record {
    /// What the ledger of its replicas is marked with.
    fn mark(&self) -> u64 {
        let digits: String = self.uuid.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        u64::from_str_radix(&digits, 16).unwrap_or(0)
    }
}

/// What a controller of the volume has left behind.
enum Left {
    /// A disk that goes on.
    Same(Record),
    /// None, or one that does not go on. Its hosts are told so on the port that they know, if there are any.
    Other(u16),
}

/// A disk of either kind.
trait Disk: Sized {
    /// What the frontend is called.
    const KIND: &'static str;

    /// Serves a volume as the disk of a record, which it completes.
    fn start(of: &DiskVolume<Self>, volume: &str, record: &mut Record) -> Result<Self>;

    /// Where its users find it.
    fn endpoint(&self) -> String;

    /// Tells them of another size.
    fn follow(&self);
}

impl Disk for VhostFrontend {
    const KIND: &'static str = VHOST_USER;

    fn start(of: &DiskVolume<Self>, volume: &str, record: &mut Record) -> Result<Self> {
        let socket = of.run.join(format!("vhost-{volume}.sock"));
        Self::start(&of.path, volume, &record.uuid, socket)
    }

    fn endpoint(&self) -> String {
        self.socket().display().to_string()
    }

    fn follow(&self) {
        self.follow();
    }
}

impl Disk for NvmeFrontend {
    const KIND: &'static str = NVME_TCP;

    /// On the port that hosts know, if none is asked for: on no other, as who listens there is the disk for them.
    fn start(of: &DiskVolume<Self>, volume: &str, record: &mut Record) -> Result<Self> {
        let mut options = of.hosts.clone();
        let listen = &mut options.listen;
        if listen.is_empty() {
            listen.push(Listen::Tcp("127.0.0.1".to_owned(), 0));
        }
        if let [Listen::Tcp(_, port @ 0)] = &mut listen[..] {
            *port = record.port;
        }
        let mut told = false;
        let started = while_taken(PATIENCE, || {
            let started = Self::start(&of.path, volume, &record.uuid, &options);
            if let Err(error) = &started
                && is_taken(error)
                && !std::mem::replace(&mut told, true)
            {
                let fields: [(&str, &dyn Display); 3] =
                    [("volume", &volume), ("error", error), ("what", &"trying again for a while")];
                log::warn("nvme", &fields);
            }
            started
        })?;
        if let Some(Listen::Tcp(_, port)) = started.addresses().first() {
            record.port = *port;
        }
        Ok(started)
    }

    fn endpoint(&self) -> String {
        let address = self.addresses().first().map(ToString::to_string).unwrap_or_default();
        let address = address.strip_prefix("tcp:").unwrap_or(&address);
        format!("nvmf://{address}/{}", self.subsystem())
    }

    fn follow(&self) {
        self.follow();
    }
}

/// Whether something else has the address.
fn is_taken(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::AddrInUse)
}

/// Tries again as long as something else has the address, which may be a connection that goes in a moment.
fn while_taken<T>(patience: Duration, mut what: impl FnMut() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match what() {
            Err(error) if is_taken(&error) && begun.elapsed() < patience => {
                thread::sleep(LOOK_AGAIN);
            }
            outcome => return outcome,
        }
    }
}

/// A volume's disk of one kind.
struct DiskVolume<D> {
    path: Arc<Path>,
    ledger: Arc<Ledger>,
    /// Of what the next controller must know, and of sockets; gone when the machine ends.
    run: PathBuf,
    /// Where hosts are to connect, and which.
    hosts: NvmeOptions,
    running: Running<(String, D)>,
}

/// A frontend of this kind, if it is one of those here.
pub(super) fn create(
    kind: &str,
    path: &Arc<Path>,
    ledger: &Arc<Ledger>,
    run: PathBuf,
    hosts: &NvmeOptions,
) -> Option<Arc<dyn Frontend>> {
    let (path, ledger, hosts) = (Arc::clone(path), Arc::clone(ledger), hosts.clone());
    match kind {
        VHOST_USER => {
            let running = Running::<(String, VhostFrontend)>::default();
            Some(Arc::new(DiskVolume { path, ledger, run, hosts, running }))
        }
        NVME_TCP => {
            let running = Running::<(String, NvmeFrontend)>::default();
            Some(Arc::new(DiskVolume { path, ledger, run, hosts, running }))
        }
        _ => None,
    }
}

impl<D: Disk + Send> Frontend for DiskVolume<D> {
    fn name(&self) -> &str {
        D::KIND
    }

    fn endpoint(&self) -> String {
        self.running.with(|(_, disk)| disk.endpoint()).unwrap_or_default()
    }

    fn is_up(&self) -> bool {
        self.running.is_up()
    }

    fn is_ending(&self) -> bool {
        self.running.is_ending()
    }

    fn start(&self, offer: &Offer) -> Result<()> {
        let volume = &offer.volume;
        let (mut record, again) = match self.left_behind(offer)? {
            Left::Same(record) => (record, true),
            Left::Other(port) => (self.make(port)?, false),
        };
        (record.pid, record.began) = (std::process::id(), began(std::process::id()).unwrap_or(0));
        // From here on the next controller finds it, should this one die: before anybody can use it.
        let saved = self.save(volume, &record);
        let started = saved.and_then(|()| D::start(self, volume, &mut record));
        let started = started.and_then(|disk| self.save(volume, &record).map(|()| disk));
        let disk = started.inspect_err(|_| match again {
            // Its users wait on: nothing was done to the volume.
            true => self.ledger.leave(),
            false => self.forget(volume),
        })?;
        let (endpoint, event) = (disk.endpoint(), if again { "taken_over" } else { "attached" });
        let fields: [(&str, &dyn Display); 3] =
            [("volume", volume), (D::KIND, &endpoint), ("uuid", &record.uuid)];
        log::info(event, &fields);
        self.running.set((volume.clone(), disk));
        Ok(())
    }

    fn expand(&self, _: u64) -> Result<()> {
        self.running.with(|(_, disk)| disk.follow());
        Ok(())
    }

    fn stop(&self) -> Result<()> {
        self.running.end(|(volume, disk)| {
            drop(disk);
            self.forget(&volume);
            (None, Ok(()))
        })
    }
}

impl<D: Disk> DiskVolume<D> {
    fn file(&self, volume: &str) -> PathBuf {
        self.run.join(format!("{}-{volume}.json", D::KIND))
    }

    /// A disk that nobody knows.
    fn make(&self, port: u16) -> Result<Record> {
        let record = Record { uuid: new_uuid()?, pid: 0, began: 0, port };
        self.ledger.begin(record.mark())?;
        Ok(record)
    }

    /// The disk that another controller of the volume left behind, or serves and is to hand over, if the replicas hold
    /// all that was acknowledged on it.
    fn left_behind(&self, offer: &Offer) -> Result<Left> {
        let volume = &offer.volume;
        let Some(record) = self.record(volume)? else { return Ok(Left::Other(0)) };
        if is_running(record.pid, record.began) {
            self.end_older(&record, offer)?;
        }
        if offer.upgrade {
            // As for a block device of ublk: the first request takes each replica's store over, and may wait for that.
            self.path.flush();
        }
        match self.ledger.take_over(record.mark(), offer.upgrade) {
            Ok(()) => Ok(Left::Same(record)),
            Err(error) if error.kind() != ErrorKind::Busy => Err(error),
            Err(why) => {
                let what = "the disk is another one, and its users are refused (a virtual machine waits until it is \
                            shut down): writes that its last controller acknowledged may be missing";
                let fields: [(&str, &dyn Display); 4] =
                    [("volume", volume), ("uuid", &record.uuid), ("error", &why), ("what", &what)];
                log::error("not-taken-over", &fields);
                Ok(Left::Other(record.port))
            }
        }
    }

    /// Has the controller that serves the disk end, which leaves it.
    fn end_older(&self, record: &Record, offer: &Offer) -> Result<()> {
        let pid = record.pid;
        if !offer.upgrade {
            let volume = &offer.volume;
            return Err(Error::busy(format!(
                "process {pid} serves volume {volume} over {}; --upgrade takes it over",
                D::KIND
            )));
        }
        // As long as it lives, a refusal costs nobody anything.
        self.ledger.check(record.mark(), true)?;
        hang_up(pid)?;
        match has_ended(|| !is_running(pid, record.began)) {
            true => Ok(()),
            false => Err(Error::busy(format!("process {pid} does not end"))),
        }
    }

    fn record(&self, volume: &str) -> Result<Option<Record>> {
        let file = self.file(volume);
        let text = match fs::read(&file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text,
        };
        let read = text.and_then(|text| Ok(serde_json::from_slice(&text)?));
        read.map(Some).map_err(|error| {
            let doing =
                "reading which disk the volume was (if its users are gone, remove the file)";
            Error::io(error, format!("{}: {doing}", file.display()))
        })
    }

    fn save(&self, volume: &str, record: &Record) -> Result<()> {
        let file = self.file(volume);
        let text = serde_json::to_vec(record).map_err(io::Error::other);
        let written = text.and_then(|text| write_durably(&file, &text));
        written.map_err(|e| Error::io(e, format!("writing {}", file.display())))
    }

    /// The disk has ended.
    fn forget(&self, volume: &str) {
        self.ledger.end();
        // If it stays, no ledger has its mark, or this process knows that it has ended.
        let _ = fs::remove_file(self.file(volume));
    }
}

/// A random uuid.
fn new_uuid() -> Result<String> {
    use ring::rand::{SecureRandom, SystemRandom};
    let mut bytes = [0; 16];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Error::io(io::Error::other("no random bytes"), "naming a disk"))?;
    // Its version and variant, which say that it is random.
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let (a, b, c, d, e) =
        (&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]);
    Ok(format!("{a}-{b}-{c}-{d}-{e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_waited_for_and_nothing_else() {
        let failed = |kind: io::ErrorKind| Error::io(kind.into(), "starting");
        let mut outcomes =
            vec![Ok(1), Err(io::ErrorKind::AddrInUse), Err(io::ErrorKind::AddrInUse)];
        let outcome = while_taken(Duration::MAX, || outcomes.pop().unwrap().map_err(failed));
        assert_eq!((outcome.unwrap(), outcomes.len()), (1, 0));
        let mut asked = 0;
        let outcome: Result<()> = while_taken(Duration::MAX, || {
            asked += 1;
            Err(failed(io::ErrorKind::AddrNotAvailable))
        });
        assert!(outcome.is_err() && asked == 1);
        assert!(
            while_taken(Duration::ZERO, || Err::<(), _>(failed(io::ErrorKind::AddrInUse))).is_err()
        );
    }

    #[test]
    fn each_disk_has_a_uuid_and_a_mark_of_its_own() {
        let record = |uuid: String| Record { uuid, pid: 1, began: 1, port: 0 };
        let records = [0; 100].map(|_| record(new_uuid().unwrap()));
        for (index, one) in records.iter().enumerate() {
            let lengths: Vec<_> = one.uuid.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12]);
            assert_eq!(&one.uuid[14..15], "4");
            assert!(one.mark() != 0);
            assert!(records[..index].iter().all(|other| other.mark() != one.mark()));
        }
        let known = record("01234567-89ab-4def-8000-000000000000".to_owned());
        assert_eq!(known.mark(), 0x0123_4567_89ab_4def);
    }
}
