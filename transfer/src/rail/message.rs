//! What agents say to each other by a fabric.
//!
//! Every message begins as descriptors do (`FcRM`), then has the number of its session (8), which
//! who came made at random, its own number (8), up to which number the other side was heard (8), and
//! what it is (1). Those that have a number are [said until they are heard](super::hearing); those
//! whose number is zero begin or end a session, or are worth nothing later. A *guest* came to put and
//! get; its *host* has the regions.
//!
//! | | from | message | its parts |
//! |---|---|---|---|
//! | 1 | guest | hello | who is looked for 16, who comes 16, its node 16, visit 8, label, address |
//! | 2 | guest | open | request 8, region 8, ticket 8 |
//! | 3 | guest | stage | request 8 |
//! | 4 | guest | notice | number 8, tag 8, data |
//! | 5 | guest | deliver: from the slot to the region | chunk |
//! | 6 | guest | fetch: from the region to the slot | chunk |
//! | 7 | guest | released | region 8 |
//! | 8 | both | ping | number 8 |
//! | 9 | both | pong: also to tell what was heard | number 8 |
//! | 10 | both | bye | |
//! | 11 | host | welcome | label, notices that may be sent 8 |
//! | 12 | host | opened | request 8 |
//! | 13 | host | staging | request 8, slots 4, their length 8, the memory |
//! | 14 | host | refused | request 8, code 1, why |
//! | 15 | host | done | number of the chunk 8, code 1 (0: well), why |
//! | 16 | host | heard | notices 8, those that may be sent 8 |
//! | 17 | host | withdrawn | region 8 |
//! | 18 | guest | rouse: to stay awake for a while | |
//!
//! A visit is all that one agent does at another, by however many rails: each has a session of its
//! own, and a rail that comes back has another one. A chunk is its number 8, region 8, ticket 8, slot 4, offset 8, length 8.

use crate::agent::{LONGEST_LABEL, LONGEST_NOTICE, Notice, Refusal};
use crate::error::Result;
use crate::wire::{Form, Reader, put_counted};

const FORM: Form = Form { magic: *b"FcRM", version: 2, operation: "read a message" };
/// As long as a message can be.
pub(crate) const LONGEST: usize = 4096;
pub(crate) const LONGEST_ADDRESS: usize = 512;
const LONGEST_MEMORY: usize = 3072;

/// A part of a transfer that the host has to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The guest's; the answer has it.
    pub(super) number: u64,
    pub(super) region: u64,
    pub(super) ticket: u64,
    /// Of the staging memory that the host gave.
    pub(super) slot: u32,
    /// In the region.
    pub(super) offset: u64,
    pub(super) length: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Message {
    Hello {
        to: [u8; 16],
        from: [u8; 16],
        node: [u8; 16],
        visit: u64,
        label: String,
        address: Vec<u8>,
    },
    Open {
        request: u64,
        region: u64,
        ticket: u64,
    },
    Stage {
        request: u64,
    },
    Notice {
        number: u64,
        notice: Notice,
    },
    Deliver(Chunk),
    Fetch(Chunk),
    Released {
        region: u64,
    },
    Ping {
        number: u64,
    },
    Pong {
        number: u64,
    },
    Bye,
    Welcome {
        label: String,
        may_send: u64,
    },
    Opened {
        request: u64,
    },
    Staging {
        request: u64,
        slots: u32,
        slot_length: u64,
        memory: Vec<u8>,
    },
    Refused {
        request: u64,
        refusal: Refusal,
    },
    Done {
        number: u64,
        refusal: Option<Refusal>,
    },
    Heard {
        notices: u64,
        may_send: u64,
    },
    Withdrawn {
        region: u64,
    },
    Rouse,
}

/// A message, as it travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) session: u64,
    /// Zero if it need not be heard.
    pub(super) number: u64,
    /// Up to which number the other side was heard.
    pub(super) heard: u64,
    pub(super) message: Message,
}

/// Whom a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Host,
    Guest,
    Either,
}

impl Chunk {
    fn encode(&self, bytes: &mut Vec<u8>) {
        for word in [self.number, self.region, self.ticket] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.slot.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self {
            number: reader.u64()?,
            region: reader.u64()?,
            ticket: reader.u64()?,
            slot: reader.u32()?,
            offset: reader.u64()?,
            length: reader.u64()?,
        })
    }
}

