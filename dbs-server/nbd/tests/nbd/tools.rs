//! The NBD server against the clients people use. A client that is not installed is skipped with a
//! line that says so.

use crate::support::{
    DIFF, Disk, Server, disk, eventually, have, make_certificates, nbd_python, nbdsh, pattern, run,
    try_run, write_file,
};
use dbs_nbd::{Client, ClientOptions, NbdUri, ServerOptions, TlsConfig};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn server(size: u64) -> (Server, Arc<Disk>) {
    let disk = disk(size);
    (Server::new([disk.clone()], ServerOptions::default()), disk)
}

#[test]
fn nbdinfo_lists_describes_and_maps() {
    if !have("nbdinfo") {
        return;
    }
    let (first, mut second) = (Disk::new("first", 8 * MIB), Disk::new("first@snap", MIB));
    first.data.write().unwrap()[MIB as usize] = 1;
    first.allocated.lock().unwrap()[256..512].fill(true);
    second.read_only = true;
    let server = Server::new([Arc::new(first), Arc::new(second)], ServerOptions::default());

    let list = run(Command::new("nbdinfo").args(["--list", "--json", &server.uri("")]));
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let exports = list["exports"].as_array().unwrap();
    assert_eq!(exports.len(), 2);
    let first = &exports[0];
    assert_eq!(first["export-name"], "first");
    assert_eq!(first["description"], "disk first in memory");
    assert_eq!(first["export-size"], 8 * MIB);
    assert_eq!(first["contexts"][0], "base:allocation");
    assert_eq!(first["contexts"][1], DIFF);
    for can in [
        "can_multi_conn",
        "can_trim",
        "can_zero",
        "can_fua",
        "can_flush",
        "can_df",
        "can_cache",
        "can_fast_zero",
    ] {
        assert_eq!(first[can], true, "{can}");
    }
    assert_eq!(first["block_size_minimum"], 512);
    assert_eq!(first["block_size_preferred"], 4096);
    assert_eq!(first["block_size_maximum"], 32 * MIB);
    assert_eq!(exports[1]["export-name"], "first@snap");
    assert_eq!(exports[1]["is_read_only"], true);
    assert_eq!(exports[1]["can_trim"], false);

    let map = run(Command::new("nbdinfo").args(["--map", "--json", &server.uri("first")]));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let types: Vec<_> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|e| (e["length"].as_u64().unwrap(), e["type"].as_u64().unwrap()))
        .collect();
    assert_eq!(types, [(MIB, 3), (MIB, 0), (6 * MIB, 3)]);
    let diff = run(Command::new("nbdinfo").args([
        &format!("--map={DIFF}"),
        "--json",
        &server.uri("first"),
    ]));
    let diff: serde_json::Value = serde_json::from_str(&diff).unwrap();
    assert_eq!(diff[1]["offset"], MIB);
    assert_eq!(diff[1]["length"], 4096);
    assert_eq!(diff[1]["type"], 1);

    // Two exports: there is no default one.
    let (found, _, message) = try_run(Command::new("nbdinfo").arg(server.uri("")));
    assert!(!found);
    assert!(message.contains("default export"), "{message}");
}

#[test]
fn nbdcopy_there_and_back_on_several_connections() {
    if !have("nbdcopy") {
        return;
    }
    let (server, disk) = server(48 * MIB);
    let mut image = pattern(1, 48 * MIB as usize);
    image[5 * MIB as usize..20 * MIB as usize].fill(0);
    write_file(&server.file("in"), &image);
    let copy = |from: &str, to: &str| {
        run(Command::new("nbdcopy").args([
            "--flush",
            "--connections=4",
            "--requests=32",
            from,
            to,
        ]));
    };
    copy(server.file("in").to_str().unwrap(), &server.uri("disk"));
    assert!(disk.content() == image);
    assert!(!disk.allocated.lock().unwrap()[2000]);
    assert!(disk.flushes.load(Ordering::SeqCst) >= 1);
    copy(&format!("nbd://127.0.0.1:{}", server.port()), server.file("out").to_str().unwrap());
    assert!(std::fs::read(server.file("out")).unwrap() == image);
    assert!(server.log.lock().unwrap().is_empty(), "{:?}", server.log);
}

