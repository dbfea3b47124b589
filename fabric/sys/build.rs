//! Selects the bindings of the installed libfabric headers, and compiles the C part against
//! these headers. If the two disagree about a structure, the build fails.

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
    // Only for its headers: src/library.rs loads the library at run time.
    let mut config = pkg_config::Config::new();
    config.atleast_version("1.17").cargo_metadata(false);
    let library = config.probe("libfabric").map_err(|error| {
        format!(
            "libfabric 1.17 or newer was not found by pkg-config. On Debian and Ubuntu install \
             libfabric-dev (scripts/setup does it); for a build of your own set PKG_CONFIG_PATH to \
             the directory of its libfabric.pc. Error of pkg-config: {error}"
        )
    })?;
    // `links = "fabric"`: dependents read this as DEP_FABRIC_VERSION.
    println!("cargo::metadata=version={}", library.version);
    let installed = version(&library.version)
        .ok_or_else(|| format!("libfabric has an unknown version: {}", library.version))?;

    let crate_directory = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let directory = crate_directory.join("src/bindings");
    #[cfg(feature = "regenerate")]
    regenerate::write(installed, &library.include_paths, &directory);
    let candidates = shipped(&directory, installed);
    let mut failed = format!("{} has no bindings", directory.display());
    for bindings in &candidates {
        // The file asserts the layout of all structures, so a file that compiles fits.
        let compiled = cc::Build::new()
            .file("shim.c")
            .file(bindings.with_extension("c"))
            .include(&crate_directory)
            .includes(&library.include_paths)
            // libfabric's own inline functions cause warnings.
            .warnings(false)
            .cargo_warnings(false)
            .opt_level(2)
            .try_compile("fabricast_shim");
        match compiled {
            Ok(()) => {
                let rust = bindings.with_extension("rs");
                println!("cargo::rustc-env=LIBFABRIC_BINDINGS={}", rust.display());
                return Ok(());
            }
            Err(error) => failed = error.to_string(),
        }
    }
    Err(format!(
        "none of the bindings in {} fits the headers of libfabric {}. Generate bindings for this \
         version with scripts/make-bindings, which needs libclang. Last compiler error: {failed}",
        directory.display(),
        library.version
    ))
}

/// All bindings, without the extension, in the order in which they are tried: first those that
/// are not newer than the headers, newest first, then the others.
fn shipped(directory: &Path, installed: Version) -> Vec<PathBuf> {
    let files = directory.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let rust = files.filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let made_for = |path: &Path| version(path.file_stem()?.to_str()?.strip_prefix("libfabric-")?);
    let mut candidates: Vec<_> = rust.filter_map(|path| Some((made_for(&path)?, path))).collect();
    candidates.sort();
    let newer =
        candidates.split_off(candidates.partition_point(|(made_for, _)| *made_for <= installed));
    candidates.into_iter().rev().chain(newer).map(|(_, path)| path).collect()
}

fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}
