//! Serving one store: NBD and the control socket.

pub mod nbd;
pub mod transfer;
