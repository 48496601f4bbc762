use super::program::{Failure, Why};
use super::*;
use crate::process::block::{BlockDevice, BlockVolume, Chosen};
use crate::process::device::{DeviceVolume, Places};
use longhorn_controller::frontend::UblkOptions;
use longhorn_controller::path::{Events, Path, PathOptions};
use longhorn_controller::rules::ReplicaId;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path as FilePath;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

const NAME: &str = "iqn.2019-10.io.longhorn:a:b";
const SIZE: u64 = 64 << 20;

/// `tgtd` and the initiator as far as their commands go.
#[derive(Default)]
struct World {
    /// What was run, in order, but for questions.
    commands: Vec<String>,
    /// How many were run, questions among them.
    asked: u32,
    /// Programs that there are not.
    missing: Vec<&'static str>,
    failing: Vec<Failing>,
    /// The backing stores of the `tgtd` that runs.
    stores: Option<&'static str>,
    /// Those of one that is started; `None` for one that ends at once.
    starts: Option<&'static str>,
    targets: BTreeMap<u32, String>,
    /// Sessions with the target, by their numbers, and how many there were.
    sessions: BTreeSet<u32>,
    logins: u32,
    record: bool,
    /// Whether sessions end when somebody waits.
    logs_out_late: bool,
    /// Asked whether the frontend is up, at each command that changes something.
    watched: Option<Arc<IscsiVolume>>,
    /// `tgtd` is started anew when its connections are asked for, and gives the number to this target.
    restarts: Option<&'static str>,
    seen: Vec<bool>,
    slept: Duration,
}

type Reason = fn() -> Why;

/// Commands with this text fail so often, for this reason, and print this.
struct Failing {
    text: &'static str,
    times: u32,
    why: Reason,
    said: &'static str,
}

#[derive(Clone, Default)]
struct Programs(Arc<Mutex<World>>);

impl Programs {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }

    fn fail(&self, text: &'static str, times: u32, why: Reason, said: &'static str) {
        self.world().failing.push(Failing { text, times, why, said });
    }

    fn commands(&self) -> Vec<String> {
        std::mem::take(&mut self.world().commands)
    }
}

fn exited() -> Why {
    Why::Exited(Some(1))
}

fn found_nothing() -> Why {
    Why::Exited(Some(21))
}

/// It takes all the time that it is given.
fn slow() -> Why {
    Why::Slow(Duration::MAX)
}

impl World {
    fn tgtadm(&mut self, args: &[&str]) -> std::result::Result<String, (Why, String)> {
        let text = args.join(" ");
        let Some(stores) = self.stores else {
            let said = "tgtadm: failed to send request hdr to tgt daemon, Transport endpoint is not connected";
            return Err((Why::Exited(Some(107)), said.into()));
        };
        let value = |key: &str| args.iter().skip_while(|arg| **arg != key).nth(1).copied();
        let tid: u32 = value("--tid").unwrap_or("0").parse().unwrap();
        if text.contains("--op show --mode system") {
            return Ok(format!("System:\n    State: ready\nBacking stores:\n    {stores}\n"));
        } else if text.contains("--op show --mode target") {
            let lines = self.targets.iter().map(|(tid, name)| {
                format!("Target {tid}: {name}\n    System information:\n        Driver: iscsi\n")
            });
            return Ok(lines.collect());
        } else if text.contains("--op show --mode conn") {
            if let Some(name) = self.restarts.take() {
                self.targets = BTreeMap::from([(tid, name.to_owned())]);
            }
            let there = "Session: 3\n    Connection: 0\n        Initiator: iqn.x\n";
            return Ok(if self.sessions.is_empty() { String::new() } else { there.into() });
        } else if text.contains("--op new --mode target") {
            self.targets.insert(tid, value("-T").unwrap().to_owned());
        } else if text.contains("--op delete --mode target") {
            assert!(self.targets.remove(&tid).is_some(), "{text}");
        }
        Ok(String::new())
    }

