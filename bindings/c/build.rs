//! Sets the soname of the shared library, whose number is `FABRICAST_ABI` in `include/fabricast.h`.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let header = Path::new("include/fabricast.h");
    println!("cargo::rerun-if-changed={}", header.display());
    let text = std::fs::read_to_string(header).unwrap_or_default();
    let number = text
        .lines()
        .find_map(|line| line.strip_prefix("#define FABRICAST_ABI "))
        .and_then(|number| number.trim().parse::<u32>().ok());
    let Some(number) = number else {
        println!("cargo::error={} does not define FABRICAST_ABI", header.display());
        return;
    };
    println!("cargo::rustc-env=FABRICAST_ABI={number}");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libfabricast.so.{number}");
    // Threads of the library may run until the process exits: its code must not be unloaded.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
