//! A connection's bytes, cut into pieces, and what comes of them.

use dbs_frontend::{Limits, Offline, Protocol, Ready};

/// What is taken of a connection.
const LIMITS: Limits = Limits { requests: 4, bytes: 256 << 10 };

/// What comes of a connection's bytes: each message as text, and whether it ended in an error.
pub(crate) fn taken<P: Protocol>(
    protocol: impl Fn() -> P,
    bytes: &[u8],
    most: usize,
    judge: impl Fn(&P::Request, Option<&[u8]>) -> String,
) -> (Vec<String>, bool) {
    let mut peer = Offline::new(protocol(), LIMITS).unwrap();
    let (mut seen, mut rest) = (Vec::new(), bytes);
    let mut in_flight: Vec<Ready<P::Request>> = Vec::new();
    let failed = loop {
        let received = peer.receive(rest, most);
        in_flight.extend(peer.ready());
        let stuck = match received {
            Err(_) => break true,
            Ok(Some(later)) => {
                let stuck = later.is_empty() && rest.is_empty();
                rest = later;
                stuck
            }
            Ok(None) => true,
        };
        assert!(in_flight.len() <= LIMITS.requests, "more in flight than is allowed");
        if stuck && in_flight.is_empty() {
            break false;
        }
        // Answered late, so that limits are met.
        if stuck || in_flight.len() >= LIMITS.requests {
            let Ready { request, payload } = in_flight.remove(0);
            seen.push(judge(&request, payload.as_deref()));
            if peer.answered(&request).is_err() {
                in_flight.extend(peer.ready());
                break true;
            }
            in_flight.extend(peer.ready());
        }
    };
    peer.end();
    for Ready { request, payload } in in_flight {
        seen.push(judge(&request, payload.as_deref()));
        // Nothing is taken up any more.
        peer.answered(&request).unwrap();
    }
    assert!(peer.is_over(), "requests are left over");
    (seen, failed)
}
