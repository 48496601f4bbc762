//! Clients that break the protocol against our server, and servers that do against our client:
//! whatever they send, the other side ends or answers in time, and others are served.

use crate::support::{Server, disk, eventually, make_certificates, pattern};
use dbs_nbd::wire::option::encode_option;
use dbs_nbd::wire::request::{Request, Style};
use dbs_nbd::wire::{cmd, greeting, opt};
use dbs_nbd::{Client, ClientOptions, ServerOptions, TlsConfig};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);
/// Of a handshake's step, where silence must end: those who are not silent keep it on a busy machine too.
const HANDSHAKE: Duration = Duration::from_secs(5);

fn raw(server: &Server) -> UnixStream {
    let mut stream = UnixStream::connect(server.path()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream
}

/// Sends bytes and reads until the server closes; returns what it answered.
fn until_closed(mut stream: UnixStream, bytes: &[u8]) -> Vec<u8> {
    // The server may well close before it has taken everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return answer,
            Ok(count) => answer.extend(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return answer,
            Err(error) => panic!("the server did not close: {error}"),
        }
    }
}

fn still_serves(server: &Server) {
    let mut connected = None;
    // On a busy machine it may itself be too slow for a server that is strict.
    eventually("somebody is served", || {
        let options = ClientOptions::default();
        connected = Client::connect_unix(&server.path(), "disk", &options).ok();
        connected.is_some()
    });
    let mut client = connected.unwrap();
    client.write_at(0, &[1; 4096], true).unwrap();
    client.read_at(0, &mut [0; 4096]).unwrap();
    client.disconnect().unwrap();
}

fn flags() -> Vec<u8> {
    3u32.to_be_bytes().to_vec()
}

/// Flags and EXPORT_NAME: the shortest way into the transmission phase.
fn into_transmission() -> Vec<u8> {
    [flags(), encode_option(opt::EXPORT_NAME, b"disk")].concat()
}

fn request(command: u16, offset: u64, length: u64) -> Vec<u8> {
    Request { flags: 0, command, cookie: 1, offset, length }.encode(Style::Simple)
}

#[test]
fn broken_handshakes_are_ended() {
    let server = Server::new([disk(MIB)], ServerOptions::default());
    let huge = |option| {
        let mut bytes = encode_option(option, &[]);
        bytes[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        [flags(), bytes].concat()
    };
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 4],
        [flags(), vec![0; 16]].concat(),
        huge(opt::GO),
        huge(12345),
        [flags(), encode_option(opt::EXPORT_NAME, b"absent")].concat(),
        [flags(), encode_option(opt::EXPORT_NAME, &[0xff; 3])].concat(),
        [flags(), encode_option(opt::EXPORT_NAME, &vec![b'x'; 100_000])].concat(),
        [
            flags(),
            encode_option(opt::EXTENDED_HEADERS, b""),
            encode_option(opt::EXPORT_NAME, b"disk"),
        ]
        .concat(),
    ] {
        until_closed(raw(&server), &bytes);
    }
    still_serves(&server);
}

#[test]
fn odd_options_are_answered_and_the_handshake_goes_on() {
    let server = Server::new([disk(MIB)], ServerOptions::default());
    let mut stream = raw(&server);
    stream.write_all(&flags()).unwrap();
    const UNSUP: u32 = 1;
    const POLICY: u32 = 2;
    const INVALID: u32 = 3;
    const UNKNOWN: u32 = 6;
    const TOO_BIG: u32 = 9;
    let lying = [&u32::MAX.to_be_bytes()[..], b"disk\0\0"].concat();
    let many = [&4u32.to_be_bytes()[..], b"disk", &65u32.to_be_bytes(), &[0; 4 * 65]].concat();
    let absent = [&6u32.to_be_bytes()[..], b"absent\0\0"].concat();
    for (option, data, error) in [
        (4, &b""[..], UNSUP),
        (0xffff_ffff, b"data", UNSUP),
        (opt::STARTTLS, b"", POLICY),
        (opt::STARTTLS, b"x", INVALID),
        (opt::LIST, b"x", INVALID),
        (opt::STRUCTURED_REPLY, b"x", INVALID),
        (opt::GO, b"", INVALID),
        (opt::GO, &lying, INVALID),
        (opt::INFO, &absent, UNKNOWN),
        (opt::SET_META_CONTEXT, &many, INVALID),
        (opt::GO, &vec![0; 65537], TOO_BIG),
        (opt::STRUCTURED_REPLY, b"", 0),
        (opt::SET_META_CONTEXT, &many, TOO_BIG),
        (opt::LIST_META_CONTEXT, &lying, INVALID),
        (opt::EXTENDED_HEADERS, b"", 0),
        (opt::STRUCTURED_REPLY, b"", 10),
    ] {
        stream.write_all(&encode_option(option, data)).unwrap();
        let mut header = [0; 20];
        stream.read_exact(&mut header).unwrap();
        let field = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        let expected = if error == 0 { 1 } else { 1 << 31 | error };
        assert_eq!((field(8), field(12)), (option, expected), "option {option}");
        stream.read_exact(&mut vec![0; field(16) as usize]).unwrap();
    }
    assert!(!until_closed(stream, &encode_option(opt::ABORT, b"bye")).is_empty());
    still_serves(&server);
}

