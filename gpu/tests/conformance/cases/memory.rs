//! Memory of one process.

use std::os::fd::AsRawFd;

use gpu::{Allocator, ErrorKind};

use super::streams::Pages;
use super::{Skip, skip};
use crate::fixture::Fixture;

pub fn freed_memory_is_free(fixture: &Fixture) -> Result<(), Skip> {
    let length = 256 << 20;
    for _ in 0..3 {
        let free = fixture.first.free_memory().unwrap();
        let plain = fixture.first.allocate(length).unwrap();
        let shared = fixture.first.allocate_shared(length, &[]).unwrap();
        assert!(free - fixture.first.free_memory().unwrap() >= 2 * length);
        drop(plain);
        drop(shared);
        assert_eq!(fixture.first.free_memory().unwrap(), free);
    }
    Ok(())
}

pub fn exceeded_budget_is_refused_with_numbers(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let (limit, used) = device.budget();
    let granule = device.properties().granularity;
    device.set_budget(used + 4 * granule);
    let first = device.allocate_shared(3 * granule, &[]).unwrap();
    for refused in [
        device.allocate_shared(2 * granule, &[]),
        device.allocate(2 * granule),
        device.allocate_shared(granule + 1, &[]),
    ] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OverBudget);
        assert!(error.to_string().contains(&format!("{granule} left")), "{error}");
    }
    drop(first);
    drop(device.allocate_shared(4 * granule, &[]).unwrap());
    assert_eq!(device.budget().1, used, "all of it is released");
    device.set_budget(limit);
    Ok(())
}

pub fn more_than_the_device_has_is_refused(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let (limit, used) = device.budget();
    device.set_budget(u64::MAX);
    let twice = 2 * device.properties().total_memory;
    for refused in [device.allocate(twice), device.allocate_shared(twice, &[])] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
    for length in [0, u64::MAX, u64::MAX - 4096] {
        let error = device.allocate_shared(length, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{length} bytes");
    }
    assert_eq!(device.allocate(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    device.set_budget(limit);
    assert_eq!(device.budget().1, used);
    // The device still works.
    let memory = device.allocate(4096).unwrap();
    fixture.fill(&memory.whole(), 1);
    fixture.check(&memory.whole(), 1);
    Ok(())
}

pub fn host_range_is_registered_once(fixture: &Fixture) -> Result<(), Skip> {
    let pages = std::sync::Arc::new(Pages::new(1 << 20));
    let first = fixture.first.register(Same(pages.clone())).unwrap();
    let again = fixture.first.register(Same(pages.clone())).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::InvalidArgument, "{again}");
    drop(first);
    drop(fixture.first.register(Same(pages)).unwrap());
    Ok(())
}

#[derive(Debug)]
struct Same(std::sync::Arc<Pages>);

// SAFETY: the promise of the pages, which are kept alive as long as this.
#[allow(unsafe_code)]
unsafe impl gpu::HostMapping for Same {
    fn address(&self) -> u64 {
        self.0.address()
    }
    fn length(&self) -> u64 {
        self.0.length()
    }
}

pub fn pointer_attributes_name_the_allocator(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let plain = device.allocate(1 << 20).unwrap();
    let shared = device.allocate_shared(1 << 20, &[]).unwrap();
    let host = device.register(Pages::new(1 << 20)).unwrap();
    let found = device.attributes(plain.address() + 1000).unwrap();
    assert_eq!((found.device, found.allocator), (Some(device.name()), Allocator::Plain));
    assert!(found.base <= plain.address());
    assert!(found.base + found.length >= plain.address() + plain.length());
    let other = device.attributes(shared.address()).unwrap();
    let exportable = Allocator::Mapped { exportable: true };
    assert_eq!((other.device, other.allocator), (Some(device.name()), exportable));
    let found = device.attributes(host.address()).unwrap();
    assert_eq!((found.device, found.allocator), (None, Allocator::Host));
    let unknown = Box::new(5_u64);
    let error = device.attributes(&raw const *unknown as u64).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    Ok(())
}

pub fn memory_is_exported_as_dma_buf(fixture: &Fixture) -> Result<(), Skip> {
    let device = &fixture.first;
    let memory = device.allocate_shared(4 << 20, &[]).unwrap();
    if !device.properties().handle_types.dma_buf {
        assert_eq!(
            device.dma_buf(memory.address(), memory.length()).unwrap_err().kind(),
            ErrorKind::NotSupported
        );
        return skip("the device has no dma-buf");
    }
    let descriptor = device.dma_buf(memory.address(), memory.length()).unwrap();
    let link = std::fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).unwrap();
    assert!(link.to_string_lossy().contains("dmabuf"), "{}", link.display());
    Ok(())
}

pub fn synchronous_copies_are_set_for_unmapped_memory(fixture: &Fixture) -> Result<(), Skip> {
    let plain = fixture.first.allocate(1 << 20).unwrap();
    plain.set_sync_memops().unwrap();
    fixture.fill(&plain.whole(), 1);
    fixture.check(&plain.whole(), 1);
    let mapped = fixture.first.allocate_shared(4 << 20, &[]).unwrap();
    match mapped.set_sync_memops() {
        // No driver is known to allow it; one that does loses nothing.
        Ok(()) => println!("mapped memory allows it"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}"),
    }
    fixture.fill(&mapped.whole(), 1);
    fixture.check(&mapped.whole(), 1);
    Ok(())
}
