//! A store for tests: keys and connections without sockets, as PyTorch's sources describe them, and
//! a server that drives it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// The implementations of PyTorch's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The default since 2.4: parses what has arrived, and has limits.
    Libuv,
    /// The other one since 2.2.
    Poll,
    /// 2.0 and 2.1: other numbers, no VALIDATE.
    Until21,
}

pub(super) const KINDS: [Kind; 3] = [Kind::Libuv, Kind::Poll, Kind::Until21];

/// What a client receives.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Send(u64, Vec<u8>),
    Close(u64),
}

#[derive(Debug, Default)]
struct Client {
    received: Vec<u8>,
    is_validated: bool,
    /// Keys that it waits for.
    awaited: Vec<Vec<u8>>,
}

/// The server's state.
#[derive(Debug)]
struct Store {
    kind: Kind,
    keys: BTreeMap<Vec<u8>, Vec<u8>>,
    clients: BTreeMap<u64, Client>,
}

/// Why a query was not carried out.
enum Stop {
    /// The query is not complete.
    Incomplete,
    /// The connection is closed.
    Refused,
}

struct Cursor<'a> {
    rest: &'a [u8],
    kind: Kind,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: u64) -> Result<&'a [u8], Stop> {
        let length = usize::try_from(length).map_err(|_| Stop::Refused)?;
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Stop::Incomplete)?;
        self.rest = rest;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        Ok(self.take(N as u64)?.try_into().expect("as long as requested"))
    }

    fn text(&mut self, most: u64) -> Result<Vec<u8>, Stop> {
        let length = u64::from_ne_bytes(self.number()?);
        // Servers without limits fail to allocate this.
        let most = if self.kind == Kind::Libuv { most } else { 1 << 47 };
        if length > most { Err(Stop::Refused) } else { Ok(self.take(length)?.to_vec()) }
    }

    fn key(&mut self) -> Result<Vec<u8>, Stop> {
        self.text(8 << 10)
    }

    fn value(&mut self) -> Result<Vec<u8>, Stop> {
        self.text(8 << 20)
    }

    fn keys(&mut self) -> Result<Vec<Vec<u8>>, Stop> {
        let count = u64::from_ne_bytes(self.number()?);
        if count > 128 << 10 {
            Err(Stop::Refused)
        } else {
            (0..count).map(|_| self.key()).collect()
        }
    }
}

fn with_length(value: &[u8]) -> Vec<u8> {
    [&(value.len() as u64).to_ne_bytes()[..], value].concat()
}

impl Store {
    fn new(kind: Kind) -> Self {
        Self { kind, keys: BTreeMap::new(), clients: BTreeMap::new() }
    }

    fn connected(&mut self, client: u64) {
        self.clients.insert(client, Client::default());
    }

    fn disconnected(&mut self, client: u64) {
        self.clients.remove(&client);
    }

    /// Carries out the queries that are complete.
    fn received(&mut self, client: u64, bytes: &[u8]) -> Vec<Effect> {
        let mut effects = Vec::new();
        let Some(state) = self.clients.get_mut(&client) else { return effects };
        state.received.extend(bytes);
        while let Some(state) = self.clients.get_mut(&client) {
            let received = std::mem::take(&mut state.received);
            let mut cursor = Cursor { rest: &received, kind: self.kind };
            let result = self.carry_out(client, &mut cursor, &mut effects);
            let state = self.clients.get_mut(&client).expect("still connected");
            match result {
                Ok(()) => state.received = cursor.rest.to_vec(),
                Err(Stop::Incomplete) => {
                    state.received = received;
                    break;
                }
                Err(Stop::Refused) => {
                    self.disconnected(client);
                    effects.push(Effect::Close(client));
                    break;
                }
            }
        }
        effects
    }

    fn carry_out(
        &mut self,
        client: u64,
        cursor: &mut Cursor<'_>,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Stop> {
        let [number] = cursor.number()?;
        let state = self.clients.get_mut(&client).expect("connected");
        if self.kind != Kind::Until21 && !state.is_validated {
            // This implementation takes the first query for validated if only a part has arrived,
            // and leaves others until more arrives.
            state.is_validated = self.kind == Kind::Libuv;
            return match number {
                0 if u32::from_ne_bytes(cursor.number()?) == 0x3C85_F7CE => {
                    state.is_validated = true;
                    Ok(())
                }
                _ if self.kind == Kind::Libuv => Err(Stop::Incomplete),
                _ => Err(Stop::Refused),
            };
        }
        let number = number + u8::from(self.kind == Kind::Until21);
        let mut answer = Vec::new();
        match number {
            1 => {
                let (key, value) = (cursor.key()?, cursor.value()?);
                self.set(key, value, effects);
            }
            3 => match self.keys.get(&cursor.key()?) {
                Some(value) => answer = with_length(value),
                None if self.kind == Kind::Libuv => answer = with_length(b""),
                None => return Err(Stop::Refused),
            },
            4 => {
                let (key, summand) = (cursor.key()?, i64::from_ne_bytes(cursor.number()?));
                let old = match self.keys.get(&key) {
                    Some(value) => {
                        std::str::from_utf8(value).ok().and_then(|text| text.parse().ok())
                    }
                    None => Some(0),
                };
                let sum = old.ok_or(Stop::Refused)? + summand;
                self.set(key, sum.to_string().into_bytes(), effects);
                answer = sum.to_ne_bytes().to_vec();
            }
            5 => {
                let exist = cursor.keys()?.iter().all(|key| self.keys.contains_key(key));
                answer = vec![u8::from(!exist)];
            }
            6 => {
                let mut awaited = cursor.keys()?;
                awaited.retain(|key| !self.keys.contains_key(key));
                match awaited.is_empty() {
                    true => answer = vec![0],
                    false => {
                        let state = self.clients.get_mut(&client).expect("connected");
                        assert!(state.awaited.is_empty(), "two waits of a connection at once");
                        state.awaited = awaited;
                    }
                }
            }
            7 => answer = (self.keys.len() as i64).to_ne_bytes().to_vec(),
            8 if self.kind != Kind::Until21 => {
                let deleted = self.keys.remove(&cursor.key()?).is_some();
                answer = i64::from(deleted).to_ne_bytes().to_vec();
            }
            _ => return Err(Stop::Refused),
        }
        if !answer.is_empty() {
            effects.push(Effect::Send(client, answer));
        }
        Ok(())
    }

