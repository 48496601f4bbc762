//! A backup and a deletion that take their locks at the same time, in every order of their calls with up to three changes
//! from one to the other.

use super::*;
use crate::objects::{Allowed, Found, Stat};
use std::collections::{BTreeMap, HashSet};
use std::sync::Condvar;

const VOLUME: &str = "vol-1";

/// Objects in memory, and whose turn it is to use them.
struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, (Vec<u8>, SystemTime)>,
    /// Seconds from one writing to the next.
    step: u64,
    written: u64,
    /// Who is next, and how often before the other one is.
    turns: Vec<(usize, usize)>,
    ended: [bool; 2],
}

/// One of the two, as it sees the board.
struct Side(Arc<Board>, usize);

impl Board {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl State {
    fn is_turn(&mut self, side: usize) -> bool {
        while let Some((whose, count)) = self.turns.first()
            && (*count == 0 || self.ended[*whose])
        {
            self.turns.remove(0);
        }
        self.turns.first().is_none_or(|(whose, _)| *whose == side)
    }
}

impl Side {
    /// Does something in its turn.
    fn turn<T>(&self, act: impl FnOnce(&mut State) -> T) -> Result<T> {
        let waits = |state: &mut State| !state.is_turn(self.1);
        let mut state = self.0.changed.wait_while(self.0.state(), waits).unwrap();
        if let Some((_, count)) = state.turns.first_mut() {
            *count -= 1;
        }
        let done = act(&mut state);
        drop(state);
        self.0.changed.notify_all();
        Ok(done)
    }
}

impl Objects for Side {
    fn get(&self, path: &str, _: u64) -> Result<Vec<u8>> {
        let found =
            self.turn(|state| state.objects.get(path).map(|(content, _)| content.clone()))?;
        found.ok_or_else(|| crate::objects::missing(path))
    }

    fn get_range(&self, path: &str, _: u64, most: u64) -> Result<Vec<u8>> {
        self.get(path, most)
    }

    fn put(&self, path: &str, content: &[u8]) -> Result<()> {
        self.turn(|state| {
            state.written += state.step;
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(state.written);
            state.objects.insert(path.to_owned(), (content.to_owned(), at));
        })
    }

    fn stat(&self, path: &str) -> Result<Option<Stat>> {
        self.turn(|state| {
            let found = state.objects.get(path);
            found.map(|(content, at)| Stat { size: content.len() as u64, modified: *at })
        })
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        self.turn(|state| {
            let name = |path: &String| path.strip_prefix(&format!("{folder}/")).map(str::to_owned);
            state.objects.keys().filter_map(name).collect()
        })
    }

    fn walk(&self, _: &str, _: Found<'_>) -> Result<()> {
        Ok(())
    }

    fn remove_if(&self, path: &str, _: Allowed<'_>) -> Result<()> {
        self.turn(|state| drop(state.objects.remove(path)))
    }

    fn remove_all(&self, _: &str) -> Result<()> {
        Ok(())
    }

    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// Whether the backup and the deletion have their locks.
fn race(
    turns: &[(usize, usize)],
    names: [&str; 2],
    step: u64,
    backup: impl Fn(&Arc<dyn Objects>, &str, &mut Content) -> Result<bool> + Sync,
) -> [bool; 2] {
    let state = State { step, turns: turns.to_owned(), ..State::default() };
    let board = Arc::new(Board { state: Mutex::new(state), changed: Condvar::new() });
    let times = Times { wait: Duration::ZERO, ..Times::default() };
    let take = |side: usize| {
        let objects: Arc<dyn Objects> = Arc::new(Side(Arc::clone(&board), side));
        let (path, name) = (names::lock(VOLUME, names[side]), names[side].to_owned());
        let mut content = Content { name, r#type: side as i64 + 1, acquired: false };
        let has = match side {
            0 => backup(&objects, &path, &mut content).unwrap_or(false),
            _ => acquire(&objects, VOLUME, &path, &mut content, times).is_ok(),
        };
        board.state().ended[side] = true;
        board.changed.notify_all();
        has
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| take(1));
        [take(0), other.join().unwrap()]
    })
}

/// More calls than either of the two makes.
const CALLS: usize = 12;

/// Runs `check` for all orders of the calls with up to three changes, and both orders of names.
fn orders(check: impl Fn(&[(usize, usize)], [&str; 2])) {
    for (first, second) in [(0, 1), (1, 0)] {
        for (before, between) in (0..CALLS).flat_map(|i| (0..CALLS).map(move |j| (i, j))) {
            let turns =
                [(first, before), (second, between), (first, usize::MAX), (second, usize::MAX)];
            check(&turns, ["lock-a", "lock-b"]);
            check(&turns, ["lock-b", "lock-a"]);
        }
    }
}

/// By a clock that shows both written at the same time, which no order of times tells apart.
#[test]
fn what_is_taken_at_once_excludes_a_deletion() {
    let times = Times { wait: Duration::ZERO, ..Times::default() };
    let seen = Mutex::new(HashSet::new());
    orders(|turns, names| {
        let both = race(turns, names, 0, |objects, path, content| {
            take_at_once(objects, VOLUME, path, content, times)
        });
        assert_ne!(both, [true, true], "{turns:?} {names:?}");
        seen.lock().unwrap().insert(both);
    });
    // The last: each has seen the other.
    let all = [[true, false], [false, true], [false, false]];
    assert_eq!(*seen.lock().unwrap(), HashSet::from(all));
}

/// With the way that is left then.
#[test]
fn a_backup_and_a_deletion_are_never_both_there() {
    let times = Times { wait: Duration::ZERO, ..Times::default() };
    let seen = Mutex::new(HashSet::new());
    orders(|turns, names| {
        let both = race(turns, names, 1, |objects, path, content| {
            acquire(objects, VOLUME, path, content, times).map(|()| true)
        });
        assert_ne!(both, [true, true], "{turns:?} {names:?}");
        seen.lock().unwrap().insert(both);
    });
    assert!(seen.lock().unwrap().is_superset(&HashSet::from([[true, false], [false, true]])));
}