    fn iscsiadm(&mut self, args: &[&str]) -> std::result::Result<String, (Why, String)> {
        let text = args.join(" ");
        let has = |part: &str| text.contains(part);
        let found = |found: bool| match found {
            true => Ok(String::new()),
            false => Err((found_nothing(), "iscsiadm: No records found".to_owned())),
        };
        if has("--version") {
            return Ok("iscsiadm version 2.1.8\n".into());
        } else if has("discovery") {
            self.record = true;
            return Ok(format!("10.0.0.1:3260,1 {NAME}\n"));
        } else if has("-m session -P 3") {
            let disk = match !self.sessions.is_empty() {
                true => {
                    "\t\tscsi2 Channel 00 Id 0 Lun: 0\n\t\tscsi2 Channel 00 Id 0 Lun: 1\n\t\t\tAttached \
                         scsi disk sdz\t\tState: running\n"
                }
                false => "",
            };
            let ip = "10.0.0.9:";
            return Ok(format!(
                "Target: {NAME}-2 (non-flash)\n\tCurrent Portal: {ip}3260,1\n\t\tscsi1 Channel 00 Id 0 Lun: 1\n\
                 \t\t\tAttached scsi disk sda\t\tState: running\nTarget: {NAME} (non-flash)\n\tCurrent Portal: \
                 {ip}3260,1\n\tPersistent Portal: {ip}3260,1\n{disk}"
            ));
        } else if has("-m session -r") {
            let number = args[3].parse().unwrap();
            assert_eq!(args[4], "-u");
            return found(self.sessions.remove(&number));
        } else if has("-m session") {
            let line = |sid| format!("tcp: [{sid}] 10.0.0.9:3260,1 {NAME} (non-flash)\n");
            return match self.sessions.is_empty() {
                true => found(false),
                false => Ok(self.sessions.iter().map(line).collect()),
            };
        } else if has("--login") {
            self.logins += 1;
            self.sessions.insert(self.logins);
        } else if has("--logout") {
            // Of those that there is a record of.
            found(self.record)?;
            self.sessions.clear();
        } else if has("-o delete") {
            self.record = false;
        } else if has("-o show") {
            return Ok("node.session.scan = auto\n".into());
        } else if !has("-o update") && !has("-R") {
            return found(self.record);
        }
        Ok(String::new())
    }
}

impl Run for Programs {
    fn run(
        &self,
        program: &str,
        args: &[&str],
        limit: Duration,
    ) -> std::result::Result<String, Failure> {
        let mut world = self.world();
        world.asked += 1;
        let (program, args) = match program {
            "nsenter" => {
                let is = |arg: &str, option, file| arg.starts_with(option) && arg.ends_with(file);
                assert!(is(args[0], "--mount=/", "/proc/7/ns/mnt"), "{args:?}");
                assert!(is(args[1], "--net=/", "/proc/7/ns/net"), "{args:?}");
                (args[2], &args[3..])
            }
            _ => (program, args),
        };
        let command = format!("{program} {}", args.join(" "));
        let failure = |why, said| Err(Failure { command: command.clone(), why, said });
        if world.missing.contains(&program) {
            return failure(Why::Missing, String::new());
        }
        let does = ["--login", "--logout", "-o update", "-o delete", " -R ", " -u"];
        if program == "iscsiadm" {
            // One that is killed may leave the lock of the host's records.
            let has_records = command.contains("-m node") || command.contains("discovery");
            let least =
                if has_records || does.iter().any(|text| command.contains(text)) { 35 } else { 5 };
            assert!(limit >= Duration::from_secs(least), "{command}: {limit:?}");
        }
        let changes = program == "tgtadm" && !command.contains("--op show");
        if changes || does.iter().any(|text| command.contains(text)) {
            world.commands.push(command.clone());
            let up = world.watched.as_ref().map(|volume| volume.is_up());
            world.seen.extend(up);
        }
        let mut failing = world.failing.iter_mut();
        if let Some(one) = failing.find(|one| one.times > 0 && command.contains(one.text)) {
            one.times -= 1;
            let (why, said) = ((one.why)(), one.said.to_owned());
            if let Why::Slow(_) = why {
                world.slept += limit;
                return failure(Why::Slow(limit), said);
            }
            return failure(why, said);
        }
        let done = match program {
            "tgtadm" => world.tgtadm(args),
            "iscsiadm" => world.iscsiadm(args),
            _ => Ok(String::new()),
        };
        done.or_else(|(why, said)| failure(why, said))
    }

