//! Requests that one reactor carries out on volumes of a store of its own process.
//!
//! Enter through [`Requests`](super::Requests). Reads and writes of whole blocks are mapped, transferred and answered by the reactor; what may have to wait goes to
//! the workers, and comes back as a [`Report`].

use super::commits::Commits;
use super::delayed::{Delayed, Fate};
use super::demand::{Answer, Demand, User};
use super::direct::{Direct, Ended, Plan, Storage};
use super::flushing::{Flushing, Going};
use super::pieces::{DISCARD_MAX_BYTES, ZEROES_MAX_BYTES, piece};
use super::pool::{Pool, Work, turns_of};
use dbs_core::volume::Finish;
use dbs_core::{Error, ErrorKind, Store};
use dbs_reactor::{Buf, Io};
use nix::libc;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What other threads tell the reactor: to be handed to [`Requests::report`](super::Requests::report).
pub struct Report<T>(News<T>);

enum News<T> {
    /// A worker is done with a request.
    Done(T, Result<(), i32>),
    /// A worker is done with all of a request but the commit behind it.
    Commit(Arc<User>, T),
    /// A worker has dropped a request.
    Dropped(T),
    /// A worker has read, or not.
    Read(T, Buf, Result<(), i32>),
    /// A commit that requests waited for has ended.
    Committed(Result<(), i32>),
    /// Somebody has flushed the storage, whom the reactor's commit may wait for.
    Flushed,
}

/// Sends a report to the reactor.
pub type Deliver<T> = Arc<dyn Fn(Report<T>) + Send + Sync>;

/// The requests of a reactor, each under a ticket by which its owner knows it again.
pub(super) struct Stored<T> {
    storage: Option<Storage>,
    direct: Direct<Ticket<T>>,
    commits: Commits<(Arc<User>, T)>,
    flushing: Flushing,
    delayed: Delayed<Begun<T>>,
    pool: Arc<Pool>,
    deliver: Deliver<T>,
    ended: VecDeque<(T, Answer)>,
}

/// A request as it came: whose, which, what, and where.
type Begun<T> = (Arc<User>, T, Demand, (u64, u64));

/// A request whose data is being transferred.
struct Ticket<T> {
    user: Arc<User>,
    request: T,
    /// Of a write.
    durable: bool,
    /// Offset and length in bytes.
    range: (u64, usize),
}

