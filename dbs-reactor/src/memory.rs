//! What the allocator keeps.
#![allow(unsafe_code)]

/// Gives memory back to the system that was freed, of all threads: glibc keeps what lies between what is in use, and once a
/// large piece was freed, nearly all there ever was. It takes a moment in which nobody gets any.
pub fn give_memory_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    /// Of this process, in bytes.
    fn resident() -> u64 {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    #[test]
    fn what_was_freed_goes_back_to_the_system() {
        // In pieces that no mapping is made for, with one between them that stays.
        let mut all: Vec<_> = (0..2048).map(|_| vec![1_u8; 64 << 10]).collect();
        let kept = all.pop();
        drop(all);
        super::give_memory_back();
        let before = resident();
        let again: Vec<_> = (0..2048).map(|_| vec![1_u8; 64 << 10]).collect();
        let most = resident();
        assert!(most > before + (64 << 20), "{before} {most}");
        drop((again, kept));
    }
}
