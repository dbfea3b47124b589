//! Structures and numbers of the PMIx interface.
//!
//! They are equal in PMIx 3 to 6. In PMIx 2 a value has 24 bytes, so that version is refused.

use std::ffi::{CStr, c_char};

/// The oldest major version with these structures.
pub(super) const MIN_MAJOR_VERSION: u32 = 3;

/// `PMIX_SUCCESS`.
pub(super) const SUCCESS: i32 = 0;
/// `PMIX_ERR_TIMEOUT`.
pub(super) const TIMEOUT: i32 = -24;
/// `PMIX_ERR_UNREACH`.
pub(super) const UNREACHABLE: i32 = -25;
/// `PMIX_ERR_NOT_FOUND`.
pub(super) const NOT_FOUND: i32 = -46;
/// `PMIX_ERR_COMM_FAILURE`.
pub(super) const COMMUNICATION_FAILED: i32 = -49;
/// `PMIX_ERR_PARTIAL_SUCCESS`: of a fence, that a process left the job before it.
pub(super) const PARTIAL_SUCCESS: i32 = -52;
/// `PMIX_ERR_LOST_CONNECTION`.
pub(super) const LOST_CONNECTION: i32 = -61;
/// `PMIX_OPERATION_SUCCEEDED`: done at once, no callback follows.
pub(super) const OPERATION_SUCCEEDED: i32 = -157;
/// `PMIX_ERR_PROC_TERM_WO_SYNC`: a process ended without telling the launcher.
pub(super) const PROCESS_TERMINATED: i32 = -200;

/// `PMIX_RANK_WILDCARD`: all ranks of a job.
pub(super) const ALL_RANKS: u32 = u32::MAX - 1;
/// `PMIX_GLOBAL`: for processes of this machine and of others.
pub(super) const SCOPE_GLOBAL: u8 = 3;

/// `PMIX_JOB_SIZE`.
pub(super) const JOB_SIZE: &CStr = c"pmix.job.size";
/// `PMIX_LOCAL_RANK`.
pub(super) const LOCAL_RANK: &CStr = c"pmix.lrank";
/// `PMIX_LOCAL_SIZE`.
pub(super) const LOCAL_SIZE: &CStr = c"pmix.local.size";
/// `PMIX_LOCAL_PEERS`: the ranks on this machine, separated by commas.
pub(super) const LOCAL_PEERS: &CStr = c"pmix.lpeers";
/// `PMIX_COLLECT_DATA`: a fence also distributes what was put.
pub(super) const COLLECT_DATA: &CStr = c"pmix.collect";
/// `PMIX_IMMEDIATE`: the server answers from what it has.
pub(super) const IMMEDIATE: &CStr = c"pmix.immediate";
/// `PMIX_TIMEOUT`, in seconds.
pub(super) const TIMEOUT_SECONDS: &CStr = c"pmix.timeout";

/// The types of values that are used here.
pub(super) mod kind {
    pub(in super::super) const BOOL: u16 = 1;
    pub(in super::super) const STRING: u16 = 3;
    pub(in super::super) const SIZE: u16 = 4;
    pub(in super::super) const INT: u16 = 6;
    pub(in super::super) const INT32: u16 = 9;
    pub(in super::super) const UINT: u16 = 11;
    pub(in super::super) const UINT16: u16 = 13;
    pub(in super::super) const UINT32: u16 = 14;
    pub(in super::super) const UINT64: u16 = 15;
    pub(in super::super) const BYTE_OBJECT: u16 = 27;
    pub(in super::super) const PROC_RANK: u16 = 40;
}

/// `pmix_proc_t`: a process, by its job and rank.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Proc {
    pub(super) nspace: [c_char; 256],
    pub(super) rank: u32,
}

/// `pmix_byte_object_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ByteObject {
    pub(super) bytes: *mut c_char,
    pub(super) size: usize,
}

