//! Version and limits of the protocol between nodes.

/// First bytes of a connection.
pub(super) const MAGIC: [u8; 8] = *b"FcPeers\n";
/// Version of this build. It covers all messages between two nodes, control messages and ring
/// notifications included: a node of another version is refused at its hello.
pub(crate) const VERSION: u16 = 6;
pub(super) const MAX_FRAME_LENGTH: usize = 1 << 20;
/// The longest body of a frame that is no control message: its decoded form is larger.
pub(super) const MAX_PROTOCOL_FRAME_LENGTH: usize = 1 << 16;
/// The longest body before the session is established.
pub(super) const MAX_HANDSHAKE_FRAME_LENGTH: usize = 1 << 12;
pub(super) const MAX_CONTROL_MESSAGE_LENGTH: usize = MAX_FRAME_LENGTH - 64;
/// The longest text of a goodbye.
pub(super) const MAX_DETAIL_LENGTH: usize = 200;
/// No node may demand heartbeats more often than every quarter of this.
pub(super) const MIN_LOST_AFTER: u32 = 100;