    fn start(
        &self,
        program: &str,
        args: &[&str],
        _: &FilePath,
    ) -> std::result::Result<(), Failure> {
        let mut world = self.world();
        let command = format!("{program} {}", args.join(" "));
        if world.missing.contains(&program) {
            return Err(Failure { command, why: Why::Missing, said: String::new() });
        }
        world.commands.push(command);
        world.stores = world.starts;
        Ok(())
    }

    fn now(&self) -> Instant {
        static BEGUN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
        *BEGUN + self.world().slept
    }

    fn sleep(&self, time: Duration) {
        let mut world = self.world();
        world.slept += time;
        if world.logs_out_late {
            world.sessions.clear();
        }
    }
}

struct NoFaults;

impl Events for NoFaults {
    fn faulted(&self, _: ReplicaId, _: &str) {}
}

/// A volume with the programs that it meets; `None` where nodes of devices cannot be made.
struct Place {
    directory: tempfile::TempDir,
    programs: Programs,
    path: Arc<Path>,
}

impl Place {
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disks/sdz");
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::write(disk.join("device/timeout"), "30\n").unwrap();
        fs::write(disk.join("dev"), "8:400\n").unwrap();
        // The kernel shows it by its numbers as well.
        fs::create_dir_all(directory.path().join("sys/dev/block")).unwrap();
        symlink("../../devices/x/block/sdz", directory.path().join("sys/dev/block/8:400")).unwrap();
        // The host, with its initiator.
        fs::create_dir_all(directory.path().join("proc/7/root/run")).unwrap();
        fs::write(directory.path().join("proc/7/comm"), "iscsid\n").unwrap();
        for process in ["1", "7"] {
            let namespaces = directory.path().join("proc").join(process).join("ns");
            fs::create_dir_all(&namespaces).unwrap();
            symlink("net:[1]", namespaces.join("net")).unwrap();
            symlink("user:[2]", namespaces.join("user")).unwrap();
            symlink("mnt:[3]", namespaces.join("mnt")).unwrap();
        }
        if let Err(error) = node::make(directory.path(), "try", (8, 400), Some(DISKS)) {
            println!(
                "SKIPPED block devices over iSCSI: cannot make a node ({error}), which takes root"
            );
            return None;
        }
        let programs = Programs::default();
        programs.world().stores = Some("sheepdog\n    longhorn\n    rdwr");
        let path = Path::new(PathOptions::default(), SIZE, Arc::new(NoFaults)).unwrap();
        Some(Self { directory, programs, path })
    }

    fn volume(&self, kind: &'static str) -> IscsiVolume {
        let at = self.directory.path();
        let nodes = at.join("nodes");
        let options = IscsiOptions {
            nodes,
            request_timeout: Duration::from_secs(542),
            disk_timeout: Duration::from_secs(122),
        };
        let ledger = Arc::new(Ledger::new(at.join("ledger")));
        let socket = SocketVolume::new(Arc::clone(&self.path), at.to_owned(), false);
        IscsiVolume {
            run: Box::new(self.programs.clone()),
            proc: at.join("proc"),
            sys: at.join("sys"),
            disks: at.join("disks"),
            ..IscsiVolume::new(kind, options, socket, ledger)
        }
    }

    /// A device of ublk where there is none yet.
    fn block(&self) -> BlockVolume {
        let at = self.directory.path();
        let ublk = DeviceVolume {
            path: Arc::clone(&self.path),
            options: UblkOptions { queues: 1, depth: 1 },
            places: Places { run: at.join("run"), nodes: at.join("nodes") },
            ledger: Arc::new(Ledger::new(at.join("ledger"))),
            running: Running::default(),
        };
        let (wanted, iscsi) = (BlockDevice::Ublk, self.volume(BLOCK_DEVICE));
        BlockVolume { kind: BLOCK_DEVICE, wanted, ublk, iscsi, chosen: Mutex::default() }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("longhorn-a_b.sock")
    }

    fn node(&self) -> PathBuf {
        self.directory.path().join("nodes/a_b")
    }

    /// A file of a socket that nobody listens on.
    fn dead_socket(&self) {
        drop(std::os::unix::net::UnixListener::bind(self.socket()).unwrap());
    }

    fn list(&self) -> PathBuf {
        self.directory.path().join("ledger")
    }

    /// Whether nothing is left.
    fn is_clean(&self) -> bool {
        let world = self.programs.world();
        let nothing = world.targets.values().all(|name| name != NAME)
            && world.sessions.is_empty()
            && !world.record;
        let files = [self.socket(), self.node(), self.list()];
        nothing && files.iter().all(|file| !file.exists())
    }
}

