//! Attackers: processes that are not members of a node.

mod connections;
mod forged;
mod garbage;
mod many_ports;
mod replay;
mod silent;
mod slow;
mod socket;
mod target;

use testkit::children::say;

use crate::connect_request::connect_request;
use crate::stop_signal::StopSignal;
use crate::{limits, user};

pub use target::{Target, Victim};

/// Descriptors of an attacker: enough for the connections of each attack.
const DESCRIPTORS: u64 = 4096;

/// Runs an attack as a user until the input of this process is closed, and prints its outcome.
pub fn run(user: &str, name: &str, target: &[&str]) {
    let target = Target::of(target);
    limits::set_descriptors(DESCRIPTORS);
    if user == "other" {
        user::become_other();
    }
    let stop = StopSignal::watch();
    say("ready");
    let outcome = match name {
        "node-garbage" => garbage::run(&stop, &target, Victim::Node),
        "node-silent" => silent::run(&stop, &target, Victim::Node, 300),
        "node-slow" => slow::run(&stop, &target, Victim::Node, &target.departed),
        "node-replay" => replay::run(&stop, &target, Victim::Node, &target.departed),
        "node-takeover" => replay::run(&stop, &target, Victim::Acceptor, &target.claim()),
        "provider-garbage" => garbage::run(&stop, &target, Victim::Provider),
        "provider-silent" => silent::run(&stop, &target, Victim::Provider, 300),
        "provider-crowd" => silent::run(&stop, &target, Victim::Provider, 1324),
        // Without the last byte, which would complete a connect request.
        "provider-slow" => {
            let request = connect_request(target.departed_port());
            slow::run(&stop, &target, Victim::Provider, &request[..request.len() - 1])
        }
        "provider-forged" => forged::run(&stop, &target),
        "provider-replay" => {
            let request = connect_request(target.departed_port());
            replay::run(&stop, &target, Victim::Provider, &request)
        }
        "provider-ports" => many_ports::run(&stop, &target),
        "socket-garbage" => socket::garbage(&stop, &target, user),
        "socket-silent" => socket::silent(&stop, &target, user),
        "socket-slow" => socket::slow(&stop, &target, user),
        _ => panic!("unknown attack {name}"),
    };
    say(&outcome.line());
}
