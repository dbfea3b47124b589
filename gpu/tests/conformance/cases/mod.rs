//! The cases.

mod blocks;
mod capture;
mod devices;
mod failures;
mod foreign;
mod legacy;
mod memory;
mod points;
mod sharing;
mod streams;
mod waiting;

use crate::fixture::Fixture;

/// Why a case does not apply to a device.
pub struct Skip(pub String);

#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    pub run: fn(&Fixture) -> Result<(), Skip>,
    /// The device cannot be used in this process any more.
    pub breaks_device: bool,
}

macro_rules! cases {
    ($($module:ident: $($name:ident),*;)*) => {
        pub const CASES: &[Case] = &[
            $($(Case { name: stringify!($name), run: $module::$name, breaks_device: false },)*)*
            DEVICE_BREAKING[0], DEVICE_BREAKING[1],
        ];
    };
}

/// Cases after which the device cannot be used.
const DEVICE_BREAKING: [Case; 2] = [
    Case {
        name: "a_failure_is_told_and_stays",
        run: failures::a_failure_is_told_and_stays,
        breaks_device: true,
    },
    Case {
        name: "streams_of_a_reset_device_are_closed_at_once",
        run: failures::streams_of_a_reset_device_are_closed_at_once,
        breaks_device: true,
    },
];

cases! {
    devices:
        properties_make_sense, a_device_that_is_not_there_is_refused, opened_twice_it_is_the_same,
        a_survey_finds_it, threads_share_a_device, a_handle_says_that_the_process_forked,
        links_count_what_they_carry, the_caller_keeps_its_own_context;
    streams:
        bytes_arrive_whatever_their_number, the_host_is_reached_by_registered_memory,
        filling_fills_exactly_that, words_tell_who_waits_for_them, a_stream_of_others_is_used, the_checksum_is_that_of_the_host,
        events_order_streams, memory_lives_as_long_as_its_operations,
        the_caller_goes_on_meanwhile, a_deadline_is_kept, a_peer_is_reached_directly,
        a_peer_is_not_reached_without_leave, lengths_and_bounds_are_checked,
        owners_may_do_anything_when_they_are_dropped;
    capture:
        work_goes_on_beside_a_graph_capture;
    blocks:
        blocks_arrive_however_they_lie, blocks_arrive_however_long_they_are,
        ten_thousand_blocks_arrive, blocks_that_reach_beyond_are_refused_before_any_moves,
        memory_lives_as_long_as_its_blocks, blocks_go_to_peers_and_to_the_host;
    failures:
        streams_dropped_at_exit_are_not_waited_for;
    points:
        a_point_is_reached_when_all_before_it_is_done, a_point_is_dropped_at_any_time,
        memory_goes_when_only_points_are_asked;
    waiting:
        other_streams_go_on_meanwhile, what_is_freed_meanwhile_is_freed_afterwards,
        a_stream_of_others_is_waited_for_as_well, what_is_given_back_is_free_at_once;
    memory:
        what_is_freed_is_free, a_budget_refuses_with_numbers, more_than_there_is_is_refused,
        the_host_is_registered_once, an_address_tells_who_allocated_it, a_dma_buf_comes_out;
    sharing:
        another_process_reads_and_writes_it, memory_outlives_its_maker,
        a_peer_imports_it, what_is_no_memory_is_refused, memory_grows_in_two_places,
        threads_grow_memory, imported_memory_lies_where_its_pieces_lie,
        only_what_was_made_to_be_shared_is_exported;
    foreign:
        foreign_pieces_cross_to_another_process, foreign_pieces_stay_when_their_owner_goes,
        memory_in_pieces_comes_one_at_a_time, pieces_that_do_not_fit_are_refused,
        foreign_memory_that_cannot_leave_says_why, what_is_adopted_is_there,
        adopted_memory_is_reached_where_it_is_mapped;
    legacy:
        a_handle_is_opened_once, a_part_of_an_allocation_is_opened, a_handle_means_nothing_at_home,
        what_is_no_handle_is_refused, memory_whose_maker_died_is_no_garbage;
}

pub fn skip(reason: &str) -> Result<(), Skip> {
    Err(Skip(reason.to_owned()))
}

/// The second device, or the reason why there is none.
pub fn second(fixture: &Fixture) -> Result<&gpu::Device, Skip> {
    fixture.second.as_ref().ok_or_else(|| Skip("there is one device only".to_owned()))
}
