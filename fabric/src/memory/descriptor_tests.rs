use proptest::prelude::*;

use super::*;

fn sample(key: RemoteKey) -> RemoteRegion {
    RemoteRegion::new(7, MemoryKind::Cuda(3), Access::REMOTE, 1 << 33, 0x7f00_0000_1000, key)
}

fn any_region() -> impl Strategy<Value = RemoteRegion> {
    let key = prop_oneof![
        any::<u64>().prop_map(RemoteKey::Plain),
        prop::collection::vec(any::<u8>(), 1..=MAX_KEY_LENGTH).prop_map(RemoteKey::Raw),
    ];
    let kind = prop_oneof![
        Just(MemoryKind::Host),
        any::<i32>().prop_map(MemoryKind::Cuda),
        Just(MemoryKind::Rocr),
        any::<i32>().prop_map(MemoryKind::SynapseAi),
    ];
    let access =
        prop_oneof![Just(Access::REMOTE_READ), Just(Access::REMOTE_WRITE), Just(Access::REMOTE)];
    (any::<u32>(), kind, access, 1_u64..u64::MAX, any::<u64>(), key).prop_map(
        |(protocol, kind, access, length, base, key)| {
            let base = base.min(u64::MAX - length);
            RemoteRegion::new(protocol, kind, access, length, base, key)
        },
    )
}

proptest! {
    #[test]
    fn descriptor_round_trips(region in any_region()) {
        prop_assert_eq!(RemoteRegion::decode(&region.encode()).unwrap(), region);
    }

    #[test]
    fn every_prefix_is_refused(region in any_region(), cut in any::<prop::sample::Index>()) {
        let bytes = region.encode();
        let cut = cut.index(bytes.len());
        prop_assert!(RemoteRegion::decode(&bytes[..cut]).is_err());
    }

    #[test]
    fn every_altered_bit_is_refused(region in any_region(), at in any::<prop::sample::Index>(), bit in 0..8_u32) {
        let mut bytes = region.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(RemoteRegion::decode(&bytes).is_err());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = RemoteRegion::decode(&bytes);
    }
}

/// Recomputes the checksum after a change, as an attacker would.
fn forge(region: &RemoteRegion, change: impl FnOnce(&mut [u8])) -> Error {
    let mut bytes = region.encode();
    let body = bytes.len() - CHECKSUM;
    change(&mut bytes[..body]);
    let checksum = crc32fast::hash(&bytes[..body]);
    bytes[body..].copy_from_slice(&checksum.to_le_bytes());
    RemoteRegion::decode(&bytes).unwrap_err()
}

#[test]
fn inconsistent_fields_are_named() {
    let region = sample(RemoteKey::Plain(5));
    let no_access = forge(&region, |b| b[20..24].fill(0));
    assert!(no_access.to_string().contains("access flags"), "{no_access}");
    let no_length = forge(&region, |b| b[24..32].fill(0));
    assert!(no_length.to_string().contains("not a range"), "{no_length}");
    let wraps = forge(&region, |b| b[32..40].fill(0xff));
    assert!(wraps.to_string().contains("not a range"), "{wraps}");
    let unknown_interface = forge(&region, |b| b[12..16].fill(0x77));
    assert!(unknown_interface.to_string().contains("interface"), "{unknown_interface}");
    let long_key = forge(&region, |b| b[40] = 9);
    assert!(long_key.to_string().contains("claims 9"), "{long_key}");
    let newer = forge(&region, |b| b[4] = 2);
    assert_eq!(newer.kind(), ErrorKind::VersionMismatch);
}

#[test]
fn keys_do_not_appear_in_logs() {
    let text = format!("{:?}", sample(RemoteKey::Plain(0x1234_5678)));
    assert!(!text.contains("305419896") && !text.contains("12345678"), "{text}");
}

#[test]
fn descriptor_round_trips_through_serde() {
    let region = sample(RemoteKey::Raw(vec![1, 2, 3]));
    let json = serde_json::to_string(&region).unwrap();
    let back: RemoteRegion = serde_json::from_str(&json).unwrap();
    assert_eq!(back, region);
    assert!(serde_json::from_str::<RemoteRegion>("[1,2,3]").is_err());
}

/// Inputs that the fuzzer found, kept as tests on the stable toolchain.
#[test]
fn fuzz_corpus_does_not_panic() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/region_descriptor");
    let mut seen = 0;
    for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        if let Ok(region) = RemoteRegion::decode(&bytes) {
            assert_eq!(region.encode(), bytes);
        }
        seen += 1;
    }
    assert!(seen > 0, "the corpus is empty");
}
