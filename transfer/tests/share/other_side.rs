//! What the other process of a test does: this program again, told by its environment.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ipc::Channel;
use transfer::{Admission, Client, ErrorKind, ShareService, Shared};

use crate::house::{LENGTH, PATIENCE, check, device, fill, peer, tensor};

const ROLE: &str = "FABRICAST_TEST_ROLE";
const SOCKET: &str = "FABRICAST_TEST_SOCKET";

pub fn is_here() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Kills what it started at the latest when it is dropped.
pub struct Other(Child);

impl Other {
    #[track_caller]
    pub fn finish(mut self) {
        assert!(self.0.wait().unwrap().success(), "the other side failed");
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the other side, by way of another program if one is named.
pub fn start(role: &str, socket: &Path, by_way_of: &[&str], user: Option<u32>) -> Other {
    let program = std::env::current_exe().unwrap();
    let mut command = match by_way_of.split_first() {
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
        None => Command::new(program),
    };
    command.args(["--exact", "other_side::the_other_side", "--nocapture"]);
    command.env(ROLE, role).env(SOCKET, socket).stdout(Stdio::null());
    if let Some(user) = user {
        command.uid(user);
    }
    Other(command.spawn().unwrap())
}

#[test]
fn the_other_side() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = std::env::var_os(SOCKET).unwrap();
    let path = Path::new(&socket);
    match role.as_str() {
        "reads-and-writes" => {
            let client = Client::connect(path, PATIENCE).unwrap();
            let opened = client.open("numbers", None, PATIENCE).unwrap();
            assert_eq!(opened.tensor, tensor());
            assert_eq!(opened.address(), opened.memory.address() + 4096);
            assert_eq!(opened.slice().length(), 400_000);
            check(&opened.memory, 1);
            // A peer reads it, too, where one can.
            if let Some(peer) = peer(&device()) {
                let seen = client.open("numbers", Some(&peer), PATIENCE).unwrap();
                assert_eq!(seen.memory.device(), opened.memory.device());
                check(&seen.memory, 1);
            }
            fill(&opened.memory, 7);
        }
        // Sends its own memory, and is killed while it waits.
        "sends" => {
            let channel = Channel::connect(path, PATIENCE).unwrap();
            let memory = device().allocate_shared(LENGTH, &[]).unwrap();
            fill(&memory, 3);
            let shared = Shared::new(&memory, &tensor()).unwrap();
            shared.send(&channel, PATIENCE).unwrap();
            std::thread::sleep(PATIENCE);
        }
        "sends-plain" => {
            let channel = Channel::connect(path, PATIENCE).unwrap();
            let memory = device().allocate(LENGTH).unwrap();
            fill(&memory, 3);
            let shared = Shared::new(&memory, &tensor()).unwrap();
            shared.send(&channel, PATIENCE).unwrap();
            let _ = channel.receive(PATIENCE);
        }
        "is-not-served" => {
            let client = Client::connect(path, PATIENCE).unwrap();
            let error = client.handle("numbers", PATIENCE).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
            // More than there are places; not one of them is held up, or served.
            let crowd: Vec<_> =
                (1..99).map(|_| Channel::connect(path, PATIENCE).unwrap()).collect();
            let channel = Channel::connect(path, PATIENCE).unwrap();
            let request = b"FcRQ\x02\x00\x01\0\0\0\0\0\0\0numbers";
            let _ = channel.send(request, &[], PATIENCE);
            let answer = channel.receive(PATIENCE).unwrap();
            assert_eq!(answer.bytes, b"FcAN\x02\x00\x02\0\0\0\0\0\0\0\0");
            assert!(answer.descriptors.is_empty());
            drop(crowd);
        }
        "serves" => {
            let memory = device().allocate_shared(LENGTH, &[]).unwrap();
            fill(&memory, 3);
            let admission = Admission { users: vec![0], groups: Vec::new() };
            let service = ShareService::start(path, admission).unwrap();
            service.offer("numbers", Shared::new(&memory, &tensor()).unwrap()).unwrap();
            std::thread::sleep(PATIENCE);
        }
        other => panic!("no role {other}"),
    }
}
