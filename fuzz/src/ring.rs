//! A hostile writer for a ring's reader. Also a part of `fabric/tests/ring_corpus.rs`, which
//! replays the corpus.

use fabric::ring::{
    ChunkHeader, ChunkLayout, HEADER_LEN, HeaderLocation, Immediate, ProtocolError, ReaderState,
    RingGeometry, RingNotice,
};

const CAPACITY: u64 = 4096;
const EPOCH: u32 = 5;
const RING: u16 = 7;

/// The bytes as a script of actions and numbers. It ends in zeros.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let length = self.0.len().min(N);
        taken[..length].copy_from_slice(&self.0[..length]);
        self.0 = &self.0[length..];
        taken
    }

    fn byte(&mut self) -> u64 {
        u64::from(self.take::<1>()[0])
    }

    fn number(&mut self) -> u64 {
        u64::from(u16::from_le_bytes(self.take()))
    }
}

/// The memory that the peer can write.
struct Memory {
    ring: Vec<u8>,
    headers: Vec<u8>,
}

impl Memory {
    fn look(&self, location: HeaderLocation) -> [u8; HEADER_LEN as usize] {
        let (memory, at) = match location {
            HeaderLocation::Ring(at) => (&self.ring, at as usize),
            HeaderLocation::Headers(at) => (&self.headers, at as usize),
        };
        let found = &memory[at..at + HEADER_LEN as usize];
        found.try_into().expect("the slice has a header's length")
    }

    fn write(&mut self, is_apart: bool, slot: u64, bytes: &[u8]) {
        let memory = if is_apart { &mut self.headers } else { &mut self.ring };
        let at = (slot * HEADER_LEN) as usize % memory.len();
        memory[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Checks that header and codec decode what they encoded. Whatever the peer does, the reader
/// returns no range outside of the ring, sends no credit beyond what was read, and does not panic.
/// Returns the number of chunks taken.
#[allow(unreachable_pub)] // the replay has it as a module of its own
pub fn play(script: &[u8]) -> usize {
    let mut script = Script(script);
    let layout =
        [ChunkLayout::InlineHeader, ChunkLayout::SeparateHeader][script.byte() as usize % 2];
    let geometry = RingGeometry::new(CAPACITY, RING).expect("a valid geometry").with_layout(layout);
    let mut reader = ReaderState::new(geometry, EPOCH, CAPACITY / 4);
    let headers = vec![0; (geometry.max_chunks() * HEADER_LEN) as usize];
    let mut memory = Memory { ring: vec![0; CAPACITY as usize], headers };
    let (mut held, mut taken) = (Vec::new(), 0);
    while !script.0.is_empty() {
        match script.byte() % 8 {
            // Any notification.
            0 => {
                let bits = u32::from_le_bytes(script.take());
                let immediate = Immediate::decode(bits);
                assert_eq!(Immediate::decode(immediate.encode()), immediate);
                if reader.notice(&immediate, script.number()).is_err() {
                    return taken;
                }
            }
            // A notification for this ring.
            1 => {
                let (kind, amount) = (script.byte(), script.number() as u16);
                let notice = match kind % 4 {
                    0 => RingNotice::WriterClosed { sequence: amount },
                    _ => RingNotice::Chunk { sequence: amount },
                };
                let immediate = Immediate { ring: RING, epoch: EPOCH, notice };
                let length = if kind & 4 == 0 { 0 } else { script.number() };
                if reader.notice(&immediate, length).is_err() {
                    return taken;
                }
            }
            // Any bytes where headers are read.
            2 => {
                let (slot, bytes) = (script.byte(), script.take::<{ HEADER_LEN as usize }>());
                if let Some(header) = ChunkHeader::decode(&bytes) {
                    assert_eq!(header.encode(), bytes);
                }
                memory.write(layout == ChunkLayout::SeparateHeader, slot, &bytes);
            }
            // A header with a valid checksum.
            3 => {
                let slot = script.byte();
                let odd = script.byte();
                let large = |bit: u64| if odd & bit == 0 { 0 } else { u64::MAX << 40 };
                let header = ChunkHeader {
                    epoch: EPOCH,
                    position: (script.number() * 8).wrapping_add(large(1)),
                    sequence: script.byte().wrapping_add(large(2)),
                    message: script.byte().wrapping_add(large(4)),
                    length: script.number().wrapping_add(large(8)),
                    offset: script.number().wrapping_add(large(16)),
                    payload: script.number() as u32 | large(32) as u32,
                    topic: script.byte() as u32,
                };
                memory.write(layout == ChunkLayout::SeparateHeader, slot, &header.encode());
            }
            4 => {
                let credited_head = reader.credit(script.byte() & 1 == 0);
                assert!(credited_head.is_none() || reader.credited_head() == reader.head());
            }
            5 if !held.is_empty() => {
                let at = script.byte() as usize % held.len();
                let before = reader.head();
                reader.release(held.swap_remove(at));
                assert!(reader.head() >= before, "the head went back");
            }
            _ => {
                let arrived = match reader.take(|location| memory.look(location)) {
                    Ok(Some(arrived)) => arrived,
                    Ok(None) => continue,
                    Err(error) => {
                        let _: ProtocolError = error;
                        return taken;
                    }
                };
                let (offset, payload) = (arrived.offset, u64::from(arrived.header.payload));
                assert!(offset + payload <= CAPACITY, "outside of the ring: {arrived:?}");
                assert!(arrived.header.offset + payload <= arrived.header.length);
                held.push(arrived.release_token);
                taken += 1;
            }
        }
        assert!(reader.credited_head() <= reader.head());
        assert!(reader.unreleased().end - reader.unreleased().start >= held.len() as u64);
    }
    taken
}
