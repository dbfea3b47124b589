//! Memory registration, except for the keys.

use std::time::Duration;

use fabric::{
    Access, Caps, Counter, Domain, EndpointKind, ErrorKind, EventQueue, Fabric, HostMemory, Memory,
    MemoryKind, MrMode, Order, PeerToPeer, Query, RegistrationFlags, RegistrationOptions,
    TransferFlags, Version, probe_registration_cache,
};

use super::Case;
use crate::cells::Cell;
use crate::pair::{
    A, B, CaseResult, Pair, Setup, check_bytes, get, nonblocking, pattern, put, timeout,
};
use crate::{cases, ensure};

pub const CASES: &[Case] = cases![
    register_many_sizes,
    register_unaligned_vector,
    thousand_regions,
    registering_in_a_loop_leaks_nothing,
    local_region_needs_no_registration,
    binding_succeeds_or_is_not_supported,
    peer_to_peer_option_succeeds_or_is_not_supported,
    asynchronous_domain_opens_or_is_not_supported,
    collective_access_is_passed,
    deprecated_modes_cannot_be_combined,
    register_several_buffers,
    too_many_buffers_are_refused,
    nonzero_offset_is_refused,
    bad_ranges_are_refused,
    unmapped_pages_are_refused_if_required,
    unbacked_ranges_can_be_registered,
    local_descriptor_is_set_if_required,
    refresh_region,
    enable_is_idempotent,
    remote_writes_are_counted_by_region,
    registration_flags_are_passed,
    authorization_key_is_passed,
    device_memory_is_refused_without_support,
    dma_buf_is_refused_precisely,
    asynchronous_registration,
    synchronous_domains_refuse_asynchronous_registration,
    basic_mode,
    scalable_mode,
    returned_mode_bits_are_supported,
    regions_are_reachable_without_order,
    registration_cache_opens,
    region_outlives_its_owner_while_in_flight,
];

fn register_many_sizes(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    for length in [1, 2, 4095, 4096, 4097, 1 << 20, (64 << 20) + 1] {
        let region = pair.sides[A].region(length)?;
        ensure!(region.len() == length, "length {}", region.len());
        let remote = region.describe()?;
        ensure!(remote.len() == length as u64, "described as {}", remote.len());
    }
    Ok(())
}

fn register_unaligned_vector(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    // The memory of a vector may begin at any address, and a region may begin inside it.
    let bytes = pattern(1, 10_000);
    let from = pair.sides[A].domain.register(HostMemory::from_vec(bytes.clone())?, Access::ALL)?;
    let backing = HostMemory::zeroed(16_384)?;
    let base = backing.as_ptr().wrapping_add(1234);
    #[allow(unsafe_code)]
    // SAFETY: `backing` outlives the region: it is dropped after `into`.
    let into =
        unsafe { pair.sides[B].domain.register_raw(base, 10_000, MemoryKind::Host, Access::ALL)? };
    pair.sides[B].activate(&into)?;
    let remote = pair.sides[A].attach(&into)?;
    let options = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair
        .post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), options))?;
    pair.complete(A, id)?;
    check_bytes("unaligned", &get(&into, 0, 10_000)?, &bytes)?;
    drop(into);
    drop(backing);
    Ok(())
}

fn thousand_regions(cell: &Cell) -> CaseResult {
    const COUNT: usize = 1000;
    let mut pair = Pair::new(cell)?;
    let from = pair.sides[A].region(64)?;
    let mut regions = Vec::new();
    for _ in 0..COUNT {
        regions.push(pair.sides[B].region(256)?);
    }
    // Each region is reached by its own key: no two are mixed up.
    for (number, region) in regions.iter().enumerate().step_by(7) {
        put(&from, 0, &pattern(number as u64, 64))?;
        let remote = pair.sides[A].attach(region)?.slice(100..164)?;
        let options = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
        let id = pair
            .post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote, options))?;
        pair.complete(A, id)?;
    }
    for (number, region) in regions.iter().enumerate() {
        let got = get(region, 100, 64)?;
        if number % 7 == 0 {
            check_bytes(&format!("region {number}"), &got, &pattern(number as u64, 64))?;
        } else {
            ensure!(got.iter().all(|b| *b == 0), "region {number} was written");
        }
    }
    Ok(())
}

