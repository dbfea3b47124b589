//! Halos of arrays as strided rows, by every kind of path.

use gpu::Block;
use transfer::path::{Path, Policy};
use transfer::{Buffer, ErrorKind, HostBuffer, Rights, Route, Strided, Subarray};

use crate::common::{LENGTH, TIMEOUT, alone, device, numbers};
use crate::fixture::{AgentFixture, FILL, SUM, blocks_of, fill_buffer, notice, sum_of_buffer};
use crate::rails::{COMPARE, tcp};

/// Cells of 8 bytes that fill the whole memory, including their halo.
const FIELD: [u64; 3] = [64, 96, 128];
const CELL: u64 = 8;

/// The last cells of a dimension, to the halo in front of the first ones.
fn halo(dimension: usize) -> Strided {
    let mut size = FIELD.map(|extent| extent - 2);
    let (mut from, mut to) = ([1; 3], [1; 3]);
    size[dimension] = 1;
    (from[dimension], to[dimension]) = (FIELD[dimension] - 2, 0);
    let subarray = |origin| Subarray { extents: &FIELD, origin };
    Strided::tile(CELL, &size, subarray(&from), subarray(&to)).unwrap()
}

/// Copies a halo cell by cell.
fn copy_halo(dimension: usize, from: &[u8], to: &mut [u8]) {
    let [planes, lines, cells] = FIELD;
    for plane in 1..planes - 1 {
        for line in 1..lines - 1 {
            for cell in 1..cells - 1 {
                let mut at = [plane, line, cell];
                let subarray =
                    |at: [u64; 3]| (((at[0] * lines + at[1]) * cells + at[2]) * CELL) as usize;
                if at[dimension] != 1 {
                    continue;
                }
                at[dimension] = FIELD[dimension] - 2;
                let source = subarray(at);
                at[dimension] = 0;
                let target = subarray(at);
                to[target..target + 8].copy_from_slice(&from[source..source + 8]);
            }
        }
    }
}

/// The checksum after the halo of `local` was copied to `remote`.
fn with_halo(dimension: usize, local: u32, remote: u32) -> u64 {
    let mut all = numbers(LENGTH, remote);
    copy_halo(dimension, &numbers(LENGTH, local), &mut all);
    gpu::checksum(&all)
}

fn exchange(mut fixture: AgentFixture, role: &str, is_host: bool, path: Path) {
    assert_eq!(FIELD.iter().product::<u64>() * CELL, LENGTH);
    let peer_process = fixture.peer_process(role, &[]);
    let local: Buffer = match is_host {
        true => HostBuffer::new(LENGTH).unwrap().into(),
        false => device().allocate_shared(LENGTH, &[]).unwrap().into(),
    };
    let region = fixture.agent.register(local.clone(), Rights::ALL).unwrap();
    let (peer, policy) = (peer_process.peer, Policy::default());
    let joined = fixture.agent.join(peer, &region, &peer_process.descriptor, &policy, TIMEOUT);
    let route = joined.unwrap();
    assert_eq!(route.path(), path, "{}", route.choice());
    for dimension in 0..3 {
        let halo = halo(dimension);
        // Put: the notice arrives with exactly these bytes.
        let (here, there) = (100 + dimension as u32, 500 + dimension as u32);
        fill_buffer(&local, here.into());
        fixture.request(&peer_process, FILL, there.into());
        let on_arrival = Some(notice(COMPARE, with_halo(dimension, here, there)));
        let token = fixture.agent.put(&route, &halo, on_arrival).unwrap();
        let done = fixture.agent.wait(token, TIMEOUT).unwrap();
        assert_eq!((done.bytes, done.path), (halo.bytes(), Some(path)));
        assert_eq!(fixture.reply(), 1, "the other side has wrong bytes");
        // Get, many at once; by a rail each short row is one message or more.
        let times = if path.is_local() { 20 } else { 2 };
        fixture.request(&peer_process, FILL, there.into());
        let tokens: Vec<_> =
            (0..times).map(|_| fixture.agent.get(&route, &halo, None).unwrap()).collect();
        for token in tokens {
            fixture.agent.wait(token, TIMEOUT).unwrap();
        }
        assert_eq!(sum_of_buffer(&local), with_halo(dimension, there, here));
    }
    refuses(&mut fixture, &route);
    assert_eq!(fixture.request(&peer_process, SUM, 0), gpu::checksum(&numbers(LENGTH, 502)));
    fixture.end(peer_process);
}

/// Rows beyond a region are refused before a byte is copied.
fn refuses(fixture: &mut AgentFixture, route: &Route) {
    let rows = Strided::rows(100, 8, 64, 4096).unwrap();
    let most = LENGTH - rows.from_end();
    for rows in [rows.shifted(most + 1, 0), rows.shifted(0, LENGTH - rows.to_end() + 1)] {
        let error = fixture.agent.put(route, &rows.unwrap(), None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
    }
    assert_eq!(fixture.agent.in_flight(), 0);
    let token = fixture.agent.get(route, &rows.shifted(most, 0).unwrap(), None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
}

#[test]
fn halos_by_shared_memory() {
    let _alone = alone();
    exchange(AgentFixture::open(), "host", true, Path::SharedMemory);
}

#[test]
fn halos_by_a_device() {
    let _alone = alone();
    exchange(AgentFixture::open(), "shared", false, Path::CudaIpc);
    exchange(AgentFixture::open(), "host", false, Path::SharedMemory);
}

#[test]
fn halos_by_a_rail_directly() {
    let _alone = alone();
    let role = format!("remote by {} 1: host", tcp());
    exchange(AgentFixture::open_remote(tcp(), 1), &role, true, Path::FabricDirect);
}

#[test]
fn halos_staged_by_several_rails() {
    let _alone = alone();
    let role = format!("remote by {} 2: shared", tcp());
    exchange(AgentFixture::open_remote(tcp(), 2), &role, false, Path::FabricStaged);
}

/// A list, and strided rows with the same blocks.
#[test]
fn strided_rows_equal_a_list_of_their_blocks() {
    let _alone = alone();
    let mut fixture = AgentFixture::open();
    let peer_process = fixture.peer_process("shared", &[]);
    let route = fixture.join(&peer_process);
    let halo = halo(2);
    let list: Vec<Block> = halo.iter().collect();
    assert_eq!(list.len() as u64, halo.count());
    fixture.request(&peer_process, FILL, 9);
    let token = fixture.agent.put(&route, &list, None).unwrap();
    assert_eq!(fixture.agent.wait(token, TIMEOUT).unwrap().bytes, halo.bytes());
    let listed = fixture.request(&peer_process, SUM, 0);
    assert_eq!(listed, with_halo(2, 1, 9));
    fixture.request(&peer_process, FILL, 9);
    let token = fixture.agent.put(&route, &halo, None).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.request(&peer_process, SUM, 0), listed);
    // In several requests, and a notice alone.
    let whole = blocks_of(1 << 20);
    for blocks in [&whole[..3], &whole[3..], &[]] {
        let token = fixture.agent.put(&route, blocks, None).unwrap();
        fixture.agent.wait(token, TIMEOUT).unwrap();
    }
    let token = fixture.agent.put(&route, &[], Some(notice(SUM, 0))).unwrap();
    fixture.agent.wait(token, TIMEOUT).unwrap();
    assert_eq!(fixture.reply(), gpu::checksum(&numbers(LENGTH, 1)));
    fixture.end(peer_process);
}
