//! The first frames of a session between nodes.

/// The frame by which the claimant, after its hello, claims this connection as the only session.
const CLAIM: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// A recorded hello of a node, followed by a claim.
pub fn claim_as(hello: &[u8]) -> Vec<u8> {
    [hello, &CLAIM].concat()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn of_hex(text: &str) -> Vec<u8> {
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).expect("two hex digits");
        u8::from_str_radix(pair, 16).expect("two hex digits")
    };
    text.as_bytes().chunks(2).map(byte).collect()
}