fn registering_in_a_loop_leaks_nothing(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let files = || -> CaseResult<usize> { Ok(std::fs::read_dir("/proc/self/fd")?.count()) };
    let memory = || -> CaseResult<usize> {
        let text = std::fs::read_to_string("/proc/self/statm")?;
        Ok(text.split_whitespace().nth(1).ok_or("statm")?.parse::<usize>()? * page_size())
    };
    for _ in 0..200 {
        pair.sides[A].region(64 << 10)?;
    }
    let before = (files()?, memory()?);
    for _ in 0..2000 {
        pair.sides[A].region(64 << 10)?;
    }
    let after = (files()?, memory()?);
    ensure!(after.0 <= before.0, "open files grew from {} to {}", before.0, after.0);
    ensure!(after.1 < before.1 + (4 << 20), "memory grew from {} to {}", before.1, after.1);
    Ok(())
}

fn local_region_needs_no_registration(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let needs = pair.sides[A].domain.capabilities().needs_local_registration();
    let region = pair.sides[A].domain.register(HostMemory::zeroed(64)?, Access::LOCAL)?;
    ensure!(region.is_registered() == needs, "registered: {}", region.is_registered());
    let always = RegistrationOptions::new(Access::LOCAL);
    let region = pair.sides[A].domain.register(HostMemory::zeroed(64)?, always)?;
    ensure!(region.is_registered(), "options always register");
    let refused = region.describe().unwrap_err();
    ensure!(refused.kind() == ErrorKind::AccessDenied, "{refused}");
    Ok(())
}

/// Binding works or is refused with NotSupported; never a crash, never a bare "other".
fn binding_succeeds_or_is_not_supported(cell: &Cell) -> CaseResult {
    let has_known_kind = |error: &fabric::Error| {
        matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument)
    };
    let pair = Pair::new(cell)?;
    let region = pair.sides[A].region(4096)?;
    if let Err(error) = region.bind_endpoint(&pair.sides[A].endpoint) {
        ensure!(has_known_kind(&error), "{error}");
    }
    match Counter::open(&pair.sides[A].domain) {
        Ok(counter) => {
            if let Err(error) = region.bind_counter(&counter) {
                ensure!(has_known_kind(&error), "{error}");
            }
            drop(region);
        }
        Err(error) => ensure!(has_known_kind(&error), "{error}"),
    }
    Ok(())
}

fn peer_to_peer_option_succeeds_or_is_not_supported(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    for policy in
        [PeerToPeer::Enabled, PeerToPeer::Required, PeerToPeer::Preferred, PeerToPeer::Disabled]
    {
        if let Err(error) = pair.sides[A].endpoint.set_peer_to_peer(policy) {
            ensure!(error.kind() == ErrorKind::NotSupported, "{policy:?}: {error}");
        }
    }
    Ok(())
}

fn asynchronous_domain_opens_or_is_not_supported(cell: &Cell) -> CaseResult {
    let offer = cell.offer(Caps::empty())?;
    let fabric = Fabric::open(&offer)?;
    let events = EventQueue::open(&fabric)?;
    match Domain::open_asynchronous(&fabric, &offer, &events) {
        Ok(domain) => {
            let error = domain.register(HostMemory::zeroed(64)?, Access::ALL).unwrap_err();
            ensure!(error.kind() == ErrorKind::InvalidArgument, "{error}");
        }
        Err(error) => {
            ensure!(error.kind() == ErrorKind::NotSupported, "{error}");
            ensure!(error.detail().is_some(), "{error}");
        }
    }
    Ok(())
}

fn collective_access_is_passed(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL | Access::COLLECTIVE);
    match pair.sides[A].domain.register(HostMemory::zeroed(4096)?, options) {
        Ok(region) => ensure!(region.access().contains(Access::COLLECTIVE), "{region:?}"),
        Err(error) => ensure!(
            matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument),
            "{error}"
        ),
    }
    Ok(())
}

