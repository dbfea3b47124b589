//! Exchanges with a launcher of the tests.

use std::time::{Duration, Instant};

use testkit::children::ForkedChild;

use super::super::environment::Environment;
use super::super::error::{Error, ErrorKind, Result};
use super::super::exchange::{Exchange, LocalRank};
use super::test_server::{Reply, TestServer};
use super::*;

const BOTH: [PmiVersion; 2] = [PmiVersion::One, PmiVersion::Two];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

fn connect(server: &TestServer, rank: u32, version: PmiVersion, timeout: Duration) -> Result<Pmi> {
    Pmi::connect(&server.server(rank), version, &server.environment(rank), timeout)
}

/// Runs all ranks, each in a thread.
fn run<T: Send>(size: u32, act: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let act = &act;
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || act(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What a rank contributes in a round.
fn bytes(rank: u32, round: usize) -> Vec<u8> {
    let length = [0, 1, 5000, 100_000][(rank as usize + round) % 4];
    (0..length).map(|at| (at * 7 + rank as usize * 31 + round) as u8).collect()
}

fn gather_rounds(pmi: &mut Pmi, rounds: std::ops::Range<usize>) {
    for round in rounds {
        let gathered = pmi.all_gather(&bytes(pmi.rank(), round), LONG).unwrap();
        let expected: Vec<_> = (0..pmi.size()).map(|rank| bytes(rank, round)).collect();
        assert!(gathered == expected, "round {round} of rank {}", pmi.rank());
    }
}

#[test]
fn bytes_of_all_ranks_are_gathered() {
    for version in BOTH {
        let server = TestServer::new(4, Some(version)).mapped(Some("(vector,(0,2,2))"));
        run(4, |rank| {
            let mut pmi = connect(&server, rank, version, LONG).unwrap();
            assert_eq!((pmi.rank(), pmi.size(), pmi.name()), (rank, 4, version.name()));
            assert!(pmi.job().starts_with("test-"));
            assert_eq!(pmi.local(), Some(LocalRank { rank: rank % 2, size: 2 }));
            gather_rounds(&mut pmi, 0..4);
        });
    }
}

#[test]
fn answers_may_arrive_byte_by_byte() {
    for version in BOTH {
        let server = TestServer::with(2, Some(version), |_, _, bytes| Reply::Slowly(bytes));
        run(2, |rank| {
            let mut pmi = connect(&server, rank, version, LONG).unwrap();
            gather_rounds(&mut pmi, 0..1);
        });
    }
}

#[test]
fn version_of_the_launcher_is_used() {
    for (wanted, chosen) in [(BOTH[0], BOTH[1]), (BOTH[1], BOTH[0])] {
        let server = TestServer::new(2, Some(chosen));
        run(2, |rank| {
            let mut pmi = connect(&server, rank, wanted, LONG).unwrap();
            assert_eq!(pmi.name(), chosen.name());
            gather_rounds(&mut pmi, 0..1);
        });
    }
}

#[test]
fn launcher_at_an_address_gives_rank_and_size() {
    for version in BOTH {
        let server = TestServer::new(3, None);
        let address = server.listen();
        run(3, |rank| {
            let at = PmiServer::Address(address.clone(), rank);
            let connect = || Pmi::connect(&at, version, &Environment::default(), LONG);
            let mut pmi = connect().unwrap();
            assert_eq!((pmi.rank(), pmi.size()), (rank, 3));
            gather_rounds(&mut pmi, 0..1);
            drop(pmi);
            gather_rounds(&mut connect().unwrap(), 1..2);
        });
    }
}

#[test]
fn one_connection_is_used_again() {
    for version in BOTH {
        let server = TestServer::new(2, Some(version));
        run(2, |rank| {
            let mut pmi = connect(&server, rank, version, LONG).unwrap();
            gather_rounds(&mut pmi, 0..2);
            let error = connect(&server, rank, version, LONG).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            drop(pmi);
            gather_rounds(&mut connect(&server, rank, version, LONG).unwrap(), 2..4);
        });
    }
}

#[test]
fn rank_that_does_not_come_is_named() {
    for version in BOTH {
        let server = TestServer::new(4, Some(version));
        run(4, |rank| {
            if rank == 3 {
                return;
            }
            // They come and give up at different times.
            std::thread::sleep(Duration::from_millis(150) * rank);
            let mut pmi = connect(&server, rank, version, LONG).unwrap();
            let begin = Instant::now();
            let error = pmi.all_gather(b"x", Duration::from_secs(2)).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(30));
            let expected = format!(
                "exchange among ranks ({}) failed: deadline exceeded: rank 3 did not come within \
                 2s. Check that all ranks call it",
                version.name()
            );
            assert_eq!((error.to_string(), error.ranks()), (expected, &[3][..]));
            let again = pmi.all_gather(b"x", LONG).unwrap_err();
            assert_eq!(again.to_string(), error.to_string());
            drop(pmi);
            let again = connect(&server, rank, version, LONG).unwrap_err();
            assert_eq!(again.to_string(), error.to_string());
        });
    }
}

#[test]
fn rank_on_another_machine_that_does_not_come_is_named() {
    let server = TestServer::new(3, None).mapped(Some("(vector,(0,2,2))"));
    run(2, |rank| {
        let mut pmi = connect(&server, rank, PmiVersion::One, LONG).unwrap();
        let error = pmi.all_gather(b"x", Duration::from_secs(1)).unwrap_err();
        assert_eq!(error.ranks(), [2]);
        let expected = "all ranks of this machine came within 1s, but rank 2 on another machine \
                        did not. Check that all ranks call it";
        assert!(error.to_string().ends_with(expected), "{error}");
    });
}

/// Connects as the only rank to a launcher whose answers to this command are changed, and
/// exchanges.
fn misbehaving(
    version: PmiVersion,
    command: &'static str,
    tamper: impl Fn(Vec<u8>) -> Reply + Send + Sync + 'static,
) -> Error {
    let server = TestServer::with(1, Some(version), move |_, request, bytes| {
        match request.command() == command {
            true => tamper(bytes),
            false => Reply::Send(bytes),
        }
    });
    let begin = Instant::now();
    let connected = connect(&server, 0, version, SHORT);
    let exchange = |mut pmi: Pmi| {
        pmi.all_gather(&[7; 3000], SHORT)?;
        pmi.all_gather(&[7; 3000], SHORT)
    };
    let error = connected.and_then(exchange).unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(30));
    error
}

