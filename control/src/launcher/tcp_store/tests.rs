//! Ranks as threads, with a fake store that behaves, or not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::fake_store::{KINDS, Kind, Misbehaviour, Server};
use super::*;

/// For what must succeed.
const LONG: Duration = Duration::from_secs(60);
/// For what must fail.
const SHORT: Duration = Duration::from_millis(400);

fn place(rank: u32, size: u32, job: &str) -> Place {
    let local = Some(LocalRank { rank, size });
    Place { rank, size, local, job: job.to_owned() }
}

fn connect(server: &Server, rank: u32, size: u32) -> Result<TcpStore> {
    TcpStore::connect(&server.address(), place(rank, size, "job-1"), LONG)
}

fn bytes_of(rank: u32, round: u32, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u32 * 31 + rank * 7 + round) as u8).collect()
}

/// Runs each rank in a thread, and returns their results.
fn ranks<T: Send>(size: u32, run: impl Fn(u32) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Three exchanges of contributions whose lengths differ among ranks and exchanges.
fn gather_three(server: &Server, size: u32, lengths: &[usize]) {
    let length = |rank: u32, round: u32| lengths[(rank + round) as usize % lengths.len()];
    ranks(size, |rank| {
        let mut store = connect(server, rank, size).unwrap();
        for round in 0..3 {
            let own = bytes_of(rank, round, length(rank, round));
            let gathered = store.all_gather(&own, LONG).unwrap();
            assert_eq!(gathered.len(), size as usize);
            for (from, bytes) in (0..size).zip(gathered) {
                assert!(bytes == bytes_of(from, round, length(from, round)), "{rank} from {from}");
            }
        }
    });
}

#[test]
fn ranks_gather_bytes_of_all_sizes() {
    let lengths = [0, 1, 100, 16 << 10, (16 << 10) + 1, 100_000, 1 << 20];
    for kind in KINDS {
        gather_three(&Server::start(kind), 4, &lengths);
    }
}

#[test]
fn contribution_of_several_pieces_is_gathered() {
    gather_three(&Server::start(Kind::Libuv), 2, &[3 << 20, (16 << 10) + 1, (4 << 20) + 7]);
}

#[test]
fn more_ranks_than_a_group_gather() {
    gather_three(&Server::start(Kind::Poll), 40, &[10, 200]);
}

#[test]
fn single_rank_gets_its_own() {
    let server = Server::start(Kind::Libuv);
    let mut store = connect(&server, 0, 1).unwrap();
    assert_eq!(store.all_gather(b"card", LONG).unwrap(), [b"card"]);
    assert_eq!((store.name(), store.job()), ("torchrun", "job-1"));
    assert_eq!((store.rank(), store.size()), (0, 1));
    assert_eq!(store.local(), Some(LocalRank { rank: 0, size: 1 }));
}

#[test]
fn keys_are_removed_after_each_gather() {
    for kind in KINDS {
        let server = Server::start(kind);
        gather_three(&server, 3, &[2 << 20, 5]);
        let (kept, others): (Vec<_>, Vec<_>) =
            server.keys().into_iter().partition(|(key, _)| key.contains("/starts/"));
        assert_eq!(kept.len(), 3);
        match kind {
            // Only the values.
            Kind::Until21 => assert!(others.iter().all(|(_, length)| *length == 0), "{others:?}"),
            _ => assert_eq!(others, []),
        }
    }
}

#[test]
fn second_start_of_a_process_has_its_own_keys() {
    let server = Server::start(Kind::Poll);
    for _ in 0..3 {
        gather_three(&server, 2, &[10]);
    }
}

#[test]
fn jobs_of_one_store_do_not_mix() {
    let server = Server::start(Kind::Libuv);
    // The first start of the job ended in the middle of an exchange.
    let mut old = TcpStore::connect(&server.address(), place(0, 2, "job/0"), LONG).unwrap();
    old.all_gather(b"old", SHORT).unwrap_err();
    drop(old);
    ranks(2, |rank| {
        let place = place(rank, 2, "job/1");
        let mut store = TcpStore::connect(&server.address(), place, LONG).unwrap();
        assert_eq!(store.all_gather(b"new", LONG).unwrap(), [b"new", b"new"]);
    });
}

#[test]
fn ranks_of_another_size_do_not_mix() {
    let server = Server::start(Kind::Libuv);
    gather_three(&server, 2, &[10]);
    gather_three(&server, 3, &[10]);
    gather_three(&server, 2, &[10]);
}

#[test]
fn rank_that_comes_late_is_awaited() {
    let server = Server::start(Kind::Poll);
    ranks(3, |rank| {
        let mut store = connect(&server, rank, 3).unwrap();
        thread::sleep(Duration::from_millis(100) * rank);
        let gathered = store.all_gather(&[rank as u8], LONG).unwrap();
        assert_eq!(gathered, [[0], [1], [2]]);
    });
}

#[test]
fn missing_rank_is_named() {
    for kind in KINDS {
        let server = Server::start(kind);
        let errors = ranks(4, |rank| {
            let mut store = connect(&server, rank, 4).unwrap();
            (rank != 3).then(|| store.all_gather(b"card", SHORT).unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            let text = "exchange among ranks (torchrun) failed: deadline exceeded: rank 3 did not \
                        come within 400ms. Check that all ranks call it";
            assert_eq!(error.to_string(), text);
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::DeadlineExceeded, &[3][..]));
        }
    }
}

#[test]
fn several_missing_ranks_are_named() {
    let server = Server::start(Kind::Libuv);
    let error = connect(&server, 1, 70).unwrap().all_gather(b"card", SHORT).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("ranks 0 and 2-69 did not come within 400ms"), "{text}");
    assert_eq!(error.ranks().len(), 69);
}

