//! Generates the bindings from the installed headers: a Rust file, and a C file that fails to
//! compile if the layout of a structure differs.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use bindgen::callbacks::{IntKind, ParseCallbacks};

/// Functions that the library exports and the fabric crate calls.
const FUNCTIONS: &str = "fi_(dupinfo|fabric|freeinfo|getinfo|open|strerror|tostr_r|version)";

/// Structures that the crate uses and no function names.
const TYPES: &str = "fi_context2|fi_hmem_iface|fi_cq_(data|tagged)_entry|fi_eq_cm_entry|fi_atomic_attr|\
                     fi_mr_(raw_attr|map_raw)|fid_(av|cntr|cq|domain|ep|eq|fabric|mr|pep)";

/// Structures whose fields are not used by name.
const OPAQUE: &str = "fi_ops_(collective|wait)|fid_wait|fi_bus_attr";

/// Structures that src/lib.rs declares, without their fields.
const DECLARED: &str =
    "fi_(av_set|collective|mr|poll|wait)_attr|fi_ioc|fi_msg_atomic|fid_(av_set|mc|poll|stx)";

/// Gives libfabric's macros the types of the fields and arguments that they are for; by default
/// bindgen picks the smallest type that holds each value.
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

/// Writes `libfabric-MAJOR.MINOR.rs` and `.c`.
pub(crate) fn write((major, minor): (u32, u32), includes: &[PathBuf], directory: &Path) {
    let rust = directory.join(format!("libfabric-{major}.{minor}.rs"));
    let c = rust.with_extension("c");
    bindgen::Builder::default()
        .header("shim.h")
        .clang_args(includes.iter().map(|path| format!("-I{}", path.display())))
        .allowlist_function(FUNCTIONS)
        .allowlist_function("fcs_.*")
        .allowlist_type(TYPES)
        .allowlist_var("FI_.*")
        .opaque_type(OPAQUE)
        .blocklist_type(DECLARED)
        .prepend_enum_name(false)
        .derive_default(true)
        .no_default("fid.*|fi_ops.*|fi_info|fi_(tx|rx|ep|domain|fabric)_attr")
        .generate_comments(false)
        .layout_tests(true)
        .parse_callbacks(Box::new(MacroTypes))
        .generate()
        .expect("bindgen failed to read libfabric's headers")
        .write_to_file(&rust)
        .expect("writing the bindings failed");
    let text = std::fs::read_to_string(&rust).expect("reading the bindings failed");
    std::fs::write(&c, layout(&text)).expect("writing the layout failed");
}

/// Translates bindgen's layout tests to C. Each is a line `["Size of NAME"][… - Nusize];` or
/// `["Offset of field: NAME::FIELD"][… - Nusize];`, which may be broken in two.
fn layout(bindings: &str) -> String {
    let mut out = String::from("#include \"shim.h\"\n\n#include <stddef.h>\n\n// Layout\n\n");
    for test in bindings.split("[\"").skip(1) {
        let Some((what, rest)) = test.split_once("\"]") else { continue };
        let Some((number, _)) = rest.split_once("usize]") else { continue };
        let number = number.rsplit(' ').next().unwrap_or_default();
        let (name, field) = match what.split_once(' ') {
            Some(("Size", name)) => (name.trim_start_matches("of "), None),
            Some(("Offset", name)) => {
                match name.trim_start_matches("of field: ").split_once("::") {
                    Some((name, field)) => (name, Some(field.trim_end_matches('_'))),
                    None => continue,
                }
            }
            _ => continue,
        };
        // Tables of functions may grow; an item without a C name cannot be checked.
        let is_nameless = [name, field.unwrap_or_default()].iter().any(|it| it.contains("bindgen"));
        if is_nameless || !name.starts_with("fi") || (field.is_none() && name.starts_with("fi_ops"))
        {
            continue;
        }
        let asked = match field {
            Some(field) => format!("offsetof(struct {name}, {field})"),
            None => format!("sizeof(struct {name})"),
        };
        writeln!(out, "_Static_assert({asked} == {number}, \"{asked}\");").expect("a string");
    }
    out
}
