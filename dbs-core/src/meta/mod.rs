//! State in memory, no I/O.
