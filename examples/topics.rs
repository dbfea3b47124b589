//! Two processes and a topic: one publishes messages, the other one reads them where they lie,
//! without a copy.
//!
//! ```text
//! cargo run --release --example topics              # messages in the host's memory
//! cargo run --release --example topics -- cuda:0    # or a device's, or emulated:0
//! ```
//!
//! Both join the node of a directory; nothing has to be started before, since one of the processes
//! serves it. Any number of readers could be there, in any order. A message is written once, into
//! memory that all map; the publisher waits when sixteen of them were not given back yet.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;
use std::{env, fs, process};

use fabricast::pubsub::{Node, NodeOptions, TopicSettings};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// No wait is longer.
const PATIENCE: Duration = Duration::from_secs(20);
const MESSAGES: u64 = 100;
const LENGTH: u64 = 1 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => publish("host"),
        [place] => publish(place),
        ["read", directory] => read(Path::new(directory)),
        _ => Err("usage: topics [PLACE]".into()),
    }
}

fn join(directory: &Path, label: &str) -> Result<Node> {
    let (directory, label) = (directory.to_owned(), label.to_owned());
    Ok(Node::join(NodeOptions { directory, label, ..Default::default() })?)
}

/// What is in a message: no two are the same.
fn content(number: u64) -> Vec<u8> {
    (0..LENGTH / 8).flat_map(|word| (number << 32 | word).to_le_bytes()).collect()
}

/// The first process.
fn publish(place: &str) -> Result<()> {
    let directory = Directory::make()?;
    let node = join(&directory.0, "publishes")?;
    let settings = TopicSettings { memory: place.parse()?, largest: LENGTH, ..Default::default() };
    let publisher = node.topic("numbers", &settings)?.publisher()?;
    let mut reader = Reader::start(&directory.0)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    for number in 0..MESSAGES {
        // Memory of the topic's own. A program that can write there directly, a kernel for
        // example, needs no copy at all: `loan.slice()` says where it is.
        let mut loan = publisher.loan(LENGTH, PATIENCE)?;
        loan.write(0, &content(number))?;
        loan.set_metadata(format!("number {number}").as_bytes())?;
        loan.publish(PATIENCE)?;
    }
    // All of them were read, and given back.
    publisher.flush(PATIENCE)?;
    reader.finish()?;
    println!("ok: {MESSAGES} messages of {LENGTH} bytes, on {place}");
    Ok(())
}

/// The second process. It takes the topic as it is.
fn read(directory: &Path) -> Result<()> {
    let mut subscriber = join(directory, "reads")?.subscribe("numbers", PATIENCE)?;
    for (number, sample) in (0..MESSAGES).zip(subscriber.samples(PATIENCE)) {
        // The message as it lies there. It is given back when the sample is dropped.
        let sample = sample?;
        assert_eq!(&*sample.metadata(), format!("number {number}").as_bytes());
        assert!(sample.to_vec()? == content(number), "other bytes came");
    }
    assert_eq!(subscriber.missed(), 0);
    Ok(())
}

/// A directory that both see, and that goes with the first process.
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

/// This program again.
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