impl<T: Copy + Send + 'static> Stored<T> {
    /// Those of the reactor behind `io`, which `deliver` sends reports to, and which has `pool` do what may block.
    pub fn new(io: &mut Io, store: &Store, pool: Arc<Pool>, deliver: Deliver<T>) -> Self {
        // Without it, which takes a shortage of descriptors, the workers do all I/O.
        let direct_io = store.direct_io().ok().flatten();
        let storage = direct_io.map(|direct| Storage {
            file: io.add_file(direct.file),
            offset_alignment: direct.offset_alignment,
            memory_alignment: direct.memory_alignment,
        });
        let wake = Arc::clone(&deliver);
        Self {
            storage,
            direct: Direct::default(),
            commits: Commits::default(),
            delayed: Delayed::default(),
            flushing: Flushing::new(Arc::new(move || wake(Report(News::Flushed)))),
            pool,
            deliver,
            ended: VecDeque::new(),
        }
    }

    /// Starts a request in the best way there is for it, when the limits of its volume let it in. It ends as
    /// [`Stored::ended`] tells.
    pub fn start(
        &mut self,
        io: &mut Io,
        user: &Arc<User>,
        request: T,
        demand: Demand,
        range: (u64, u64),
    ) {
        let bytes = match &demand {
            Demand::Flush => return self.begin(io, user, request, demand, range),
            Demand::Read | Demand::Write(..) | Demand::KeepZeroes(_) => range.1,
            Demand::Discard(_) | Demand::Zeroes(_) => 0,
        };
        let pace = user.volume().pace();
        if self.delayed.is_free(pace) || user.fate() != Fate::Wait {
            return self.begin(io, user, request, demand, range);
        }
        let begun = (Arc::clone(user), request, demand, range);
        if let Some((user, request, demand, range)) = self.delayed.admit(io, pace, bytes, begun) {
            self.begin(io, &user, request, demand, range);
        }
    }

    /// What [`dbs_reactor::Handler::reminded`] tells.
    pub fn reminded(&mut self, io: &mut Io) {
        let fate = |(user, ..): &Begun<T>| user.fate();
        while let Some(((user, request, demand, range), begins)) = self.delayed.next(io, fate) {
            if begins {
                self.begin(io, &user, request, demand, range);
            } else {
                self.ended.push_back((request, Answer::Dropped));
            }
        }
    }

    /// After [`User::ends_delays`]: sees to what the limits of its volume have delayed.
    pub fn let_go(&mut self, io: &mut Io) {
        self.delayed.look();
        self.reminded(io);
    }

    fn begin(
        &mut self,
        io: &mut Io,
        user: &Arc<User>,
        request: T,
        demand: Demand,
        (offset, length): (u64, u64),
    ) {
        let changes = !matches!(demand, Demand::Read | Demand::Flush);
        match demand {
            _ if changes && user.read_only => self.answer(request, Err(libc::EROFS)),
            Demand::Read => self.read(io, user, request, (offset, length as usize)),
            Demand::Write(payload, durable) => {
                self.write(io, user, request, offset, payload, durable);
            }
            Demand::Flush if user.read_only => self.answer(request, Ok(())),
            // Once, as Linux tells of pages that it could not write.
            Demand::Flush if user.lost.swap(false, Ordering::SeqCst) => {
                self.answer(request, Err(libc::EIO));
            }
            Demand::Flush => self.commit(io, Arc::clone(user), request),
            Demand::Discard(durable) => {
                self.long(user, request, Long::Discard, (offset, length), durable);
            }
            Demand::Zeroes(durable) => {
                self.long(user, request, Long::Zeroes, (offset, length), durable);
            }
            Demand::KeepZeroes(durable) => {
                self.long(user, request, Long::KeepZeroes, (offset, length), durable);
            }
        }
    }

    /// Takes what another thread has told.
    pub fn report(&mut self, io: &mut Io, report: Report<T>) {
        match report.0 {
            News::Done(request, result) => self.answer(request, result),
            News::Read(request, data, Ok(())) => {
                self.ended.push_back((request, Answer::Done(data)));
            }
            News::Read(request, _, Err(error)) => self.answer(request, Err(error)),
            News::Commit(user, request) => self.commit(io, user, request),
            News::Dropped(request) => self.ended.push_back((request, Answer::Dropped)),
            News::Committed(result) => self.committed(io, result),
            News::Flushed if self.flushing.is_waiting() => self.go_on(io),
            News::Flushed => {}
        }
    }

    /// What [`dbs_reactor::Handler::moved`] tells of tags below 2^32 that are no others'.
    pub fn moved(&mut self, io: &mut Io, tag: u64, buf: Buf, result: io::Result<()>) {
        let Some((ticket, ended)) = self.direct.moved(tag, buf, result) else { return };
        let Ticket { user, request, durable, range } = ticket;
        match ended {
            Err(error) => self.answer(request, Err(errno(&error))),
            Ok(Ended::Read(data)) => self.ended.push_back((request, Answer::Done(data))),
            Ok(Ended::Again) => self.work_read(io, &user, request, range),
            Ok(Ended::Write(Finish::Done)) if !durable => self.answer(request, Ok(())),
            Ok(Ended::Write(_)) => self.commit(io, user, request),
        }
    }

    /// What [`dbs_reactor::Handler::synced`] tells.
    pub fn synced(&mut self, io: &mut Io, result: io::Result<()>) {
        let result = self.flushing.synced(result);
        self.committed(io, of_store(result));
    }

    /// A request that has ended, as long as there is one: to be asked after each of the other methods.
    pub fn ended(&mut self) -> Option<(T, Answer)> {
        self.ended.pop_front()
    }

    fn read(&mut self, io: &mut Io, user: &Arc<User>, request: T, range: (u64, usize)) {
        let Self { direct, storage, .. } = self;
        match direct.plan_read(user.volume(), storage.as_ref(), range, false) {
            Err(error) => self.answer(request, Err(errno(&error))),
            Ok(Plan::Io(planned)) => {
                let ticket = Ticket { user: Arc::clone(user), request, durable: false, range };
                direct.read(io, planned, range.1, ticket);
            }
            Ok(Plan::Zeros) => {
                let mut buf = io.buffers().take(range.1);
                buf.fill(0);
                self.ended.push_back((request, Answer::Done(buf)));
            }
            Ok(Plan::Blocked | Plan::Holes) => self.work_read(io, user, request, range),
        }
    }

    /// Hands a read to the workers. They let go of the volume before they tell that they are done, as all do here: who
    /// waits for a user's last request finds that nobody has its volume open.
    fn work_read(&self, io: &mut Io, user: &Arc<User>, request: T, (at, length): (u64, usize)) {
        let (user, deliver) = (Arc::clone(user), Arc::clone(&self.deliver));
        let mut buf = io.buffers().take(length);
        self.pool.submit_once(turns_of(user.volume(), user.client), move || {
            let result = run(|| user.volume().read_at(at, &mut buf));
            drop(user);
            deliver(Report(News::Read(request, buf, result)));
        });
    }

    fn write(
        &mut self,
        io: &mut Io,
        user: &Arc<User>,
        request: T,
        offset: u64,
        payload: Buf,
        durable: bool,
    ) {
        let Self { direct, storage, .. } = self;
        let range = (offset, payload.len());
        match direct.plan_write(user.volume(), storage.as_ref(), offset, payload.len()) {
            Err(error) => self.answer(request, Err(errno(&error))),
            Ok(Some(planned)) => {
                let ticket = Ticket { user: Arc::clone(user), request, durable, range };
                direct.write(io, planned, payload, ticket);
            }
            Ok(None) => {
                let (user, deliver) = (Arc::clone(user), Arc::clone(&self.deliver));
                self.pool.submit_once(turns_of(user.volume(), user.client), move || {
                    let result = run(|| user.volume().write_at(offset, &payload, durable));
                    drop(user);
                    deliver(Report(News::Done(request, result)));
                });
            }
        }
    }

    /// Hands a request to the workers that may take long. All of its range is in the volume, or nothing is done.
    fn long(
        &mut self,
        user: &Arc<User>,
        request: T,
        kind: Long,
        (at, length): (u64, u64),
        commit: bool,
    ) {
        let end = at.checked_add(length).filter(|end| *end <= user.volume().size());
        let Some(end) = end else { return self.answer(request, Err(libc::EINVAL)) };
        let deliver = Arc::clone(&self.deliver);
        let (client, user) = (turns_of(user.volume(), user.client), Some(Arc::clone(user)));
        let work = LongWork { request, kind, at, end, commit, user, deliver };
        self.pool.submit(client, work);
    }

    /// Answers a request once everything acknowledged so far is durable; all that ask while a
    /// commit runs share the next one.
    fn commit(&mut self, io: &mut Io, user: Arc<User>, request: T) {
        if self.commits.add((user, request)) {
            self.start_commit(io);
        }
    }

    fn start_commit(&mut self, io: &mut Io) {
        if self.commits.begin().is_some() {
            self.go_on(io);
        }
    }

    fn go_on(&mut self, io: &mut Io) {
        let Some((user, _)) = self.commits.running() else { return };
        match self.flushing.start(io, self.storage.as_ref(), user.volume(), 0) {
            Going::Ended(result) => return self.committed(io, of_store(result)),
            Going::Flushing => return,
            Going::Blocked => {}
        }
        let (user, deliver) = (Arc::clone(user), Arc::clone(&self.deliver));
        self.pool.submit_first(move || {
            let result = run(|| user.volume().flush());
            drop(user);
            deliver(Report(News::Committed(result)));
        });
    }

    fn committed(&mut self, io: &mut Io, result: Result<(), i32>) {
        let mut committing = self.commits.take();
        for (_, request) in committing.drain(..) {
            self.answer(request, result);
        }
        if self.commits.ended(committing) {
            self.start_commit(io);
        }
    }

    fn answer(&mut self, request: T, result: Result<(), i32>) {
        let done = |()| Answer::Done(Buf::empty());
        self.ended.push_back((request, result.map_or_else(Answer::Failed, done)));
    }
}

