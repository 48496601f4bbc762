//! Lines on the control socket: from clients, carried out on a store, and from servers.

use crate::input::Input;
use crate::sample::{End, Sample, open};
use dbs_control::api;
use dbs_control::{Failure, LINE_MAX_BYTES, Reply, decode_request, read_line, send_result};
use dbs_core::info::Severity;
use dbs_core::{Error, ErrorKind};
use std::io::BufReader;
use std::sync::Arc;

/// Requests of one input.
const REQUESTS_MAX: usize = 16;

/// Lines of a client, each carried out and answered; and the same taken for a server's.
///
/// The input: how much is buffered (one byte), and what is received.
pub fn control(data: &[u8]) {
    let mut input = Input::new(data);
    let room = 1 + usize::from(input.u8());
    let disk = Arc::new(Sample::get(End::Closed).disk());
    let store = open(&disk, None, 5, false).unwrap();
    let mut reader = BufReader::with_capacity(room, input.rest());
    let mut line = Vec::new();
    for _ in 0..REQUESTS_MAX {
        line.clear();
        match read_line(&mut reader, &mut line) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Invalid), "{error}");
                break;
            }
        }
        assert!(line.len() <= LINE_MAX_BYTES);
        answer_of_a_server(&line);
        let Ok(request) = decode_request(&line) else { continue };
        let again = serde_json::to_vec(&request).unwrap();
        assert_eq!(decode_request(&again).ok().as_ref(), Some(&request), "another request");
        // Devices are the kernel's, and not to be had here.
        let result = api::execute(&store, &request, &mut |_| true);
        let result = result.unwrap_or_else(|error| {
            let wrong = [ErrorKind::Io, ErrorKind::Poisoned, ErrorKind::Corrupt];
            assert!(!wrong.contains(&error.kind()), "{request:?}: {error}");
            serde_json::to_value(Failure::from(&error)).unwrap()
        });
        let mut out = Vec::new();
        send_result(&mut out, result).unwrap();
        for reply in out.split_inclusive(|byte| *byte == b'\n') {
            assert!(reply.ends_with(b"\n") && reply.len() <= LINE_MAX_BYTES, "a line too long");
            serde_json::from_slice::<Reply>(reply).expect("a reply is one");
        }
    }
    let report = store.check().unwrap();
    assert!(report.worst() != Some(Severity::Corrupt), "{report:?}");
}

fn answer_of_a_server(line: &[u8]) {
    if let Ok(Reply::Error(failure)) = serde_json::from_slice::<Reply>(line) {
        let error = Error::from(failure);
        let known = Failure::from(&error);
        assert_eq!(ErrorKind::from_name(&known.kind), error.kind());
    }
}
