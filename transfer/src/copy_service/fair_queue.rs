//! Requests of several clients for one stream of a device, served in turn by bytes.

use std::collections::VecDeque;

use gpu::Block;

/// Bytes of a client before it is the turn of the next one. A device pauses about 5 µs between two
/// copies: 3 % of the time that NVLink needs for so many bytes.
pub(super) const TURN: u64 = 64 << 20;

/// A request, or what is left of it.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    number: u64,
    /// Without empty ones.
    blocks: Vec<Block>,
    /// The first block that is left, wholly or in part.
    next: usize,
}

impl QueuedRequest {
    /// A request with this number; empty blocks are left out.
    pub(super) fn new(number: u64, mut blocks: Vec<Block>) -> Self {
        blocks.retain(|block| block.length > 0);
        Self { number, blocks, next: 0 }
    }

    /// Appends blocks of at most so many bytes, and returns their bytes.
    fn take(&mut self, most: u64, into: &mut Vec<Block>) -> u64 {
        let left = &mut self.blocks[self.next..];
        let (mut bytes, mut whole) = (0, 0);
        while let Some(block) = left.get(whole)
            && block.length <= most - bytes
        {
            bytes += block.length;
            whole += 1;
        }
        into.extend_from_slice(&left[..whole]);
        self.next += whole;
        let length = most - bytes;
        if let Some(block) = left.get_mut(whole)
            && length > 0
        {
            let Block { to, from, length: of } = *block;
            into.push(Block { to, from, length });
            *block = Block { to: to + length, from: from + length, length: of - length };
            bytes += length;
        }
        bytes
    }

    fn is_empty(&self) -> bool {
        self.next == self.blocks.len()
    }
}

/// A part of a request that is copied at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    client: u64,
    request: u64,
    bytes: u64,
    is_last: bool,
}

impl Piece {
    pub(super) fn client(&self) -> u64 {
        self.client
    }

    pub(super) fn request(&self) -> u64 {
        self.request
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Is it the last one of its request?
    pub(super) fn is_last(&self) -> bool {
        self.is_last
    }
}

#[derive(Debug)]
struct ClientQueue {
    client: u64,
    /// Bytes that are left of its turn; 0 before it begins.
    turn: u64,
    requests: VecDeque<QueuedRequest>,
}

/// The clients with requests, in the order of their turns.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    clients: VecDeque<ClientQueue>,
}

impl FairQueue {
    /// Adds a request, which has blocks, behind those of its client.
    pub(super) fn push(&mut self, client: u64, request: QueuedRequest) {
        match self.clients.iter_mut().find(|queue| queue.client == client) {
            Some(queue) => queue.requests.push_back(request),
            None => {
                let requests = VecDeque::from([request]);
                self.clients.push_back(ClientQueue { client, turn: 0, requests });
            }
        }
    }

    /// The next piece, and its blocks.
    pub(super) fn next(&mut self, blocks: &mut Vec<Block>) -> Option<Piece> {
        blocks.clear();
        let queue = self.clients.front_mut()?;
        if queue.turn == 0 {
            queue.turn = TURN;
        }
        let request = queue.requests.front_mut()?;
        let bytes = request.take(queue.turn, blocks);
        queue.turn -= bytes;
        let is_last = request.is_empty();
        let piece = Piece { client: queue.client, request: request.number, bytes, is_last };
        if is_last {
            queue.requests.pop_front();
        }
        if queue.requests.is_empty() {
            self.clients.pop_front();
        } else if queue.turn == 0 {
            self.clients.rotate_left(1);
        }
        Some(piece)
    }

    /// Removes all requests of a client, and returns their numbers.
    pub(super) fn remove(&mut self, client: u64) -> impl Iterator<Item = u64> {
        let found = self.clients.iter().position(|queue| queue.client == client);
        let queue = found.and_then(|at| self.clients.remove(at));
        queue.into_iter().flat_map(|queue| queue.requests).map(|request| request.number)
    }