impl Message {
    fn code(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Open { .. } => 2,
            Self::Stage { .. } => 3,
            Self::Notice { .. } => 4,
            Self::Deliver(_) => 5,
            Self::Fetch(_) => 6,
            Self::Released { .. } => 7,
            Self::Ping { .. } => 8,
            Self::Pong { .. } => 9,
            Self::Bye => 10,
            Self::Welcome { .. } => 11,
            Self::Opened { .. } => 12,
            Self::Staging { .. } => 13,
            Self::Refused { .. } => 14,
            Self::Done { .. } => 15,
            Self::Heard { .. } => 16,
            Self::Withdrawn { .. } => 17,
            Self::Rouse => 18,
        }
    }

    pub(super) fn is_for(&self) -> For {
        match self.code() {
            1..=7 | 18 => For::Host,
            11..=17 => For::Guest,
            _ => For::Either,
        }
    }

    /// Is it said until it is heard?
    pub(super) fn is_numbered(&self) -> bool {
        !matches!(
            self,
            Self::Hello { .. }
                | Self::Welcome { .. }
                | Self::Refused { request: 0, .. }
                | Self::Ping { .. }
                | Self::Pong { .. }
                | Self::Bye
                | Self::Rouse
        )
    }

    pub(super) fn encode(&self, session: u64, number: u64, heard: u64) -> Vec<u8> {
        let mut bytes = FORM.begin();
        [session, number, heard].iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.push(self.code());
        let mut words = |words: &[u64]| words.iter().for_each(|w| bytes.extend(w.to_le_bytes()));
        match self {
            Self::Hello { to, from, node, visit, label, address } => {
                [to, from, node].into_iter().for_each(|name| bytes.extend(name));
                bytes.extend(visit.to_le_bytes());
                put_counted(&mut bytes, label.as_bytes());
                put_counted(&mut bytes, address);
            }
            Self::Open { request, region, ticket } => words(&[*request, *region, *ticket]),
            Self::Notice { number, notice } => {
                words(&[*number, notice.tag]);
                put_counted(&mut bytes, notice.data());
            }
            Self::Deliver(chunk) | Self::Fetch(chunk) => chunk.encode(&mut bytes),
            Self::Stage { request: word }
            | Self::Opened { request: word }
            | Self::Released { region: word }
            | Self::Withdrawn { region: word }
            | Self::Ping { number: word }
            | Self::Pong { number: word } => words(&[*word]),
            Self::Bye | Self::Rouse => {}
            Self::Welcome { label, may_send } => {
                words(&[*may_send]);
                put_counted(&mut bytes, label.as_bytes());
            }
            Self::Staging { request, slots, slot_length, memory } => {
                words(&[*request, u64::from(*slots), *slot_length]);
                put_counted(&mut bytes, memory);
            }
            Self::Refused { request, refusal } => {
                words(&[*request]);
                refusal.put(&mut bytes);
            }
            Self::Done { number, refusal } => {
                words(&[*number]);
                match refusal {
                    Some(refusal) => refusal.put(&mut bytes),
                    None => bytes.push(0),
                }
            }
            Self::Heard { notices, may_send } => words(&[*notices, *may_send]),
        }
        // All parts have an end.
        FORM.seal(bytes).unwrap_or_default()
    }

    /// Reads what [`encode`](Self::encode) wrote, believing nothing.
    pub(super) fn decode(bytes: &[u8]) -> Result<Frame> {
        let mut reader = FORM.open(bytes)?;
        let (session, number, heard) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let [code] = reader.take()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let message = match code {
            1 => Self::Hello {
                to: reader.take()?,
                from: reader.take()?,
                node: reader.take()?,
                visit: reader.u64()?,
                label: text(reader.counted(LONGEST_LABEL)?),
                address: reader.counted(LONGEST_ADDRESS)?.to_vec(),
            },
            2 => {
                let (request, region) = (reader.u64()?, reader.u64()?);
                Self::Open { request, region, ticket: reader.u64()? }
            }
            3 => Self::Stage { request: reader.u64()? },
            4 => {
                let (number, tag) = (reader.u64()?, reader.u64()?);
                let notice = Notice::new(tag, reader.counted(LONGEST_NOTICE)?)?;
                Self::Notice { number, notice }
            }
            5 => Self::Deliver(Chunk::decode(&mut reader)?),
            6 => Self::Fetch(Chunk::decode(&mut reader)?),
            7 => Self::Released { region: reader.u64()? },
            8 => Self::Ping { number: reader.u64()? },
            9 => Self::Pong { number: reader.u64()? },
            10 => Self::Bye,
            11 => {
                let may_send = reader.u64()?;
                Self::Welcome { label: text(reader.counted(LONGEST_LABEL)?), may_send }
            }
            12 => Self::Opened { request: reader.u64()? },
            13 => {
                let (request, slots, slot_length) = (reader.u64()?, reader.u64()?, reader.u64()?);
                let slots = u32::try_from(slots).map_err(|_| FORM.malformed("so many slots"))?;
                let memory = reader.counted(LONGEST_MEMORY)?.to_vec();
                Self::Staging { request, slots, slot_length, memory }
            }
            14 => {
                let request = reader.u64()?;
                let refusal = Refusal::take(&mut reader)?;
                let refusal = refusal.ok_or_else(|| FORM.malformed("a refusal that is none"))?;
                Self::Refused { request, refusal }
            }
            15 => {
                let number = reader.u64()?;
                Self::Done { number, refusal: Refusal::take(&mut reader)? }
            }
            16 => Self::Heard { notices: reader.u64()?, may_send: reader.u64()? },
            17 => Self::Withdrawn { region: reader.u64()? },
            18 => Self::Rouse,
            _ => return Err(FORM.malformed("nothing that is known here")),
        };
        reader.finish()?;
        if message.is_numbered() != (number != 0) {
            return Err(FORM.malformed("a number where there is none, or none where there is one"));
        }
        Ok(Frame { session, number, heard, message })
    }
}

#[cfg(test)]
mod tests;
