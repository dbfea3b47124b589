//! Measures like `fabricast bench alloc` with one process: other allocators, in private memory,
//! without a lock.
//!
//! allocators LARGEST fixed|random LIVE PAIRS

use std::alloc::Layout;
use std::time::Instant;

use offset_allocator::Allocator;
use rlsf::Tlsf;

fn xorshift(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |at: usize| arguments[at].parse::<u64>().expect("a number");
    let (largest, live, pairs) = (number(1), number(3), number(4));
    let is_fixed = arguments[2] == "fixed";
    let size = |random: u64| if is_fixed { largest } else { random % largest + 1 };
    let report = |name: &str, nanoseconds: f64| {
        println!(
            "{{\"provider\":\"{name}\",\"mean_ns\":{nanoseconds:.1},\"bytes\":{largest},\"fixed\":{is_fixed},\"live\":{live},\"iterations\":{pairs}}}"
        );
    };

    // In granules of 256 bytes, as in Fabricast.
    let granules = |bytes: u64| bytes.div_ceil(256) as u32;
    let mut allocator: Allocator<u32> =
        Allocator::with_max_allocs(granules(2 * (live + 1) * largest), 4 * live as u32 + 64);
    let mut random = 0x9e37_79b9_7f4a_7c15 | 1;
    let mut held: Vec<_> = (0..live)
        .map(|_| allocator.allocate(granules(size(xorshift(&mut random)))).expect("room"))
        .collect();
    let start = Instant::now();
    for _ in 0..pairs {
        let which = (xorshift(&mut random) % live) as usize;
        allocator.free(held[which]);
        held[which] = allocator.allocate(granules(size(xorshift(&mut random)))).expect("room");
    }
    report("offset-allocator", start.elapsed().as_nanos() as f64 / pairs as f64);

    let mut memory =
        vec![std::mem::MaybeUninit::<u8>::uninit(); (2 * (live + 1) * largest) as usize];
    let mut tlsf: Tlsf<'_, u32, u32, 32, 32> = Tlsf::new();
    tlsf.insert_free_block(&mut memory);
    let layout = |bytes: u64| Layout::from_size_align(bytes as usize, 64).expect("a layout");
    let mut random = 0x9e37_79b9_7f4a_7c15 | 1;
    let mut held: Vec<_> = (0..live)
        .map(|_| tlsf.allocate(layout(size(xorshift(&mut random)))).expect("room"))
        .collect();
    let start = Instant::now();
    for _ in 0..pairs {
        let which = (xorshift(&mut random) % live) as usize;
        // SAFETY: allocated here, with this alignment, and not freed since.
        unsafe { tlsf.deallocate(held[which], 64) };
        held[which] = tlsf.allocate(layout(size(xorshift(&mut random)))).expect("room");
    }
    report("rlsf", start.elapsed().as_nanos() as f64 / pairs as f64);
}
