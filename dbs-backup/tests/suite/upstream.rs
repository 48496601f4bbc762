//! Against what upstream's own code has written.
