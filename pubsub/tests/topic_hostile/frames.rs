//! Bytes that nodes and providers say first.

/// What the asking node says after its hello: let this be our session, instead of none.
const CLAIM: [u8; 6] = [2, 0, 0, 0, 0, 0];

/// The hello of a node, as it was heard, and a claim behind it.
pub fn claim_as(hello: &[u8]) -> Vec<u8> {
    [hello, &CLAIM].concat()
}

/// What `net` of libfabric 1.17 takes for the first words of the endpoint at that port, of the
/// address that it comes from.
pub fn connect_request(port: u16) -> [u8; 40] {
    let mut bytes = [0; 40];
    // Version, kind and length of what follows.
    bytes[..4].copy_from_slice(&[3, 0, 0, 8]);
    bytes[24..32].copy_from_slice(&1_u64.to_ne_bytes());
    bytes[34..36].copy_from_slice(&port.to_be_bytes());
    bytes[36..].copy_from_slice(&0x7fff_fff0_u32.to_be_bytes());
    bytes
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
