//! Fabricast
