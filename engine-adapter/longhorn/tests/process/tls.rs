//! TLS between the processes of a volume: with certificates of one authority all of it works, and who
//! comes without is refused, by name.

use crate::controller::{
    TEXT_SIZE, check, client, controller, free_ports, modes_with, replica_with, run, write,
};
use crate::support::*;
use dbs_frontend::Socket;
use dbs_frontend::tls::{CA_CERT, CLIENT, SERVER, TlsClient, TlsSocket, TlsStream};
use longhorn_testing::DataClient;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An authority, and what it has signed for a server on this machine and for a client, in a directory.
fn certificates(place: &Place, name: &str) -> PathBuf {
    use rcgen::{
        BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };
    let dir = place.path().join(name);
    fs::create_dir(&dir).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(dir.join(CA_CERT), params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = Issuer::new(params, key);
    for ((cert, its_key), usage) in [
        (SERVER, ExtendedKeyUsagePurpose::ServerAuth),
        (CLIENT, ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        params.extended_key_usages = vec![usage];
        fs::write(dir.join(cert), params.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        fs::write(dir.join(its_key), key.serialize_pem()).unwrap();
    }
    dir
}

/// The arguments that choose them.
fn with(dir: &Path) -> [&str; 2] {
    ["--tls-dir", dir.to_str().unwrap()]
}

#[test]
fn a_volume_over_tls_outlives_a_replica_and_rebuilds_another() {
    let place = Place::new();
    let dir = certificates(&place, "pki");
    let tls = with(&dir);
    let (mut a, a_address) = replica_with(&place, "a", &tls);
    let (_b, b_address) = replica_with(&place, "b", &tls);
    let mut engine = controller(&place, &[&a_address, &b_address], &tls).ready();
    let run = |engine: &Process, args: &[&str]| run(engine, &[&tls, args].concat());
    let data = client(&place);
    write(&data, 1);
    run(&engine, &["snapshots", "create", "one"]);
    a.kill();
    write(&data, 2);
    run(&engine, &["rm-replica", &a_address]);
    let (_c, c_address) = replica_with(&place, "c", &tls);
    run(&engine, &["add-replica", &c_address, "--size", TEXT_SIZE, "--current-size", TEXT_SIZE]);
    assert_eq!(modes_with(&engine, &tls), ["RW", "RW"]);
    write(&data, 3);
    run(&engine, &["rm-replica", &b_address]);
    check(&data, 3);
    run(&engine, &["snapshots", "hash", "one"]);
    drop(data);
    engine.stop();
    // No line of any log shows a key.
    let key = fs::read_to_string(dir.join(SERVER.1)).unwrap();
    let secret = key.lines().nth(1).unwrap();
    assert!(!engine.log().contains(secret) && !a.log().contains(secret));
}

/// A handshake, and then a read: what the other side says to this client.
fn try_tls(address: &str, client: &TlsClient) -> String {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let tls = TlsStream::client(client, "127.0.0.1").unwrap();
    let secured = TlsSocket::handshake(Socket::Tcp(stream), tls);
    let said = secured.and_then(|mut secured| {
        // One who is refused may be cut off before; why is still to be read.
        let _ = secured.write_all(&[0; 64]);
        secured.read(&mut [0; 64])
    });
    said.map_or_else(|e| e.to_string(), |count| format!("{count} bytes"))
}

#[test]
fn strangers_are_refused_by_name() {
    let place = Place::new();
    let (ours, theirs) = (certificates(&place, "ours"), certificates(&place, "theirs"));
    let (replica, address) = replica_with(&place, "r", &with(&ours));
    let (grpc, data) = (replica.field("grpc"), replica.field("data"));
    let of = |dir: &Path| TlsClient::load_dir(dir).unwrap();
    let nobody = TlsClient::load(&ours.join(CA_CERT), None).unwrap();
    let mixed = place.path().join("mixed");
    fs::create_dir(&mixed).unwrap();
    fs::copy(ours.join(CA_CERT), mixed.join(CA_CERT)).unwrap();
    for file in [CLIENT.0, CLIENT.1, SERVER.0, SERVER.1] {
        fs::copy(theirs.join(file), mixed.join(file)).unwrap();
    }
    for (port, event) in [(&grpc, "event=tls"), (&data, "event=data")] {
        // One without a certificate, one with another authority's, and who does not trust ours.
        let refused = |text: &str| {
            replica.wait_for(text);
            let of_port = |line: &&str| line.contains(event) && line.contains(text);
            eventually("it is logged", || replica.log().lines().any(|line| of_port(&line)));
        };
        let said = try_tls(port, &nobody);
        assert!(said.contains("CertificateRequired"), "{port}: {said}");
        refused("peer sent no certificates");
        let said = try_tls(port, &of(&mixed));
        assert!(said.contains("UnknownCA") || said.contains("DecryptError"), "{port}: {said}");
        refused("UnknownIssuer");
        assert!(try_tls(port, &of(&theirs)).contains("UnknownIssuer"));
        refused("received fatal alert");
        // One who is expected.
        let said = try_tls(port, &of(&ours));
        assert!(!said.contains("ertificate"), "{said}");
        // Plain text.
        let mut plain = TcpStream::connect(port).unwrap();
        plain.set_read_timeout(Some(TIMEOUT)).unwrap();
        plain.write_all(&[0x1b; 64]).unwrap();
        // An alert at most, and the end.
        let mut said = Vec::new();
        let _reset = plain.read_to_end(&mut said);
        assert!(said.len() < 16, "{said:?}");
        refused("InvalidContentType");
    }
    assert!(replica.rpc().get().is_err());
    let listen = replica.data_address();
    let read = DataClient::connect(&listen, 1)
        .map(|client| client.with_timeout(Duration::from_secs(5)).read(0, 4096));
    assert!(!matches!(read, Ok(Ok(_))));
    // A controller that is not ours, or plain, gets nowhere and says why.
    let mut plain = controller(&place, &[&address], &[]);
    assert!(!plain.wait().success());
    let mut other = controller(&place, &[&address], &with(&theirs));
    assert!(!other.wait().success());
    assert!(other.log().contains("UnknownIssuer"), "{}", other.log());
    let mut mixed = controller(&place, &[&address], &with(&mixed));
    assert!(!mixed.wait().success());
    // The replica is as it was.
    let mut engine = controller(&place, &[&address], &with(&ours)).ready();
    write(&client(&place), 1);
    engine.stop();
}

#[test]
fn a_server_must_be_the_one_of_its_name() {
    let place = Place::new();
    let ours = certificates(&place, "ours");
    let (_replica, address) = replica_with(&place, "r", &with(&ours));
    let wrong = [&with(&ours)[..], &["--tls-name", "elsewhere.example"]].concat();
    let mut engine = controller(&place, &[&address], &wrong);
    assert!(!engine.wait().success());
    assert!(engine.log().contains("not valid for name"), "{}", engine.log());
    // Files that are missing are named, before anything is served.
    fs::remove_file(ours.join(SERVER.1)).unwrap();
    let listen = format!("127.0.0.1:{}", free_ports());
    let mut replica = place.start_with("s", &[&with(&ours)[..], &["--listen", &listen]].concat());
    assert_eq!(replica.wait().code(), Some(1));
    assert!(replica.log().contains(SERVER.1), "{}", replica.log());
}

/// As many as there are places, and those who came next for as long as they stayed silent, kept everybody out.
#[test]
fn strangers_who_say_nothing_keep_nobody_out() {
    let place = Place::new();
    let ours = certificates(&place, "ours");
    let (replica, address) = replica_with(&place, "r", &with(&ours));
    let grpc: SocketAddr = replica.field("grpc").parse().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let silent = runtime.block_on(async {
        let mut silent = Vec::new();
        for _ in 0..180 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            silent.push(socket.connect(grpc).await.unwrap());
        }
        silent
    });
    let mut engine = controller(&place, &[&address], &with(&ours)).ready();
    write(&client(&place), 1);
    engine.stop();
    replica.wait_for("its place was needed for others");
    drop(silent);
}
