//! Makes the bindings from the installed headers: a Rust file, and a C file with wrappers of the
//! functions that libfabric declares `static inline` and with the layout of each structure.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use bindgen::callbacks::{IntKind, ParseCallbacks};

/// What the fabric crate calls.
const FUNCTIONS: [&str; 50] = [
    "fi_accept",
    "fi_atomic",
    "fi_av_insert",
    "fi_av_lookup",
    "fi_av_open",
    "fi_close",
    "fi_cntr_open",
    "fi_cntr_read",
    "fi_cntr_readerr",
    "fi_compare_atomic",
    "fi_connect",
    "fi_cq_open",
    "fi_cq_readerr",
    "fi_cq_readfrom",
    "fi_cq_sread",
    "fi_cq_sreadfrom",
    "fi_domain",
    "fi_domain_bind",
    "fi_dupinfo",
    "fi_enable",
    "fi_endpoint",
    "fi_ep_bind",
    "fi_eq_open",
    "fi_eq_read",
    "fi_eq_readerr",
    "fi_fabric",
    "fi_fetch_atomic",
    "fi_freeinfo",
    "fi_getinfo",
    "fi_getname",
    "fi_inject",
    "fi_inject_write",
    "fi_inject_writedata",
    "fi_listen",
    "fi_mr_desc",
    "fi_mr_key",
    "fi_open",
    "fi_passive_ep",
    "fi_pep_bind",
    "fi_readmsg",
    "fi_reject",
    "fi_sendmsg",
    "fi_shutdown",
    "fi_strerror",
    "fi_tinject",
    "fi_tostr_r",
    "fi_trecv",
    "fi_tsendmsg",
    "fi_version",
    "fi_writemsg",
];

/// Structures that it uses and no function names.
const TYPES: &str = "fi_context2|fi_hmem_iface|fi_cq_(data|tagged)_entry|fi_eq_cm_entry";

/// Structures in which nothing is looked up by name here.
const OPAQUE: &str = "fi_ops|fi_ops_(atomic|av|cm|cntr|collective|domain|ep|eq|fabric|mr|tagged|wait)|fid_wait|fi_bus_attr";

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

/// Writes `libfabric-MAJOR.MINOR.rs` and `.c`.
pub(crate) fn write((major, minor): (u32, u32), includes: &[PathBuf], directory: &Path) {
    let rust = directory.join(format!("libfabric-{major}.{minor}.rs"));
    let c = rust.with_extension("c");
    bindgen::Builder::default()
        .header("shim.h")
        .clang_args(includes.iter().map(|path| format!("-I{}", path.display())))
        .allowlist_function(FUNCTIONS.join("|"))
        .allowlist_function("fcs_.*")
        .allowlist_type(TYPES)
        .allowlist_var("FI_.*")
        .opaque_type(OPAQUE)
        .prepend_enum_name(false)
        .derive_default(true)
        .no_default("fid.*|fi_ops.*|fi_info|fi_(tx|rx|ep|domain|fabric)_attr")
        .generate_comments(false)
        .layout_tests(true)
        .parse_callbacks(Box::new(MacroTypes))
        .wrap_static_fns(true)
        .wrap_static_fns_path(&c)
        .generate()
        .expect("bindgen could not read libfabric's headers")
        .write_to_file(&rust)
        .expect("the bindings could not be written");
    let text = std::fs::read_to_string(&rust).expect("the bindings could not be read");
    let mut wrappers = std::fs::read_to_string(&c).expect("the wrappers could not be read");
    wrappers.push_str(&layout(&text));
    std::fs::write(&c, wrappers).expect("the wrappers could not be written");
}

/// What bindgen's tests of the layout say, as C has it: each is a line `["Size of NAME"][… - Nusize];`
/// or `["Offset of field: NAME::FIELD"][… - Nusize];`, which may be broken in two.
fn layout(bindings: &str) -> String {
    let mut out = String::from("\n#include <stddef.h>\n\n// Layout\n\n");
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
        // Tables of functions may grow; what has no name in C cannot be named there.
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
