//! A launcher for tests: PMI-1 as hydra speaks it, PMI-2 as Slurm does. It can misbehave.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::super::environment::Environment;
use super::message::Message;
use super::{PmiServer, PmiVersion, wire1, wire2};

/// What the launcher does with an answer.
pub(super) enum Reply {
    Send(Vec<u8>),
    /// In pieces of one byte.
    Slowly(Vec<u8>),
    Nothing,
    Close,
}

/// Changes the answers to a rank's requests.
type Tamper = dyn Fn(u32, &Message, Vec<u8>) -> Reply + Send + Sync;

/// The launcher's knowledge about a job, without input and output.
struct Job {
    name: String,
    size: u32,
    /// The version it speaks; None: the wanted one.
    version: Option<PmiVersion>,
    mapping: Option<String>,
    /// Stored, and seen by all ranks after the next barrier.
    stored: Vec<(String, String)>,
    visible: BTreeMap<String, String>,
    in_barrier: BTreeSet<u32>,
}

type Fields<'a> = &'a [(&'a str, &'a str)];

impl Job {
    /// The answers to a request of a rank, and the ranks that get them.
    fn answer(&mut self, rank: u32, version: PmiVersion, request: &Message) -> Vec<(u32, Vec<u8>)> {
        let encode = |command: &str, fields: Fields<'_>| match version {
            PmiVersion::One => wire1::encode(command, fields),
            PmiVersion::Two => wire2::encode(command, fields),
        };
        let to_rank = |command: &str, fields: Fields<'_>| vec![(rank, encode(command, fields))];
        let text = |name| request.text(name).unwrap_or_default();
        let (rank_text, size) = (rank.to_string(), self.size.to_string());
        match request.command() {
            "initack" => {
                let lines = format!(
                    "cmd=initack\ncmd=set size={size}\ncmd=set rank={rank}\ncmd=set debug=0\n"
                );
                vec![(rank, lines.into_bytes())]
            }
            "init" => {
                let wanted = PmiVersion::of_number(text("pmi_version")).unwrap();
                let chosen = self.version.unwrap_or(wanted);
                let (version, subversion) = chosen.numbers();
                let code = if chosen == wanted { "0" } else { "-1" };
                let fields =
                    [("rc", code), ("pmi_version", version), ("pmi_subversion", subversion)];
                vec![(rank, wire1::encode("response_to_init", &fields))]
            }
            "get_maxes" => to_rank(
                "maxes",
                &[("kvsname_max", "256"), ("keylen_max", "64"), ("vallen_max", "1024")],
            ),
            "get_my_kvsname" => to_rank("my_kvsname", &[("kvsname", &self.name)]),
            "put" => match self.store(text("key"), text("value")) {
                true => to_rank("put_result", &[("rc", "0"), ("msg", "success")]),
                false => to_rank("put_result", &[("rc", "-1"), ("msg", "duplicate_key")]),
            },
            "get" => match self.value(text("key")) {
                Some(value) => {
                    let fields = [("rc", "0"), ("msg", "success"), ("value", value.as_str())];
                    to_rank("get_result", &fields)
                }
                None => {
                    let msg = format!("key_{}_not_found", text("key"));
                    to_rank("get_result", &[("rc", "-1"), ("msg", &msg), ("value", "unknown")])
                }
            },
            "barrier_in" => self.enter(rank, encode("barrier_out", &[])),
            "finalize" if version == PmiVersion::One => to_rank("finalize_ack", &[]),
            "fullinit" => to_rank(
                "fullinit-response",
                &[
                    ("rc", "0"),
                    ("pmi-version", "2"),
                    ("pmi-subversion", "0"),
                    ("rank", &rank_text),
                    ("size", &size),
                    ("appnum", "-1"),
                ],
            ),
            "job-getid" => to_rank("job-getid-response", &[("rc", "0"), ("jobid", &self.name)]),
            "kvs-put" => {
                let code = if self.store(text("key"), text("value")) { "0" } else { "14" };
                to_rank("kvs-put-response", &[("rc", code)])
            }
            command @ ("kvs-get" | "info-getjobattr") => {
                let command = format!("{command}-response");
                match self.value(text("key")) {
                    Some(value) => {
                        let fields = [("rc", "0"), ("found", "TRUE"), ("value", value.as_str())];
                        to_rank(&command, &fields)
                    }
                    None => to_rank(&command, &[("rc", "0"), ("found", "FALSE")]),
                }
            }
            "kvs-fence" => self.enter(rank, encode("kvs-fence-response", &[("rc", "0")])),
            "finalize" => to_rank("finalize-response", &[("rc", "0")]),
            other => panic!("unknown request {other}"),
        }
    }

    /// False if the key was used before.
    fn store(&mut self, key: &str, value: &str) -> bool {
        let is_new = self.stored.iter().all(|it| it.0 != key) && !self.visible.contains_key(key);
        assert!(key.len() < 64 && value.len() < 1024);
        self.stored.push((key.to_owned(), value.to_owned()));
        is_new
    }

    fn value(&self, key: &str) -> Option<String> {
        match key {
            "PMI_process_mapping" => self.mapping.clone(),
            _ => self.visible.get(key).cloned(),
        }
    }

    fn enter(&mut self, rank: u32, end: Vec<u8>) -> Vec<(u32, Vec<u8>)> {
        assert!(self.in_barrier.insert(rank), "rank {rank} is in the barrier already");
        if self.in_barrier.len() < self.size as usize {
            return Vec::new();
        }
        self.visible.extend(self.stored.drain(..));
        std::mem::take(&mut self.in_barrier).into_iter().map(|rank| (rank, end.clone())).collect()
    }
}

