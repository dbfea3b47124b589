//! Two processes, each with an agent and device memory: the first puts a block into the other's
//! memory with a notification, the second answers in its own memory, and the first gets the answer.
//!
//! ```text
//! cargo run --locked --example agent              # cuda:0 if there is one, else an emulated device
//! cargo run --locked --example agent -- cuda:1    # another device
//! ```
//!
//! The agents connect through a socket in a directory that both see. What they need to know before
//! (cards and region descriptors: some bytes) is sent through the pipes of the second process; it
//! could be a file, a launcher or a message as well. The example prints the chosen path, and why
//! the others were rejected.

use std::error::Error;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, fs, process};

use fabricast::gpu::{Device, Implementation, Memory, Stream};
use fabricast::transfer::{
    Agent, AgentCard, AgentOptions, Event, Notice, Rights, Strided, Subarray,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const TIMEOUT: Duration = Duration::from_secs(20);
const LENGTH: u64 = 4 << 20;
/// Tags of notifications.
const QUESTION: u64 = 1;
const ANSWER: u64 = 2;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => ask(&default_device()?),
        [device] => ask(device),
        ["answer", device, directory] => answer(device, Path::new(directory)),
        _ => Err("usage: agent [DEVICE]".into()),
    }
}

fn default_device() -> Result<String> {
    let has_cuda = Device::count(Implementation::Cuda).is_ok_and(|count| count > 0);
    Ok(if has_cuda { "cuda:0" } else { "emulated:0" }.to_owned())
}

/// Memory of a device, and a stream to fill and read it.
struct Buffer {
    memory: Memory,
    stream: Stream,
}

impl Buffer {
    fn new(device: &str) -> Result<Self> {
        let device = Device::open(device.parse()?)?;
        Ok(Self { memory: device.allocate_shared(LENGTH, &[])?, stream: device.stream()? })
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        let range = self.memory.slice(0, bytes.len() as u64)?;
        Ok(self.stream.upload(&range, bytes, TIMEOUT)?)
    }

    fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; LENGTH as usize];
        self.stream.download(&self.memory.slice(0, LENGTH)?, &mut bytes, TIMEOUT)?;
        Ok(bytes)
    }
}

/// The block of the first process: no two words are equal.
fn question() -> Vec<u8> {
    (0..LENGTH as u32 / 4).flat_map(u32::to_le_bytes).collect()
}

/// The answer of the second process.
fn answer_to(question: &[u8]) -> Vec<u8> {
    question.iter().map(|byte| !byte).collect()
}

/// The first process.
fn ask(device: &str) -> Result<()> {
    // First, so that a missing device is reported once, before a process is started.
    let buffer = Buffer::new(device)?;
    let directory = Directory::make()?;
    let mut other = AnsweringProcess::start(device, &directory.0)?;
    let their_card = receive(&mut other.output()?)?;

    let mut agent = Agent::start(AgentOptions::new("asks").directory(&directory.0))?;
    let region = agent.register(&buffer.memory, Rights::ALL)?;
    send(&mut other.input()?, &agent.card().encode()?)?;

    // The route is prepared once: the path is chosen, and the memory mapped.
    let peer = agent.connect(&their_card, TIMEOUT)?;
    let route = agent.route_to(peer, "buffer", &region, TIMEOUT)?;
    println!("{} selected:\n{}", route.path(), route.choice());
    if device.starts_with("emulated:") {
        println!("(the device is emulated in host memory; it takes the path that a GPU would)\n");
    }

    // Put, with a notification: when the other agent has it, it has the data.
    buffer.write(&question())?;
    let token = agent.put_all(&route, Some(Notice::new(QUESTION, b"all of it")?))?;
    let put = agent.wait(token, TIMEOUT)?;
    println!("put {} bytes", put.bytes);

    // Get: first a tile of a matrix of 1024 x 1024 words, then everything.
    wait_for(&mut agent, AgentCard::decode(&their_card)?.identity, ANSWER)?;
    buffer.write(&vec![0; LENGTH as usize])?;
    let matrix = Subarray { extents: &[1024, 1024], origin: &[3, 500] };
    let tile = Strided::tile(4, &[100, 20], matrix, matrix)?;
    let token = agent.get(&route, &tile, None)?;
    agent.wait(token, TIMEOUT)?;
    let (expected, received) = (answer_to(&question()), buffer.read()?);
    for (at, byte) in received.iter().enumerate() {
        let (row, column) = (at / 4096, at % 4096 / 4);
        let is_inside = (3..103).contains(&row) && (500..520).contains(&column);
        assert_eq!(*byte, if is_inside { expected[at] } else { 0 }, "byte {at}");
    }
    println!("got a tile of {} bytes in {} rows", tile.bytes(), tile.count());
    let token = agent.get_all(&route, None)?;
    agent.wait(token, TIMEOUT)?;
    assert!(buffer.read()? == expected, "received data is corrupted");

    // Closing its pipe ends it.
    other.finish()?;
    println!("ok: {LENGTH} bytes there and back, by {}", route.path());
    Ok(())
}

