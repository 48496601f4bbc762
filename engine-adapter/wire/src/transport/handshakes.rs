//! Handshakes of callers: how many at a time, and who makes way for whom.
//!
//! Nobody waits for a place, or those who connect and say nothing would keep all others out. When all places
//! are taken, who comes takes that of the one who is there longest among those of the network which has most:
//! a stranger with one address displaces himself.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// Handshakes at a time.
const HANDSHAKES_MAX: usize = 64;

/// The handshakes under way, in the order they began.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    taken: Vec<Place>,
    /// Number of the next one.
    next: u64,
}

#[derive(Debug)]
struct Place {
    number: u64,
    network: IpAddr,
    /// Dropped to tell its owner to go.
    _stay: oneshot::Sender<()>,
}

/// A place, until it is dropped or taken by another.
#[derive(Debug)]
pub(super) struct Taken {
    handshakes: Arc<Handshakes>,
    number: u64,
    displaced: oneshot::Receiver<()>,
}

impl Handshakes {
    /// Takes a place for somebody at this address.
    pub fn begin(self: &Arc<Self>, from: IpAddr) -> Taken {
        let (stay, displaced) = oneshot::channel();
        let mut places = self.places();
        if places.taken.len() >= HANDSHAKES_MAX
            && let Some(index) = displace(&places.taken)
        {
            places.taken.remove(index);
        }
        let number = places.next;
        places.next += 1;
        places.taken.push(Place { number, network: network(from), _stay: stay });
        drop(places);
        Taken { handshakes: Arc::clone(self), number, displaced }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    /// Waits until somebody else needs the place.
    pub async fn displaced(&mut self) {
        // Nothing is ever sent.
        let _gone = (&mut self.displaced).await;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.handshakes.places().taken.retain(|place| place.number != self.number);
    }
}

/// Which of these makes way.
fn displace(places: &[Place]) -> Option<usize> {
    let of_network =
        |place: &Place| places.iter().filter(|other| other.network == place.network).count();
    let most = places.iter().map(of_network).max()?;
    places.iter().position(|place| of_network(place) == most)
}

/// What one has who has this address: it alone, or of the sixth version a network of 2^64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether somebody else has the place.
    fn is_displaced(taken: &mut Taken) -> bool {
        taken.displaced.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn a_stranger_displaces_himself() {
        let handshakes = Arc::<Handshakes>::default();
        let stranger = IpAddr::from([192, 0, 2, 1]);
        let mut others: Vec<_> =
            (1..=3).map(|last| handshakes.begin(IpAddr::from([127, 0, 0, last]))).collect();
        let mut silent: Vec<_> =
            (0..10 * HANDSHAKES_MAX).map(|_| handshakes.begin(stranger)).collect();
        assert!(!others.iter_mut().any(is_displaced));
        let mut left = silent.split_off(silent.len() - (HANDSHAKES_MAX - others.len()));
        assert!(silent.iter_mut().all(is_displaced));
        // Who comes now has a place, too.
        let mut one = handshakes.begin(IpAddr::from([127, 0, 0, 9]));
        let displaced: Vec<_> = left.iter_mut().map(is_displaced).collect();
        assert!(displaced[0] && !displaced[1..].contains(&true) && !is_displaced(&mut one));
        assert_eq!(handshakes.places().taken.len(), HANDSHAKES_MAX);
        drop((others, left, one, silent));
        assert!(handshakes.places().taken.is_empty());
    }

    #[test]
    fn of_many_addresses_the_oldest_makes_way() {
        let handshakes = Arc::<Handshakes>::default();
        let address = |n: usize| IpAddr::from([10, 0, 0, n as u8]);
        let mut all: Vec<_> = (0..=HANDSHAKES_MAX).map(|n| handshakes.begin(address(n))).collect();
        let displaced: Vec<_> = all.iter_mut().map(is_displaced).collect();
        assert!(displaced[0] && !displaced[1..].contains(&true));
    }

    #[test]
    fn a_network_of_the_sixth_version_counts_as_one() {
        let parse = |text: &str| network(text.parse().unwrap());
        assert_eq!(parse("2001:db8:1:2::5"), parse("2001:db8:1:2:ffff::"));
        assert_ne!(parse("2001:db8:1:2::5"), parse("2001:db8:1:3::5"));
        assert_eq!(parse("::ffff:10.0.0.1"), parse("10.0.0.1"));
        assert_ne!(parse("10.0.0.2"), parse("10.0.0.1"));
    }
}
