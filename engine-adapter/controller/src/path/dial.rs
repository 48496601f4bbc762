//! Connecting to a replica.

use super::local::LocalReplica;
use dbs_frontend::{Listen, Socket};
use longhorn_wire::frame::{HEADER_BYTES, Header, Hello, Lane, Standing, Type, feature};
use longhorn_wire::transport::DataLink;
use ring::rand::{SecureRandom, SystemRandom};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

/// Longest answer to a greeting: a hello comes back, or an error's text.
const ANSWER_MAX_BYTES: u32 = 1024;

/// How long one attempt may take to connect anew: then another one says the same again.
const ATTEMPT: Duration = Duration::from_secs(1);
/// From one look to the next, whether a replica can be reached, or has ended what came on older connections.
const PAUSE: Duration = Duration::from_millis(10);
/// How long connections must be refused until that proves that nobody listens: a firewall may do it for a moment.
const PROOF: Duration = Duration::from_secs(1);

/// Where the data of a replica is.
#[derive(Debug, Clone)]
pub enum BackendAddress {
    /// A data server, of ours or upstream's.
    Remote(Listen),
    /// In this process.
    Local(LocalReplica),
    /// Where a simulation has it.
    #[cfg(feature = "sabotage")]
    Simulated(super::simulated_links::Backend),
    /// Nowhere: writes are forgotten, reads give zeros. It measures everything else.
    Null,
}

/// Connections to a replica, and what is known of it.
pub(super) struct Dialled {
    pub links: Vec<DataLink>,
    /// It is of DBS and can flush.
    pub flushes: bool,
    /// It runs on this machine.
    pub local: bool,
    /// What it says of itself.
    pub hello: Option<Hello>,
    /// And of all the connections, if it knows lanes.
    pub standing: Option<Standing>,
}

/// A number for a client of lanes, which nobody can have said before.
pub(super) fn client() -> u64 {
    let mut bytes = [0; 8];
    // Without it there are no lanes.
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_or(0, |()| u64::from_le_bytes(bytes))
}

/// Connects so many times, each in its `lane`, and asks who that is: all of it within `timeout`, since whoever changes the
/// volume waits for it. (How long names of hosts take is up to the system.)
///
/// # Errors
/// Names the address.
pub(super) fn dial(
    address: &Listen,
    connections: usize,
    timeout: Duration,
    lane: impl Fn(usize) -> Lane,
) -> io::Result<Dialled> {
    let host = match address {
        Listen::Tcp(host, _) => host,
        Listen::Unix(_) => "",
    };
    let deadline = Instant::now() + timeout;
    let mut place = None;
    let connect = |_| {
        let socket = connect(address, &mut place, deadline)?;
        socket.tune()?;
        let left = left(deadline)?;
        socket.set_read_timeout(Some(left))?;
        socket.set_write_timeout(Some(left))?;
        DataLink::begin(socket, host, deadline)
    };
    let attempt = || {
        let mut links = (0..connections).map(connect).collect::<io::Result<Vec<_>>>()?;
        let first = links.first().ok_or(io::ErrorKind::InvalidInput)?;
        let local = is_local(first.socket());
        // On each: what a replica says on a connection depends on what it was told there.
        let (mut hello, mut flushes, mut standing) = (None, true, Some(Standing::Ready));
        for (index, link) in links.iter_mut().enumerate() {
            hello = greet(&mut Timed { link, deadline }, lane(index))?;
            flushes &= hello.is_some_and(|hello| hello.has(feature::FLUSH));
            let its = hello.and_then(|hello| hello.standing);
            standing = if its == Some(Standing::Ready) { standing } else { its };
        }
        for link in &links {
            link.socket().set_read_timeout(None)?;
            link.socket().set_write_timeout(None)?;
        }
        Ok(Dialled { links, flushes, local, hello, standing })
    };
    attempt().map_err(|error: io::Error| {
        let kind = match error.kind() {
            // So the system calls a timeout of a socket.
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut,
            kind => kind,
        };
        let text = match kind {
            io::ErrorKind::TimedOut => format!("it has not answered within {timeout:?}"),
            _ => error.to_string(),
        };
        io::Error::new(kind, format!("cannot connect to the replica at {address}: {text}"))
    })
}

