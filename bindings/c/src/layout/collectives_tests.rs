use std::mem::offset_of;

use super::*;
use crate::ffi::Layout as _;
use crate::status::Status;

/// `tests/programs/layout.c` has the same numbers.
#[test]
fn structures_have_the_layout_of_c() {
    assert_eq!(size_of::<RawDomainOptions>(), 128);
    assert_eq!(RawDomainOptions::MIN_SIZE, size_of::<RawDomainOptions>());
    assert_eq!(offset_of!(RawDomainOptions, ranks), 24);
    assert_eq!(offset_of!(RawDomainOptions, topology_hash), 56);
    assert_eq!(offset_of!(RawDomainOptions, waiting), 80);
    assert_eq!(offset_of!(RawDomainOptions, parameters), 112);
    assert_eq!(size_of::<RawParameters>(), 16);
    assert_eq!(offset_of!(RawParameters, algorithm), 12);
    assert_eq!(size_of::<RawParamEntry>(), 40);
    assert_eq!(offset_of!(RawParamEntry, parameters), 24);
    assert_eq!(size_of::<RawExecStat>(), 40);
    assert_eq!(offset_of!(RawExecStat, success), 32);
}

fn options() -> RawDomainOptions {
    RawDomainOptions::defaults(size_of::<RawDomainOptions>())
}

#[test]
fn default_options_convert_to_the_defaults() {
    let converted = options().to_options(c"test").unwrap();
    assert_eq!(format!("{converted:?}"), format!("{:?}", DomainOptions::new()));
    let choices = options().choices(c"test").unwrap();
    assert_eq!(choices.candidates, [Parameters::default()]);
    assert_eq!(choices.first_alpha, None);
    assert_eq!(options().key(c"test", 3).unwrap(), CommDomainKey::of_first_ranks(3));
}

#[test]
fn header_has_the_numbers_of_types_and_operations() {
    let header = include_str!("../../include/fabricast.h");
    let defined = |prefix: &str| {
        let lines = header.lines().filter_map(|line| line.strip_prefix("#define FABRICAST_"));
        let named = lines.filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned);
        let parts = named.filter_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?.to_lowercase().replace('_', "-");
            Some((name, words.next()?.parse::<u32>().ok()?))
        });
        parts.collect::<Vec<_>>()
    };
    let types = DataType::ALL.map(|it| (it.name().to_owned(), it as u32));
    assert_eq!(defined("TYPE_"), types);
    let ops = ReduceOp::ALL.map(|it| (it.name().to_owned(), it as u32));
    assert_eq!(defined("REDUCE_"), ops);
    let operations = Collective::ALL.map(|it| (it.name().to_owned(), it as u32));
    assert_eq!(defined("OPERATION_"), operations);
    let algorithms = defined("ALGORITHM_");
    for (number, algorithm) in (0..).zip(Algorithm::ALL) {
        assert_eq!(algorithms[number as usize], (algorithm.name().to_owned(), number));
        let parameters = Parameters { algorithm, ..Parameters::default() };
        assert_eq!(RawParameters::of(parameters).to_parameters(c"test").unwrap(), parameters);
    }
    assert_eq!(algorithms.len(), Algorithm::ALL.len());
}

#[test]
fn unknown_numbers_are_errors() {
    let invalid = [
        RawDomainOptions { aggregation: 3, ..options() },
        RawDomainOptions { aggregation: 2, percentile: 101, ..options() },
        RawDomainOptions { aggregation_point: 2, ..options() },
        RawDomainOptions { aggregation_point: 1, round_timeout: -1, ..options() },
        RawDomainOptions { reads_peers: 2, ..options() },
        RawDomainOptions { is_fixed: 2, ..options() },
        RawDomainOptions { waiting: 3, ..options() },
        RawDomainOptions {
            is_fixed: 1,
            parameters: RawParameters { alpha: 1001, ..RawParameters::default() },
            ..options()
        },
        RawDomainOptions {
            is_fixed: 1,
            parameters: RawParameters { algorithm: 5, ..RawParameters::default() },
            ..options()
        },
    ];
    for options in invalid {
        let failure = options.to_options(c"test").unwrap_err();
        assert_eq!(failure.status, Status::InvalidArgument, "{options:?}");
    }
    assert!(data_type(c"test", 0).is_err() && data_type(c"test", 13).is_err());
    assert!(reduce_op(c"test", 0).is_err() && reduce_op(c"test", 257).is_err());
    assert!(op_key(c"test", 10, 1, 1).is_err());
    assert!(RawDomainOptions { first_alpha: 1001, ..options() }.choices(c"test").is_err());
}

#[test]
fn entry_and_statistics_are_converted() {
    let key = op_key(c"test", 1, 4096, 11).unwrap();
    let parameters = Parameters { alpha: 900, stripes: 2, ..Parameters::default() };
    let entry = Entry { number: 7, key, parameters };
    assert_eq!(RawParamEntry::of(&entry).to_entry(c"test").unwrap(), entry);
    let raw = RawExecStat {
        fast_time: 1000,
        second_time: 2000,
        fast_bytes: 3,
        second_bytes: 4,
        success: 1,
    };
    let stat = raw.to_stat();
    assert_eq!((stat.time(), stat.bytes(), stat.success), (Duration::from_micros(2), 7, true));
}