/// What the threads of a launcher share.
struct Shared {
    job: Mutex<Job>,
    sockets: Mutex<BTreeMap<u32, Box<dyn Write + Send>>>,
    tamper: Box<Tamper>,
}

impl Shared {
    /// Answers the requests of a rank until its connection ends.
    fn serve(&self, stream: impl Read, rank: u32) {
        let mut stream = BufReader::new(stream);
        let mut version = PmiVersion::One;
        while let Some(request) = read(&mut stream, version) {
            let mut answers = self.job.lock().unwrap().answer(rank, version, &request);
            // A misbehaving launcher may answer before the barrier ends.
            if answers.is_empty() {
                answers.push((rank, Vec::new()));
            }
            for (to, bytes) in answers {
                if request.command() == "init" {
                    let answer = wire1::parse(bytes.strip_suffix(b"\n").unwrap()).unwrap();
                    version = PmiVersion::of_number(answer.text("pmi_version").unwrap()).unwrap();
                }
                let mut sockets = self.sockets.lock().unwrap();
                let Some(socket) = sockets.get_mut(&to) else { continue };
                let _ = match (self.tamper)(to, &request, bytes) {
                    Reply::Send(bytes) => socket.write_all(&bytes),
                    Reply::Slowly(bytes) => bytes.chunks(1).try_for_each(|it| socket.write_all(it)),
                    Reply::Nothing => Ok(()),
                    Reply::Close => return drop(sockets.remove(&to)),
                };
            }
        }
    }
}

fn read(stream: &mut impl BufRead, version: PmiVersion) -> Option<Message> {
    match version {
        PmiVersion::One => {
            let mut line = Vec::new();
            stream.read_until(b'\n', &mut line).ok()?;
            Some(wire1::parse(line.strip_suffix(b"\n")?).unwrap())
        }
        PmiVersion::Two => {
            let mut prefix = [0; wire2::PREFIX];
            stream.read_exact(&mut prefix).ok()?;
            let mut body = vec![0; wire2::length(&prefix).unwrap()];
            stream.read_exact(&mut body).ok()?;
            Some(wire2::parse(&body).unwrap())
        }
    }
}

/// A launcher of a job.
pub(super) struct TestServer {
    /// The ranks' ends of the connections.
    ends: Vec<OwnedFd>,
    shared: Arc<Shared>,
    size: u32,
}

impl TestServer {
    /// A launcher that speaks this version, or the wanted one.
    pub(super) fn new(size: u32, version: Option<PmiVersion>) -> Self {
        Self::with(size, version, |_, _, bytes| Reply::Send(bytes))
    }

    /// A launcher with changed answers.
    pub(super) fn with(
        size: u32,
        version: Option<PmiVersion>,
        tamper: impl Fn(u32, &Message, Vec<u8>) -> Reply + Send + Sync + 'static,
    ) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let job = Job {
            name: format!("test-{}-{number}", std::process::id()),
            size,
            version,
            mapping: Some(format!("(vector,(0,1,{size}))")),
            stored: Vec::new(),
            visible: BTreeMap::new(),
            in_barrier: BTreeSet::new(),
        };
        let shared = Shared {
            job: Mutex::new(job),
            sockets: Mutex::new(BTreeMap::new()),
            tamper: Box::new(tamper),
        };
        let mut server = Self { ends: Vec::new(), shared: Arc::new(shared), size };
        for rank in 0..size {
            let (here, there) = UnixStream::pair().unwrap();
            let writer = Box::new(there.try_clone().unwrap());
            server.shared.sockets.lock().unwrap().insert(rank, writer);
            let shared = server.shared.clone();
            std::thread::spawn(move || shared.serve(there, rank));
            server.ends.push(here.into());
        }
        server
    }

    /// Says that the ranks are on these machines.
    pub(super) fn mapped(self, mapping: Option<&str>) -> Self {
        self.shared.job.lock().unwrap().mapping = mapping.map(str::to_owned);
        self
    }

    /// The server for a rank.
    pub(super) fn server(&self, rank: u32) -> PmiServer {
        PmiServer::Descriptor(self.ends[rank as usize].as_raw_fd())
    }

    /// The rank's end of its connection.
    pub(super) fn end(&mut self, rank: u32) -> &mut OwnedFd {
        &mut self.ends[rank as usize]
    }

    /// The variables of a rank.
    pub(super) fn environment(&self, rank: u32) -> Environment {
        let numbers = [rank, self.size].map(|number| number.to_string());
        Environment::from_pairs(["PMI_RANK", "PMI_SIZE"].into_iter().zip(numbers))
    }

    /// Listens at an address, too.
    pub(super) fn listen(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = self.shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map(Result::unwrap) {
                let shared = shared.clone();
                std::thread::spawn(move || {
                    // The first request is needed to know the rank, and is answered below.
                    let mut line = Vec::new();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    reader.read_until(b'\n', &mut line).unwrap();
                    let request = wire1::parse(line.strip_suffix(b"\n").unwrap()).unwrap();
                    let rank = request.number("pmiid").unwrap();
                    shared.sockets.lock().unwrap().insert(rank, Box::new(stream));
                    shared.serve(std::io::Cursor::new(line).chain(reader), rank);
                });
            }
        });
        address
    }
}