fn offer(upgrade: bool) -> Offer {
    Offer { volume: "a_b".into(), size: SIZE, sector_size: 512, upgrade }
}

/// The commands that make a target with this number.
fn made(tid: u32, socket: &FilePath) -> Vec<String> {
    let adm = "tgtadm --lld iscsi --op";
    let unit = format!("--mode logicalunit --tid {tid} --lun 1");
    vec![
        format!("{adm} new --mode target --tid {tid} -T {NAME}"),
        format!(
            "{adm} new {unit} -b {} --bstype longhorn --bsopts size=67108864;request_timeout=542",
            socket.display()
        ),
        format!("{adm} update {unit} --params thin_provisioning=1"),
        format!(
            "{adm} update {unit} --params mode_page=8:0:18:0x10:0:0xff:0xff:0:0:0xff:0xff:0xff:0xff:0x80:0x14:0:\
             0:0:0:0:0"
        ),
        format!("{adm} bind --mode target --tid {tid} -I ALL"),
    ]
}

fn attached() -> Vec<String> {
    let node = format!("iscsiadm -m node -T {NAME}");
    let (run, proc) = (Programs::default(), FilePath::new("/proc"));
    let initiator = Initiator { run: &run, target: NAME, proc, disks: proc, seconds: 90 };
    let ip = initiator.address().unwrap();
    vec![
        format!("{node} -o update -n node.session.err_timeo.abort_timeout -v 15"),
        format!("{node} -p {ip} --login"),
    ]
}

fn removed(tid: u32, sessions: bool) -> Vec<String> {
    let adm = "tgtadm --lld iscsi --op";
    let mut all = vec![format!("{adm} unbind --mode target --tid {tid} -I ALL")];
    if sessions {
        all.push(format!("{adm} delete --mode conn --tid {tid} --sid 3 --cid 0"));
    }
    all.push(format!("{adm} delete --mode logicalunit --tid {tid} --lun 1"));
    all.push(format!("{adm} delete --mode target --tid {tid}"));
    all
}

fn detached() -> Vec<String> {
    let node = format!("iscsiadm -m node -T {NAME}");
    vec![format!("{node} --logout"), format!("{node} -o delete")]
}

#[test]
fn a_block_device_is_made_grown_and_removed_by_these_commands() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(BLOCK_DEVICE);
    place.programs.world().targets.insert(1, "iqn.2019-10.io.longhorn:a".into());
    volume.start(&offer(false)).unwrap();
    assert_eq!(place.programs.commands(), [made(2, &place.socket()), attached()].concat());
    assert_eq!(volume.endpoint(), place.node().display().to_string());
    assert_eq!((volume.name(), volume.block_device()), ("tgt-blockdev", "iscsi"));
    assert_eq!(fs::metadata(place.node()).unwrap().rdev(), nix::sys::stat::makedev(8, 400));
    let timeout = place.directory.path().join("disks/sdz/device/timeout");
    // Longer than what a write waits for: replicas that hang, and a flush.
    assert_eq!(fs::read_to_string(timeout).unwrap().trim(), "122");
    volume.expand(2 * SIZE).unwrap();
    let grown = place.programs.commands();
    let update = "tgtadm --lld iscsi --op update --mode logicalunit --tid 2 --lun 1 --params bsopts=size=134217728";
    assert_eq!(grown[0], update);
    assert!(grown[1].starts_with(&format!("iscsiadm -m node -T {NAME} -R -p ")), "{grown:?}");
    volume.stop().unwrap();
    assert_eq!(place.programs.commands(), [detached(), removed(2, false)].concat());
    assert!(place.is_clean() && !volume.is_up() && volume.endpoint().is_empty());
    assert_eq!(place.programs.world().targets.len(), 1, "that of another volume stays");
    volume.stop().unwrap();
}

