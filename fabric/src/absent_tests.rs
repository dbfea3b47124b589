//! Objects of a fake provider whose operation tables are missing, empty or short. Each call of
//! the crate into such a table must return an error. Also tests what closing such objects
//! closes.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::fs::File;
use std::os::fd::IntoRawFd;
use std::os::raw::{c_int, c_void};
use std::ptr;
use std::time::Duration;

use libfabric_sys as sys;

use crate::endpoint::{InjectOutcome, LocalSegment, RemoteTarget};
use crate::handle::Handle;
use crate::offer::Info;
use crate::*;

/// The defect of a table.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tables {
    /// The object has no table.
    Missing,
    /// All entries are NULL.
    Empty,
    /// All entries are set, but the table's size field ends before them.
    Short,
}

const ALL: [Tables; 3] = [Tables::Missing, Tables::Empty, Tables::Short];

extern "C" fn called() {
    eprintln!("an entry beyond the end of its table was called");
    std::process::abort();
}

impl Tables {
    /// The table is never freed.
    fn table<T>(self) -> *mut T {
        let entry = match self {
            Self::Missing => return ptr::null_mut(),
            Self::Empty => 0,
            Self::Short => called as *const () as usize,
        };
        let mut table = vec![entry; size_of::<T>() / WORD];
        table[0] = if self == Self::Short { WORD } else { size_of::<T>() };
        table.leak().as_mut_ptr().cast()
    }

    /// A table with some working entries; the named entry is the last that the table covers.
    fn table_up_to<T>(self, last: usize, fill: impl FnOnce(&mut T)) -> *mut T {
        let table = self.table::<T>();
        // SAFETY: a table of this type, whose first word is its size, and no other reference
        // exists yet.
        unsafe {
            fill(&mut *table);
            if self == Self::Short {
                *table.cast::<usize>() = last + WORD;
            }
        }
        table
    }
}

const WORD: usize = size_of::<usize>();

/// The defects of objects that are opened from now on.
#[derive(Debug, Clone, Copy)]
enum ObjectState {
    /// The entries that opening and closing take are present.
    Working,
    /// Objects can be bound, but do not take commands.
    Bound(Tables),
    /// Objects can be bound and take commands; all other entries are absent.
    Commanded(Tables),
    /// All entries are absent.
    Broken(Tables),
}