#[test]
fn broken_requests_are_ended() {
    let disk = disk(MIB);
    let server = Server::new([disk.clone()], ServerOptions::default());
    for bytes in [vec![0; 28], pattern(3, 4096), request(cmd::WRITE, 0, u64::from(u32::MAX))] {
        until_closed(raw(&server), &[into_transmission(), bytes].concat());
    }
    // Half a write, then nothing more.
    let stream = raw(&server);
    let mut half = stream.try_clone().unwrap();
    half.write_all(&[into_transmission(), request(cmd::WRITE, 0, 8192), vec![7; 5000]].concat())
        .unwrap();
    half.shutdown(Shutdown::Write).unwrap();
    until_closed(stream, b"");
    assert!(disk.content().iter().all(|byte| *byte == 0));
    // Gone without reading a reply.
    for _ in 0..20 {
        let mut stream = raw(&server);
        stream.write_all(&into_transmission()).unwrap();
        for _ in 0..50 {
            stream.write_all(&request(cmd::READ, 0, MIB)).unwrap();
        }
    }
    still_serves(&server);
    eventually("all clients gone", || server.handle().clients().is_empty());
}

/// Found by trying: nbdcopy opens more connections than it uses, and some of its runs failed. A client that takes its leave
/// right behind the handshake was taken for one that is gone.
#[test]
fn who_leaves_at_once_is_told_of_no_error() {
    let server = Server::new([disk(MIB)], ServerOptions::default());
    // Only beside another writer it is looked who is gone.
    let other = Client::connect_unix(&server.path(), "disk", &ClientOptions::default()).unwrap();
    for round in 0..200 {
        let mut stream = raw(&server);
        stream.write_all(&into_transmission()).unwrap();
        stream.read_exact(&mut [0; 8 + 2]).unwrap();
        stream.write_all(&request(cmd::DISC, 0, 0)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 16]).map_err(|e| e.kind()), Ok(0), "round {round}");
    }
    other.disconnect().unwrap();
}

#[test]
fn garbage_at_every_stage() {
    let server = Server::new([disk(MIB)], ServerOptions::default());
    for seed in 0..60 {
        let garbage = pattern(seed, 200 + 17 * seed as usize);
        let prefix = match seed % 4 {
            0 => Vec::new(),
            1 => flags(),
            2 => [flags(), encode_option(opt::GO, &garbage)].concat(),
            _ => into_transmission(),
        };
        let stream = raw(&server);
        let mut writer = stream.try_clone().unwrap();
        let _ = writer.write_all(&[prefix, garbage].concat());
        let _ = writer.shutdown(Shutdown::Write);
        until_closed(stream, b"");
    }
    still_serves(&server);
    eventually("all clients gone", || server.handle().clients().is_empty());
}

#[test]
fn silent_clients_are_dropped_and_disturb_nobody() {
    let options = ServerOptions { handshake_timeout: HANDSHAKE, ..ServerOptions::default() };
    let server = Server::new([disk(MIB)], options);
    let silence = |server: &Server| -> Vec<_> {
        (0..200).map(|_| UnixStream::connect(server.path()).unwrap()).collect()
    };
    let silent = silence(&server);
    // One sends a byte of a long option now and then: the time is for the whole step.
    let mut trickling = raw(&server);
    let long = [flags(), encode_option(opt::EXPORT_NAME, &[b'x'; 4096])].concat();
    trickling.write_all(&long[..long.len() - 4096]).unwrap();
    let trickle = thread::spawn(move || {
        while trickling.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(200));
        }
    });
    still_serves(&server);
    eventually("the silent are gone", || server.handle().clients().is_empty());
    trickle.join().unwrap();
    drop(silent);
    still_serves(&server);

    // Who stops the server does not wait for them either.
    let options = ServerOptions {
        handshake_timeout: 10 * PATIENCE,
        stop_grace: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let mut server = Server::new([disk(MIB)], options);
    let _silent = silence(&server);
    assert!(server.stop() < PATIENCE);
}

