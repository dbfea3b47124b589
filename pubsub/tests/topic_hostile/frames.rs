//! Bytes that nodes and providers say first.

/// What the asking node says after its hello: let this be our session, instead of none.
const CLAIM: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// The hello of a node, as it was heard, and a claim behind it.
pub fn claim_as(hello: &[u8]) -> Vec<u8> {
    [hello, &CLAIM].concat()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn of_hex(text: &str) -> Vec<u8> {
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).expect("two digits");
        u8::from_str_radix(pair, 16).expect("two digits")
    };
    text.as_bytes().chunks(2).map(byte).collect()
}
