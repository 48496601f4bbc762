use super::*;
use crate::ErrorKind;
use crate::io::conformance::{self, Resize};
use crate::io::file;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

const DRIVERS: [IoDriver; 2] = [IoDriver::Pread, IoDriver::Uring];
/// Tells the helper process what to open, and how.
const HELPER_PATH: &str = "DBS_TEST_LOCK_PATH";
const HELPER_READS: &str = "DBS_TEST_LOCK_READS";

fn drivers() -> impl Iterator<Item = IoDriver> {
    DRIVERS.into_iter().filter(|driver| {
        let usable = *driver == IoDriver::Pread || uring_available().is_ok();
        if !usable {
            eprintln!("skipped: io_uring is not available here");
        }
        usable
    })
}

fn conform(path: &Path, resize: Resize) {
    for driver in drivers() {
        let opened = open_storage(path, false, driver).unwrap();
        eprintln!("{} on {}: {:?}", opened.storage.driver(), path.display(), opened.info);
        conformance::run(&*opened.storage, resize);
    }
}

fn sparse(directory: &Path, size: u64) -> PathBuf {
    let path = directory.join("store");
    File::create(&path).unwrap().set_len(size).unwrap();
    path
}

#[test]
fn files_conform() {
    let directory = tempfile::tempdir().unwrap();
    conform(&sparse(directory.path(), conformance::SIZE_BYTES), Resize::Possible);
}

#[test]
fn files_conform_through_the_page_cache() {
    let directory = tempfile::tempdir().unwrap();
    let path = sparse(directory.path(), conformance::SIZE_BYTES);
    let target = || Target::open_buffered(StoreLock::acquire(&path, false).unwrap()).unwrap();
    assert!(!target().info().direct);
    conformance::run(&FileStorage::pread(target()), Resize::Possible);
    if uring_available().is_ok() {
        conformance::run(&FileStorage::uring(target()).unwrap(), Resize::Possible);
    }
}

#[test]
fn files_on_tmpfs_conform() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: /dev/shm cannot be written to");
        return;
    };
    conform(&sparse(directory.path(), conformance::SIZE_BYTES), Resize::Possible);
}

/// Fails the test over a clean-up that failed, unless it has failed already.
fn report(done: bool, what: &str, path: &Path) {
    assert!(done || std::thread::panicking(), "could not {what} {}", path.display());
}

/// A loop device, detached when dropped.
struct Loop {
    device: PathBuf,
    directory: tempfile::TempDir,
}

impl Loop {
    fn new(size: u64, sector: u32) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let file = sparse(directory.path(), size);
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector.to_string()])
            .arg(file)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                let device = String::from_utf8(output.stdout).unwrap().trim_end().into();
                Some(Self { device, directory })
            }
            _ => {
                eprintln!("skipped: no loop device with `losetup` (it needs root)");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("--detach").arg(&self.device).status();
        report(status.is_ok_and(|status| status.success()), "detach", &self.device);
    }
}

#[test]
fn block_devices_conform() {
    for sector in [512, 4096] {
        let Some(device) = Loop::new(conformance::SIZE_BYTES, sector) else { return };
        let opened = open_storage(&device.device, true, IoDriver::Auto).unwrap();
        assert!(opened.info.is_block_device && opened.info.direct);
        assert_eq!(opened.info.logical_block_bytes, sector);
        assert_eq!(opened.info.size_bytes, conformance::SIZE_BYTES);
        drop(opened);
        conform(&device.device, Resize::Refused);
    }
}

