//! A ring between two programs: one listens and reads, the other connects and writes. On two machines:
//!
//! ```sh
//! cargo run --locked --example ring_connection -- listen 10.0.0.1:7000      # on 10.0.0.1
//! cargo run --locked --example ring_connection -- connect 10.0.0.1:7000     # on another machine
//! ```
//!
//! Without arguments both run, in two threads. `examples/ring.rs` shows the level below: endpoints,
//! and offers that the application sends.

use std::time::Duration;

use fabricast::fabric::ring::{RingListener, RingSetup};
use fabricast::fabric::{ErrorKind, Result};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of the ring, and of the messages: some are several times longer.
const RING: u64 = 256 << 10;
const LENGTHS: [usize; 5] = [0, 64, 5000, 1 << 20, 3];

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // Any process that can connect can write messages: use it in trusted networks only.
    let setup = RingSetup::new().capacity(RING).insecure();
    match words[..] {
        [] => {
            let listener = setup.listen("127.0.0.1:0")?;
            let address = listener.address().to_string();
            let writer = std::thread::spawn(move || write(&setup, &address));
            read(listener)?;
            writer.join().expect("the writer panicked")
        }
        ["listen", address] => read(setup.listen(address)?),
        ["connect", address] => write(&setup, address),
        _ => panic!("listen HOST:PORT, connect HOST:PORT, or nothing"),
    }
}

fn read(mut listener: RingListener) -> Result<()> {
    println!("listening at {}", listener.address());
    let mut reader = listener.accept(TIMEOUT)?;
    println!("{} writes, through {}", reader.peer(), reader.provider());
    let mut messages = 0;
    loop {
        match reader.receive(TIMEOUT) {
            Ok(message) => {
                assert!(message == pattern(messages), "message {messages}");
                messages += 1;
            }
            // The writer closed the ring, and everything was read. Anything else is an error.
            Err(error) if error.kind() == ErrorKind::Closed => break,
            Err(error) => return Err(error),
        }
    }
    assert_eq!(messages, LENGTHS.len());
    println!("ok: {messages} messages");
    Ok(())
}

fn write(setup: &RingSetup, address: &str) -> Result<()> {
    let mut writer = setup.connect(address, TIMEOUT)?;
    for number in 0..LENGTHS.len() {
        writer.send(&pattern(number), TIMEOUT)?;
    }
    // Waits until everything was read.
    writer.close(TIMEOUT)?;
    Ok(())
}

fn pattern(number: usize) -> Vec<u8> {
    (0..LENGTHS[number]).map(|at| (at * 7 + number) as u8).collect()
}