#[test]
fn broken_tls_is_ended() {
    let certs = tempfile::tempdir().unwrap();
    make_certificates(certs.path());
    let file = |name: &str| certs.path().join(name);
    let tls = TlsConfig::load(&file("server-cert.pem"), &file("server-key.pem"), None).unwrap();
    let options =
        ServerOptions { tls: Some(tls), handshake_timeout: HANDSHAKE, ..ServerOptions::default() };
    let server = Server::new([disk(MIB)], options);
    let start = [flags(), encode_option(opt::STARTTLS, b"")].concat();
    let acked = 20;
    // Silence, garbage, and plain options smuggled in behind STARTTLS.
    assert_eq!(until_closed(raw(&server), &start).len(), acked);
    for seed in 0..20 {
        let mut stream = raw(&server);
        stream.write_all(&start).unwrap();
        stream.read_exact(&mut vec![0; acked]).unwrap();
        until_closed(stream, &pattern(seed, 100 * seed as usize + 1));
    }
    // Options that are answered with "TLS first" buy no time.
    let mut stream = raw(&server);
    stream.write_all(&flags()).unwrap();
    let began = Instant::now();
    while stream.write_all(&encode_option(opt::LIST, b"")).is_ok() {
        assert!(began.elapsed() < PATIENCE, "the server did not close");
        thread::sleep(Duration::from_millis(20));
    }
    let smuggled = [start, encode_option(opt::EXPORT_NAME, b"disk")].concat();
    assert_eq!(until_closed(raw(&server), &smuggled).len(), acked);
    assert!(until_closed(raw(&server), &into_transmission()).is_empty());
    // Handed-over connections are local and need no TLS.
    let (ours, theirs) = UnixStream::pair().unwrap();
    server.handle().adopt(theirs).unwrap();
    Client::over(ours, "disk", &ClientOptions::default()).unwrap().flush().unwrap();
    eventually("all clients gone", || server.handle().clients().is_empty());
}

/// A TLS client in its transmission phase, and the server.
fn tls_client() -> (Server, rustls::StreamOwned<rustls::ClientConnection, UnixStream>) {
    use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
    let certs = tempfile::tempdir().unwrap();
    make_certificates(certs.path());
    let file = |name: &str| certs.path().join(name);
    let tls = TlsConfig::load(&file("server-cert.pem"), &file("server-key.pem"), None).unwrap();
    let disk = disk(MIB);
    disk.delay_ms.store(1, Ordering::SeqCst);
    let server = Server::new([disk], ServerOptions { tls: Some(tls), ..ServerOptions::default() });
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("ca-cert.pem")).unwrap()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connection = rustls::ClientConnection::new(config.into(), name).unwrap();
    let mut plain = raw(&server);
    plain.write_all(&[flags(), encode_option(opt::STARTTLS, b"")].concat()).unwrap();
    plain.read_exact(&mut [0; 20]).unwrap();
    let mut stream = rustls::StreamOwned::new(connection, plain);
    stream.write_all(&encode_option(opt::EXPORT_NAME, b"disk")).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    (server, stream)
}

#[test]
fn a_tls_client_that_leaves_in_the_middle_of_a_write_is_let_go() {
    let (server, mut stream) = tls_client();
    let half = [request(cmd::WRITE, 0, 4096), vec![1; 100]].concat();
    stream.write_all(&half).unwrap();
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    eventually("the client is gone", || server.handle().clients().is_empty());
}

#[test]
fn a_tls_client_is_heard_out_before_its_goodbye_counts() {
    let (server, mut stream) = tls_client();
    // More than may be in flight, with the end of the stream right behind.
    let count = 1500;
    let mut all = request(cmd::TRIM, 0, 4096).repeat(count);
    all.extend(request(cmd::DISC, 0, 0));
    stream.conn.writer().write_all(&all).unwrap();
    stream.conn.send_close_notify();
    stream.flush().unwrap();
    let mut answers = Vec::new();
    stream.read_to_end(&mut answers).unwrap();
    assert_eq!(answers.len(), count * 16);
    eventually("the client is gone", || server.handle().clients().is_empty());
}

