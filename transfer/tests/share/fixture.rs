//! Fixtures of the tests.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use gpu::{Device, Memory};
use ipc::Channel;
use transfer::{
    Admission, ElementType, Handle, OpenedBuffer, Opener, Result, ShareService, SharedBuffer,
    Tensor,
};

use crate::common::{LENGTH, TIMEOUT, device, numbers};

pub fn fill(memory: &Memory, first: u32) {
    let stream = memory.mapped_for().stream().unwrap();
    stream.upload(&memory.whole(), &numbers(memory.length(), first), TIMEOUT).unwrap();
}

#[track_caller]
pub fn check(memory: &Memory, first: u32) {
    let stream = memory.mapped_for().stream().unwrap();
    let sum = stream.checksum(&memory.whole(), TIMEOUT).unwrap();
    assert_eq!(sum, gpu::checksum(&numbers(memory.length(), first)), "wrong numbers");
}

/// A transposed matrix in the middle of the memory.
pub fn tensor() -> Tensor {
    Tensor {
        element: ElementType::U32,
        shape: vec![1000, 100],
        strides: vec![1, 1000],
        byte_offset: 4096,
    }
}

/// A service in its own directory, with numbered memory published as "numbers".
pub struct ServiceFixture {
    pub device: Device,
    pub memory: Memory,
    pub service: Option<ShareService>,
    directory: PathBuf,
}

impl ServiceFixture {
    pub fn open() -> Self {
        Self::open_for(Admission::own_user())
    }

    pub fn open_for(admission: Admission) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fabricast-share-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let device = device();
        let memory = device.allocate_shared(LENGTH, &[]).unwrap();
        fill(&memory, 1);
        let service = ShareService::start(&directory.join("socket"), admission).unwrap();
        let before = service.publish("numbers", SharedBuffer::new(&memory, &tensor()).unwrap());
        assert!(before.unwrap().is_none());
        Self { device, memory, service: Some(service), directory }
    }

    pub fn service(&self) -> &ShareService {
        self.service.as_ref().unwrap()
    }

    pub fn path(&self) -> PathBuf {
        self.directory.join("socket")
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for ServiceFixture {
    fn drop(&mut self) {
        self.service = None;
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Sends a handle by a channel.
pub fn send(shared: &SharedBuffer, channel: &Channel) -> Result<()> {
    let Handle { metadata, descriptors } = shared.handle()?;
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    channel.send(&metadata.encode(), &descriptors, TIMEOUT).unwrap();
    Ok(())
}

/// Receives a handle by a channel and opens it.
pub fn receive(opener: &Opener, channel: &Channel) -> Result<OpenedBuffer> {
    let message = channel.receive(TIMEOUT).unwrap();
    opener.open(&Handle::from_parts(&message.bytes, message.descriptors)?, None)
}