#[test]
fn a_target_alone_needs_no_initiator() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(TARGET);
    place.programs.world().missing = vec!["iscsiadm"];
    volume.start(&offer(false)).unwrap();
    assert_eq!(place.programs.commands(), made(1, &place.socket()));
    assert_eq!((volume.endpoint().as_str(), volume.block_device()), (NAME, ""));
    volume.expand(2 * SIZE).unwrap();
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn what_a_dead_controller_left_is_removed_first() {
    let Some(place) = Place::new() else { return };
    place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap();
    place.programs.commands();
    // It is gone without a word, and its socket's file is there.
    place.dead_socket();
    assert!(place.node().exists());
    let volume = place.volume(BLOCK_DEVICE);
    volume.start(&offer(false)).unwrap();
    // Nothing that is in use is what `tgtd` says for the sessions that a logout ended.
    let expected = [detached(), removed(1, false), made(1, &place.socket()), attached()].concat();
    assert_eq!(place.programs.commands(), expected);
    volume.stop().unwrap();
    // One of another kind: what initiators have open is closed.
    place.volume(TARGET).start(&offer(false)).unwrap();
    place.dead_socket();
    place.programs.world().sessions.insert(9);
    place.programs.commands();
    let volume = place.volume(TARGET);
    place.programs.fail("unbind", 1, exited, "tgtadm: this access control rule does not exist");
    place.programs.fail(
        "delete --mode logicalunit",
        1,
        exited,
        "tgtadm: this logical unit is still active",
    );
    volume.start(&offer(false)).unwrap();
    assert_eq!(place.programs.commands(), [removed(1, true), made(1, &place.socket())].concat());
    place.programs.world().sessions.clear();
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn a_disk_of_the_time_before_a_target_alone_is_removed() {
    let Some(place) = Place::new() else { return };
    place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap();
    place.dead_socket();
    place.programs.commands();
    // Its users would go on with the next target of this name.
    let volume = place.volume(TARGET);
    volume.start(&offer(false)).unwrap();
    let expected = [detached(), removed(1, false), made(1, &place.socket())].concat();
    assert_eq!(place.programs.commands(), expected);
    assert!(!place.node().exists());
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn a_session_that_survives_its_logout_is_ended_or_told() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(BLOCK_DEVICE);
    volume.start(&offer(false)).unwrap();
    place.programs.commands();
    // Nobody finds the record of it, and there is a second one.
    place.programs.world().record = false;
    place.programs.world().sessions.insert(12);
    volume.stop().unwrap();
    let commands = place.programs.commands();
    let ended: Vec<_> = commands.iter().filter(|one| one.ends_with("-u")).collect();
    assert_eq!(ended, ["iscsiadm -m session -r 1 -u", "iscsiadm -m session -r 12 -u"]);
    assert!(place.is_clean());
    // It says that it is done, and is not.
    volume.start(&offer(false)).unwrap();
    place.programs.world().record = false;
    place.programs.fail("-m session -r", 9, found_nothing, "iscsiadm: No session found.");
    let error = volume.stop().unwrap_err();
    assert!(error.to_string().contains("has a session"), "{error}");
    assert!(volume.is_up() && place.node().exists());
    place.programs.world().failing.clear();
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn a_node_never_outlives_its_disk() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(BLOCK_DEVICE);
    volume.start(&offer(false)).unwrap();
    place.programs.fail(
        "--op delete --mode target",
        1,
        exited,
        "tgtadm: this target is still active",
    );
    let error = volume.stop().unwrap_err();
    assert!(error.to_string().contains("still active"), "{error}");
    // The disk is gone, and the next volume's may have its number.
    assert!(!place.node().exists() && place.programs.world().sessions.is_empty());
    assert!(volume.is_up() && volume.is_ending() && volume.endpoint().is_empty());
    volume.stop().unwrap();
    assert!(place.is_clean() && !volume.is_up());
    // A target that initiators may no longer log in to is not one that serves.
    let volume = place.volume(TARGET);
    volume.start(&offer(false)).unwrap();
    assert!(!volume.is_ending());
    place.programs.fail("--op delete --mode target", 1, exited, "tgtadm: failed");
    volume.stop().unwrap_err();
    assert!(volume.is_up() && volume.is_ending() && volume.endpoint().is_empty());
    volume.stop().unwrap();
    assert!(place.is_clean() && !volume.is_up());
}

#[test]
fn it_is_up_until_its_end_has_come() {
    let Some(place) = Place::new() else { return };
    let volume = Arc::new(place.volume(BLOCK_DEVICE));
    volume.start(&offer(false)).unwrap();
    place.programs.world().watched = Some(Arc::clone(&volume));
    volume.stop().unwrap();
    let seen = std::mem::take(&mut place.programs.world().seen);
    assert!(seen.len() == 5 && seen.iter().all(|up| *up), "{seen:?}");
    assert!(!volume.is_up());
}

#[test]
fn nothing_is_taken_from_a_controller_that_runs() {
    let Some(place) = Place::new() else { return };
    let older = place.volume(BLOCK_DEVICE);
    older.start(&offer(false)).unwrap();
    place.programs.commands();
    let newer = place.volume(BLOCK_DEVICE);
    let error = newer.start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("longhorn-a_b.sock"), "{error}");
    // Nor for a device of another kind.
    let error = newer.clear("a_b").unwrap_err();
    assert!(error.to_string().contains("longhorn-a_b.sock"), "{error}");
    assert!(
        place.programs.commands().is_empty() && place.socket().exists() && place.node().exists()
    );
    older.stop().unwrap();
    assert!(place.is_clean());
    newer.start(&offer(false)).unwrap();
    drop(newer);
    place.dead_socket();
    place.volume(BLOCK_DEVICE).clear("a_b").unwrap();
    assert!(place.is_clean());
}