fn deprecated_modes_cannot_be_combined(cell: &Cell) -> CaseResult {
    for mode in [MrMode::BASIC | MrMode::LOCAL, MrMode::SCALABLE | MrMode::BASIC] {
        let error = cell.offer_of(cell.query().mr_mode(mode), Caps::empty()).unwrap_err();
        ensure!(error.kind() == ErrorKind::InvalidArgument, "{mode:?}: {error}");
    }
    Ok(())
}

fn register_several_buffers(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let limit = pair.sides[A].domain.capabilities().registration.mr_iov_limit;
    ensure!(limit >= 2, "the provider takes one buffer per registration");
    let buffers: Vec<Box<dyn Memory>> =
        vec![Box::new(HostMemory::zeroed(4096)?), Box::new(HostMemory::zeroed(8192)?)];
    let region = pair.sides[B].domain.register_vector(buffers, Access::ALL)?;
    ensure!(region.len() == 12_288, "length {}", region.len());
    // Peers get only the part that is reachable with every provider: the first buffer.
    ensure!(region.describe()?.len() == 4096, "described as {}", region.describe()?.len());
    ensure!(region.slice(0..5000).is_err(), "slicing across buffers succeeded");
    Ok(())
}

fn too_many_buffers_are_refused(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let limit = pair.sides[A].domain.capabilities().registration.mr_iov_limit;
    let mut buffers: Vec<Box<dyn Memory>> = Vec::new();
    for _ in 0..limit.min(4096) + 1 {
        buffers.push(Box::new(HostMemory::from_vec(vec![0; 16])?));
    }
    ensure!(limit < 4096, "the provider takes {limit} buffers");
    let error = pair.sides[A].domain.register_vector(buffers, Access::ALL).unwrap_err();
    ensure!(error.kind() == ErrorKind::InvalidArgument, "{error}");
    let none = pair.sides[A].domain.register_vector(Vec::new(), Access::ALL).unwrap_err();
    ensure!(none.kind() == ErrorKind::InvalidArgument, "{none}");
    Ok(())
}

fn nonzero_offset_is_refused(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL).offset(8);
    let error = pair.sides[A].domain.register(HostMemory::zeroed(64)?, options).unwrap_err();
    ensure!(error.kind() == ErrorKind::InvalidArgument, "{error}");
    ensure!(error.to_string().contains("offset"), "{error}");
    Ok(())
}

#[allow(unsafe_code)]
fn bad_ranges_are_refused(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let domain = &pair.sides[A].domain;
    let base = 0x10_0000 as *mut u8;
    let attempt = |base: *mut u8, length: usize| {
        // SAFETY: the registration must fail, which this tests.
        unsafe { domain.register_raw(base, length, MemoryKind::Host, Access::ALL) }.unwrap_err()
    };
    let empty = attempt(base, 0);
    ensure!(
        empty.kind() == ErrorKind::InvalidArgument && empty.to_string().contains("zero"),
        "{empty}"
    );
    let overflowing = attempt((usize::MAX - 10) as *mut u8, 100);
    ensure!(
        overflowing.kind() == ErrorKind::OutOfBounds
            && overflowing.to_string().contains("overflow"),
        "{overflowing}"
    );
    let kernel = attempt(0xffff_8000_0000_0000_usize as *mut u8, 4096);
    ensure!(
        kernel.kind() == ErrorKind::OutOfBounds && kernel.to_string().contains("user space"),
        "{kernel}"
    );
    let null = attempt(std::ptr::null_mut(), 4096);
    ensure!(null.kind() == ErrorKind::OutOfBounds, "{null}");
    Ok(())
}

