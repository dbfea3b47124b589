//! Frames of the handshake: whole, in pieces, and from outside.

use proptest::prelude::*;

use super::frame::{Frame, LONGEST, VERSION, Wire, encode, take_frame};
use crate::{Address, ErrorKind};

fn frames() -> Vec<Frame> {
    let wire = Wire { name: "tcp".into(), protocol: 25, address_format: 2 };
    vec![
        Frame::Hello {
            providers: vec![wire.clone(), Wire { name: "verbs;ofi_rxm".into(), ..wire.clone() }],
        },
        Frame::Chosen { provider: wire, address: Address(vec![7; 16]) },
        Frame::Address(Address(vec![0; 64])),
        Frame::Ready,
        Frame::Refused { is_provider: true, reason: "none in common".into() },
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
fn frames_that_are_none_are_refused() {
    let kind = |bytes: &[u8]| take_frame(&mut bytes.to_vec()).unwrap_err().kind();
    let good = encode(&Frame::Ready);
    // At the first byte, not once a whole head is there.
    for garbage in [&b"G"[..], b"FcRg\0\0\0\0", b"GET / HTTP/1.1\r\n"] {
        assert_eq!(kind(garbage), ErrorKind::MalformedDescriptor, "{garbage:?}");
    }
    for length in [0, LONGEST as u32 + 1, u32::MAX] {
        let mut bytes = good.clone();
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        assert_eq!(kind(&bytes), ErrorKind::MalformedDescriptor, "{length} bytes");
    }
    let mut newer = good.clone();
    newer[8] = VERSION + 1;
    let error = take_frame(&mut newer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    assert!(
        error.to_string().contains("version 2") && error.to_string().contains("build 1"),
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
        // With a good head, so that the frame itself is looked at.
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
