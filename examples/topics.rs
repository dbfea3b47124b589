//! Two processes and a topic: one publishes messages, the other reads them in place, without a
//! copy.
//!
//! ```text
//! cargo run --locked --release --example topics              # messages in the host's memory
//! cargo run --locked --release --example topics -- cuda:0    # or a device's, or emulated:0
//! ```
//!
//! Both join the node of a directory; no service has to be started, since one of the processes
//! serves the node. Any number of readers could run, started in any order. A message is written
//! once, into memory that all map; the publisher waits while sixteen messages are not released.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;
use std::{env, fs, process};

use fabricast::pubsub::{Node, NodeOptions, TopicSettings};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);
const MESSAGES: u64 = 100;
const LENGTH: u64 = 1 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => publish("host"),
        [memory] => publish(memory),
        ["read", directory] => read(Path::new(directory)),
        _ => Err("usage: topics [MEMORY]".into()),
    }
}

fn join(directory: &Path, label: &str) -> Result<Node> {
    let (directory, label) = (directory.to_owned(), label.to_owned());
    Ok(Node::join(NodeOptions { directory, label, ..Default::default() })?)
}

/// Content of a message: no two are equal.
fn content(number: u64) -> Vec<u8> {
    (0..LENGTH / 8).flat_map(|word| (number << 32 | word).to_le_bytes()).collect()
}

/// The first process: the publisher.
fn publish(memory: &str) -> Result<()> {
    let directory = Directory::make()?;
    let node = join(&directory.0, "publishes")?;
    let settings = TopicSettings { memory: memory.parse()?, largest: LENGTH, ..Default::default() };
    let publisher = node.topic("numbers", &settings)?.publisher()?;
    let mut reader = Reader::start(&directory.0)?;
    publisher.wait_for_subscribers(1, TIMEOUT)?;
    for number in 0..MESSAGES {
        // Memory of the topic. A program that can write there directly, for example a kernel, needs
        // no copy: `loan.slice()` is its address.
        let mut loan = publisher.loan(LENGTH, TIMEOUT)?;
        loan.write(0, &content(number))?;
        loan.set_metadata(format!("number {number}").as_bytes())?;
        loan.publish(TIMEOUT)?;
    }
    // All messages were read and released.
    publisher.flush(TIMEOUT)?;
    reader.finish()?;
    println!("ok: {MESSAGES} messages of {LENGTH} bytes, on {memory}");
    Ok(())
}

/// The second process: the subscriber. It uses the topic as it is.
fn read(directory: &Path) -> Result<()> {
    let mut subscriber = join(directory, "reads")?.subscribe("numbers", TIMEOUT)?;
    for (number, sample) in (0..MESSAGES).zip(subscriber.samples(TIMEOUT)) {
        // The message in place. It is released when the sample is dropped.
        let sample = sample?;
        assert_eq!(&*sample.metadata(), format!("number {number}").as_bytes());
        assert!(sample.to_vec()? == content(number), "received data is corrupted");
    }
    assert_eq!(subscriber.missed(), 0);
    Ok(())
}

/// A directory of both processes, removed by the first.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self> {
        let path = env::temp_dir().join(format!("fabricast-topics-example-{}", process::id()));
        fs::create_dir(&path)?;
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The second process: this program.
struct Reader(Child);

impl Reader {
    fn start(directory: &Path) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        Ok(Self(command.arg("read").arg(directory).spawn()?))
    }

    fn finish(&mut self) -> Result<()> {
        let status = self.0.wait()?;
        if status.success() { Ok(()) } else { Err(format!("the reader: {status}").into()) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