    fn set(&mut self, key: Vec<u8>, value: Vec<u8>, effects: &mut Vec<Effect>) {
        for (client, state) in &mut self.clients {
            let before = state.awaited.len();
            state.awaited.retain(|awaited| *awaited != key);
            if before > 0 && state.awaited.is_empty() {
                effects.push(Effect::Send(*client, vec![0]));
            }
        }
        self.keys.insert(key, value);
    }
}

/// How a server misbehaves.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Misbehaviour {
    /// Closes a connection after this many bytes that it sent.
    pub(super) cut_after: Option<usize>,
    /// Pauses before each byte that it sends.
    pub(super) pause: Duration,
    /// Replaces the length of values.
    pub(super) length: Option<u64>,
}

struct Shared {
    store: Store,
    streams: BTreeMap<u64, (TcpStream, usize)>,
    misbehaviour: Misbehaviour,
}

/// A server at a port of this machine. Its threads end with their connections.
pub(super) struct Server {
    address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Server {
    pub(super) fn start(kind: Kind) -> Self {
        Self::misbehaving(kind, Misbehaviour::default())
    }

    pub(super) fn misbehaving(kind: Kind, misbehaviour: Misbehaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let store = Store::new(kind);
        let shared = Shared { store, streams: BTreeMap::new(), misbehaviour };
        let shared = Arc::new(Mutex::new(shared));
        let of_thread = Arc::downgrade(&shared);
        thread::spawn(move || {
            for (client, stream) in listener.incoming().enumerate() {
                let Some(shared) = of_thread.upgrade() else { return };
                let (client, stream) = (client as u64, stream.unwrap());
                let mut state = lock(&shared);
                state.store.connected(client);
                state.streams.insert(client, (stream.try_clone().unwrap(), 0));
                drop(state);
                thread::spawn(move || serve(&shared, client, stream));
            }
        });
        Self { address, shared }
    }

    pub(super) fn address(&self) -> String {
        self.address.to_string()
    }

    /// Keys with the length of their value.
    pub(super) fn keys(&self) -> Vec<(String, usize)> {
        let state = lock(&self.shared);
        let pairs = state.store.keys.iter();
        pairs.map(|(key, value)| (String::from_utf8_lossy(key).into_owned(), value.len())).collect()
    }

    pub(super) fn misbehave(&self, misbehaviour: Misbehaviour) {
        lock(&self.shared).misbehaviour = misbehaviour;
    }

    /// While the result lives, the server does not answer, like a stopped process.
    pub(super) fn stopped(&self) -> impl Drop + '_ {
        lock(&self.shared)
    }

    pub(super) fn close_all(&self) {
        for (stream, _) in lock(&self.shared).streams.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close_all();
        // The listening thread ends with the next connection.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(shared: &Mutex<Shared>, client: u64, mut stream: TcpStream) {
    // As little as the server of PyTorch reads at once.
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).unwrap_or(0);
        let mut state = lock(shared);
        let effects = state.store.received(client, &buffer[..count]);
        for effect in effects {
            match effect {
                Effect::Send(to, bytes) => state.send(to, bytes),
                Effect::Close(client) => state.close(client),
            }
        }
        if count == 0 || !state.store.clients.contains_key(&client) {
            state.close(client);
            return;
        }
    }
}

impl Shared {
    fn close(&mut self, client: u64) {
        self.store.disconnected(client);
        if let Some((stream, _)) = self.streams.remove(&client) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn send(&mut self, client: u64, mut bytes: Vec<u8>) {
        let Misbehaviour { cut_after, pause, length } = self.misbehaviour;
        let Some((stream, sent)) = self.streams.get_mut(&client) else { return };
        // Values have their length and more, or only a length of zero.
        if let (Some(length), true) = (length, bytes.len() > 8) {
            bytes[..8].copy_from_slice(&length.to_ne_bytes());
        }
        let left = cut_after.map_or(usize::MAX, |most| most - *sent);
        let is_cut = bytes.len() >= left;
        bytes.truncate(left);
        *sent += bytes.len();
        // A client that has failed does not receive.
        let _ = match pause.is_zero() {
            true => stream.write_all(&bytes),
            false => bytes.iter().try_for_each(|byte| {
                thread::sleep(pause);
                stream.write_all(&[*byte])
            }),
        };
        if is_cut {
            self.close(client);
        }
    }
}