/// Users of a volume had to wait for `tgtd`, or could not have a device that needs none.
#[test]
fn a_device_of_ublk_needs_no_tgtd() {
    let Some(place) = Place::new() else { return };
    let block = place.block();
    place.programs.fail("", 1000, slow, "");
    assert_eq!(block.choose("a_b").unwrap(), Chosen::Ublk);
    assert_eq!(place.programs.world().asked, 0);
    place.programs.world().failing.clear();
    // What a dead controller left is removed.
    place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap();
    place.dead_socket();
    assert_eq!(block.choose("a_b").unwrap(), Chosen::Ublk);
    assert!(place.is_clean());
    // If that is not possible, the device comes nevertheless: there is nothing of it in the device's way.
    place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap();
    place.dead_socket();
    for failing in ["tgtadm", "iscsiadm"] {
        place.programs.fail(failing, 1000, slow, "");
        assert_eq!(block.choose("a_b").unwrap(), Chosen::Ublk, "{failing}");
        // It is tried once: each time would be longer than the instance manager waits.
        let asked = place.programs.world().asked;
        assert_eq!(block.choose("a_b").unwrap(), Chosen::Ublk, "{failing}");
        assert_eq!(place.programs.world().asked, asked, "{failing}");
        place.programs.world().failing.clear();
        place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap();
        place.dead_socket();
    }
    assert_eq!(block.choose("a_b").unwrap(), Chosen::Ublk);
    assert!(place.is_clean());
    // One that runs is left alone.
    let other = place.volume(BLOCK_DEVICE);
    other.start(&offer(false)).unwrap();
    place.programs.commands();
    let error = block.choose("a_b").unwrap_err();
    assert!(error.to_string().contains("longhorn-a_b.sock"), "{error}");
    assert!(place.programs.commands().is_empty() && place.node().exists());
    other.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn an_upgrade_over_iscsi_is_refused_before_anything_is_done() {
    let Some(place) = Place::new() else { return };
    let (nodes, sockets) = (place.directory.path().join("nodes"), place.directory.path());
    let refused = |frontend, volume: &str| refuse_over_iscsi((&nodes, sockets), frontend, volume);
    let all = [Some(BLOCK_DEVICE), Some(UBLK), Some(TARGET), Some("nbd"), Some("socket"), None];
    for frontend in all {
        refused(frontend, "a_b").unwrap();
    }
    let older = place.volume(BLOCK_DEVICE);
    older.start(&offer(false)).unwrap();
    // By its socket, which clients of others have as well.
    for frontend in &all[..3] {
        let error = refused(*frontend, "a_b").unwrap_err();
        assert!(error.to_string().contains("longhorn-a_b.sock"), "{error}");
        assert!(error.to_string().contains("Detach the volume, upgrade its engine"), "{error}");
    }
    for frontend in &all[3..] {
        refused(*frontend, "a_b").unwrap();
    }
    older.stop().unwrap();
    refused(Some(BLOCK_DEVICE), "a_b").unwrap();
    // By its node: here, of any disk of this machine.
    let disks = fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
    let numbers = disks.filter_map(|disk| {
        let text = fs::read_to_string(disk.path().join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    let Some(numbers) = numbers.take(1).next() else {
        println!("SKIPPED an upgrade of a volume with a node: needs a block device");
        return;
    };
    node::make(&nodes, "other", numbers, None).unwrap();
    for frontend in all {
        let error = refused(frontend, "other").unwrap_err();
        assert!(error.to_string().contains("nodes/other"), "{error}");
    }
}

/// Otherwise the unit and the target of another volume went.
#[test]
fn a_number_that_tgtd_has_given_to_another_volume_is_left_alone() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(TARGET);
    volume.start(&offer(false)).unwrap();
    place.programs.world().restarts = Some("iqn.2019-10.io.longhorn:other");
    place.programs.commands();
    volume.stop().unwrap();
    let unbound = "tgtadm --lld iscsi --op unbind --mode target --tid 1 -I ALL";
    assert_eq!(place.programs.commands(), [unbound]);
    assert_eq!(place.programs.world().targets.len(), 1);
    assert!(place.is_clean());
}

#[test]
fn a_start_that_fails_early_ends_no_device_that_waits() {
    let Some(place) = Place::new() else { return };
    let waiting = Ledger::new(place.list());
    waiting.begin(7).unwrap();
    for (kind, missing) in
        [(TARGET, "tgtadm"), (BLOCK_DEVICE, "tgtadm"), (BLOCK_DEVICE, "iscsiadm")]
    {
        place.programs.world().missing = vec![missing];
        place.volume(kind).start(&offer(false)).unwrap_err();
        waiting.check(7, false).unwrap();
    }
    place.programs.world().missing.clear();
    let volume = place.volume(TARGET);
    volume.start(&offer(false)).unwrap();
    assert!(waiting.check(7, false).is_err(), "the volume is used in another way from now on");
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn without_the_right_tgtd_it_says_what_to_do() {
    let Some(place) = Place::new() else { return };
    let refused = |stores, starts, missing: &[&'static str]| {
        let mut world = place.programs.world();
        (world.stores, world.starts, world.missing) = (stores, starts, missing.to_vec());
        drop(world);
        let volume = place.volume(TARGET);
        let error = volume.start(&offer(false)).unwrap_err();
        assert!(place.is_clean() && !volume.is_up());
        assert_eq!(error.kind(), dbs_core::ErrorKind::Unsupported, "{error}");
        let text = error.to_string();
        assert!(text.contains("`nbd`") && text.contains("modprobe ublk_drv"), "{text}");
        text
    };
    assert!(refused(None, None, &["tgtadm"]).contains("no such program in PATH"));
    assert!(refused(None, None, &["tgtd"]).contains("`tgtd -f` was not run"));
    assert!(refused(None, None, &[]).contains("does not start"));
    let other = refused(Some("sheepdog\n    rdwr"), None, &[]);
    assert!(other.contains("no backing store `longhorn`"), "{other}");
    let other = refused(None, Some("rdwr"), &[]);
    assert!(other.contains("no backing store `longhorn`"), "{other}");
    let mut world = place.programs.world();
    (world.stores, world.starts) = (None, Some("longhorn"));
    world.commands.clear();
    drop(world);
    let volume = place.volume(TARGET);
    volume.start(&offer(false)).unwrap();
    assert_eq!(place.programs.commands()[0], "tgtd -f");
    volume.stop().unwrap();
    // One that was just started and hangs is asked once more, not fifty times.
    place.programs.world().stores = None;
    place.programs.world().slept = Duration::ZERO;
    place.programs.fail("show --mode system", 1, exited, "");
    place.programs.fail("show --mode system", 1000, slow, "");
    let error = volume.start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("was not done in 30 s"), "{error}");
    assert!(place.programs.world().slept <= Duration::from_secs(30));
}

#[test]
fn a_start_that_fails_leaves_nothing_and_does_not_take_long() {
    let Some(place) = Place::new() else { return };
    // What fails how often, why, what is said, and how many seconds it may take with the clean-up.
    let cases: [(&str, u32, Reason, &str, &str, u64); 7] = [
        ("--login", 1, slow, "", "was not done in 60 s and was killed", 60),
        ("--login", 1, exited, "iscsiadm: Could not login", "Could not login", 0),
        ("-m session -P 3", 200, exited, "iscsiadm: error", "error", 15),
        ("-m discovery", 1000, exited, "iscsiadm: error", "does not find the target", 12),
        ("-m discovery", 1000, slow, "", "does not find the target", 60),
        ("--op new --mode logicalunit", 1, exited, "tgtadm: invalid request", "invalid request", 0),
        ("--op bind", 1, exited, "tgtadm: unknown error", "unknown error", 0),
    ];
    for (command, times, why, said, text, seconds) in cases {
        place.programs.world().slept = Duration::ZERO;
        place.programs.fail(command, times, why, said);
        let volume = place.volume(BLOCK_DEVICE);
        let error = volume.start(&offer(false)).unwrap_err();
        assert!(error.to_string().contains(text), "{command}: {error}");
        place.programs.world().failing.clear();
        assert!(!volume.is_up() && place.is_clean(), "{command}");
        let slept = place.programs.world().slept;
        assert!(slept <= Duration::from_secs(seconds), "{command}: {slept:?}");
    }
    place.programs.world().missing = vec!["iscsiadm"];
    let error = place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("install open-iscsi on the node"), "{error}");
    place.programs.world().missing.clear();
    place.programs.fail("--version", 1, slow, "");
    let error = place.volume(BLOCK_DEVICE).start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("was not done in 30 s"), "{error}");
    // One that is too old to know an option does not answer anybody again.
    place.programs.fail("logicalunit", 1000, slow, "");
    let error = place.volume(TARGET).start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("github.com/longhorn/tgt"), "{error}");
}

