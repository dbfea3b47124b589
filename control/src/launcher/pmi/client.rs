//! The requests of both protocols, and their answers.

use std::time::Instant;

use super::descriptor::Descriptor;
use super::failure::Failure;
use super::launcher_connection::Connection;
use super::message::{Message, shortened};
use super::version::PmiVersion;
use super::{pieces, wire1, wire2};

/// Longest request of PMI-1: servers read a request at once, with a buffer of this size.
const MAX_REQUEST: usize = 1024;
const MAX_KEY: usize = 56;
/// Limits of PMI-2, which has no request for them.
const KEY_LIMIT: usize = 64;
const VALUE_LIMIT: usize = 1024;
/// Not used of the longest value: servers differ in whether they count the end of a text.
const SPARE: usize = 16;
const MAPPING: &str = "PMI_process_mapping";
/// Longest name of a job.
const MAX_JOB: usize = 256;

/// What the environment reports about this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reported<'a> {
    /// `PMI_ID`: a new connection begins with it.
    pub(super) id: Option<u32>,
    /// `PMI_RANK` and `PMI_SIZE`.
    pub(super) place: Option<(u32, u32)>,
    /// `PMI_JOBID`.
    pub(super) job: Option<&'a str>,
}

/// A connection on which requests are answered.
#[derive(Debug)]
pub(super) struct Client {
    connection: Connection,
    version: PmiVersion,
    job: String,
    /// Rank and size.
    place: (u32, u32),
    /// Longest key and value.
    limits: (usize, usize),
}

