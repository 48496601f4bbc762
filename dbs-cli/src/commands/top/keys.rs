//! Keys, from the bytes that a terminal sends for them.

/// A key that means something here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Char(char),
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Escape,
    Backspace,
    Tab,
    BackTab,
    /// Ctrl with a letter.
    Ctrl(char),
}

/// The keys in what was read at once. Sequences that are not known are passed over.
pub fn keys(bytes: &[u8]) -> Vec<Key> {
    let text = String::from_utf8_lossy(bytes);
    let mut chars = text.chars().peekable();
    let mut keys = Vec::new();
    while let Some(c) = chars.next() {
        keys.extend(match c {
            '\x1b' if chars.next_if(|c| matches!(c, '[' | 'O')).is_some() => {
                let mut sequence = String::new();
                for c in chars.by_ref() {
                    sequence.push(c);
                    if ('@'..='~').contains(&c) {
                        break;
                    }
                }
                of_sequence(&sequence)
            }
            '\x1b' => Some(Key::Escape),
            '\r' | '\n' => Some(Key::Enter),
            '\t' => Some(Key::Tab),
            '\x08' | '\x7f' => Some(Key::Backspace),
            '\x01'..='\x1a' => Some(Key::Ctrl((b'a' - 1 + c as u8).into())),
            c if c.is_control() => None,
            c => Some(Key::Char(c)),
        });
    }
    keys
}

/// What follows `ESC [` or `ESC O`.
fn of_sequence(sequence: &str) -> Option<Key> {
    Some(match sequence {
        "A" => Key::Up,
        "B" => Key::Down,
        "C" => Key::Right,
        "D" => Key::Left,
        "H" | "1~" | "7~" => Key::Home,
        "F" | "4~" | "8~" => Key::End,
        "5~" => Key::PageUp,
        "6~" => Key::PageDown,
        "Z" => Key::BackTab,
        _ => return None,
    })
}
