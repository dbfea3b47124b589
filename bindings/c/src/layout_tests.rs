//! Sizes and offsets that C programs rely on, and the conversion of fields.

use std::mem::{MaybeUninit, offset_of};
use std::ptr;
use std::time::Duration;

use ipc::WaitStrategy;

use super::*;
use crate::failure::c_text;
use crate::ffi::{Argument, OutStruct};
use crate::status::Status;

/// `tests/programs/layout.c` has the same numbers.
#[test]
fn structures_have_the_layout_of_c() {
    assert_eq!(size_of::<RawNodeOptions>(), 120);
    assert_eq!(offset_of!(RawNodeOptions, service_timeout), 24);
    assert_eq!(offset_of!(RawNodeOptions, waiting), 52);
    assert_eq!(offset_of!(RawNodeOptions, workers), 116);
    assert_eq!(size_of::<RawTopicSettings<'_>>(), 64);
    assert_eq!(offset_of!(RawTopicSettings<'_>, reliability), 36);
    assert_eq!(offset_of!(RawTopicSettings<'_>, type_name), 48);
    assert_eq!(offset_of!(RawTopicSettings<'_>, max_held), 56);
    assert_eq!(size_of::<RawSent>(), 24);
    assert_eq!(size_of::<RawCounters>(), 40);
    assert_eq!(offset_of!(RawCounters, missed_by_nodes), 24);
    assert_eq!(offset_of!(RawCounters, evicted), 32);
    assert_eq!(size_of::<RawEvent>(), 72);
    assert_eq!(offset_of!(RawEvent, held_for), 24);
    assert_eq!(offset_of!(RawEvent, node), 32);
    assert_eq!(size_of::<RawTopicPublisher>(), 128);
    assert_eq!(offset_of!(RawTopicPublisher, is_alive), 12);
    assert_eq!(offset_of!(RawTopicPublisher, node), 16);
    assert_eq!(offset_of!(RawTopicPublisher, label), 56);
    assert_eq!(size_of::<RawSampleInfo>(), 128);
    assert_eq!(offset_of!(RawSampleInfo, publisher), 56);
    assert_eq!(offset_of!(RawSampleInfo, delivered_at), 120);
}

#[test]
fn first_version_of_each_structure_is_accepted() {
    assert_eq!(RawNodeOptions::MIN_SIZE, size_of::<RawNodeOptions>());
    // Extended since by "loans", "type_name" and "max_held".
    assert_eq!(RawTopicSettings::MIN_SIZE + 24, size_of::<RawTopicSettings<'_>>());
    assert_eq!(RawSent::MIN_SIZE, size_of::<RawSent>());
    // Later fields follow.
    assert_eq!(RawCounters::MIN_SIZE, offset_of!(RawCounters, missed_by_nodes));
    assert_eq!(RawEvent::MIN_SIZE, offset_of!(RawEvent, node));
    assert_eq!(RawSampleInfo::MIN_SIZE, size_of::<RawSampleInfo>());
}

#[test]
fn default_settings_convert_to_the_defaults() {
    let defaults = TopicSettings::default();
    assert_eq!(
        RawTopicSettings::defaults(size_of::<RawTopicSettings<'_>>()).to_options(c"test").unwrap(),
        defaults
    );
    let text = c_text(defaults.memory.to_string());
    let raw = RawTopicSettings::of(0, &defaults, (Text::of(&text), Text::default()));
    assert_eq!(raw.to_options(c"test").unwrap(), defaults);
}

#[test]
fn settings_survive_conversion() {
    let settings = TopicSettings {
        memory: "emulated:1".parse().unwrap(),
        reliability: Reliability::DropNewest,
        depth: 3,
        max_held: 6,
        largest: 77,
        loans: 2,
        release_deadline: Duration::from_millis(9),
        type_name: Some("Pose".parse().unwrap()),
    };
    let raw = RawTopicSettings::of(0, &settings, (Text::of(c"emulated:1"), Text::of(c"Pose")));
    assert_eq!(raw.to_options(c"test").unwrap(), settings);
    // NULL means host memory.
    let raw = RawTopicSettings { memory: Text::default(), loans: 1 << 32, ..raw };
    let meant = raw.to_options(c"test").unwrap();
    assert_eq!(meant.memory.to_string(), "host");
    // More than any publisher can have.
    assert!(meant.loans > TopicSettings::MAX_LOANS);
    let raw = RawTopicSettings { release_deadline: i64::MAX, ..raw };
    assert_eq!(raw.to_options(c"test").unwrap().release_deadline, TopicSettings::NEVER);
}

#[test]
fn invalid_settings_are_errors() {
    let defaults = RawTopicSettings::defaults(size_of::<RawTopicSettings<'_>>());
    let refused = [
        RawTopicSettings { memory: Text::of(c"moon:0"), ..defaults },
        RawTopicSettings { memory: Text::of(c"\xff"), ..defaults },
        RawTopicSettings { reliability: 3, ..defaults },
        RawTopicSettings { release_deadline: -1, ..defaults },
    ];
    for settings in refused {
        let failure = settings.to_options(c"test").unwrap_err();
        assert_eq!(failure.status, Status::InvalidArgument, "{settings:?}");
    }
}

#[test]
fn default_options_convert_to_the_defaults() {
    let (options, defaults) = (
        RawNodeOptions::defaults(size_of::<RawNodeOptions>()).to_options(c"test").unwrap(),
        NodeOptions::default(),
    );
    assert_eq!(options.directory, defaults.directory);
    assert_eq!(options.label, defaults.label);
    assert_eq!(options.service_timeout, defaults.service_timeout);
    assert_eq!(options.budgets, defaults.budgets);
    assert_eq!(options.service, defaults.service);
}

#[test]
fn options_survive_conversion() {
    let raw = RawNodeOptions {
        directory: Text::of(c"/run/here"),
        label: Text::of(c"camera"),
        service_timeout: 5_000_000,
        host_budget: 1 << 20,
        service: 1,
        waiting: 2,
        ..RawNodeOptions::defaults(size_of::<RawNodeOptions>())
    };
    let options = raw.to_options(c"test").unwrap();
    assert_eq!(options.directory, std::path::Path::new("/run/here"));
    assert_eq!(options.label, "camera");
    assert_eq!(options.service_timeout, Duration::from_millis(5));
    assert_eq!((options.budgets.host, options.budgets.device), (Some(1 << 20), None));
    assert_eq!(options.service, ServiceMode::External);
    assert_eq!(options.waiting, WaitStrategy::Block);
    assert!(options.interruptible);
    assert_eq!(options.network, None);
    let listening = RawNodeOptions { listen: Text::of(c"127.0.0.1:0"), insecure: 1, ..raw };
    let network = listening.to_options(c"test").unwrap().network.unwrap();
    // 0 means the default number.
    assert_eq!((network.insecure, network.workers), (true, 0));
    let refused = [
        RawNodeOptions { service: 2, ..raw },
        RawNodeOptions { waiting: 3, ..raw },
        RawNodeOptions { insecure: 2, ..raw },
        RawNodeOptions { listen: Text::of(c"nowhere"), ..raw },
        RawNodeOptions { service_timeout: -1, ..raw },
    ];
    for options in refused {
        assert_eq!(options.to_options(c"test").unwrap_err().status, Status::InvalidArgument);
    }
}

#[test]
fn node_identity_is_hexadecimal_text() {
    let named = identity([0xab; 16]);
    let text = CStr::from_bytes_until_nul(&named).unwrap().to_str().unwrap();
    assert_eq!(text, NodeId([0xab; 16]).to_string());
}

#[test]
fn events_have_numbers() {
    assert_eq!(RawEvent::of(None), RawEvent::EMPTY);
    let gap = RawEvent::of(Some(Event::Gap { missed: 7 }));
    assert_eq!((gap.kind, gap.missed), (1, 7));
    let held_for = Some(Duration::from_micros(3));
    let evicted = RawEvent::of(Some(Event::Evicted { held_for }));
    assert_eq!((evicted.kind, evicted.held_for), (3, 3000));
    let evicted = RawEvent::of(Some(Event::Evicted { held_for: None }));
    assert_eq!((evicted.kind, evicted.held_for), (3, 0));
    assert_eq!(RawEvent::of(Some(Event::NoPublishers)).kind, 5);
    assert_eq!(publisher_event(None), 0);
    assert_eq!(publisher_event(Some(PublisherEvent::NoSubscribers)), 1);
}

fn refuses<T: std::fmt::Debug>(result: Result<T>) {
    assert_eq!(result.unwrap_err().status, Status::InvalidArgument);
}

#[test]
fn unknown_fields_set_by_newer_programs_are_errors() {
    #[repr(C)]
    struct Later {
        known: RawNodeOptions,
        new: u64,
    }
    let mut later = Later { known: RawNodeOptions::defaults(size_of::<RawNodeOptions>()), new: 7 };
    let (target, size) = ((&raw mut later).cast(), size_of::<Later>());
    // SAFETY: valid for this size.
    let status = unsafe { crate::node::fabricast_node_options_init(target, size) };
    assert_eq!((status, later.known.size, later.new), (0, size, 0));
    assert!(options((&raw const later).cast()).unwrap().is_some());
    later.new = 1;
    refuses(options((&raw const later).cast()));
}

fn options(raw: *const RawNodeOptions) -> Result<Option<RawNodeOptions>> {
    // SAFETY: the tests pass structures with their real size, or NULL.
    unsafe { Argument::from_c((c"test", "options"), raw, 0) }
}

#[test]
fn longer_structure_with_zeros_is_accepted() {
    #[repr(C)]
    struct Later {
        known: RawNodeOptions,
        new: u64,
    }
    let known = RawNodeOptions {
        size: size_of::<Later>(),
        service_timeout: 77,
        ..RawNodeOptions::defaults(size_of::<RawNodeOptions>())
    };
    let mut later = Later { known, new: 0 };
    let found = options((&raw const later).cast()).unwrap().unwrap();
    assert_eq!(found.service_timeout, 77);
    later.new = 1;
    refuses(options((&raw const later).cast()));
}

#[test]
fn structure_without_its_size_is_an_error() {
    assert!(options(ptr::null()).unwrap().is_none());
    for size in [0, RawNodeOptions::MIN_SIZE - 1, 1 << 40] {
        let raw = RawNodeOptions { size, ..RawNodeOptions::defaults(size_of::<RawNodeOptions>()) };
        refuses(options(&raw const raw));
    }
    let zeroed = MaybeUninit::<RawTopicSettings<'_>>::zeroed();
    // SAFETY: a structure of zeros.
    refuses(unsafe {
        Option::<RawTopicSettings<'_>>::from_c((c"test", "settings"), zeroed.as_ptr(), 0)
    });
}

#[test]
fn structure_is_filled_to_the_size_of_the_caller() {
    let sent = RawSent { position: 1, subscribers: 2, dropped: 3 };
    // A later program, whose structure has two more words.
    let mut later = [u64::MAX; 6];
    // SAFETY: valid for six words.
    unsafe {
        OutStruct::<RawSent>::clear(later.as_mut_ptr().cast(), 40);
        let filled = OutStruct::<RawSent>::from_c((c"test", "sent"), later.as_mut_ptr().cast(), 40);
        filled.unwrap().put(sent).unwrap();
        refuses(OutStruct::<RawSent>::from_c((c"test", "sent"), later.as_mut_ptr().cast(), 16));
        refuses(OutStruct::<RawSent>::from_c(
            (c"test", "sent"),
            later.as_mut_ptr().cast(),
            1 << 20,
        ));
        refuses(OutStruct::<RawSent>::from_c((c"test", "sent"), ptr::null_mut(), 24));
        let none = Option::<OutStruct<'_, RawSent>>::from_c((c"test", "sent"), ptr::null_mut(), 0);
        assert!(none.unwrap().is_none());
    }
    assert_eq!(later, [1, 2, 3, 0, 0, u64::MAX]);
}

fn node_options() -> RawNodeOptions {
    RawNodeOptions::defaults(size_of::<RawNodeOptions>())
}

#[test]
fn no_addresses_means_no_network() {
    let raw = RawNodeOptions { name: Text::of(c"here"), insecure: 1, ..node_options() };
    assert_eq!(raw.network(c"test").unwrap(), None);
}

#[test]
fn texts_are_converted_to_options() {
    let raw = RawNodeOptions {
        listen: Text::of(c"127.0.0.1:7007"),
        peers: Text::of(c"one:1, two:2,"),
        source: Text::of(c"127.0.0.0/8"),
        lost_after: 2_000_000_000,
        workers: 3,
        ..node_options()
    };
    let network = raw.network(c"test").unwrap().unwrap();
    assert_eq!(network.listen, Some("127.0.0.1:7007".parse().unwrap()));
    assert_eq!(network.peers, ["one:1", "two:2"]);
    assert_eq!(network.source, Some("127.0.0.1".parse().unwrap()));
    assert_eq!((network.lost_after, network.workers), (Duration::from_secs(2), 3));
    assert!(!network.insecure);
}

#[test]
fn invalid_address_is_an_error_with_its_name() {
    let raw = RawNodeOptions { listen: Text::of(c"here"), ..node_options() };
    let failure = raw.network(c"test").unwrap_err();
    assert!(failure.message().contains("listen is \"here\""), "{failure:?}");
}