#[test]
fn nbdsh_commands_and_their_errors() {
    let Some(python) = nbd_python() else { return };
    let (server, disk) = server(8 * MIB);
    nbdsh(
        python,
        &format!(
            r#"
import errno
def fails(number, call, *args, **named):
    try:
        call(*args, **named)
    except nbd.Error as e:
        assert e.errnum == number, (e.errnum, number, str(e))
        return str(e)
    raise AssertionError("no error")

h.add_meta_context("base:allocation")
h.add_meta_context("{DIFF}")
h.connect_uri("{uri}")
h.set_strict_mode(0)
size = h.get_size()
assert size == 8 << 20
assert h.can_meta_context("{DIFF}")

h.pwrite(b"a" * 1024, 512, nbd.CMD_FLAG_FUA)
assert h.pread(2048, 0) == bytes(512) + b"a" * 1024 + bytes(512)
assert h.pread(65536, 0, nbd.CMD_FLAG_DF)[512:1536] == b"a" * 1024

fails(errno.EINVAL, h.pread, 512, 1)
fails(errno.EINVAL, h.pread, 100, 0)
fails(errno.EINVAL, h.pwrite, b"x" * 100, 512)
fails(errno.EINVAL, h.pread, 1024, size - 512)
fails(errno.ENOSPC, h.pwrite, bytes(1024), size - 512)
fails(errno.ENOSPC, h.zero, 1024, size - 512)
fails(errno.EINVAL, h.trim, 1024, size - 512)
fails(errno.EINVAL, h.cache, 1024, size - 512)
fails(errno.EINVAL, h.pread, 512, (1 << 63) - 512)
fails(errno.EINVAL, h.pread, 512, 0, 1 << 9)
fails(errno.ENOTSUP, h.zero, 4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
h.zero(4096, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
h.zero(4096, 2 << 20, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.cache(4096, 0)
h.pwrite(b"b" * 65536, 3 << 20)
h.trim(65536, 3 << 20, nbd.CMD_FLAG_FUA)
h.flush()

def status(*args):
    got = {{}}
    def collect(context, offset, entries, err):
        got[context] = entries
    h.block_status(*args[:2], collect, *args[2:])
    return got
got = status(size, 0)
assert got["base:allocation"] == [4096, 0, (2 << 20) - 4096, 3, 4096, 0, (6 << 20) - 4096, 3], got
assert got["{DIFF}"] == [4096, 1, size - 4096, 0], got
got = status(size - 512, 512, nbd.CMD_FLAG_REQ_ONE)
assert got == {{"base:allocation": [3584, 0], "{DIFF}": [3584, 1]}}, got
assert len(status(1024, 4096)["base:allocation"]) == 2
fails(errno.EINVAL, status, 0, 0)
fails(errno.EINVAL, status, 1024, size - 512)
h.pread(0, 0)
h.pwrite(b"", 0)
h.shutdown()
"#,
            uri = server.uri("disk")
        ),
    );
    assert_eq!(disk.flushes.load(Ordering::SeqCst), 4, "of its own, and behind what is durable");
}

#[test]
fn nbdsh_old_protocols_and_read_only() {
    let Some(python) = nbd_python() else { return };
    let mut snapshot = Disk::new("disk@snap", MIB);
    snapshot.read_only = true;
    let server = Server::new([disk(MIB), Arc::new(snapshot)], ServerOptions::default());
    let path = server.path();
    let path = path.display();
    nbdsh(
        python,
        &format!(
            r#"
# Without structured replies.
h.set_request_structured_replies(False)
h.connect_uri("{uri}")
assert not h.get_structured_replies_negotiated() and not h.can_df()
h.pwrite(b"x" * 4096, 0)
assert h.pread(8192, 0) == b"x" * 4096 + bytes(4096)
h.shutdown()
# Without fixed newstyle: only EXPORT_NAME, with and without padding.
for flags in (0, nbd.HANDSHAKE_FLAG_NO_ZEROES):
    g = nbd.NBD()
    g.set_handshake_flags(flags)
    g.set_export_name("disk")
    g.connect_unix("{path}")
    assert g.get_protocol() == "newstyle", g.get_protocol()
    assert g.pread(4096, 0) == b"x" * 4096
    g.shutdown()
# A snapshot refuses writes.
import errno
r = nbd.NBD()
r.set_export_name("disk@snap")
r.connect_unix("{path}")
assert r.is_read_only()
r.set_strict_mode(0)
for call in (lambda: r.pwrite(bytes(512), 0), lambda: r.zero(512, 0), lambda: r.trim(512, 0)):
    try:
        call()
        raise AssertionError("no error")
    except nbd.Error as e:
        assert e.errnum == errno.EPERM, str(e)
r.flush()
r.shutdown()
# Options one by one.
o = nbd.NBD()
o.set_opt_mode(True)
o.set_full_info(True)
o.connect_unix("{path}")
names = []
o.opt_list(lambda name, description: names.append(name) and 0)
assert names == ["disk", "disk@snap"], names
o.set_export_name("disk")
def contexts(*queries):
    found = []
    o.clear_meta_contexts()
    for query in queries:
        o.add_meta_context(query)
    o.opt_list_meta_context(lambda name: found.append(name) and 0)
    return found
everything = ["base:allocation", "{DIFF}", "dbs:diff:other"]
assert contexts() == everything, contexts()
assert contexts("dbs:") == everything[1:]
assert contexts("dbs:diff:") == everything[1:]
assert contexts("base:", "nobody:") == everything[:1]
assert contexts("dbs:diff:bef", "x") == []
o.set_export_name("absent")
try:
    o.opt_info()
    raise AssertionError("no error")
except nbd.Error as e:
    assert e.errnum == errno.ENOENT, (e.errnum, str(e))
o.set_export_name("disk")
o.opt_info()
assert o.get_export_description() == "disk disk in memory"
assert o.get_canonical_export_name() == "disk"
o.opt_go()
o.shutdown()
"#,
            uri = server.uri("disk")
        ),
    );
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    if !have("qemu-img") {
        return;
    }
    let (server, disk) = server(16 * MIB);
    let mut image = vec![0; 16 * MIB as usize];
    image[3 * MIB as usize..5 * MIB as usize].copy_from_slice(&pattern(2, 2 * MIB as usize));
    let file = server.file("image");
    write_file(&file, &image);
    let file = file.to_str().unwrap();
    let uri = server.uri("disk");
    run(Command::new("qemu-img").args(["convert", "-n", "-f", "raw", "-O", "raw", file, &uri]));
    assert!(disk.content() == image);
    run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw", file, &uri]));
    let map = run(Command::new("qemu-img").args(["map", "--output=json", "-f", "raw", &uri]));
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let data: Vec<_> = map.as_array().unwrap().iter().filter(|e| e["data"] == true).collect();
    assert_eq!(data.len(), 1);
    assert_eq!(data[0]["start"], 3 * MIB);
    assert_eq!(data[0]["length"], 2 * MIB);
}

#[test]
fn fio_verifies() {
    if !have("fio") || !run(Command::new("fio").arg("--enghelp")).contains("nbd") {
        println!("SKIPPED: fio without its nbd engine");
        return;
    }
    let (server, _disk) = server(32 * MIB);
    run(Command::new("fio")
        .current_dir(server.dir.path())
        .args(["--name=verify", "--ioengine=nbd", "--rw=randrw", "--bsrange=512-64k"])
        .args(["--bs_unaligned=0", "--size=32m", "--iodepth=32", "--verify=crc32c"])
        .args(["--do_verify=1", "--verify_fatal=1", "--fsync=64"])
        .arg(format!("--uri={}", server.uri("disk"))));
    assert!(server.log.lock().unwrap().is_empty(), "{:?}", server.log);
}

#[test]
fn tls_with_client_certificates() {
    let Some(python) = nbd_python().filter(|_| have("nbdcopy")) else { return };
    let certs = tempfile::tempdir().unwrap();
    let dir = certs.path();
    make_certificates(dir);
    let (cert, key) = (dir.join("server-cert.pem"), dir.join("server-key.pem"));
    let tls = Some(TlsConfig::load(&cert, &key, Some(&dir.join("ca-cert.pem"))).unwrap());
    let disk = disk(32 * MIB);
    let mut server = Server::new([disk.clone()], ServerOptions { tls, ..ServerOptions::default() });
    let port = server.port();
    let certificates = dir.display();
    nbdsh(
        python,
        &format!(
            r#"
import errno, os
h.set_tls(nbd.TLS_REQUIRE)
h.set_tls_certificates("{certificates}")
h.connect_tcp("localhost", "{port}")
assert h.get_tls_negotiated()
data = os.urandom(8 << 20)
h.pwrite(data, 1 << 20)
assert h.pread(len(data), 1 << 20) == data
h.flush()
h.shutdown()
# Without TLS, nothing works.
p = nbd.NBD()
p.set_opt_mode(True)
p.connect_tcp("localhost", "{port}")
for call in (p.opt_go, p.opt_info, lambda: p.opt_list(lambda n, d: 0)):
    try:
        call()
        raise AssertionError("no error")
    except nbd.Error as e:
        assert e.errnum == errno.ENOTSUP, str(e)
p.opt_abort()
# Without a client certificate neither.
os.mkdir("{certificates}/anonymous")
os.symlink("{certificates}/ca-cert.pem", "{certificates}/anonymous/ca-cert.pem")
a = nbd.NBD()
a.set_tls(nbd.TLS_REQUIRE)
a.set_tls_certificates("{certificates}/anonymous")
try:
    a.connect_tcp("localhost", "{port}")
    raise AssertionError("connected without a certificate")
except nbd.Error:
    pass
"#
        ),
    );
    let image = pattern(3, 32 * MIB as usize);
    write_file(&server.file("image"), &image);
    let uri = format!("nbds://localhost:{port}/disk?tls-certificates={certificates}");
    let (image_path, out) = (server.file("image"), server.file("out"));
    let nbdcopy = || {
        let mut command = Command::new("nbdcopy");
        command.arg("--connections=4");
        command
    };
    run(nbdcopy().arg(&image_path).arg(&uri));
    assert!(disk.content() == image);
    run(nbdcopy().arg(&uri).arg(&out));
    assert!(std::fs::read(&out).unwrap() == image);
    if have("qemu-img") {
        let _ = std::fs::remove_file(&out);
        let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={certificates}");
        let from = format!(
            "driver=nbd,server.type=inet,server.host=localhost,server.port={port},export=disk,\
             tls-creds=tls"
        );
        run(Command::new("qemu-img")
            .args(["convert", "--object", &object, "--image-opts", &from, "-O", "raw"])
            .arg(&out));
        assert!(std::fs::read(&out).unwrap() == image);
    }
    check_own_client(port, dir, &image);
    server.stop();
}

/// Our own client of a server that wants to know who comes.
fn check_own_client(port: u16, certificates: &Path, image: &[u8]) {
    let connect = |certificates: &Path| {
        let text =
            format!("nbds://localhost:{port}/disk?tls-certificates={}", certificates.display());
        let uri: NbdUri = text.parse().unwrap();
        let stream = uri.connect(Duration::from_secs(30))?;
        Client::over(stream, &uri.export, &ClientOptions::default())
    };
    let mut client = connect(certificates).unwrap();
    let mut back = vec![0; 3 * MIB as usize];
    client.read_at(MIB, &mut back).unwrap();
    assert!(back == image[MIB as usize..4 * MIB as usize]);
    client.write_at(MIB, &back, true).unwrap();
    client.disconnect().unwrap();
    let refused = |certificates: &Path| connect(certificates).err().unwrap();
    // No certificate; only the authority's is in this directory.
    let error = refused(&certificates.join("anonymous")).to_string();
    assert!(error.contains("CertificateRequired"), "{error}");
    let others = tempfile::tempdir().unwrap();
    make_certificates(others.path());
    let error = refused(others.path()).to_string();
    assert!(error.contains("invalid peer certificate"), "{error}");
}

#[test]
fn tls_files_that_do_not_fit_are_named() {
    let certs = tempfile::tempdir().unwrap();
    let dir = certs.path();
    make_certificates(dir);
    let (cert, key) = (dir.join("server-cert.pem"), dir.join("server-key.pem"));
    TlsConfig::load(&cert, &key, None).unwrap();
    for (cert, key, named) in [
        (&cert, &dir.join("client-key.pem"), "server-cert.pem"),
        (&dir.join("absent"), &key, "absent"),
        (&key, &key, "server-key.pem"),
        (&cert, &cert, "server-cert.pem"),
    ] {
        let error = TlsConfig::load(cert, key, None).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

/// Our client against a server that is not ours, started by `command` on `socket`.
fn check_client(mut command: Command, socket: &Path) {
    let mut child = command.stdin(Stdio::null()).spawn().unwrap();
    let result = std::panic::catch_unwind(|| {
        eventually("the other server listens", || UnixStream::connect(socket).is_ok());
        let options = ClientOptions { contexts: vec!["base:allocation".into()], extended: true };
        let mut client = Client::connect_unix(socket, "", &options).unwrap();
        assert_eq!(client.size(), 16 * MIB);
        let data = pattern(5, 3 * MIB as usize);
        client.write_at(MIB, &data, true).unwrap();
        let mut back = vec![1; 5 * MIB as usize];
        client.read_at(0, &mut back).unwrap();
        assert!(back[MIB as usize..4 * MIB as usize] == data);
        assert!(back[..MIB as usize].iter().all(|byte| *byte == 0));
        let (mut at, mut data_bytes) = (0, 0);
        while at < 16 * MIB {
            for extent in client.block_status("base:allocation", at, 16 * MIB - at).unwrap() {
                data_bytes += if extent.flags & 1 == 0 { extent.length } else { 0 };
                at += extent.length;
            }
        }
        assert_eq!(data_bytes, 3 * MIB);
        client.write_zeroes(MIB, MIB, 0).unwrap();
        client.trim(3 * MIB, MIB, false).unwrap();
        client.flush().unwrap();
        assert!(client.read_at(16 * MIB, &mut [0; 512]).is_err());
        client.read_at(MIB, &mut back[..512]).unwrap();
        assert_eq!(back[..512], [0; 512]);
        client.disconnect().unwrap();
    });
    child.kill().unwrap();
    child.wait().unwrap();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn our_client_with_other_servers() {
    let dir = tempfile::tempdir().unwrap();
    if have("nbdkit") {
        let socket = dir.path().join("nbdkit");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&socket).args(["memory", "16M"]);
        check_client(command, &socket);
    }
    if have("qemu-nbd") {
        let (socket, image) = (dir.path().join("qemu-nbd"), dir.path().join("image"));
        std::fs::File::create(&image).unwrap().set_len(16 * MIB).unwrap();
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--format=raw", "--discard=unmap", "--socket"]);
        command.arg(&socket).arg(&image);
        check_client(command, &socket);
    }
}