/// Connects anew, so many times, within a window, to a replica that knows this lane. Time in which this process did
/// not run does not count.
///
/// # Errors
/// There are no connections to be had that lead on from the last ones: why.
pub(super) fn again(
    address: &Listen,
    connections: usize,
    window: Duration,
    lane: Lane,
) -> Result<Vec<DataLink>, String> {
    let mut left = window;
    let mut refused = Refused::default();
    while !left.is_zero() {
        let begun = Instant::now();
        match dial(address, connections, left.min(ATTEMPT), |_| lane) {
            Ok(Dialled { links, standing: Some(Standing::Ready), .. }) => return Ok(links),
            Ok(_) => return Err("and the replica has ended or was closed since".to_owned()),
            Err(error) if refused.is_proof(address, error.kind(), begun) => {
                return Err(format!("and {error}"));
            }
            Err(_) => thread::sleep(PAUSE.min(left)),
        }
        left = left.saturating_sub(begun.elapsed().min(ATTEMPT + PAUSE));
    }
    Err(format!("and there was no other within {window:?}"))
}

/// Since when a replica's address refuses connections.
#[derive(Default)]
struct Refused(Option<Instant>);

impl Refused {
    /// Whether nobody listens there, after this error at this moment: a replica whose process has ended comes back as
    /// another one. On this machine a refusal proves it at once; elsewhere a firewall may refuse as well, for a moment.
    fn is_proof(&mut self, address: &Listen, error: io::ErrorKind, now: Instant) -> bool {
        if !matches!(error, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) {
            self.0 = None;
            return false;
        }
        let here = match address {
            Listen::Unix(_) => true,
            Listen::Tcp(host, _) => host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()),
        };
        here || now.saturating_duration_since(*self.0.get_or_insert(now)) >= PROOF
    }
}

/// The time until then.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connects to the `place` that was connected to before, or finds one.
fn connect(
    address: &Listen,
    place: &mut Option<SocketAddr>,
    deadline: Instant,
) -> io::Result<Socket> {
    let Listen::Tcp(host, port) = address else { return address.connect() };
    let addresses: Vec<_> = match *place {
        Some(place) => vec![place],
        None => (host.as_str(), *port).to_socket_addrs()?.collect(),
    };
    let stream = connect_any(&addresses, deadline, TcpStream::connect_timeout)?;
    *place = Some(stream.peer_addr()?);
    Ok(Socket::Tcp(stream))
}

/// Connects, with `connect`, to one of a host's addresses. Each may take its share of the time that is left:
/// one that nobody answers at must not use up that of the next.
fn connect_any<T>(
    addresses: &[SocketAddr],
    deadline: Instant,
    connect: impl Fn(&SocketAddr, Duration) -> io::Result<T>,
) -> io::Result<T> {
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for (address, further) in addresses.iter().zip((1..=addresses.len()).rev()) {
        let share = left(deadline)? / u32::try_from(further).unwrap_or(u32::MAX);
        match connect(address, share) {
            Ok(connected) => return Ok(connected),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// A connection that is read from until a deadline, however slowly it comes.
struct Timed<'a> {
    link: &'a mut DataLink,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.link.socket().set_read_timeout(Some(left(self.deadline)?))?;
        self.link.read(out)
    }
}

/// Says hello until nothing runs any more of what came on former connections of the lane: what a replica of DBS
/// answers.
fn greet(timed: &mut Timed<'_>, lane: Lane) -> io::Result<Option<Hello>> {
    loop {
        let hello = greet_once(timed, lane)?;
        if hello.and_then(|hello| hello.standing) != Some(Standing::Busy) {
            return Ok(hello);
        }
        thread::sleep(PAUSE.min(left(timed.deadline)?));
    }
}

/// Says hello once. Upstream's sends the payload of a ping back as it is, or an error if it is not open.
fn greet_once(timed: &mut Timed<'_>, lane: Lane) -> io::Result<Option<Hello>> {
    let hello = Hello { lane: Some(lane), ..Hello::of_client() }.encode();
    let header = Header::with_payload(Type::Ping, 0, 0, hello.len() as u32);
    timed.link.write_all(&[header.encode().as_slice(), &hello].concat())?;
    let mut bytes = [0; HEADER_BYTES];
    timed.read_exact(&mut bytes)?;
    let header = Header::decode(&bytes)?;
    if header.length > ANSWER_MAX_BYTES || header.sequence != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no answer to a ping"));
    }
    let mut payload = vec![0; header.length as usize];
    timed.read_exact(&mut payload)?;
    let response = header.kind() == Some(Type::Response);
    Ok(Hello::decode(&payload).filter(|hello| response && hello.server))
}

