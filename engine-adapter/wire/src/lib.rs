//! What Longhorn's processes say to each other, and how they reach each other.
//!
//! This crate owns the bytes and the calls: the messages of a data connection ([`frame`]), the gRPC services
//! generated from `proto/` ([`proto`]), their server ([`control`]) and the address of one ([`remote`]), the names,
//! times and labels in their fields ([`names`], [`time`], [`labels`]), and the one place that makes and accepts TCP
//! connections, plain or with TLS ([`transport`]). It knows no volume, no replica and no controller.
//!
//! Main types: [`frame::Header`], one message of a data connection; [`remote::Address`], where a process listens;
//! [`control::ControlServer`], a gRPC server from start to end.
//!
//! Enter at [`frame`] for data, at `proto/longhorn/replica.proto` for control.

pub mod control;
pub mod frame;
pub mod labels;
pub mod log_limit;
pub mod names;
pub mod proto;
pub mod remote;
pub mod time;
pub mod transport;
mod version;