/// What a request does that may take long.
#[derive(Clone, Copy)]
enum Long {
    Discard,
    Zeroes,
    /// Zeros that keep their space.
    KeepZeroes,
}

/// Such a request at the workers, who carry it out step by step.
struct LongWork<T> {
    request: T,
    kind: Long,
    at: u64,
    end: u64,
    /// It ends with a commit.
    commit: bool,
    /// Until it is over.
    user: Option<Arc<User>>,
    deliver: Deliver<T>,
}

impl<T: Copy> LongWork<T> {
    /// Takes a step; what the reactor is told once it is over.
    fn next(&mut self) -> Option<News<T>> {
        let user = self.user.as_ref()?;
        if user.dropping.load(Ordering::Relaxed) {
            return Some(News::Dropped(self.request));
        }
        let most = if matches!(self.kind, Long::KeepZeroes) {
            ZEROES_MAX_BYTES.into()
        } else {
            DISCARD_MAX_BYTES.into()
        };
        let (at, length) = (self.at, piece(self.at, self.end, most));
        let mut finish = Finish::Done;
        let result = run(|| {
            finish = match self.kind {
                Long::Discard => user.volume().discard_part(at, length)?,
                Long::Zeroes => user.volume().zero_part(at, length)?,
                Long::KeepZeroes => user.volume().write_part(at, &vec![0; length as usize])?,
            };
            Ok(())
        });
        self.at += length;
        self.commit |= finish == Finish::Commit;
        match result {
            Ok(()) if self.at < self.end => None,
            Ok(()) if self.commit => Some(News::Commit(Arc::clone(user), self.request)),
            result => Some(News::Done(self.request, result)),
        }
    }
}

impl<T: Copy + Send> Work for LongWork<T> {
    fn step(&mut self) -> bool {
        let Some(news) = self.next() else { return self.user.is_some() };
        self.user = None;
        (self.deliver)(Report(news));
        false
    }
}

/// Runs a job so that a bug in it costs one request, not a worker.
fn run(job: impl FnOnce() -> dbs_core::Result<()>) -> Result<(), i32> {
    catch_unwind(AssertUnwindSafe(job)).map_or(Err(libc::EIO), of_store)
}

/// What a user is told.
fn of_store(result: dbs_core::Result<()>) -> Result<(), i32> {
    result.map_err(|error| errno(&error))
}

/// The error number that stands for an error of the store.
fn errno(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::NoSpace => libc::ENOSPC,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}