/// The system's page size in bytes.
#[allow(unsafe_code)]
pub(super) fn page_size() -> usize {
    // SAFETY: queries a constant of the system.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Two pages, of which the second is unmapped.
#[allow(unsafe_code)]
fn page_and_hole() -> *mut u8 {
    let page = page_size();
    // SAFETY: a fresh mapping, half of it unmapped again.
    unsafe {
        let base = libc::mmap(
            std::ptr::null_mut(),
            2 * page,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        libc::munmap(base.cast::<u8>().add(page).cast(), page);
        base.cast()
    }
}

#[allow(unsafe_code)]
fn unmapped_pages_are_refused_if_required(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let domain = &pair.sides[A].domain;
    let demanded =
        domain.capabilities().registration.mr_mode.without_deprecated().contains(MrMode::ALLOCATED);
    ensure!(demanded, "the provider does not require mapped pages");
    let (base, length) = (page_and_hole(), 2 * page_size());
    // SAFETY: nothing is registered.
    let error =
        unsafe { domain.register_raw(base, length, MemoryKind::Host, Access::ALL) }.unwrap_err();
    ensure!(error.kind() == ErrorKind::NotMapped, "{error}");
    ensure!(error.to_string().contains("FI_MR_ALLOCATED"), "{error}");
    Ok(())
}

#[allow(unsafe_code)]
fn unbacked_ranges_can_be_registered(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let domain = &pair.sides[A].domain;
    let demanded =
        domain.capabilities().registration.mr_mode.without_deprecated().contains(MrMode::ALLOCATED);
    ensure!(!demanded, "the provider requires mapped pages");
    let (base, length) = (page_and_hole(), 2 * page_size());
    // SAFETY: the region is not accessed while the page is missing.
    let region = unsafe { domain.register_raw(base, length, MemoryKind::Host, Access::ALL)? };
    ensure!(region.describe()?.len() == length as u64, "described as {}", region.describe()?.len());
    Ok(())
}

fn local_descriptor_is_set_if_required(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let capabilities = pair.sides[A].domain.capabilities();
    ensure!(
        capabilities.registration.mr_mode.without_deprecated().contains(MrMode::LOCAL),
        "no local descriptor is required"
    );
    // Without a registration the provider could not even send.
    let (from, into) = (
        pair.sides[A].region_for(64, Access::LOCAL)?,
        pair.sides[B].region_for(64, Access::LOCAL)?,
    );
    ensure!(from.is_registered() && into.is_registered(), "not registered");
    put(&from, 0, &pattern(1, 64))?;
    let receive =
        pair.post(B, |s| s.endpoint.receive(&mut s.queue, &into.all(), nonblocking(0)))?;
    pair.post(A, |s| s.endpoint.send(&mut s.queue, s.peer, &from.all(), nonblocking(0)))?;
    pair.complete(B, receive)?;
    check_bytes("registered", &get(&into, 0, 64)?, &pattern(1, 64))
}

fn refresh_region(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let region = pair.sides[A].region(8192)?;
    // If the provider does not require it, the call does nothing; out of bounds is always
    // refused.
    region.refresh(0..4096)?;
    let error = region.refresh(4096..8193).unwrap_err();
    ensure!(error.kind() == ErrorKind::OutOfBounds, "{error}");
    match region.force_refresh(0..4096) {
        Ok(()) => {}
        Err(error) => ensure!(
            matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument),
            "{error}"
        ),
    }
    Ok(())
}

fn enable_is_idempotent(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let region = pair.sides[A].region(64)?;
    ensure!(region.is_enabled(), "not enabled after activation");
    region.enable()?;
    region.enable()?;
    Ok(())
}

fn remote_writes_are_counted_by_region(cell: &Cell) -> CaseResult {
    let offer = cell.offer(Caps::RMA_EVENT)?;
    let mut pair = Pair::with(cell, Setup { offer: Some(offer), ..Setup::default() })?;
    let counter = Counter::open(&pair.sides[B].domain)?;
    let options = RegistrationOptions::new(Access::ALL).flags(RegistrationFlags::RMA_EVENT);
    let into = pair.sides[B].domain.register(HostMemory::zeroed(64)?, options)?;
    into.bind_counter(&counter)?;
    into.enable()?;
    let from = pair.sides[A].region(64)?;
    let remote = pair.sides[A].attach(&into)?;
    for _ in 0..3 {
        let flags = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
        let id = pair.post(A, |s| {
            s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), flags)
        })?;
        pair.complete(A, id)?;
    }
    pair.pump_until(|| counter.read() >= 3);
    ensure!(counter.read() == 3, "{} accesses counted", counter.read());
    drop(into);
    Ok(())
}

/// Each flag is passed on; a provider honours it or refuses it.
fn registration_flags_are_passed(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    for flags in [
        RegistrationFlags::PERSISTENT,
        RegistrationFlags::HOST_ALLOCATED,
        RegistrationFlags::DEVICE_ONLY,
        RegistrationFlags::RMA_EVENT,
    ] {
        let options = RegistrationOptions::new(Access::ALL).flags(flags);
        match pair.sides[A].domain.register(HostMemory::zeroed(4096)?, options) {
            Ok(region) => ensure!(region.is_registered(), "{flags:?}"),
            Err(error) => ensure!(
                matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument),
                "{flags:?}: {error}"
            ),
        }
    }
    Ok(())
}

