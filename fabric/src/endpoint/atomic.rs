//! One-sided atomics.
//!
//! Atomics are atomic only against atomics of the same provider. The target's processor, and
//! peers that use another provider, are not ordered with them unless the hardware guarantees
//! it. Access such words by atomics alone, also locally, through an endpoint that is connected
//! to itself.

use libfabric_sys as sys;

use super::Endpoint;
use super::post::PostOptions;
use super::rma::parts;
use crate::{
    Access, CompletionKind, CompletionQueue, Domain, ErrorKind, OperationId, Peer, RegionSlice,
    RemoteSlice, Result,
};

macro_rules! numbered {
    ($(#[$attribute:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $number:ident),* $(,)? }) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $variant),* }
        impl $name {
            /// Every variant.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];
            fn number(self) -> u32 {
                match self { $(Self::$variant => sys::$number),* }
            }
        }
    };
}

numbered! {
    /// The element type of an atomic.
    Datatype {
        /// Signed 8-bit integer.
        I8 = FI_INT8,
        /// Unsigned 8-bit integer.
        U8 = FI_UINT8,
        /// Signed 16-bit integer.
        I16 = FI_INT16,
        /// Unsigned 16-bit integer.
        U16 = FI_UINT16,
        /// Signed 32-bit integer.
        I32 = FI_INT32,
        /// Unsigned 32-bit integer.
        U32 = FI_UINT32,
        /// Signed 64-bit integer.
        I64 = FI_INT64,
        /// Unsigned 64-bit integer.
        U64 = FI_UINT64,
        /// 32-bit float.
        F32 = FI_FLOAT,
        /// 64-bit float.
        F64 = FI_DOUBLE,
    }
}

impl Datatype {
    /// Size of one element in bytes.
    ///
    /// ```
    /// use fabric::Datatype;
    /// assert_eq!(Datatype::ALL.iter().map(|t| t.size()).max(), Some(8));
    /// ```
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

numbered! {
    /// The operation of an atomic on its target, with the operand.
    AtomicOperation {
        /// Keeps the smaller.
        Minimum = FI_MIN,
        /// Keeps the larger.
        Maximum = FI_MAX,
        /// Adds.
        Sum = FI_SUM,
        /// Multiplies.
        Product = FI_PROD,
        /// Logical or.
        LogicalOr = FI_LOR,
        /// Logical and.
        LogicalAnd = FI_LAND,
        /// Bitwise or.
        BitOr = FI_BOR,
        /// Bitwise and.
        BitAnd = FI_BAND,
        /// Logical exclusive or.
        LogicalXor = FI_LXOR,
        /// Bitwise exclusive or.
        BitXor = FI_BXOR,
        /// Reads (fetching form only).
        Read = FI_ATOMIC_READ,
        /// Stores.
        Write = FI_ATOMIC_WRITE,
        /// Stores if equal (comparing form only).
        CompareSwap = FI_CSWAP,
        /// Stores if not equal (comparing form only).
        CompareSwapNotEqual = FI_CSWAP_NE,
        /// Stores if the operand is less or equal (comparing form only).
        CompareSwapLessEqual = FI_CSWAP_LE,
        /// Stores if the operand is less (comparing form only).
        CompareSwapLess = FI_CSWAP_LT,
        /// Stores if the operand is greater or equal (comparing form only).
        CompareSwapGreaterEqual = FI_CSWAP_GE,
        /// Stores if the operand is greater (comparing form only).
        CompareSwapGreater = FI_CSWAP_GT,
        /// Stores the bits under a mask (comparing form only).
        MaskedSwap = FI_MSWAP,
    }
}

/// The three forms of an atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AtomicForm {
    /// Changes the target and returns nothing (`fi_atomic`). Its completion does not imply that
    /// the target has changed already.
    Plain,
    /// Changes the target and returns the old value (`fi_fetch_atomic`), which is in the local
    /// buffer when the operation completes.
    Fetch,
    /// Changes the target if a comparison holds, and returns the old value in both cases
    /// (`fi_compare_atomic`).
    Compare,
}

impl AtomicForm {
    fn flags(self) -> u64 {
        match self {
            Self::Plain => 0,
            Self::Fetch => sys::FI_FETCH_ATOMIC,
            Self::Compare => sys::FI_COMPARE_ATOMIC,
        }
    }
}

impl Domain {
    /// The number of elements that one atomic operation of an endpoint of this domain can take.
    ///
    /// Returns `None` if the provider does not support the combination: it may list `FI_ATOMIC` and
    /// support none.
    #[must_use]
    pub fn atomic_limit(
        &self,
        datatype: Datatype,
        operation: AtomicOperation,
        form: AtomicForm,
    ) -> Option<usize> {
        let mut attributes = sys::fi_atomic_attr { count: 0, size: 0 };
        let (datatype, operation, form) = (datatype.number(), operation.number(), form.flags());
        // SAFETY: the domain is alive, the output is valid.
        let code = unsafe {
            sys::fi_query_atomic(self.as_ptr(), datatype, operation, &mut attributes, form)
        };
        (code == 0).then_some(attributes.count)
    }
}

/// One atomic: operation, remote elements and operands.
///
/// Fetch-and-add on a peer's counter:
///
/// ```
/// use std::time::Duration;
/// use fabric::*;
///
/// let caps = Caps::MESSAGE | Caps::RMA | Caps::ATOMIC;
/// let query = Query::new(EndpointKind::Rdm).caps(caps);
/// let offer = query.provider("tcp;ofi_rxm").source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// # let addresses = AddressVector::open(&domain)?;
/// # let mut queue = CompletionQueue::open(&domain)?;
/// # let mut endpoint =
/// #     Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
/// # let me = addresses.insert(&endpoint.address()?)?;
/// let counter = domain.register(HostMemory::zeroed(8)?, Access::ALL)?;
/// let local = domain.register(HostMemory::zeroed(16)?, Access::ALL)?;
/// counter.store_u64(0, 40)?;
/// local.store_u64(0, 2)?;
///
/// let remote = domain.attach(&counter.describe()?)?.all();
/// let request = AtomicRequest {
///     datatype: Datatype::U64,
///     operation: AtomicOperation::Sum,
///     operand: &local.slice(0..8)?,
///     remote: &remote,
/// };
/// let result = local.slice(8..16)?;
/// let add = endpoint.fetch_atomic(&mut queue, me, &request, &result, 1)?;
/// queue.complete(add, Duration::from_secs(5))?;
/// assert_eq!(local.load_u64(8)?, 40, "the old value");
/// assert_eq!(counter.load_u64(0)?, 42);
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct AtomicRequest<'a> {
    /// Type of the elements.
    pub datatype: Datatype,
    /// The operation.
    pub operation: AtomicOperation,
    /// The operands, one per element; their count is the number of elements.
    pub operand: &'a RegionSlice,
    /// The elements at the peer: aligned to their size, and at least as long as the operands.
    pub remote: &'a RemoteSlice,
}