/// A container has device nodes of its own, whose locks are not those of the host's nodes.
#[test]
fn a_device_that_is_written_through_another_node_is_not_read() {
    use std::os::unix::fs::MetadataExt;
    let Some(device) = Loop::new(1 << 20, 512) else { return };
    let number = std::fs::metadata(&device.device).unwrap().rdev();
    let number =
        [nix::sys::stat::major(number), nix::sys::stat::minor(number)].map(|n| n.to_string());
    let node = device.directory.path().join("node");
    let made = Command::new("mknod").arg(&node).arg("b").args(&number).status();
    if !made.is_ok_and(|status| status.success()) || File::open(&node).is_err() {
        println!("SKIPPED: no device node can be made and opened in a temporary directory");
        return;
    }
    // The lock of the file behind a loop device would tell; other devices have none.
    std::fs::remove_file(device.directory.path().join("store")).unwrap();
    let [outside, inside] = [&device.device, &node];
    let writer = open_storage(outside, false, IoDriver::Auto).unwrap();
    for read_only in [true, false] {
        let refused = open_storage(inside, read_only, IoDriver::Auto).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    }
    drop(writer);
    // Readers are beside one another, whichever way they came.
    let reader = open_storage(outside, true, IoDriver::Auto).unwrap();
    drop(open_storage(inside, true, IoDriver::Auto).unwrap());
    drop(reader);
    drop(open_storage(inside, false, IoDriver::Auto).unwrap());
}

