//! The first bytes of a connection of the provider `net`, which does not verify them.

/// A connect request that names an endpoint by its port. To `net` of libfabric 1.17 the sender is a new
/// process with that endpoint.
#[allow(unreachable_pub)]
pub fn connect_request(port: u16) -> [u8; 40] {
    let mut bytes = [0; 40];
    // Version, kind and length of the rest.
    bytes[..4].copy_from_slice(&[3, 0, 0, 8]);
    bytes[24..32].copy_from_slice(&1_u64.to_ne_bytes());
    bytes[34..36].copy_from_slice(&port.to_be_bytes());
    bytes[36..].copy_from_slice(&0x7fff_fff0_u32.to_be_bytes());
    bytes
}
