//! The loop of the live screen: it asks the server, listens to keys, and draws.

use super::keys::keys;
use super::screen::{Screen, Todo};
use super::terminal::Terminal;
use super::{Place, Usages};
use dbs_client::remote::RemoteStore;
use dbs_core::{Error, ErrorKind, Result};
use dbs_server::top::Top;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// Until the first rates are shown.
const FIRST: Duration = Duration::from_millis(500);
/// A server that does not answer for so long is said not to.
const SILENCE: Duration = Duration::from_secs(3);
/// Least time between two computations of the space of volumes, and how many times as long as one takes: the
/// server has other things to do.
const USAGE_INTERVAL: Duration = Duration::from_secs(30);
const USAGE_REST: u32 = 100;

/// What comes of a question.
enum Answer {
    Top(Result<Box<Top>>),
    Usages(Result<Usages>),
}

/// Questions to the server, one of a kind at a time, on threads of their own: the screen waits for nobody.
struct Server<'a> {
    place: &'a Place,
    asks: Sender<()>,
    answers: Receiver<Answer>,
    tell: Tell,
    /// When it was asked what is not answered yet.
    asked: Option<Instant>,
    due: Instant,
    usage_asked: Option<Instant>,
    usage_due: Instant,
}

/// Brings an answer to the screen.
struct Tell {
    answers: Sender<Answer>,
    waker: UnixStream,
}

impl Tell {
    fn tell(&mut self, answer: Answer) {
        // Fails only when the screen is over.
        let _ = self.answers.send(answer);
        let _ = self.waker.write(&[0]);
    }
}

impl<'a> Server<'a> {
    fn new(place: &'a Place, terminal: &Terminal) -> Result<Self> {
        let (asks, asked) = mpsc::channel::<()>();
        let (sender, answers) = mpsc::channel();
        let tell = || Ok::<_, Error>(Tell { answers: sender.clone(), waker: terminal.waker()? });
        let (its, mut teller): (Place, Tell) = (place.clone(), tell()?);
        thread::spawn(move || {
            let mut server = None;
            for () in asked {
                let top = look(&its, &mut server);
                teller.tell(Answer::Top(top.map(Box::new)));
            }
        });
        let (due, usage_due) = (Instant::now() + FIRST, Instant::now());
        Ok(Self {
            place,
            asks,
            answers,
            tell: tell()?,
            asked: None,
            due,
            usage_asked: None,
            usage_due,
        })
    }

    /// Asks what is due.
    fn ask(&mut self, screen: &Screen) -> Result<()> {
        let now = Instant::now();
        if self.asked.is_none() && !screen.paused && self.due <= now {
            self.asked = Some(now);
            self.due = now + screen.interval;
            // It is there as long as this is.
            let _ = self.asks.send(());
        }
        if self.usage_asked.is_none() && screen.spaces && !screen.paused && self.usage_due <= now {
            self.usage_asked = Some(now);
            let waker = self.tell.waker.try_clone();
            let waker = waker.map_err(|e| Error::io(e, "asking the server"))?;
            let mut tell = Tell { answers: self.tell.answers.clone(), waker };
            let place = self.place.clone();
            thread::spawn(move || {
                let usages = place.find().and_then(|server| place.usages(&server));
                tell.tell(Answer::Usages(usages));
            });
        }
        Ok(())
    }

    /// Gives the screen what has come.
    fn answer(&mut self, screen: &mut Screen) {
        while let Ok(answer) = self.answers.try_recv() {
            match answer {
                Answer::Top(top) => {
                    self.asked = None;
                    match top {
                        Ok(top) => screen.take(*top),
                        Err(error) => screen.away(&error.to_string()),
                    }
                }
                Answer::Usages(usages) => {
                    let took = self.usage_asked.take().map(|asked| asked.elapsed());
                    let rest = USAGE_INTERVAL.max(took.unwrap_or_default() * USAGE_REST);
                    self.usage_due = Instant::now() + rest;
                    screen.take_usages(usages.map_err(|error| error.to_string()));
                }
            }
        }
    }
}

/// A look at whoever serves the store by now.
fn look(place: &Place, server: &mut Option<RemoteStore>) -> Result<Top> {
    let found = server.take().map_or_else(|| place.find(), Ok)?;
    let top = place.look(&found)?;
    *server = Some(found);
    Ok(top)
}

/// Shows the screen until the user quits.
///
/// # Errors
/// `Interrupted` if a signal ended it; those of the terminal.
pub fn watch(place: &Place, mut screen: Screen, usage: bool) -> Result<()> {
    let mut terminal = Terminal::enter()?;
    let mut server = Server::new(place, &terminal)?;
    screen.spaces = usage;
    loop {
        if terminal.has_ended() {
            return Err(Error::new(ErrorKind::Interrupted, "ended by a signal"));
        }
        server.answer(&mut screen);
        server.ask(&screen)?;
        if let Some(silent) = server.asked.map(|asked| asked.elapsed()).filter(|t| *t >= SILENCE) {
            screen.away(&format!("it has not answered for {} s", silent.as_secs()));
        }
        let (width, height) = terminal.size();
        screen.resize(width, height);
        terminal.draw(&screen.lines())?;
        let next = server.due.saturating_duration_since(Instant::now());
        // Once a second, the silence of a server grows longer.
        let rest =
            if server.asked.is_none() && !screen.paused { next } else { Duration::from_secs(1) };
        for key in keys(&terminal.wait(rest)?) {
            match screen.key(key) {
                Todo::Nothing => {}
                Todo::Quit => return Ok(()),
                Todo::Suspend => terminal.suspend()?,
            }
        }
    }
}
