//! Memory of a device that is not visible, as `CUDA_VISIBLE_DEVICES` hides those of CUDA. A separate
//! program, so that no other test uses the devices at the same time.

use std::os::fd::AsFd;

use gpu::emulated::hide_device;
use gpu::{Device, ErrorKind};

#[test]
fn memory_of_a_hidden_device_is_mapped_for_another_one() {
    let owner = Device::open("emulated:0".parse().unwrap()).unwrap();
    let uuid = owner.properties().uuid;
    let memory = owner.allocate_shared(4096, &[]).unwrap();
    let (piece, length) = memory.export_piece(0).unwrap();
    hide_device(0, true);
    assert_eq!(Device::find(uuid).unwrap_err().kind(), ErrorKind::NoSuchDevice);
    let user = Device::for_memory_of(uuid).unwrap();
    assert_eq!(user.name().to_string(), "emulated:1");
    let importer = user.importer_of(uuid, length).unwrap();
    importer.add(piece.as_fd(), length).unwrap();
    let mapped = importer.finish(0, 4096).unwrap();
    assert!(mapped.is_of_hidden_device());
    assert_eq!(mapped.device_uuid().unwrap(), Some(uuid));
    // For the driver it is memory of the device that maps it.
    assert_eq!(mapped.device(), Some(user.name()));
    let unnamed = user.importer(length).unwrap();
    unnamed.add(piece.as_fd(), length).unwrap();
    let error = unnamed.memory().device_uuid().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
    hide_device(1, true);
    let error = Device::for_memory_of(uuid).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchDevice);
    assert!(error.to_string().contains("let CUDA_VISIBLE_DEVICES name one"), "{error}");
}