/// Whether the other end is on this machine: it has the address that this end has.
fn is_local(socket: &Socket) -> bool {
    let Socket::Tcp(stream) = socket else { return true };
    let address = |end: io::Result<SocketAddr>| end.ok().map(|address| address.ip());
    let ends: (Option<IpAddr>, _) = (address(stream.local_addr()), address(stream.peer_addr()));
    ends.0.is_some() && ends.0 == ends.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::net::TcpListener;
    use std::thread;

    /// Found by review: the first of a host's addresses, at which nobody answered, used all of the time.
    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let addresses: Vec<SocketAddr> =
            (1..=3).map(|last| SocketAddr::from(([127, 0, 0, last], 1))).collect();
        let minutes = Duration::from_secs(600);
        let tried = RefCell::new(Vec::new());
        let connected = connect_any(&addresses, Instant::now() + minutes, |address, time| {
            tried.borrow_mut().push(time);
            match tried.borrow().len() {
                3 => Ok(*address),
                _ => Err(io::ErrorKind::TimedOut.into()),
            }
        });
        assert_eq!(connected.unwrap(), addresses[2]);
        for (time, share) in tried.into_inner().into_iter().zip([3, 2, 1]) {
            assert!(!time.is_zero() && time <= minutes / share, "{time:?} of a share of {share}");
        }
        let late = connect_any(&addresses, Instant::now(), |_, _| Ok(()));
        assert_eq!(late.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let none = connect_any(&[], Instant::now() + minutes, |_, _| Ok(()));
        assert_eq!(none.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    /// Found by review: a firewall that rejected for a moment cost the replica.
    #[test]
    fn one_refusal_proves_nothing_of_another_machine() {
        let (gone, other) = (io::ErrorKind::ConnectionRefused, io::ErrorKind::TimedOut);
        let now = Instant::now();
        let there = Listen::Tcp("192.0.2.1".into(), 1);
        let mut refused = Refused::default();
        assert!(!refused.is_proof(&there, gone, now));
        assert!(!refused.is_proof(&there, gone, now + PROOF / 2));
        assert!(!refused.is_proof(&there, other, now + PROOF));
        assert!(!refused.is_proof(&there, gone, now + PROOF));
        assert!(refused.is_proof(&there, gone, now + 2 * PROOF));
        // Nothing is in between here.
        for here in [Listen::Unix("/run/a".into()), Listen::Tcp("127.0.0.1".into(), 1)] {
            assert!(Refused::default().is_proof(&here, gone, now));
        }
    }

    /// Each byte comes in time; all of the answer would take seconds.
    #[test]
    fn one_who_drips_is_not_waited_for_longer_than_one_who_is_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Listen::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
        let dripping = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut greeting = [0; HEADER_BYTES + Hello::BYTES];
            stream.read_exact(&mut greeting).unwrap();
            let text = [b'x'; 200];
            let header = Header::with_payload(Type::Error, 0, 0, text.len() as u32).encode();
            for byte in header.iter().chain(&text) {
                // Until it is given up.
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        let lane = Lane { client: 1, epoch: 0, number: 0, places: 1 };
        let dialled = dial(&address, 1, Duration::from_millis(300), |_| lane);
        let error = dialled.err().expect("the answer does not come within the deadline");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        dripping.join().unwrap();
    }
}