impl Endpoint {
    /// Changes remote elements (`fi_atomic`).
    ///
    /// # Errors
    /// `NotSupported` without `Caps::ATOMIC` or for this combination of type and
    /// operation; `OutOfBounds`, `AccessDenied`; `InvalidArgument` if a local buffer or
    /// the remote address is not aligned for the type.
    pub fn atomic(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        request: &AtomicRequest<'_>,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.post_atomic(queue, to, request, (None, None), options.into())
    }

    /// Changes remote elements and returns the old values (`fi_fetch_atomic`). With
    /// [`AtomicOperation::Sum`] this is fetch-and-add.
    ///
    /// # Errors
    /// As [`atomic`](Self::atomic).
    pub fn fetch_atomic(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        request: &AtomicRequest<'_>,
        result: &RegionSlice,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.post_atomic(queue, to, request, (None, Some(result)), options.into())
    }

    /// Changes remote elements if a comparison holds, and returns the old values
    /// (`fi_compare_atomic`). With [`AtomicOperation::CompareSwap`] this is compare-and-swap.
    ///
    /// # Errors
    /// As [`atomic`](Self::atomic).
    pub fn compare_atomic(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        request: &AtomicRequest<'_>,
        compare: &RegionSlice,
        result: &RegionSlice,
        options: impl Into<PostOptions>,
    ) -> Result<OperationId> {
        self.post_atomic(queue, to, request, (Some(compare), Some(result)), options.into())
    }

