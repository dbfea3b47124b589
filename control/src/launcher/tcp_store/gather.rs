//! One exchange among all ranks, by keys of the store.
//!
//! Each rank sets the pieces of its contribution, then its head. The others wait for the heads, in
//! groups, and get heads and pieces. The rank that is the last to have read all removes the keys.

use super::contribution::{MAX_HEAD, head, open_head, pieces};
use super::store_connection::{Connection, Fault};
use super::wire::{Dialect, Queries};

/// Queries sent at once whose answers are short or heads. They fit into the buffers of sockets, so
/// that sending ends although the store may wait until its answers are received.
const GROUP: usize = 32;
/// Pieces requested at once: the store keeps as many copies for each rank.
const PIECES: usize = 2;

/// The keys of one exchange, and which rank this is.
#[derive(Debug)]
pub(super) struct Gather {
    /// All keys begin with it.
    pub(super) prefix: String,
    pub(super) rank: u32,
    pub(super) size: u32,
}

impl Gather {
    fn head_key(&self, rank: u32) -> String {
        format!("{}/{rank}", self.prefix)
    }

    fn piece_key(&self, rank: u32, piece: usize) -> String {
        format!("{}/{rank}.{piece}", self.prefix)
    }

    fn others(&self) -> Vec<u32> {
        (0..self.size).filter(|rank| *rank != self.rank).collect()
    }

    /// The contributions of all ranks, in their order.
    pub(super) fn run(
        &self,
        connection: &mut Connection,
        own: &[u8],
    ) -> Result<Vec<Vec<u8>>, Fault> {
        self.contribute(connection, own)?;
        let mut gathered = vec![Vec::new(); self.size as usize];
        for group in self.others().chunks(GROUP) {
            self.wait(connection, group)?;
            self.get_heads(connection, group, &mut gathered)?;
        }
        gathered[self.rank as usize] = own.to_vec();
        Ok(gathered)
    }

    fn contribute(&self, connection: &mut Connection, own: &[u8]) -> Result<(), Fault> {
        for (number, piece) in pieces(own.len()).enumerate() {
            let key = self.piece_key(self.rank, number);
            connection.send(|queries| queries.set(&key, &own[piece]))?;
        }
        // The last, so that a rank that finds the head also finds the pieces.
        connection.send(|queries| queries.set(&self.head_key(self.rank), &head(own)))
    }

    fn wait(&self, connection: &mut Connection, group: &[u32]) -> Result<(), Fault> {
        let keys: Vec<_> = group.iter().map(|rank| self.head_key(*rank)).collect();
        connection.send(|queries| queries.wait(&keys))?;
        match connection.existence()? {
            true => Ok(()),
            false => {
                Err(Fault::Malformed("the end of a wait for keys that do not exist".to_owned()))
            }
        }
    }

    fn get_heads(
        &self,
        connection: &mut Connection,
        group: &[u32],
        gathered: &mut [Vec<u8>],
    ) -> Result<(), Fault> {
        let keys = group.iter().map(|rank| self.head_key(*rank));
        connection.send(|queries| keys.for_each(|key| queries.get(&key)))?;
        let mut lengths = Vec::with_capacity(group.len());
        for &rank in group {
            let head = connection.value(MAX_HEAD).map_err(|fault| of_rank(rank, fault))?;
            let (length, first) = open_head(&head).ok_or_else(|| {
                Fault::OfRank(rank, "something else than a contribution".to_owned())
            })?;
            gathered[rank as usize] = first.to_vec();
            lengths.push(length);
        }
        for (&rank, length) in group.iter().zip(lengths) {
            self.get_pieces(connection, rank, length, &mut gathered[rank as usize])?;
        }
        Ok(())
    }

    fn get_pieces(
        &self,
        connection: &mut Connection,
        rank: u32,
        length: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), Fault> {
        bytes.reserve_exact(length - bytes.len());
        let all: Vec<_> = pieces(length).enumerate().collect();
        for some in all.chunks(PIECES) {
            let keys = some.iter().map(|(number, _)| self.piece_key(rank, *number));
            connection.send(|queries| keys.for_each(|key| queries.get(&key)))?;
            for (number, range) in some {
                let fault = |text| Fault::OfRank(rank, format!("{text} as its piece {number}"));
                let value = connection.value(range.len()).map_err(|fault| of_rank(rank, fault))?;
                if value.len() != range.len() {
                    return Err(fault(format!("{} bytes instead of {}", value.len(), range.len())));
                }
                bytes.extend(value);
            }
        }
        Ok(())
    }

    /// Counts this rank as one that has read all, and removes the keys if it is the last.
    pub(super) fn finish(
        &self,
        connection: &mut Connection,
        gathered: &[Vec<u8>],
    ) -> Result<(), Fault> {
        let counter = format!("{}/read", self.prefix);
        connection.send(|queries| queries.add(&counter, 1))?;
        if connection.number()? < i64::from(self.size) {
            return Ok(());
        }
        let mut keys = vec![counter];
        for (rank, bytes) in (0..self.size).zip(gathered) {
            keys.push(self.head_key(rank));
            keys.extend((0..pieces(bytes.len()).count()).map(|piece| self.piece_key(rank, piece)));
        }
        ask_each(connection, &keys, Queries::remove, |connection| match connection.dialect() {
            Dialect::Since22 => connection.number().map(drop),
            Dialect::Until21 => Ok(()),
        })?;
        Ok(())
    }

    /// The ranks whose contributions the store does not have.
    pub(super) fn absent(&self, connection: &mut Connection) -> Result<Vec<u32>, Fault> {
        let others = self.others();
        let keys: Vec<_> = others.iter().map(|rank| self.head_key(*rank)).collect();
        let exist = ask_each(connection, &keys, Queries::check, Connection::existence)?;
        Ok(others
            .into_iter()
            .zip(exist)
            .filter(|(_, exists)| !exists)
            .map(|(rank, _)| rank)
            .collect())
    }
}

/// Sends a query for each key, some at once, and receives their answers.
fn ask_each<T>(
    connection: &mut Connection,
    keys: &[String],
    ask: impl Fn(&mut Queries, &str),
    answer: impl Fn(&mut Connection) -> Result<T, Fault>,
) -> Result<Vec<T>, Fault> {
    let mut answers = Vec::with_capacity(keys.len());
    for some in keys.chunks(GROUP) {
        connection.send(|queries| some.iter().for_each(|key| ask(queries, key)))?;
        for _ in some {
            answers.push(answer(connection)?);
        }
    }
    Ok(answers)
}

/// A malformed value is the fault of the rank that set it.
fn of_rank(rank: u32, fault: Fault) -> Fault {
    match fault {
        Fault::Malformed(text) => Fault::OfRank(rank, text),
        other => other,
    }
}