#[test]
fn a_disk_that_is_in_use_stays_until_it_can_be_ended() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(BLOCK_DEVICE);
    volume.start(&offer(false)).unwrap();
    place.programs.fail("--logout", 5, exited, "iscsiadm: Session is in use, logout refused");
    let error = volume.stop().unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    assert!(volume.is_up() && place.node().exists() && place.socket().exists());
    assert_eq!(volume.endpoint(), place.node().display().to_string());
    place.programs.commands();
    volume.stop().unwrap();
    assert!(place.is_clean());
    // A logout that takes long may be done later.
    volume.start(&offer(false)).unwrap();
    place.programs.fail("--logout", 1, slow, "");
    place.programs.world().logs_out_late = true;
    place.programs.world().slept = Duration::ZERO;
    volume.stop().unwrap();
    assert!(!volume.is_up() && place.is_clean());
    assert!(place.programs.world().slept <= Duration::from_secs(80));
}

#[test]
fn a_tgtd_that_died_keeps_nothing_from_ending() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(BLOCK_DEVICE);
    volume.start(&offer(false)).unwrap();
    {
        let mut world = place.programs.world();
        (world.stores, world.starts) = (None, Some("longhorn"));
        world.targets.clear();
    }
    assert!(volume.expand(2 * SIZE).is_err());
    volume.stop().unwrap();
    volume.start(&offer(false)).unwrap();
    place.programs.world().targets.clear();
    let error = volume.expand(2 * SIZE).unwrap_err();
    assert!(error.to_string().contains("may have been ended"), "{error}");
    volume.stop().unwrap();
    assert!(place.is_clean());
}

#[test]
fn another_controller_may_take_a_number_first() {
    let Some(place) = Place::new() else { return };
    let volume = place.volume(TARGET);
    place.programs.fail("--op new --mode target", 2, exited, "tgtadm: this target already exists");
    volume.start(&offer(false)).unwrap();
    let slept = place.programs.world().slept;
    assert_eq!(slept, Duration::from_secs(1));
    volume.stop().unwrap();
    place.programs.fail("--op new --mode target", 5, exited, "tgtadm: this target already exists");
    let error = volume.start(&offer(false)).unwrap_err();
    assert!(error.to_string().contains("already exists"), "{error}");
}
