use std::os::fd::AsFd;
use std::path::PathBuf;

use ipc::ChannelListener;

use super::super::link::say;
use super::*;
use crate::Node;
use crate::service::election::{self, Membership};
use crate::service::protocol::Request;

const FAR: Duration = Duration::from_secs(60);

fn directory(name: &str) -> PathBuf {
    let name = format!("fabricast-line-{name}-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    election::prepare("test", &directory).unwrap();
    directory
}

fn options(directory: &Path, service: ServiceMode, patience: Duration) -> NodeOptions {
    NodeOptions { directory: directory.to_owned(), service, patience, ..NodeOptions::default() }
}

#[track_caller]
fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + FAR;
    while !is_so() {
        assert!(Instant::now() < end, "waited for {what}");
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn one_that_cannot_begin_to_serve_lets_go_of_the_claim_for_a_while() {
    let directory = directory("begin");
    let options = options(&directory, ServiceMode::Standing, FAR);
    let own = OwnService::default();
    assert!(own.claims("test", &options).unwrap());
    // Where its socket is to be something else is.
    let path = socket_in(&directory);
    std::fs::create_dir(&path).unwrap();
    let since = Instant::now();
    own.offer("test", &options, since).unwrap_err();
    assert_eq!(Claim::holder("test", &directory).unwrap(), None);
    assert!(!own.stands.load(Ordering::Acquire));
    until("the claim", || own.claims("test", &options).unwrap());
    assert!(since.elapsed() >= SETBACK.0);
    std::fs::remove_dir(&path).unwrap();
    own.offer("test", &options, since).unwrap();
    assert!(own.is_running() && own.stands.load(Ordering::Acquire));
    own.end();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn one_whose_service_cannot_go_on_lets_go_of_the_claim() {
    let directory = directory("go-on");
    let options = options(&directory, ServiceMode::Standing, FAR);
    // A member of a node whose hall nobody brings.
    let member = Membership::hold("test", &directory).unwrap();
    let own = OwnService::default();
    own.offer("test", &options, Instant::now()).unwrap();
    assert!(own.claims("test", &options).unwrap());
    let members = directory.join("node.members");
    std::fs::remove_file(&members).unwrap();
    std::fs::create_dir(&members).unwrap();
    until("its end", || !own.is_running());
    assert_eq!(Claim::holder("test", &directory).unwrap(), None);
    drop(member);
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn one_that_is_to_serve_and_does_not_is_not_waited_for_until_all_give_up() {
    let directory = directory("bounded");
    let claim = Claim::take("test", &directory).unwrap().unwrap();
    let patience = Duration::from_millis(200);
    let outside = options(&directory, ServiceMode::Outside, patience);
    let error = Node::join(outside).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    let named = format!("process {} is there to serve", std::process::id());
    assert!(error.detail().contains(&named), "{error}");
    let patience = Duration::from_secs(4);
    let node = Node::join(options(&directory, ServiceMode::Embedded, patience)).unwrap();
    assert!(node.serves());
    drop((node, claim));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn an_office_is_vacant_when_nobody_has_it_and_not_when_nobody_answers() {
    let directory = directory("vacant");
    let claim = Claim::take("test", &directory).unwrap().unwrap();
    // It has the office, and does not answer.
    let office = Office::take("test", &directory).unwrap().unwrap();
    let listener = ChannelListener::bind(&socket_in(&directory)).unwrap();
    let options = options(&directory, ServiceMode::Embedded, Duration::from_secs(2));
    let own = OwnService::default();
    let end = Instant::now() + FAR;
    std::thread::scope(|scope| {
        let comes = scope.spawn(|| {
            let coming = Coming {
                operation: "test",
                options: &options,
                own: &own,
                end: &|| end,
                serves: &|| true,
                vacant_since: Cell::new(None),
            };
            let hello = Request::Hello { label: "test".into() };
            let life = Life::of_this_process().unwrap();
            let greet = |channel: &Channel| say("test", channel, &hello, &[life.as_fd()]);
            matches!(coming.come_in(greet), Ok((_, Answered::Welcome(_))))
        });
        std::thread::sleep(deference(&options) * 3 / 2);
        let since = Instant::now();
        drop((listener, office));
        until("the other one to serve", || own.is_running());
        assert!(since.elapsed() >= deference(&options));
        assert!(comes.join().unwrap());
    });
    own.end();
    drop(claim);
    std::fs::remove_dir_all(directory).unwrap();
}