    fn post_atomic(
        &mut self,
        queue: &mut CompletionQueue,
        to: Peer,
        request: &AtomicRequest<'_>,
        (with, result): (Option<&RegionSlice>, Option<&RegionSlice>),
        options: PostOptions,
    ) -> Result<OperationId> {
        let (operation, form) = match (with, result) {
            (None, None) => ("fi_atomic", AtomicForm::Plain),
            (None, Some(_)) => ("fi_fetch_atomic", AtomicForm::Fetch),
            (Some(_), _) => ("fi_compare_atomic", AtomicForm::Compare),
        };
        self.check_no_flags(operation, &options)?;
        let (peer, count) = self.check_atomic(operation, to, request, form)?;
        if let Some(with) = with {
            self.check_operand(operation, request, with, Access::WRITE)?;
        }
        if let Some(result) = result {
            self.check_operand(operation, request, result, Access::READ)?;
        }
        let nothing = (std::ptr::null_mut(), 0, std::ptr::null_mut());
        let (operand, _, descriptor) = parts(request.operand);
        let (compared, _, compared_descriptor) = with.map_or(nothing, parts);
        let (brought, _, brought_descriptor) = result.map_or(nothing, parts);
        let (address, key) = request.remote.address();
        let (datatype, op) = (request.datatype.number(), request.operation.number());
        self.post(
            (operation, CompletionKind::Atomic, to),
            &options,
            queue,
            |slot| {
                let slices = [Some(request.operand), with, result];
                slices.into_iter().flatten().for_each(|slice| slot.keep_region(slice.as_region()));
                slot.keep_mapped_key(request.remote.mapped_key());
            },
            #[allow(unsafe_code)]
            // SAFETY: the slot keeps all buffers alive until completion.
            |endpoint, context| unsafe {
                match form {
                    AtomicForm::Plain => sys::fi_atomic(
                        endpoint, operand, count, descriptor, peer, address, key, datatype, op,
                        context,
                    ),
                    AtomicForm::Fetch => sys::fi_fetch_atomic(
                        endpoint,
                        operand,
                        count,
                        descriptor,
                        brought,
                        brought_descriptor,
                        peer,
                        address,
                        key,
                        datatype,
                        op,
                        context,
                    ),
                    AtomicForm::Compare => sys::fi_compare_atomic(
                        endpoint,
                        operand,
                        count,
                        descriptor,
                        compared,
                        compared_descriptor,
                        brought,
                        brought_descriptor,
                        peer,
                        address,
                        key,
                        datatype,
                        op,
                        context,
                    ),
                }
            },
        )
    }

    fn check_operand(
        &self,
        operation: &'static str,
        request: &AtomicRequest<'_>,
        slice: &RegionSlice,
        access: Access,
    ) -> Result<()> {
        self.check_local(operation, slice, access)?;
        let (size, length) = (request.datatype.size(), request.operand.len());
        let is_aligned = (slice.as_ptr() as usize).is_multiple_of(size);
        self.ensure(is_aligned, operation, ErrorKind::InvalidArgument, || {
            format!("a buffer is not aligned to {size} bytes")
        })?;
        self.ensure(slice.len() == length, operation, ErrorKind::OutOfBounds, || {
            format!("buffers of {length} and {} bytes", slice.len())
        })
    }

