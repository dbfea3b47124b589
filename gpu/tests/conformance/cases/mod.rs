//! The cases.

mod blocks;
mod capture;
mod devices;
mod exchanges;
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
        name: "failure_is_reported_and_permanent",
        run: failures::failure_is_reported_and_permanent,
        breaks_device: true,
    },
    Case {
        name: "streams_of_a_reset_device_close_at_once",
        run: failures::streams_of_a_reset_device_close_at_once,
        breaks_device: true,
    },
];

cases! {
    devices:
        properties_are_plausible, absent_device_is_refused,
        opening_twice_returns_the_same_device, survey_finds_the_device, threads_share_a_device,
        handles_fail_in_a_forked_child, link_counters_count_transferred_bytes,
        current_context_of_the_caller_is_preserved, remote_writes_are_flushed;
    streams:
        copies_of_any_length_arrive, registered_host_memory_is_accessible,
        fill_changes_exactly_its_range, written_words_wake_waiting_streams,
        foreign_stream_is_usable, device_checksum_equals_host_checksum, events_order_streams,
        memory_outlives_its_operations, operations_are_asynchronous, wait_ends_at_its_deadline,
        peer_is_accessed_directly, peer_without_access_is_refused,
        lengths_and_bounds_are_checked, owners_may_call_back_when_dropped;
    capture:
        operations_do_not_disturb_a_graph_capture;
    blocks:
        blocks_arrive_at_any_alignment, blocks_arrive_at_any_length, ten_thousand_blocks_arrive,
        out_of_bounds_blocks_are_refused_before_any_copy, memory_outlives_its_block_copies,
        blocks_are_copied_to_peers_and_the_host;
    exchanges:
        exchange_gathers_bytes_at_any_alignment, exchange_reduces_all_types_as_the_host_does,
        exchange_passes_chunks_through_stages,
        exchange_is_given_up_when_it_is_stopped, invalid_exchanges_are_refused;
    failures:
        streams_dropped_at_exit_are_not_waited_for;
    points:
        point_is_reached_after_all_earlier_operations, point_may_be_dropped_at_any_time,
        memory_is_released_by_point_queries_alone, time_passes_from_one_event_to_a_later_one;
    waiting:
        other_streams_run_while_one_waits, frees_are_deferred_until_no_stream_waits,
        frees_are_deferred_for_foreign_streams, memory_is_free_at_once_without_waiting_streams;
    memory:
        freed_memory_is_free, exceeded_budget_is_refused_with_numbers,
        more_than_the_device_has_is_refused, host_range_is_registered_once,
        pointer_attributes_name_the_allocator, memory_is_exported_as_dma_buf,
        synchronous_copies_are_set_for_unmapped_memory;
    sharing:
        memory_is_shared_with_another_process, shared_memory_outlives_its_exporter,
        peer_device_imports_memory, invalid_memory_descriptor_is_refused,
        memory_grows_in_two_processes, threads_grow_memory,
        imported_memory_reports_the_device_of_its_pieces, only_shareable_memory_is_exported;
    foreign:
        foreign_pieces_are_shared_with_another_process, foreign_pieces_outlive_their_owner,
        memory_pieces_are_imported_one_at_a_time, pieces_that_do_not_fit_are_refused,
        unexportable_foreign_memory_reports_the_reason, adopting_unmapped_memory_is_refused,
        adopted_memory_is_accessible_where_mapped;
    legacy:
        legacy_handle_is_opened_once, part_of_an_allocation_can_be_opened,
        own_legacy_handle_is_refused, invalid_legacy_handle_is_refused,
        imported_memory_outlives_its_exporter;
}

pub fn skip(reason: &str) -> Result<(), Skip> {
    Err(Skip(reason.to_owned()))
}

/// The second device, or the reason why there is none.
pub fn second(fixture: &Fixture) -> Result<&gpu::Device, Skip> {
    fixture.second.as_ref().ok_or_else(|| Skip("there is one device only".to_owned()))
}
