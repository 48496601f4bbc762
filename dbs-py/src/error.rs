//! Errors of the store as exceptions of the package.

use dbs_core::Error;
use pyo3::prelude::*;
use std::error::Error as _;
use std::io;

/// The exception for an error: `dbs._errors` has the classes.
pub fn raise(error: Error) -> PyErr {
    Python::attach(|py| exception(py, &error).unwrap_or_else(|failed| failed))
}

/// [`dbs_core::ErrorKind::Invalid`] as an exception.
pub fn invalid(message: String) -> PyErr {
    raise(Error::invalid(message))
}

/// The exception for a store that was closed.
pub fn closed() -> PyErr {
    Python::attach(|py| {
        named(py, "closed", "the store is closed; open it again", None).unwrap_or_else(|e| e)
    })
}

fn exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    let errno = source.and_then(io::Error::raw_os_error);
    named(py, error.kind().name(), &error.to_string(), errno)
}

fn named(py: Python<'_>, kind: &str, message: &str, errno: Option<i32>) -> PyResult<PyErr> {
    let make = py.import("dbs._errors")?.getattr("make")?;
    Ok(PyErr::from_value(make.call1((kind, message, errno))?))
}
