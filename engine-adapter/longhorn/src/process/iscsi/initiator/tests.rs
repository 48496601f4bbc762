use super::*;

const NAME: &str = "iqn.2019-10.io.longhorn:a:b";

/// Runs nothing.
struct Nothing;

impl Run for Nothing {
    fn run(&self, _: &str, _: &[&str], _: Duration) -> std::result::Result<String, Failure> {
        unreachable!()
    }

    fn start(&self, _: &str, _: &[&str], _: &Path) -> std::result::Result<(), Failure> {
        unreachable!()
    }
}

fn initiator(proc: &Path) -> Initiator<'_> {
    Initiator { run: &Nothing, target: NAME, proc, disks: proc, seconds: 90 }
}

#[test]
fn a_disk_among_the_sessions() {
    let list = "iSCSI Transport Class version 2.0-870\nTarget: iqn.x:a (non-flash)\n\tCurrent Portal: \
                10.0.0.1:3260,1\n\tPersistent Portal: 10.0.0.1:3260,1\n\t\tAttached SCSI devices:\n\t\tHost \
                Number: 2\tState: running\n\t\tscsi2 Channel 00 Id 0 Lun: 0\n\t\tscsi2 Channel 00 Id 0 Lun: \
                1\n\t\t\tAttached scsi disk sdb\t\tState: running\nTarget: iqn.x:ab\n\tCurrent Portal: \
                10.0.0.1:3260,1\n\t\tscsi3 Channel 00 Id 0 Lun: 1\n\t\t\tAttached scsi disk sdc\t\tState: \
                running\n\tCurrent Portal: 10.0.0.2:3260,1\n\t\tscsi4 Channel 00 Id 0 Lun: 11\n\t\t\tAttached \
                scsi disk sdd\t\tState: running\n";
    assert_eq!(disk_in(list, "iqn.x:a"), Some("sdb"));
    assert_eq!(disk_in(list, "iqn.x:ab"), Some("sdc"));
    for target in ["iqn.x", "iqn.x:abc"] {
        assert_eq!(disk_in(list, target), None, "{target}");
    }
    let list = "tcp: [1] 10.0.0.1:3260,1 iqn.x:a (non-flash)\ntcp: [2] [fd00::1]:3260,1 iqn.x:ab\n\
                iser: [13] [fd00::1]:3260,1 iqn.x:a (non-flash)\n";
    assert_eq!(sessions_in(list, "iqn.x:a"), ["1", "13"]);
    assert_eq!(sessions_in(list, "iqn.x:ab"), ["2"]);
    assert!(sessions_in(list, "iqn.x").is_empty());
}

#[test]
fn the_initiator_is_that_of_the_host() {
    let directory = tempfile::tempdir().unwrap();
    let proc = directory.path();
    let process = |pid: &str, name: &str, parent: u32| {
        let at = proc.join(pid);
        fs::create_dir_all(&at).unwrap();
        fs::write(at.join("comm"), format!("{name}\n")).unwrap();
        let number = if pid == "self" { "30" } else { pid };
        fs::write(at.join("status"), format!("Name:\t{name}\nPid:\t{number}\nPPid:\t{parent}\n"))
            .unwrap();
    };
    let namespaces = |pid: &str, net: &str, user: &str| {
        let at = proc.join(pid).join("ns");
        fs::create_dir(&at).unwrap();
        std::os::unix::fs::symlink(format!("net:[{net}]"), at.join("net")).unwrap();
        std::os::unix::fs::symlink(format!("user:[{user}]"), at.join("user")).unwrap();
    };
    let initiator = initiator(proc);
    assert_eq!(initiator.process(), proc.join("1"));
    process("self", "longhorn", 20);
    process("20", "tini", 10);
    process("10", "containerd-shim", 1);
    process("1", "systemd", 0);
    assert_eq!(initiator.process(), proc.join("10"));
    // Anybody may have a process of this name, in a container.
    namespaces("1", "1", "1");
    for (pid, net, user) in [("4", "2", "1"), ("5", "1", "2")] {
        process(pid, "iscsid", 1);
        assert_eq!(initiator.process(), proc.join("10"), "it may not be looked at");
        namespaces(pid, net, user);
        assert_eq!(initiator.process(), proc.join("10"));
    }
    process("7", "iscsid", 1);
    namespaces("7", "1", "1");
    assert_eq!(initiator.process(), proc.join("7"));
    // One of a container with the host's network has other files than the host's own.
    for (pid, files) in [("1", "1"), ("7", "2"), ("8", "1")] {
        if pid == "8" {
            process(pid, "iscsid", 1);
            namespaces(pid, "1", "1");
        }
        let link = proc.join(pid).join("ns/mnt");
        std::os::unix::fs::symlink(format!("mnt:[{files}]"), link).unwrap();
    }
    assert_eq!(initiator.process(), proc.join("8"));
}

