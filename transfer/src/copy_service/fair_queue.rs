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
    blocks: VecDeque<Block>,
}

impl QueuedRequest {
    /// A request with this number; empty blocks are left out.
    pub(super) fn new(number: u64, blocks: Vec<Block>) -> Self {
        Self { number, blocks: blocks.into_iter().filter(|block| block.length > 0).collect() }
    }
}

/// A part of a request that is copied at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    client: u64,
    request: u64,
    blocks: Vec<Block>,
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

    pub(super) fn blocks(&self) -> &[Block] {
        &self.blocks
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

    /// The next piece.
    pub(super) fn next(&mut self) -> Option<Piece> {
        let queue = self.clients.front_mut()?;
        if queue.turn == 0 {
            queue.turn = TURN;
        }
        let request = queue.requests.front_mut()?;
        let mut piece = Piece {
            client: queue.client,
            request: request.number,
            blocks: Vec::new(),
            bytes: 0,
            is_last: false,
        };
        while piece.bytes < queue.turn
            && let Some(block) = request.blocks.front_mut()
        {
            let length = block.length.min(queue.turn - piece.bytes);
            piece.blocks.push(Block { length, ..*block });
            piece.bytes += length;
            *block = Block {
                to: block.to + length,
                from: block.from + length,
                length: block.length - length,
            };
            if block.length == 0 {
                request.blocks.pop_front();
            }
        }
        queue.turn -= piece.bytes;
        piece.is_last = request.blocks.is_empty();
        if piece.is_last {
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
        QueuedRequest { number, blocks: blocks.collect() }
    }

    fn drain(queue: &mut FairQueue) -> Vec<Piece> {
        std::iter::from_fn(|| queue.next()).collect()
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
                wanted.insert((*client, number as u64), request.blocks.iter().copied().collect());
                *left.entry(*client).or_default() += lengths.iter().sum::<u64>();
                queue.push(*client, request);
            }
            let mut served: HashMap<u64, u64> = left.keys().map(|client| (*client, 0)).collect();
            let mut copied: HashMap<(u64, u64), Vec<Block>> = HashMap::new();
            while let Some(piece) = queue.next() {
                prop_assert!(piece.bytes <= TURN && piece.bytes > 0);
                *served.get_mut(&piece.client).unwrap() += piece.bytes;
                *left.get_mut(&piece.client).unwrap() -= piece.bytes;
                let blocks = copied.entry((piece.client, piece.request)).or_default();
                for block in piece.blocks {
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