    fn check_atomic(
        &self,
        operation: &'static str,
        to: Peer,
        request: &AtomicRequest<'_>,
        form: AtomicForm,
    ) -> Result<(u64, usize)> {
        self.ensure(self.limits.has_atomic, operation, ErrorKind::NotSupported, || {
            "the endpoint has no atomics. Request Caps::ATOMIC".to_owned()
        })?;
        let (size, length) = (request.datatype.size(), request.operand.len());
        let is_whole = length > 0 && length.is_multiple_of(size);
        self.ensure(is_whole, operation, ErrorKind::InvalidArgument, || {
            format!("{length} bytes are not a multiple of {:?}", request.datatype)
        })?;
        let count = length / size;
        let limit = self.domain.atomic_limit(request.datatype, request.operation, form);
        self.ensure(limit.is_some(), operation, ErrorKind::NotSupported, || {
            format!("{:?} on {:?}", request.operation, request.datatype)
        })?;
        let limit = limit.unwrap_or(0);
        self.ensure(count <= limit, operation, ErrorKind::OutOfBounds, || {
            format!("{count} elements, the provider takes {limit} at once")
        })?;
        self.check_operand(operation, request, request.operand, Access::WRITE)?;
        // A form that returns the old value needs read access, whatever the operation.
        let needed = match (form, request.operation) {
            (_, AtomicOperation::Read) => Access::REMOTE_READ,
            (AtomicForm::Plain, _) => Access::REMOTE_WRITE,
            _ => Access::REMOTE_READ | Access::REMOTE_WRITE,
        };
        self.check_range(operation, request.remote, length, needed)?;
        // Providers pass the address to the processor or the card unchanged. Without
        // FI_MR_VIRT_ADDR, it is the offset in the region.
        let (address, _) = request.remote.address();
        self.ensure(
            address.is_multiple_of(size as u64),
            operation,
            ErrorKind::InvalidArgument,
            || format!("the remote address {address:#x} is not aligned to {size} bytes"),
        )?;
        Ok((self.resolve(operation, to)?, count))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{AddressVector, Caps, EndpointKind, HostMemory, MemoryRegion, Query, RemoteMemory};

    /// Addresses of the buffers of a request.
    struct Offsets {
        operand: usize,
        compared: usize,
        result: usize,
        remote: u64,
    }

    const VALID: Offsets = Offsets { operand: 0, compared: 8, result: 16, remote: 24 };

    struct Opened {
        endpoint: Endpoint,
        queue: CompletionQueue,
        me: Peer,
        local: MemoryRegion,
        remote: RemoteMemory,
    }

    impl Opened {
        fn compare(&mut self, datatype: Datatype, offsets: &Offsets) -> Result<OperationId> {
            let size = datatype.size();
            let part = |at: usize| self.local.slice(at..at + size).unwrap();
            let remote = self.remote.slice(offsets.remote..offsets.remote + size as u64).unwrap();
            let operation = AtomicOperation::CompareSwap;
            let operand = &part(offsets.operand);
            let request = AtomicRequest { datatype, operation, operand, remote: &remote };
            let (compared, result) = (part(offsets.compared), part(offsets.result));
            let Self { endpoint, queue, me, .. } = self;
            endpoint.compare_atomic(queue, *me, &request, &compared, &result, 1)
        }
    }

    #[test]
    fn unaligned_atomics_are_refused() {
        let caps = Caps::MESSAGE | Caps::RMA | Caps::ATOMIC;
        let query = Query::new(EndpointKind::Rdm).caps(caps).provider("tcp;ofi_rxm");
        let domain = Domain::open(&query.source("127.0.0.1").first().unwrap()).unwrap();
        let addresses = AddressVector::open(&domain).unwrap();
        let mut queue = CompletionQueue::open(&domain).unwrap();
        let builder = Endpoint::builder(&domain).addresses(&addresses);
        let endpoint = builder.queue(&mut queue).open().unwrap();
        let me = addresses.insert(&endpoint.address().unwrap()).unwrap();
        let register = || domain.register(HostMemory::zeroed(64).unwrap(), Access::ALL).unwrap();
        let (local, target) = (register(), register());
        let remote = domain.attach(&target.describe().unwrap()).unwrap();
        let mut opened = Opened { endpoint, queue, me, local, remote };
        let is_known = |datatype: &&Datatype| {
            let (operation, form) = (AtomicOperation::CompareSwap, AtomicForm::Compare);
            domain.atomic_limit(**datatype, operation, form).is_some()
        };
        let mut tried = 0;
        for &datatype in Datatype::ALL.iter().filter(is_known) {
            let size = datatype.size();
            for off in 1..size {
                let bad = [
                    (Offsets { operand: off, ..VALID }, "buffer"),
                    (Offsets { compared: 8 + off, ..VALID }, "buffer"),
                    (Offsets { result: 16 + off, ..VALID }, "buffer"),
                    (Offsets { remote: 24 + off as u64, ..VALID }, "remote address"),
                ];
                for (offsets, what) in bad {
                    let refused = opened.compare(datatype, &offsets).unwrap_err();
                    assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
                    assert!(refused.to_string().contains(what), "{refused}");
                }
            }
            // A type of one byte needs no alignment.
            let offsets = Offsets { remote: 24 + size as u64, ..VALID };
            let posted = opened.compare(datatype, &offsets).unwrap();
            opened.queue.complete(posted, Duration::from_secs(10)).unwrap();
            tried += 1;
        }
        assert!(tried > 4, "{tried} types");
    }
}
