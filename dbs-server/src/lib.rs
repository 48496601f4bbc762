//! Serving one store: NBD and the control socket.

pub mod api;
pub mod control;
pub mod log;