thread_local! {
    static NEXT: Cell<ObjectState> = const { Cell::new(ObjectState::Working) };
    static OPENED: RefCell<Vec<*mut sys::fid>> = const { RefCell::new(Vec::new()) };
    /// The classes of the defective objects.
    static CLOSED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The object of this class that was opened last.
fn last<T>(class: u32) -> *mut T {
    let is_it = |object: &&*mut sys::fid| {
        // SAFETY: objects are never freed.
        unsafe { (***object).fclass == class as usize }
    };
    OPENED.with_borrow(|opened| *opened.iter().rfind(is_it).unwrap()).cast()
}

/// # Safety
/// `T` is a libfabric object with this class.
unsafe fn object<T>(class: u32) -> *mut T {
    let object = vec![0_usize; size_of::<T>() / WORD].leak().as_mut_ptr().cast::<sys::fid>();
    let ready = |ops: &mut sys::fi_ops| {
        ops.close = Some(close);
        ops.bind = Some(bind);
        ops.control = Some(control);
    };
    let ops = match NEXT.get() {
        ObjectState::Working | ObjectState::Commanded(_) => Tables::Empty.table_up_to(0, ready),
        ObjectState::Bound(tables) => tables.table_up_to(2 * WORD, |ops: &mut sys::fi_ops| {
            ops.close = Some(close);
            ops.bind = Some(bind);
        }),
        ObjectState::Broken(tables) => tables.table(),
    };
    // SAFETY: by contract the object begins with a `fid`, and no other reference exists.
    unsafe { ((*object).fclass, (*object).ops) = (class as usize, ops) };
    OPENED.with_borrow_mut(|opened| opened.push(object));
    object.cast()
}

/// A table of an object that is being opened.
fn table<T>(fill: impl FnOnce(&mut T)) -> *mut T {
    match NEXT.get() {
        ObjectState::Working => Tables::Empty.table_up_to(0, fill),
        ObjectState::Bound(tables)
        | ObjectState::Commanded(tables)
        | ObjectState::Broken(tables) => tables.table(),
    }
}

unsafe extern "C" fn close(object: *mut sys::fid) -> c_int {
    // SAFETY: an object of this file.
    CLOSED.with_borrow_mut(|closed| closed.push(unsafe { (*object).fclass }));
    0
}

unsafe extern "C" fn bind(_: *mut sys::fid, _: *mut sys::fid, _: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut sys::fid, command: c_int, argument: *mut c_void) -> c_int {
    if command == sys::FI_GETWAIT as c_int {
        let descriptor = File::open("/dev/null").unwrap().into_raw_fd();
        // SAFETY: the argument type of this command.
        unsafe { *argument.cast::<c_int>() = descriptor };
    }
    0
}

macro_rules! opens {
    ($($name:ident($parent:ident, $attributes:ident) -> $object:ident, $class:ident
        { $($table:ident: $kind:ident { $($entry:ident = $call:ident),* }),* })*) => {$(
        unsafe extern "C" fn $name(
            _: *mut sys::$parent,
            _: *mut sys::$attributes,
            opened: *mut *mut sys::$object,
            _: *mut c_void,
        ) -> c_int {
            // SAFETY: an object of this class; `opened` receives it.
            unsafe {
                let object: *mut sys::$object = object(sys::$class);
                $((*object).$table = table(|_table: &mut sys::$kind| {
                    $(_table.$entry = Some($call);)*
                });)*
                *opened = object;
            }
            0
        }
    )*};
}

opens! {
    open_domain(fid_fabric, fi_info) -> fid_domain, FI_CLASS_DOMAIN {
        ops: fi_ops_domain {
            av_open = open_vector, cq_open = open_queue, cntr_open = open_counter,
            endpoint = open_endpoint, query_atomic = query_atomic
        },
        mr: fi_ops_mr { regattr = register }
    }
    open_listener(fid_fabric, fi_info) -> fid_pep, FI_CLASS_PEP {
        ops: fi_ops_ep {}, cm: fi_ops_cm { listen = listen }
    }
    open_events(fid_fabric, fi_eq_attr) -> fid_eq, FI_CLASS_EQ { ops: fi_ops_eq {} }
    open_vector(fid_domain, fi_av_attr) -> fid_av, FI_CLASS_AV { ops: fi_ops_av { insert = insert } }
    open_queue(fid_domain, fi_cq_attr) -> fid_cq, FI_CLASS_CQ { ops: fi_ops_cq { read = read_nothing } }
    open_counter(fid_domain, fi_cntr_attr) -> fid_cntr, FI_CLASS_CNTR {
        ops: fi_ops_cntr { read = count, readerr = count }
    }
    open_endpoint(fid_domain, fi_info) -> fid_ep, FI_CLASS_EP {
        ops: fi_ops_ep {}, cm: fi_ops_cm {}, msg: fi_ops_msg { recv = receive }, rma: fi_ops_rma {},
        tagged: fi_ops_tagged {}, atomic: fi_ops_atomic {}
    }
}

unsafe extern "C" fn register(
    _: *mut sys::fid,
    _: *const sys::fi_mr_attr,
    _: u64,
    region: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: an object of this class; `region` receives it.
    unsafe { *region = object(sys::FI_CLASS_MR) };
    0
}

unsafe extern "C" fn listen(_: *mut sys::fid_pep) -> c_int {
    0
}

unsafe extern "C" fn insert(
    _: *mut sys::fid_av,
    _: *const c_void,
    _: usize,
    peer: *mut u64,
    _: u64,
    _: *mut c_void,
) -> c_int {
    // SAFETY: space for one value.
    unsafe { *peer = 7 };
    1
}

unsafe extern "C" fn count(_: *mut sys::fid_cntr) -> u64 {
    1
}

unsafe extern "C" fn query_atomic(
    _: *mut sys::fid_domain,
    _: sys::fi_datatype,
    _: sys::fi_op,
    attributes: *mut sys::fi_atomic_attr,
    _: u64,
) -> c_int {
    // SAFETY: space for one value.
    unsafe { *attributes = sys::fi_atomic_attr { count: 1, size: 8 } };
    0
}

unsafe extern "C" fn receive(
    _: *mut sys::fid_ep,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
    _: u64,
    _: *mut c_void,
) -> isize {
    0
}

unsafe extern "C" fn read_nothing(_: *mut sys::fid_cq, _: *mut c_void, _: usize) -> isize {
    -(sys::FI_EAGAIN as isize)
}

unsafe extern "C" fn read_failure(_: *mut sys::fid_cq, _: *mut c_void, _: usize) -> isize {
    -(error::number::AVAILABLE as isize)
}

unsafe extern "C" fn read_reason(
    _: *mut sys::fid_cq,
    entry: *mut sys::fi_cq_err_entry,
    _: u64,
) -> isize {
    // SAFETY: space for one value.
    unsafe { (*entry).err = sys::FI_EIO };
    1
}

unsafe extern "C" fn read_failed_event(
    _: *mut sys::fid_eq,
    _: *mut u32,
    _: *mut c_void,
    _: usize,
    _: u64,
) -> isize {
    -(error::number::AVAILABLE as isize)
}

/// The offer of the fake provider; a connection request if a half-open connection is passed.
fn offer(connection: Option<*mut sys::fid>, fabric: Option<&Fabric>) -> Offer {
    // SAFETY: libfabric makes an empty element with all attributes; the strings in it are malloc's.
    unsafe {
        let raw = sys::fi_dupinfo(ptr::null());
        (*raw).caps = (Caps::MESSAGE | Caps::RMA | Caps::TAGGED | Caps::ATOMIC).bits();
        (*raw).handle = connection.unwrap_or(ptr::null_mut());
        (*(*raw).ep_attr).type_ = sys::FI_EP_RDM;
        (*(*raw).ep_attr).max_msg_size = 1 << 20;
        (*(*raw).tx_attr).inject_size = 64;
        (*(*raw).tx_attr).iov_limit = 4;
        let domain = &mut *(*raw).domain_attr;
        (domain.mr_key_size, domain.cq_data_size) = (8, 8);
        (*(*raw).fabric_attr).prov_name = libc::strdup(c"made-up".as_ptr());
        let info = Info::adopt(raw).unwrap();
        let info = if let Some(fabric) = fabric { info.for_request(fabric) } else { info };
        Offer::adopt(info, Threading::Safe)
    }
}

/// One object of each kind; all of them work well enough to be opened.
struct Fixture {
    endpoint: Endpoint,
    region: MemoryRegion,
    remote: RemoteMemory,
    peer: Peer,
    counter: Counter,
    queue: CompletionQueue,
    addresses: AddressVector,
    listener: Listener,
    events: EventQueue,
    domain: Domain,
    offer: Offer,
    fabric: Fabric,
}

impl Fixture {
    fn open() -> Self {
        NEXT.set(ObjectState::Working);
        let offer = offer(None, None);
        // SAFETY: an object of this class, owned by the handle.
        let handle = unsafe {
            let fabric: *mut sys::fid_fabric = object(sys::FI_CLASS_FABRIC);
            (*fabric).ops = table(|ops: &mut sys::fi_ops_fabric| {
                ops.domain = Some(open_domain);
                ops.passive_ep = Some(open_listener);
                ops.eq_open = Some(open_events);
            });
            Handle::adopt("fi_fabric", fabric).unwrap()
        };
        let fabric = Fabric::new(handle, offer.capabilities().provider.clone());
        let domain = Domain::open_on(&fabric, &offer).unwrap();
        let events = EventQueue::open(&fabric).unwrap();
        let listener = Listener::open(&fabric, &offer, &events).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let options = QueueOptions { waiting: WaitStrategy::Block, ..QueueOptions::default() };
        let mut queue = CompletionQueue::open_with(&domain, options).unwrap();
        let counter = Counter::open(&domain).unwrap();
        let endpoint = Endpoint::builder(&domain)
            .addresses(&addresses)
            .queue(&mut queue)
            .events(&events)
            .counter(&counter, Access::WRITE)
            .open()
            .unwrap();
        let peer = addresses.insert(&Address(vec![1; 16])).unwrap();
        let region = domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        let remote = domain.attach(&region.describe().unwrap()).unwrap();
        Self {
            endpoint,
            region,
            remote,
            peer,
            counter,
            queue,
            addresses,
            listener,
            events,
            domain,
            offer,
            fabric,
        }
    }

    /// An endpoint of the domain with everything that it needs.
    fn open_endpoint(&mut self) -> Result<Endpoint> {
        Endpoint::builder(&self.domain).addresses(&self.addresses).queue(&mut self.queue).open()
    }
}

#[track_caller]
fn is_absent<T: Debug>(operation: &str, answer: Result<T>) {
    let error = answer.expect_err(operation);
    assert_eq!(error.operation(), operation);
    assert_eq!(error.kind(), ErrorKind::NotSupported, "{error}");
    assert_eq!(error.code(), Some(sys::FI_ENOSYS), "{error}");
    assert_eq!(error.provider(), Some("made-up"), "{error}");
    assert!(error.to_string().starts_with(&format!("{operation} on made-up")), "{error}");
}

/// The failure of a queue itself.
#[track_caller]
fn queue_is_absent(operation: &str, outcome: Option<Outcome>) {
    is_absent(operation, outcome.unwrap().map_err(|failure| failure.error));
}

#[test]
fn opening_an_object_without_entries_fails() {
    for tables in ALL {
        let mut w = Fixture::open();
        NEXT.set(ObjectState::Broken(tables));
        is_absent("fi_domain_bind", Domain::open_asynchronous(&w.fabric, &w.offer, &w.events));
        is_absent("fi_pep_bind", Listener::open(&w.fabric, &w.offer, &w.events));
        is_absent("fi_ep_bind (address vector)", w.open_endpoint());
        is_absent("fi_cntr_read", Counter::open(&w.domain));
        NEXT.set(ObjectState::Commanded(tables));
        is_absent("fi_listen", Listener::open(&w.fabric, &w.offer, &w.events));
        if tables != Tables::Missing {
            NEXT.set(ObjectState::Bound(tables));
            is_absent("fi_enable", w.open_endpoint());
        }

        // SAFETY: objects of this file.
        unsafe {
            (*w.fabric.as_ptr()).ops = tables.table();
            (*w.domain.as_ptr()).ops = tables.table();
            (*w.domain.as_ptr()).mr = tables.table();
        }
        is_absent("fi_domain", Domain::open_on(&w.fabric, &w.offer));
        is_absent("fi_eq_open", EventQueue::open(&w.fabric));
        is_absent("fi_passive_ep", Listener::open(&w.fabric, &w.offer, &w.events));
        is_absent("fi_av_open", AddressVector::open(&w.domain));
        is_absent("fi_cq_open", CompletionQueue::open(&w.domain));
        is_absent("fi_cntr_open", Counter::open(&w.domain));
        is_absent("fi_endpoint", w.open_endpoint());
        let memory = || HostMemory::zeroed(64).unwrap();
        is_absent("fi_mr_regattr", w.domain.register(memory(), Access::ALL));
        is_absent("fi_mr_regattr", w.domain.probe_memory(MemoryKind::Host));
        let (sum, plain) = (AtomicOperation::Sum, AtomicForm::Plain);
        assert_eq!(w.domain.atomic_limit(Datatype::U64, sum, plain), None);
    }
}

#[test]
fn using_an_object_without_entries_fails() {
    for tables in ALL {
        let w = Fixture::open();
        let connection = last::<sys::fid>(sys::FI_CLASS_MR);
        // SAFETY: objects of this file.
        unsafe {
            (*w.addresses.as_fid().cast::<sys::fid_av>()).ops = tables.table();
            (*w.counter.as_fid().cast::<sys::fid_cntr>()).ops = tables.table();
            (*w.events.shared_handle().as_fid().cast::<sys::fid_eq>()).ops = tables.table();
            (*last::<sys::fid_pep>(sys::FI_CLASS_PEP)).ops = tables.table();
            (*last::<sys::fid_pep>(sys::FI_CLASS_PEP)).cm = tables.table();
            (*last::<sys::fid>(sys::FI_CLASS_MR)).ops = tables.table();
            (*w.domain.as_ptr()).fid.ops = tables.table();
        }
        is_absent("fi_av_insert", w.addresses.insert(&Address(vec![2; 16])));
        is_absent("fi_av_lookup", w.addresses.lookup(w.peer));
        is_absent("fi_av_remove", w.addresses.remove(w.peer));
        assert_eq!((w.counter.read(), w.counter.read_errors()), (0, 0));

        is_absent("fi_getname", w.listener.address());
        assert_eq!(w.listener.connection_data_limit(), 32);
        let request = offer(Some(connection), Some(&w.fabric));
        let request = ConnectionRequest { offer: request, data: Vec::new() };
        is_absent("fi_reject", w.listener.reject(&request, b""));

        let mut events = w.events;
        is_absent("fi_eq_read", events.poll());
        is_absent("fi_eq_read", events.wait(Duration::from_secs(5)));
        if tables != Tables::Missing {
            let queue = events.shared_handle().as_fid().cast::<sys::fid_eq>();
            let fails = |ops: &mut sys::fi_ops_eq| ops.read = Some(read_failed_event);
            // SAFETY: an object of this file.
            unsafe { (*queue).ops = tables.table_up_to(WORD, fails) };
            is_absent("fi_eq_readerr", events.poll());
        }

        is_absent("fi_mr_bind", w.region.bind_counter(&w.counter));
        is_absent("fi_mr_bind", w.region.bind_endpoint(&w.endpoint));
        is_absent("fi_mr_refresh", w.region.force_refresh(0..8));
        is_absent("fi_mr_raw_attr", w.region.raw_key());
        is_absent("fi_mr_map_raw", w.domain.map_raw_key(0, &[1]));
        w.domain.unmap_key(1);
        assert!(failed_closes_of(w.region) > 0);
    }
}

/// The number of objects that could not be closed after their last user was dropped.
fn failed_closes_of<T>(last_user: T) -> u64 {
    let before = failed_closes();
    drop(last_user);
    failed_closes() - before
}

#[test]
fn posting_to_an_endpoint_without_entries_fails() {
    for tables in ALL {
        let Fixture { mut endpoint, region, remote, peer, mut queue, .. } = Fixture::open();
        // SAFETY: an object of this file.
        unsafe {
            let object = &mut *last::<sys::fid_ep>(sys::FI_CLASS_EP);
            (object.ops, object.cm, object.fid.ops) =
                (tables.table(), tables.table(), tables.table());
            (object.msg, object.tagged) = (tables.table(), tables.table());
            (object.rma, object.atomic) = (tables.table(), tables.table());
        }
        is_absent("fi_getname", endpoint.address());
        is_absent(
            "fi_setopt (FI_OPT_FI_HMEM_P2P)",
            endpoint.set_peer_to_peer(PeerToPeer::Required),
        );
        assert_eq!(endpoint.connection_data_limit(), 32);
        is_absent("fi_connect", endpoint.start_connecting(&Address(vec![1; 16]), b"data"));
        is_absent("fi_accept", endpoint.start_accepting(b"data"));
        is_absent("fi_shutdown", endpoint.disconnect());

        let (queue, e) = (&mut queue, &mut endpoint);
        let (all, there) = (region.all(), remote.all());
        let fenced = PostOptions::token(1).flags(TransferFlags::FENCE);
        is_absent("fi_send", e.send(queue, peer, &all, 1));
        is_absent("fi_send", e.send(queue, peer, &all, fenced));
        is_absent("fi_tsendmsg", e.send_tagged(queue, peer, &all, 2, 1));
        is_absent("fi_recv", e.receive(queue, &all, 1));
        is_absent("fi_recv", e.receive_immediate(queue, 1));
        is_absent("fi_trecv", e.receive_tagged(queue, &all, (1, 0), 1));
        is_absent("fi_recv", e.try_receive(queue, Some(&all), None, 1));
        is_absent("fi_inject", e.try_inject(queue, peer, b"data", None));
        is_absent("fi_tinject", e.try_inject(queue, peer, b"data", Some(2)));

        is_absent("fi_write", e.write(queue, peer, &all, &there, 1));
        is_absent("fi_write", e.write(queue, peer, &all, &there, fenced));
        is_absent("fi_writedata", e.write_data(queue, peer, &all, &there, 3, 1));
        is_absent("fi_writedata", e.write_data(queue, peer, &all, &there, 3, fenced));
        is_absent("fi_read", e.read(queue, peer, &all, &there, 1));
        is_absent("fi_read", e.read(queue, peer, &all, &there, fenced));
        let target = RemoteTarget { memory: &remote, offset: 0 };
        let pieces = [LocalSegment { region: &region, offset: 0, length: 8 }];
        let options = PostOptions::token(1);
        let written = e.try_write_segments(queue, peer, &pieces, target, Some(3), &options);
        is_absent("fi_writemsg", written);
        // After one refusal the bytes are posted as an ordinary write.
        for data in [None, Some(3)] {
            let injected = e.try_inject_write(queue, peer, b"data", target, data).unwrap();
            assert!(matches!(injected, InjectOutcome::NotSupported));
        }

        let word = region.slice(0..8).unwrap();
        let remote = remote.slice(0..8).unwrap();
        let (datatype, operation) = (Datatype::U64, AtomicOperation::Sum);
        let request = AtomicRequest { datatype, operation, operand: &word, remote: &remote };
        is_absent("fi_atomic", e.atomic(queue, peer, &request, 1));
        is_absent("fi_fetch_atomic", e.fetch_atomic(queue, peer, &request, &word, 1));
        is_absent("fi_compare_atomic", e.compare_atomic(queue, peer, &request, &word, &word, 1));
        assert_eq!((queue.in_flight(), queue.quarantined()), (0, 0));

        is_absent("fi_close", endpoint.close());
    }
}

#[test]
fn queues_without_entries_report_an_error() {
    for tables in ALL {
        let Fixture { mut endpoint, region, mut queue, fabric, offer, .. } = Fixture::open();
        let receive = endpoint.receive(&mut queue, &region.all(), 1).unwrap();
        // A queue that reports the source of a message, which is another libfabric call.
        let telling = Offer { reports_source: true, ..offer };
        let mut sources =
            CompletionQueue::open(&Domain::open_on(&fabric, &telling).unwrap()).unwrap();
        let object = queue.shared_handle().as_fid().cast::<sys::fid_cq>();
        // SAFETY: objects of this file.
        unsafe {
            (*sources.shared_handle().as_fid().cast::<sys::fid_cq>()).ops = tables.table();
            (*object).ops = tables.table();
            (*endpoint.as_fid().cast::<sys::fid_ep>()).ops = tables.table();
            (*fabric.as_ptr()).ops = tables.table();
        }
        queue_is_absent("fi_cq_read", queue.poll());
        queue_is_absent("fi_cq_read", Some(queue.wait(Duration::from_secs(5))));
        queue_is_absent("fi_cq_read", sources.poll());
        is_absent("fi_cq_signal", queue.waker().wake());
        assert!(!queue.may_sleep(), "the queue cannot prove that it is empty");
        // A receive that cannot be cancelled retains its memory.
        queue.abandon(receive);
        assert_eq!(queue.quarantined(), 1);
        if tables == Tables::Missing {
            continue;
        }

        // A queue that can be read, but not waited on.
        let reads = |ops: &mut sys::fi_ops_cq| ops.read = Some(read_nothing);
        // SAFETY: an object of this file.
        unsafe { (*object).ops = tables.table_up_to(WORD, reads) };
        let late = queue.wait(Duration::from_millis(60)).unwrap_err().error;
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");

        // A failure whose reason cannot be read, and a failure without a text.
        let fails = |ops: &mut sys::fi_ops_cq| ops.read = Some(read_failure);
        // SAFETY: an object of this file.
        unsafe { (*object).ops = tables.table_up_to(WORD, fails) };
        queue_is_absent("fi_cq_readerr", queue.poll());
        let fails = |ops: &mut sys::fi_ops_cq| {
            ops.read = Some(read_failure);
            ops.readerr = Some(read_reason);
        };
        // SAFETY: an object of this file.
        unsafe { (*object).ops = tables.table_up_to(3 * WORD, fails) };
        let failure = queue.poll().unwrap().unwrap_err().error;
        assert_eq!(failure.code(), Some(sys::FI_EIO), "{failure}");
        assert_eq!(failure.provider_error(), Some((0, None)));
    }
}

#[test]
fn closing_an_endpoint_releases_the_same_as_dropping_it() {
    let closed_by = |end: fn(Endpoint)| {
        // The endpoint has the last reference to all objects that it was made from.
        let Fixture { endpoint, .. } = Fixture::open();
        CLOSED.take();
        end(endpoint);
        CLOSED.take()
    };
    let dropped = closed_by(drop);
    assert_eq!(closed_by(|endpoint| endpoint.close().unwrap()), dropped);
    let opened = [
        sys::FI_CLASS_EP,
        sys::FI_CLASS_AV,
        sys::FI_CLASS_CQ,
        sys::FI_CLASS_CNTR,
        sys::FI_CLASS_EQ,
        sys::FI_CLASS_DOMAIN,
        sys::FI_CLASS_FABRIC,
    ];
    assert!(opened.iter().all(|class| dropped.contains(&(*class as usize))), "{dropped:?}");
}