#[test]
fn stopped_store_is_reported() {
    let server = Server::start(Kind::Libuv);
    let mut store = connect(&server, 0, 2).unwrap();
    let stopped = server.stopped();
    let error = store.all_gather(b"card", SHORT).unwrap_err();
    let text = format!(
        "exchange among ranks (torchrun) failed: deadline exceeded: the store at {} did not answer \
         within 400ms. Check that torchrun runs there and is not stopped",
        server.address()
    );
    assert_eq!((error.to_string(), error.ranks()), (text, &[][..]));
    let error = TcpStore::connect(&server.address(), place(1, 2, "job"), SHORT).unwrap_err();
    let text = format!(
        "connect to launcher (torchrun) failed: deadline exceeded: {} did not answer within 400ms. \
         Check MASTER_ADDR, MASTER_PORT, and the network between the machines",
        server.address()
    );
    assert_eq!(error.to_string(), text);
    drop(stopped);
}

#[test]
fn host_that_does_not_answer_is_reported() {
    use nix::sys::socket::{self, AddressFamily, Backlog, SockFlag, SockType, SockaddrIn};
    use std::os::fd::AsRawFd;
    // A full queue of connections drops further ones, as a host behind a firewall does.
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
    socket::bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    socket::listen(&socket, Backlog::new(0).unwrap()).unwrap();
    let address: SockaddrIn = socket::getsockname(socket.as_raw_fd()).unwrap();
    let address = SocketAddr::from(std::net::SocketAddrV4::from(address));
    let accepted: Vec<_> =
        (0..4).map_while(|_| TcpStream::connect_timeout(&address, SHORT).ok()).collect();
    assert!(accepted.len() < 4);
    let error = TcpStore::connect(&address.to_string(), place(0, 2, "job"), SHORT).unwrap_err();
    let text = format!(
        "connect to launcher (torchrun) failed: deadline exceeded: {address} accepted no connection \
         within 400ms. Check MASTER_ADDR, MASTER_PORT, and the network between the machines"
    );
    assert_eq!(error.to_string(), text);
}

#[test]
fn refused_connection_is_closed() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = TcpStore::connect(&address.to_string(), place(0, 2, "job"), LONG).unwrap_err();
    let text = format!(
        "connect to launcher (torchrun) failed: closed: connecting to {address}: Connection refused \
         (os error 111). Check that torchrun runs there"
    );
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::Closed, text));
}

#[test]
fn agent_that_ends_closes_the_exchange() {
    let server = Server::start(Kind::Poll);
    let mut store = connect(&server, 0, 2).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            server.close_all();
        });
        let error = store.all_gather(b"card", LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    });
}

/// Serves connections one after another, each by this function, until it returns false.
fn serve(run: impl Fn(TcpStream) -> bool + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || while run(listener.accept().unwrap().0) {});
    address
}

