//! The user of a volume, and what it may read.
//!
//! Of each sector it knows which contents it may have: the last one acknowledged, and any that is on its
//! way or failed since. A read may return what was possible at any moment while it ran.

use crate::replica::SECTORS;
use longhorn_controller::rules::Outcome;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Unmap,
    Flush,
}

/// A request of the user.
#[derive(Debug, Clone)]
pub struct Wish {
    pub kind: Kind,
    pub first: usize,
    pub count: usize,
    /// What it writes into each sector.
    pub value: u32,
    pub since: u64,
    /// When it was asked for.
    pub asked: u64,
    /// Replicas that had no room for it, and sectors that they have written of it.
    pub full: BTreeMap<usize, usize>,
    /// Of a read: what each sector may show.
    possible: Vec<Vec<u32>>,
}

impl Wish {
    /// Whether it has some of these sectors.
    pub fn overlaps(&self, first: usize, count: usize) -> bool {
        self.first < first + count && first < self.first + self.count
    }

    /// The sectors it changes.
    fn changed(&self) -> std::ops::Range<usize> {
        match self.kind {
            Kind::Read | Kind::Flush => 0..0,
            Kind::Write => self.first..self.first + self.count,
            Kind::Unmap => {
                let end = (self.first + self.count) / SECTORS * SECTORS;
                let start = self.first.next_multiple_of(SECTORS);
                start..end.max(start)
            }
        }
    }
}

/// What a volume may contain at one moment.
#[derive(Debug, Clone, Default)]
pub struct Content {
    pub possible: Vec<Vec<u32>>,
    /// Sectors in which complete replicas may differ: changes were on their way when the controller
    /// ended, and nobody knows whom they reached.
    pub doubt: Vec<bool>,
}

impl Content {
    pub fn grow(&mut self, sectors: usize) {
        self.possible.resize(sectors.max(self.possible.len()), vec![0]);
        self.doubt.resize(self.possible.len(), false);
    }

    /// Whether a sector may show this.
    pub fn allows(&self, sector: usize, value: u32) -> bool {
        self.possible.get(sector).map_or(value == 0, |possible| possible.contains(&value))
    }

    pub fn in_doubt(&self, sector: usize) -> bool {
        self.doubt.get(sector).copied().unwrap_or(false)
    }

    /// Replicas may have done different parts of a change.
    pub fn distrust(&mut self, wish: &Wish) {
        wish.changed().for_each(|sector| self.doubt[sector] = true);
    }

    /// What is there is what counts, from now on.
    pub fn rebase(&mut self, content: &[u32]) {
        self.possible = content.iter().map(|value| vec![*value]).collect();
        self.doubt = vec![false; content.len()];
    }
}

/// Sets grow long while a replica hangs, and each write has a value of its own: only zeros can be there already.
fn add(set: &mut Vec<u32>, value: u32) {
    if value != 0 || !set.contains(&0) {
        set.push(value);
    }
}

#[derive(Debug, Default)]
pub struct Client {
    pub content: Content,
    pub wishes: BTreeMap<u64, Wish>,
    last_id: u64,
    /// Answers, and those that were not of success.
    pub answers: u64,
    pub failures: u64,
}

impl Client {
    /// Notes a request on its way; answers with its number.
    pub fn begin(&mut self, kind: Kind, first: usize, count: usize, now: u64) -> u64 {
        self.last_id += 1;
        let value = if kind == Kind::Write { self.last_id as u32 } else { 0 };
        let (since, asked, full, possible) = (now, now, BTreeMap::new(), Vec::new());
        let mut wish = Wish { kind, first, count, value, since, asked, full, possible };
        if kind == Kind::Read {
            wish.possible = self.content.possible[first..first + count].to_vec();
        }
        for sector in wish.changed() {
            self.now_possible(sector, value);
        }
        self.wishes.insert(self.last_id, wish);
        self.last_id
    }

    fn now_possible(&mut self, sector: usize, value: u32) {
        add(&mut self.content.possible[sector], value);
        for wish in self.wishes.values_mut() {
            if wish.kind == Kind::Read && (wish.first..wish.first + wish.count).contains(&sector) {
                add(&mut wish.possible[sector - wish.first], value);
            }
        }
    }

    /// Checks and notes an answer; `changed` if it was one that changes something.
    pub fn end(
        &mut self,
        id: u64,
        outcome: Outcome,
        data: &[u32],
        changed: bool,
    ) -> Result<(), String> {
        let Some(wish) = self.wishes.remove(&id) else { return Ok(()) };
        self.answers += 1;
        if outcome != Outcome::Done {
            self.failures += 1;
            return Ok(());
        }
        if wish.kind == Kind::Read {
            for (index, value) in data.iter().enumerate() {
                if !wish.possible[index].contains(value) {
                    let sector = wish.first + index;
                    let possible = &wish.possible[index];
                    return Err(format!("sector {sector} reads {value}, not one of {possible:?}"));
                }
            }
            return Ok(());
        }
        if changed {
            for sector in wish.changed() {
                let mut possible = vec![wish.value];
                for other in self.wishes.values() {
                    if other.changed().contains(&sector) {
                        add(&mut possible, other.value);
                    }
                }
                self.content.possible[sector] = possible;
                self.content.doubt[sector] = false;
            }
        }
        Ok(())
    }

    /// The controller is gone: what was on its way may have reached anybody, or nobody.
    pub fn lose(&mut self) {
        for wish in std::mem::take(&mut self.wishes).into_values() {
            for sector in wish.changed() {
                self.content.doubt[sector] = true;
            }
        }
    }
}
