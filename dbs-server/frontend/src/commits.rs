//! Requests that are answered once everything acknowledged so far is durable.

/// Requests that wait for the commit that runs, and those that came since, which share the next.
#[derive(Debug)]
pub struct Commits<T> {
    running: Vec<T>,
    next: Vec<T>,
}

impl<T> Default for Commits<T> {
    fn default() -> Self {
        Self { running: Vec::new(), next: Vec::new() }
    }
}

impl<T> Commits<T> {
    /// Adds a request; whether the caller is to begin a commit: see [`Commits::begin`].
    #[must_use]
    pub fn add(&mut self, request: T) -> bool {
        self.next.push(request);
        self.running.is_empty()
    }

    /// A commit begins for all that wait: one of them, if there is any.
    pub fn begin(&mut self) -> Option<&T> {
        std::mem::swap(&mut self.running, &mut self.next);
        self.running.first()
    }

    /// One of those that the commit is for, while one runs.
    #[must_use]
    pub fn running(&self) -> Option<&T> {
        self.running.first()
    }

    /// The commit has ended: who waited for it, to be handed back to [`Commits::ended`] empty.
    #[must_use]
    pub fn take(&mut self) -> Vec<T> {
        std::mem::take(&mut self.running)
    }

    /// Those of the last commit are answered; whether the next one is to begin.
    #[must_use]
    pub fn ended(&mut self, mut answered: Vec<T>) -> bool {
        answered.clear();
        self.running = answered;
        !self.next.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_during_a_commit_shares_the_next() {
        let mut commits = Commits::default();
        assert!(commits.add('a'));
        assert_eq!(commits.begin(), Some(&'a'));
        assert!(!commits.add('b') && !commits.add('c'));
        let answered = commits.take();
        assert_eq!(answered, ['a']);
        assert!(commits.ended(answered));
        assert_eq!(commits.begin(), Some(&'b'));
        let answered = commits.take();
        assert_eq!(answered, ['b', 'c']);
        assert!(!commits.ended(answered));
        assert!(commits.add('d'));
    }
}
