//! The kernels: shipped as PTX text, compiled by the driver when the device is opened.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys;
use threads::lock;

use super::{Context, CurrentContext};
use crate::error::Result;

/// Threads of a block that copies a list: the size of the largest team.
const COPY_THREADS: u32 = 512;
/// Blocks that copy a list. For 10 000 pieces of 64 KiB from H200 to H200 by NVLink, 64 blocks
/// moved 368 GB/s, 32 moved 345 to 356 and 132 moved 369: more blocks only take processors from
/// other kernels.
const COPY_BLOCKS: u64 = 64;
const CHECKSUM_THREADS: u32 = 256;
/// Threads of a block of an exchange.
const EXCHANGE_THREADS: u32 = 512;
/// Enough to keep the memory of any device busy; each thread takes many words.
const CHECKSUM_BLOCKS: u64 = 1024;

#[derive(Debug, Clone, Copy)]
pub(super) enum Kernel {
    Checksum,
    CopyList,
    Exchange,
}

impl Kernel {
    /// Text and name, both zero-terminated.
    fn source(self) -> (&'static str, &'static CStr) {
        match self {
            Self::Checksum => (concat!(include_str!("checksum.ptx"), "\0"), c"checksum"),
            Self::CopyList => (concat!(include_str!("copy_list.ptx"), "\0"), c"copy_list"),
            Self::Exchange => (concat!(include_str!("exchange.ptx"), "\0"), c"exchange"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaunchConfig {
    blocks: u32,
    threads: u32,
}

/// For a checksum of this many bytes.
pub(super) fn checksum_launch(length: u64) -> LaunchConfig {
    let threads = CHECKSUM_THREADS;
    let blocks = length.div_ceil(8 * u64::from(threads)).clamp(1, CHECKSUM_BLOCKS) as u32;
    LaunchConfig { blocks, threads }
}

/// For an exchange with so many blocks.
pub(super) fn exchange_launch(blocks: u32) -> LaunchConfig {
    LaunchConfig { blocks, threads: EXCHANGE_THREADS }
}

/// For a list with this many entries and bytes. Also returns the number of threads of a team.
///
/// A lane moves 64 bytes at a time: a team is as large as an average entry keeps busy, so that
/// as many entries as possible are in flight at once.
pub(super) fn copy_launch(entries: u32, bytes: u64) -> (LaunchConfig, u32) {
    let average = bytes / u64::from(entries.max(1));
    let lanes = match average {
        0..2048 => 32,
        2048..8192 => 64,
        _ => COPY_THREADS / 2,
    };
    let teams_per_block = u64::from(COPY_THREADS / lanes);
    let blocks = u64::from(entries).div_ceil(teams_per_block).clamp(1, COPY_BLOCKS) as u32;
    (LaunchConfig { blocks, threads: COPY_THREADS }, lanes)
}

/// The kernels of a context that were loaded so far.
#[derive(Default)]
pub(super) struct Kernels {
    /// One for each [`Kernel`].
    slots: [OnceLock<LoadedKernel>; 3],
    /// One thread loads at a time: unloading a duplicate may take long.
    loading: Mutex<()>,
}

struct LoadedKernel {
    module: sys::CUmodule,
    function: sys::CUfunction,
}

// SAFETY: the driver's modules may be used from any thread.
unsafe impl Send for LoadedKernel {}
// SAFETY: the same.
unsafe impl Sync for LoadedKernel {}

impl Kernels {
    /// Lets the driver compile it, the first time.
    fn function(&self, context: &Context, kernel: Kernel) -> Result<sys::CUfunction> {
        let slot = &self.slots[kernel as usize];
        if let Some(loaded) = slot.get() {
            return Ok(loaded.function);
        }
        let _loading = lock(&self.loading);
        if let Some(loaded) = slot.get() {
            return Ok(loaded.function);
        }
        let operation = "load kernel";
        let (text, name) = kernel.source();
        let functions = context.make_current(operation)?;
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: space for handles; zero-terminated texts.
        unsafe {
            let code = (functions.module_load)(&raw mut module, text.as_ptr().cast());
            context.check(operation, code)?;
            let code = (functions.module_function)(&raw mut function, module, name.as_ptr());
            context.check(operation, code).inspect_err(|_| {
                let _ = (functions.module_unload)(module);
            })?;
        }
        Ok(slot.get_or_init(|| LoadedKernel { module, function }).function)
    }

    /// Compiles all kernels now: the driver loads nothing while a stream waits, so a caller
    /// that needs a kernel then would wait, too. A load error is reported when the kernel is
    /// needed.
    pub(super) fn load_all(&self, context: &Context) {
        for kernel in [Kernel::Checksum, Kernel::CopyList] {
            let _ = self.function(context, kernel);
        }
    }

    /// Launches a kernel on a stream.
    ///
    /// # Safety
    /// The arguments point to values of the kernel's parameter types, in its order. Memory that
    /// they name stays valid until the kernel is done.
    pub(super) unsafe fn launch(
        &self,
        context: &Context,
        functions: &CurrentContext<'_>,
        (kernel, config): (Kernel, LaunchConfig),
        stream: sys::CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let function = self.function(context, kernel)?;
        // SAFETY: the caller's promise; arguments are copied by the launch.
        let code = unsafe {
            (functions.launch)(
                function,
                config.blocks,
                1,
                1,
                config.threads,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        context.check("launch kernel", code)
    }

    /// Must be called before the context is released.
    pub(super) fn unload(self, context: &Context) {
        for loaded in self.slots.into_iter().filter_map(OnceLock::into_inner) {
            let _ = context.call("unload kernel", |functions| {
                // SAFETY: loaded by this object; no kernel of it runs any more.
                unsafe { (functions.module_unload)(loaded.module) }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_fit_entries_and_blocks_fit_teams() {
        let of = |entries, average: u64| {
            let (config, lanes) = copy_launch(entries, average * u64::from(entries));
            assert_eq!(config.threads % lanes, 0);
            (config.blocks, lanes)
        };
        assert_eq!(of(1, 1), (1, 32));
        assert_eq!(of(16, 2047), (1, 32));
        assert_eq!(of(17, 2047), (2, 32));
        assert_eq!(of(4096, 1), (64, 32));
        assert_eq!(of(9, 2048), (2, 64));
        assert_eq!(of(4096, 8191), (64, 64));
        assert_eq!(of(5, 8192), (3, 256));
        assert_eq!(of(128, 65_536), (64, 256));
        assert_eq!(of(129, 65_536), (64, 256));
        assert_eq!(copy_launch(0, 0).0.blocks, 1);
        assert_eq!(checksum_launch(0).blocks, 1);
        assert_eq!(checksum_launch(u64::MAX).blocks, 1024);
    }

    /// The text of the exchange is compiled from the source beside it.
    #[test]
    fn exchange_is_compiled_from_its_source() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/exchange.cu");
        let digest = std::process::Command::new("sha256sum").arg(source).output().unwrap();
        let digest = String::from_utf8(digest.stdout).unwrap();
        let (text, _) = Kernel::Exchange.source();
        let first = text.lines().next().unwrap();
        assert!(first.contains(&digest[..16]), "run scripts/compile-kernels: {first}");
    }

    /// Checks the kernel names in the texts, which otherwise only the driver would refuse.
    #[test]
    fn kernel_texts_contain_the_kernel_names() {
        for kernel in [Kernel::Checksum, Kernel::CopyList, Kernel::Exchange] {
            let (text, name) = kernel.source();
            let name = name.to_str().unwrap();
            assert!(text.contains(&format!(".visible .entry {name}(")), "{name}");
            assert_eq!(text.find('\0'), Some(text.len() - 1));
        }
    }
}
