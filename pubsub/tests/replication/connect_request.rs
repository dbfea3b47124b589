//! The first bytes of a connection of the provider `net`, which believes what they say.

/// What `net` of libfabric 1.17 takes for the first words of the endpoint at that port, of the address that
/// it comes from, in another process than those that it knows.
#[allow(unreachable_pub)]
pub fn connect_request(port: u16) -> [u8; 40] {
    let mut bytes = [0; 40];
    // Version, kind and length of what follows.
    bytes[..4].copy_from_slice(&[3, 0, 0, 8]);
    bytes[24..32].copy_from_slice(&1_u64.to_ne_bytes());
    bytes[34..36].copy_from_slice(&port.to_be_bytes());
    bytes[36..].copy_from_slice(&0x7fff_fff0_u32.to_be_bytes());
    bytes
}
