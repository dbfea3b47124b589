//! Generates the bindings against the libfabric headers that pkg-config finds.

use bindgen::callbacks::{IntKind, ParseCallbacks};
use std::env;
use std::path::PathBuf;

/// Gives libfabric's macros the types of the fields and arguments they are for;
/// by itself bindgen would pick the smallest type that holds each value.
#[derive(Debug)]
struct MacroTypes;

impl ParseCallbacks for MacroTypes {
    fn int_macro(&self, name: &str, value: i64) -> Option<IntKind> {
        let fits = i32::try_from(value).is_ok();
        let error_number = name.starts_with("FI_E") && !name.starts_with("FI_EVENT");
        let kind = if name.ends_with("_VERSION") {
            IntKind::U32
        } else if fits && (error_number || name.starts_with("FI_MR_")) {
            IntKind::I32
        } else {
            IntKind::U64
        };
        Some(kind)
    }
}

fn main() {
    println!("cargo::rerun-if-changed=shim.h");
    println!("cargo::rerun-if-changed=shim.c");

    let library = match pkg_config::Config::new().atleast_version("1.17").probe("libfabric") {
        Ok(library) => library,
        Err(error) => {
            println!(
                "cargo::error=libfabric 1.17 or newer was not found by pkg-config. On Debian and \
                 Ubuntu install libfabric-dev (scripts/setup does it); for a build of your own set \
                 PKG_CONFIG_PATH to the directory of its libfabric.pc. pkg-config said: {error}"
            );
            return;
        }
    };
    // `links = "fabric"`: dependents read this as DEP_FABRIC_VERSION.
    println!("cargo::metadata=version={}", library.version);

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let wrappers = out.join("inline_functions.c");
    let mut builder = bindgen::Builder::default()
        .header("shim.h")
        .allowlist_function("fi_.*|fcs_.*")
        .allowlist_type("fi_.*|fid.*|fcs_.*")
        .allowlist_var("FI_.*")
        .prepend_enum_name(false)
        .derive_default(true)
        .generate_comments(false)
        .layout_tests(true)
        .parse_callbacks(Box::new(MacroTypes))
        .wrap_static_fns(true)
        .wrap_static_fns_path(&wrappers);
    for path in &library.include_paths {
        builder = builder.clang_arg(format!("-I{}", path.display()));
    }
    builder
        .generate()
        .expect("bindgen could not read libfabric's headers")
        .write_to_file(out.join("bindings.rs"))
        .expect("the bindings could not be written");

    let here = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    cc::Build::new()
        .file("shim.c")
        .file(&wrappers)
        .include(here)
        .includes(&library.include_paths)
        // The wrappers mirror libfabric's own inline functions, warnings included.
        .warnings(false)
        .opt_level(2)
        .compile("fabricast_shim");
}