#[test]
fn writes_that_do_not_fit_the_blocks_are_refused() {
    let Some(device) = Loop::new(1 << 20, 4096) else { return };
    for driver in drivers() {
        let storage = open_storage(&device.device, false, driver).unwrap().storage;
        for (offset, length) in [(512, 4096), (0, 512), (100, 4096)] {
            let error = storage.write_at(offset, &vec![1; length]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{offset} {length}");
        }
        assert_eq!(
            storage.read_at(1, &mut [0; 512]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        let mut block = [9; 4096];
        storage.read_at(0, &mut block).unwrap();
        assert_eq!(block, [0; 4096]);
    }
}

#[test]
fn a_file_cut_short_behind_our_back_ends_reads() {
    let directory = tempfile::tempdir().unwrap();
    for driver in drivers() {
        let path = sparse(directory.path(), 1 << 20);
        let storage = open_storage(&path, false, driver).unwrap().storage;
        File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
        storage.read_at(4096, &mut [0; 4096]).unwrap();
        for (offset, length) in [(8192, 4096), (0, 1 << 20), (512 << 10, 512)] {
            let error = storage.read_at(offset, &mut vec![0; length]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{offset} {length}");
        }
    }
}

#[test]
fn discard_frees_and_allocate_reserves_space() {
    let directory = tempfile::tempdir().unwrap();
    let path = sparse(directory.path(), 4 << 20);
    let storage = open_storage(&path, false, IoDriver::Auto).unwrap().storage;
    let used = || fs::metadata(&path).unwrap().blocks() * 512;
    storage.allocate(0, 4 << 20).unwrap();
    if used() == 0 {
        eprintln!("skipped: this file system reserves nothing");
        return;
    }
    assert!(used() >= 4 << 20);
    storage.discard(1 << 20, 2 << 20).unwrap();
    assert!(used() < 3 << 20);
}

/// While a hole is punched, ext4 lets no other request into the file. A hole of 64 MiB kept a writer waiting
/// for 0.14 s.
#[test]
fn a_file_gives_space_back_a_piece_at_a_time() {
    let mib = 1 << 20;
    let wanted = [(4096, mib), (4096 + mib, mib), (4096 + 2 * mib, 8192)];
    assert!(file::holes(4096, 2 * mib + 8192).eq(wanted));
    assert_eq!(file::holes(4096, 0).next(), None);
}

#[test]
fn the_driver_is_what_was_asked_for_and_works_here() {
    let blocked = || Err(io::Error::from_raw_os_error(libc::EPERM));
    assert!(use_ring(IoDriver::Auto, Ok(())).unwrap());
    assert!(use_ring(IoDriver::Uring, Ok(())).unwrap());
    assert!(!use_ring(IoDriver::Pread, Ok(())).unwrap());
    assert!(!use_ring(IoDriver::Auto, blocked()).unwrap());
    assert!(!use_ring(IoDriver::Pread, blocked()).unwrap());
    let error = use_ring(IoDriver::Uring, blocked()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    let directory = tempfile::tempdir().unwrap();
    let path = sparse(directory.path(), 1 << 20);
    let name = |driver| open_storage(&path, true, driver).unwrap().storage.driver();
    assert_eq!(name(IoDriver::Pread), "pread");
    if uring_available().is_ok() {
        assert_eq!((name(IoDriver::Uring), name(IoDriver::Auto)), ("io_uring", "io_uring"));
    } else {
        assert_eq!(name(IoDriver::Auto), "pread");
    }
}

#[test]
fn readers_cannot_change_anything() {
    let directory = tempfile::tempdir().unwrap();
    let path = sparse(directory.path(), 1 << 20);
    for driver in drivers() {
        let storage = open_storage(&path, true, driver).unwrap().storage;
        storage.read_at(0, &mut [0; 4096]).unwrap();
        storage.flush().unwrap();
        for result in [
            storage.write_at(0, &[1; 4096]),
            storage.discard(0, 4096),
            storage.allocate(0, 4096),
            storage.set_size(2 << 20),
        ] {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
        }
    }
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
}

#[test]
fn the_lock_ends_with_the_storage() {
    let directory = tempfile::tempdir().unwrap();
    let path = sparse(directory.path(), 1 << 20);
    for _ in 0..50 {
        for driver in drivers() {
            let opened = open_storage(&path, false, driver).unwrap();
            opened.storage.write_at(0, &[1; 4096]).unwrap();
            let error = open_storage(&path, true, driver).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
        }
    }
    let readers = [(); 3].map(|()| open_storage(&path, true, IoDriver::Auto).unwrap());
    assert_eq!(open_storage(&path, false, IoDriver::Auto).unwrap_err().kind(), ErrorKind::Busy);
    drop(readers);
    open_storage(&path, false, IoDriver::Auto).unwrap();
}

/// Not a test: the process that holds a lock in the tests below, until its input ends.
#[test]
#[ignore = "run by other tests, in a process of its own"]
fn helper_holds_a_lock() {
    let Some(path) = std::env::var_os(HELPER_PATH) else { return };
    let reads = std::env::var_os(HELPER_READS).is_some();
    let opened = open_storage(Path::new(&path), reads, IoDriver::Auto);
    println!("\n{}", if opened.is_ok() { "locked" } else { "refused" });
    let _ = io::stdin().lines().next();
}

struct Helper {
    child: Child,
    answer: String,
}

impl Helper {
    fn start(path: &Path, reads: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "--ignored", "--nocapture", "io::open::tests::helper_holds_a_lock"])
            .env(HELPER_PATH, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if reads {
            command.env(HELPER_READS, "1");
        }
        let mut child = command.spawn().unwrap();
        let answer = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(|line| line.unwrap())
            .find(|line| line == "locked" || line == "refused");
        Self { child, answer: answer.expect("the helper says how it went") }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn a_second_writer_is_told_who_the_first_is() {
    let directory = tempfile::tempdir().unwrap();
    let file = sparse(directory.path(), 1 << 20);
    let device = Loop::new(1 << 20, 512);
    for path in std::iter::once(&file).chain(device.as_ref().map(|device| &device.device)) {
        let helper = Helper::start(path, false);
        assert_eq!(helper.answer, "locked");
        for read_only in [false, true] {
            let error = open_storage(path, read_only, IoDriver::Auto).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Busy);
            let text = error.to_string();
            assert!(text.contains(&format!("process {} (", helper.child.id())), "{text}");
            assert!(
                text.contains("open for writing by process") && text.contains("control socket"),
                "{text}"
            );
        }
        let error = create_storage(path, None, true, IoDriver::Auto).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        drop(helper);
        open_storage(path, false, IoDriver::Auto).unwrap();
    }
}

#[test]
fn readers_in_several_processes_share() {
    let directory = tempfile::tempdir().unwrap();
    let file = sparse(directory.path(), 1 << 20);
    let device = Loop::new(1 << 20, 512);
    for path in std::iter::once(&file).chain(device.as_ref().map(|device| &device.device)) {
        let helper = Helper::start(path, true);
        assert_eq!(helper.answer, "locked");
        let reader = open_storage(path, true, IoDriver::Auto).unwrap();
        drop(reader);
        let error = open_storage(path, false, IoDriver::Auto).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        let text = error.to_string();
        assert!(text.contains(&format!("being read by process {}", helper.child.id())), "{text}");
    }
}

#[test]
fn new_stores_are_made_with_their_size() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new");
    let create = |size| create_storage(&path, size, false, IoDriver::Auto);
    for size in [None, Some(0), Some(1000)] {
        assert_eq!(create(size).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(!path.exists());
    }
    let opened = create(Some(1 << 40)).unwrap();
    assert!(opened.created);
    assert_eq!((opened.info.size_bytes, opened.storage.size_bytes()), (1 << 40, 1 << 40));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
    assert_eq!(create(Some(1 << 20)).unwrap_err().kind(), ErrorKind::Busy);
    drop(opened);

    let opened = create(None).unwrap();
    assert!(!opened.created);
    assert_eq!(opened.storage.size_bytes(), 1 << 40, "a file of zeros keeps its size");
    drop(opened);
    assert_eq!(create(Some(1 << 20)).unwrap().storage.size_bytes(), 1 << 20);

    let nowhere = directory.path().join("absent/new");
    let error = create_storage(&nowhere, Some(1 << 20), false, IoDriver::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[test]
fn content_is_not_written_over_unasked() {
    let directory = tempfile::tempdir().unwrap();
    for (bytes, offset, what) in [
        (&b"Dear diary, "[..], 0, "data of unknown kind"),
        (b"\x53\xef", 1080, "an ext2 file system"),
        (b"DBS@393!\0\0\x02\0", 0, "a DBS store"),
        (b"EFI PART", (1 << 20) - 512, "a GPT partition table"),
    ] {
        let path = sparse(directory.path(), 1 << 20);
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        let create = |size, force| create_storage(&path, size, force, IoDriver::Auto);
        let error = create(Some(2 << 20), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exists);
        assert!(error.to_string().contains(what), "{error}");
        assert_eq!(create(Some(100), true).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(&fs::read(&path).unwrap()[offset as usize..][..bytes.len()], bytes);

        drop(create(None, true).unwrap());
        assert!(fs::read(&path).unwrap() == vec![0; 1 << 20]);
    }
    let path = directory.path().join("diary");
    fs::write(&path, "Dear diary").unwrap();
    let error = create_storage(&path, Some(1 << 20), false, IoDriver::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    assert_eq!(fs::read(&path).unwrap(), b"Dear diary");
    drop(create_storage(&path, Some(1 << 20), true, IoDriver::Auto).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
}

/// Unmounts when dropped.
struct Mounted(tempfile::TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        let status = Command::new("umount").arg(self.0.path()).status();
        report(status.is_ok_and(|status| status.success()), "unmount", self.0.path());
    }
}

#[test]
fn what_the_system_uses_is_refused_even_with_force() {
    let Some(device) = Loop::new(8 << 20, 512) else { return };
    let refusal = |path: &Path| {
        let error = create_storage(path, None, true, IoDriver::Auto).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        error.to_string()
    };
    let text = refusal(&device.directory.path().join("store"));
    assert!(text.contains(device.device.to_str().unwrap()), "{text}");

    let error = create_storage(&device.device, Some(4 << 20), true, IoDriver::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let made = Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&device.device).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no `mke2fs`");
        return;
    }
    let error = create_storage(&device.device, None, false, IoDriver::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    assert!(error.to_string().contains("an ext4 file system"), "{error}");

    let point = tempfile::tempdir().unwrap();
    let status = Command::new("mount").arg(&device.device).arg(point.path()).status();
    if !status.is_ok_and(|status| status.success()) {
        eprintln!("skipped: cannot mount here");
        return;
    }
    let mounted = Mounted(point);
    let text = refusal(&device.device);
    assert!(text.contains(&format!("mounted at `{}`", mounted.0.path().display())), "{text}");
    let error = open_storage(&device.device, false, IoDriver::Auto).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("mounted at"), "{error}");
    drop(mounted);
    drop(create_storage(&device.device, None, true, IoDriver::Auto).unwrap());
}
