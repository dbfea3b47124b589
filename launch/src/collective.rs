//! Collectives for set-up, as the rounds of one rank: barrier, broadcast, all-gather.
//!
//! Each takes ceil(log2(ranks)) rounds. In round k a rank exchanges with the rank at distance 2^k.
//! Nothing here sends or waits.

/// A round of a collective, for one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Round {
    /// The number of the round: the same for sender and receiver of a message.
    pub(crate) number: u8,
    /// What to send, and to which rank.
    pub(crate) send: Option<(u32, Vec<u8>)>,
    pub(crate) receive: Option<Source>,
}

/// The rank that a message comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) rank: u32,
    /// The rank sends as soon as it takes part, without a message from others: if its message is
    /// missing, it is the missing rank.
    pub(crate) sends_at_once: bool,
}

/// A collective, as one rank runs it.
pub(crate) trait Collective {
    /// Differs among collectives.
    const KIND: u8;

    /// The number of bytes that this rank contributes.
    fn own_bytes(&self) -> usize;

    /// The next round; None at the end.
    fn next_round(&mut self) -> Option<Round>;

    /// The message of the round's source.
    fn receive(&mut self, message: Vec<u8>) -> Result<(), &'static str>;
}

/// The rank at this distance after `rank`, of `size`.
fn after(rank: u32, distance: u32, size: u32) -> u32 {
    ((u64::from(rank) + u64::from(distance)) % u64::from(size)) as u32
}

/// The distance of round `number`, if the ranks need it.
fn distance(number: u8, size: u32) -> Option<u32> {
    1u32.checked_shl(u32::from(number)).filter(|distance| *distance < size)
}

/// The ranks that wait for messages of a rank in some collective, or that it waits for: whatever
/// one of them reports reaches all ranks in log2(ranks) steps.
pub(crate) fn partners(rank: u32, size: u32) -> Vec<u32> {
    let mut partners: Vec<_> = (0..32)
        .map_while(|number| distance(number, size))
        .flat_map(|distance| [after(rank, distance, size), after(rank, size - distance, size)])
        .collect();
    partners.sort_unstable();
    partners.dedup();
    partners
}

/// All ranks have entered before one leaves.
#[derive(Debug)]
pub(crate) struct Barrier {
    rank: u32,
    size: u32,
    next: u8,
}

impl Barrier {
    pub(crate) fn new(rank: u32, size: u32) -> Self {
        Self { rank, size, next: 0 }
    }
}

impl Collective for Barrier {
    const KIND: u8 = 0;

    fn own_bytes(&self) -> usize {
        0
    }

    fn next_round(&mut self) -> Option<Round> {
        let number = self.next;
        let distance = distance(number, self.size)?;
        self.next += 1;
        let source = after(self.rank, self.size - distance, self.size);
        Some(Round {
            number,
            send: Some((after(self.rank, distance, self.size), Vec::new())),
            receive: Some(Source { rank: source, sends_at_once: number == 0 }),
        })
    }

    fn receive(&mut self, message: Vec<u8>) -> Result<(), &'static str> {
        if message.is_empty() { Ok(()) } else { Err("a barrier's message has no bytes") }
    }
}

/// Bytes of one rank for all.
#[derive(Debug)]
pub(crate) struct Broadcast {
    root: u32,
    /// The rank, counted from the root.
    position: u32,
    size: u32,
    bytes: Option<Vec<u8>>,
    next: u8,
}

impl Broadcast {
    /// `bytes` are those of the root, and none at other ranks.
    pub(crate) fn new(rank: u32, size: u32, root: u32, bytes: Option<Vec<u8>>) -> Self {
        Self { root, position: after(rank, size - root, size), size, bytes, next: 0 }
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes.unwrap_or_default()
    }
}

impl Collective for Broadcast {
    const KIND: u8 = 1;

