//! Takes the bindings that belong to the installed libfabric headers, and compiles the C part
//! against these headers. If the two disagree about a structure, the build fails.

#[cfg(feature = "regenerate")]
mod regenerate;

use std::env;
use std::path::{Path, PathBuf};

type Version = (u32, u32);

fn main() {
    for file in ["shim.h", "shim.c", "src/bindings"] {
        println!("cargo::rerun-if-changed={file}");
    }
    if let Err(message) = build() {
        println!("cargo::error={message}");
    }
}

fn build() -> Result<(), String> {
    let library =
        pkg_config::Config::new().atleast_version("1.17").probe("libfabric").map_err(|error| {
            format!(
                "libfabric 1.17 or newer was not found by pkg-config. On Debian and Ubuntu install \
                 libfabric-dev (scripts/setup does it); for a build of your own set PKG_CONFIG_PATH to \
                 the directory of its libfabric.pc. pkg-config said: {error}"
            )
        })?;
    // `links = "fabric"`: dependents read this as DEP_FABRIC_VERSION.
    println!("cargo::metadata=version={}", library.version);
    let installed = version(&library.version)
        .ok_or_else(|| format!("libfabric has an unknown version: {}", library.version))?;

    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let directory = here.join("src/bindings");
    #[cfg(feature = "regenerate")]
    regenerate::write(installed, &library.include_paths, &directory);
    let shipped = shipped(&directory, installed)
        .ok_or_else(|| format!("{} has no bindings", directory.display()))?;
    println!("cargo::rustc-env=LIBFABRIC_BINDINGS={}", shipped.with_extension("rs").display());

    cc::Build::new()
        .file("shim.c")
        .file(shipped.with_extension("c"))
        .include(here)
        .includes(&library.include_paths)
        // The wrappers mirror libfabric's own inline functions, warnings included.
        .warnings(false)
        .opt_level(2)
        .try_compile("fabricast_shim")
        .map_err(|error| {
            format!(
                "the bindings of {} do not fit the headers of libfabric {}; the compiler's messages \
                 name the structures that differ. Make bindings for this version: \
                 scripts/make-bindings, which needs libclang. {error}",
                shipped.file_stem().unwrap_or_default().display(),
                library.version
            )
        })
}

/// The newest bindings that are not newer than the headers, without the extension.
fn shipped(directory: &Path, installed: Version) -> Option<PathBuf> {
    let files = directory.read_dir().ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let made_for = |path: &Path| version(path.file_stem()?.to_str()?.strip_prefix("libfabric-")?);
    let known = files.filter_map(|path| Some((made_for(&path)?, path)));
    known.filter(|(made_for, _)| *made_for <= installed).max().map(|(_, path)| path)
}

fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}