fn authorization_key_is_passed(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let options = RegistrationOptions::new(Access::ALL).authorization_key(vec![1, 2, 3, 4]);
    match pair.sides[A].domain.register(HostMemory::zeroed(4096)?, options) {
        Ok(region) => ensure!(region.is_registered(), "not registered"),
        Err(error) => ensure!(
            matches!(error.kind(), ErrorKind::NotSupported | ErrorKind::InvalidArgument),
            "{error}"
        ),
    }
    Ok(())
}

/// A host page declared as device memory must never be registered as host memory.
#[allow(unsafe_code)]
fn device_memory_is_refused_without_support(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let memory = HostMemory::zeroed(4096)?;
    let kinds = [
        MemoryKind::Cuda(0),
        MemoryKind::Rocr,
        MemoryKind::LevelZero(0),
        MemoryKind::Neuron(0),
        MemoryKind::SynapseAi(0),
    ];
    for kind in kinds {
        // SAFETY: `memory` outlives the attempt; nothing is registered.
        let result =
            unsafe { pair.sides[A].domain.register_raw(memory.as_ptr(), 4096, kind, Access::ALL) };
        let error = result.err().ok_or(format!("{kind} memory was registered"))?;
        ensure!(error.kind() == ErrorKind::NotSupported, "{kind}: {error}");
    }
    Ok(())
}

#[allow(unsafe_code)]
fn dma_buf_is_refused_precisely(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let memory = HostMemory::zeroed(4096)?;
    let file = std::fs::File::open("/dev/null")?;
    let buffer = fabric::DmaBuf {
        fd: std::os::fd::AsFd::as_fd(&file),
        offset: 0,
        length: 4096,
        base: memory.as_ptr(),
        kind: MemoryKind::Host,
    };
    // SAFETY: `memory` outlives the attempt; /dev/null is no dma-buf.
    match unsafe { pair.sides[A].domain.register_dma_buf(&buffer, Access::ALL) } {
        Ok(_) => return Err("/dev/null was registered as a dma-buf".into()),
        Err(error) => {
            ensure!(error.kind() == ErrorKind::NotSupported, "{error}");
            let why = if Version::has_dma_buf() { "FI_HMEM" } else { "1.20" };
            ensure!(error.to_string().contains(why), "{error}");
        }
    }
    Ok(())
}

fn asynchronous_registration(cell: &Cell) -> CaseResult {
    let offer = cell.offer(Caps::empty())?;
    let fabric = Fabric::open(&offer)?;
    let mut events = EventQueue::open(&fabric)?;
    let domain = Domain::open_asynchronous(&fabric, &offer, &events)?;
    let pending = domain.register_asynchronously(HostMemory::zeroed(8192)?, Access::ALL)?;
    let region = pending.wait(&mut events, timeout())?;
    ensure!(region.is_registered() && region.len() == 8192, "{region:?}");
    region.describe()?;
    // Two registrations in flight: each event belongs to one of them.
    let first = domain.register_asynchronously(HostMemory::zeroed(64)?, Access::ALL)?;
    let second = domain.register_asynchronously(HostMemory::zeroed(128)?, Access::ALL)?;
    let (one, other) = (events.wait(timeout())?, events.wait(timeout())?);
    ensure!(first.is_done_by(&one) != first.is_done_by(&other), "both events or neither match");
    let (for_first, for_second) = if first.is_done_by(&one) { (one, other) } else { (other, one) };
    let first = first.finish(&for_first).map_err(|refused| refused.1)?;
    let (second, _) =
        *second.finish(&for_first).err().ok_or("an event of another registration finished it")?;
    let second = second.finish(&for_second).map_err(|refused| refused.1)?;
    ensure!(first.len() == 64 && second.len() == 128, "the regions are mixed up");
    let refused = domain.register(HostMemory::zeroed(64)?, Access::ALL).unwrap_err();
    ensure!(refused.kind() == ErrorKind::InvalidArgument, "{refused}");
    Ok(())
}