impl Client {
    /// Introduces this rank to the launcher.
    pub(super) fn open(
        connection: Connection,
        wanted: PmiVersion,
        reported: Reported<'_>,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let mut client = Self {
            connection,
            version: PmiVersion::One,
            job: String::new(),
            place: (0, 0),
            limits: (KEY_LIMIT, VALUE_LIMIT - SPARE),
        };
        let place = match reported.id {
            Some(id) => Some(client.acknowledge(id, deadline)?),
            None => reported.place,
        };
        client.version = client.negotiate(wanted, deadline)?;
        client.place = match client.version {
            PmiVersion::One => place.ok_or_else(|| {
                let detail = "PMI_RANK and PMI_SIZE are missing beside PMI_FD";
                Failure::Environment(detail.into())
            })?,
            PmiVersion::Two => client.full_init(place, reported, deadline)?,
        };
        client.job = client.ask_job(reported, deadline)?;
        if client.version == PmiVersion::One {
            client.limits = client.ask_limits(deadline)?;
        }
        match client.limits {
            (key, value) if key < MAX_KEY || value < pieces::MIN_VALUE => {
                let limits = format!("keylen_max={key}, vallen_max={value}");
                Err(Failure::Malformed(format!("the launcher sent too short limits: {limits}")))
            }
            _ => Ok(client),
        }
    }

    pub(super) fn version(&self) -> PmiVersion {
        self.version
    }

    pub(super) fn job(&self) -> &str {
        &self.job
    }

    pub(super) fn place(&self) -> (u32, u32) {
        self.place
    }

    pub(super) fn descriptor(&self) -> Descriptor {
        self.connection.descriptor()
    }

    /// Longest value that [`put`](Self::put) takes.
    pub(super) fn longest_value(&self) -> usize {
        self.limits.1
    }

    /// The launcher's text about the ranks' machines, if it has one.
    pub(super) fn mapping(&mut self, deadline: Instant) -> Result<Option<String>, Failure> {
        let found = match self.version {
            PmiVersion::One => self.get(MAPPING, deadline),
            PmiVersion::Two => {
                let fields = [("key", MAPPING)];
                self.request("info-getjobattr", &fields, "info-getjobattr-response", deadline)
                    .and_then(|answer| found_value(&answer, MAPPING))
            }
        };
        match found {
            Ok(mapping) => Ok(Some(mapping)),
            Err(Failure::Refused(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Stores a value, which the other ranks see after the next barrier.
    pub(super) fn put(&mut self, key: &str, value: &str, deadline: Instant) -> Result<(), Failure> {
        match self.version {
            PmiVersion::One => {
                let job = self.job.clone();
                let fields = [("kvsname", job.as_str()), ("key", key), ("value", value)];
                self.request("put", &fields, "put_result", deadline)?;
            }
            PmiVersion::Two => {
                let fields = [("key", key), ("value", value)];
                self.request("kvs-put", &fields, "kvs-put-response", deadline)?;
            }
        }
        Ok(())
    }

    /// The value that a rank has stored before the last barrier.
    pub(super) fn get(&mut self, key: &str, deadline: Instant) -> Result<String, Failure> {
        self.ask_value(key, deadline)?;
        self.receive_value(key, deadline)
    }

    pub(super) fn ask_value(&mut self, key: &str, deadline: Instant) -> Result<(), Failure> {
        let job = self.job.clone();
        match self.version {
            PmiVersion::One => {
                self.send("get", &[("kvsname", job.as_str()), ("key", key)], deadline)
            }
            PmiVersion::Two => {
                let fields = [("jobid", job.as_str()), ("srcid", "-1"), ("key", key)];
                self.send("kvs-get", &fields, deadline)
            }
        }
    }

    /// Receives the value that was asked for. After a missed deadline it may be called again.
    pub(super) fn receive_value(
        &mut self,
        key: &str,
        deadline: Instant,
    ) -> Result<String, Failure> {
        let answer = self.receive(deadline)?;
        match self.version {
            PmiVersion::One => {
                let answer = answer.expect("get_result")?;
                answer.text("value").map(str::to_owned).ok_or_else(|| no_value(key))
            }
            PmiVersion::Two => found_value(&answer.expect("kvs-get-response")?, key),
        }
    }

    /// Begins a barrier.
    pub(super) fn enter_barrier(&mut self, deadline: Instant) -> Result<(), Failure> {
        let command = match self.version {
            PmiVersion::One => "barrier_in",
            PmiVersion::Two => "kvs-fence",
        };
        self.send(command, &[], deadline)
    }

    /// Waits for the end of a barrier. After a missed deadline it may be called again.
    pub(super) fn leave_barrier(&mut self, deadline: Instant) -> Result<(), Failure> {
        let answer = match self.version {
            PmiVersion::One => "barrier_out",
            PmiVersion::Two => "kvs-fence-response",
        };
        self.receive(deadline)?.expect(answer).map(drop)
    }

    /// Connects this connection with the rank. The launcher sends its rank and the size.
    fn acknowledge(&mut self, id: u32, deadline: Instant) -> Result<(u32, u32), Failure> {
        self.request("initack", &[("pmiid", &id.to_string())], "initack", deadline)?;
        let (mut rank, mut size) = (None, None);
        for _ in 0..3 {
            let message = self.receive(deadline)?.expect("set")?;
            if message.text("rank").is_some() {
                rank = Some(message.number("rank")?);
            } else if message.text("size").is_some() {
                size = Some(message.number("size")?);
            }
        }
        match (rank, size) {
            (Some(rank), Some(size)) if rank < size => Ok((rank, size)),
            _ => {
                let detail = format!("the launcher sent rank {rank:?} and size {size:?}");
                Err(Failure::Malformed(detail))
            }
        }
    }

    /// Agrees on the version. The launcher's choice counts: Slurm has one for all ranks of a job
    /// step, and reports an error beside it if it is another one.
    fn negotiate(&mut self, wanted: PmiVersion, deadline: Instant) -> Result<PmiVersion, Failure> {
        let (version, subversion) = wanted.numbers();
        let fields = [("pmi_version", version), ("pmi_subversion", subversion)];
        self.send("init", &fields, deadline)?;
        let answer = self.receive(deadline)?;
        let chosen = answer.text("pmi_version").and_then(PmiVersion::of_number);
        let answer = match chosen {
            Some(other) if other != wanted && answer.command() == "response_to_init" => {
                return Ok(other);
            }
            _ => answer.expect("response_to_init")?,
        };
        chosen.ok_or_else(|| {
            let found = shortened(answer.text("pmi_version").unwrap_or_default());
            Failure::Malformed(format!("the launcher answered with version \"{found}\" of PMI"))
        })
    }

    fn full_init(
        &mut self,
        place: Option<(u32, u32)>,
        reported: Reported<'_>,
        deadline: Instant,
    ) -> Result<(u32, u32), Failure> {
        let rank = place.map_or(0, |(rank, _)| rank).to_string();
        let job = reported.job.unwrap_or("0");
        let fields = [("pmijobid", job), ("pmirank", rank.as_str()), ("threaded", "FALSE")];
        let answer = self.request("fullinit", &fields, "fullinit-response", deadline)?;
        let found: (u32, u32) = (answer.number("rank")?, answer.number("size")?);
        match place {
            _ if found.0 >= found.1 => {
                let (rank, size) = found;
                Err(Failure::Malformed(format!("the launcher sent rank {rank} and size {size}")))
            }
            Some(expected) if expected != found => Err(Failure::Environment(format!(
                "rank {} of {} by the environment, rank {} of {} by the launcher. Start the \
                 program without the variables of another job",
                expected.0, expected.1, found.0, found.1,
            ))),
            _ => Ok(found),
        }
    }

    fn ask_job(&mut self, reported: Reported<'_>, deadline: Instant) -> Result<String, Failure> {
        let name = match self.version {
            PmiVersion::One => {
                let answer = self.request("get_my_kvsname", &[], "my_kvsname", deadline)?;
                answer.text("kvsname").map(str::to_owned)
            }
            PmiVersion::Two => {
                let answer = self.request("job-getid", &[], "job-getid-response", deadline);
                match answer {
                    Ok(answer) => answer.text("jobid").or(reported.job).map(str::to_owned),
                    Err(Failure::Refused(_)) => reported.job.map(str::to_owned),
                    Err(failure) => return Err(failure),
                }
            }
        };
        let name = name.unwrap_or_default();
        if name.is_empty() || name.len() > MAX_JOB || name.contains([' ', '=', ';']) {
            let name = shortened(&name);
            return Err(Failure::Malformed(format!("the launcher named the job \"{name}\"")));
        }
        Ok(name)
    }

    fn ask_limits(&mut self, deadline: Instant) -> Result<(usize, usize), Failure> {
        let answer = self.request("get_maxes", &[], "maxes", deadline)?;
        let key = answer.number("keylen_max")?;
        let value: usize = answer.number("vallen_max")?;
        let others = "cmd=put kvsname= key= value=\n".len() + self.job.len() + MAX_KEY;
        Ok((key, value.saturating_sub(SPARE).min(MAX_REQUEST - others)))
    }

    fn request(
        &mut self,
        command: &str,
        fields: &[(&str, &str)],
        answer: &str,
        deadline: Instant,
    ) -> Result<Message, Failure> {
        self.send(command, fields, deadline)?;
        self.receive(deadline)?.expect(answer)
    }

    fn send(
        &mut self,
        command: &str,
        fields: &[(&str, &str)],
        deadline: Instant,
    ) -> Result<(), Failure> {
        let bytes = match self.version {
            PmiVersion::One => wire1::encode(command, fields),
            PmiVersion::Two => wire2::encode(command, fields),
        };
        self.connection.send(&bytes, deadline)
    }

    fn receive(&mut self, deadline: Instant) -> Result<Message, Failure> {
        match self.version {
            PmiVersion::One => wire1::parse(&self.connection.line(deadline)?),
            PmiVersion::Two => {
                let prefix = self.connection.exactly(wire2::PREFIX, deadline)?;
                let body = wire2::length(&prefix)?;
                match self.connection.exactly(body, deadline) {
                    Ok(body) => wire2::parse(&body),
                    Err(failure) => {
                        self.connection.put_back(&prefix);
                        Err(failure)
                    }
                }
            }
        }
    }
}

fn found_value(answer: &Message, key: &str) -> Result<String, Failure> {
    match (answer.text("found"), answer.text("value")) {
        (Some(found), Some(value)) if found.eq_ignore_ascii_case("true") => Ok(value.to_owned()),
        _ => Err(no_value(key)),
    }
}

fn no_value(key: &str) -> Failure {
    Failure::Refused(format!("the launcher has no value of {key}"))
}