#[test]
fn other_servers_are_refused() {
    let answers: [&[u8]; 3] =
        [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2p1\r\n", &[0xff; 100]];
    for answer in answers {
        let address = serve(move |mut stream| {
            let _ = stream.read(&mut [0; 100]);
            let _ = stream.write_all(answer);
            false
        });
        let error = TcpStore::connect(&address, place(0, 2, "job"), LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        let hint = "It is no TCP store of PyTorch: check MASTER_ADDR and MASTER_PORT";
        assert!(error.to_string().ends_with(hint), "{error}");
    }
    let address = serve(|stream| stream.peer_addr().is_ok());
    let error = TcpStore::connect(&address, place(0, 2, "job"), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn endless_answers_end_at_the_bound() {
    let address = serve(|mut stream| {
        let _ = stream.read(&mut [0; 100]);
        // A store without keys, then more zeros than any answer has.
        while stream.write_all(&[0; 4096]).is_ok() {}
        false
    });
    let error = TcpStore::connect(&address, place(0, 2, "job"), LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
}

#[test]
fn impossible_length_is_refused() {
    for length in [u64::MAX, 1 << 40, (16 << 10) + 9] {
        let server = Server::start(Kind::Libuv);
        let errors = ranks(2, |rank| {
            let mut store = connect(&server, rank, 2).unwrap();
            server.misbehave(Misbehaviour { length: Some(length), ..Misbehaviour::default() });
            store.all_gather(b"card", LONG).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            let other = 1 - rank as u32;
            assert_eq!((error.kind(), error.ranks()), (ErrorKind::Malformed, &[other][..]));
        }
    }
}

#[test]
fn contribution_that_is_none_names_its_rank() {
    let server = Server::start(Kind::Libuv);
    let mut store = connect(&server, 0, 2).unwrap();
    let mut connection = Connection::open(&server.address(), deadline(LONG)).unwrap();
    connection.send(|queries| queries.set("fabricast/job-1/2.1.0/1", b"something else")).unwrap();
    let error = store.all_gather(b"card", LONG).unwrap_err();
    let text = "exchange among ranks (torchrun) failed: malformed: rank 1 sent something else than \
                a contribution";
    assert_eq!((error.to_string().as_str(), error.ranks()), (text, &[1][..]));
}

#[test]
fn slow_store_is_awaited_until_the_deadline() {
    let slow = |pause| {
        let misbehaviour =
            Misbehaviour { pause: Duration::from_millis(pause), ..Misbehaviour::default() };
        Server::misbehaving(Kind::Libuv, misbehaviour)
    };
    gather_three(&slow(1), 2, &[20]);
    let started = Instant::now();
    TcpStore::connect(&slow(50).address(), place(0, 2, "job"), SHORT).unwrap_err();
    assert!(started.elapsed() < LONG / 4);
}

#[test]
fn connection_cut_at_any_byte_is_an_error_or_harmless() {
    // The other rank waits in vain.
    let timeout = Duration::from_millis(50);
    for cut in 1..90 {
        let misbehaviour = Misbehaviour { cut_after: Some(cut), ..Misbehaviour::default() };
        let server = Server::misbehaving(KINDS[cut % KINDS.len()], misbehaviour);
        let results = ranks(2, |rank| {
            let mut store = TcpStore::connect(&server.address(), place(rank, 2, "job"), LONG)?;
            store.all_gather(b"card", timeout)
        });
        for result in results {
            match result.map_err(|error| error.kind()) {
                Ok(gathered) => assert_eq!(gathered, [b"card", b"card"]),
                Err(ErrorKind::Closed | ErrorKind::DeadlineExceeded) => {}
                Err(other) => panic!("{other:?} after {cut} bytes"),
            }
        }
    }
}

#[test]
fn exchange_after_a_failed_removal_connects_again() {
    let server = Server::start(Kind::Libuv);
    ranks(2, |rank| {
        let mut store = connect(&server, rank, 2).unwrap();
        assert_eq!(store.all_gather(b"a", LONG).unwrap(), [b"a", b"a"]);
        store.connection = None;
        assert_eq!(store.all_gather(b"b", LONG).unwrap(), [b"b", b"b"]);
    });
}

#[test]
fn invalid_arguments_are_refused() {
    let server = Server::start(Kind::Libuv);
    let kind = |address: &str, place| TcpStore::connect(address, place, LONG).unwrap_err().kind();
    let address = server.address();
    assert_eq!(kind(&address, place(2, 2, "job")), ErrorKind::InvalidArgument);
    assert_eq!(kind(&address, place(0, 2, &"j".repeat(1025))), ErrorKind::InvalidArgument);
    assert_eq!(kind("localhost", place(0, 2, "job")), ErrorKind::InvalidArgument);
    let mut store = TcpStore::connect(&address, place(0, 2, &"j".repeat(1024)), LONG).unwrap();
    let too_long = vec![0; (16 << 20) + 1];
    let error = store.all_gather(&too_long, LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
