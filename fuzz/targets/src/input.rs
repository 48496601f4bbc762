//! Choices out of the fuzzer's bytes.

/// Bytes to choose with; when they are used up every further choice is 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `most` bytes.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(most.min(self.0.len()));
        self.0 = later;
        now
    }

    /// All that is left.
    #[cfg(feature = "server")]
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        match end {
            0..=0x100 => u64::from(self.u8()) % end.max(1),
            0x101..=0x1_0000 => u64::from(self.u16()) % end,
            _ => u64::from(self.u32()) % end,
        }
    }

    pub fn flag(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// As [`Input::run`], cut to a length.
    pub fn bounded(&mut self, most: usize) -> &'a [u8] {
        let run = self.run();
        &run[..run.len().min(most)]
    }

    /// A run of bytes whose length stands before it.
    pub fn run(&mut self) -> &'a [u8] {
        let length = self.u16();
        self.bytes(usize::from(length))
    }
}
