//! Tests of handshake frames (complete, in pieces, malformed), and of rings that the handshake
//! would not choose.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::frame::{Frame, FramedStream, MAX_FRAME_LEN, VERSION, encode, take_frame};
use super::writer::SLOT_LEN;
use super::{ProviderProtocol, RingKey, RingReader, RingWriter, provider_choice};
use crate::ring::{NotifyMode, Port, ReceiverId, RingOptions};
use crate::{Address, ErrorKind, Policy};

const TIMEOUT: Duration = Duration::from_secs(20);
const LARGEST: u64 = 1 << 20;

/// The reader's side of a ring, without a progress thread.
struct Reading {
    port: Port,
    ring: ReceiverId,
    stream: TcpStream,
    writer: SocketAddr,
}

/// Both sides of a ring with this notify mode.
fn pair_by(notify: NotifyMode) -> (Reading, RingWriter) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let from_writer = TcpStream::connect(address).unwrap();
    let (from_reader, peer) = listener.accept().unwrap();
    let [from_writer, from_reader] =
        [from_writer, from_reader].map(|it| FramedStream::new(it).unwrap().into_stream().unwrap());

    let [(mut reader, reader_peers), (mut writer, writer_peers)] = [(), ()].map(|()| {
        let here = Some(Ipv4Addr::LOCALHOST.into());
        let (_, offer) =
            provider_choice::usable_providers(here, &Policy::default()).unwrap().remove(0);
        provider_choice::open(&offer).unwrap()
    });
    let to_reader = writer_peers.insert(&reader.endpoint().address().unwrap()).unwrap();
    let to_writer = reader_peers.insert(&writer.endpoint().address().unwrap()).unwrap();
    let options = RingOptions::new(reader.endpoint(), LARGEST).unwrap();
    let ring = reader.offer(&RingOptions { notify, ..options }).unwrap();
    let ring_offer = reader.ring_offer(ring).unwrap();
    let (writing, answer) = writer.accept(to_reader, &ring_offer, SLOT_LEN as u64).unwrap();
    reader.connect(ring, to_writer, &answer).unwrap();
    let provider = "any".to_owned();
    let writer = RingWriter::start(writer, writing, from_writer, (address, provider), LARGEST);
    (Reading { port: reader, ring, stream: from_reader, writer: peer }, writer.unwrap())
}

/// Processor time of all progress threads of rings in this process.
fn time_of_threads() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let name_of = |task: &std::path::PathBuf| std::fs::read_to_string(task.join("comm"));
    let threads = tasks.filter(|task| name_of(task).is_ok_and(|it| it.trim() == "fabricast-ring"));
    let ticks = threads.map(|task| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap();
        let behind_name = stat.rsplit(')').next().unwrap();
        let ticks = behind_name.split_whitespace().skip(11).take(2);
        ticks.map(|it| it.parse::<u64>().unwrap()).sum::<u64>()
    });
    // USER_HZ is 100 on all supported machines.
    Duration::from_millis(10 * ticks.sum::<u64>())
}