const COMMANDS: [(PmiVersion, &str); 9] = [
    (PmiVersion::One, "init"),
    (PmiVersion::One, "get_maxes"),
    (PmiVersion::One, "get_my_kvsname"),
    (PmiVersion::One, "put"),
    (PmiVersion::One, "barrier_in"),
    (PmiVersion::Two, "fullinit"),
    (PmiVersion::Two, "job-getid"),
    (PmiVersion::Two, "kvs-put"),
    (PmiVersion::Two, "kvs-fence"),
];

#[test]
fn launcher_that_does_not_answer_ends_at_the_deadline() {
    for (version, command) in COMMANDS {
        let error = misbehaving(version, command, |_| Reply::Nothing);
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{command}: {error}");
        assert!(error.to_string().contains("within 300ms"), "{error}");
        let error = misbehaving(version, command, |mut bytes| {
            bytes.truncate(bytes.len() - 1);
            Reply::Send(bytes)
        });
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{command}: {error}");
    }
}

#[test]
fn launcher_that_closes_the_connection_is_reported() {
    for (version, command) in COMMANDS {
        let error = misbehaving(version, command, |_| Reply::Close);
        // A client that waits for the end of a barrier does not send, and both ends are closed.
        assert_eq!(error.kind(), ErrorKind::Closed, "{command}: {error}");
    }
}

