//! Backups and restores as Longhorn asks for them: a controller over replicas, all processes, and the command line.

use crate::PROGRAM;
use crate::controller::{client, controller, free_ports, replica, write};
use crate::support::*;
use longhorn_testing::DataClient;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

/// A directory with backups.
struct Target(tempfile::TempDir);

impl Target {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn url(&self) -> String {
        format!("vfs://{}", self.0.path().display())
    }

    fn backup(&self, name: &str) -> String {
        format!("{}?backup={name}&volume=vol", self.url())
    }

    /// All its files, by the ends of their names.
    fn files(&self, end: &str) -> Vec<PathBuf> {
        fn walk(path: &Path, end: &str, found: &mut Vec<PathBuf>) {
            let Ok(entries) = fs::read_dir(path) else { return };
            for path in entries.map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    walk(&path, end, found);
                } else if path.to_string_lossy().ends_with(end) {
                    found.push(path);
                }
            }
        }
        let mut found = Vec::new();
        walk(self.0.path(), end, &mut found);
        found
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The command line, of no volume.
fn command(args: &[&str]) -> Output {
    Command::new(PROGRAM).env("DBS_TEST_ALONE", "1").args(args).output().unwrap()
}

fn prints(args: &[&str]) -> Value {
    let output = command(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// What it says on its standard output when it fails.
fn refused(args: &[&str]) -> String {
    let output = command(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    assert!(text(&output.stderr).contains("level="), "{args:?}");
    text(&output.stdout)
}

/// The arguments of a command for the volume of a controller.
fn of<'a>(url: &'a str, args: &[&'a str]) -> Vec<&'a str> {
    [&["--url", url, "--volume-name", "vol"], args].concat()
}

/// A volume with replicas and a socket.
struct Volume {
    place: Place,
    replicas: Vec<(Process, String)>,
    controller: Process,
}

impl Volume {
    fn new(replicas: usize) -> Self {
        let place = Place::in_memory();
        let replicas: Vec<_> =
            (0..replicas).map(|number| replica(&place, &format!("r{number}"))).collect();
        let addresses: Vec<_> = replicas.iter().map(|(_, address)| address.as_str()).collect();
        let controller = controller(&place, &addresses, &[]).ready();
        Self { place, replicas, controller }
    }

    fn url(&self) -> String {
        format!("http://{}", self.controller.field("grpc"))
    }

    fn run(&self, args: &[&str]) -> Value {
        prints(&of(&self.url(), args))
    }

    fn refused(&self, args: &[&str]) -> String {
        refused(&of(&self.url(), args))
    }

    fn client(&self) -> DataClient {
        client(&self.place)
    }

    fn snapshot(&self, name: &str) {
        let output = command(&of(&self.url(), &["snapshot", "create", name]));
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    fn begin(&self, target: &Target, snapshot: &str, backup: &str, more: &[&str]) -> Value {
        let url = target.url();
        let args = ["backup", "create", snapshot, "--dest", &url, "--backup-name", backup];
        self.run(&[&args[..], more].concat())
    }

    /// Backs up to the end; whether it was incremental.
    fn back_up(&self, target: &Target, snapshot: &str, backup: &str) -> bool {
        let begun = self.begin(target, snapshot, backup, &["--label", "name=one"]);
        assert_eq!(begun["backupID"], backup);
        let address = begun["replicaAddress"].as_str().unwrap().to_owned();
        let status = wait(|| {
            let status = self.run(&["backup", "status", backup, "--replica", &address]);
            (status["state"] != "in_progress").then_some(status)
        });
        let expected = json!({
            "progress": 100, "backupURL": target.backup(backup), "snapshotName": snapshot,
            "state": "complete", "replicaAddress": address,
        });
        assert_eq!(status, expected);
        assert_eq!(self.run(&["backup", "status", backup]), expected);
        begun["isIncremental"].as_bool().unwrap()
    }

    /// How restores are, on each replica.
    fn restore_status(&self) -> BTreeMap<String, Value> {
        serde_json::from_value(self.run(&["backup", "restore-status"])).unwrap()
    }

    /// Waits for the end of restores.
    fn restored(&self) -> Vec<Value> {
        wait(|| {
            let all: Vec<_> = self.restore_status().into_values().collect();
            all.iter().all(|status| status["isRestoring"] == false).then_some(all)
        })
    }

    fn restore(&self, target: &Target, backup: &str) {
        self.run(&["backup", "restore", &target.backup(backup)]);
        for status in self.restored() {
            assert_eq!((&status["state"], &status["progress"]), (&json!("complete"), &json!(100)));
            assert_eq!((&status["lastRestored"], status.get("error")), (&json!(backup), None));
        }
    }
}

fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "nothing happened for long");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn content(client: &DataClient) -> Vec<u8> {
    let read = |at: u64| client.read(at << 20, 1 << 20).unwrap();
    (0..SIZE >> 20).flat_map(read).collect()
}

/// Data that gives a backup something to do.
fn fill(client: &DataClient, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    for at in 0..SIZE >> 20 {
        let mut bytes = vec![0; 1 << 20];
        random.fill(&mut bytes);
        client.write(at << 20, &bytes).unwrap();
    }
}

#[test]
fn a_volume_is_backed_up_and_restored_into_another() {
    let (source, target) = (Volume::new(3), Target::new());
    let data = source.client();
    write(&data, 1);
    source.snapshot("one");
    assert!(!source.back_up(&target, "one", "backup-1"));
    let first = content(&data);
    write(&data, 2);
    data.write(40 << 20, &block(7, 3)).unwrap();
    source.snapshot("two");
    assert!(source.back_up(&target, "two", "backup-2"));
    let second = content(&data);

    let listed = prints(&["backup", "ls", &target.url()]);
    assert_eq!(listed["vol"]["Backups"].as_object().unwrap().len(), 2);
    assert_eq!((&listed["vol"]["Size"], &listed["vol"]["Messages"]), (&json!("0"), &json!({})));
    assert_eq!(listed["vol"]["Backups"]["backup-1"]["Messages"], Value::Null);
    let listed = prints(&["backup", "ls", "--volume-only", "--volume", "vol", &target.url()]);
    assert_eq!(listed["vol"].get("Backups"), None);
    let shown = prints(&["backup", "inspect", &target.backup("backup-2").replace('&', "\\u0026")]);
    assert_eq!(
        (&shown["URL"], &shown["SnapshotName"]),
        (&json!(target.backup("backup-2")), &json!("two"))
    );
    assert_eq!((&shown["IsIncremental"], &shown["Labels"]["name"]), (&json!(true), &json!("one")));
    assert_eq!((&shown["VolumeName"], &shown["VolumeSize"]), (&json!("vol"), &json!("67108864")));
    let volume = format!("{}?volume=vol", target.url());
    let shown = prints(&["backup", "inspect-volume", &volume]);
    assert_eq!(
        (&shown["LastBackupName"], &shown["DataEngine"]),
        (&json!("backup-2"), &json!("v1"))
    );
    let head = prints(&["backup", "head", &volume]);
    assert!(head["ModificationTime"].as_str().unwrap().starts_with("20"), "{head}");

    let copy = Volume::new(3);
    let text = copy.refused(&["backup", "restore", &target.backup("backup-1")]);
    assert_eq!(text, "volume frontend enabled, cannot perform restore\n");
    copy.run(&["frontend", "shutdown"]);
    copy.restore(&target, "backup-1");
    let again = copy.refused(&["backup", "restore", &target.backup("backup-1")]);
    let errors: Value = serde_json::from_str(&again).unwrap();
    let errors = errors["ReplicaErrors"].as_array().unwrap();
    assert_eq!(errors.len(), 3);
    assert!(errors[0]["Message"].as_str().unwrap().contains("already restored backup backup-1"));
    copy.run(&["frontend", "start", "socket"]);
    assert!(content(&copy.client()) == first);
    copy.run(&["frontend", "shutdown"]);
    copy.restore(&target, "backup-2");
    copy.run(&["frontend", "start", "socket"]);
    let restored = copy.client();
    assert!(content(&restored) == second);
    // The volume goes on as any other.
    write(&restored, 4);
    copy.snapshot("own");
    assert_eq!(modes(&copy), ["RW"; 3]);

    prints(&["backup", "rm", &target.backup("backup-1")]);
    let gone = refused(&["backup", "inspect", &target.backup("backup-1")]);
    assert!(gone.contains("cannot find"), "{gone}");
    prints(&["backup", "rm", "--volume", "vol", &target.url()]);
    assert_eq!(prints(&["backup", "ls", &target.url()]), json!({}));
    assert!(target.files("").is_empty());
    prints(&["backup", "cleanup-all-mounts"]);
}

fn modes(volume: &Volume) -> Vec<String> {
    crate::controller::modes(&volume.controller)
}

#[test]
fn what_cannot_be_done_is_said_in_upstream_s_words() {
    let (volume, target) = (Volume::new(1), Target::new());
    let url = volume.url();
    let stderr = |args: &[&str]| {
        let output = command(&of(&url, args));
        assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b""[..]));
        text(&output.stderr)
    };
    let create = |more: &[&str]| stderr(&[&["backup", "create"], more].concat());
    let target = target.url();
    assert!(create(&["x"]).contains("missing required parameter --dest"));
    assert!(create(&["--dest", &target]).contains("missing required parameter snapshot"));
    assert!(
        create(&["x", "--dest", &target]).contains("snapshot disk volume-snap-x.img not found")
    );
    let head = create(&["volume-head", "--dest", &target]);
    assert!(head.contains("cannot backup the head disk in the chain"), "{head}");
    let size = create(&["x", "--dest", &target, "--backup-block-size", "0"]);
    assert!(size.contains("invalid backup block size: 0"), "{size}");
    let label = create(&["x", "--dest", &target, "--label", "x"]);
    assert!(label.contains("cannot parse backup labels: invalid label"), "{label}");
    assert!(stderr(&["backup", "status"]).contains("missing required parameter backupID"));
    let status = stderr(&["backup", "status", "b-1", "--replica", "tcp://127.0.0.1:1"]);
    assert!(status.contains("unknown replica"), "{status}");
    let unknown = volume.run(&["backup", "status", "b-1"]);
    assert!(unknown["error"].as_str().unwrap().contains("backup not found b-1"), "{unknown}");
    assert_eq!(volume.refused(&["backup", "restore"]), "missing required parameter backup\n");
    assert_eq!(refused(&["backup", "ls"]), "cannot find valid required parameter: dest URL\n");
    assert_eq!(refused(&["backup", "ls", "bad://x/"]), "driver bad is not supported\n");
    let none = refused(&["backup", "inspect-volume", &format!("{target}?volume=vol")]);
    assert!(none.starts_with("cannot find backupstore/volumes/"), "{none}");
    let listed = prints(&["backup", "ls", "--volume", "vol", &target]);
    let message = listed["vol"]["Messages"]["error"].as_str().unwrap();
    assert!(message.starts_with("cannot find backupstore/volumes/"), "{message}");
    volume.run(&["frontend", "shutdown"]);
    let missing = format!("{target}?backup=backup-1&volume=vol");
    let text = volume.refused(&["backup", "restore", &missing]);
    let errors: Value = serde_json::from_str(&text).unwrap();
    let message = errors["ReplicaErrors"][0]["Message"].as_str().unwrap();
    assert!(
        message.starts_with("failed to get the current restoring backup info: cannot find"),
        "{message}"
    );
}

/// What it has written stays of use, and keeps nobody from deleting.
#[test]
fn a_replica_is_killed_in_the_middle_of_a_backup() {
    let (mut volume, target) = (Volume::new(2), Target::new());
    let data = volume.client();
    fill(&data, 1);
    volume.snapshot("one");
    let begun = volume.begin(&target, "one", "backup-1", &["--compression-method", "gzip"]);
    wait(|| (target.files(".blk").len() > 2).then_some(()));
    let address = begun["replicaAddress"].as_str().unwrap();
    volume.replicas.iter_mut().find(|(_, at)| at == address).unwrap().0.kill();
    let before = target.files(".blk").len();
    assert!(before < 32, "it was through already");
    assert_eq!(target.files(".cfg").len(), 2);
    let in_progress = refused(&["backup", "inspect", &target.backup("backup-1")]);
    assert!(in_progress.contains("backup backup-1 is still in progress"), "{in_progress}");
    // The controller notices with the next write.
    data.write(0, &block(0, 9)).unwrap();
    assert!(!volume.back_up(&target, "one", "backup-1"));
    assert!(target.files(".blk").len() > before);
    let raw = target.0.path().join("volume.raw");
    let path = raw.to_str().unwrap();
    prints(&[
        "backup",
        "restore-to-file",
        &target.backup("backup-1"),
        "--output-file",
        path,
        "--output-format",
        "raw",
    ]);
    let mut expected = content(&data);
    let mut random = fastrand::Rng::with_seed(1);
    random.fill(&mut expected[..1 << 20]);
    assert!(fs::read(&raw).unwrap() == expected);
    // Nothing is put in place of what is no regular file.
    let (link, folder) = (target.0.path().join("link.raw"), target.0.path().join("folder.raw"));
    std::os::unix::fs::symlink(&raw, &link).unwrap();
    fs::create_dir(&folder).unwrap();
    for output in [&link, &folder] {
        let (url, path) = (target.backup("backup-1"), output.to_str().unwrap());
        let args = ["--output-file", path, "--output-format", "raw"];
        let refused = command(&[&["backup", "restore-to-file", &url], &args[..]].concat());
        assert!(!refused.status.success());
        assert!(text(&refused.stderr).contains("is not a regular file"), "{path}");
    }
    assert_eq!(fs::read_link(&link).unwrap(), raw);
    let raws = fs::read_dir(target.0.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().contains(".raw"));
    assert_eq!(raws.count(), 3, "no scratch stays");
    fs::remove_file(&link).unwrap();
    fs::remove_dir(&folder).unwrap();
    fs::remove_file(&raw).unwrap();
    // The lock of the killed one is no hindrance: locks of backups share, and it goes out of date for deletions.
    for lock in target.files(".lck") {
        fs::remove_file(lock).unwrap();
    }
    prints(&["backup", "rm", &target.backup("backup-1")]);
    assert_eq!(target.files(".blk").len(), 0);
}

/// The volume is what it was before, and can be restored.
#[test]
fn a_replica_is_killed_in_the_middle_of_a_restore() {
    let (source, target) = (Volume::new(1), Target::new());
    let data = source.client();
    write(&data, 1);
    source.snapshot("one");
    source.back_up(&target, "one", "backup-1");
    let first = content(&data);
    fill(&data, 2);
    source.snapshot("two");
    source.back_up(&target, "two", "backup-2");
    let second = content(&data);
    drop(source);

    let mut copy = Volume::new(1);
    copy.run(&["frontend", "shutdown"]);
    copy.restore(&target, "backup-1");
    // A block that does not come.
    let blocks = target.files(".blk");
    let newest = blocks.iter().max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
    let block = newest.unwrap();
    let kept = fs::read(block).unwrap();
    fs::remove_file(block).unwrap();
    nix::unistd::mkfifo(block, nix::sys::stat::Mode::S_IRWXU).unwrap();
    copy.run(&["backup", "restore", &target.backup("backup-2")]);
    wait(|| {
        let status = copy.restore_status().into_values().next().unwrap();
        assert_eq!(status["isRestoring"], true);
        (status["progress"].as_i64().unwrap_or(0) > 30).then_some(())
    });
    copy.replicas[0].0.kill();
    copy.controller.kill();
    fs::remove_file(block).unwrap();
    fs::write(block, kept).unwrap();

    let listen = format!("127.0.0.1:{}", free_ports());
    let replica = copy
        .place
        .start("r0", &["--disableRevCounter", "--sync-agent-port-count", "2", "--listen", &listen]);
    let address = format!("tcp://{listen}");
    copy.controller = controller(&copy.place, &[&address], &[]).ready();
    copy.replicas = vec![(replica, address)];
    assert!(content(&copy.client()) == first);
    copy.run(&["frontend", "shutdown"]);
    assert_eq!(copy.restore_status().into_values().next().unwrap()["lastRestored"], "");
    copy.restore(&target, "backup-2");
    copy.run(&["frontend", "start", "socket"]);
    assert!(content(&copy.client()) == second);
}

#[test]
fn a_backup_becomes_an_image_file() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        println!("skipped: there is no qemu-img");
        return;
    }
    let (volume, target, files) = (Volume::new(1), Target::new(), tempfile::tempdir().unwrap());
    let data = volume.client();
    write(&data, 1);
    volume.snapshot("one");
    volume.back_up(&target, "one", "backup-1");
    let at = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let to_file = |more: &[&str]| {
        let url = target.backup("backup-1");
        prints(&[&["backup", "restore-to-file", &url], more].concat());
    };
    let qemu_img = |args: &[&str]| {
        let output = Command::new("qemu-img").args(args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    to_file(&["--output-file", &at("a.raw"), "--output-format", "raw"]);
    assert!(fs::read(at("a.raw")).unwrap() == content(&data));
    to_file(&["--output-file", &at("a.qcow2")]);
    let same = qemu_img(&["compare", "-f", "raw", "-F", "qcow2", &at("a.raw"), &at("a.qcow2")]);
    assert!(same.contains("identical"), "{same}");
    // Over the image that the volume is based on: what no block holds shows it.
    let mut image = vec![7; 8 << 20];
    fs::write(at("image.raw"), &image).unwrap();
    let (raw, qcow2) = (at("image.raw"), at("image.qcow2"));
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &raw, &qcow2]);
    let out = at("over.raw");
    to_file(&["--backing-file", &qcow2, "--output-file", &out, "--output-format", "raw"]);
    image.resize(SIZE as usize, 0);
    image[..2 << 20].copy_from_slice(&content(&data)[..2 << 20]);
    assert!(fs::read(&out).unwrap() == image);
    // Found by review: without the image, its content would be zeros.
    let config = target.files("volume.cfg").pop().unwrap();
    let facts = fs::read_to_string(&config).unwrap();
    let on_image = facts.replace(r#"ImageName":"\"\""#, r#"ImageName":"\"img\""#);
    assert_ne!(facts, on_image);
    fs::write(config, on_image).unwrap();
    let url = target.backup("backup-1");
    let refused = command(&["backup", "restore-to-file", &url, "--output-file", &at("b.raw")]);
    assert!(text(&refused.stderr).contains("the backing image img"), "{}", text(&refused.stderr));
    let mut names: Vec<_> =
        fs::read_dir(files.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["a.qcow2", "a.raw", "image.qcow2", "image.raw", "over.raw"]);
    let wrong = command(&["backup", "restore-to-file", "x", "--output-format", "vmdk"]);
    assert!(text(&wrong.stderr).contains("unsupported output image format: vmdk"));
}

#[test]
fn settings_and_images_are_in_a_backup_store() {
    let (target, files) = (Target::new(), tempfile::tempdir().unwrap());
    let at = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let url = format!("{}/backupstore/system-backups/v1.9.0/daily", target.url());
    let system = |args: &[&str]| prints(&[&["system-backup"], args].concat());
    assert_eq!(system(&["list", &target.url()]), json!({}));
    fs::write(at("a.zip"), b"settings").unwrap();
    let images = ["--git-commit", "g", "--manager-image", "m", "--engine-image", "e"];
    system(&[&["upload", &at("a.zip"), &url], &images[..]].concat());
    let listed = system(&["list", &target.url()]);
    assert_eq!(listed, json!({"daily": "backupstore/system-backups/v1.9.0/daily"}));
    let shown = system(&["get-config", &url]);
    assert_eq!((&shown["Name"], &shown["EngineImage"]), (&json!("daily"), &json!("e")));
    assert_eq!(shown["BackupTargetURL"], json!(target.url()));
    system(&["download", &url, &at("b.zip")]);
    assert_eq!(fs::read(at("b.zip")).unwrap(), b"settings");
    let twice = command(&[&["system-backup", "upload", &at("a.zip"), &url], &images[..]].concat());
    assert!(text(&twice.stderr).contains("already exists"), "{}", text(&twice.stderr));
    let missing = command(&["system-backup", "upload", &at("a.zip"), &url]);
    assert!(text(&missing.stderr).contains("missing required parameter --git-commit"));
    system(&["delete", &url]);
    assert_eq!(system(&["list", &target.url()]), json!({}));

    assert_eq!(prints(&["backup", "ls-backing-image", &target.url()]), json!([]));
    let folder = target.0.path().join("backupstore/backing-images/backing-images/disk");
    fs::create_dir_all(&folder).unwrap();
    let facts = r#"{"Name":"disk","Size":"4096","Checksum":"c","CompleteTime":"t"}"#;
    fs::write(folder.join("backing-image.cfg"), facts).unwrap();
    assert_eq!(prints(&["backup", "ls-backing-image", &target.url()]), json!(["disk"]));
    let image = format!("{}?backingImage=disk", target.url());
    let shown = prints(&["backup", "inspect-backing-image", &image]);
    assert_eq!((&shown["URL"], &shown["Size"]), (&json!(image), &json!("4096")));
    assert_eq!((&shown["CompleteAt"], &shown["Labels"]), (&json!("t"), &Value::Null));
    prints(&["backup", "rm-backing-image", &image]);
    assert_eq!(prints(&["backup", "ls-backing-image", &target.url()]), json!([]));
}