    fn own_bytes(&self) -> usize {
        self.bytes.as_ref().map_or(0, Vec::len)
    }

    fn next_round(&mut self) -> Option<Round> {
        let rank_at = |position| after(self.root, position, self.size);
        loop {
            let number = self.next;
            let distance = distance(number, self.size)?;
            self.next += 1;
            if self.position >= distance && self.position < distance.saturating_mul(2) {
                let from = self.position - distance;
                // The root serves the others only after the first one has taken its message.
                let receive = Source { rank: rank_at(from), sends_at_once: number == 0 };
                return Some(Round { number, send: None, receive: Some(receive) });
            }
            let to = self.position.checked_add(distance).filter(|to| *to < self.size);
            if self.position < distance
                && let Some(to) = to
            {
                let bytes = self.bytes.clone().unwrap_or_default();
                return Some(Round { number, send: Some((rank_at(to), bytes)), receive: None });
            }
        }
    }

    fn receive(&mut self, message: Vec<u8>) -> Result<(), &'static str> {
        self.bytes = Some(message);
        Ok(())
    }
}

/// The bytes of all ranks for all (Bruck's algorithm).
#[derive(Debug)]
pub(crate) struct AllGather {
    rank: u32,
    size: u32,
    next: u8,
    /// The bytes of this rank, of the one after it, and so on.
    held: Vec<Vec<u8>>,
}

impl AllGather {
    pub(crate) fn new(rank: u32, size: u32, own: Vec<u8>) -> Self {
        Self { rank, size, next: 0, held: vec![own] }
    }

    /// The number of bytes of all ranks.
    pub(crate) fn total(&self) -> usize {
        self.held.iter().map(Vec::len).sum()
    }

    pub(crate) fn into_bytes(mut self) -> Vec<Vec<u8>> {
        self.held.rotate_right(self.rank as usize);
        self.held
    }

    /// Blocks that are sent in a round.
    fn count(&self, distance: u32) -> usize {
        distance.min(self.size - distance) as usize
    }
}

impl Collective for AllGather {
    const KIND: u8 = 2;

    fn own_bytes(&self) -> usize {
        self.held[0].len()
    }

    fn next_round(&mut self) -> Option<Round> {
        let number = self.next;
        let distance = distance(number, self.size)?;
        self.next += 1;
        let blocks = &self.held[..self.count(distance)];
        let mut message = Vec::with_capacity(blocks.iter().map(|block| 4 + block.len()).sum());
        for block in blocks {
            message.extend((block.len() as u32).to_le_bytes());
            message.extend(block);
        }
        let source = after(self.rank, distance, self.size);
        Some(Round {
            number,
            send: Some((after(self.rank, self.size - distance, self.size), message)),
            receive: Some(Source { rank: source, sends_at_once: number == 0 }),
        })
    }

    fn receive(&mut self, message: Vec<u8>) -> Result<(), &'static str> {
        let expected = distance(self.next - 1, self.size).map_or(0, |it| self.count(it));
        let mut rest = &message[..];
        for _ in 0..expected {
            let (length, after) = rest.split_first_chunk::<4>().ok_or("a length is missing")?;
            let length = u32::from_le_bytes(*length) as usize;
            let (block, after) = after.split_at_checked(length).ok_or("bytes are missing")?;
            self.held.push(block.to_vec());
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err("more bytes than announced") }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Messages and bytes that a rank sent.
    #[derive(Debug, Default, Clone, Copy)]
    struct Sent {
        messages: u32,
        bytes: u64,
    }