    /// Removes what is left of a request of a client.
    pub(super) fn remove_request(&mut self, client: u64, number: u64) {
        let Some(at) = self.clients.iter().position(|queue| queue.client == client) else { return };
        let queue = &mut self.clients[at];
        queue.requests.retain(|request| request.number != number);
        if queue.requests.is_empty() {
            self.clients.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn request(number: u64, lengths: &[u64]) -> QueuedRequest {
        let mut at = 0;
        let blocks = lengths.iter().map(|length| {
            at += length;
            Block { to: at - length, from: at - length + 7, length: *length }
        });
        QueuedRequest::new(number, blocks.collect())
    }

    fn drain(queue: &mut FairQueue) -> Vec<Piece> {
        std::iter::from_fn(|| queue.next(&mut Vec::new())).collect()
    }

    #[test]
    fn clients_take_turns_by_bytes() {
        let mut queue = FairQueue::default();
        queue.push(1, request(0, &[3 * TURN]));
        // Many requests make no larger share.
        (0..8).for_each(|number| queue.push(2, request(number, &[TURN / 4])));
        queue.push(3, request(0, &[5]));
        let turns: Vec<_> = drain(&mut queue).iter().map(|it| (it.client, it.bytes)).collect();
        let quarters = [(2, TURN / 4); 4];
        let mut expected = vec![(1, TURN)];
        expected.extend(quarters);
        expected.extend([(3, 5), (1, TURN)]);
        expected.extend(quarters);
        expected.push((1, TURN));
        assert_eq!(turns, expected);
    }

    #[test]
    fn removed_requests_are_not_served() {
        let mut queue = FairQueue::default();
        queue.push(1, request(4, &[1]));
        queue.push(1, request(5, &[1]));
        queue.push(2, request(6, &[1]));
        queue.push(3, request(7, &[1]));
        assert_eq!(queue.remove(1).collect::<Vec<_>>(), [4, 5]);
        queue.remove_request(3, 7);
        queue.remove_request(3, 7);
        assert_eq!(queue.remove(9).count(), 0);
        assert_eq!(drain(&mut queue).iter().map(|it| it.request).collect::<Vec<_>>(), [6]);
    }

    proptest! {
        #[test]
        fn each_byte_is_copied_once_and_shares_are_equal(
            lengths in proptest::collection::vec(
                (0_u64..4, proptest::collection::vec(1_u64..3 * TURN, 1..6)), 1..20,
            ),
        ) {
            let mut queue = FairQueue::default();
            let mut wanted: HashMap<(u64, u64), Vec<Block>> = HashMap::new();
            let mut left: HashMap<u64, u64> = HashMap::new();
            for (number, (client, lengths)) in lengths.iter().enumerate() {
                let request = request(number as u64, lengths);
                wanted.insert((*client, number as u64), request.blocks.clone());
                *left.entry(*client).or_default() += lengths.iter().sum::<u64>();
                queue.push(*client, request);
            }
            let mut served: HashMap<u64, u64> = left.keys().map(|client| (*client, 0)).collect();
            let mut copied: HashMap<(u64, u64), Vec<Block>> = HashMap::new();
            let mut of_piece = Vec::new();
            while let Some(piece) = queue.next(&mut of_piece) {
                prop_assert_eq!(of_piece.iter().map(|it| it.length).sum::<u64>(), piece.bytes);
                prop_assert!(piece.bytes <= TURN && piece.bytes > 0);
                *served.get_mut(&piece.client).unwrap() += piece.bytes;
                *left.get_mut(&piece.client).unwrap() -= piece.bytes;
                let blocks = copied.entry((piece.client, piece.request)).or_default();
                for block in of_piece.iter().copied() {
                    match blocks.last_mut() {
                        Some(last) if last.to + last.length == block.to
                            && last.length < wanted[&(piece.client, piece.request)]
                                .iter().find(|it| it.to == last.to).unwrap().length =>
                        {
                            last.length += block.length;
                        }
                        _ => blocks.push(block),
                    }
                }
                prop_assert_eq!(
                    piece.is_last,
                    copied[&(piece.client, piece.request)] == wanted[&(piece.client, piece.request)]
                );
                // Among clients that still wait, none is more than two turns ahead.
                let waiting: Vec<_> =
                    served.iter().filter(|(client, _)| left[client] > 0).map(|it| *it.1).collect();
                if let (Some(most), Some(least)) = (waiting.iter().max(), waiting.iter().min()) {
                    prop_assert!(most - least <= 2 * TURN, "{:?}", served);
                }
            }
            prop_assert_eq!(copied, wanted);
        }
    }
}
