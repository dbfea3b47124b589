//! Parameter stores: the same parameters on all ranks, for operations of the program.

use std::ffi::c_char;
use std::time::Instant;

use collective::{SavedParameters, ShmParamStore};

use crate::exclusive::Exclusive;
use crate::failure::{Failure, Operation, Result, c_text};
use crate::ffi::{Array, Out, Text, WithDefaults, export};
use crate::handle::{Handle, kind};
use crate::layout::{RawDomainOptions, RawExecStat, RawParamEntry, RawParameters, flag, op_key};
use crate::registry::{self, Registry};
use crate::status::Status;
use crate::timeout::Timeout;
use crate::variables;

type OpenParamStore = Exclusive<ShmParamStore>;

kind!(OpenParamStore, 17, "parameter store", Exclusive::end);

/// Parameters of JSON, for these machines.
pub(crate) fn saved_parameters(
    operation: Operation,
    topology: &Text<'_>,
    json: &[u8],
) -> Result<SavedParameters> {
    let topology = topology.get(operation, "topology")?.unwrap_or_default();
    let malformed = |cause: String| Failure::new(Status::Malformed, operation, cause);
    let text = std::str::from_utf8(json).map_err(|error| malformed(error.to_string()))?;
    SavedParameters::from_json(text, topology).map_err(|error| malformed(error.to_string()))
}

/// Uses a store, when no other thread does.
fn with<R>(
    operation: Operation,
    store: Handle<OpenParamStore>,
    act: impl FnOnce(&mut ShmParamStore) -> Result<R>,
) -> Result<R> {
    store.find(operation)?.with(operation, Timeout::Forever, act)
}

/// The element of a caller's structure.
fn one<T: crate::ffi::Plain>(operation: Operation, name: &str, element: Array<'_, T>) -> Result<T> {
    let found = element.get(operation, name, 1)?.first().copied();
    found.ok_or_else(|| Failure::invalid(operation, format_args!("\"{name}\" is NULL")))
}

export! {
    fn fabricast_param_store_attach(
        world_size: u32,
        rank: u32,
        options: Option<RawDomainOptions>,
        store: Out<'_, *mut OpenParamStore>,
    ) -> i32, c"attach to parameter store" {
        variables::apply(OPERATION)?;
        let raw = options.unwrap_or_else(|| RawDomainOptions::defaults(size_of::<RawDomainOptions>()));
        let (key, choices) = (raw.key(OPERATION, world_size)?, raw.choices(OPERATION)?);
        let options = raw.to_options(OPERATION)?;
        let attached = ShmParamStore::attach(&key, rank, &options, move |_| choices.clone())?;
        store.put(registry::open(OPERATION, Exclusive::new(attached))?)
    }

    fn fabricast_param_store_leave(
        store: Option<Handle<OpenParamStore>>,
    ) -> i32, c"leave parameter store" {
        registry::close(OPERATION, store)
    }

    fn fabricast_param_store_enter(
        store: Handle<OpenParamStore>,
        collective: u32,
        bytes: u64,
        data_type: u32,
        timeout: Timeout,
        entry: Out<'_, RawParamEntry>,
    ) -> i32, c"enter operation" {
        let key = op_key(OPERATION, collective, bytes, data_type)?;
        let end = timeout.end();
        let entered = store.find(OPERATION)?.with(OPERATION, timeout, |store| {
            Ok(store.enter(key, end.saturating_duration_since(Instant::now()))?)
        })?;
        entry.put(RawParamEntry::of(&entered))
    }

    fn fabricast_param_store_record(
        store: Handle<OpenParamStore>,
        entry: Array<'_, RawParamEntry>,
        stat: Array<'_, RawExecStat>,
    ) -> i32, c"record operation" {
        let entry = one(OPERATION, "entry", entry)?.to_entry(OPERATION)?;
        let stat = one(OPERATION, "stat", stat)?.to_stat();
        with(OPERATION, store, |store| Ok(store.record(&entry, &stat)?))
    }

    fn fabricast_param_store_parameters(
        store: Handle<OpenParamStore>,
        collective: u32,
        bytes: u64,
        data_type: u32,
        parameters: Out<'_, RawParameters>,
    ) -> i32, c"get parameters" {
        let key = op_key(OPERATION, collective, bytes, data_type)?;
        let found = with(OPERATION, store, |store| Ok(store.parameters(key)))?;
        parameters.put(RawParameters::of(found))
    }

    fn fabricast_param_store_writer_lost(
        store: Handle<OpenParamStore>,
        is_lost: Out<'_, u64>,
    ) -> i32, c"find the writer of parameters" {
        let lost = with(OPERATION, store, |store| Ok(store.has_lost_writer()))?;
        is_lost.put(lost.into())
    }

    /// Stops or continues learning.
    fn fabricast_param_store_freeze(
        store: Handle<OpenParamStore>,
        is_frozen: u32,
    ) -> i32, c"freeze parameters" {
        let is_frozen = flag(OPERATION, "is_frozen", is_frozen)?;
        with(OPERATION, store, |store| {
            store.with_controller(|controller| controller.freeze(is_frozen));
            Ok(())
        })
    }

    /// The parameters that were learnt, as JSON.
    fn fabricast_param_store_save(
        store: Handle<OpenParamStore>,
        topology: Text<'_>,
        json: Out<'_, *mut c_char>,
    ) -> i32, c"save parameters" {
        let topology = topology.get(OPERATION, "topology")?.unwrap_or_default();
        let saved = with(OPERATION, store, |store| Ok(store.saved_parameters()))?;
        json.put(Registry::current().lend_text(c_text(saved.to_json(topology))))
    }

    fn fabricast_param_store_load(
        store: Handle<OpenParamStore>,
        topology: Text<'_>,
        json: &[u8] [length],
    ) -> i32, c"load parameters" {
        let saved = saved_parameters(OPERATION, &topology, json)?;
        with(OPERATION, store, |store| {
            store.with_controller(|controller| saved.load_into(controller));
            Ok(())
        })
    }
}