    /// Runs a collective on all ranks, in an order given by `pick`. Returns what each rank sent.
    fn run<C: Collective>(ranks: &mut [C], mut pick: impl FnMut(usize) -> usize) -> Vec<Sent> {
        let mut sent = vec![Sent::default(); ranks.len()];
        let mut mail: HashMap<(u32, u32, u8), Vec<u8>> = HashMap::new();
        let mut waiting: Vec<Option<(Source, u8)>> = vec![None; ranks.len()];
        let mut running: Vec<usize> = (0..ranks.len()).collect();
        let mut idle = 0;
        while !running.is_empty() {
            let at = pick(running.len());
            let rank = running[at];
            if let Some((source, number)) = waiting[rank] {
                match mail.remove(&(source.rank, rank as u32, number)) {
                    Some(message) => ranks[rank].receive(message).unwrap(),
                    None => {
                        idle += 1;
                        assert!(idle < 1_000_000, "no progress");
                        continue;
                    }
                }
                waiting[rank] = None;
            }
            idle = 0;
            let Some(round) = ranks[rank].next_round() else {
                running.swap_remove(at);
                continue;
            };
            if let Some((to, message)) = round.send {
                sent[rank].messages += 1;
                sent[rank].bytes += message.len() as u64;
                assert!(mail.insert((rank as u32, to, round.number), message).is_none());
            }
            waiting[rank] = round.receive.map(|source| (source, round.number));
        }
        assert!(mail.is_empty());
        sent
    }

    fn in_turn() -> impl FnMut(usize) -> usize {
        let mut next = 0;
        move |count| {
            next += 1;
            next % count
        }
    }

    #[test]
    fn all_ranks_gather_the_bytes_of_all() {
        for size in (1..=17).chain([31, 32, 33, 100]) {
            let own = |rank: u32| vec![rank as u8; rank as usize % 5];
            let mut ranks: Vec<_> = (0..size).map(|at| AllGather::new(at, size, own(at))).collect();
            run(&mut ranks, in_turn());
            let all: Vec<_> = (0..size).map(own).collect();
            assert!(ranks.into_iter().all(|rank| rank.into_bytes() == all));
        }
    }

    #[test]
    fn broadcast_reaches_all_ranks_from_each_root() {
        for size in 1..=17 {
            for root in 0..size {
                let bytes = |rank| (rank == root).then(|| b"bytes".to_vec());
                let rank = |at| Broadcast::new(at, size, root, bytes(at));
                let mut ranks: Vec<_> = (0..size).map(rank).collect();
                run(&mut ranks, in_turn());
                assert!(ranks.into_iter().all(|rank| rank.into_bytes() == b"bytes"));
            }
        }
    }

    /// A rank that has left has a message from a rank that has one …, of all ranks.
    #[test]
    fn no_rank_leaves_a_barrier_before_all_have_entered() {
        for size in 2..=17 {
            for late in 0..size {
                let mut ranks: Vec<_> = (0..size).map(|at| Barrier::new(at, size)).collect();
                let mut mail = HashMap::new();
                let mut left = 0;
                for _ in 0..8 {
                    for rank in (0..size).filter(|rank| *rank != late) {
                        let mut step = ranks.remove(rank as usize);
                        let before = step.next;
                        match step.next_round() {
                            Some(Round { number, send, receive }) => {
                                mail.insert((rank, send.unwrap().0, number), ());
                                let source = receive.unwrap();
                                // Tried again later if the message is missing.
                                if !mail.contains_key(&(source.rank, rank, number)) {
                                    step.next = before;
                                }
                            }
                            None => left += 1,
                        }
                        ranks.insert(rank as usize, step);
                    }
                }
                assert_eq!(left, 0, "rank {late} of {size} has not entered");
            }
        }
    }

    #[test]
    fn partners_connect_all_ranks_in_few_steps() {
        for size in [1u32, 2, 3, 5, 32, 100, 4096] {
            let mut reached = vec![false; size as usize];
            let mut last = vec![0];
            reached[0] = true;
            let mut steps = 0;
            while !last.is_empty() {
                let next: Vec<_> = last.iter().flat_map(|rank| partners(*rank, size)).collect();
                last = next
                    .into_iter()
                    .filter(|at| !std::mem::replace(&mut reached[*at as usize], true))
                    .collect();
                steps += usize::from(!last.is_empty());
            }
            assert!(reached.into_iter().all(|it| it));
            assert!(steps <= size.next_power_of_two().ilog2() as usize, "{steps} steps of {size}");
        }
    }

