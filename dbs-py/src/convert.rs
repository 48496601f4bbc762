//! Values between Python and Rust: JSON of commands, sizes and offsets.

use crate::error::{invalid, raise};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyString};
use pyo3::{Borrowed, IntoPyObjectExt};
use serde_json::{Map, Number, Value};

/// A count of bytes, from any integer that is none too large and not negative.
#[derive(Debug, Clone, Copy)]
pub struct Amount(pub u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Amount {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        object.extract::<u64>().map(Self).map_err(|error| {
            if !error.is_instance_of::<PyOverflowError>(object.py()) {
                return error;
            }
            invalid(format!("{} is not a number of bytes from 0 to 2^64 - 1", &*object))
        })
    }
}

/// Bytes in a size such as ``"10GiB"``, ``"1.5TiB"`` or ``"4096"``; suffixes are binary.
#[pyfunction]
pub fn parse_size(text: &str) -> PyResult<u64> {
    dbs_core::parse_size(text).map_err(raise)
}

/// A number of bytes for people, such as ``"10.0 GiB"``.
#[pyfunction]
pub fn format_size(size: Amount) -> String {
    dbs_core::format_size(size.0)
}

/// JSON as dictionaries, lists, strings, numbers and so on.
pub fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    match value {
        Value::Null => Ok(py.None().into_bound(py)),
        Value::Bool(value) => value.into_bound_py_any(py),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => value.into_bound_py_any(py),
            (None, Some(value)) => value.into_bound_py_any(py),
            (None, None) => number.as_f64().into_bound_py_any(py),
        },
        Value::String(text) => text.into_bound_py_any(py),
        Value::Array(items) => {
            let list = PyList::empty(py);
            items.iter().try_for_each(|item| list.append(to_python(py, item)?))?;
            Ok(list.into_any())
        }
        Value::Object(members) => {
            let dict = PyDict::new(py);
            members.iter().try_for_each(|(key, item)| dict.set_item(key, to_python(py, item)?))?;
            Ok(dict.into_any())
        }
    }
}

/// The other way round, for what commands take: no fractions, and not deeply nested.
pub fn to_json(object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Value> {
    if object.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(value) = object.cast::<PyBool>() {
        return Ok(Value::Bool(value.is_true()));
    }
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(Value::String(text.to_str()?.to_owned()));
    }
    let Some(depth) = depth.checked_sub(1) else {
        return Err(invalid("a parameter is nested too deeply".to_owned()));
    };
    if let Ok(dict) = object.cast::<PyDict>() {
        let mut members = Map::new();
        for (key, item) in dict {
            members.insert(key.extract::<String>()?, to_json(&item, depth)?);
        }
        return Ok(Value::Object(members));
    }
    if let Ok(list) = object.cast::<PyList>() {
        let items = list.iter().map(|item| to_json(&item, depth));
        return items.collect::<PyResult<Vec<_>>>().map(Value::Array);
    }
    match object.extract::<Amount>() {
        Ok(amount) => Ok(Value::Number(Number::from(amount.0))),
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            let kind = object.get_type().name()?;
            Err(PyTypeError::new_err(format!("a parameter cannot be of type {kind}")))
        }
        Err(error) => Err(error),
    }
}