#[test]
fn commands_that_use_records() {
    for asks in ["--version", "-m session", "-m session -P 3"] {
        assert!(!uses_records(&asks.split(' ').collect::<Vec<_>>()), "{asks}");
    }
    for does in ["-m node -T x", "-m session -r 3 -u", "-m discovery -t sendtargets -p 10.0.0.1"] {
        assert!(uses_records(&does.split(' ').collect::<Vec<_>>()), "{does}");
    }
}

/// One that is killed at once may leave the lock of the host's records.
#[test]
fn no_command_is_begun_that_there_is_no_time_for() {
    let directory = tempfile::tempdir().unwrap();
    let initiator = initiator(directory.path());
    let turn = Turn::to_ask(&initiator);
    turn.allow(LEAST - Duration::from_millis(1));
    for args in [&["-m", "session"][..], &["-m", "node", "-o", "delete"]] {
        let failure = turn.iscsiadm(args).unwrap_err();
        assert!(failure.is_slow(), "{failure}");
        assert!(failure.to_string().contains("no time left"), "{failure}");
    }
}

#[test]
fn engines_of_a_host_take_turns() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("1/root/run");
    fs::create_dir_all(&run).unwrap();
    // Followed, it leads to this machine's own.
    fs::create_dir(directory.path().join("1/root/var")).unwrap();
    std::os::unix::fs::symlink("/run", directory.path().join("1/root/var/run")).unwrap();
    let initiator = initiator(directory.path());
    let first = initiator.lock().unwrap();
    assert!(run.join("longhorn-iscsi.lock").exists());
    let other = fs::File::open(run.join("longhorn-iscsi.lock")).unwrap();
    assert!(other.try_lock().is_err());
    drop(first);
    other.try_lock().unwrap();
}

#[test]
fn an_address_that_the_host_reaches() {
    let all = |list: &[(&str, &str)]| -> Vec<_> {
        list.iter().map(|(name, ip)| ((*name).to_owned(), ip.parse().unwrap())).collect()
    };
    let choose = |list: &[(&str, &str)], same| choose_address(&all(list), same);
    let lo = [("lo", "127.0.0.1"), ("lo", "::1")];
    assert_eq!(choose(&lo, true).unwrap(), "127.0.0.1");
    assert_eq!(choose(&lo, false), None);
    let more =
        [&lo[..], &[("eth0", "fe80::1"), ("eth0", "10.1.0.2"), ("eth1", "169.254.0.1")]].concat();
    assert_eq!(choose(&more, true).unwrap(), "10.1.0.2");
    let more = [&more[..], &[("eth1", "fd00::5")]].concat();
    assert_eq!(choose(&more, true).unwrap(), "fd00::5");
}

#[test]
fn empty_records_go() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("1/root/etc/iscsi/nodes").join(NAME);
    let (empty, full) = (target.join("10.0.0.1,3260,1"), target.join("10.0.0.2,3260,1"));
    for (at, text) in [(&empty, ""), (&full, "node.name = x\n")] {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("default"), text).unwrap();
    }
    let initiator = initiator(directory.path());
    initiator.remove_empty_records();
    assert!(!empty.exists() && full.join("default").exists());
}