#[test]
fn answers_against_the_protocol_are_refused() {
    for (version, command) in COMMANDS {
        let other: &[u8] = match version {
            _ if command == "init" => b"cmd=other\n",
            PmiVersion::One => b"cmd=other\n",
            PmiVersion::Two => b"    10cmd=other;",
        };
        let binary = b"\xff\xff\xff\xff\xff\xff\n";
        for bytes in [other, b"\n        \n", binary, &[0; 70_000], &[b'x'; 70_000]] {
            let error = misbehaving(version, command, move |_| Reply::Send(bytes.to_vec()));
            assert_eq!(error.kind(), ErrorKind::Malformed, "{command}: {error}");
            assert!(error.to_string().len() < 500);
        }
        let error = misbehaving(version, command, |mut bytes| {
            bytes.extend(b"more");
            Reply::Send(bytes)
        });
        assert_eq!(error.kind(), ErrorKind::Malformed, "{command}: {error}");
        assert!(error.to_string().ends_with("sent \"more\" without a request"), "{error}");
    }
}

#[test]
fn values_against_the_protocol_are_refused() {
    let send = |version, command, text: &'static str| {
        misbehaving(version, command, move |_| match version {
            PmiVersion::Two => Reply::Send(format!("{:>6}{text}", text.len()).into_bytes()),
            PmiVersion::One => Reply::Send(format!("{text}\n").into_bytes()),
        })
    };
    let cases = [
        (BOTH[0], "init", "cmd=response_to_init rc=0 pmi_version=3", "with version \"3\" of PMI"),
        (BOTH[0], "init", "cmd=response_to_init rc=0", "with version \"\" of PMI"),
        (BOTH[0], "get_my_kvsname", "cmd=my_kvsname", "named the job \"\""),
        (BOTH[0], "get_my_kvsname", "cmd=my_kvsname kvsname=a b", "named the job \"a b\""),
        (BOTH[0], "get_maxes", "cmd=maxes keylen_max=64", "sent \"maxes\" with vallen_max=\"\""),
        (
            BOTH[0],
            "get_maxes",
            "cmd=maxes keylen_max=9 vallen_max=99",
            "too short limits: keylen_max=9, vallen_max=83",
        ),
        (
            BOTH[0],
            "get_maxes",
            "cmd=maxes keylen_max=64 vallen_max=1",
            "too short limits: keylen_max=64, vallen_max=0",
        ),
        (BOTH[0], "get_maxes", "cmd=maxes keylen_max=-1 vallen_max=9", "keylen_max=\"-1\""),
        (
            BOTH[1],
            "fullinit",
            "cmd=fullinit-response;rc=0;rank=1;size=1;",
            "sent rank 1 and size 1",
        ),
        (BOTH[1], "fullinit", "cmd=fullinit-response;rc=0;size=1;", "with rank=\"\""),
        (BOTH[1], "job-getid", "cmd=job-getid-response;rc=0;jobid=a=b;", "named the job \"a=b\""),
    ];
    for (version, command, answer, expected) in cases {
        let error = send(version, command, answer);
        assert_eq!(error.kind(), ErrorKind::Malformed, "{answer}: {error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn refusals_of_the_launcher_are_reported() {
    let error = misbehaving(PmiVersion::One, "put", |_| {
        Reply::Send(b"cmd=put_result rc=-1 msg=no memory left\n".to_vec())
    });
    let expected = "exchange among ranks (PMI-1) failed: the launcher sent put_result: no memory \
                    left (-1)";
    assert_eq!(error.to_string(), expected);
    let error = misbehaving(PmiVersion::One, "init", |_| {
        Reply::Send(b"cmd=response_to_init rc=-1 pmi_version=1\n".to_vec())
    });
    let expected = "connect to launcher (PMI-1) failed: the launcher sent response_to_init: no \
                    reason (-1)";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn rank_whose_value_is_missing_or_wrong_is_named() {
    for (command, answer, kind) in [
        ("get", "cmd=get_result rc=0 msg=success value=1.@\n", ErrorKind::Malformed),
        ("get", "cmd=get_result rc=0 msg=success value=99999999.\n", ErrorKind::Malformed),
        ("get", "cmd=get_result rc=-1 msg=key_not_found value=unknown\n", ErrorKind::Failed),
        ("get", "cmd=get_result rc=0\n", ErrorKind::Failed),
    ] {
        let server = TestServer::with(2, None, move |rank, request, bytes| {
            let key = request.text("key").unwrap_or_default();
            match rank == 0 && request.command() == command && key.starts_with("fabricast") {
                true => Reply::Send(answer.as_bytes().to_vec()),
                false => Reply::Send(bytes),
            }
        });
        let results = run(2, |rank| {
            connect(&server, rank, PmiVersion::One, LONG).unwrap().all_gather(b"x", LONG)
        });
        let error = results[0].as_ref().unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (kind, &[1][..]), "{error}");
        assert!(results[1].is_ok());
    }
}

#[test]
fn unknown_mapping_is_no_error() {
    for version in BOTH {
        for mapping in [None, Some("(nonsense"), Some("")] {
            let server = TestServer::new(2, Some(version)).mapped(mapping);
            run(2, |rank| {
                let mut pmi = connect(&server, rank, version, LONG).unwrap();
                assert_eq!(pmi.local(), None);
                gather_rounds(&mut pmi, 0..1);
            });
        }
    }
}

#[test]
fn rank_that_the_launcher_contradicts_is_refused() {
    let server = TestServer::new(2, None);
    let environment = server.environment(1);
    let error = Pmi::connect(&server.server(0), PmiVersion::Two, &environment, LONG).unwrap_err();
    let expected = "connect to launcher (PMI-2) failed: invalid environment: rank 1 of 2 by the \
                    environment, rank 0 of 2 by the launcher. Start the program without the \
                    variables of another job";
    assert_eq!(error.to_string(), expected);
    let server = TestServer::new(2, None);
    let error = Pmi::connect(&server.server(0), PmiVersion::One, &Environment::default(), LONG);
    let expected = "connect to launcher (PMI-1) failed: invalid environment: PMI_RANK and \
                    PMI_SIZE are missing beside PMI_FD";
    assert_eq!(error.unwrap_err().to_string(), expected);
}

#[test]
fn closed_descriptor_is_refused() {
    let server = PmiServer::Descriptor(1_000_000);
    let error = Pmi::connect(&server, PmiVersion::One, &Environment::default(), LONG).unwrap_err();
    let expected = "connect to launcher (PMI-1) failed: invalid environment: PMI_FD=1000000, but \
                    descriptor 1000000 is not open (Bad file descriptor (os error 9)). Start the \
                    rank directly by the launcher, without a program between them that closes \
                    descriptors, or choose another launcher by FABRICAST_LAUNCHER";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn descriptor_of_another_socket_is_not_used() {
    let mut server = TestServer::new(1, None);
    let mut pmi = connect(&server, 0, PmiVersion::One, LONG).unwrap();
    let (other, end) = std::os::unix::net::UnixStream::pair().unwrap();
    // As if MPI_Finalize had closed it, and the program opened a socket.
    nix::unistd::dup2(&other, server.end(0)).unwrap();
    let error = pmi.all_gather(b"x", LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(error.to_string().ends_with("Start the group before MPI_Finalize"), "{error}");
    end.set_nonblocking(true).unwrap();
    assert!(std::io::Read::read(&mut &end, &mut [0; 8]).is_err(), "nothing was sent to it");
}

#[test]
fn too_many_bytes_are_refused() {
    let server = TestServer::new(1, None);
    let mut pmi = connect(&server, 0, PmiVersion::One, LONG).unwrap();
    let error = pmi.all_gather(&vec![0; pieces::MAX_BYTES + 1], LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn forked_child_cannot_exchange() {
    let server = TestServer::new(1, None);
    let mut pmi = connect(&server, 0, PmiVersion::One, LONG).unwrap();
    let child = ForkedChild::new(|| {
        let error = pmi.all_gather(b"x", LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    });
    assert!(child.wait().success());
    gather_rounds(&mut pmi, 0..1);
}

#[test]
fn unlimited_timeout_is_accepted() {
    let server = TestServer::new(1, None);
    let mut pmi = connect(&server, 0, PmiVersion::One, Duration::MAX).unwrap();
    assert_eq!(pmi.all_gather(b"x", Duration::MAX).unwrap(), [b"x"]);
}
