//! Simulated storage, model and crash runner.