#[test]
fn idle_ring_in_message_mode_uses_little_cpu() {
    let (Reading { port, ring, stream, writer: peer }, mut writer) = pair_by(NotifyMode::Message);
    let provider = "any".to_owned();
    let mut reader = RingReader::start(port, ring, stream, (peer, provider), LARGEST).unwrap();
    for message in [b"first", b"other"] {
        writer.send(message, TIMEOUT).unwrap();
        assert_eq!(reader.receive(TIMEOUT).unwrap(), message);
        // Long enough for the threads to reach their longest pauses.
        std::thread::sleep(Duration::from_millis(200));
    }
    let before = time_of_threads();
    std::thread::sleep(Duration::from_secs(2));
    let taken = time_of_threads() - before;
    assert!(taken <= Duration::from_millis(100), "{taken:?} of 2 s, by two threads");
    writer.send(b"last", TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap(), b"last");
    writer.close(TIMEOUT).unwrap();
    assert_eq!(reader.receive(TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn writer_closes_in_time_after_only_tcp_disconnected() {
    let (Reading { mut port, ring, stream, .. }, mut writer) = pair_by(NotifyMode::Immediate);
    let writing = std::thread::spawn(move || {
        writer.send(b"message", TIMEOUT).unwrap();
        writer.flush(TIMEOUT).unwrap();
        writer
    });
    drop(port.receive(ring, TIMEOUT).unwrap());
    while !writing.is_finished() {
        let _ = port.wait(Duration::from_millis(1)).unwrap();
    }
    let writer = writing.join().unwrap();
    // From now on the endpoint exists and does not answer.
    drop(stream);
    let before = Instant::now();
    assert_eq!(writer.close(TIMEOUT).unwrap().messages, 1);
    assert!(before.elapsed() < Duration::from_secs(5), "{:?}", before.elapsed());
}

fn frames() -> Vec<Frame> {
    let wire = ProviderProtocol { name: "tcp".into(), protocol: 25, address_format: 2 };
    vec![
        Frame::Hello {
            providers: vec![
                wire.clone(),
                ProviderProtocol { name: "verbs;ofi_rxm".into(), ..wire.clone() },
            ],
            key: Some(RingKey([9; 16])),
        },
        Frame::Selected { provider: wire, address: Address(vec![7; 16]) },
        Frame::Address(Address(vec![0; 64])),
        Frame::Ready,
        Frame::Refused { is_provider_error: true, reason: "none in common".into() },
    ]
}

#[test]
fn frames_arrive_in_any_pieces() {
    let frames = frames();
    let bytes: Vec<u8> = frames.iter().flat_map(encode).collect();
    for piece in 1..bytes.len() {
        let (mut received, mut got) = (Vec::new(), Vec::new());
        for part in bytes.chunks(piece) {
            received.extend_from_slice(part);
            while let Some(frame) = take_frame(&mut received).unwrap() {
                got.push(frame);
            }
        }
        assert_eq!(got, frames, "in pieces of {piece}");
        assert!(received.is_empty());
    }
}

#[test]
fn malformed_frames_are_refused() {
    let kind = |bytes: &[u8]| take_frame(&mut bytes.to_vec()).unwrap_err().kind();
    let good = encode(&Frame::Ready);
    // At the first byte, not once a whole header has arrived.
    for garbage in [&b"G"[..], b"FcRg\0\0\0\0", b"GET / HTTP/1.1\r\n"] {
        assert_eq!(kind(garbage), ErrorKind::MalformedDescriptor, "{garbage:?}");
    }
    for length in [0, MAX_FRAME_LEN as u32 + 1, u32::MAX] {
        let mut bytes = good.clone();
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        assert_eq!(kind(&bytes), ErrorKind::MalformedDescriptor, "{length} bytes");
    }
    let mut newer = good.clone();
    newer[8] = VERSION + 1;
    let error = take_frame(&mut newer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    assert!(
        error.to_string().contains("version 3") && error.to_string().contains("build 2"),
        "{error}"
    );
    let mut trailing = good;
    trailing[4] += 1;
    trailing.push(0);
    assert_eq!(kind(&trailing), ErrorKind::MalformedDescriptor);
}

proptest! {
    #[test]
    fn any_bytes_are_a_frame_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = take_frame(&mut bytes.clone());
        // With a valid header, so that the frame itself is decoded.
        let length = (bytes.len() as u32).to_le_bytes();
        bytes.splice(0..0, [b"FcRn".as_slice(), &length].concat());
        let _ = take_frame(&mut bytes);
    }

    #[test]
    fn changed_frames_are_a_frame_or_refused(which in 0_usize..5, at in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = encode(&frames()[which]);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let _ = take_frame(&mut bytes);
    }
}
