//! A process that serves a view of a store of its own, and does to the store what it is told.

use dbs_core::store::SnapshotOptions;
use dbs_core::{InitOptions, OpenOptions, Store};
use dbs_fuse::{Mount, Options};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Where the process finds its store; without it there is nothing to serve.
const STORE: &str = "DBS_FUSE_TEST_STORE";
/// In front of answers, as the test runner prints too.
const ANSWER: &str = "answer ";
/// How long a test may take before its server is killed.
const PATIENCE: Duration = Duration::from_secs(900);

/// Whether views can be mounted here; says what is missing.
pub fn can_mount() -> bool {
    let missing = if !Path::new("/dev/fuse").exists() {
        "/dev/fuse"
    } else if !nix::unistd::geteuid().is_root() {
        "root"
    } else {
        return true;
    };
    println!("SKIPPED mounting a view: needs {missing}");
    false
}

/// The process, as the tests that need it start it. As a test by itself it does nothing.
#[test]
fn serve() {
    let Some(path) = std::env::var_os(STORE).map(PathBuf::from) else { return };
    let live = std::env::var_os("DBS_FUSE_TEST_IDLE").is_none();
    let options = OpenOptions { read_only: !live, ..OpenOptions::default() };
    let store = Store::open(&path, &options).unwrap();
    let shown = Options { store: path.clone(), live, allow_other: false };
    let mount = Mount::start(&store, &path.with_file_name("mnt"), shown).unwrap();
    println!("{ANSWER}{}", json!("ready"));
    for line in std::io::stdin().lines() {
        let request: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = match obey(&store, &request) {
            Ok(value) => json!({ "ok": value }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        println!("{ANSWER}{answer}");
    }
    if mount.unmount(false).is_err() {
        mount.unmount(true).unwrap();
    }
    let _ = mount.close();
    store.close().unwrap();
}

fn obey(store: &Store, request: &Value) -> dbs_core::Result<Value> {
    let text = |index: usize| request[index].as_str().unwrap();
    let number = |index: usize| request[index].as_u64().unwrap();
    match text(0) {
        "create" => store.create_volume(text(1), number(2)).map(|_| Value::Null),
        "clone" => store.clone_volume(text(1), text(2), text(3)).map(|_| Value::Null),
        "resize" => store.resize_volume(text(1), number(2)).map(|()| Value::Null),
        "delete" => store.delete_volume(text(1)).map(|()| Value::Null),
        "snapshot" => {
            let made = store.create_snapshot(text(1), text(2), &SnapshotOptions::default())?;
            Ok(json!(made.created_ns))
        }
        "drop" => store.delete_snapshot(text(1), text(2)).map(|()| Value::Null),
        "protect" => store.set_protected(text(1), text(2), true).map(|()| Value::Null),
        "unprotect" => store.set_protected(text(1), text(2), false).map(|()| Value::Null),
        "retire" => store.set_retired(text(1), text(2), true).map(|()| Value::Null),
        "rebuilding" => {
            let rebuilding = request[2].as_bool().unwrap();
            store.set_rebuilding(text(1), rebuilding).map(|()| Value::Null)
        }
        "fill" => {
            let layer = store.layer(text(1), Some(text(2)))?;
            layer.write_at(number(3), &noise(number(4), 4096)).map(|()| Value::Null)
        }
        "prune" => store.prune(text(1), 0, number(2)).map(|bytes| json!(bytes)),
        "rollback" => store.rollback(text(1), text(2)).map(|()| Value::Null),
        "rename" => store.rename_snapshot(text(1), text(2), text(3)).map(|()| Value::Null),
        "label" => {
            let labels = [(text(3).to_owned(), text(4).to_owned())].into();
            store.set_labels(text(1), text(2), &labels).map(|()| Value::Null)
        }
        "work" => {
            while store.work(64)?.remaining > 0 {}
            Ok(Value::Null)
        }
        "write" => {
            let bytes = noise(number(3), number(4) as usize);
            store.volume(text(1))?.write_at(number(2), &bytes, false).map(|()| Value::Null)
        }
        "discard" => store.volume(text(1))?.discard(number(2), number(3)).map(|()| Value::Null),
        "load" => load(store, text(1), Path::new(text(2))).map(|()| Value::Null),
        "du" => Ok(json!(store.observe(text(1))?.data_bytes()?)),
        "stress" => crate::readers::stress(store, number(1)).map(|rounds| json!(rounds)),
        other => panic!("no request {other}"),
    }
}

/// Makes a volume what a file is, writing only what differs.
fn load(store: &Store, name: &str, path: &Path) -> dbs_core::Result<()> {
    let bytes = fs::read(path).unwrap();
    let volume = store.volume(name)?;
    let mut present = vec![0; 64 << 10];
    for (index, part) in bytes.chunks(present.len()).enumerate() {
        let at = (index * present.len()) as u64;
        let present = &mut present[..part.len()];
        volume.read_at(at, present)?;
        if present == part {
            continue;
        }
        if part.iter().all(|byte| *byte == 0) {
            volume.discard(at, part.len() as u64)?;
        } else {
            volume.write_at(at, part, false)?;
        }
    }
    Ok(())
}

/// Bytes that follow from a seed.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A store that is mounted, in a directory of its own.
pub struct Server {
    child: Option<Child>,
    stdin: Option<ChildStdin>,
    answers: mpsc::Receiver<Value>,
    watchdog: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
    late: Arc<AtomicBool>,
    output: Arc<Mutex<String>>,
    pub dir: tempfile::TempDir,
}

impl Server {
    /// An empty store of `size` bytes.
    pub fn new(size: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        let options =
            InitOptions { size: Some(size), extent_size: 64 << 10, ..InitOptions::default() };
        Store::init(&dir.path().join("store"), &options).unwrap();
        Self::start(dir, true)
    }

    /// The same store once more, `live` or for reading only.
    pub fn again(mut self, live: bool) -> Self {
        self.end();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        Self::start(dir, live)
    }

    fn start(dir: tempfile::TempDir, live: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "server::serve", "--nocapture", "--test-threads=1"]);
        if !live {
            command.env("DBS_FUSE_TEST_IDLE", "1");
        }
        let log = File::create(dir.path().join("log")).unwrap();
        let mut child = command
            .env(STORE, dir.path().join("store"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let (sender, answers) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let output = Arc::new(Mutex::new(String::new()));
        let seen = Arc::clone(&output);
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The runner's own words end no line before the first answer.
                match line.find(ANSWER) {
                    Some(at) => {
                        let value = serde_json::from_str(&line[at + ANSWER.len()..]).unwrap();
                        let _ = sender.send(value);
                    }
                    None => seen.lock().unwrap().push_str(&(line + "\n")),
                }
            }
        });
        let late = Arc::new(AtomicBool::new(false));
        let watchdog = watch(child.id(), Arc::clone(&late));
        let stdin = child.stdin.take();
        let child = Some(child);
        let server = Self { child, stdin, answers, watchdog: Some(watchdog), late, output, dir };
        assert_eq!(server.answer(), "ready");
        server
    }

    /// A path below the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("mnt").join(name)
    }

    /// Does something to the store, which must succeed.
    #[track_caller]
    pub fn ask(&self, request: &Value) -> Value {
        let answer = self.try_ask(request);
        assert!(answer["error"].is_null(), "{request}: {answer}");
        answer["ok"].clone()
    }

    pub fn try_ask(&self, request: &Value) -> Value {
        writeln!(self.stdin.as_ref().unwrap(), "{request}").unwrap();
        self.answer()
    }

    fn answer(&self) -> Value {
        self.answers.recv_timeout(PATIENCE).unwrap_or_else(|error| {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            panic!("the server does not answer: {error}\n{}{log}", self.output.lock().unwrap());
        })
    }

    /// Ends it in good order, or by force.
    fn end(&mut self) {
        drop(self.stdin.take());
        if let Some(mut child) = self.child.take() {
            let mut left = 12_000;
            while child.try_wait().unwrap().is_none() && left > 0 {
                thread::sleep(Duration::from_millis(10));
                left -= 1;
            }
            let _ = child.kill();
            let _ = child.wait();
            // Whatever is left of a server that was killed.
            let point = self.dir.path().join("mnt");
            while dbs_fuse::mounts::at(&point).unwrap().is_some() {
                dbs_fuse::mounts::unmount(&point, true).unwrap();
            }
        }
        if let Some((cancel, thread)) = self.watchdog.take() {
            drop(cancel);
            thread.join().unwrap();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
        if self.late.load(Ordering::SeqCst) && !thread::panicking() {
            panic!("the test took too long: its server was killed");
        }
    }
}

/// Kills the server when the time is over, and with it all that waits for it.
fn watch(pid: u32, late: Arc<AtomicBool>) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (cancel, cancelled) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        if cancelled.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            late.store(true, Ordering::SeqCst);
            let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    (cancel, thread)
}