#[test]
fn hostile_servers_make_errors_of_our_client() {
    let ack = |option: u32, kind: u32, data: &[u8]| {
        let head = [0x0003_e889_0455_65a9u64.to_be_bytes().to_vec(), option.to_be_bytes().to_vec()];
        let tail = [kind.to_be_bytes().to_vec(), (data.len() as u32).to_be_bytes().to_vec()];
        [head.concat(), tail.concat(), data.to_vec()].concat()
    };
    let export = [&[0, 0][..], &(64 * MIB).to_be_bytes(), &[0, 1]].concat();
    let opened = [
        greeting().to_vec(),
        ack(opt::STRUCTURED_REPLY, 1, b""),
        ack(opt::GO, 3, &export),
        ack(opt::GO, 1, b""),
    ]
    .concat();
    let chunk = |done: u16, kind: u16, cookie: u64, payload: &[u8], length: u32| {
        [
            &0x668e_33efu32.to_be_bytes()[..],
            &done.to_be_bytes(),
            &kind.to_be_bytes(),
            &cookie.to_be_bytes(),
            &length.to_be_bytes(),
            payload,
        ]
        .concat()
    };
    let data = |offset: u64, count: usize| [&offset.to_be_bytes()[..], &vec![1; count]].concat();
    let whole = |done, offset, count| chunk(done, 1, 1, &data(offset, count), 8 + count as u32);
    let simple = [&0x6744_6698u32.to_be_bytes()[..], &[0; 4], &1u64.to_be_bytes()].concat();
    let mut scripts = vec![
        b"SSH-2.0-OpenSSH\r\n-----------".to_vec(),
        [greeting().to_vec(), pattern(1, 1000)].concat(),
        [greeting().to_vec(), ack(99, 1, b"")].concat(),
        [opened.clone(), whole(1, 4096, 4096)].concat(),
        [opened.clone(), whole(1, u64::MAX, 4096)].concat(),
        [opened.clone(), whole(1, 0, 2048)].concat(),
        [opened.clone(), whole(0, 0, 2048), whole(1, 0, 2048)].concat(),
        [opened.clone(), chunk(1, 1, 2, &data(0, 4096), 4104)].concat(),
        [opened.clone(), chunk(1, 1, 1, &[], u32::MAX)].concat(),
        [opened.clone(), chunk(1, 1, 1, &[], 3)].concat(),
        [opened.clone(), chunk(1, 0, 1, &[], 0)].concat(),
        [opened.clone(), chunk(1, 0x8001, 1, &[], u32::MAX)].concat(),
        [opened.clone(), chunk(1, 0x8001, 1, &[0; 6], 6)].concat(),
        [opened.clone(), chunk(1, 5, 1, &[0; 12], 12)].concat(),
        // A hole of nothing, the same bytes again and again, and a reply of another kind than was agreed on.
        [opened.clone(), chunk(1, 2, 1, &[0; 12], 12)].concat(),
        [opened.clone(), whole(0, 0, 1).repeat(4096), whole(1, 0, 4096)].concat(),
        [opened.clone(), simple, vec![1; 4096]].concat(),
    ];
    scripts.extend((0..50).map(|seed| [opened.clone(), pattern(seed, 500)].concat()));
    for (index, script) in scripts.into_iter().enumerate() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        theirs.write_all(&script).unwrap();
        theirs.shutdown(Shutdown::Write).unwrap();
        let result = Client::over(ours, "", &ClientOptions::default()).and_then(|mut client| {
            let first = client.read_at(0, &mut [0; 4096]);
            assert!(client.is_broken() && client.flush().is_err(), "script {index}");
            first
        });
        assert!(result.is_err(), "script {index}");
    }
    // The same server without malice, so that the scripts above fail for their own reasons.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&[opened, whole(0, 2048, 2048), whole(1, 0, 2048)].concat()).unwrap();
    let mut client = Client::over(ours, "", &ClientOptions::default()).unwrap();
    assert_eq!(client.size(), 64 * MIB);
    let mut buf = [0; 4096];
    client.read_at(0, &mut buf).unwrap();
    assert_eq!(buf, [1; 4096]);
    let beyond = client.read_at(u64::MAX - 1, &mut buf).unwrap_err();
    assert_eq!(beyond.kind(), std::io::ErrorKind::InvalidInput, "{beyond}");
    assert!(!client.is_broken());
}