fn synchronous_domains_refuse_asynchronous_registration(cell: &Cell) -> CaseResult {
    let pair = Pair::new(cell)?;
    let error = pair.sides[A]
        .domain
        .register_asynchronously(HostMemory::zeroed(64)?, Access::ALL)
        .unwrap_err();
    ensure!(error.kind() == ErrorKind::InvalidArgument, "{error}");
    Ok(())
}

fn with_mode(cell: &Cell, mode: MrMode) -> CaseResult {
    with_query(cell, cell.query().mr_mode(mode))
}

fn with_query(cell: &Cell, query: Query) -> CaseResult {
    let offer = cell.offer_of(query, Caps::empty())?;
    let returned = offer.capabilities().registration.mr_mode;
    let mut pair = Pair::with(cell, Setup { offer: Some(offer), ..Setup::default() })?;
    let (from, into) = (pair.sides[A].region(4096)?, pair.sides[B].region(4096)?);
    put(&from, 0, &pattern(1, 4096))?;
    let description = into.describe()?;
    let is_virtual = returned.without_deprecated().contains(MrMode::VIRT_ADDR);
    let expected = if is_virtual { into.as_ptr() as u64 } else { 0 };
    ensure!(
        description.base() == expected || returned.contains(MrMode::RAW),
        "{returned:?}: base {:#x}, {expected:#x} expected",
        description.base()
    );
    let remote = pair.sides[A].attach(&into)?;
    let flags = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair
        .post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), flags))?;
    pair.complete(A, id)?;
    check_bytes(&format!("{returned:?}"), &get(&into, 0, 4096)?, &pattern(1, 4096))
}

fn basic_mode(cell: &Cell) -> CaseResult {
    with_mode(cell, MrMode::BASIC)
}

fn scalable_mode(cell: &Cell) -> CaseResult {
    with_mode(cell, MrMode::SCALABLE)
}

fn returned_mode_bits_are_supported(cell: &Cell) -> CaseResult {
    // All bits are offered, then each one is removed: the library supports every combination
    // that is returned.
    with_mode(cell, MrMode::SUPPORTED)?;
    for bit in MrMode::SUPPORTED.iter() {
        let fewer = MrMode::SUPPORTED - bit;
        // A provider that requires the bit is not listed without it.
        if cell.offer_of(cell.query().mr_mode(fewer), Caps::empty()).is_ok() {
            with_mode(cell, fewer)?;
        }
    }
    Ok(())
}

fn regions_are_reachable_without_order(cell: &Cell) -> CaseResult {
    // shm then requires virtual addresses; otherwise it does not.
    with_query(cell, cell.query().order(Order::empty()))
}

fn registration_cache_opens(cell: &Cell) -> CaseResult {
    // The cache belongs to the library, not to a provider; opening it must not disturb one that
    // is in use.
    let mut pair = Pair::new(cell)?;
    match probe_registration_cache() {
        Ok(()) => {}
        Err(error) => ensure!(
            matches!(
                error.kind(),
                ErrorKind::NotSupported | ErrorKind::NoProvider | ErrorKind::InvalidArgument
            ),
            "{error}"
        ),
    }
    pair.pump_for(Duration::from_millis(1));
    let _ = cell.kind == EndpointKind::Msg;
    Ok(())
}

fn region_outlives_its_owner_while_in_flight(cell: &Cell) -> CaseResult {
    let mut pair = Pair::new(cell)?;
    let bytes = pattern(5, 1 << 20);
    let into = pair.sides[B].region(1 << 20)?;
    let remote = pair.sides[A].attach(&into)?;
    let from = pair.sides[A].region(1 << 20)?;
    put(&from, 0, &bytes)?;
    let flags = nonblocking(0).flags(TransferFlags::DELIVERY_COMPLETE);
    let id = pair
        .post(A, |s| s.endpoint.write(&mut s.queue, s.peer, &from.all(), &remote.all(), flags))?;
    // The last handle is dropped while the write is in flight.
    drop(from);
    pair.complete(A, id)?;
    check_bytes("after drop", &get(&into, 0, 1 << 20)?, &bytes)
}
