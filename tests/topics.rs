//! Topics by the command: run as users run it, by several processes.

#[path = "topics/between.rs"]
mod between;
#[path = "topics/ends.rs"]
mod ends;
#[path = "topics/house.rs"]
mod house;
#[path = "topics/mistakes.rs"]
mod mistakes;
#[path = "topics/moves.rs"]
mod moves;
#[path = "topics/service.rs"]
mod service;