    /// Messages of a rank grow as log2(ranks), and bytes only where all bytes must arrive.
    #[test]
    fn messages_grow_with_the_logarithm_of_the_ranks() {
        for size in [2u32, 64, 4096] {
            let rounds = size.ilog2();
            let mut barrier: Vec<_> = (0..size).map(|at| Barrier::new(at, size)).collect();
            let sent = run(&mut barrier, in_turn());
            assert!(sent.iter().all(|it| it.messages == rounds && it.bytes == 0));
            let bytes = |at| (at == 0).then(|| vec![0; 64]);
            let mut broadcast: Vec<_> =
                (0..size).map(|at| Broadcast::new(at, size, 0, bytes(at))).collect();
            let sent = run(&mut broadcast, in_turn());
            assert!(
                sent.iter().all(|it| it.messages <= rounds && it.bytes <= 64 * u64::from(rounds))
            );
        }
    }

    /// What one rank sends in an all-gather. All ranks send the same, so the messages that it
    /// receives are like its own.
    fn all_gather_of_one(size: u32, own: &[u8]) -> Sent {
        let mut sent = Sent::default();
        let mut rank = AllGather::new(0, size, own.to_vec());
        while let Some(round) = rank.next_round() {
            let (_, message) = round.send.unwrap();
            sent.messages += 1;
            sent.bytes += message.len() as u64;
            rank.receive(message).unwrap();
        }
        assert_eq!(rank.into_bytes().len(), size as usize);
        sent
    }

    /// The table of docs/internals/launch.md.
    #[test]
    fn messages_and_bytes_of_a_rank_by_size() {
        println!("| ranks | barrier | broadcast of 64 B: root | all-gather of 64 B |");
        for size in [2u32, 32, 512, 4096] {
            let rounds = size.ilog2();
            let mut broadcast = Broadcast::new(0, size, 0, Some(vec![0; 64]));
            let sends = std::iter::from_fn(|| broadcast.next_round()).count();
            assert_eq!(sends, rounds as usize);
            let gather = all_gather_of_one(size, &[0; 64]);
            assert_eq!(gather.messages, rounds);
            assert_eq!(gather.bytes, u64::from(size - 1) * 68);
            println!(
                "| {size} | {rounds} messages, 0 B | {sends} messages, {} B | {} messages, {} B |",
                sends * 64,
                gather.messages,
                gather.bytes
            );
        }
    }

    proptest! {
        #[test]
        fn any_order_of_ranks_completes(size in 1u32..40, picks: Vec<usize>, root: u32) {
            let mut turns = in_turn();
            let mut picks = picks.into_iter();
            let mut pick = |count: usize| picks.next().map_or_else(|| turns(count), |it| it % count);
            let mut gather: Vec<_> =
                (0..size).map(|at| AllGather::new(at, size, at.to_le_bytes().to_vec())).collect();
            run(&mut gather, &mut pick);
            let all: Vec<_> = (0..size).map(|at| at.to_le_bytes().to_vec()).collect();
            prop_assert!(gather.into_iter().all(|rank| rank.into_bytes() == all));
            let root = root % size;
            let rank = |at| Broadcast::new(at, size, root, (at == root).then(|| vec![7; 3]));
            let mut broadcast: Vec<_> = (0..size).map(rank).collect();
            run(&mut broadcast, &mut pick);
            prop_assert!(broadcast.into_iter().all(|rank| rank.into_bytes() == [7; 3]));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(message: Vec<u8>, size in 2u32..9) {
            let mut rank = AllGather::new(0, size, Vec::new());
            rank.next_round();
            let _ = rank.receive(message);
        }
    }
}