/// The union in `pmix_value_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Data {
    pub(super) flag: bool,
    pub(super) string: *mut c_char,
    pub(super) size: usize,
    pub(super) int32: i32,
    pub(super) uint16: u16,
    pub(super) uint32: u32,
    pub(super) uint64: u64,
    pub(super) bytes: ByteObject,
    /// Space for the largest member, an environment variable: two pointers and a character.
    pub(super) words: [u64; 3],
}

/// `pmix_value_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Value {
    pub(super) kind: u16,
    pub(super) data: Data,
}

/// `pmix_info_t`: an option of a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Info {
    key: [c_char; 512],
    flags: u32,
    value: Value,
}

impl Proc {
    /// The process of this rank in the same job.
    pub(super) fn with_rank(&self, rank: u32) -> Self {
        Self { rank, ..*self }
    }

    /// The job's name; None if it is not terminated, empty or not UTF-8.
    pub(super) fn job(&self) -> Option<String> {
        let bytes = self.nspace.map(|character| character as u8);
        let name = CStr::from_bytes_until_nul(&bytes).ok()?.to_str().ok()?;
        (!name.is_empty()).then(|| name.to_owned())
    }
}

impl Data {
    const ZERO: Self = Self { words: [0; 3] };
}

impl Value {
    /// Bytes that the library only reads.
    pub(super) fn bytes(bytes: &[u8]) -> Self {
        let mut data = Data::ZERO;
        // An empty slice points to no memory at all.
        if !bytes.is_empty() {
            let pointer = bytes.as_ptr().cast_mut().cast();
            data.bytes = ByteObject { bytes: pointer, size: bytes.len() };
        }
        Self { kind: kind::BYTE_OBJECT, data }
    }
}

impl Info {
    fn new(key: &CStr, value: Value) -> Self {
        let mut info = Self { key: [0; 512], flags: 0, value };
        for (to, from) in info.key.iter_mut().zip(key.to_bytes()) {
            *to = *from as c_char;
        }
        info
    }

    /// An option that is switched on.
    pub(super) fn flag(key: &CStr) -> Self {
        let mut data = Data::ZERO;
        data.flag = true;
        Self::new(key, Value { kind: kind::BOOL, data })
    }

    /// An option with a number.
    pub(super) fn number(key: &CStr, number: i32) -> Self {
        let mut data = Data::ZERO;
        data.int32 = number;
        Self::new(key, Value { kind: kind::INT, data })
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// What a C compiler prints for the headers of PMIx 3.1, 3.2, 4.0, 4.2, 5.0, 6.0 and 6.1 on a
    /// 64-bit machine.
    #[test]
    fn structures_have_the_layout_of_the_headers() {
        assert_eq!(size_of::<Proc>(), 260);
        assert_eq!(offset_of!(Proc, rank), 256);
        assert_eq!((size_of::<ByteObject>(), offset_of!(ByteObject, size)), (16, 8));
        assert_eq!((size_of::<Value>(), align_of::<Value>()), (32, 8));
        assert_eq!(offset_of!(Value, data), 8);
        assert_eq!(size_of::<Info>(), 552);
        assert_eq!((offset_of!(Info, flags), offset_of!(Info, value)), (512, 520));
    }

    #[test]
    fn job_name_must_be_terminated_text() {
        let proc_of = |name: &[u8]| {
            let mut nspace = [0; 256];
            for (to, from) in nspace.iter_mut().zip(name) {
                *to = *from as c_char;
            }
            Proc { nspace, rank: 0 }
        };
        assert_eq!(proc_of(b"4711.1").job().as_deref(), Some("4711.1"));
        assert_eq!(proc_of(&[b'x'; 255]).job().map(|name| name.len()), Some(255));
        assert_eq!(proc_of(&[b'x'; 256]).job(), None);
        assert_eq!(proc_of(b"").job(), None);
        assert_eq!(proc_of(b"\xff").job(), None);
    }
}