/// The second process.
fn answer(device: &str, directory: &Path) -> Result<()> {
    let mut agent = Agent::start(AgentOptions::new("answers").directory(directory))?;
    let buffer = Buffer::new(device)?;
    let region = agent.register(&buffer.memory, Rights::ALL)?;
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    agent.publish("buffer", &region)?;
    send(&mut output, &agent.card().encode()?)?;
    let card = receive(&mut input)?;
    let asking = agent.connect(&card, TIMEOUT)?;

    let notice = wait_for(&mut agent, AgentCard::decode(&card)?.identity, QUESTION)?;
    assert_eq!(notice.data(), b"all of it");
    let received = buffer.read()?;
    assert!(received == question(), "received data is corrupted");
    buffer.write(&answer_to(&received))?;
    let token = agent.notify(asking, Notice::new(ANSWER, b"")?)?;
    agent.wait(token, TIMEOUT)?;

    // The memory stays until the first process has read it.
    io::copy(&mut input, &mut io::sink())?;
    Ok(())
}

/// Waits for a notice of the other agent. Further ones, such as that of `fabricast paths --explain`, may
/// come and go.
fn wait_for(agent: &mut Agent, other: [u8; 16], tag: u64) -> Result<Notice> {
    loop {
        match agent.next_event(TIMEOUT)? {
            Event::Notice { notice, .. } if notice.tag == tag => return Ok(notice),
            Event::Left { from, label, .. } if from == other => {
                return Err(format!("\"{label}\" has left").into());
            }
            _ => {}
        }
    }
}

/// Sends the length and the bytes.
fn send(to: &mut impl Write, bytes: &[u8]) -> Result<()> {
    to.write_all(&u32::try_from(bytes.len())?.to_le_bytes())?;
    to.write_all(bytes)?;
    Ok(to.flush()?)
}

fn receive(from: &mut impl Read) -> Result<Vec<u8>> {
    /// Upper bound of the length of a card.
    const LONGEST: u32 = 1 << 16;
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > LONGEST {
        return Err("received data is not a card".into());
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A directory of both processes, removed by the first.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self> {
        let path = env::temp_dir().join(format!("fabricast-example-{}", process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The second process: this program. It ends when its pipe is closed.
struct AnsweringProcess(Child);

impl AnsweringProcess {
    fn start(device: &str, directory: &Path) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.arg("answer").arg(device).arg(directory);
        Ok(Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
    }

    fn input(&mut self) -> Result<&mut impl Write> {
        Ok(self.0.stdin.as_mut().ok_or("the process has no standard input")?)
    }

    fn output(&mut self) -> Result<&mut impl Read> {
        Ok(self.0.stdout.as_mut().ok_or("the process has no standard output")?)
    }

    fn finish(&mut self) -> Result<()> {
        drop(self.0.stdin.take());
        let status = self.0.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the second process: {status}").into()) }
    }
}

impl Drop for AnsweringProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
